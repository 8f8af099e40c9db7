"""One image at a given short side, as the decoded cache keeps it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from cclnet.data.pixels import MAX_PIXELS, UnreadableImage, read_image

# A large JPEG is shrunk while it is decoded, to no less than twice the size wanted, and then properly. Pillow's
# thumbnails do the same; the result differs from one proper step over the whole image by about one level of 255 in
# the root mean square, for a fraction of the time.
_GAP = 2


def read_resized(path: str | Path, short_side: int) -> npt.NDArray[np.uint8]:
    """An image file as RGB, uint8 [H, W, 3], upright, with the given short side."""
    pixels = read_image(path, min_short_side=_GAP * short_side)
    height, width = resized_shape(pixels.shape[0], pixels.shape[1], short_side)
    if height * width > MAX_PIXELS:
        was = f"{pixels.shape[1]} x {pixels.shape[0]}"
        raise UnreadableImage(path, f"{was} pixels is too long and thin to have a short side of {short_side}")
    return resize(pixels, height, width)


def resized_shape(height: int, width: int, short_side: int) -> tuple[int, int]:
    """Height and width with the short side as given and the shape kept, to the nearest pixel.

    >>> resized_shape(450, 600, 256)
    (256, 341)
    """
    scale = short_side / min(height, width)
    return round(height * scale), round(width * scale)


def resize(pixels: npt.NDArray[np.uint8], height: int, width: int) -> npt.NDArray[np.uint8]:
    """Bicubic and antialiased, [H, W, 3] to [height, width, 3].

    torch gives the levels of Pillow to within one, four times as fast.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    planes = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)[None]
    resized = F.interpolate(planes, size=(height, width), mode="bicubic", antialias=True)
    return resized[0].permute(1, 2, 0).contiguous().numpy()
