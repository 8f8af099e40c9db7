"""Who trains and who is held out: drawn by class or by group, in folds, as given, or as written down before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from cclnet.data.table import ImageTable
from cclnet.errors import InputError
from cclnet.runs.split_file import SPLITS, SplitTable, leaks, read_split_file, write_split_file
from cclnet.settings import SplitSettings

# What a split gives away: groups (lesions, patients) that lie on two sides of it.


Texts = npt.NDArray[np.str_]


def groups_on_two_sides(parts: Texts, groups: Texts) -> dict[str, list[str]]:
    """Groups that lie in more than one part, each with its parts in order."""
    pairs = pd.DataFrame({"group": groups, "split": parts}).query("group != ''").drop_duplicates()
    divided = pairs[pairs.duplicated("group", keep=False)]
    return {str(group): sorted(held["split"], key=SPLITS.index) for group, held in divided.groupby("group")}


# Deal units (images, lesions, patients) out to parts so that every class keeps its ratio in each.


Counts = npt.NDArray[np.int64]
Index = npt.NDArray[np.intp]


def stratify(counts: Counts, fractions: npt.ArrayLike, generator: np.random.Generator) -> Index:
    """The part of each unit, [U], for units that cannot be divided.

    Units with the same content are of one kind and are interchangeable: of each kind every part gets its share,
    rounded down, at random. With lesions that is a stratification by class and by number of images at once. The
    few left over, and units like no other (patients with several diagnoses), are placed one by one, the heaviest
    first, each where it lowers

        sum over parts p and classes k of (have_pk - target_pk)^2 / (target_pk * total_k),

    which is how far every class is from its ratio, weighed so that small parts and rare classes count as much.
    At last a part without any image of a class gets one unit of it, where another part can spare it.

    Args:
        counts: images of each class in each unit, [U, K].
        fractions: share of each part, [P], above zero, summing to one.

    >>> counts = np.repeat([[1, 0], [0, 2]], [80, 20], axis=0)
    >>> part = stratify(counts, [0.75, 0.25], np.random.default_rng(0))
    >>> [counts[part == p].sum(axis=0).tolist() for p in (0, 1)]
    [[60, 30], [20, 10]]
    """
    shares = np.asarray(fractions, dtype=np.float64)
    totals = counts.sum(axis=0)
    counts, totals = counts[:, totals > 0], totals[totals > 0]
    part, left_over = _deal_by_kind(counts, shares, generator)
    _place_heaviest_first(part, left_over, counts, shares[:, None] * totals, totals, generator)
    _leave_no_class_out(part, counts, len(shares))
    return part


def _deal_by_kind(
    counts: Counts, shares: npt.NDArray[np.float64], generator: np.random.Generator
) -> tuple[Index, Index]:
    part = np.full(len(counts), -1, dtype=np.intp)
    # Equal rows have equal fingerprints; sorting numbers is ten times faster than sorting rows.
    fingerprint = counts @ generator.integers(np.iinfo(np.int64).max, size=counts.shape[1])
    kind = np.unique(fingerprint, return_inverse=True)[1].reshape(-1)
    shuffled = generator.permutation(len(counts))
    by_kind = shuffled[np.argsort(kind[shuffled], kind="stable")]
    left_over = []
    for members in np.split(by_kind, np.flatnonzero(np.diff(kind[by_kind])) + 1):
        quota = np.floor(shares * len(members) + 1e-9).astype(np.intp)  # 0.3 * 10 is a hair under three
        part[members[: quota.sum()]] = np.repeat(np.arange(len(shares)), quota)
        left_over.append(members[quota.sum() :])
    return part, np.concatenate(left_over)


def _place_heaviest_first(
    part: Index,
    units: Index,
    counts: Counts,
    target: npt.NDArray[np.float64],
    totals: Counts,
    generator: np.random.Generator,
) -> None:
    units = generator.permutation(units)
    weight = (counts[units] / totals).max(axis=1, initial=0.0)
    # Heavy to within a factor of two and random inside that, so that the seed decides, not the size alone.
    octave = np.floor(np.log2(np.maximum(weight, np.finfo(float).tiny)))
    units = units[np.argsort(-octave, kind="stable")]
    have = np.stack([counts[part == p].sum(axis=0) for p in range(len(target))]).astype(np.float64)
    for unit in units:
        count = counts[unit]
        growth = (count * (count + 2 * (have - target)) / (target * totals)).sum(axis=1)
        part[unit] = growth.argmin()
        have[part[unit]] += count


def _leave_no_class_out(part: Index, counts: Counts, num_parts: int) -> None:
    """Where a part lacks a class, move it a unit that is not the last of any class where it lies; the lightest such.
    Every move fills a gap and opens none."""
    has = counts > 0
    held = np.stack([has[part == p].sum(axis=0) for p in range(num_parts)])
    for class_ in np.argsort(has.sum(axis=0), kind="stable"):
        for empty in np.flatnonzero(held[:, class_] == 0):
            units = np.flatnonzero(has[:, class_])
            spare = units[(~has[units] | (held[part[units]] > 1)).all(axis=1)]
            if len(spare):
                unit = spare[np.lexsort((counts[spare].sum(axis=1), -held[part[spare], class_]))[0]]
                held[part[unit]] -= has[unit]
                part[unit] = empty
                held[empty] += has[unit]


Parts = npt.NDArray[np.str_]
_PART = f"<U{max(map(len, SPLITS))}"


def make_split(table: ImageTable, settings: SplitSettings | None = None) -> Parts:
    """The part of each image, [N]."""
    settings = settings or SplitSettings()
    if settings.file:
        parts = read_split(settings.file, table)
        _refuse_leaks(parts, table, settings, f"the split in {settings.file}")
    elif _take_as_given(table, settings):
        parts = _calibration_from_train(table, settings)
        _refuse_leaks(parts, table, settings, f"the split that comes with the {table.source}")
    else:
        parts = _draw(table, settings)
    return parts


def _take_as_given(table: ImageTable, settings: SplitSettings) -> bool:
    has_parts = table.splits is not None and len(np.unique(table.splits)) > 1
    if settings.by == "given" and not has_parts:
        raise InputError(
            f"split: by = 'given', but the {table.source} has no parts. "
            "Name its part column, or split by group or class."
        )
    given = has_parts and settings.by in ("auto", "given")
    if given and (settings.folds is not None or settings.test > 0):
        raise InputError(
            f"split: the {table.source} comes with parts, so there is nothing to draw folds or a test part from. "
            "Say by = 'group' or by = 'class' to divide its images anew (a test part that it has stays as it is)."
        )
    return given


def _calibration_from_train(table: ImageTable, settings: SplitSettings) -> Parts:
    assert table.splits is not None
    parts = table.splits.astype(_PART)
    if settings.calibration > 0:
        if "calibration" in parts:
            raise InputError(f"split: the {table.source} has a calibration part already; leave calibration at 0.")
        _take_out(parts, "calibration", settings.calibration * len(table), table, _safe_way(table), settings.seed)
    return parts


def _safe_way(table: ImageTable) -> str:
    return "class" if table.groups is None else "group"


def _draw(table: ImageTable, settings: SplitSettings) -> Parts:
    """Test, val and calibration one after the other out of "train", each with a random stream of its own, so that
    asking for one of them does not change those before it."""
    by = settings.by if settings.by != "auto" else _safe_way(table)
    if by == "group" and table.groups is None:
        raise InputError(
            f"split: by = 'group', but the {table.source} names no groups. Name its group column, or split by class."
        )
    parts = np.full(len(table), "train", dtype=_PART)
    if table.splits is not None and "test" in table.splits:
        if settings.test > 0:
            raise InputError(f"split: the {table.source} has a test part already; leave test at 0.")
        parts[table.splits == "test"] = "test"
    divided = int((parts == "train").sum())
    if settings.test > 0:
        _take_out(parts, "test", settings.test * divided, table, by, settings.seed)
    if settings.folds is not None:
        _take_fold(parts, settings, table, by)
    elif settings.val > 0:
        _take_out(parts, "val", settings.val * divided, table, by, settings.seed)
    if settings.calibration > 0:
        _take_out(parts, "calibration", settings.calibration * divided, table, by, settings.seed)
    if by == "group":
        _refuse_leaks(parts, table, settings, f"the test part that comes with the {table.source}")
    return parts


def _take_out(parts: Parts, name: str, images: float, table: ImageTable, by: str, seed: int) -> None:
    """Turn about so many images of "train" into part ``name``."""
    rows = np.flatnonzero(parts == "train")
    share = images / len(rows) if len(rows) else 1.0
    if share >= 1:
        raise InputError(f"split: {len(rows)} images are left to train on, too few to take {images:g} for {name}.")
    unit, counts = _units(table, rows, by)
    _refuse_too_few(counts, 2, table, by, f"{name} and train")
    generator = np.random.default_rng([seed, SPLITS.index(name)])
    parts[rows[stratify(counts, [1 - share, share], generator)[unit] == 1]] = name


def _take_fold(parts: Parts, settings: SplitSettings, table: ImageTable, by: str) -> None:
    assert settings.folds is not None
    rows = np.flatnonzero(parts == "train")
    unit, counts = _units(table, rows, by)
    _refuse_too_few(counts, settings.folds, table, by, f"{settings.folds} folds")
    generator = np.random.default_rng([settings.seed, SPLITS.index("val")])
    fold = stratify(counts, np.full(settings.folds, 1 / settings.folds), generator)
    parts[rows[fold[unit] == settings.fold]] = "val"


def _units(
    table: ImageTable, rows: npt.NDArray[np.intp], by: str
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """For each row its unit, and for each unit [U] its images of each class and altogether, [U, K + 1].

    Units are sorted by name, so that the order of the rows has no say.
    """
    keys = _group_keys(table) if by == "group" else np.asarray(table.names, dtype=str)
    unit = np.unique(keys[rows], return_inverse=True)[1].reshape(-1)
    counts = np.zeros((unit.max(initial=-1) + 1, table.num_classes + 1), dtype=np.int64)
    if table.multilabel:
        np.add.at(counts[:, :-1], unit, table.labels[rows])
    else:
        np.add.at(counts, (unit, table.labels[rows]), 1)
    np.add.at(counts[:, -1], unit, 1)
    return unit, counts


def _group_keys(table: ImageTable) -> npt.NDArray[np.str_]:
    """The groups, where an image without one is a group of its own."""
    assert table.groups is not None
    own = np.char.add("\0image ", np.asarray(table.names, dtype=str))
    return np.where(table.groups == "", own, table.groups)


def _refuse_too_few(counts: npt.NDArray[np.int64], needed: int, table: ImageTable, by: str, what: str) -> None:
    held = (counts[:, :-1] > 0).sum(axis=0)
    short = [f"{name} ({count})" for name, count in zip(table.classes, held, strict=True) if 0 < count < needed]
    if short:
        units = "groups" if by == "group" else "images"
        raise InputError(
            f"split: {what} need at least {needed} {units} of every class. Too few {units}: {', '.join(short)}. "
            "Leave these classes out, add images, or ask for fewer parts."
        )


def _refuse_leaks(parts: Parts, table: ImageTable, settings: SplitSettings, what: str) -> None:
    if table.groups is None or settings.allow_leaks:
        return
    if not (divided := groups_on_two_sides(parts, table.groups)):
        return
    some = ", ".join(f"{group} ({' and '.join(held)})" for group, held in list(divided.items())[:5])
    more = f" and {len(divided) - 5} more" if len(divided) > 5 else ""
    found = leaks(parts, table.groups)
    shares = "".join(
        f" {row.share:.1%} of the {row.split} images share a group with train."
        for row in found.itertuples()
        if row.shared
    )
    raise InputError(
        f"split: {what} has {len(divided)} groups on two sides: {some}{more}.{shares} Scores would look "
        "better than they are. Split by group instead, or set allow_leaks to go on all the same."
    )


def write_split(path: str | Path, table: ImageTable, parts: Parts) -> None:
    """split.csv: image, part, group (where known) and label, for people to read and for :func:`read_split`."""
    labels = np.array(_label_names(table), dtype=np.str_)
    write_split_file(path, SplitTable(np.array(table.names, dtype=np.str_), parts, table.groups, labels))


def _label_names(table: ImageTable) -> list[str]:
    names = np.asarray(table.classes, dtype=object)
    if table.multilabel:
        return ["|".join(names[row.astype(bool)]) for row in table.labels]
    return names[table.labels].tolist()


def read_split(path: str | Path, table: ImageTable) -> Parts:
    """The parts written in a split.csv, in the order of the table. Columns image and part are read, others not.

    Every image of the table must be in the file once, and no others.
    """
    rows = read_split_file(path).to_frame()
    known, listed = set(table.names), set(rows["image"])
    wrong = rows["split"][~rows["split"].isin(SPLITS)].unique()
    problems = [
        ("images of the data are not in the file", [name for name in table.names if name not in listed]),
        ("images in the file are not in the data", [name for name in rows["image"].unique() if name not in known]),
        ("images are in the file more than once", list(rows["image"][rows["image"].duplicated()].unique())),
        (f"parts are none of {', '.join(SPLITS)}", [repr(part) for part in wrong]),
    ]
    found = [
        f"{len(items)} {what}: {', '.join(items[:5])}{', …' if len(items) > 5 else ''}"
        for what, items in problems
        if items
    ]
    if found:
        raise InputError(f"{path} does not fit the {table.source}. {'. '.join(found)}. Was it written for other data?")
    split_summary = dict(zip(rows["image"], rows["split"], strict=True))
    return np.array([split_summary[name] for name in table.names], dtype=_PART)
