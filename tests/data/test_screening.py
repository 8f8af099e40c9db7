"""What a run leaves out after decoding, and the copies that it counts across splits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from layouts import class_folders, draw
from PIL import Image

from cclnet.data import cache, screening
from cclnet.data.cache import DecodedImages, decode_readable
from cclnet.data.duplicates import VERSION, hash_images, perceptual_hashes, sample_rows
from cclnet.data.screening import screen
from cclnet.data.sources import open_data
from cclnet.errors import InputError
from cclnet.runs.data_summary import DataSummary
from cclnet.runs.folder import RunFolder
from cclnet.settings import AugmentSettings, Settings


def picture(path: Path, seed: int, quality: int | None = None) -> Path:
    """A smooth picture; with ``quality`` as JPEG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grain = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    image = Image.fromarray(grain).resize((64, 48), Image.Resampling.BICUBIC)
    image.save(path, **({} if quality is None else {"quality": quality}))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two classes in train, val and test. Test has an identical and a nearly identical copy of training images."""
    seed = 0
    for split, count in (("train", 6), ("val", 2), ("test", 3)):
        for label in ("a", "b"):
            for i in range(count):
                picture(tmp_path / split / label / f"{i}.png", seed)
                seed += 1
    picture(tmp_path / "test" / "a" / "copy.png", 0)
    picture(tmp_path / "test" / "b" / "again.jpg", 7, quality=60)
    return tmp_path


def run(data: Path, **options) -> screening.Screened:
    settings = Settings(data=str(data), cache_dir=str(data.parent / f"{data.name}-cache"), short_side=32,
                        augment=AugmentSettings(crop=32), **options)  # fmt: skip
    table = open_data(settings.data, settings)
    assert table.splits is not None
    return screen(table, table.splits, settings, progress=False)


def test_copies_of_training_images_are_counted(data: Path) -> None:
    found = run(data).summary.duplicates
    assert found is not None
    assert (found.compared, found.exact_groups, found.label_conflicts) == (24, 1, 0)
    assert found.exact == {"val": 0, "test": 1}
    assert found.near == {"val": 0, "test": 1}
    assert set(found.examples) == {
        ("test/a/copy.png", "train/a/0.png"),
        ("test/b/again.jpg", "train/b/1.png"),
    }
    assert "2 of 8 test images (25.0%)" in found.in_words("test", 8)
    assert found.in_words("val", 4) == ""
    assert any("--deduplicate" in line for line in run(data).summary.in_words())


def test_counts_are_the_same_from_pixels_in_memory(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of the decode pass, of an older cache and of arrays agree."""
    expected = run(data).summary.duplicates
    plain = screening.decode_readable

    def without_hashes(*arguments, **options):
        images, broken = plain(*arguments, **options)
        return DecodedImages(images.pixels, images.offsets, images.heights, images.widths), broken

    monkeypatch.setattr(screening, "decode_readable", without_hashes)
    assert run(data).summary.duplicates == expected


def test_deduplicate_leaves_out_the_training_copies(data: Path) -> None:
    picture(data / "train" / "a" / "two_labels.png", 99)
    picture(data / "train" / "b" / "two_labels.png", 99)
    screened = run(data, deduplicate=True)
    assert screened.summary.left_out == {
        "train/a/0.png": "a copy is in the split test",
        "train/b/1.png": "a copy is in the split test",
        "train/a/two_labels.png": "an identical image has another label",
        "train/b/two_labels.png": "an identical image has another label",
    }
    assert len(screened.table) == len(screened.splits) == len(screened.images) == 22
    found = screened.summary.duplicates
    assert found is not None
    assert not any(found.exact.values()) and found.exact_groups == found.label_conflicts == 0


def test_copies_in_other_folds_are_counted_and_left_out(data: Path) -> None:
    """An image of a fold is predicted by a model fitted on the other folds, one of the test split by one of all."""
    picture(data / "train" / "a" / "same_fold.png", 1)
    picture(data / "train" / "a" / "other_fold.png", 2)
    settings = Settings(data=str(data), cache_dir=str(data.parent / f"{data.name}-cache"), short_side=32,
                        augment=AugmentSettings(crop=32))  # fmt: skip
    table = open_data(settings.data, settings)
    splits = np.where(table.splits == "test", "test", "val")
    other = np.array(["other_fold" in name for name in table.names])
    fold = np.where(splits == "test", -1, np.where(other, 1, np.where(table.splits == "val", 2, 0)))
    found = screen(table, splits, settings, False, fold).summary.duplicates
    assert found is not None and found.exact_groups == 2
    assert found.exact == {"val": 2, "test": 1} and found.near == {"val": 0, "test": 1}
    left = screen(table, splits, replace(settings, deduplicate=True), False, fold)
    assert left.summary.left_out == {
        "train/a/0.png": "a copy is in the split test",
        "train/b/1.png": "a copy is in the split test",
        "train/a/other_fold.png": "a copy is in another fold",
    }
    assert left.summary.duplicates is not None and not any(left.summary.duplicates.exact.values())


def test_skip_unreadable_lists_what_it_leaves_out(data: Path) -> None:
    (data / "train" / "a" / "broken.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"1 of 25 images.*(?s:.*)--skip-unreadable"):
        run(data)
    screened = run(data, skip_unreadable=True)
    assert list(screened.summary.left_out) == ["train/a/broken.png"]
    assert str(data) not in screened.summary.left_out["train/a/broken.png"]
    assert len(screened.table) == 24
    assert any(line.startswith("images left out: 1") for line in screened.summary.in_words())


def test_near_duplicates_of_very_many_images_are_not_searched_for(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screening, "MOST_COMPARED", 10)
    found = run(data).summary.duplicates
    assert found is not None
    assert found.near is None
    assert found.exact == {"val": 0, "test": 1}


def test_the_summary_is_written_and_read(data: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_data_summary() == DataSummary()  # a run of an older version
    summary = run(data, deduplicate=True).summary
    folder.write_data_summary(summary)
    assert folder.read_data_summary() == summary


def test_hashes_of_another_version_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = open_data(class_folders(tmp_path / "data", {"a": 3, "b": 3}))
    images, _ = decode_readable(table, 16, tmp_path / "cache", progress=False)
    assert images.hashed is not None and (images.hashed["version"] == VERSION).all()
    older = images.hashed.copy()
    older["hash"], older["version"] = 0, VERSION - 1
    old = replace(images, hashed=older)
    cache._hash_older(old, workers=1)
    np.testing.assert_array_equal(old.hashed, images.hashed)


def test_hashes_of_many_are_those_of_each(tmp_path: Path) -> None:
    shapes = [(48, 64), (33, 31), (200, 40), (8, 8)]
    arrays = [np.asarray(Image.open(draw(tmp_path / f"{i}.png", i, shape))) for i, shape in enumerate(shapes)]

    class Images:
        def image(self, index: int) -> np.ndarray:
            return arrays[index]

    many = hash_images(Images(), [2, 0, 3, 1], workers=1)
    for hashed, row in zip(many, (2, 0, 3, 1), strict=True):
        np.testing.assert_array_equal(hashed["hash"], perceptual_hashes([sample_rows(arrays[row])])["hash"][0])
