"""Split a table into train, calibration, val and test: by group, by class, in folds, as given, or from split.csv."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from cclnet.data.table import ImageTable, listed
from cclnet.errors import InputError
from cclnet.runs.folder import SplitTable, leaks, read_split_file
from cclnet.runs.predictions import SPLITS
from cclnet.settings import SplitSettings

SplitNames = npt.NDArray[np.str_]  # one of SPLITS per image
Counts = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]
_SPLIT_DTYPE = f"<U{max(map(len, SPLITS))}"


def make_split(table: ImageTable, settings: SplitSettings | None = None) -> SplitNames:
    """Return the split name of each image, [N]."""
    settings = settings or SplitSettings()
    if settings.file:
        splits, what = read_split(settings.file, table), f"the split in {settings.file}"
    elif (given := _given_splits(table, settings)) is not None:
        splits, what = given, f"the split that comes with the {table.source}"
    else:
        return _random_split(table, settings)
    _refuse_leaks(splits, table, settings, what)
    return splits


def split_kind(table: ImageTable, settings: SplitSettings) -> str:
    """How ``make_split`` splits a table: "file", "given", "group" or "class"."""
    if settings.file:
        return "file"
    has_splits = table.splits is not None and len(np.unique(table.splits)) > 1
    if settings.by == "given" or (settings.by == "auto" and has_splits):
        return "given"
    return settings.by if settings.by != "auto" else _default_by(table)


def fold_settings(table: ImageTable, settings: SplitSettings, folds: int) -> list[SplitSettings]:
    """Return the settings of each fold of a cross-validation: fold f is the validation split of the f-th.

    A test split that comes with the data is kept; other given splits are divided anew.
    """
    by = settings.by if settings.by in ("group", "class") else _default_by(table)
    return [replace(settings, by=by, folds=folds, fold=fold) for fold in range(folds)]


def assign_folds(table: ImageTable, settings: SplitSettings, folds: int) -> Indices:
    """Return the cross-validation fold of each image, [N], from 0; -1 for images of a test split."""
    fold_of = np.full(len(table), -1, dtype=np.intp)
    for fold, own in enumerate(fold_settings(table, settings, folds)):
        fold_of[make_split(table, own) == "val"] = fold
    return fold_of


def _given_splits(table: ImageTable, settings: SplitSettings) -> SplitNames | None:
    """Return the splits that came with the table, with a calibration split taken from train where settings ask for
    one; None where they are not to be used."""
    has_splits = table.splits is not None and len(np.unique(table.splits)) > 1
    if settings.by == "given" and not has_splits:
        raise InputError(
            f"split: by = 'given', but the {table.source} has no splits. "
            "Name its split column, or split by group or class."
        )
    if table.splits is None or not has_splits or settings.by not in ("auto", "given"):
        return None
    if settings.folds is not None or settings.test > 0:
        raise InputError(
            f"split: the {table.source} comes with splits, so folds and a test share cannot be drawn. "
            "Set by = 'group' or by = 'class' to split its images anew (a given test split is kept)."
        )
    splits = table.splits.astype(_SPLIT_DTYPE)
    if "train" not in splits:
        raise InputError(
            f"split: the {table.source} comes with {listed(sorted(set(splits.tolist())))} and no train. Set by = "
            "'class' (--set split.by=class) or by = 'group' to split its images anew (a given test split is kept); "
            "cclnet predict uses the set as it is."
        )
    if settings.calibration > 0:
        if "calibration" in splits:
            raise InputError(f"split: the {table.source} already has a calibration split; leave calibration at 0.")
        _take_share(splits, "calibration", settings.calibration * len(table), table, _default_by(table), settings.seed)
    return splits


def _default_by(table: ImageTable) -> str:
    return "class" if table.groups is None else "group"


def _random_split(table: ImageTable, settings: SplitSettings) -> SplitNames:
    """Take test, val and calibration from train, in this order. Each has its own random stream, so adding one of them
    does not change those before it."""
    by = settings.by if settings.by != "auto" else _default_by(table)
    if by == "group" and table.groups is None:
        raise InputError(
            f"split: by = 'group', but the {table.source} has no groups. Name its group column (--group-column), find "
            "them in the image names (--group-regex), or split by class."
        )
    splits = np.full(len(table), "train", dtype=_SPLIT_DTYPE)
    if table.splits is not None and "test" in table.splits:
        if settings.test > 0:
            raise InputError(f"split: the {table.source} already has a test split; leave test at 0.")
        splits[table.splits == "test"] = "test"
    available = int((splits == "train").sum())
    if settings.test > 0:
        _take_share(splits, "test", settings.test * available, table, by, settings.seed)
    if settings.folds is not None:
        shares = [1 / settings.folds] * settings.folds
        _take(splits, "val", shares, settings.fold, f"{settings.folds} folds", table, by, settings.seed)
    elif settings.val > 0:
        _take_share(splits, "val", settings.val * available, table, by, settings.seed)
    if settings.calibration > 0:
        _take_share(splits, "calibration", settings.calibration * available, table, by, settings.seed)
    if by == "group":
        _refuse_leaks(splits, table, settings, f"the test split that comes with the {table.source}")
    return splits


def _take_share(splits: SplitNames, name: str, images: float, table: ImageTable, by: str, seed: int) -> None:
    """Move about ``images`` images from train to the split ``name``, in place."""
    left = int((splits == "train").sum())
    share = images / left if left else 1.0
    if share >= 1:
        raise InputError(f"split: {name} needs {images:g} images, but only {left} are left in train.")
    _take(splits, name, [1 - share, share], 1, f"{name} and train", table, by, seed)


def _take(
    splits: SplitNames, name: str, shares: list[float], taken: int, what: str, table: ImageTable, by: str, seed: int
) -> None:
    """Divide train by ``shares`` and move the subset with index ``taken`` to the split ``name``, in place."""
    rows = np.flatnonzero(splits == "train")
    unit, counts = _units(table, rows, by)
    present = (counts[:, :-1] > 0).sum(axis=0)
    needed, units = len(shares), "groups" if by == "group" else "images"
    if short := [f"{c} ({n})" for c, n in zip(table.classes, present, strict=True) if 0 < n < needed]:
        raise InputError(
            f"split: {what} need at least {needed} {units} of every class. Too few {units}: {', '.join(short)}. "
            "Leave these classes out with min_class_size (--min-class-size), merge them with others (--merge-labels), "
            "add images, or ask for fewer splits."
        )
    generator = np.random.default_rng([seed, SPLITS.index(name)])
    splits[rows[stratify(counts, shares, generator)[unit] == taken]] = name


def _units(table: ImageTable, rows: Indices, by: str) -> tuple[Indices, Counts]:
    """Return the unit (group or image) of each row, and the images of each class and in total per unit, [U, K + 1].
    Units are sorted by name, so the order of the rows does not matter."""
    keys = np.asarray(table.names, dtype=str)
    if by == "group":
        assert table.groups is not None
        # An image without a group is a group of its own.
        keys = np.where(table.groups == "", np.char.add("\0image ", keys), table.groups)
    unit = np.unique(keys[rows], return_inverse=True)[1].reshape(-1)
    counts = np.zeros((unit.max(initial=-1) + 1, table.num_classes + 1), dtype=np.int64)
    if table.multilabel:
        np.add.at(counts[:, :-1], unit, table.labels[rows])
    else:
        np.add.at(counts, (unit, table.labels[rows]), 1)
    np.add.at(counts[:, -1], unit, 1)
    return unit, counts


def stratify(counts: Counts, fractions: npt.ArrayLike, generator: np.random.Generator) -> Indices:
    """Assign indivisible units (images, lesions, patients) to P subsets so that every class keeps its ratio, [U].

    1. Units with equal counts are interchangeable: each subset gets its share of them, rounded down, at random.
    2. The remaining units are placed one by one, largest first, each where it least increases

           sum over subsets p and classes k of (have_pk - target_pk)^2 / (target_pk * total_k),

       the deviation from the target ratios, weighted so that small subsets and rare classes count as much.
    3. A subset without any unit of a class gets one from a subset that can spare it.

    ``counts`` are the images of each class in each unit, [U, K]; ``fractions`` the share of each subset, [P], above
    zero, summing to one.

    >>> counts = np.repeat([[1, 0], [0, 2]], [80, 20], axis=0)
    >>> subset = stratify(counts, [0.75, 0.25], np.random.default_rng(0))
    >>> [counts[subset == p].sum(axis=0).tolist() for p in (0, 1)]
    [[60, 30], [20, 10]]
    """
    shares = np.asarray(fractions, dtype=np.float64)
    totals = counts.sum(axis=0)
    counts, totals = counts[:, totals > 0], totals[totals > 0]
    subset, remaining = _assign_equal_units(counts, shares, generator)
    _assign_greedily(subset, remaining, counts, shares[:, None] * totals, totals, generator)
    _fill_missing_classes(subset, counts, len(shares))
    return subset


def _assign_equal_units(
    counts: Counts, shares: npt.NDArray[np.float64], generator: np.random.Generator
) -> tuple[Indices, Indices]:
    subset = np.full(len(counts), -1, dtype=np.intp)
    # Equal rows have equal fingerprints; sorting numbers is ten times faster than sorting rows.
    fingerprint = counts @ generator.integers(np.iinfo(np.int64).max, size=counts.shape[1])
    kind = np.unique(fingerprint, return_inverse=True)[1].reshape(-1)
    shuffled = generator.permutation(len(counts))
    by_kind = shuffled[np.argsort(kind[shuffled], kind="stable")]
    remaining = []
    for members in np.split(by_kind, np.flatnonzero(np.diff(kind[by_kind])) + 1):
        quota = np.floor(shares * len(members) + 1e-9).astype(np.intp)  # 1e-9: 0.3 * 10 is slightly below 3
        subset[members[: quota.sum()]] = np.repeat(np.arange(len(shares)), quota)
        remaining.append(members[quota.sum() :])
    return subset, np.concatenate(remaining)


def _assign_greedily(
    subset: Indices, units: Indices, counts: Counts, target: npt.NDArray[np.float64], totals: Counts,
    generator: np.random.Generator,
) -> None:  # fmt: skip
    units = generator.permutation(units)
    weight = (counts[units] / totals).max(axis=1, initial=0.0)
    # Sorted by size to within a factor of two and random inside that, so that the seed matters, not size alone.
    octave = np.floor(np.log2(np.maximum(weight, np.finfo(float).tiny)))
    units = units[np.argsort(-octave, kind="stable")]
    have = np.stack([counts[subset == p].sum(axis=0) for p in range(len(target))]).astype(np.float64)
    for unit in units:
        count = counts[unit]
        growth = (count * (count + 2 * (have - target)) / (target * totals)).sum(axis=1)
        subset[unit] = growth.argmin()
        have[subset[unit]] += count


def _fill_missing_classes(subset: Indices, counts: Counts, num_subsets: int) -> None:
    """Where a subset lacks a class, move it the smallest unit that is not the last of any class in its own subset.
    Every move fills one gap and opens none."""
    has = counts > 0
    present = np.stack([has[subset == p].sum(axis=0) for p in range(num_subsets)])
    for class_ in np.argsort(has.sum(axis=0), kind="stable"):
        for empty in np.flatnonzero(present[:, class_] == 0):
            units = np.flatnonzero(has[:, class_])
            spare = units[(~has[units] | (present[subset[units]] > 1)).all(axis=1)]
            if len(spare):
                unit = spare[np.lexsort((counts[spare].sum(axis=1), -present[subset[spare], class_]))[0]]
                present[subset[unit]] -= has[unit]
                subset[unit] = empty
                present[empty] += has[unit]


def divided_groups(splits: SplitNames, groups: SplitNames) -> dict[str, list[str]]:
    """Return the groups that occur in more than one split, each with its splits in order."""
    pairs = pd.DataFrame({"group": groups, "split": splits}).query("group != ''").drop_duplicates()
    divided = pairs[pairs.duplicated("group", keep=False)]
    return {str(group): sorted(rows["split"], key=SPLITS.index) for group, rows in divided.groupby("group")}


def _refuse_leaks(splits: SplitNames, table: ImageTable, settings: SplitSettings, what: str) -> None:
    if table.groups is None or settings.allow_leaks or not (divided := divided_groups(splits, table.groups)):
        return
    some = listed([f"{group} ({' and '.join(names)})" for group, names in divided.items()], 5)
    shares = "".join(
        f" {row.share:.1%} of the {row.split} images share a group with train."
        for row in leaks(splits, table.groups).itertuples()
        if row.shared
    )
    raise InputError(
        f"split: {what} has {len(divided)} groups in more than one split: {some}.{shares} Scores would be too "
        "high. Split by group instead (--set split.by=group), or continue with --set split.allow_leaks=true."
    )


def split_table(table: ImageTable, splits: SplitNames, folds: Indices | None = None) -> SplitTable:
    """The content of split.csv: image, split, group (where known), label and, where given, fold (-1: none)."""
    names, labels = np.array(table.names, dtype=np.str_), np.array(table.label_names(), dtype=np.str_)
    fold_names = None if folds is None else np.where(folds < 0, "", folds.astype(np.str_))
    return SplitTable(names, splits, table.groups, labels, fold_names)


def read_split(path: str | Path, table: ImageTable) -> SplitNames:
    """Return the splits in a split.csv, in the order of the table. The file must name every image once, and no others.
    Only the columns image and split are read."""
    rows = read_split_file(path).to_frame()
    known, in_file = set(table.names), set(rows["image"])
    wrong = rows["split"][~rows["split"].isin(SPLITS)].unique()
    problems = [
        ("images of the data are not in the file", [name for name in table.names if name not in in_file]),
        ("images in the file are not in the data", [name for name in rows["image"].unique() if name not in known]),
        ("images are in the file more than once", list(rows["image"][rows["image"].duplicated()].unique())),
        (f"split names are none of {', '.join(SPLITS)}", [repr(name) for name in wrong]),
    ]
    if found := [f"{len(items)} {what}: {listed(items, 5)}" for what, items in problems if items]:
        raise InputError(f"{path} does not fit the {table.source}. {'. '.join(found)}. Was it written for other data?")
    split_of = dict(zip(rows["image"], rows["split"], strict=True))
    return np.array([split_of[name] for name in table.names], dtype=_SPLIT_DTYPE)
