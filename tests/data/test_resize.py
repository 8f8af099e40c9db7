"""Resizing without torch: the same bits, so that a model without torch sees what it was trained on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cclnet.data.image_io import read_resized, resize, resize_without_torch

SIDES = st.integers(1, 150)


@settings(max_examples=150, deadline=None)
@given(SIDES, SIDES, SIDES, SIDES, st.integers(0, 2**31), st.booleans())
def test_the_bits_of_torch(height: int, width: int, new_height: int, new_width: int, seed: int, hard: bool) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    if hard:  # black and white, where the cubic overshoots and is cut off
        pixels = np.where(pixels > 127, 255, 0).astype(np.uint8)
    np.testing.assert_array_equal(
        resize_without_torch(pixels, new_height, new_width), resize(pixels, new_height, new_width)
    )


def test_one_colour_stays_that_colour() -> None:
    pixels = np.full((37, 53, 3), (10, 200, 255), np.uint8)
    assert (resize_without_torch(pixels, 20, 90) == (10, 200, 255)).all()


WITHOUT_TORCH = """
import sys
import numpy as np
from cclnet.data.image_io import read_resized
np.save(sys.argv[2], read_resized(sys.argv[1], 40))
assert "torch" not in sys.modules
"""


def test_files_are_read_alike_in_a_process_without_torch(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.jpg")
    subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "noise.jpg"), str(tmp_path / "out.npy")], check=True
    )
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), read_resized(tmp_path / "noise.jpg", 40))


def test_the_content_of_a_file_is_as_good_as_the_file(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 200, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.jpg")
    path = tmp_path / "noise.jpg"
    np.testing.assert_array_equal(read_resized(path.read_bytes(), 40), read_resized(path, 40))
