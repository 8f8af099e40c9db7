"""A few images of each class that the model was trained on, to compare with. Only where it was allowed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from cclnet.errors import InputError
from cclnet.runs.folder import RunFolder

COUNT = 3  # of each class


def read_examples(
    run: Path, classes: Sequence[str], multilabel: bool, data: str | None = None
) -> tuple[dict[str, list[str]], str]:
    """Small pictures (data URIs) of training images of each class, and a line about those that are missing.

    They are read once, when the server starts: no request ever leads to the data.
    """
    from cclnet.report.html import read_run, thumbnails

    chosen = choose(_split(run), classes, multilabel)
    names = sorted({name for of_class in chosen.values() for name in of_class})
    pictures, note = thumbnails(names, read_run(run).settings, data)
    if not pictures:
        why = note or "the split names no training images."
        raise InputError(f"--examples: there is nothing to show. {why} If the data has moved, say where: --data.")
    return {of: [pictures[name] for name in found if name in pictures] for of, found in chosen.items()}, note


def choose(split: pd.DataFrame, classes: Sequence[str], multilabel: bool, count: int = COUNT) -> dict[str, list[str]]:
    """Names of a few training images of each class, no two of one lesion or patient where those are known.

    Drawn by chance from one seed: the first ones of a list are often of one source.
    """
    train = split[split["split"] == "train"].sample(frac=1, random_state=np.random.RandomState(0))
    chosen = {}
    for name in classes:
        own = train[[name in (label.split("|") if multilabel else (label,)) for label in train["label"]]]
        if "group" in own:
            own = own[(own["group"] == "") | ~own["group"].duplicated()]
        chosen[name] = own["image"].head(count).tolist()
    return chosen


def _split(run: Path) -> pd.DataFrame:
    try:
        table = RunFolder(run).read_split()
    except InputError as error:
        raise InputError(f"--examples shows images of the training split, but {error}") from error
    if table.labels is None:
        raise InputError(f"--examples: {run / 'split.csv'} has no column label.")
    return table.to_frame()
