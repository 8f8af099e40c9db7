"""The data set for open choices has no image that a table reports."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cclnet.data.cache import decode
from cclnet.data.sources import open_data
from cclnet.data.split import divided_groups, make_split
from cclnet.settings import SplitSettings
from similarity_cells import study_recipes, write_tuning_data


def test_the_slice_holds_nothing_of_what_is_reported(tmp_path: Path) -> None:
    table = open_data("synthetic:images=140,size=20")
    recipe = study_recipes()["tune"]
    sheet = write_tuning_data(table, recipe, tmp_path / "slice")
    made = open_data(sheet)
    splits = make_split(made, SplitSettings(by="given"))
    reported = make_split(table, SplitSettings(by="class", val=0.2, seed=0)) == "val"
    names = [Path(name).stem for name in made.names]
    assert set(names) == {name for name, held in zip(table.names, reported, strict=True) if not held}
    assert made.groups is not None and not divided_groups(splits, made.groups)
    assert 0.1 < (splits == "val").mean() < 0.3 and set(made.labels[splits == "val"]) == set(range(7))
    place = {name: row for row, name in enumerate(table.names)}
    pixels = decode(made, 20, cache_dir=tmp_path / "cache", progress=False)
    assert isinstance(table.images, np.ndarray)
    for row in (0, 50, len(made) - 1):
        np.testing.assert_array_equal(pixels.image(row), table.images[place[names[row]]])
        assert made.classes[made.labels[row]] == table.classes[table.labels[place[names[row]]]]


def test_files_are_linked_not_copied_and_made_once(tmp_path: Path) -> None:
    drawn = open_data("synthetic:images=70,size=20")
    first = write_tuning_data(drawn, {}, tmp_path / "first")
    files = open_data(first)
    second = write_tuning_data(files, {"split": {"by": "class"}}, tmp_path / "second")
    placed = next((tmp_path / "second" / "images").iterdir())
    assert placed.stat().st_nlink == 2
    before = second.stat().st_mtime_ns
    assert write_tuning_data(files, {}, tmp_path / "second").stat().st_mtime_ns == before
