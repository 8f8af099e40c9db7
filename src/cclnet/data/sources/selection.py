"""Options that change a table after it was read, whatever its source: images and classes to leave out, classes to
merge, groups from names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cclnet.data.identifiers import compile_regex, groups_by_regex
from cclnet.data.sources.source import SourceNotes, encode, nfc
from cclnet.data.table import ImageTable, listed
from cclnet.errors import InputError, unknown
from cclnet.settings import DataOptions


def is_excluded(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern fits the name of an image, or its last part.

    >>> [is_excluded(name, ["*_mask.png", "bad/*"]) for name in ("a/1_mask.png", "bad/2.png", "a/bad/3.png")]
    [True, True, False]
    """
    last = name.rpartition("/")[2]
    return any(fnmatchcase(name, pattern) or fnmatchcase(last, pattern) for pattern in patterns)


def keep(names: Sequence[str], notes: SourceNotes, options: DataOptions) -> npt.NDArray[np.bool_]:
    """Return which of the names no pattern of ``exclude`` fits, [N]; the others are noted."""
    patterns = options.exclude_patterns
    left_out = [is_excluded(name, patterns) for name in names]
    notes.note("images left out by exclude", [name for name, out in zip(names, left_out, strict=True) if out])
    if patterns and not any(left_out):
        notes.note("patterns of exclude that fit no image", list(patterns))
    return ~np.array(left_out, dtype=np.bool_)


def check_options(options: DataOptions) -> None:
    """Refuse options of :func:`select` that no table can be selected with."""
    if options.group_regex:
        compile_regex(options.group_regex)
        if options.group_column:
            raise InputError("group_column and group_regex both give the groups: choose one.")
    if options.merge_labels and not Path(options.merge_labels).expanduser().is_file():
        raise InputError(f"there is no table of classes to merge at {options.merge_labels} (merge_labels).")


def select(table: ImageTable, notes: SourceNotes, options: DataOptions) -> ImageTable:
    """Return the table as the options ask for it; what was left out or changed is noted."""
    check_options(options)
    if options.exclude_patterns:
        table = table.select(np.flatnonzero(keep(table.names, notes, options)))
    if options.merge_labels:
        table = _merge_labels(table, notes, Path(options.merge_labels).expanduser())
    if options.group_regex:
        found = groups_by_regex(table.names, options.group_regex)
        table = replace(table, groups=notes.fill_groups(found, table.names))
    if options.min_class_size:
        table = _drop_small_classes(table, notes, options.min_class_size)
    _refuse_equal_numbers(table)
    _point_out_spellings(table, notes)
    return table


def _merge_labels(table: ImageTable, notes: SourceNotes, path: Path) -> ImageTable:
    new_name = _read_merged(path, table)
    merged = [new_name.get(name, name) for name in table.classes]
    changed = [f"{old} → {new or 'left out'}" for old, new in zip(table.classes, merged, strict=True) if old != new]
    notes.note(f"classes changed by {path.name}", changed)
    codes, classes = encode([name for name in merged if name], [name for name in table.classes if name in merged])
    of_class = np.full(len(merged), -1, dtype=np.int64)
    of_class[[i for i, name in enumerate(merged) if name]] = codes
    if table.multilabel:
        labels = np.zeros((len(table), len(classes)), dtype=np.uint8)
        for old, new in enumerate(of_class.tolist()):
            if new >= 0:
                labels[:, new] |= table.labels[:, old].astype(np.uint8)
        return replace(table, labels=labels, classes=classes)
    single = of_class[table.labels]
    kept = np.flatnonzero(single >= 0)
    return replace(table.select(kept), labels=single[kept], classes=classes)


def _read_merged(path: Path, table: ImageTable) -> Mapping[str, str]:
    """Return the new name of each class in a table with the columns old and new, in any order, or with two columns."""
    from cclnet.data.sources.manifest import read_sheet  # which needs this module for its own rows

    rows = read_sheet(path)
    by_name = {str(column).lower(): str(column) for column in rows.columns}
    named = {"old", "new"} <= by_name.keys()
    if not named and (len(by_name) != 2 or set(by_name.values()) & set(table.classes)):  # the first line is no header
        raise InputError(f"{path}: expected the columns old and new, got {', '.join(map(str, rows.columns))}.")
    old, new = ([by_name[n] for n in ("old", "new")] if "old" in by_name else list(rows.columns))[:2]
    names: dict[str, str] = {}
    for before, after in zip(rows[old].map(nfc), rows[new].map(nfc), strict=True):
        if before not in table.classes:
            raise unknown(f"class in {path.name}", before, table.classes)
        if names.setdefault(before, after) != after:
            raise InputError(f"{path}: class {before} has two new names, {names[before]} and {after}.")
    return names


def _drop_small_classes(table: ImageTable, notes: SourceNotes, fewest: int) -> ImageTable:
    counts = table.class_counts()
    small = np.flatnonzero((counts > 0) & (counts < fewest))
    notes.note(
        f"classes with fewer than {fewest} images, left out", [f"{table.classes[k]} ({counts[k]})" for k in small]
    )
    if table.multilabel:  # an image keeps its other labels
        kept = np.flatnonzero(counts >= fewest)
        return replace(table, labels=table.labels[:, kept], classes=tuple(table.classes[k] for k in kept))
    return table.select(np.flatnonzero(~np.isin(table.labels, small)))


def _refuse_equal_numbers(table: ImageTable) -> None:
    """Refuse 0 and 0.0 as two classes: a program wrote some of the labels as decimals."""
    spellings = defaultdict(list)
    for name in table.classes:
        spellings[re.sub(r"^(\d+)\.0+$", r"\1", name)].append(name)
    if alike := [" and ".join(names) for names in spellings.values() if len(names) > 1]:
        raise InputError(
            f"{table.root}: labels that are the same number would be different classes: {listed(alike)}. Write each "
            "class in one way, or join them with merge_labels (--merge-labels: a table with the columns old and new)."
        )


def _point_out_spellings(table: ImageTable, notes: SourceNotes) -> None:
    """Note classes whose names differ only in case, spaces or punctuation: mostly one class in two spellings."""
    spellings = defaultdict(list)
    for name in table.classes:
        letters = "".join(c for c in name.casefold() if c.isalnum())
        spellings[name if letters.isdecimal() else letters or name].append(name)  # 1.5 is not 15
    alike = [" and ".join(names) for names in spellings.values() if len(names) > 1]
    notes.note("classes that may be the same in several spellings; merge_labels (--merge-labels) joins them", alike)
