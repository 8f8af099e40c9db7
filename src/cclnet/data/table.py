"""ImageTable: the images, labels, groups and splits that every data source returns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from cclnet.data.archives import ArchivedImages
from cclnet.errors import InputError
from cclnet.runs.predictions import SPLITS, label_texts

SPLIT_NAMES = {
    "train": "train", "training": "train",
    "calibration": "calibration", "calib": "calibration",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip


def listed(names: Sequence[object], limit: int = 8) -> str:
    """Join the first few of many names. Bytes that are no UTF-8 are escaped (``\\udcff``), so that files can have them.

    >>> listed(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    shown = ", ".join(str(name) for name in names[:limit])
    shown = shown.encode("utf-8", "backslashreplace").decode()
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit:,} more"


@dataclass(frozen=True)
class ImageTable:
    """Images with labels and, where known, groups and splits. All sequences have length N."""

    source: str  # name of the layout ("ISIC challenge folder")
    root: Path  # file or folder the table was read from; image files lie inside it
    names: Sequence[str]  # unique, as in split.csv and predictions.csv
    images: Sequence[Path] | npt.NDArray[np.uint8]  # paths, or one array [N, H, W] or [N, H, W, C]
    labels: npt.NDArray[np.int64] | npt.NDArray[np.uint8]  # class indices [N]; multi-label: zeros and ones [N, K]
    classes: tuple[str, ...]
    groups: npt.NDArray[np.str_] | None = None  # lesions or patients, not to be divided between splits
    splits: npt.NDArray[np.str_] | None = None  # train, calibration, val or test
    extra: pd.DataFrame = field(default_factory=pd.DataFrame)  # further columns
    problems: tuple[str, ...] = ()  # one sentence per kind of image or label that was left out
    columns: str = ""  # of a table: which of its columns were read, in words

    def __post_init__(self) -> None:
        count = len(self.names)
        for what, column in (("images", self.images), ("labels", self.labels), ("groups", self.groups),
                             ("splits", self.splits)):  # fmt: skip
            if column is not None and len(column) != count:
                raise InputError(f"{self.source}: {count} image names but {len(column)} {what}.")
        if len(set(self.names)) != count:
            raise InputError(f"{self.source}: image names are not unique.")
        if self.splits is not None and (odd := sorted(set(self.splits.tolist()) - set(SPLITS))):
            raise InputError(f"{self.source}: splits must be among {', '.join(SPLITS)}, got {', '.join(odd)}.")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def multilabel(self) -> bool:
        return self.labels.ndim == 2

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def fingerprint(self) -> str:
        """Return a hash of names, labels, classes and groups; the location of the images does not matter."""
        digest = hashlib.blake2b(digest_size=8)
        for values in (self.names, self.classes, () if self.groups is None else self.groups.tolist()):
            digest.update(json.dumps(list(values)).encode())
        digest.update(np.ascontiguousarray(self.labels).tobytes())
        return digest.hexdigest()

    def class_counts(self, rows: npt.NDArray[np.intp] | None = None) -> npt.NDArray[np.int64]:
        """Return the number of images of each class, [K], over all rows or the given ones."""
        labels = self.labels if rows is None else self.labels[rows]
        if self.multilabel:
            return labels.sum(axis=0, dtype=np.int64)
        return np.bincount(labels, minlength=self.num_classes).astype(np.int64)

    def label_names(self) -> list[str]:
        """Return the class name of each image; the classes of a multi-label image are joined with "|"."""
        return label_texts(self.labels, self.classes)

    def in_words(self, splits: npt.NDArray[np.str_] | None = None) -> str:
        """Return in one line how the data was read, so that a wrong reading is seen before it is trained on."""
        counts = zip(self.classes, self.class_counts().tolist(), strict=True)
        classes = listed([f"{name} {count:,}" for name, count in counts], 10)
        text = f"{self.source}: {len(self):,} images, {self.num_classes} classes ({classes})"
        text += "" if self.groups is None else f", {len(np.unique(self.groups)):,} groups"
        if splits is not None:
            present = [split for split in SPLITS if split in splits]
            text += f"; {', '.join(f'{split} {np.count_nonzero(splits == split):,}' for split in present)}"
        return text + (f"; {self.columns}" if self.columns else "")

    def select(self, rows: npt.NDArray[np.intp]) -> ImageTable:
        """Return the table of the given rows, in their order."""
        images: Sequence[Path] | npt.NDArray[np.uint8]
        if isinstance(self.images, ArchivedImages):
            images = self.images.select(rows)
        else:
            images = self.images[rows] if isinstance(self.images, np.ndarray) else [self.images[i] for i in rows]
        return replace(
            self, names=[self.names[i] for i in rows], images=images, labels=self.labels[rows],
            groups=None if self.groups is None else self.groups[rows],
            splits=None if self.splits is None else self.splits[rows],
            extra=self.extra if self.extra.empty else self.extra.iloc[rows].reset_index(drop=True),
        )  # fmt: skip
