"""Where the network looked: class activation maps, as arrays in 0..1 and laid over the image.

Closed form where the network averages its last feature map and classifies linearly (``Shipped.evidence``); Grad-CAM by
captum elsewhere (the extra ``explain``). Where both apply they are the same up to the number of places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

if TYPE_CHECKING:
    pass

Heat = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]

# From violet over green to yellow, ever brighter, so that all eyes can tell them apart; and far from the reds of skin.
_COLOURS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], np.float32)


def heat_of(maps: npt.NDArray[np.floating]) -> Heat:
    """What speaks for the class, in 0..1: maps [N, h, w] without what speaks against it, each by its largest.

    >>> heat_of(np.array([[[-1.0, 2.0, 4.0]]])).tolist()
    [[[0.0, 0.5, 1.0]]]
    """
    positive = np.maximum(maps, 0).astype(np.float32)
    largest = positive.max(axis=(1, 2), keepdims=True)
    return np.divide(positive, largest, out=np.zeros_like(positive), where=largest > 0)


def enlarge(heat: Heat, size: tuple[int, int]) -> Heat:
    """A map [h', w'] at the size [h, w] of the image, bilinear."""
    larger = Image.fromarray(heat).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.clip(np.asarray(larger, np.float32), 0, 1)


def overlay(pixels: Pixels, heat: Heat, strength: float = 0.55) -> Pixels:
    """The image [h, w, 3] with its heat [h, w] on it: nothing is covered where the heat is zero."""
    place = np.clip(heat, 0, 1) * (len(_COLOURS) - 1)
    below = np.minimum(place.astype(np.intp), len(_COLOURS) - 2)
    between = (place - below)[..., None]
    colours = _COLOURS[below] * (1 - between) + _COLOURS[below + 1] * between
    cover = (strength * np.clip(heat, 0, 1))[..., None]
    return np.rint(pixels * (1 - cover) + colours * cover).astype(np.uint8)
