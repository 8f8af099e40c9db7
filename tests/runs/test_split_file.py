"""split.csv: written and read again; files that lack something."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cclnet.errors import InputError
from cclnet.runs.split_file import SplitTable, read_split_file, write_split_file


def test_names_stay_text(tmp_path: Path) -> None:
    table = SplitTable(
        np.array(["007", 'a, "b"', "NA"]), np.array(["train", "val", "test"]), None, np.array(["1", "", "a|b"])
    )
    write_split_file(tmp_path / "split.csv", table)
    read = read_split_file(tmp_path / "split.csv")
    assert read.groups is None and read.labels is not None and table.labels is not None
    assert (read.images.tolist(), read.splits.tolist()) == (table.images.tolist(), table.splits.tolist())
    assert read.labels.tolist() == table.labels.tolist()


def test_image_and_split_suffice_and_the_old_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "split.csv").write_text("\ufeffpart,image\nval,a\n", encoding="utf-8")  # with a byte order mark
    read = read_split_file(tmp_path / "split.csv")
    assert (read.images.tolist(), read.splits.tolist(), read.groups, read.labels) == (["a"], ["val"], None, None)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "cannot be read"), (b"\xff\xfe\x00", "cannot be read"), (b"image,x\na,b\n", "no column split; found image"),
     (b"a,b\n1,2\n", "no column image and split")],
)  # fmt: skip
def test_what_is_no_split_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "split.csv").write_bytes(content)
    with pytest.raises(InputError, match=reason):
        read_split_file(tmp_path / "split.csv")
