"""What a person may say about the data beyond where it is. Nothing of it is needed for the known layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cclnet.data.table import ImageTable


@dataclass(frozen=True)
class Options:
    """Attributes:
    image_column, group_column, part_column: columns of a manifest, by name.
    label_column: the column of class names; or several columns of zeros and ones.
    label_separator: what stands between the labels of one image ("|" and ";" are found without it).
    image_folder: the folder that the names in a manifest start from. Default: the folder of the manifest.
    strict: refuse a set in which an image lacks its label or a label its image, instead of leaving them out.
    follow_links: allow links that lead out of the data folder.
    """

    image_column: str | None = None
    label_column: str | Sequence[str] | None = None
    group_column: str | None = None
    part_column: str | None = None
    label_separator: str | None = None
    image_folder: Path | None = None
    strict: bool = False
    follow_links: bool = False

    @property
    def for_manifest(self) -> bool:
        """Whether something was said that only a manifest has."""
        said = (self.image_column, self.label_column, self.group_column, self.part_column, self.label_separator,
                self.image_folder)  # fmt: skip
        return any(value is not None for value in said)


@dataclass(frozen=True)
class Source:
    """One layout of data. ``find`` gives the files or folders by which it is known, none if it is not this layout."""

    words: str
    layout: str
    find: Callable[[Path], list[Path]]
    read: Callable[[Path, Options], ImageTable]
