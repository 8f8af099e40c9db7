"""The images to predict: files, folders, tables that name them, or any data set that comes as an array."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from cclnet.data.pixels import SUFFIXES
from cclnet.data.sources import manifest, open_data
from cclnet.data.sources.listing import below, image_files, locate
from cclnet.data.sources.options import Options
from cclnet.data.sources.sheet import read_sheet
from cclnet.data.table import ImageTable
from cclnet.errors import InputError

NAMED = ("medmnist", "synthetic", "synthetic-multilabel")  # data sets that open_data knows by name


@dataclass(frozen=True)
class Inputs:
    """N images by name.

    Attributes:
        images: a path for each, or one uint8 array [N, H, W(, 1 or 3)].
        problems: what is wrong with those that need not be tried, by row.
        along: further columns for the output, each of length N.
    """

    names: Sequence[str]
    images: Sequence[Path] | npt.NDArray[np.uint8]
    problems: dict[int, str] = field(default_factory=dict)
    along: dict[str, list[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)


def gather(
    places: Sequence[str | Path], image_column: str | None = None, image_folder: Path | None = None
) -> Inputs:
    """What ``places`` name: image files and folders of them, in any number; or one table (CSV, TSV, Parquet) with a
    column of image names, which start from ``image_folder`` or from where the table lies; or one data set without files
    (.npz, ``medmnist:NAME``, ``synthetic``, ``synthetic-multilabel``)."""
    if not places:
        raise InputError("no images: give image files, a folder of them, or a table that names them.")
    if len(places) == 1:
        place = Path(places[0]).expanduser()
        kind = str(places[0]).partition(":")[0]
        if (place.suffix.lower() == ".npz" and place.exists()) or (kind in NAMED and not place.exists()):
            return _of_data_set(open_data(places[0]))
        if place.is_file() and place.suffix.lower() in manifest.SUFFIXES:
            return _of_table(place, image_column, image_folder or place.parent)
        if place.is_dir():
            files = image_files(place, follow_links=True)
            if not files:
                raise InputError(f"{place} holds no image files ({', '.join(sorted(SUFFIXES))}).")
            return Inputs([_written(below(place, file)) for file in files], [Path(file) for file in files])
    return _of_files(places)


def _of_files(places: Sequence[str | Path]) -> Inputs:
    files: dict[Path, None] = {}  # in order, each once
    odd: list[str] = []
    for given in places:
        place = Path(given).expanduser()
        if place.is_dir():
            files |= dict.fromkeys(Path(file) for file in image_files(place, follow_links=True))
        elif place.suffix.lower() in (*manifest.SUFFIXES, ".npz") or not (
            place.exists() or place.suffix.lower() in SUFFIXES
        ):
            odd.append(str(given))
        else:
            files[place] = None  # one that is missing or no image at all is named in the output
    if odd:
        raise InputError(
            f"neither an image nor a folder: {', '.join(odd[:8])}. A table, an .npz file or a named data set is given "
            "alone; anything else must be there."
        )
    if not files:
        raise InputError(f"no image files in {', '.join(str(place) for place in places[:8])}.")
    return Inputs([_written(str(file)) for file in files], list(files))


def _written(name: str) -> str:
    """A name as it can be written down: some old archives hold names that are no text in any encoding."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _of_table(sheet: Path, asked: str | None, folder: Path) -> Inputs:
    rows = read_sheet(sheet)
    column = manifest.image_column(sheet, rows, asked)
    names: list[str] = rows[column].tolist()
    problems, images = {}, []
    for row, (name, found) in enumerate(zip(names, locate(folder, names, follow_links=True), strict=True)):
        images.append(Path(found[0]) if len(found) == 1 else Path(name))
        if not name:
            problems[row] = f"row {row + 2} of {sheet.name} names no image"
        elif not found:
            problems[row] = f"no such file in {folder} or below"
        elif len(found) > 1:
            problems[row] = f"{len(found)} different files have this name: {', '.join(found[:3])}"
    if not names:
        raise InputError(f"{sheet} names no images: it has a header only.")
    return Inputs(names, images, problems, _along(sheet, rows, column))


def _along(sheet: Path, rows: pd.DataFrame, image: str) -> dict[str, list[str]]:
    """The labels and groups of a table, so that the predictions can be judged. They are found as training finds them;
    which column the labels are in may be open here, for nothing is learned from them."""
    known = [str(column) for column in rows.columns]
    group, part = (manifest.find_column(sheet, known, None, usual) for usual in (manifest.GROUP, manifest.PART))
    along: dict[str, list[str]] = {}
    with contextlib.suppress(InputError):
        asked = "label" if "label" in known else None  # whatever else may be one
        found = manifest.find_label_columns(sheet, rows, asked, {image, group, part})
        columns = manifest.Columns(image, found, group, part)
        labels, classes, labelled = manifest.labels_of(sheet, rows, columns, Options())
        if labelled.any():
            texts = _label_texts(labels, classes)
            along["label"] = [text if told else "" for text, told in zip(texts, labelled, strict=True)]
    if group is not None:
        along["group"] = rows[group].tolist()
    return along


def _of_data_set(table: ImageTable) -> Inputs:
    along = {"label": _label_texts(table.labels, table.classes)}
    if table.groups is not None:
        along["group"] = table.groups.tolist()
    return Inputs(table.names, table.images, along=along)


def _label_texts(labels: npt.NDArray[np.integer[Any]], classes: Sequence[str]) -> list[str]:
    """Labels as predictions.csv has them, several of an image with a bar between them."""
    names = np.array(classes, dtype=np.str_)
    return ["|".join(names[row == 1]) for row in labels] if labels.ndim == 2 else names[labels].tolist()
