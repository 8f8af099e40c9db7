"""Who trains and who is held out: drawn by class or by group, in folds, as given, or as written down before."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from cclnet.data.leaks import groups_on_two_sides, leaks
from cclnet.data.stratify import stratify
from cclnet.data.table import PARTS, ImageTable
from cclnet.errors import InputError, unknown
from cclnet.files import write_whole

Parts = npt.NDArray[np.str_]
WAYS = ("auto", "given", "group", "class")
_PART = f"<U{max(map(len, PARTS))}"


@dataclass(frozen=True)
class SplitSettings:
    """How a table is divided into train, calibration, val and test.

    Attributes:
        by: "group": no group on two sides, classes kept in ratio as near as groups allow; "class": images one by
            one, classes kept in ratio; "given": the parts that came with the data. "auto": given where the data
            has parts, else by group where groups are known, else by class. With "group" or "class" a test part
            that came with the data stays as it is, and the rest is drawn anew.
        val, test, calibration: shares of the images that are divided. The calibration part is taken out of what
            would be the training part, so val and test are the same with and without it.
        folds: cross-validation: fold number ``fold`` of so many is val, and ``val`` is not used.
        seed: the same seed gives the same split, whatever the order of the rows.
        file: a split.csv that was written before; everything else is then ignored but ``allow_leaks``.
        allow_leaks: accept given parts, or a file, with a group on two sides.
    """

    by: str = "auto"
    val: float = 0.2
    test: float = 0.0
    calibration: float = 0.0
    folds: int | None = None
    fold: int = 0
    seed: int = 0
    file: str = ""
    allow_leaks: bool = False

    def __post_init__(self) -> None:
        if self.by not in WAYS:
            raise unknown("way to split", self.by, WAYS)
        shares = {"val": self.val, "test": self.test, "calibration": self.calibration}
        for name, share in shares.items():
            if not 0 <= share < 1:
                raise InputError(f"split: {name} is a share of the images, at least 0 and below 1; got {share}.")
        if self.folds is not None and (self.folds < 2 or not 0 <= self.fold < self.folds):
            raise InputError(
                f"split: folds must be at least 2 and fold from 0 to folds - 1; "
                f"got folds={self.folds}, fold={self.fold}."
            )
        val = self.val if self.folds is None else 1 / self.folds * (1 - self.test)
        if val + self.test + self.calibration >= 1 - 1e-9:
            raise InputError(
                f"split: val ({val:g}), test ({self.test:g}) and calibration ({self.calibration:g}) leave nothing "
                "to train on: their sum must stay below 1."
            )


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
    has_parts = table.parts is not None and len(np.unique(table.parts)) > 1
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
    assert table.parts is not None
    parts = table.parts.astype(_PART)
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
            f"split: by = 'group', but the {table.source} names no groups. "
            "Name its group column, or split by class."
        )
    parts = np.full(len(table), "train", dtype=_PART)
    if table.parts is not None and "test" in table.parts:
        if settings.test > 0:
            raise InputError(f"split: the {table.source} has a test part already; leave test at 0.")
        parts[table.parts == "test"] = "test"
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
    generator = np.random.default_rng([seed, PARTS.index(name)])
    parts[rows[stratify(counts, [1 - share, share], generator)[unit] == 1]] = name


def _take_fold(parts: Parts, settings: SplitSettings, table: ImageTable, by: str) -> None:
    assert settings.folds is not None
    rows = np.flatnonzero(parts == "train")
    unit, counts = _units(table, rows, by)
    _refuse_too_few(counts, settings.folds, table, by, f"{settings.folds} folds")
    generator = np.random.default_rng([settings.seed, PARTS.index("val")])
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
        f" {row.share:.1%} of the {row.part} images share a group with train."
        for row in found.itertuples()
        if row.shared
    )
    raise InputError(
        f"split: {what} has {len(divided)} groups on two sides: {some}{more}.{shares} Scores would look "
        "better than they are. Split by group instead, or set allow_leaks to go on all the same."
    )


def write_split(path: str | Path, table: ImageTable, parts: Parts) -> None:
    """split.csv: image, part, group (where known) and label, for people to read and for :func:`read_split`."""
    columns = {"image": list(table.names), "part": parts.tolist()}
    if table.groups is not None:
        columns["group"] = table.groups.tolist()
    columns["label"] = _label_names(table)
    write_whole(path, pd.DataFrame(columns).to_csv(index=False, lineterminator="\n"))


def _label_names(table: ImageTable) -> list[str]:
    names = np.asarray(table.classes, dtype=object)
    if table.multilabel:
        return ["|".join(names[row.astype(bool)]) for row in table.labels]
    return names[table.labels].tolist()


def read_split(path: str | Path, table: ImageTable) -> Parts:
    """The parts written in a split.csv, in the order of the table. Columns image and part are read, others not.

    Every image of the table must be in the file once, and no others.
    """
    try:
        rows = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # pandas' parser errors and undecodable bytes are ValueErrors
        raise InputError(f"cannot read the split {path}: {error}") from error
    if missing := {"image", "part"} - set(rows.columns):
        raise InputError(
            f"{path}: a split has columns image and part; {' and '.join(sorted(missing))} not found among "
            f"{', '.join(map(str, rows.columns))}."
        )
    known, listed = set(table.names), set(rows["image"])
    wrong = rows["part"][~rows["part"].isin(PARTS)].unique()
    problems = [
        ("images of the data are not in the file", [name for name in table.names if name not in listed]),
        ("images in the file are not in the data", [name for name in rows["image"].unique() if name not in known]),
        ("images are in the file more than once", list(rows["image"][rows["image"].duplicated()].unique())),
        (f"parts are none of {', '.join(PARTS)}", [repr(part) for part in wrong]),
    ]
    found = [
        f"{len(items)} {what}: {', '.join(items[:5])}{', …' if len(items) > 5 else ''}"
        for what, items in problems
        if items
    ]
    if found:
        raise InputError(
            f"{path} does not fit the {table.source}. {'. '.join(found)}. Was it written for other data?"
        )
    part_of = dict(zip(rows["image"], rows["part"], strict=True))
    return np.array([part_of[name] for name in table.names], dtype=_PART)
