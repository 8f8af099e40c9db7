"""Heat maps: class activation maps as arrays in 0..1, and as overlays on the image. Computed by ``engines``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image

Heat = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]

# From violet over green to yellow with rising brightness: readable for colour-blind people, and unlike skin.
_COLOURS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], np.float32)


def heat_of(maps: npt.NDArray[np.floating]) -> Heat:
    """Positive evidence for the class in 0..1: maps [N, h, w] without negative values, each divided by its maximum.

    >>> heat_of(np.array([[[-1.0, 2.0, 4.0]]])).tolist()
    [[[0.0, 0.5, 1.0]]]
    """
    positive = np.maximum(maps, 0).astype(np.float32)
    largest = positive.max(axis=(1, 2), keepdims=True)
    return np.divide(positive, largest, out=np.zeros_like(positive), where=largest > 0)


def enlarge(heat: Heat, size: tuple[int, int]) -> Heat:
    """A map [h', w'] resized to the size [h, w] of the image, bilinear."""
    larger = Image.fromarray(heat).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.clip(np.asarray(larger, np.float32), 0, 1)


def overlay(pixels: Pixels, heat: Heat, strength: float = 0.55) -> Pixels:
    """The image [h, w, 3] with its heat map [h, w] on it; where the heat is zero, the image is unchanged."""
    position = np.clip(heat, 0, 1) * (len(_COLOURS) - 1)
    below = np.minimum(position.astype(np.intp), len(_COLOURS) - 2)
    between = (position - below)[..., None]
    colours = _COLOURS[below] * (1 - between) + _COLOURS[below + 1] * between
    cover = (strength * np.clip(heat, 0, 1))[..., None]
    return np.rint(pixels * (1 - cover) + colours * cover).astype(np.uint8)
