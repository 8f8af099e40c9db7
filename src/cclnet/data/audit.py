"""Inspect a data set: what it contains (``data show``) and what is wrong with it (``data audit``).

Duplicates are found as described in :mod:`cclnet.data.duplicates`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from cclnet.data.cache import DecodedImages, decode_readable
from cclnet.data.duplicates import BITS, BLANK, hash_images, near_pairs, same_pixels
from cclnet.data.identifiers import suspected_ids
from cclnet.data.image_io import UnreadableImage, brightest_16_bit, image_size
from cclnet.data.parallel import available_cores, counting_images, limited, process_chunks
from cclnet.data.split import SplitNames, make_split
from cclnet.data.table import ImageTable, listed
from cclnet.errors import InputError
from cclnet.files import write_whole
from cclnet.runs.folder import leaks
from cclnet.runs.predictions import SPLITS
from cclnet.runs.spreadsheet import mark_texts
from cclnet.settings import SplitSettings, read_settings

Rows = npt.NDArray[np.intp]
Finding = tuple[str, str, str, str]  # finding, image, other image, detail
_Header = tuple[int, tuple[int, int] | str, int | None]  # row, height and width or what is wrong, brightest value

SAMPLE = 2000  # headers that `describe` reads at most, evenly over the set
SMALL_CLASS = 10  # a class with fewer images is reported
# A size is unusual when area or aspect ratio is off the median by this factor and by more than three standard
# deviations (estimated from the median deviation, because sets from several cameras have several usual sizes).
_AREA_FACTOR = 4.0
_RATIO_FACTOR = 1.5

ADVICE: dict[str, str] = read_settings(Path(__file__).with_name("audit_advice.toml"))  # by finding


@dataclass(frozen=True)
class Description:
    """A data set in numbers."""

    source: str
    root: Path
    images: int
    class_counts: dict[str, int]
    multilabel: bool
    groups: int | None  # None where unknown
    largest_group: int
    split_counts: dict[str, dict[str, int]]  # images of each class per split; empty where no splits are given
    sizes: dict[tuple[int, int], int]  # number of images per (height, width), over the images checked
    checked: int  # number of images whose size was read
    problems: tuple[str, ...]
    columns: str = ""  # of a table, in words

    def __rich__(self) -> Group:
        lines = [
            f"[bold]{escape(self.source)}[/bold] at {escape(str(self.root))}",
            f"{self.images:,} images, {len(self.class_counts)} classes" + (", multi-label" if self.multilabel else ""),
            "groups: unknown" if self.groups is None
            else f"groups: {self.groups:,}, at most {self.largest_group} images per group",
            f"sizes: {self._sizes()}",
            *([escape(self.columns)] if self.columns else []),
        ]  # fmt: skip
        table = Table("class", *_numbers("images", "share", *self.split_counts))
        for name, count in self.class_counts.items():
            in_splits = (f"{counts[name]:,}" for counts in self.split_counts.values())
            table.add_row(escape(name), f"{count:,}", f"{count / self.images:.1%}", *in_splits)
        warnings = [Text(f"! {problem}", style="yellow") for problem in self.problems]
        return Group(*(Text.from_markup(line) for line in lines), table, *warnings)

    def _sizes(self) -> str:
        if not self.sizes:
            return "no image could be read"
        (height, width), count = max(self.sizes.items(), key=lambda item: item[1])
        text = f"{width} x {height}"
        if len(self.sizes) > 1:
            text += f" ({count / sum(self.sizes.values()):.0%}), short sides from {min(map(min, self.sizes))} to "
            text += f"{max(map(min, self.sizes))}"
        return text if self.checked == self.images else f"{text} ({self.checked:,} images checked)"


def describe(table: ImageTable) -> Description:
    """Count classes, groups and splits, and read the headers of up to 2,000 images."""
    sizes, checked, problems = _read_sizes(table)
    groups = None if table.groups is None else np.unique(table.groups, return_counts=True)[1]

    def by_class(rows: Rows | None = None) -> dict[str, int]:
        return dict(zip(table.classes, table.class_counts(rows).tolist(), strict=True))

    splits = [] if table.splits is None else [name for name in SPLITS if name in table.splits]
    return Description(
        table.source, table.root, len(table), by_class(), table.multilabel,
        groups=None if groups is None else len(groups), largest_group=0 if groups is None else int(groups.max()),
        split_counts={split: by_class(np.flatnonzero(table.splits == split)) for split in splits},
        sizes=sizes, checked=checked, problems=(*table.problems, *problems, *_ids_in_names(table)),
        columns=table.columns,
    )  # fmt: skip


def _ids_in_names(table: ImageTable, splits: SplitNames | None = None) -> list[str]:
    return [] if (found := suspected_ids(table, splits)) is None else [str(found)]


def _read_sizes(table: ImageTable) -> tuple[dict[tuple[int, int], int], int, list[str]]:
    if isinstance(table.images, np.ndarray):
        return {(table.images.shape[1], table.images.shape[2]): len(table)}, len(table), []
    paths, sizes = table.images, Counter[tuple[int, int]]()
    rows = np.unique(np.linspace(0, len(table) - 1, SAMPLE).round().astype(np.int64)).tolist()
    # 12-bit values in 16-bit files are shown almost black.
    checked = [row for row in rows if paths[row].suffix.lower() in (".png", ".tif", ".tiff")][:16]
    found: dict[int, tuple[int, int] | str] = {}
    brightest: list[int] = []

    def measure(some: list[int]) -> list[_Header]:
        return [(row, *_header(paths[row], row, row in checked)) for row in some]

    def store(done: list[_Header]) -> None:
        for row, size, value in done:
            found[row] = size
            brightest.extend([] if value is None else [value])

    def fail(row: int, reason: str) -> list[_Header]:
        return [(row, reason, None)]

    process_chunks(measure, rows, available_cores(), store, fail)
    broken: list[str] = []
    for row in rows:
        if isinstance(size := found[row], str):
            broken.append(f"{paths[row].name}: {size}")
        else:
            sizes[size] += 1
    problems = [f"images that cannot be read: {len(broken):,} ({listed(broken)})"] if broken else []
    if brightest and max(brightest) < 4096:
        problems.append(
            f"16-bit images whose brightest pixel is {max(brightest)} of 65535 ({len(brightest)} checked): they are "
            "read as almost black. Scale them to the full range first."
        )
    return dict(sizes), len(rows), problems


def _header(path: Path, row: int, with_brightest: bool) -> tuple[tuple[int, int] | str, int | None]:
    """Return the size of an image, or the reason why it has none, and its brightest value if it is 16-bit grey."""
    try:
        with limited(row):
            size = image_size(path)
            return size, brightest_16_bit(path) if with_brightest else None
    except UnreadableImage as error:
        return error.reason, None


@dataclass(frozen=True)
class Audit:
    images: int  # number of images checked
    findings: pd.DataFrame  # columns finding, image, other (the second image of a pair), detail
    leaks: pd.DataFrame | None  # result of cclnet.runs.folder.leaks for the split, None without groups

    def write(self, path: str | Path) -> None:
        cells = {column: mark_texts(self.findings[column]) for column in self.findings}
        write_whole(path, pd.DataFrame(cells).to_csv(index=False, lineterminator="\n"))


def audit(
    table: ImageTable, split: SplitSettings | None = None, short_side: int = 256, cache_dir: Path | None = None,
    workers: int | None = None, progress: bool = True,
) -> Audit:  # fmt: skip
    """Check a data set and the split that training would use. Images are decoded into the cache, ready for training."""
    images, broken = decode_readable(table, short_side, cache_dir, workers, progress)
    measured = _measure(table, images, broken, workers or available_cores(), progress)
    no_split: list[Finding] = []
    try:  # the split that training would use, leaks included
        splits = make_split(table, replace(split or SplitSettings(), allow_leaks=True))
    except InputError as error:
        splits, no_split = np.full(len(table), "train"), [("no split", "", "", str(error))]
    blank = [row for row in np.flatnonzero(measured["contrast"] <= BLANK).tolist() if row not in broken]
    rows: list[Finding] = [("unreadable", table.names[row], "", reason) for row, reason in broken.items()]
    rows += (("blank image", table.names[row], "", "one uniform surface") for row in blank)
    rows += _duplicates(table, images, measured, splits)
    rows += _groups_in_several_splits(table, splits)
    rows += _label_conflicts(table)
    rows += no_split
    rows += (("ids in image names", "", "", found) for found in _ids_in_names(table, splits))
    for name, count in zip(table.classes, table.class_counts(), strict=True):
        if count < SMALL_CLASS:
            rows.append(("small class", "", "", f"{name}: {count} images"))
    rows += _unusual_sizes(table, measured["size"])
    findings = pd.DataFrame(rows, columns=["finding", "image", "other", "detail"])
    found_leaks = None if table.groups is None else leaks(splits, table.groups, table.labels, table.classes)
    return Audit(len(table), findings, found_leaks)


def _measure(
    table: ImageTable, images: DecodedImages, broken: dict[int, str], workers: int, progress: bool
) -> npt.NDArray[np.void]:
    """Return perceptual hash, contrast (grey levels spanned) and size (height and width of the file) of each image."""
    measured = np.zeros(len(table), [("hash", np.uint64, 4), ("contrast", np.int64), ("size", np.int64, 2)])
    readable = [row for row in range(len(table)) if row not in broken]
    hashed = hash_images(images, readable, workers) if images.hashed is None else images.hashed[readable]
    for field in ("hash", "contrast"):
        measured[field][readable] = hashed[field]

    def measure(rows: list[int]) -> list[tuple[int, tuple[int, int]]]:
        return [(row, _file_size(table, row)) for row in rows]

    def store(done: list[tuple[int, tuple[int, int]]]) -> None:
        for row, size in done:
            measured["size"][row] = size
        advance(len(done))

    with counting_images("Comparing", len(readable), show=progress) as advance:
        process_chunks(measure, readable, workers, store)
    return measured


def _file_size(table: ImageTable, row: int) -> tuple[int, int]:
    if isinstance(table.images, np.ndarray):
        return table.images.shape[1], table.images.shape[2]
    try:
        return image_size(table.images[row])
    except UnreadableImage:  # removed since it was decoded
        return 0, 0


def _duplicates(
    table: ImageTable, images: DecodedImages, measured: npt.NDArray[np.void], splits: SplitNames
) -> Iterator[Finding]:
    labels = np.array(table.label_names(), dtype=object)
    shown = np.flatnonzero(measured["contrast"] > BLANK)
    copies = same_pixels(measured["hash"], images, shown)
    for row, first in copies.items():
        yield _pair(table, splits, labels, "exact duplicate", first, row, "the same pixels")
    originals = shown[~np.isin(shown, list(copies))]
    pairs, distance = near_pairs(measured["hash"][originals])
    first, second = originals[pairs].T
    finding = 2 * (splits[first] != splits[second]) + (labels[first] != labels[second])
    # Each image is reported once per kind of finding, with its nearest: the frames of a video are all near each other.
    order = np.argsort(distance, kind="stable")
    nearest = np.unique(np.stack([second, finding], axis=1)[order], axis=0, return_index=True)[1]
    for index in order[np.sort(nearest)]:
        detail = f"{distance[index]} of {BITS} bits differ"
        yield _pair(table, splits, labels, "near duplicate", int(first[index]), int(second[index]), detail)


def _pair(
    table: ImageTable, splits: SplitNames, labels: npt.NDArray[np.object_], kind: str, first: int, row: int, detail: str
) -> Finding:
    across = []
    if splits[first] != splits[row]:
        across.append("splits")
        detail += f"; {splits[first]} and {splits[row]}"
    if labels[first] != labels[row]:
        across.append("classes")
        detail += f"; {labels[first] or 'no label'} and {labels[row] or 'no label'}"
    if table.groups is not None:
        same = table.groups[first] == table.groups[row]
        detail += f"; group {table.groups[row]}" if same else f"; groups {table.groups[first]} and {table.groups[row]}"
    finding = f"{kind} across {' and '.join(across)}" if across else kind
    return finding, table.names[row], table.names[first], detail


def _groups_in_several_splits(table: ImageTable, splits: SplitNames) -> Iterator[Finding]:
    """Report every image whose group also occurs in an earlier split (train before calibration, val and test)."""
    if table.groups is None:
        return
    frame = pd.DataFrame({"group": table.groups, "rank": [SPLITS.index(name) for name in splits]})
    earliest = frame.sort_values("rank", kind="stable").groupby("group", sort=False).head(1)
    first_of = dict(zip(earliest["group"], earliest.index, strict=True))
    for row, (group, rank) in enumerate(zip(frame["group"], frame["rank"], strict=True)):
        first = first_of[group]
        if group and frame["rank"][first] < rank:
            detail = f"group {group} in {splits[first]} and {splits[row]}"
            yield "group in several splits", table.names[row], table.names[first], detail


def _label_conflicts(table: ImageTable) -> Iterator[Finding]:
    """Report each group whose images have several classes; in multi-label data that is normal."""
    if table.groups is None or table.multilabel:
        return
    frame = pd.DataFrame({"group": table.groups, "label": table.labels}).query("group != ''")
    distinct = frame.drop_duplicates()
    for group, rows in distinct[distinct.duplicated("group", keep=False)].groupby("group"):
        names = ", ".join(table.classes[label] for label in rows["label"])
        first, second = rows.index[:2]
        yield "label conflict in a group", table.names[second], table.names[first], f"group {group}: {names}"


def _unusual_sizes(table: ImageTable, sizes: npt.NDArray[np.int64]) -> Iterator[Finding]:
    rows = np.flatnonzero(sizes.min(axis=1) > 0)
    if len(rows) == 0:
        return
    height, width = sizes[rows].T.astype(np.float64)
    usual = f"the median is {np.median(width):.0f} x {np.median(height):.0f}"
    unusual = _outliers(np.log(height * width), math.log(_AREA_FACTOR))
    unusual |= _outliers(np.log(width / height), math.log(_RATIO_FACTOR))
    for row in rows[unusual].tolist():
        yield "unusual size", table.names[row], "", f"{sizes[row, 1]} x {sizes[row, 0]} pixels; {usual}"


def _outliers(values: npt.NDArray[np.float64], at_least: float) -> npt.NDArray[np.bool_]:
    deviation = np.abs(values - np.median(values))
    return deviation > max(at_least, 3 * 1.4826 * float(np.median(deviation)))


def audit_tables(audit: Audit, written: str) -> RenderableType:
    """Render the findings, counted, with an example and advice for each, and how much the split leaks."""
    pieces: list[RenderableType] = []
    if audit.findings.empty:
        pieces.append(Text(f"{audit.images:,} images: nothing found.", style="green"))
    else:
        example_column = Column("Example", overflow="fold")
        table = Table(Column("Finding", style="bold"), *_numbers("Count"), example_column, "What to do")
        counts = audit.findings["finding"].value_counts()
        for finding in (name for name in ADVICE if name in counts):
            example = audit.findings[audit.findings["finding"] == finding].iloc[0]
            names = " and ".join(filter(None, (example["other"], example["image"])))
            shown = f"{names}: {example['detail']}" if names else str(example["detail"])
            table.add_row(finding, f"{counts[finding]:,}", Text(shown), ADVICE[finding])
        pieces += [table, Text(f"{audit.images:,} images checked. All findings are in {written}.")]
    if audit.leaks is not None and audit.leaks["shared"].any():
        by_class = Table("Split", "Class", *_numbers("Images", "Shared", "Share"))
        for split, class_, images, shared, share in audit.leaks.itertuples(index=False):
            if not class_:
                sentence = f"{share:.0%} of the {split} images ({shared:,} of {images:,}) share a group with train:"
                pieces.append(Text(sentence, style="bold"))
            elif images:
                by_class.add_row(split, Text(class_), f"{images:,}", f"{shared:,}", f"{share:.0%}")
        pieces.append(by_class)
    return Group(*pieces)


def _numbers(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]
