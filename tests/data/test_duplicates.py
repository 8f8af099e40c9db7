"""Near duplicates: all pairs that a search over all pairs finds, and what the hash does and does not see."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from cclnet.data.audit import BITS, BLANK, NEAR, near_pairs, perceptual_hash, same_pixels
from cclnet.data.cache import DecodedImages


def picture(seed: int) -> Image.Image:
    grain = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    return Image.fromarray(grain).resize((320, 240), Image.Resampling.BICUBIC)


def compressed(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=40)
    return Image.open(file).convert("RGB")


def distance(left: Image.Image, right: Image.Image) -> int:
    hashes = [perceptual_hash(np.asarray(image))[0] for image in (left, right)]
    return int(np.bitwise_count(hashes[0] ^ hashes[1]).sum())


CHANGES = {
    "another compression": compressed,
    "half the size": lambda image: image.resize((160, 120), Image.Resampling.BICUBIC),
    "another shape": lambda image: image.resize((240, 240), Image.Resampling.BICUBIC),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.1),
    "less contrast": lambda image: ImageEnhance.Contrast(image).enhance(0.7),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_hash_survives(change):
    assert all(distance(picture(seed), CHANGES[change](picture(seed))) <= NEAR for seed in range(10))


def test_other_images_are_far():
    distances = [distance(picture(seed), picture(seed + 1)) for seed in range(0, 20, 2)]
    assert min(distances) > 80
    assert np.mean(distances) == pytest.approx(BITS / 2, abs=16)


def test_an_even_surface_spans_no_grey_levels():
    assert perceptual_hash(np.full((40, 50, 3), 77, np.uint8))[1] <= BLANK
    assert perceptual_hash(np.asarray(picture(0)))[1] > 50


@pytest.mark.parametrize("limit", [0, 5, NEAR])
def test_pairs_are_those_of_a_search_over_all(limit):
    generator = np.random.default_rng(limit)
    bits = generator.integers(0, 2, (120, BITS), dtype=np.uint8)
    copies = bits[generator.integers(0, 120, 200)]
    for row, copy in enumerate(copies):
        copy[generator.choice(BITS, row % (2 * NEAR), replace=False)] ^= 1
    hashes = np.packbits(np.concatenate([bits, copies]), axis=1).view(np.uint64)
    pairs, differing = near_pairs(hashes, limit)
    everything = np.bitwise_count(hashes[:, None] ^ hashes[None]).sum(axis=2)
    expected = np.argwhere(np.triu(everything <= limit, k=1))
    assert len(expected) > 3
    np.testing.assert_array_equal(pairs, expected)
    np.testing.assert_array_equal(differing, everything[tuple(expected.T)])


@pytest.mark.parametrize("first", [0, 100, BITS - NEAR])
def test_bits_that_differ_side_by_side_are_found_too(first):
    bits = np.random.default_rng(0).integers(0, 2, (2, BITS), dtype=np.uint8)
    bits[1] = bits[0]
    bits[1, first : first + NEAR] ^= 1
    pairs, differing = near_pairs(np.packbits(bits, axis=1).view(np.uint64))
    assert pairs.tolist() == [[0, 1]]
    assert differing.tolist() == [NEAR]


def test_frames_of_one_video_are_found_once_each_and_quickly():
    """Two thousand nearly equal hashes share nearly all bands: 2 million pairs, none twice."""
    bits = np.tile(np.random.default_rng(0).integers(0, 2, BITS, dtype=np.uint8), (2000, 1))
    rows = np.arange(2000)
    bits[rows, rows % BITS] ^= 1
    began = time.process_time()
    pairs, differing = near_pairs(np.packbits(bits, axis=1).view(np.uint64))
    assert len(pairs) == 2000 * 1999 // 2 and differing.max() == 2
    assert time.process_time() - began < 60  # it was minutes, and gigabytes, when each was found in every band


@pytest.mark.parametrize("count", [0, 1])
def test_no_pairs_among_none_or_one(count):
    pairs, differing = near_pairs(np.zeros((count, 4), np.uint64))
    assert pairs.shape == (0, 2)
    assert differing.shape == (0,)


def test_same_pixels_in_another_shape_are_another_image():
    array = np.zeros((4, 2, 6, 3), np.uint8)
    array[1:, 0] = 9
    images = DecodedImages.from_array(array)
    images.heights[3], images.widths[3] = 3, 4
    hashes = np.zeros((4, 4), np.uint64)
    assert same_pixels(hashes, images, np.arange(4)) == {2: 1}
    assert same_pixels(hashes, images, np.array([0, 2])) == {}
