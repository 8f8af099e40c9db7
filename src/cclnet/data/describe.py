"""What a data set holds, for a person to read before training on it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cclnet.data.image_io import UnreadableImage, brightest_16_bit, image_size
from cclnet.data.sources.source import listed
from cclnet.data.table import ImageTable
from cclnet.runs.split_file import SPLITS

SAMPLE = 2000  # headers read at most, evenly over the set; ten thousand take a second, a million would not


@dataclass(frozen=True)
class Description:
    """A data set in numbers.

    Attributes:
        source: the layout it was read as.
        root: where it lies.
        images: how many images have both file and label.
        class_counts: images of each class.
        multilabel: whether an image may have several labels.
        groups: how many groups, None where unknown.
        largest_group: images in the largest group.
        part_counts: for each part its images of each class; empty where no parts are given.
        sizes: (height, width) to the number of images that have it, of those looked at.
        looked_at: how many images the sizes were taken from.
        problems: what was left out, and what else to know.
    """

    source: str
    root: Path
    images: int
    class_counts: dict[str, int]
    multilabel: bool
    groups: int | None
    largest_group: int
    part_counts: dict[str, dict[str, int]]
    sizes: dict[tuple[int, int], int]
    looked_at: int
    problems: tuple[str, ...]

    def __rich__(self) -> Group:
        """As it stands in the terminal."""
        lines = [
            f"[bold]{escape(self.source)}[/bold] at {escape(str(self.root))}",
            f"{self.images:,} images, {len(self.class_counts)} classes"
            + (", several labels an image" if self.multilabel else ""),
            "groups: not known" if self.groups is None
            else f"groups: {self.groups:,}, the largest of {self.largest_group} images",
            f"sizes: {self._sizes()}",
        ]  # fmt: skip
        warnings = [Text(f"! {problem}", style="yellow") for problem in self.problems]
        return Group(*(Text.from_markup(line) for line in lines), self._class_table(), *warnings)

    def _class_table(self) -> Table:
        table = Table()
        table.add_column("class")
        for column in ("images", "share", *self.part_counts):
            table.add_column(column, justify="right")
        for name, count in self.class_counts.items():
            in_parts = (f"{counts[name]:,}" for counts in self.part_counts.values())
            table.add_row(escape(name), f"{count:,}", f"{count / self.images:.1%}", *in_parts)
        return table

    def _sizes(self) -> str:
        if not self.sizes:
            return "no image could be read"
        (height, width), count = max(self.sizes.items(), key=lambda item: item[1])
        text = f"{width} x {height}"
        if len(self.sizes) > 1:
            text += f" ({count / sum(self.sizes.values()):.0%}), short sides from {min(map(min, self.sizes))} to "
            text += f"{max(map(min, self.sizes))}"
        return text if self.looked_at == self.images else f"{text} ({self.looked_at:,} images looked at)"


def describe(table: ImageTable) -> Description:
    """Count classes, groups and parts, and look at the headers of up to 2,000 images."""
    sizes, looked_at, problems = _look_at_images(table)
    groups = None if table.groups is None else np.unique(table.groups, return_counts=True)[1]
    part_counts = {}
    if table.splits is not None:
        for part in (part for part in SPLITS if part in table.splits):
            counts = table.class_counts(np.flatnonzero(table.splits == part))
            part_counts[part] = dict(zip(table.classes, counts.tolist(), strict=True))
    return Description(
        source=table.source,
        root=table.root,
        images=len(table),
        class_counts=dict(zip(table.classes, table.class_counts().tolist(), strict=True)),
        multilabel=table.multilabel,
        groups=None if groups is None else len(groups),
        largest_group=0 if groups is None else int(groups.max()),
        part_counts=part_counts,
        sizes=sizes,
        looked_at=looked_at,
        problems=(*table.problems, *problems),
    )


def _look_at_images(table: ImageTable) -> tuple[dict[tuple[int, int], int], int, list[str]]:
    if isinstance(table.images, np.ndarray):
        return {(table.images.shape[1], table.images.shape[2]): len(table)}, len(table), []
    rows = np.unique(np.linspace(0, len(table) - 1, SAMPLE).round().astype(np.int64))
    sizes: Counter[tuple[int, int]] = Counter()
    readable: list[Path] = []
    broken: list[str] = []
    for path in (table.images[row] for row in rows):
        try:
            sizes[image_size(path)] += 1
            readable.append(path)
        except UnreadableImage as error:
            broken.append(f"{path.name}: {error.reason}")
    problems = [f"images that cannot be read: {len(broken):,} ({listed(broken)})"] if broken else []
    return dict(sizes), len(rows), problems + _dark(readable)


def _dark(paths: list[Path]) -> list[str]:
    """12-bit values kept in 16-bit files are read as what they say they are: almost black."""
    deep = [path for path in paths if path.suffix.lower() in (".png", ".tif", ".tiff")][:16]
    try:
        brightest = [value for path in deep if (value := brightest_16_bit(path)) is not None]
    except UnreadableImage as error:
        return [str(error)]
    if brightest and max(brightest) < 4096:
        return [
            f"16-bit images whose brightest pixel is {max(brightest)} of 65535 ({len(brightest)} looked at): they come "
            "out almost black. Multiply them up to the full range first."
        ]
    return []
