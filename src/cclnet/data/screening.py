"""Images that a run leaves out once they are decoded (unreadable files, duplicates), and duplicates that it keeps in
more than one split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cclnet.data.cache import DecodedImages, decode_readable, unreadable_images
from cclnet.data.duplicates import BLANK, hash_images, near_pairs, same_pixels
from cclnet.data.identifiers import suspected_ids
from cclnet.data.parallel import available_cores
from cclnet.data.split import SplitNames
from cclnet.data.table import ImageTable
from cclnet.runs.data_summary import DataSummary, Duplicates
from cclnet.runs.predictions import SPLITS
from cclnet.settings import Settings

MOST_COMPARED = 50_000  # images whose near duplicates are searched for: the time grows with the square
_EXAMPLES = 5


@dataclass(frozen=True)
class Screened:
    """The images of a run, their splits and pixels, and what was found out about them."""

    table: ImageTable
    splits: SplitNames
    images: DecodedImages
    summary: DataSummary
    # [N], -1 for none: the model that predicts an image was fitted on the other folds. None without cross-validation.
    fold: npt.NDArray[np.intp] | None = None

    def without(self, left_out: Mapping[int, str], duplicates: Duplicates | None = None) -> Screened:
        """Leave out rows, for a reason each."""
        kept = np.array([row for row in range(len(self.table)) if row not in left_out], dtype=np.intp)
        reasons = {self.table.names[row]: reason for row, reason in left_out.items()}
        summary = DataSummary(self.summary.left_out | reasons, self.summary.notes, duplicates)
        if not reasons:
            return replace(self, summary=summary)
        fold = None if self.fold is None else self.fold[kept]
        return Screened(self.table.select(kept), self.splits[kept], self.images.select(kept), summary, fold)


def screen(
    table: ImageTable, splits: SplitNames, settings: Settings, progress: bool = True,
    fold: npt.NDArray[np.intp] | None = None,
) -> Screened:  # fmt: skip
    """Decode the images of a split table; leave out what the settings say, and count duplicates across splits.

    With ``fold`` (see :class:`Screened`) copies in other folds are counted, too.
    """
    images, broken = decode_readable(table, settings.short_side, settings.cache_folder, progress=progress)
    if broken and not settings.skip_unreadable:
        raise unreadable_images(broken, len(table))
    ids = suspected_ids(table, splits)
    notes = (*table.problems, *([] if ids is None else [str(ids)]))
    # Without the folder, which the next user of the run does not have.
    reasons = {
        row: "unreadable: " + reason.removeprefix(f"cannot read {table.images[row]}: ")
        for row, reason in broken.items()
    }
    screened = Screened(table, splits, images, DataSummary(notes=notes), fold).without(reasons)
    copies = _Copies(screened)
    if settings.deduplicate:
        screened = screened.without(copies.to_leave_out())
        copies = _Copies(screened)
    return screened.without({}, copies.across_splits())


class _Copies:
    """Which images are copies of each other: identical ones share a root, the first of them; near ones are pairs of
    roots."""

    def __init__(self, screened: Screened) -> None:
        table, images, fold = screened.table, screened.images, screened.fold
        self.names, self.splits = table.names, screened.splits
        self.rank = np.array([SPLITS.index(name) for name in screened.splits], dtype=np.int64)
        # The set that an image belongs to, and for each set [S, S] those that its model was fitted on.
        self.set, self.fitted_on = self.rank, np.zeros((len(SPLITS), len(SPLITS)), dtype=np.bool_)
        self.fitted_on[1:, 0] = True
        self.folded = fold is not None
        if fold is not None:
            folds = int(fold.max(initial=-1)) + 1
            self.set, self.fitted_on = np.where(fold >= 0, fold, folds), ~np.eye(folds + 1, dtype=np.bool_)
            self.fitted_on[:, folds] = False
        self.labels = [row.tobytes() for row in np.ascontiguousarray(table.labels)]
        hashed = images.hashed
        if hashed is None:
            hashed = hash_images(images, range(len(table)), available_cores())
        shown = np.flatnonzero(hashed["contrast"] > BLANK)
        self.root = np.arange(len(table))
        for row, first in same_pixels(hashed["hash"], images, shown).items():
            self.root[row] = first
        roots = shown[self.root[shown] == shown]
        self.near: npt.NDArray[np.intp] | None = None
        if len(roots) <= MOST_COMPARED:
            self.near = roots[near_pairs(hashed["hash"][roots])[0]]

    def across_splits(self) -> Duplicates:
        """Count the copies that are in more than one split."""
        count = len(self.root)
        sets_of_root = np.zeros((count, len(self.fitted_on)), dtype=np.bool_)
        sets_of_root[self.root, self.set] = True
        fitted = self.fitted_on[self.set]
        exact = np.asarray((sets_of_root[self.root] & fitted).any(axis=1))
        sets_of_near = self._over_near(sets_of_root, np.zeros_like(sets_of_root)).astype(np.bool_)
        near = np.asarray((sets_of_near[self.root] & fitted).any(axis=1)) & ~exact
        labels_of_root: dict[int, set[bytes]] = {}
        for root, label in zip(self.root.tolist(), self.labels, strict=True):
            labels_of_root.setdefault(root, set()).add(label)
        held_out = [split for split in SPLITS[1:] if split in self.splits]

        def per_split(rows: npt.NDArray[np.bool_]) -> dict[str, int]:
            return {split: int((rows & (self.splits == split)).sum()) for split in held_out}

        return Duplicates(
            compared=count,
            exact_groups=int((sets_of_root.sum(axis=1) > 1).sum()),
            label_conflicts=sum(len(labels) > 1 for labels in labels_of_root.values()),
            exact=per_split(exact),
            near=None if self.near is None else per_split(near),
            examples=self._examples(exact, near),
        )

    def to_leave_out(self) -> dict[int, str]:
        """Return identical images with different labels, all of them; each copy of an image of a later split, so that
        val and test stay as they are; and all copies of an image in other folds but the first."""
        last = np.zeros(len(self.root), dtype=np.int64)
        np.maximum.at(last, self.root, self.rank)
        latest = np.maximum(last, self._over_near(last, np.zeros_like(last)))[self.root]
        found = {
            int(row): f"a copy is in the split {SPLITS[latest[row]]}" for row in np.flatnonzero(latest > self.rank)
        }
        if self.folded:
            test = len(self.fitted_on) - 1
            first = self.set[self.root]  # the fold of the first of identical images
            for one, other in [] if self.near is None else self.near.tolist():
                if self.set[one] != self.set[other]:
                    first[self.root == max(one, other)] = -1
            others = np.flatnonzero((first != self.set) & (self.set != test))
            found = {int(row): "a copy is in another fold" for row in others} | found
        first_label: dict[int, bytes] = {}
        conflicts = {
            root for root, label in zip(self.root.tolist(), self.labels, strict=True)
            if first_label.setdefault(root, label) != label
        }  # fmt: skip
        found |= {
            row: "an identical image has another label"
            for row, root in enumerate(self.root.tolist())
            if root in conflicts
        }
        return found

    def _over_near(self, values: npt.NDArray[np.generic], start: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """Return the largest value among the near duplicates of each root."""
        if self.near is not None:
            for one, other in (self.near.T, self.near.T[::-1]):
                np.maximum.at(start, one, values[other])
        return start

    def _examples(self, exact: npt.NDArray[np.bool_], near: npt.NDArray[np.bool_]) -> tuple[tuple[str, str], ...]:
        found = []
        for row in [*np.flatnonzero(exact), *np.flatnonzero(near)][:_EXAMPLES]:
            roots = {int(self.root[row])}
            if near[row] and self.near is not None:
                pairs = self.near[(self.near == self.root[row]).any(axis=1)]
                roots = set(pairs.reshape(-1).tolist()) - roots
            other = np.flatnonzero(np.isin(self.root, list(roots)) & self.fitted_on[self.set[row]][self.set])[0]
            found.append((self.names[row], self.names[other]))
        return tuple(found)
