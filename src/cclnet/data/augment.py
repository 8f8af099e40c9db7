"""Batched augmentation on the device: sample the parameters of a batch on the host, then apply them in one function.

Every operation takes one parameter per image, [n], and equals its torchvision.transforms.v2 counterpart, except that
rotation, zoom and shear mirror the image at its edges, where torchvision fills with one colour. Pixels are interpolated
bicubically: bilinear interpolation blurs the training images, and a network that has never seen a sharp texture takes
sharp test images for classes with a rough surface (docs/fine_tuning.md). Geometry maps
uint8 images [n, 3, h, w] to uint8; colour operations work on three float planes in [0, 1], red, green and blue,
[n, h, w] each, which let the compiler keep a pixel in registers. No function branches on data and every shape is
static. Colour operations update their own results in place, which is much faster in eager mode on a CPU.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from cclnet.settings import AugmentSettings

Planes = tuple[Tensor, Tensor, Tensor]
GREY = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue
Floats = npt.NDArray[np.floating[Any]]
ERASED_AREA, ERASED_RATIO = (0.02, 0.33), (0.3, 3.3)  # share of the crop, and height over width, of torchvision
TRIVIAL = ("identity", "brightness", "contrast", "saturation", "sharpness", "posterize", "autocontrast")
FEWEST_BITS = 2  # of posterize at full strength
ATTEMPTS = 10  # to sample a resized crop that fits into the image, before the whole image is used


class Parameters(NamedTuple):
    """Augmentation parameters of each image, [n] each. A batch carries them as one table [n, 28], one column each."""

    image_height: Any
    image_width: Any
    top: Any  # the box that is cropped, in pixels
    left: Any
    height: Any
    width: Any
    degrees: Any
    horizontal: Any  # 1 to flip, else 0
    vertical: Any
    brightness: Any
    contrast: Any
    saturation: Any
    hue: Any
    share: Any  # weight of the image itself in mixup; 1 for no mixing
    patch_top: Any  # the rectangle that cutmix takes from the previous image; empty for none
    patch_left: Any
    patch_bottom: Any
    patch_right: Any
    zoom: Any  # magnification
    shear: Any  # degrees
    sharpness: Any  # 1 for none
    bits: Any  # of posterize; 8 for none
    autocontrast: Any  # 1 for yes, else 0
    erase_top: Any  # the rectangle that is erased; empty for none
    erase_left: Any
    erase_bottom: Any
    erase_right: Any
    transpose: Any  # 1 to mirror at the diagonal, else 0

    def own_share(self, crop: int) -> Any:
        """Return the share of each image that is its own after mixup and cutmix: the weight of its label."""
        patch = (self.patch_bottom - self.patch_top) * (self.patch_right - self.patch_left)
        return self.share * (1.0 - patch / crop**2)


def sample_parameters(
    settings: AugmentSettings, generator: np.random.Generator, count: int, taken: npt.NDArray[np.intp],
    heights: npt.NDArray[np.integer[Any]], widths: npt.NDArray[np.integer[Any]],
) -> Parameters:  # fmt: skip
    """Sample for a batch of ``count`` images; return the parameters (numpy arrays) of those ``taken`` from it, whose
    sizes are ``heights`` and ``widths``. Every operation has its own random numbers, so switching one on does not
    change the others."""
    uniform = generator.random((count, 13))[taken].T
    attempts = generator.random((count, 2, ATTEMPTS))[taken] if settings.resized_crop else None
    mixup_share = generator.beta(settings.mixup, settings.mixup, count)[taken] if settings.mixup else None
    cutmix_share = generator.beta(settings.cutmix, settings.cutmix, count)[taken] if settings.cutmix else None
    # From generators of their own, so that the other numbers are those of earlier versions.
    second, third = generator.spawn(2)
    more = second.random((count, 9))[taken].T
    orientation, warp = third.random((count, 2))[taken].T
    warped = warp < settings.warp
    crop = np.full(len(heights), settings.crop)
    top, left = (_integers_below(uniform[i], side - crop + 1) for i, side in enumerate((heights, widths)))
    box: tuple[Any, ...] = top, left, crop, crop
    if attempts is not None:
        resized = _resized_boxes(uniform[:2], attempts, settings, heights, widths)
        box = tuple(np.where(warped, own, plain) for own, plain in zip(resized, box, strict=True))

    def factor(numbers: Floats, strength: float) -> Floats:
        least = max(0.0, 1.0 - strength)
        return least + (1.0 + strength - least) * numbers

    colour: dict[str, Any] = {
        "brightness": factor(uniform[5], settings.brightness),
        "contrast": factor(uniform[6], settings.contrast),
        "saturation": factor(uniform[7], settings.saturation),
        "hue": settings.hue * (2.0 * uniform[8] - 1.0),
        "sharpness": np.ones(len(heights)),
        "bits": np.full(len(heights), 8),
        "autocontrast": np.zeros(len(heights)),
    }
    if settings.trivial_colour:
        colour = _trivial_colour(more[0], more[1], settings.trivial_colour)
    smallest, largest = settings.zoom or (1.0, 1.0)
    top, left, height, width = box
    return Parameters(
        heights, widths, top, left, height, width,
        degrees=warped * settings.rotation * (2.0 * uniform[2] - 1.0),
        horizontal=uniform[3] < settings.horizontal_flip,
        vertical=uniform[4] < settings.vertical_flip,
        zoom=np.where(warped, smallest * (largest / smallest) ** more[2], 1.0),
        shear=warped * settings.shear * (2.0 * more[3] - 1.0),
        **colour,
        **_mixing(uniform[9:], mixup_share, cutmix_share, settings.crop),
        **_erased(more[4:], settings.erasing, settings.crop),
        transpose=orientation < settings.transpose,
    )  # fmt: skip


def _trivial_colour(choice: Floats, magnitude: Floats, strength: float) -> dict[str, Any]:
    """Choose one operation of ``TRIVIAL`` per image, all equally often, with a uniform magnitude. Factors are in
    [1 − strength, 1 + strength]. Solarize and equalize of TrivialAugment are left out: they invert or redistribute the
    colours, which are a finding in medical images."""
    chosen = _integers_below(choice, len(TRIVIAL))
    factor = 1.0 + strength * (2.0 * magnitude - 1.0)
    bits = 8 - np.rint((8 - FEWEST_BITS) * strength * magnitude).astype(np.int64)
    own = {name: chosen == index for index, name in enumerate(TRIVIAL)}
    factors = ("brightness", "contrast", "saturation", "sharpness")
    return {
        **{name: np.where(own[name], factor, 1.0) for name in factors},
        "hue": np.zeros(len(chosen)),
        "bits": np.where(own["posterize"], bits, 8),
        "autocontrast": own["autocontrast"],
    }


def _erased(uniform: Floats, probability: float, crop: int) -> dict[str, Any]:
    """Rectangles to erase, uniform in area and in log aspect ratio; empty with probability 1 − ``probability``."""
    area = (ERASED_AREA[0] + (ERASED_AREA[1] - ERASED_AREA[0]) * uniform[1]) * crop**2
    ratio = ERASED_RATIO[0] * (ERASED_RATIO[1] / ERASED_RATIO[0]) ** uniform[2]
    chosen = uniform[0] < probability
    height, width = (
        np.where(chosen, np.minimum(np.rint(np.sqrt(side)).astype(np.int64), crop), 0)
        for side in (area * ratio, area / ratio)
    )
    top, left = _integers_below(uniform[3], crop - height + 1), _integers_below(uniform[4], crop - width + 1)
    return {"erase_top": top, "erase_left": left, "erase_bottom": top + height, "erase_right": left + width}


def matching_short_side(settings: AugmentSettings, short_side: int, heights: Any, widths: Any) -> int:
    """The short side at which objects in a central crop appear as large as in training, in the geometric mean.

    A resized crop and zoom change the size of objects; a test at the ``short_side`` of the training images would show
    them at another size than the network has learned. ``heights`` and ``widths`` are of the training images.

    >>> sizes = np.full(1000, 256), np.full(1000, 256)
    >>> matching_short_side(AugmentSettings(resized_crop=(0.25, 0.25)), 256, *sizes)  # half of the side fills the crop
    448
    """
    heights, widths = np.asarray(heights, dtype=np.int64), np.asarray(widths, dtype=np.int64)
    sampled = sample_parameters(
        settings, np.random.default_rng(0), len(heights), np.arange(len(heights)), heights, widths
    )
    smallest, largest = settings.zoom or (1.0, 1.0)  # its mean is known
    zoom = math.log(smallest * largest) / 2 * settings.warp
    scale = settings.crop / np.exp(0.5 * np.log(sampled.height * sampled.width).mean()) * math.exp(zoom)
    return max(settings.crop, round(short_side * float(scale)))


def _integers_below(numbers: Floats, limit: Any) -> npt.NDArray[np.int64]:
    """Map uniform numbers in [0, 1) to integers from 0 to ``limit`` − 1."""
    return np.minimum((numbers * limit).astype(np.int64), limit - 1)


def _resized_boxes(
    position: Floats, attempts: Floats, settings: AugmentSettings, heights: Any, widths: Any
) -> tuple[Any, Any, Any, Any]:
    """Sample boxes uniform in area and in log aspect ratio: the first of several attempts that fits into the image,
    else the largest central box whose ratio is allowed."""
    smallest, largest = settings.resized_crop or (1.0, 1.0)
    narrowest, widest = settings.resized_ratio
    area = (smallest + (largest - smallest) * attempts[:, 0]) * (heights * widths)[:, None]
    ratio = np.exp(np.log(narrowest) + (np.log(widest) - np.log(narrowest)) * attempts[:, 1])
    width = np.rint(np.sqrt(area * ratio)).astype(np.int64)
    height = np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (width > 0) & (width <= widths[:, None]) & (height > 0) & (height <= heights[:, None])
    first = np.arange(len(heights)), fits.argmax(axis=1)
    found = fits[first]
    height = np.where(found, height[first], np.minimum(heights, np.rint(widths / narrowest).astype(np.int64)))
    width = np.where(found, width[first], np.minimum(widths, np.rint(heights * widest).astype(np.int64)))
    top = np.where(found, _integers_below(position[0], heights - height + 1), (heights - height) // 2)
    left = np.where(found, _integers_below(position[1], widths - width + 1), (widths - width) // 2)
    return top, left, height, width


def _mixing(uniform: Floats, mixup: Floats | None, cutmix: Floats | None, crop: int) -> dict[str, Any]:
    """Return mixup shares and cutmix rectangles; where both are on, each image gets one of them at random."""
    whole, none = np.ones(uniform.shape[1]), np.zeros(uniform.shape[1], dtype=np.int64)
    heads = uniform[0] < 0.5
    share = whole if mixup is None else mixup if cutmix is None else np.where(heads, mixup, 1.0)
    top, left, bottom, right = none, none, none, none
    if cutmix is not None:
        kept = cutmix if mixup is None else np.where(heads, 1.0, cutmix)
        half = (0.5 * np.sqrt(1.0 - kept) * crop).astype(np.int64)
        middle_y, middle_x = _integers_below(uniform[1], crop), _integers_below(uniform[2], crop)
        top, bottom = np.maximum(middle_y - half, 0), np.minimum(middle_y + half, crop)
        left, right = np.maximum(middle_x - half, 0), np.minimum(middle_x + half, crop)
    return {"share": share, "patch_top": top, "patch_left": left, "patch_bottom": bottom, "patch_right": right}


def augment(crops: Tensor, parameters: Tensor, settings: AugmentSettings, mean: Tensor, std: Tensor) -> Tensor:
    """Return the network input of a training batch: float32 [n, 3, crop, crop], channels last in memory.

    A pure function without branches on data, so that ``torch.compile(augment, fullgraph=True)`` fuses it. ``crops``
    [n, h, w, 3] are crops of side ``crop``, or where ``settings.warps`` whole images in the upper left of a common
    frame; where ``settings.mixes`` there is one more in front, which is only mixed into the next. ``parameters`` is
    the table [n, 28] of :class:`Parameters`; ``mean`` and ``std`` [3] refer to values in [0, 1].
    """
    if crops.is_cpu and not torch.compiler.is_compiling():
        # Pieces that fit in a core's cache are about twice as fast on a CPU as the whole batch.
        shape = (len(crops), 3, settings.crop, settings.crop)
        images = torch.empty(shape, dtype=torch.float32, memory_format=torch.channels_last)
        piece = max(1, 2**16 // settings.crop**2)
        for begin in range(0, len(crops), piece):
            rows = slice(begin, begin + piece)
            images[rows] = _augment_images(crops[rows], parameters[rows], settings, mean, std)
    else:
        images = _augment_images(crops, parameters, settings, mean, std).contiguous(memory_format=torch.channels_last)
    if settings.mixes:
        sampled = Parameters(*parameters[1:].unbind(1))
        previous, images = images[:-1], images[1:]
        if settings.mixup:
            images = mixup(images, previous, sampled.share)
        if settings.cutmix:
            patch = sampled.patch_top, sampled.patch_left, sampled.patch_bottom, sampled.patch_right
            images = cutmix(images, previous, *patch)
    return images


def _augment_images(crops: Tensor, parameters: Tensor, settings: AugmentSettings, mean: Tensor, std: Tensor) -> Tensor:
    """Apply all operations that involve one image only."""
    sampled = Parameters(*parameters.unbind(1))
    images = crops.permute(0, 3, 1, 2)
    if settings.warps:
        images = _warp(images, sampled, settings)
    if settings.contrast or settings.trivial_colour:  # the mean after the brightness change; flips do not affect it
        mean_luma = mean_grey(images, sampled.brightness)
    if settings.horizontal_flip or settings.vertical_flip:
        images = flip(images, sampled.horizontal, sampled.vertical)
    if settings.transpose:
        images = transpose(images, sampled.transpose)
    planes = to_planes(images)
    if settings.brightness or settings.trivial_colour:
        planes = brightness(planes, sampled.brightness)
    if settings.contrast or settings.trivial_colour:
        planes = contrast(planes, sampled.contrast, mean_luma)
    if settings.saturation or settings.trivial_colour:
        planes = saturation(planes, sampled.saturation)
    images = hue(planes, sampled.hue) if settings.hue and not settings.trivial_colour else from_planes(planes)
    if settings.trivial_colour:
        images = sharpness(images, sampled.sharpness)
        images = autocontrast(posterize(images, sampled.bits), sampled.autocontrast)
    images = images.sub_(mean[:, None, None]).div_(std[:, None, None])
    if settings.erasing:
        area = sampled.erase_top, sampled.erase_left, sampled.erase_bottom, sampled.erase_right
        images = torch.where(_inside(images, *area), 0.0, images)
    return images


def _warp(images: Tensor, sampled: Parameters, settings: AugmentSettings) -> Tensor:
    size = settings.crop, settings.crop
    box = sampled.top, sampled.left, sampled.height, sampled.width
    if not settings.affine:
        return resized_crop(images, *box, size)
    centre = sampled.top + sampled.height / 2, sampled.left + sampled.width / 2
    moved = sampled.degrees, sampled.zoom, sampled.shear, sampled.image_height, sampled.image_width, *centre
    if settings.resized_crop is None:
        return affine(images, *moved, sampled.top, sampled.left, size)
    corner = torch.zeros_like(sampled.top)
    whole = affine(images, *moved, corner, corner, (images.shape[-2], images.shape[-1]))
    return resized_crop(whole, *box, size)


def normalise(crops: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the network input of an evaluation batch: ``(x / 255 − mean) / std``, uint8 [n, h, w, 3] → float32
    [n, 3, h, w], channels last in memory.

    >>> crops = torch.full((1, 1, 1, 3), 255, dtype=torch.uint8)
    >>> normalise(crops, torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0.5, 0.25, 0.1])).flatten()
    tensor([1., 2., 5.])
    """
    width = crops.shape[2]  # whole lines: a CPU is slow where the innermost dimension has length 3
    scale, shift = (1.0 / (255.0 * std)).repeat(width), (mean / std).repeat(width)
    return crops.flatten(2).float().mul_(scale).sub_(shift).view(crops.shape).permute(0, 3, 1, 2)


def _per_image(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def flip(images: Tensor, horizontal: Tensor, vertical: Tensor) -> Tensor:
    """Flip uint8 images left-right where ``horizontal`` is 1 and upside down where ``vertical`` is 1.

    >>> flip(torch.tensor([[[[1, 2, 3]]]], dtype=torch.uint8), torch.ones(1), torch.zeros(1))
    tensor([[[[3, 2, 1]]]], dtype=torch.uint8)
    """
    for flag, dim in ((horizontal, -1), (vertical, -2)):
        images = _chosen(images, images.flip(dim), flag)
    return images


def transpose(images: Tensor, flag: Tensor) -> Tensor:
    """Mirror square uint8 images at their diagonal where ``flag`` is 1. With both flips at a half, all eight
    orientations are equally likely, and no pixel is interpolated.

    >>> transpose(torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8), torch.ones(1))
    tensor([[[[1, 3],
              [2, 4]]]], dtype=torch.uint8)
    """
    return _chosen(images, images.transpose(-1, -2), flag)


def _chosen(images: Tensor, others: Tensor, flag: Tensor) -> Tensor:
    """The ``others`` where ``flag`` is 1, of uint8 images: selected bit by bit."""
    mask = -_per_image(flag).to(torch.uint8)  # 0 or 255
    return images ^ ((images ^ others) & mask)


def to_planes(images: Tensor) -> Planes:
    """Convert uint8 images to three float planes in [0, 1], red, green and blue, [n, h, w] each."""
    # Not with unbind, which the compiler would materialise.
    return images[:, 0].float().div_(255.0), images[:, 1].float().div_(255.0), images[:, 2].float().div_(255.0)


def from_planes(planes: Planes) -> Tensor:
    """Stack three planes to images [n, 3, h, w]; on a GPU channels last in memory, as the network takes them."""
    return torch.stack(planes, dim=-1).permute(0, 3, 1, 2) if planes[0].is_cuda else torch.stack(planes, dim=1)


def grey(planes: Planes) -> Tensor:
    """Return the luma, [n, h, w]."""
    red, green, blue = planes
    return (red * GREY[0]).add_(green, alpha=GREY[1]).add_(blue, alpha=GREY[2])


def mean_grey(images: Tensor, factor: Tensor) -> Tensor:
    """Return the mean grey [n] of uint8 images whose brightness is changed by ``factor``; from the bytes, not from the
    planes, so that compiled code sums in memory order."""
    lines = images.permute(0, 2, 3, 1).flatten(2).float().mul_(factor[:, None, None] / 255.0).clamp_(max=1.0)
    channel = torch.arange(3, device=images.device)
    weights = torch.where(channel == 0, GREY[0], torch.where(channel == 1, GREY[1], GREY[2]))
    height, width = images.shape[-2:]
    return lines.mul_(weights.repeat(width)).sum(dim=(1, 2)) / (height * width)


def _blend(planes: Planes, factor: Tensor, other: Tensor) -> Planes:
    """``clamp(f x + (1 − f) other)``."""
    factor = factor[:, None, None]
    rest = (1.0 - factor) * other
    red, green, blue = ((plane * factor).add_(rest).clamp_(0.0, 1.0) for plane in planes)
    return red, green, blue


def brightness(planes: Planes, factor: Tensor) -> Planes:
    """``clamp(f x)``."""
    red, green, blue = ((plane * factor[:, None, None]).clamp_(max=1.0) for plane in planes)
    return red, green, blue


def contrast(planes: Planes, factor: Tensor, mean: Tensor) -> Planes:
    """``clamp(f x + (1 − f) mean)`` with the ``mean`` grey [n] of each image."""
    return _blend(planes, factor, mean[:, None, None])


def saturation(planes: Planes, factor: Tensor) -> Planes:
    """``clamp(f x + (1 − f) grey(x))``."""
    return _blend(planes, factor, grey(planes))


def hue(planes: Planes, shift: Tensor) -> Tensor:
    """Rotate the hue by ``shift`` (a fraction of the circle, in [−1/2, 1/2]) at constant value and saturation; returns
    images [n, 3, h, w].

    With v, m the largest and smallest of red, green, blue and d = v − m, the hue in sixths of the circle is
    ``H = ±(1 + (g + b − r − m)/d)`` with the sign of g − b, and back again
    ``r = m + d clamp(|H − 3| − 1)``, ``g = m + d clamp(2 − |H − 2|)``, ``b = m + d clamp(2 − |H − 4|)``.
    """
    red, green, blue = planes
    least = torch.minimum(torch.minimum(red, green), blue)
    span = torch.maximum(torch.maximum(red, green), blue).sub_(least)
    # A grey pixel has no hue: its result is multiplied by a span of zero.
    angle = (green + blue).sub_(red).sub_(least).div_(span.clamp(min=1e-9)).add_(1.0)
    rotated = torch.copysign(angle, green - blue).add_(6.0 * shift[:, None, None])
    rotated = rotated.sub_((rotated / 6.0).floor_(), alpha=6.0)
    # The three formulas as one with coefficients, so that compiled code computes only one per value.
    channel = torch.arange(3, device=shift.device)[:, None, None]
    is_red = channel == 0
    middle, slope, top = torch.where(is_red, 3, 2 * channel), torch.where(is_red, 1, -1), torch.where(is_red, -1, 2)
    strength = (rotated[:, None] - middle).abs_().mul_(slope).add_(top).clamp_(0.0, 1.0)
    return strength.mul_(span[:, None]).add_(least[:, None])


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """``clamp(f x + (1 − f) blurred)`` with a 3 × 3 blur; the outermost pixels keep their value."""
    weights = images.new_ones(3, 1, 3, 3)
    weights[:, :, 1, 1] = 5.0
    blurred = F.conv2d(images, weights / 13.0, groups=3)
    inner = images[:, :, 1:-1, 1:-1]
    changed = torch.lerp(blurred, inner, _per_image(factor)).clamp(0.0, 1.0)
    return images + F.pad(changed - inner, (1, 1, 1, 1))


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the upper ``bits`` of eight, ``floor(2^b x) / 2^b``; images with eight bits stay as they are."""
    levels = _per_image(torch.exp2(bits))
    kept = torch.minimum((images * levels).floor(), levels - 1.0) / levels
    return torch.where(_per_image(bits) < 8, kept, images)


def autocontrast(images: Tensor, flag: Tensor) -> Tensor:
    """Stretch each channel to [0, 1] where ``flag`` is 1; a constant channel stays."""
    least, most = images.amin(dim=(-2, -1), keepdim=True), images.amax(dim=(-2, -1), keepdim=True)
    constant = most == least
    stretched = (images - least.masked_fill(constant, 0.0)) / (most - least).masked_fill(constant, 1.0)
    return torch.where(_per_image(flag) > 0, stretched, images)


def affine(
    images: Tensor, degrees: Tensor, zoom: Tensor, shear: Tensor, height: Tensor, width: Tensor,
    centre_y: Tensor, centre_x: Tensor, top: Tensor, left: Tensor, size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """Rotate uint8 images, ``height`` × ``width`` in the upper left of a frame, counter-clockwise about a centre,
    magnify and shear them (bicubic, mirrored at the edges) and return the crop of ``size`` at (``top``, ``left``).

    Rotation about the centre of the crop keeps what the crop shows in it; a quarter turn is exact and needs no
    mirrored pixels.
    """
    angle, slope = torch.deg2rad(degrees)[:, None, None], torch.deg2rad(shear).tan()[:, None, None]
    cosine, sine = angle.cos(), angle.sin()
    down = torch.arange(size[0], device=images.device) + 0.5
    right = torch.arange(size[1], device=images.device) + 0.5
    y = ((down + (top - centre_y)[:, None]) / zoom[:, None])[:, :, None]
    x = ((right + (left - centre_x)[:, None]) / zoom[:, None])[:, None, :]
    from_x = (cosine + sine * slope) * x + (cosine * slope - sine) * y + centre_x[:, None, None]
    from_y = sine * x + cosine * y + centre_y[:, None, None]
    frame_height, frame_width = images.shape[-2:]
    from_x, from_y = _mirror(from_x, width[:, None, None]), _mirror(from_y, height[:, None, None])
    grid = torch.stack((from_x * (2 / frame_width) - 1, from_y * (2 / frame_height) - 1), dim=-1)
    pixels = _repeat_last(_repeat_last(images.float(), width, 3), height, 2)
    moved = F.grid_sample(pixels, grid, mode="bicubic", padding_mode="border", align_corners=False)
    return moved.round_().clamp_(0.0, 255.0).to(torch.uint8)


def _mirror(position: Tensor, length: Tensor) -> Tensor:
    """Positions reflected into [0, length], and at least half a pixel from its ends."""
    inside = length - (position.remainder(2.0 * length) - length).abs()
    return torch.minimum(inside.clamp(min=0.5), length - 0.5)


def _repeat_last(images: Tensor, length: Tensor, dim: int) -> Tensor:
    """Write the last line of images that are shorter than their frame once more behind it, in place: bicubic
    interpolation reads one line further than a position."""
    shape = [size if at != dim else 1 for at, size in enumerate(images.shape)]
    last, behind = ((length + more).long().clamp(max=images.shape[dim] - 1).view(-1, 1, 1, 1) for more in (-1, 0))
    return images.scatter_(dim, behind.expand(shape), images.gather(dim, last.expand(shape)))


def resized_crop(
    images: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor, size: tuple[int, int]
) -> Tensor:
    """Resize the box ``height`` × ``width`` at (``top``, ``left``) of uint8 images to ``size``: bicubic, antialiased by
    a kernel as wide as the step of the output pixels and at least one input pixel; two matrix products."""
    # float16 uses tensor cores: pixels are exact and weights good to 2^-11, a tenth of a grey level.
    dtype = torch.float16 if images.is_cuda else torch.float32
    rows = _resize_weights(top, height, images.shape[-2], size[0]).to(dtype)
    columns = _resize_weights(left, width, images.shape[-1], size[1]).to(dtype)
    narrow = rows[:, None] @ images.to(dtype)
    return (narrow @ columns.mT[:, None]).float().round_().clamp_(0.0, 255.0).to(torch.uint8)


def _resize_weights(start: Tensor, length: Tensor, pixels: int, size: int) -> Tensor:
    """Return weights [n, size, pixels] that resize the interval [start, start + length) of a line to ``size``."""
    step = (length / size)[:, None, None]
    begin, end = start[:, None, None], (start + length)[:, None, None]
    wanted = begin + step * (torch.arange(size, device=start.device)[:, None] + 0.5)
    given = torch.arange(pixels, device=start.device) + 0.5
    weights = _cubic((given - wanted).abs() / step.clamp(min=1.0))
    weights = weights * ((given > begin) & (given < end))
    return weights / weights.sum(dim=-1, keepdim=True)


def _cubic(distance: Tensor) -> Tensor:
    """The cubic kernel of Keys with a = −1/2 at distances of zero or more."""
    near = (1.5 * distance - 2.5) * distance**2 + 1.0
    far = ((2.5 - 0.5 * distance) * distance - 4.0) * distance + 2.0
    return torch.where(distance < 1.0, near, torch.where(distance < 2.0, far, 0.0))


def mixup(images: Tensor, previous: Tensor, share: Tensor) -> Tensor:
    """``λ x + (1 − λ) x'`` with the previous image x' of the batch, λ = ``share``."""
    return torch.lerp(previous, images, _per_image(share))


def cutmix(images: Tensor, previous: Tensor, top: Tensor, left: Tensor, bottom: Tensor, right: Tensor) -> Tensor:
    """Take rows ``top`` to ``bottom`` and columns ``left`` to ``right`` (end excluded) from the previous image."""
    return torch.where(_inside(images, top, left, bottom, right), previous, images)


def _inside(images: Tensor, top: Tensor, left: Tensor, bottom: Tensor, right: Tensor) -> Tensor:
    y = torch.arange(images.shape[-2], device=images.device)[:, None]
    x = torch.arange(images.shape[-1], device=images.device)
    return (y >= _per_image(top)) & (y < _per_image(bottom)) & (x >= _per_image(left)) & (x < _per_image(right))
