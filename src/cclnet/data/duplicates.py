"""Images that are the same, or nearly: by a perceptual hash, over all pairs.

The hash is the sign of the 16 x 16 lowest frequencies of the image, which survive another compression, size,
brightness or contrast. 256 bits, not the usual 64: medical images of one kind share their coarse layout, and with 64
bits ten thousand skin lesions give thousands of pairs that have nothing in common.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy.fft import dctn

from cclnet.data.decode import DecodedImages

Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.intp]

BITS = 256
NEAR = 24  # bits in which near duplicates may differ; unrelated images differ in about 128
BLANK = 2  # an image whose grey levels span no more than this shows nothing, and its hash is noise
_BANDS = NEAR + 1


def perceptual_hash(image: npt.NDArray[np.uint8]) -> tuple[Hashes, int]:
    """The hash of an RGB image [H, W, 3], uint64 [4], and how many grey levels the image spans at 32 x 32."""
    small = Image.fromarray(image).convert("L").resize((32, 32), Image.Resampling.BILINEAR, reducing_gap=2)
    grey = np.asarray(small, dtype=np.float32)
    bits = dctn(grey, norm="ortho")[:16, :16].reshape(-1) > 0
    bits[0] = False  # the mean says nothing
    return np.packbits(bits).view(np.uint64), int(grey.max() - grey.min())


def same_pixels(hashes: Hashes, images: DecodedImages, rows: Rows) -> dict[int, int]:
    """For each of ``rows`` with the very pixels of an earlier one: the first such.

    ``hashes`` are those of all images; only images with equal ones are compared.
    """
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


def near_pairs(hashes: Hashes, limit: int = NEAR) -> tuple[Rows, npt.NDArray[np.int64]]:
    """All pairs of hashes that differ in at most ``limit`` (up to 24) bits: [M, 2] with the smaller row first, and
    in how many.

    Cut into one band more than bits may differ, two such hashes agree in at least one whole band. So only hashes
    that share a band are compared: with 25 bands of 10 bits, two or three in a hundred of all pairs.
    """
    bits = np.unpackbits(np.ascontiguousarray(hashes).view(np.uint8), axis=1)
    width = BITS // _BANDS
    # Every 25th bit, so that coarse frequencies, alike in most images, are spread over the bands.
    bands = [bits[:, band : width * _BANDS : _BANDS] @ (1 << np.arange(width)) for band in range(_BANDS)]
    keys = np.stack(bands, axis=1).astype(np.int16)
    found = np.concatenate([_pairs_first_alike_in(band, keys, hashes, limit) for band in range(_BANDS)])
    found = found[np.lexsort((found[:, 1], found[:, 0]))]
    return found, _distance(hashes, found[:, 0], found[:, 1])


def _pairs_first_alike_in(band: int, keys: npt.NDArray[np.int16], hashes: Hashes, limit: int) -> Rows:
    """The near pairs that agree in this band and in none before it, so that each is found once however many bands it
    shares: the frames of a video share nearly all."""
    order = np.argsort(keys[:, band], kind="stable")
    own, earlier, hashes = keys[order, band], keys[order, :band], hashes[order]
    pairs = [np.empty((0, 2), np.intp)]
    step = 1
    while len(same := np.flatnonzero(own[step:] == own[:-step])):
        near = same[_distance(hashes, same, same + step) <= limit]
        near = near[~(earlier[near] == earlier[near + step]).any(axis=1)]
        pairs.append(np.stack([order[near], order[near + step]], axis=1))
        step += 1
    return np.sort(np.concatenate(pairs), axis=1)


def _distance(hashes: Hashes, left: Rows, right: Rows) -> npt.NDArray[np.int64]:
    return np.bitwise_count(hashes[left] ^ hashes[right]).sum(axis=1, dtype=np.int64)
