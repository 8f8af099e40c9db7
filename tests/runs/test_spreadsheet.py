"""No cell is a formula to a spreadsheet, and every text is read as it was."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cclnet.runs.folder import SplitTable, read_split_file, write_split_file
from cclnet.runs.model import read_soft_labels, write_soft_labels
from cclnet.runs.predictions import Predictions, read_predictions, write_predictions
from cclnet.runs.spreadsheet import mark_texts, unmark_texts

NAMES = ("=1+1", "+a", "-b", "@c", "'=d", "''-e", "'t Hooft", '=cmd|"x"!A1', "plain")


@given(st.lists(st.text("=+-@'\t\ra|", max_size=6)))
def test_every_text_comes_back_and_none_is_a_formula(texts: list[str]) -> None:
    cells = mark_texts(texts)
    assert unmark_texts(cells) == texts
    assert len(set(cells)) == len(set(texts))
    assert not any(cell[:1] in set("=+-@\t\r") for cell in cells if cell)


def cells(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return [cell for row in csv.reader(file) for cell in row]


def test_files_of_a_run(tmp_path: Path) -> None:
    count = len(NAMES)
    names, classes = np.array([f"{name}.png" for name in NAMES]), tuple(name.replace("|", "!") for name in NAMES)
    p, splits = np.full((count, count), 0.5), np.array(["val"] * count)
    for labels in (np.arange(count), np.tri(count, dtype=np.uint8)):  # single-label, multi-label
        probabilities = p / (0.5 * count) if labels.ndim == 1 else p
        made = Predictions(names, labels, probabilities, classes, np.array(NAMES), splits)
        write_predictions(tmp_path / "p.csv", made)
        read = read_predictions(tmp_path / "p.csv")
        assert read.classes == classes
        for field in ("images", "labels", "groups"):
            np.testing.assert_array_equal(getattr(read, field), getattr(made, field))
    matrix = np.random.default_rng(0).dirichlet(np.ones(count), count)
    write_soft_labels(tmp_path / "s.csv", NAMES, matrix)
    found, values = read_soft_labels(tmp_path / "s.csv")
    assert found == NAMES
    np.testing.assert_array_equal(values, matrix)
    write_split_file(tmp_path / "split.csv", SplitTable(names, splits, np.array(NAMES), np.array(NAMES)))
    split = read_split_file(tmp_path / "split.csv")
    assert split.images.tolist() == names.tolist() and split.groups.tolist() == split.labels.tolist() == list(NAMES)
    for file in ("p.csv", "s.csv", "split.csv"):
        assert not any(cell[:1] in set("=+-@") for cell in cells(tmp_path / file) if cell)
