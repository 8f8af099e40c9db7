"""HAM10000 as Kaggle and the Harvard Dataverse ship it: one metadata file, images anywhere below it.

The metadata has 7 or 8 columns, commas or tabs, an extension or none. The Dataverse also ships the test images of
ISIC 2018 with a ground truth of the same columns; with both files the images have the parts train and test.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd

from cclnet.data.sources import isic
from cclnet.data.sources.image_files import ByStem, below, image_files, plain_files, same_spelling
from cclnet.data.sources.source import Findings, Source, encode, finish, groups_or_alone, listed
from cclnet.data.sources.table_file import TEXT_SUFFIXES, read_columns, read_sheet
from cclnet.data.table import ImageTable
from cclnet.errors import InputError
from cclnet.settings import DataOptions

_COLUMNS = {"lesion_id", "image_id", "dx"}


def find(path: Path) -> list[Path]:
    """The metadata files by which the layout is known. Beside an ISIC ground truth they only add to that."""
    if path.is_dir() and isic.find(path):
        return []
    return _metadata(path)


def _metadata(path: Path) -> list[Path]:
    files = [path] if path.is_file() else plain_files(path, TEXT_SUFFIXES)
    return [file for file in files if file.suffix.lower() in TEXT_SUFFIXES and set(read_columns(file)) >= _COLUMNS]


def read(path: Path, options: DataOptions) -> ImageTable:
    """Every image that has a file and a diagnosis, by name, grouped by lesion. Classes have the names of ISIC."""
    sheets = _metadata(path)
    if not sheets:
        raise InputError(f"{path}: no HAM10000 metadata (columns lesion_id, image_id, dx, …) found.")
    root = path.parent if path.is_file() else path
    findings = Findings()
    rows = pd.concat([_read_metadata(sheet) for sheet in sheets], ignore_index=True).fillna("")
    rows = _without_doubles(rows, sheets).sort_values("image_id")
    images = ByStem(image_files(root, follow_links=options.follow_links))
    findings.leave_out("rows without a diagnosis", rows["image_id"][rows["dx"] == ""].tolist())
    findings.leave_out("images without a label", [below(root, file) for file in images.besides(rows["image_id"])])
    rows = rows[rows["dx"] != ""]
    files = [images.find(name) for name in rows["image_id"]]
    count = np.array([len(several) for several in files], dtype=np.int64)
    findings.leave_out("labels without an image", rows["image_id"][count == 0].tolist())
    findings.leave_out("labels for which several files fit", rows["image_id"][count > 1].tolist())
    rows = rows[count == 1].reset_index(drop=True)
    names = rows["image_id"].tolist()
    labels, classes = encode(rows["dx"].str.upper().tolist(), isic.CLASSES)
    table = ImageTable(
        source=SOURCE.words,
        root=root,
        names=names,
        images=[Path(several[0]) for several in files if len(several) == 1],
        labels=labels,
        classes=classes,
        groups=groups_or_alone(rows["lesion_id"].tolist(), names, findings),
        splits=rows["split"].to_numpy(dtype=np.str_),
        extra=rows.drop(columns=[*_COLUMNS, "split"]),
    )
    return finish(table, findings, options.strict)


def _read_metadata(file: Path) -> pd.DataFrame:
    rows = read_sheet(file)
    part = "test" if re.search("test", file.name, re.IGNORECASE) else "train"
    return rows.assign(split=part, image_id=rows["image_id"].map(same_spelling))


def _without_doubles(rows: pd.DataFrame, sheets: list[Path]) -> pd.DataFrame:
    """The same metadata is often there twice, with and without extension; it must say the same."""
    rows = rows.drop_duplicates(["image_id", "dx", "lesion_id"])
    if doubled := sorted(set(rows["image_id"][rows["image_id"].duplicated()])):
        raise InputError(f"{', '.join(map(str, sheets))}: images have two diagnoses or lesions: {listed(doubled)}.")
    return rows


SOURCE = Source(
    words="HAM10000",
    layout="HAM10000_metadata(.csv, .tab) with HAM10000_images_part_1/ and HAM10000_images_part_2/",
    find=find,
    read=read,
)
