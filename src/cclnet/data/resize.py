"""One image at a given short side, as the decoded cache keeps it."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cclnet.data.pixels import MAX_PIXELS, UnreadableImage, decode_image, read_image

Pixels = npt.NDArray[np.uint8]

# A large JPEG is shrunk while it is decoded, to no less than twice the size wanted, and then properly. Pillow's
# thumbnails do the same; the result differs from one proper step over the whole image by about one level of 255 in
# the root mean square, for a fraction of the time.
_GAP = 2


def read_resized(image: str | Path | bytes, short_side: int, max_pixels: int = MAX_PIXELS) -> Pixels:
    """An image file, or the content of one, as RGB, uint8 [H, W, 3], upright, with the given short side."""
    large_enough = _GAP * short_side
    if isinstance(image, bytes):
        name: str | Path = "image"
        pixels = decode_image(image, name, min_short_side=large_enough, max_pixels=max_pixels)
    else:
        name, pixels = image, read_image(image, min_short_side=large_enough, max_pixels=max_pixels)
    return to_short_side(pixels, short_side, name, max_pixels)


def to_short_side(pixels: Pixels, short_side: int, path: str | Path = "image", max_pixels: int = MAX_PIXELS) -> Pixels:
    """Pixels [H, W, 3] with the given short side; ``path`` names them in the error for what is too long and thin."""
    height, width = resized_shape(pixels.shape[0], pixels.shape[1], short_side)
    if height * width > max_pixels:
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


def resize(pixels: Pixels, height: int, width: int) -> Pixels:
    """Bicubic and antialiased, [H, W, 3] to [height, width, 3].

    torch gives the levels of Pillow to within one, four times as fast. Where torch is not loaded, a model in another
    engine shall not need it for this alone: the same bits come from sparse products, several times as slowly.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    return _resize_by_torch(pixels, height, width) if "torch" in sys.modules else resize_plainly(pixels, height, width)


def _resize_by_torch(pixels: Pixels, height: int, width: int) -> Pixels:
    import torch
    import torch.nn.functional as F

    planes = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)[None]
    resized = F.interpolate(planes, size=(height, width), mode="bicubic", antialias=True)
    return resized[0].permute(1, 2, 0).contiguous().numpy()


def resize_plainly(pixels: Pixels, height: int, width: int) -> Pixels:
    """What torch computes, bit for bit: along the width, then along the height, in whole numbers of 16 bits."""
    turned = _resize_lines(np.ascontiguousarray(pixels.transpose(1, 0, 2)), width)
    return _resize_lines(np.ascontiguousarray(turned.transpose(1, 0, 2)), height)


def _resize_lines(lines: Pixels, count: int) -> Pixels:
    """[n, ...] to [count, ...], each output the weighted sum of the inputs around its place."""
    if len(lines) == count:
        return lines
    from scipy import sparse

    first, weights = _weights(len(lines), count)
    # Weights as whole numbers: as many bits after the point as leave the largest within 15 bits.
    bits = next(b for b in range(22, 0, -1) if int(0.5 + weights.max() * 2**b) < 2**15)
    whole = np.trunc(weights * 2**bits + np.where(weights < 0, -0.5, 0.5)).astype(np.int32)
    row, tap = np.nonzero(whole)
    matrix = sparse.csr_array((whole[row, tap], (row, first[row] + tap)), shape=(count, len(lines)))
    sums = matrix @ lines.reshape(len(lines), -1).astype(np.int32)
    sums += 1 << (bits - 1)
    return np.clip(sums >> bits, 0, 255).astype(np.uint8).reshape(count, *lines.shape[1:])


def _weights(old: int, new: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Where the inputs of each output begin, [new], and their weights, [new, taps], rows summing to one: the cubic of
    Keys (a = -1/2) around the output's centre, stretched where the image gets smaller, cut off at the edges."""
    scale = old / new
    stretch = max(scale, 1.0)
    centre = scale * (np.arange(new) + 0.5)
    first = np.maximum((centre - 2 * stretch + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + 2 * stretch + 0.5).astype(np.int64), old)
    place = first[:, None] + np.arange(2 * math.ceil(2 * stretch) + 1)
    x = np.abs(place - centre[:, None] + 0.5) / stretch
    near, far = (1.5 * x - 2.5) * x * x + 1, -0.5 * (((x - 5) * x + 8) * x - 4)
    weights = np.where((place < last[:, None]) & (x < 2), np.where(x < 1, near, far), 0.0)
    return first, weights / weights.sum(axis=1, keepdims=True)
