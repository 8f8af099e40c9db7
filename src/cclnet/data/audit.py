"""What is wrong with a data set: broken files, duplicates, leaks, conflicts, and classes or images out of line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from cclnet.data.decode import DecodedImages, decode_readable
from cclnet.data.duplicates import BITS, BLANK, near_pairs, perceptual_hash, same_pixels
from cclnet.data.leaks import leaks
from cclnet.data.parallel import available_cores, spread
from cclnet.data.pixels import UnreadableImage, image_size
from cclnet.data.progress import counting_images
from cclnet.data.split import Parts, SplitSettings, make_split
from cclnet.data.table import PARTS, ImageTable
from cclnet.errors import InputError
from cclnet.files import write_whole

FEW_IMAGES = 10
# An image is out of line when its area or shape is so many times off the middle one, and rare besides (beyond three
# standard deviations, estimated from the median deviation). Sets from several cameras have several usual sizes.
_AREA_OFF = 4.0
_SHAPE_OFF = 1.5

Row = tuple[str, str, str, str]  # finding, image, other, detail
_Look = tuple[int, npt.NDArray[np.uint64], int, tuple[int, int]]  # row, hash, grey levels, size of the file


@dataclass(frozen=True)
class Audit:
    """What was found.

    Attributes:
        images: how many images were looked at.
        findings: one row each: finding, image, other (the second image of a pair), detail.
        leaks: what :func:`~cclnet.data.leaks.leaks` says of the split, None without groups.
    """

    images: int
    findings: pd.DataFrame
    leaks: pd.DataFrame | None

    def write(self, path: str | Path) -> None:
        write_whole(path, self.findings.to_csv(index=False, lineterminator="\n"))


@dataclass(frozen=True)
class _Looks:
    """What each image shows: hash [N, 4], grey levels spanned [N], height and width of the file [N, 2]."""

    hashes: npt.NDArray[np.uint64]
    contrast: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]


def audit(
    table: ImageTable,
    split: SplitSettings | None = None,
    short_side: int = 256,
    cache_dir: Path | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> Audit:
    """Look for all that is wrong. The images are decoded into the cache on the way, for training to find them there."""
    images, broken = decode_readable(table, short_side, cache_dir, workers, progress)
    looks = _look(table, images, broken, workers or available_cores(), progress)
    parts, refusal = _split(table, split or SplitSettings())
    rows: list[Row] = [("unreadable", table.names[row], "", reason) for row, reason in broken.items()]
    rows += _blank(table, looks, broken)
    rows += _duplicates(table, images, looks, broken, parts)
    rows += _groups_on_two_sides(table, parts)
    rows += _label_conflicts(table)
    rows += refusal
    rows += _small_classes(table)
    rows += _size_outliers(table, looks)
    findings = pd.DataFrame(rows, columns=["finding", "image", "other", "detail"])
    found_leaks = None if table.groups is None else leaks(parts, table.groups, table.labels, table.classes)
    return Audit(len(table), findings, found_leaks)


def _look(table: ImageTable, images: DecodedImages, broken: dict[int, str], workers: int, progress: bool) -> _Looks:
    count = len(table)
    looks = _Looks(np.zeros((count, 4), np.uint64), np.zeros(count, np.int64), np.zeros((count, 2), np.int64))
    readable = [row for row in range(count) if row not in broken]

    def look(rows: list[int]) -> list[_Look]:
        return [(row, *perceptual_hash(images.image(row)), _file_size(table, row)) for row in rows]

    def note(done: list[_Look]) -> None:
        for row, hash_, contrast, size in done:
            looks.hashes[row], looks.contrast[row], looks.sizes[row] = hash_, contrast, size
        advance(len(done))

    with counting_images("Comparing", len(readable), show=progress) as advance:
        spread(look, readable, workers, note)
    return looks


def _file_size(table: ImageTable, row: int) -> tuple[int, int]:
    if isinstance(table.images, np.ndarray):
        return table.images.shape[1], table.images.shape[2]
    try:
        return image_size(table.images[row])
    except UnreadableImage:  # it was there when it was decoded
        return 0, 0


def _split(table: ImageTable, settings: SplitSettings) -> tuple[Parts, list[Row]]:
    """The parts to look at: the split that training would take, leaks and all. Where there can be none, say so."""
    try:
        return make_split(table, replace(settings, allow_leaks=True)), []
    except InputError as error:
        return np.full(len(table), "train"), [("no split", "", "", str(error))]


def _blank(table: ImageTable, looks: _Looks, broken: dict[int, str]) -> Iterator[Row]:
    for row in np.flatnonzero(looks.contrast <= BLANK).tolist():
        if row not in broken:
            yield "blank image", table.names[row], "", "one even surface: nothing to see"


def _duplicates(
    table: ImageTable, images: DecodedImages, looks: _Looks, broken: dict[int, str], parts: Parts
) -> Iterator[Row]:
    shown = np.flatnonzero(looks.contrast > BLANK)
    copies = same_pixels(looks.hashes, images, shown)
    for row, first in copies.items():
        yield _pair_row("exact duplicate", table, parts, first, row, "the same pixels")
    originals = shown[~np.isin(shown, list(copies))]
    pairs, distance = near_pairs(looks.hashes[originals])
    first, second = originals[pairs].T
    differing = table.labels[first] != table.labels[second]
    other_label = differing.any(axis=1) if table.multilabel else differing
    finding = 2 * (parts[first] != parts[second]) + other_label
    # Of a hundred frames of one video each is told once in a finding, with its nearest.
    order = np.argsort(distance, kind="stable")
    nearest = np.unique(np.stack([second, finding], axis=1)[order], axis=0, return_index=True)[1]
    for index in order[np.sort(nearest)]:
        detail = f"{distance[index]} of {BITS} bits differ"
        yield _pair_row("near duplicate", table, parts, int(first[index]), int(second[index]), detail)


def _pair_row(kind: str, table: ImageTable, parts: Parts, first: int, row: int, detail: str) -> Row:
    across = []
    if parts[first] != parts[row]:
        across.append("parts")
        detail += f"; {parts[first]} and {parts[row]}"
    labels = _label(table, first), _label(table, row)
    if labels[0] != labels[1]:
        across.append("classes")
        detail += f"; {labels[0]} and {labels[1]}"
    if table.groups is not None:
        same = table.groups[first] == table.groups[row]
        detail += f"; group {table.groups[row]}" if same else f"; groups {table.groups[first]} and {table.groups[row]}"
    finding = f"{kind} across {' and '.join(across)}" if across else kind
    return finding, table.names[row], table.names[first], detail


def _label(table: ImageTable, row: int) -> str:
    if table.multilabel:
        return "|".join(table.classes[index] for index in np.flatnonzero(table.labels[row])) or "no label"
    return table.classes[table.labels[row]]


def _groups_on_two_sides(table: ImageTable, parts: Parts) -> Iterator[Row]:
    """Every image whose group also lies in a part before its own (train before calibration, val and test)."""
    if table.groups is None:
        return
    frame = pd.DataFrame({"group": table.groups, "rank": [PARTS.index(part) for part in parts]})
    earliest = frame.sort_values("rank", kind="stable").groupby("group", sort=False).head(1)
    first_of = dict(zip(earliest["group"], earliest.index, strict=True))
    for row, (group, rank) in enumerate(zip(frame["group"], frame["rank"], strict=True)):
        first = first_of[group]
        if group and frame["rank"][first] < rank:
            detail = f"group {group} in {parts[first]} and {parts[row]}"
            yield "group on two sides", table.names[row], table.names[first], detail


def _label_conflicts(table: ImageTable) -> Iterator[Row]:
    """One finding for each group whose images have several classes. With several labels at once that is usual (a
    patient gets better), so it is no finding there."""
    if table.groups is None or table.multilabel:
        return
    frame = pd.DataFrame({"group": table.groups, "label": table.labels}).query("group != ''")
    distinct = frame.drop_duplicates()
    for group, held in distinct[distinct.duplicated("group", keep=False)].groupby("group"):
        names = ", ".join(table.classes[label] for label in held["label"])
        first, second = held.index[:2]
        yield "label conflict in a group", table.names[second], table.names[first], f"group {group}: {names}"


def _small_classes(table: ImageTable) -> Iterator[Row]:
    for name, count in zip(table.classes, table.class_counts(), strict=True):
        if count < FEW_IMAGES:
            yield "small class", "", "", f"{name}: {count} images"


def _size_outliers(table: ImageTable, looks: _Looks) -> Iterator[Row]:
    rows = np.flatnonzero(looks.sizes.min(axis=1) > 0)
    if len(rows) == 0:
        return
    height, width = looks.sizes[rows].T.astype(np.float64)
    out = _far_off(np.log(height * width), math.log(_AREA_OFF)) | _far_off(np.log(width / height), math.log(_SHAPE_OFF))
    for row in rows[out].tolist():
        high, wide = looks.sizes[row]
        detail = f"{wide} x {high} pixels; the middle of the set is {np.median(width):.0f} x {np.median(height):.0f}"
        yield "size out of line", table.names[row], "", detail


def _far_off(values: npt.NDArray[np.float64], at_least: float) -> npt.NDArray[np.bool_]:
    away = np.abs(values - np.median(values))
    return away > max(at_least, 3 * 1.4826 * float(np.median(away)))
