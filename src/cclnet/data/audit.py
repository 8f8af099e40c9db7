"""What is wrong with a data set: broken files, duplicates, leaks, conflicts, and classes or images out of line."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from PIL import Image
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from scipy.fft import dctn

from cclnet.data.cache import DecodedImages, decode_readable
from cclnet.data.image_io import UnreadableImage, image_size
from cclnet.data.parallel import available_cores, counting_images, spread
from cclnet.data.split import Parts, make_split
from cclnet.data.table import ImageTable
from cclnet.errors import InputError
from cclnet.files import write_whole
from cclnet.runs.split_file import SPLITS, leaks
from cclnet.settings import SplitSettings

# Images that are the same, or nearly: by a perceptual hash, over all pairs.
#
# The hash is the sign of the 16 x 16 lowest frequencies of the image, which survive another compression, size,
# brightness or contrast. 256 bits, not the usual 64: medical images of one kind share their coarse layout, and with 64
# bits ten thousand skin lesions give thousands of pairs that have nothing in common.


Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.intp]

BITS = 256
NEAR = 24  # bits in which near duplicates may differ; unrelated images differ in about 128
BLANK = 2  # an image whose grey levels span no more than this shows nothing, and its hash is noise
_BANDS = NEAR + 1


def perceptual_hash(image: npt.NDArray[np.uint8]) -> tuple[Hashes, int]:
    """The hash of an RGB image [H, W, 3], uint64 [4], and how many grey levels the image spans at 32 x 32."""
    small = Image.fromarray(image).convert("L").resize((32, 32), Image.Resampling.BILINEAR, reducing_gap=2)
    grey = np.asarray(small, dtype=np.float32)
    bits = dctn(grey, norm="ortho")[:16, :16].reshape(-1) > 0
    bits[0] = False  # the mean says nothing
    return np.packbits(bits).view(np.uint64), int(grey.max() - grey.min())


def same_pixels(hashes: Hashes, images: DecodedImages, rows: Rows) -> dict[int, int]:
    """For each of ``rows`` with the very pixels of an earlier one: the first such.

    ``hashes`` are those of all images; only images with equal ones are compared.
    """
    first: dict[tuple[bytes, bytes], int] = {}
    found: dict[int, int] = {}
    _, kind, count = np.unique(hashes[rows], axis=0, return_inverse=True, return_counts=True)
    for row in rows[count[kind.reshape(-1)] > 1].tolist():
        image = images.image(row)
        digest = hashlib.blake2b(image.tobytes(), digest_size=16).digest()
        known = first.setdefault((str(image.shape).encode(), digest), row)
        if known != row:
            found[row] = known
    return found


def near_pairs(hashes: Hashes, limit: int = NEAR) -> tuple[Rows, npt.NDArray[np.int64]]:
    """All pairs of hashes that differ in at most ``limit`` (up to 24) bits: [M, 2] with the smaller row first, and
    in how many.

    Cut into one band more than bits may differ, two such hashes agree in at least one whole band. So only hashes
    that share a band are compared: with 25 bands of 10 bits, two or three in a hundred of all pairs.
    """
    bits = np.unpackbits(np.ascontiguousarray(hashes).view(np.uint8), axis=1)
    width = BITS // _BANDS
    # Every 25th bit, so that coarse frequencies, alike in most images, are spread over the bands.
    bands = [bits[:, band : width * _BANDS : _BANDS] @ (1 << np.arange(width)) for band in range(_BANDS)]
    keys = np.stack(bands, axis=1).astype(np.int16)
    found = np.concatenate([_pairs_first_alike_in(band, keys, hashes, limit) for band in range(_BANDS)])
    found = found[np.lexsort((found[:, 1], found[:, 0]))]
    return found, _distance(hashes, found[:, 0], found[:, 1])


def _pairs_first_alike_in(band: int, keys: npt.NDArray[np.int16], hashes: Hashes, limit: int) -> Rows:
    """The near pairs that agree in this band and in none before it, so that each is found once however many bands it
    shares: the frames of a video share nearly all."""
    order = np.argsort(keys[:, band], kind="stable")
    own, earlier, hashes = keys[order, band], keys[order, :band], hashes[order]
    pairs = [np.empty((0, 2), np.intp)]
    step = 1
    while len(same := np.flatnonzero(own[step:] == own[:-step])):
        near = same[_distance(hashes, same, same + step) <= limit]
        near = near[~(earlier[near] == earlier[near + step]).any(axis=1)]
        pairs.append(np.stack([order[near], order[near + step]], axis=1))
        step += 1
    return np.sort(np.concatenate(pairs), axis=1)


def _distance(hashes: Hashes, left: Rows, right: Rows) -> npt.NDArray[np.int64]:
    return np.bitwise_count(hashes[left] ^ hashes[right]).sum(axis=1, dtype=np.int64)


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
        leaks: what :func:`~cclnet.data.split.leaks` says of the split, None without groups.
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
        across.append("splits")
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
    frame = pd.DataFrame({"group": table.groups, "rank": [SPLITS.index(part) for part in parts]})
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


# An audit as tables in the terminal.


# In the order of how much harm they do, each with what to do about it.
ADVICE = {
    "unreadable": "Replace these files or leave them out; training refuses them.",
    "exact duplicate across splits and classes": "Keep one, with the right label.",
    "exact duplicate across splits": "Keep one: the held-out copy is known from training.",
    "exact duplicate across classes": "One image, two labels: keep one, with the right label.",
    "exact duplicate": "Keep one, or give all copies one group.",
    "near duplicate across splits and classes": "Look at them; give them one group and the right label.",
    "near duplicate across splits": "Look at them; give them one group if they show the same.",
    "near duplicate across classes": "Look at them; one label may be wrong.",
    "near duplicate": "Look at them; give them one group if they show the same.",
    "group on two sides": "Split by group: held-out scores look better than they are.",
    "label conflict in a group": "Look at them; one label may be wrong.",
    "no split": "Nothing can be held out before this is mended.",
    "small class": "Too few to learn from or to judge by; collect more or leave it out.",
    "blank image": "Leave these out.",
    "size out of line": "Look at them: thumbnails, strips or scans among photographs.",
}


def audit_tables(audit: Audit, written: str) -> RenderableType:
    """What was found, counted, with an example and advice for each; and how much the split leaks."""
    pieces: list[RenderableType] = []
    if audit.findings.empty:
        pieces.append(Text(f"{audit.images:,} images: nothing found.", style="green"))
    else:
        pieces += [_findings(audit), Text(f"{audit.images:,} images looked at. Every finding is in {written}.")]
    if audit.leaks is not None and audit.leaks["shared"].any():
        for part, class_, images, shared, share in audit.leaks.itertuples(index=False):
            if not class_:
                sentence = f"{share:.0%} of the {part} images ({shared:,} of {images:,}) share a group with train:"
                pieces.append(Text(sentence, style="bold"))
        pieces.append(_leaks_by_class(audit.leaks))
    return Group(*pieces)


def _findings(audit: Audit) -> Table:
    table = Table()
    table.add_column("Finding", style="bold")
    table.add_column("Count", justify="right")
    table.add_column("For example", overflow="fold")
    table.add_column("What to do")
    counts = audit.findings["finding"].value_counts()
    for finding in (name for name in ADVICE if name in counts):
        example = audit.findings[audit.findings["finding"] == finding].iloc[0]
        images = " and ".join(filter(None, (example["other"], example["image"])))
        shown = f"{images}: {example['detail']}" if images else str(example["detail"])
        table.add_row(finding, f"{counts[finding]:,}", Text(shown), ADVICE[finding])
    return table


def _leaks_by_class(found: pd.DataFrame) -> Table:
    table = Table()
    for name in ("Part", "Class"):
        table.add_column(name)
    for name in ("Images", "Shared", "Share"):
        table.add_column(name, justify="right")
    for part, class_, images, shared, share in found.itertuples(index=False):
        if class_ and images:
            table.add_row(part, Text(class_), f"{images:,}", f"{shared:,}", f"{share:.0%}")
    return table
