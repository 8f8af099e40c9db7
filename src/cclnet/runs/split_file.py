"""split.csv: the split (train, calibration, val, test) of every image of a run.

Columns: ``image`` and ``split``; where known ``group`` (lesion or patient, empty where unknown) and ``label`` (several
labels of one image are joined by ``|``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from cclnet.errors import InputError
from cclnet.files import write_whole

SPLITS = ("train", "calibration", "val", "test")
Strings = npt.NDArray[np.str_]


@dataclass(frozen=True)
class SplitTable:
    """The content of split.csv, [N] each; ``groups`` and ``labels`` are None where the file has no such column."""

    images: Strings
    splits: Strings
    groups: Strings | None = None
    labels: Strings | None = None

    def to_frame(self) -> pd.DataFrame:
        """The table with the columns image, split and, where known, group and label."""
        columns = {"image": self.images, "split": self.splits, "group": self.groups, "label": self.labels}
        return pd.DataFrame({name: column.tolist() for name, column in columns.items() if column is not None})


def write_split_file(path: str | Path, table: SplitTable) -> None:
    """Write split.csv whole."""
    write_whole(path, table.to_frame().to_csv(index=False, lineterminator="\n"))


def read_split_file(path: str | Path) -> SplitTable:
    """Read a split.csv. The column ``part`` of files written before version 0.2 is read as ``split``."""
    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # pandas' parser errors and undecodable bytes are ValueErrors
        raise InputError(f"{path} cannot be read as comma-separated text: {error}. Fix or remove it.") from error
    if "split" not in frame:
        frame = frame.rename(columns={"part": "split"})
    if missing := [name for name in ("image", "split") if name not in frame]:
        raise InputError(
            f"{path} has no column {' and '.join(missing)}; found {', '.join(map(str, frame))}. Fix or remove it."
        )
    columns = {
        name: frame[name].to_numpy(dtype=np.str_) for name in ("image", "split", "group", "label") if name in frame
    }
    return SplitTable(columns["image"], columns["split"], columns.get("group"), columns.get("label"))


def leaks(
    splits: Strings, groups: Strings, labels: npt.NDArray[np.integer] | None = None, classes: Sequence[str] = ()
) -> pd.DataFrame:
    """For each split but train: how many of its images belong to a group that also has images in train.

    Returns the columns split, class, images, shared, share; one row per split (class "") and, with ``labels`` ([N]
    indices or [N, K] of zeros and ones), one row per split and class. An empty group is unknown and never shared.

    >>> splits, groups = np.array(["train", "train", "val", "val"]), np.array(["a", "b", "b", "c"])
    >>> leaks(splits, groups).to_dict("records")
    [{'split': 'val', 'class': '', 'images': 2, 'shared': 1, 'share': 0.5}]
    """
    shared = np.isin(groups, groups[splits == "train"]) & (groups != "")
    of_class = {"": np.full(len(splits), True)}
    if labels is not None:
        for index, name in enumerate(classes):
            of_class[name] = labels[:, index] > 0 if labels.ndim == 2 else labels == index
    rows = []
    for split in (name for name in SPLITS[1:] if name in splits):
        for name, members in of_class.items():
            inside = members & (splits == split)
            images, hit = int(inside.sum()), int((inside & shared).sum())
            rows.append((split, name, images, hit, hit / images if images else float("nan")))
    return pd.DataFrame(rows, columns=["split", "class", "images", "shared", "share"])
