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

from cclnet.errors import InputError
from cclnet.runs.split_file import SPLITS


@dataclass(frozen=True)
class ImageTable:
    """Images with labels and, where known, groups and splits. All sequences have length N.

    Attributes:
        source: name of the recognised layout ("ISIC challenge folder").
        root: the file or folder the table was read from; image files lie inside it.
        names: unique names of the images, as they appear in split.csv and predictions.csv.
        images: one path per image, or one uint8 array [N, H, W] or [N, H, W, C].
        labels: class indices, int64 [N]; or for multi-label data zeros and ones, uint8 [N, K].
        classes: names of the K classes.
        groups: lesion or patient of each image, which must not be divided between splits; None where unknown.
        splits: "train", "calibration", "val" or "test" for each image, or None where not given.
        extra: further columns, one row per image.
        problems: one sentence for each kind of image or label that was left out, with the reason.
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

    def select(self, rows: npt.NDArray[np.intp]) -> ImageTable:
        """Return the table of the given rows, in their order."""
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
