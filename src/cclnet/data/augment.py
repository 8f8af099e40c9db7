"""Augmentation: what is drawn for every image of a batch, and one pure function that applies it.

Numbers are drawn on the host for the whole (global) batch, from a generator that knows only the seed, the
epoch and the step: a resumed run, another number of ranks and another device all see the same ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from cclnet.settings import AugmentSettings

# Batched image operations: one parameter an image, each equal to its torchvision.transforms.v2 namesake.
#
# Parameters are [n]. Geometry maps uint8 images [n, 3, h, w] to uint8; colour works on three planes of floats in
# [0, 1], red, green and blue, [n, h, w] each. No function branches on data and every shape is known beforehand, so
# that a chain of them compiles into few kernels: planes let the compiler keep a pixel in registers from the bytes
# to the normalised value. Colour has no ``where`` and steps in place on its own results, because the same lines
# also run uncompiled on a CPU, where that is much faster.


Planes = tuple[Tensor, Tensor, Tensor]
GREY = (0.2989, 0.587, 0.114)  # what torchvision weighs red, green and blue with


def _per_image(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def flip(images: Tensor, horizontal: Tensor, vertical: Tensor) -> Tensor:
    """uint8 images, mirrored where ``horizontal`` is 1 and turned upside down where ``vertical`` is 1.

    >>> flip(torch.tensor([[[[1, 2, 3]]]], dtype=torch.uint8), torch.ones(1), torch.zeros(1))
    tensor([[[[3, 2, 1]]]], dtype=torch.uint8)
    """
    for flag, dim in ((horizontal, -1), (vertical, -2)):
        mask = -_per_image(flag).to(torch.uint8)  # 0 or 255: picks one of the two, bit by bit
        images = images ^ ((images ^ images.flip(dim)) & mask)
    return images


def planes_of(images: Tensor) -> Planes:
    """uint8 images as three planes of floats in [0, 1], red, green and blue, [n, h, w] each."""
    red, green, blue = (images[:, i].float().div_(255.0) for i in range(3))  # unbind would be materialised
    return red, green, blue


def together(planes: Planes) -> Tensor:
    """Three planes as images [n, 3, h, w]; on a GPU channels last in memory, as the network takes them."""
    return torch.stack(planes, dim=-1).permute(0, 3, 1, 2) if planes[0].is_cuda else torch.stack(planes, dim=1)


def grey(planes: Planes) -> Tensor:
    """Brightness as the eye weighs it, [n, h, w]."""
    red, green, blue = planes
    return (red * GREY[0]).add_(green, alpha=GREY[1]).add_(blue, alpha=GREY[2])


def mean_grey(images: Tensor, factor: Tensor) -> Tensor:
    """The mean grey [n] of uint8 images whose brightness is changed by ``factor``.

    From the bytes and not from the planes, so that compiled code sums over memory in its order."""
    lines = images.permute(0, 2, 3, 1).flatten(2).float().mul_(factor[:, None, None] / 255.0).clamp_(max=1.0)
    channel = torch.arange(3, device=images.device)
    weights = torch.where(channel == 0, GREY[0], torch.where(channel == 1, GREY[1], GREY[2]))
    height, width = images.shape[-2:]
    return lines.mul_(weights.repeat(width)).sum(dim=(1, 2)) / (height * width)


def _towards(planes: Planes, factor: Tensor, other: Tensor) -> Planes:
    """``clamp(f x + (1 − f) other)``."""
    factor = factor[:, None, None]
    rest = (1.0 - factor) * other
    red, green, blue = ((plane * factor).add_(rest).clamp_(0.0, 1.0) for plane in planes)
    return red, green, blue


def brightness(planes: Planes, factor: Tensor) -> Planes:
    """``clamp(f x)``: towards black, or away from it."""
    red, green, blue = ((plane * factor[:, None, None]).clamp_(max=1.0) for plane in planes)
    return red, green, blue


def contrast(planes: Planes, factor: Tensor, mean: Tensor) -> Planes:
    """``clamp(f x + (1 − f) mean)``: towards the ``mean`` grey [n] of the image, or away from it."""
    return _towards(planes, factor, mean[:, None, None])


def saturation(planes: Planes, factor: Tensor) -> Planes:
    """``clamp(f x + (1 − f) grey(x))``: towards the grey image, or away from it."""
    return _towards(planes, factor, grey(planes))


def hue(planes: Planes, shift: Tensor) -> Tensor:
    """Turn the hue by ``shift`` (a fraction of the whole circle, in [−1/2, 1/2]); value and saturation stay.
    Gives the images in one, [n, 3, h, w].

    With v, m the largest and smallest of red, green, blue and d = v − m, the hue in sixths of the circle is
    ``H = ±(1 + (g + b − r − m)/d)`` with the sign of g − b, and back again
    ``r = m + d clamp(|H − 3| − 1)``, ``g = m + d clamp(2 − |H − 2|)``, ``b = m + d clamp(2 − |H − 4|)``.
    """
    red, green, blue = planes
    least = torch.minimum(torch.minimum(red, green), blue)
    span = torch.maximum(torch.maximum(red, green), blue).sub_(least)
    # A grey pixel has no hue: whatever is computed for it is multiplied by a span of zero.
    away = (green + blue).sub_(red).sub_(least).div_(span.clamp(min=1e-9)).add_(1.0)
    turned = torch.copysign(away, green - blue).add_(6.0 * shift[:, None, None])
    turned = turned.sub_((turned / 6.0).floor_(), alpha=6.0)
    # The three formulas as one with coefficients, so that compiled code computes one of them for each value.
    channel = torch.arange(3, device=shift.device)[:, None, None]
    is_red = channel == 0
    middle, slope, top = torch.where(is_red, 3, 2 * channel), torch.where(is_red, 1, -1), torch.where(is_red, -1, 2)
    strength = (turned[:, None] - middle).abs_().mul_(slope).add_(top).clamp_(0.0, 1.0)
    return strength.mul_(span[:, None]).add_(least[:, None])


def rotate(
    images: Tensor, degrees: Tensor, height: Tensor, width: Tensor, top: Tensor, left: Tensor, size: tuple[int, int]
) -> Tensor:
    """uint8 images turned counter-clockwise about their middle (bilinear, zero outside), of which the window
    of ``size`` at (``top``, ``left``) is given. Images are ``height`` × ``width`` in the upper left corner of
    their frame and zero in the rest of it."""
    frame_height, frame_width = images.shape[-2:]
    angle = torch.deg2rad(degrees)[:, None, None]
    cosine, sine = angle.cos(), angle.sin()
    down = torch.arange(size[0], device=images.device) + 0.5
    right = torch.arange(size[1], device=images.device) + 0.5
    y = (down[None, :] + (top - height / 2)[:, None])[:, :, None]
    x = (right[None, :] + (left - width / 2)[:, None])[:, None, :]
    from_x = cosine * x - sine * y + (width / 2)[:, None, None]
    from_y = sine * x + cosine * y + (height / 2)[:, None, None]
    grid = torch.stack((from_x * (2 / frame_width) - 1, from_y * (2 / frame_height) - 1), dim=-1)
    turned = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return turned.round_().to(torch.uint8)


def resized_crop(
    images: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor, size: tuple[int, int]
) -> Tensor:
    """uint8 images: the box ``height`` × ``width`` at (``top``, ``left``), resized to ``size`` (bilinear,
    antialiased: a triangle as wide as the step of the output pixels, and at least one input pixel).

    The filter is separable, so it is two products with matrices of weights, one an image."""
    # Pixels are exact in float16 and weights good to 2^-11, a tenth of a grey level, at tensor core speed.
    dtype = torch.float16 if images.is_cuda else torch.float32
    rows = _resize_weights(top, height, images.shape[-2], size[0]).to(dtype)
    columns = _resize_weights(left, width, images.shape[-1], size[1]).to(dtype)
    narrow = rows[:, None] @ images.to(dtype)
    return (narrow @ columns.mT[:, None]).float().round_().clamp_(0.0, 255.0).to(torch.uint8)


def _resize_weights(start: Tensor, length: Tensor, pixels: int, size: int) -> Tensor:
    """Weights [n, size, pixels] that resize the stretch [start, start + length) of a line to ``size``."""
    step = (length / size)[:, None, None]
    begin, end = start[:, None, None], (start + length)[:, None, None]
    wanted = begin + step * (torch.arange(size, device=start.device)[:, None] + 0.5)
    given = torch.arange(pixels, device=start.device) + 0.5
    weights = (1.0 - (given - wanted).abs() / step.clamp(min=1.0)).clamp(min=0.0)
    weights = weights * ((given > begin) & (given < end))
    return weights / weights.sum(dim=-1, keepdim=True)


def mixup(images: Tensor, before: Tensor, share: Tensor) -> Tensor:
    """``λ x + (1 − λ) x'`` with the image before it in the batch, λ = ``share``."""
    return torch.lerp(before, images, _per_image(share))


def cutmix(images: Tensor, before: Tensor, top: Tensor, left: Tensor, bottom: Tensor, right: Tensor) -> Tensor:
    """Rows ``top`` to ``bottom`` and columns ``left`` to ``right`` (end not included) are taken from the image
    before it in the batch."""
    y = torch.arange(images.shape[-2], device=images.device)[:, None]
    x = torch.arange(images.shape[-1], device=images.device)
    inside = (y >= _per_image(top)) & (y < _per_image(bottom)) & (x >= _per_image(left)) & (x < _per_image(right))
    return torch.where(inside, before, images)


Floats = npt.NDArray[np.floating[Any]]
ATTEMPTS = 10  # at a resized crop that fits into the image, before the whole image is taken


class Parameters(NamedTuple):
    """What is drawn for each image, [n] each. A batch carries it as one table [n, 18], a column each."""

    image_height: Any
    image_width: Any
    top: Any  # the box that is cut out, in pixels
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
    share: Any  # of the image itself in mixup; 1 for all of it
    patch_top: Any  # the rectangle where cutmix shows the image before; empty for none
    patch_left: Any
    patch_bottom: Any
    patch_right: Any

    def own_share(self, crop: int) -> Any:
        """How much of each image is itself after mixup and cutmix: the weight of its own label."""
        patch = (self.patch_bottom - self.patch_top) * (self.patch_right - self.patch_left)
        return self.share * (1.0 - patch / crop**2)


def draw(
    settings: AugmentSettings,
    generator: np.random.Generator,
    count: int,
    taken: npt.NDArray[np.intp],
    heights: npt.NDArray[np.integer[Any]],
    widths: npt.NDArray[np.integer[Any]],
) -> Parameters:
    """Draw for a batch of ``count`` images; give the numbers (as numpy arrays) of those ``taken`` from it,
    whose sizes are ``heights`` and ``widths``.

    Every operation has random numbers of its own, so that switching one on leaves the others as they were.
    """
    uniform = generator.random((count, 13))[taken].T
    attempts = generator.random((count, 2, ATTEMPTS))[taken] if settings.resized_crop else None
    mixup_share = generator.beta(settings.mixup, settings.mixup, count)[taken] if settings.mixup else None
    cutmix_share = generator.beta(settings.cutmix, settings.cutmix, count)[taken] if settings.cutmix else None
    if attempts is None:
        box = _windows(uniform[:2], settings.crop, heights, widths)
    else:
        box = _resized_boxes(uniform[:2], attempts, settings, heights, widths)

    def factor(numbers: Floats, strength: float) -> Floats:
        least = max(0.0, 1.0 - strength)
        return least + (1.0 + strength - least) * numbers

    return Parameters(
        heights,
        widths,
        *box,
        degrees=settings.rotation * (2.0 * uniform[2] - 1.0),
        horizontal=uniform[3] < settings.horizontal_flip,
        vertical=uniform[4] < settings.vertical_flip,
        brightness=factor(uniform[5], settings.brightness),
        contrast=factor(uniform[6], settings.contrast),
        saturation=factor(uniform[7], settings.saturation),
        hue=settings.hue * (2.0 * uniform[8] - 1.0),
        **_mixing(uniform[9:], mixup_share, cutmix_share, settings.crop),
    )


def _below(numbers: Floats, limit: Any) -> npt.NDArray[np.int64]:
    """Uniform numbers in [0, 1) as whole numbers from 0 to ``limit`` − 1."""
    return np.minimum((numbers * limit).astype(np.int64), limit - 1)


def _windows(position: Floats, crop: int, heights: Any, widths: Any) -> tuple[Any, Any, Any, Any]:
    side = np.full(len(heights), crop)
    return _below(position[0], heights - crop + 1), _below(position[1], widths - crop + 1), side, side


def _resized_boxes(
    position: Floats, attempts: Floats, settings: AugmentSettings, heights: Any, widths: Any
) -> tuple[Any, Any, Any, Any]:
    """Boxes with a random area and (on a log scale) ratio of sides: the first of several attempts that fits
    into the image, or else the largest box in the middle whose ratio is allowed."""
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
    top = np.where(found, _below(position[0], heights - height + 1), (heights - height) // 2)
    left = np.where(found, _below(position[1], widths - width + 1), (widths - width) // 2)
    return top, left, height, width


def _mixing(uniform: Floats, mixup: Floats | None, cutmix: Floats | None, crop: int) -> dict[str, Any]:
    """Shares of mixup and rectangles of cutmix; where both are on, a coin gives each image one of them."""
    whole, none = np.ones(uniform.shape[1]), np.zeros(uniform.shape[1], dtype=np.int64)
    heads = uniform[0] < 0.5
    share = whole if mixup is None else mixup if cutmix is None else np.where(heads, mixup, 1.0)
    top, left, bottom, right = none, none, none, none
    if cutmix is not None:
        kept = cutmix if mixup is None else np.where(heads, 1.0, cutmix)
        half = (0.5 * np.sqrt(1.0 - kept) * crop).astype(np.int64)
        middle_y, middle_x = _below(uniform[1], crop), _below(uniform[2], crop)
        top, bottom = np.maximum(middle_y - half, 0), np.minimum(middle_y + half, crop)
        left, right = np.maximum(middle_x - half, 0), np.minimum(middle_x + half, crop)
    return {"share": share, "patch_top": top, "patch_left": left, "patch_bottom": bottom, "patch_right": right}


def augment(crops: Tensor, parameters: Tensor, settings: AugmentSettings, mean: Tensor, std: Tensor) -> Tensor:
    """What the network sees of a batch: float32 [n, 3, crop, crop], channels last in memory.

    ``crops`` are uint8 [n, h, w, 3]: the windows of side ``crop``, or where ``settings.warps`` whole images
    in the upper left of a common frame. ``parameters`` is the table [n, 18]. Where ``settings.mixes`` there is
    one image more in front, which is only mixed into the next. ``mean`` and ``std`` [3] are of values in
    [0, 1]. Pure, without branches on data, so that ``torch.compile(augment, fullgraph=True)`` fuses it.
    """
    if crops.is_cpu and not torch.compiler.is_compiling():
        images = _in_pieces(crops, parameters, settings, mean, std)
    else:
        images = _augmented(crops, parameters, settings, mean, std).contiguous(memory_format=torch.channels_last)
    if settings.mixes:
        drawn = Parameters(*parameters[1:].unbind(1))
        before, images = images[:-1], images[1:]
        if settings.mixup:
            images = mixup(images, before, drawn.share)
        if settings.cutmix:
            patch = drawn.patch_top, drawn.patch_left, drawn.patch_bottom, drawn.patch_right
            images = cutmix(images, before, *patch)
    return images


def _in_pieces(crops: Tensor, parameters: Tensor, settings: AugmentSettings, mean: Tensor, std: Tensor) -> Tensor:
    """The same in pieces that stay in a core's cache, which a CPU does about twice as fast as all at once."""
    shape = (len(crops), 3, settings.crop, settings.crop)
    images = torch.empty(shape, dtype=torch.float32, memory_format=torch.channels_last)
    piece = max(1, 2**16 // settings.crop**2)
    for begin in range(0, len(crops), piece):
        part = slice(begin, begin + piece)
        images[part] = _augmented(crops[part], parameters[part], settings, mean, std)
    return images


def _augmented(crops: Tensor, parameters: Tensor, settings: AugmentSettings, mean: Tensor, std: Tensor) -> Tensor:
    """Everything that happens to one image by itself."""
    drawn = Parameters(*parameters.unbind(1))
    images = crops.permute(0, 3, 1, 2)
    if settings.warps:
        images = _warped(images, drawn, settings)
    if settings.contrast:  # of what brightness will make of the images; flips do not change it
        mean_luma = mean_grey(images, drawn.brightness)
    if settings.horizontal_flip or settings.vertical_flip:
        images = flip(images, drawn.horizontal, drawn.vertical)
    planes = planes_of(images)
    if settings.brightness:
        planes = brightness(planes, drawn.brightness)
    if settings.contrast:
        planes = contrast(planes, drawn.contrast, mean_luma)
    if settings.saturation:
        planes = saturation(planes, drawn.saturation)
    images = hue(planes, drawn.hue) if settings.hue else together(planes)
    return images.sub_(mean[:, None, None]).div_(std[:, None, None])


def _warped(images: Tensor, drawn: Parameters, settings: AugmentSettings) -> Tensor:
    size = settings.crop, settings.crop
    if settings.resized_crop is None:
        window = drawn.top, drawn.left
        return rotate(images, drawn.degrees, drawn.image_height, drawn.image_width, *window, size)
    if settings.rotation:
        corner = torch.zeros_like(drawn.top)
        frame = images.shape[-2], images.shape[-1]
        images = rotate(images, drawn.degrees, drawn.image_height, drawn.image_width, corner, corner, frame)
    return resized_crop(images, drawn.top, drawn.left, drawn.height, drawn.width, size)


def normalise(crops: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """What the network sees in testing: uint8 [n, h, w, 3] → float32 [n, 3, h, w], ``(x / 255 − mean) / std``,
    channels last in memory.

    >>> crops = torch.full((1, 1, 1, 3), 255, dtype=torch.uint8)
    >>> normalise(crops, torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0.5, 0.25, 0.1])).flatten()
    tensor([1., 2., 5.])
    """
    width = crops.shape[2]  # whole lines at once: a CPU is slow where the innermost dimension has length 3
    scale, shift = (1.0 / (255.0 * std)).repeat(width), (mean / std).repeat(width)
    return crops.flatten(2).float().mul_(scale).sub_(shift).view(crops.shape).permute(0, 3, 1, 2)
