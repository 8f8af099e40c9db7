"""The slice of the data on which open choices are made: it holds nothing of what is reported later."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from cclnet.data.split import SplitSettings, make_split
from cclnet.data.table import ImageTable
from cclnet.files import write_whole
from cclnet.training.settings import make_settings


def tuning_slice(table: ImageTable, recipe: Mapping[str, Any]) -> tuple[ImageTable, np.ndarray[Any, np.dtype[np.str_]]]:
    """The training part of the recipe's split, and a new train and val of it, 80:20, by lesion where lesions are
    known, so that a choice that merely remembers lesions does not win."""
    parts = make_split(table, make_settings(recipe).split)
    trained = table.select(np.flatnonzero(parts == "train"))
    by = "class" if table.groups is None else "group"
    return trained, make_split(trained, SplitSettings(by=by, val=0.2, seed=0))


def write_tuning_data(table: ImageTable, recipe: Mapping[str, Any], folder: Path) -> Path:
    """A data set of the slice alone, ``images.csv`` with the images beside it; returns the path of the table.

    The images that are reported are not in it, so that no setting of a run could reach them. Files are linked where
    the file system can, else copied.
    """
    sheet = folder / "images.csv"
    if sheet.exists():
        return sheet
    trained, parts = tuning_slice(table, recipe)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    files = [f"images/{_place(trained, row, folder / 'images')}" for row in range(len(trained))]
    names = np.asarray(trained.classes, dtype=object)[trained.labels]
    columns = {"image": files, "label": names.tolist(), "part": parts.tolist()}
    if trained.groups is not None:
        columns["group"] = trained.groups.tolist()
    write_whole(sheet, pd.DataFrame(columns).to_csv(index=False, lineterminator="\n"))
    return sheet


def _place(table: ImageTable, row: int, folder: Path) -> str:
    """Put an image into the folder; returns its name there."""
    name = table.names[row].replace("/", "_")
    if isinstance(table.images, np.ndarray):
        target = folder / f"{name}.png"
        Image.fromarray(table.images[row]).save(target)
        return target.name
    source = Path(table.images[row]).resolve()
    target = folder / (name.removesuffix(source.suffix) + source.suffix)
    if not target.exists():
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, target)
    return target.name
