"""An image as the network sees it in testing: upright, at the short side of the run, its centre. Without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from cclnet.data.pixels import MAX_PIXELS, grey_to_rgb, rgb_of
from cclnet.data.resize import read_resized, to_short_side
from cclnet.errors import InputError

Pixels = npt.NDArray[np.uint8]


def prepare(image: Any, short_side: int, crop: tuple[int, int], max_pixels: int = MAX_PIXELS) -> Pixels:
    """uint8 [crop height, crop width, 3] of a path, the bytes of a file, a Pillow image, or uint8 [H, W(, 1 or 3)].

    A file gives the pixels that the run was tested on, bit for bit. (Of a Pillow image that was opened from a large
    JPEG they differ by about a level: files are shrunk while they are decoded.)
    """
    if isinstance(image, (str, Path, bytes)):
        return central(read_resized(image, short_side, max_pixels), crop)
    pixels = rgb_of(image) if isinstance(image, Image.Image) else _checked(image)
    return central(to_short_side(pixels, short_side, max_pixels=max_pixels), crop)


def central(pixels: Pixels, crop: tuple[int, int]) -> Pixels:
    """The window in the middle, where the tests of a run cut it.

    >>> central(np.arange(5, dtype=np.uint8)[:, None, None].repeat(3, 2), (2, 1))[:, 0, 0].tolist()
    [2, 3]
    """
    height, width = crop
    top, left = (round((have - want) / 2) for have, want in zip(pixels.shape[:2], crop, strict=True))
    return pixels[top : top + height, left : left + width]


def _checked(image: Any) -> Pixels:
    array = np.asarray(image)
    grey = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 1)
    if array.dtype != np.uint8 or array.size == 0 or not (grey or (array.ndim == 3 and array.shape[2] == 3)):
        raise InputError(
            "an image is a path, the bytes of a file, a Pillow image, or uint8 [H, W] or [H, W, 1 or 3] with 0 black "
            f"and 255 white; got {type(image).__name__} {array.dtype} {list(array.shape)}."
        )
    return grey_to_rgb(array.reshape(array.shape[:2])) if grey else array
