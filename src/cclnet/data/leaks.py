"""What a split gives away: groups (lesions, patients) that lie on two sides of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from cclnet.data.table import PARTS

Texts = npt.NDArray[np.str_]


def leaks(
    parts: Texts, groups: Texts, labels: npt.NDArray[np.integer] | None = None, classes: Sequence[str] = ()
) -> pd.DataFrame:
    """For each part but train: how many images belong to a group that also lies in train.

    Returns columns part, class, images, shared, share; one row a part (class "") and, with ``labels`` ([N] indices
    or [N, K] of zeros and ones), one row a part and class. An empty group is unknown and never shared.

    >>> parts, groups = np.array(["train", "train", "val", "val"]), np.array(["a", "b", "b", "c"])
    >>> leaks(parts, groups).to_dict("records")
    [{'part': 'val', 'class': '', 'images': 2, 'shared': 1, 'share': 0.5}]
    """
    shared = np.isin(groups, groups[parts == "train"]) & (groups != "")
    of_class = {"": np.full(len(parts), True)}
    if labels is not None:
        for index, name in enumerate(classes):
            of_class[name] = labels[:, index] > 0 if labels.ndim == 2 else labels == index
    rows = []
    for part in (name for name in PARTS[1:] if name in parts):
        for name, members in of_class.items():
            inside = members & (parts == part)
            images, hit = int(inside.sum()), int((inside & shared).sum())
            rows.append((part, name, images, hit, hit / images if images else float("nan")))
    return pd.DataFrame(rows, columns=["part", "class", "images", "shared", "share"])


def groups_on_two_sides(parts: Texts, groups: Texts) -> dict[str, list[str]]:
    """Groups that lie in more than one part, each with its parts in order."""
    pairs = pd.DataFrame({"group": groups, "part": parts}).query("group != ''").drop_duplicates()
    divided = pairs[pairs.duplicated("group", keep=False)]
    return {str(group): sorted(held["part"], key=PARTS.index) for group, held in divided.groupby("group")}
