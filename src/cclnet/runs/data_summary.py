"""data.json: what a run found out about its data: images left out, notes of the reader, duplicates across splits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cclnet.files import read_json
from cclnet.runs import checksums
from cclnet.runs.scores import check_kind
from cclnet.schema import from_plain, to_plain

FORMAT = 1


@dataclass(frozen=True)
class Duplicates:
    """Images that occur in more than one split: identical, or nearly the same picture (near)."""

    compared: int  # images
    exact_groups: int  # groups of identical images that are in more than one split
    label_conflicts: int  # groups of identical images with different labels
    exact: dict[str, int]  # images of each split but train that are identical to a training image
    near: dict[str, int] | None  # others that are nearly the same as one; None where not compared
    examples: tuple[tuple[str, str], ...] = ()  # held-out image and training image

    def in_words(self, split: str, images: int) -> str:
        """The copies of training images in a split of so many images; "" if there are none."""
        exact, near = self.exact.get(split, 0), (self.near or {}).get(split, 0)
        if not exact + near or not images:
            return ""
        share = f"{exact + near:,} of {images:,} {split} images ({(exact + near) / images:.1%})"
        kinds = [f"{exact:,} identical"] * (exact > 0) + [f"{near:,} nearly the same"] * (near > 0)
        return f"{share} are copies of training images ({', '.join(kinds)})."

    def all_in_words(self) -> str:
        """The copies over all splits, for the console; "" if there are none."""
        held_out = sum(self.exact.values()) + sum((self.near or {}).values())
        if not held_out:
            return ""
        per_split = ", ".join(
            f"{self.exact.get(split, 0) + (self.near or {}).get(split, 0):,} {split}" for split in self.exact
        )
        example = f" such as {self.examples[0][0]} and {self.examples[0][1]};" if self.examples else ""
        return (
            f"{held_out:,} held-out images are copies of training images ({per_split}; {self.exact_groups:,} groups of "
            f"identical images are in more than one split):{example} scores will be too high. deduplicate "
            "(--deduplicate) leaves the copies out"
        )


@dataclass(frozen=True)
class DataSummary:
    """The content of data.json."""

    left_out: dict[str, str] = field(default_factory=dict)  # reason by image
    notes: tuple[str, ...] = ()  # what the reader left out or pointed out, one sentence each
    duplicates: Duplicates | None = None  # None where the images were not compared

    def in_words(self) -> list[str]:
        """Everything that a user should know before training, one sentence each."""
        by_reason = Counter(reason.partition(":")[0] for reason in self.left_out.values())
        left_out = [f"images left out: {count:,} ({reason})" for reason, count in by_reason.items()]
        copies = "" if self.duplicates is None else self.duplicates.all_in_words()
        return [*self.notes, *left_out, *([copies] if copies else [])]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": "data", **to_plain(self)}


def read_data_summary(path: Path) -> DataSummary:
    """Read and check a data.json."""
    checksums.check_file(path)
    content = read_json(path)
    check_kind(content, "data")
    return from_plain(DataSummary, content, f"{path}: ")
