"""The one table that every data source gives."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from cclnet.errors import InputError
from cclnet.runs.split_file import SPLITS


@dataclass(frozen=True)
class ImageTable:
    """Images with their labels, and where known their groups and parts. All sequences have length N.

    Attributes:
        source: what was recognised, in words ("ISIC challenge folder").
        root: the file or folder the table was read from; image files lie inside it.
        names: unique names of the images, as they appear in split.csv and predictions.csv.
        images: where the pixels are: a path for each image, or one uint8 array [N, H, W] or [N, H, W, C].
        labels: class indices, int64 [N]; or for several labels at once, uint8 [N, K] of zeros and ones.
        classes: names of the K classes.
        groups: what must stay on one side of a split (lesion, patient), or None where unknown.
        splits: "train", "calibration", "val" or "test" for each image, or None where not given.
        extra: any further columns, one row an image.
        problems: what was left out and why, one sentence each (an image without label, ...).
    """

    source: str
    root: Path
    names: Sequence[str]
    images: Sequence[Path] | npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64] | npt.NDArray[np.uint8]
    classes: tuple[str, ...]
    groups: npt.NDArray[np.str_] | None = None
    splits: npt.NDArray[np.str_] | None = None
    extra: pd.DataFrame = field(default_factory=pd.DataFrame)
    problems: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.names)
        for what, column in (("images", self.images), ("labels", self.labels), ("groups", self.groups),
                             ("splits", self.splits)):  # fmt: skip
            if column is not None and len(column) != count:
                raise InputError(f"{self.source}: {count} image names but {len(column)} {what}.")
        if len(set(self.names)) != count:
            raise InputError(f"{self.source}: image names are not unique.")
        if self.splits is not None and (odd := sorted(set(self.splits.tolist()) - set(SPLITS))):
            raise InputError(f"{self.source}: parts must be among {', '.join(SPLITS)}, got {', '.join(odd)}.")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def multilabel(self) -> bool:
        return self.labels.ndim == 2

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def fingerprint(self) -> str:
        """The same for the same names, labels, classes and groups, wherever the images lie."""
        found = hashlib.blake2b(digest_size=8)
        for part in (self.names, self.classes, () if self.groups is None else self.groups.tolist()):
            found.update(json.dumps(list(part)).encode())
        found.update(np.ascontiguousarray(self.labels).tobytes())
        return found.hexdigest()

    def class_counts(self, rows: npt.NDArray[np.intp] | None = None) -> npt.NDArray[np.int64]:
        """Images of each class (of the given rows), [K]."""
        labels = self.labels if rows is None else self.labels[rows]
        if self.multilabel:
            return labels.sum(axis=0, dtype=np.int64)
        return np.bincount(labels, minlength=self.num_classes).astype(np.int64)

    def select(self, rows: npt.NDArray[np.intp]) -> ImageTable:
        """The table of the given rows, in their order."""
        images = self.images[rows] if isinstance(self.images, np.ndarray) else [self.images[i] for i in rows]
        return replace(
            self,
            names=[self.names[i] for i in rows],
            images=images,
            labels=self.labels[rows],
            groups=None if self.groups is None else self.groups[rows],
            splits=None if self.splits is None else self.splits[rows],
            extra=self.extra if self.extra.empty else self.extra.iloc[rows].reset_index(drop=True),
        )
