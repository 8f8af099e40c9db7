"""Augmentation: what is drawn for every image of a batch, and one pure function that applies it.

Numbers are drawn on the host for the whole (global) batch, from a generator that knows only the seed, the
epoch and the step: a resumed run, another number of ranks and another device all see the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cclnet.data import transforms
from cclnet.errors import InputError

Floats = npt.NDArray[np.floating[Any]]
ATTEMPTS = 10  # at a resized crop that fits into the image, before the whole image is taken


@dataclass(frozen=True)
class AugmentSettings:
    """What training images go through. The defaults are the paper's recipe (which gives no strengths).

    Colour jitter goes brightness, contrast, saturation, hue, always in this order, where torchvision shuffles
    it: the first three commute but for clamping, so only the place of a slight turn of hue would differ, and
    one order is one compiled kernel instead of 24.

    Attributes:
        crop: side of the square that the network sees.
        horizontal_flip, vertical_flip: probability of a flip.
        brightness, contrast, saturation: strength s; the factor is uniform in [max(0, 1 − s), 1 + s].
        hue: strength; the turn is uniform in [−hue, hue] of the circle, at most 0.5.
        resized_crop: smallest and largest share of the image's area to cut out and resize to the crop, or
            None for a plain crop.
        resized_ratio: narrowest and widest such box, width over height.
        rotation: the angle is uniform in [−rotation, rotation] degrees; 0 for none.
        mixup, cutmix: α of Beta(α, α) for mixing an image with the one before it in the batch; 0 for none.
            With both, every image gets one of the two.
    """

    crop: int = 224
    horizontal_flip: float = 0.5
    vertical_flip: float = 0.5
    brightness: float = 0.1
    contrast: float = 0.1
    saturation: float = 0.1
    hue: float = 0.02
    resized_crop: tuple[float, float] | None = None
    resized_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    rotation: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        for name in ("resized_crop", "resized_ratio"):  # a TOML file gives lists
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(given))
        if wrong := self._wrong():
            raise InputError("augmentation: " + "; ".join(wrong) + ".")

    def _wrong(self) -> list[str]:
        wrong = []
        if self.crop < 1:
            wrong.append(f"crop must be at least 1 pixel, got {self.crop}")
        limits = {"horizontal_flip": 1.0, "vertical_flip": 1.0, "hue": 0.5, "rotation": 180.0}
        for name in ("horizontal_flip", "vertical_flip", "brightness", "contrast", "saturation", "hue", "rotation",
                     "mixup", "cutmix"):  # fmt: skip
            value, limit = getattr(self, name), limits.get(name, np.inf)
            if not 0.0 <= value <= limit or value == np.inf:
                between = f"from 0 to {limit:g}" if limit < np.inf else "0 or more"
                wrong.append(f"{name} must be {between}, got {value}")
        for name, limit in (("resized_crop", 1.0), ("resized_ratio", np.inf)):
            pair = getattr(self, name)
            if pair is not None and not (len(pair) == 2 and 0.0 < pair[0] <= pair[1] <= limit):
                most = " at most 1," if limit == 1.0 else ""
                wrong.append(f"{name} must be two numbers above 0,{most} the smaller first, got {list(pair)}")
        return wrong

    @property
    def warps(self) -> bool:
        """Whether pixels are resampled, so that the whole image is needed and not only a window of it."""
        return self.resized_crop is not None or self.rotation > 0

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with each other, and labels with them."""
        return self.mixup > 0 or self.cutmix > 0


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
            images = transforms.mixup(images, before, drawn.share)
        if settings.cutmix:
            patch = drawn.patch_top, drawn.patch_left, drawn.patch_bottom, drawn.patch_right
            images = transforms.cutmix(images, before, *patch)
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


def _augmented(
    crops: Tensor, parameters: Tensor, settings: AugmentSettings, mean: Tensor, std: Tensor
) -> Tensor:
    """Everything that happens to one image by itself."""
    drawn = Parameters(*parameters.unbind(1))
    images = crops.permute(0, 3, 1, 2)
    if settings.warps:
        images = _warped(images, drawn, settings)
    if settings.contrast:  # of what brightness will make of the images; flips do not change it
        mean_grey = transforms.mean_grey(images, drawn.brightness)
    if settings.horizontal_flip or settings.vertical_flip:
        images = transforms.flip(images, drawn.horizontal, drawn.vertical)
    planes = transforms.planes_of(images)
    if settings.brightness:
        planes = transforms.brightness(planes, drawn.brightness)
    if settings.contrast:
        planes = transforms.contrast(planes, drawn.contrast, mean_grey)
    if settings.saturation:
        planes = transforms.saturation(planes, drawn.saturation)
    images = transforms.hue(planes, drawn.hue) if settings.hue else transforms.together(planes)
    return images.sub_(mean[:, None, None]).div_(std[:, None, None])


def _warped(images: Tensor, drawn: Parameters, settings: AugmentSettings) -> Tensor:
    size = settings.crop, settings.crop
    if settings.resized_crop is None:
        window = drawn.top, drawn.left
        return transforms.rotate(images, drawn.degrees, drawn.image_height, drawn.image_width, *window, size)
    if settings.rotation:
        corner = torch.zeros_like(drawn.top)
        frame = images.shape[-2], images.shape[-1]
        images = transforms.rotate(
            images, drawn.degrees, drawn.image_height, drawn.image_width, corner, corner, frame
        )
    return transforms.resized_crop(images, drawn.top, drawn.left, drawn.height, drawn.width, size)


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
