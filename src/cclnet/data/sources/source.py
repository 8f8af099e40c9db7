"""What all data sources share: the options of the user, notes on excluded images, and the final checks of a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cclnet.data.table import ImageTable, listed
from cclnet.errors import InputError
from cclnet.settings import DataOptions


@dataclass(frozen=True)
class Source:
    """One data layout. ``find`` returns the files or folders that identify it, none if the path has another layout."""

    title: str
    layout: str
    find: Callable[[Path], list[Path]]
    read: Callable[[Path, DataOptions], ImageTable]


SPLIT_NAMES = {
    "train": "train", "training": "train",
    "calibration": "calibration", "calib": "calibration",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip


@dataclass
class SourceNotes:
    """What to report about a source: ``excluded`` (refused by strict) and ``notes`` (no fault)."""

    excluded: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def exclude(self, what: str, names: Sequence[object]) -> None:
        """Report that these were left out, with their number and the first names; nothing if there are none."""
        self.excluded += [f"{what}: {len(names):,} ({listed(names)})"] if names else []

    def note(self, what: str, names: Sequence[object]) -> None:
        self.notes += [f"{what}: {len(names):,} ({listed(names)})"] if names else []


def encode(labels: Sequence[str], order: Sequence[str] = ()) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Return class indices and classes: those of ``order`` first, then the others in natural order.

    >>> encode(["grade 10", "grade 9", "nv"], order=["nv"])
    (array([2, 1, 0]), ('nv', 'grade 9', 'grade 10'))
    """
    present = set(labels)
    ordered = [name for name in order if name in present]
    classes = (*ordered, *sorted(present.difference(ordered), key=_natural))
    index = {name: i for i, name in enumerate(classes)}
    return np.array([index[label] for label in labels], dtype=np.int64), classes


def fill_groups(groups: Sequence[str], names: Sequence[str], notes: SourceNotes) -> npt.NDArray[np.str_]:
    """Return the groups; an image without a group gets a group of its own."""
    notes.note("images without a group, each taken alone", [n for n, g in zip(names, groups, strict=True) if not g])
    return np.array([group or f"alone: {name}" for name, group in zip(names, groups, strict=True)], dtype=np.str_)


def finish(table: ImageTable, notes: SourceNotes, strict: bool) -> ImageTable:
    """Drop classes without images, refuse a table that cannot be trained on, and add the notes as ``problems``. A
    single split is not a split of the data: ``splits`` becomes None."""
    if strict and notes.excluded:
        faults = "".join(f"\n  - {fault}" for fault in notes.excluded)
        raise InputError(f"{table.source} at {table.root}, strict:{faults}\nFix this, or read it without strict.")
    if len(table) == 0:
        faults = "; ".join(notes.excluded) or "the table is empty"
        raise InputError(f"{table.source} at {table.root}: no image has both a file and a label ({faults}).")
    counts = table.class_counts()
    notes.note("classes without an image, left out", [c for c, n in zip(table.classes, counts, strict=True) if not n])
    kept = np.flatnonzero(counts)
    labels = table.labels[:, kept] if table.multilabel else np.searchsorted(kept, table.labels)
    table = replace(table, labels=labels, classes=tuple(table.classes[i] for i in kept))
    if table.num_classes < 2:
        raise InputError(
            f"{table.source} at {table.root}: one class only ({', '.join(table.classes)}, {len(table):,} images). "
            "A classifier needs at least two; check the folder or the label column."
        )
    splits = table.splits if table.splits is not None and len(set(table.splits.tolist())) > 1 else None
    return replace(table, splits=splits, problems=(*notes.excluded, *notes.notes))


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key in natural order: 9 before 10, also inside a name."""
    pieces = re.split(r"(\d+)", name.casefold())
    return tuple((0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in pieces)
