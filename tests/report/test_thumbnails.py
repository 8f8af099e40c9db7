from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cclnet.data.table import ImageTable
from cclnet.report.html import data_uri, pixels, thumbnails


def opened(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/jpeg;base64,"))))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for kind, colour in (("red", (200, 0, 0)), ("blue", (0, 0, 200))):
        (tmp_path / kind).mkdir()
        for i in range(3):
            Image.new("RGB", (300, 200), colour).save(tmp_path / kind / f"{kind}{i}.png")
    return tmp_path


def test_pictures_are_small_and_of_the_right_image(folder: Path) -> None:
    from cclnet.data.sources import open_data

    names = [name for name in open_data(folder).names if "red" in name][:2]
    pictures, note = thumbnails(names, {"data": str(folder)})
    assert list(pictures) == names and note == ""
    picture = opened(pictures[names[0]])
    assert picture.size == (96, 64) and picture.getpixel((48, 32))[0] > 150  # type: ignore[index]


def test_data_that_has_moved_is_found_where_it_is_said_to_be(folder: Path) -> None:
    from cclnet.data.sources import open_data

    name = open_data(folder).names[0]
    assert thumbnails([name], {"data": "gone"}, data=str(folder))[0]
    pictures, note = thumbnails([name], {"data": "gone"})
    assert pictures == {} and note == (
        "The pictures are left out, because the data cannot be opened here: gone does not exist."
    )


def test_images_that_are_gone_or_broken_are_counted(folder: Path) -> None:
    from cclnet.data.sources import open_data

    names = list(open_data(folder).names)
    broken = next(path for path in folder.rglob("*0.png"))
    broken.write_bytes(broken.read_bytes()[:60])
    pictures, note = thumbnails([*names, "elsewhere"], {"data": str(folder)})
    assert len(pictures) == 5
    assert f"1 of these images are not in {folder}" in note and "1 of these images cannot be read: cannot read" in note


def test_a_run_that_does_not_say_where_its_images_are() -> None:
    assert thumbnails(["a"], {}) == ({}, "The pictures are left out: the run does not say where its images are.")
    assert thumbnails([], {"data": "gone"}) == ({}, "")


@pytest.mark.parametrize("shape", [(2, 30, 20), (2, 30, 20, 1), (2, 30, 20, 3)])
def test_images_held_in_an_array(shape: tuple[int, ...]) -> None:
    images = np.zeros(shape, np.uint8)
    images[1] = 255
    table = ImageTable("array", Path(), ["a", "b"], images, np.array([0, 1]), ("x", "y"))
    picture = opened(data_uri(pixels(table, 1)))
    assert picture.size == (20, 30) and picture.getpixel((5, 5)) == (255, 255, 255)
