"""Duplicates: images with the same pixels, and images that show the same picture.

The same picture is found by a perceptual hash: the signs of the 16 x 16 lowest frequencies of the image, which survive
another compression, size, brightness or contrast. It has 256 bits, not the usual 64, because medical images of one
kind share their coarse layout: with 64 bits ten thousand skin lesions give thousands of unrelated pairs.

Images are hashed while they are decoded, so the hash reads few pixels: 64 rows, averaged to 32 x 32 cells.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from scipy.fft import dct

from cclnet.data.parallel import process_chunks

Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.intp]

VERSION = 1  # increase when the hash changes: hashes of other versions in a cache are computed again
HASHED = np.dtype([("hash", "<u8", 4), ("contrast", "<i2"), ("version", "u1")])  # version 0: not hashed
BITS = 256
NEAR = 24  # bits in which near duplicates may differ; unrelated images differ in about 128
# Of many images only nearer pairs are searched for, with longer bands, so that the time grows with their number and not
# with its square.
MANY, NEAR_OF_MANY = 50_000, 8
_MOST_NEIGHBOURS = 100  # compared with one hash in a band: images with one background agree in whole bands
BLANK = 2  # an image whose grey levels span no more than this is blank, and its hash is noise
_CHUNK = 2**16  # hashes of which the bits are unpacked at a time
_FEW = 2000  # images that are hashed sooner than workers are started
_CELLS, _SAMPLED_ROWS, _FREQUENCIES = 32, 64, 16
_COSINES = dct(np.eye(_CELLS), norm="ortho", axis=0)[:_FREQUENCIES].astype(np.float32)


class Images(Protocol):
    """Decoded images by row."""

    def image(self, index: int) -> npt.NDArray[np.uint8]: ...


def sample_rows(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return a copy of the rows of an RGB image [H, W, 3] that its hash is made of, [64, 3 W]."""
    height, width, channels = image.shape
    return image[_row_numbers(height)].reshape(_SAMPLED_ROWS, width * channels)


@functools.cache
def _row_numbers(height: int) -> Rows:
    return (2 * np.arange(_SAMPLED_ROWS) + 1) * height // (2 * _SAMPLED_ROWS)


def perceptual_hashes(samples: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.void]:
    """Return the hash of each image from its :func:`sample_rows`, and the grey levels that the image spans at 32 x 32:
    ``HASHED`` [N]. Many at once, because the calls cost more than the numbers."""
    grey = np.empty((len(samples), _CELLS, _CELLS), np.float32)
    for i, rows in enumerate(samples):
        starts, counts = _columns(rows.shape[1])
        sums = np.add.reduceat(rows, starts, axis=1, dtype=np.uint32)
        grey[i] = (sums[::2] + sums[1::2]) / counts
    bits = (_COSINES @ grey @ _COSINES.T).reshape(len(samples), BITS) > 0
    bits[:, 0] = False  # the mean is always positive
    found = np.zeros(len(samples), HASHED)
    found["hash"] = np.packbits(bits, axis=1).view(np.uint64)
    found["contrast"] = grey.max(axis=(1, 2), initial=0) - grey.min(axis=(1, 2), initial=255)
    found["version"] = VERSION
    return found


@functools.lru_cache(maxsize=1024)
def _columns(width: int) -> tuple[Rows, npt.NDArray[np.float32]]:
    """Return the first value of each cell of a row, and the number of values in two rows of it."""
    starts = np.arange(_CELLS) * width // _CELLS
    return starts, 2 * np.maximum(np.diff(starts, append=width), 1).astype(np.float32)


def hash_images(images: Images, rows: Sequence[int], workers: int) -> npt.NDArray[np.void]:
    """Return the hashes of decoded images, ``HASHED`` in the order of ``rows``."""
    found, at = np.zeros(len(rows), HASHED), {row: i for i, row in enumerate(rows)}

    def hash_chunk(chunk: list[int]) -> tuple[list[int], npt.NDArray[np.void]]:
        return chunk, perceptual_hashes([sample_rows(images.image(row)) for row in chunk])

    def store(done: tuple[list[int], npt.NDArray[np.void]]) -> None:
        found[[at[row] for row in done[0]]] = done[1]

    if len(rows) < _FEW:
        store(hash_chunk(list(rows)))
    else:
        process_chunks(hash_chunk, rows, workers, store)
    return found


def same_pixels(hashes: Hashes, images: Images, rows: Rows) -> dict[int, int]:
    """Map each of ``rows`` that has exactly the pixels of an earlier one to the first such row. ``hashes`` are those of
    all images; only images with equal hashes are compared."""
    first: dict[tuple[bytes, bytes], int] = {}
    found: dict[int, int] = {}
    _, kind, count = np.unique(hashes[rows], axis=0, return_inverse=True, return_counts=True)
    for row in rows[count[kind.reshape(-1)] > 1].tolist():
        image = images.image(row)
        digest = hashlib.blake2b(image.tobytes(), digest_size=16).digest()
        known = first.setdefault((str(image.shape).encode(), digest), row)
        if known != row:
            found[row] = known
    return found


def near_pairs(hashes: Hashes, limit: int | None = None) -> tuple[Rows, npt.NDArray[np.int64]]:
    """Return all pairs of hashes that differ in at most ``limit`` bits (default: 24, or 8 of more than 50,000 images),
    [M, 2] with the smaller row first, and the number of differing bits, [M].

    With ``limit + 1`` bands of bits, two hashes that differ in at most ``limit`` bits agree in at least one band. So
    only hashes that share a band are compared: with 25 bands of 10 bits, two or three percent of all pairs; with 9
    bands of 28 bits, hardly any but the near ones, and at most 100 with each hash."""
    limit = (NEAR if len(hashes) <= MANY else NEAR_OF_MANY) if limit is None else limit
    count = max(limit, NEAR_OF_MANY) + 1
    most = _MOST_NEIGHBOURS if len(hashes) > MANY else len(hashes)
    keys = _band_keys(hashes, count)
    found = np.concatenate([_pairs_of_band(band, keys, hashes, limit, most) for band in range(count)])
    found = np.stack(np.divmod(np.unique(found @ [len(hashes), 1]), max(len(hashes), 1)), axis=1)
    return found, _distance(hashes, found[:, 0], found[:, 1])


def _band_keys(hashes: Hashes, count: int) -> npt.NDArray[np.int32]:
    """Return the bits of each of ``count`` bands as a number, [N, count]. A band has every count-th bit, so that coarse
    frequencies, which are similar in most images, are spread over the bands."""
    width = BITS // count
    keys = np.empty((len(hashes), count), np.int32)
    for start in range(0, len(hashes), _CHUNK):  # the bits take 256 bytes of each image
        bits = np.unpackbits(np.ascontiguousarray(hashes[start : start + _CHUNK]).view(np.uint8), axis=1)
        for band in range(count):
            keys[start : start + _CHUNK, band] = bits[:, band : width * count : count] @ (1 << np.arange(width))
    return keys


def _pairs_of_band(band: int, keys: npt.NDArray[np.int32], hashes: Hashes, limit: int, most: int) -> Rows:
    """Return the near pairs that agree in this band and in none before it, so that every pair is found once; those that
    agree in this band, if only the next ``most`` hashes of a band are compared."""
    order = np.argsort(keys[:, band], kind="stable")
    own, earlier, hashes = keys[order, band], keys[order, :band], hashes[order]
    pairs = [np.empty((0, 2), np.intp)]
    step = 1
    while step <= most and len(same := np.flatnonzero(own[step:] == own[:-step])):
        near = same[_distance(hashes, same, same + step) <= limit]
        if most >= len(hashes):
            near = near[~(earlier[near] == earlier[near + step]).any(axis=1)]
        pairs.append(np.stack([order[near], order[near + step]], axis=1))
        step += 1
    return np.sort(np.concatenate(pairs), axis=1)


def _distance(hashes: Hashes, left: Rows, right: Rows) -> npt.NDArray[np.int64]:
    return np.bitwise_count(hashes[left] ^ hashes[right]).sum(axis=1, dtype=np.int64)
