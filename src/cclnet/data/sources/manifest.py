"""A table of images that somebody wrote: CSV, TSV or Parquet, with one row an image.

Columns are taken by the names given, else by the names people use. Labels are class names in one column; several in
one cell with a separator between them; or one column of zeros and ones for each class.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from cclnet.data.sources.image_files import below, images_beside, locate, plain_files
from cclnet.data.sources.source import SPLIT_NAMES, Findings, Source, encode, finish, groups_or_alone, listed
from cclnet.data.sources.table_file import PARQUET_SUFFIXES, read_columns, read_sheet
from cclnet.data.table import ImageTable
from cclnet.errors import InputError, unknown
from cclnet.settings import DataOptions

SUFFIXES = (".csv", ".tsv", ".tab", *PARQUET_SUFFIXES)

# Names people give to columns, in small letters with underscores. The first that is there is taken; where an image
# has both a patient and a lesion, the patient is the wider group and the safe one.
_IMAGE = ("image", "image_path", "img_path", "filepath", "file_path", "path", "image_file", "filename", "file_name",
          "file", "image_name", "image_id", "image_index", "img", "img_id", "isic_id")  # fmt: skip
GROUP = ("group", "group_id", "patient_id", "patient", "subject_id", "subject", "case_id", "lesion_id", "lesion")
PART = ("split", "part", "partition", "subset", "set")
_LABEL = ("label", "labels", "class", "class_name", "category", "target", "dx", "diagnosis", "finding_labels")
_SEPARATORS = ("|", ";")
_MARKS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}


@dataclass(frozen=True)
class Columns:
    image: str
    labels: tuple[str, ...]  # one column of class names, or several of zeros and ones
    group: str | None
    split: str | None


def find(path: Path) -> list[Path]:
    """The table itself; in a folder, the tables that have a column for images and something beside it."""
    if path.is_file():
        return [path] if path.suffix.lower() in SUFFIXES else []
    return [file for file in plain_files(path, SUFFIXES) if _could_be_manifest(read_columns(file))]


def read(path: Path, options: DataOptions) -> ImageTable:
    """Every row whose image is found and whose label is given; the others are counted and named."""
    sheet = _the_manifest(path, options)
    root = Path(options.image_folder).expanduser() if options.image_folder else sheet.parent
    if not root.is_dir():
        raise InputError(f"the image folder {root} does not exist.")
    rows = read_sheet(sheet)
    columns = _choose_columns(sheet, rows, options)
    findings = Findings()
    rows = _without_doubles(sheet, rows, columns)
    labels, classes, labelled = labels_of(sheet, rows, columns, options)
    named = (rows[columns.image] != "").to_numpy()
    files = locate(root, rows[columns.image], follow_links=options.follow_links)
    count = np.array([len(several) for several in files], dtype=np.int64)
    findings.leave_out("rows without the name of an image (row)", [i + 2 for i in rows.index[~named]])
    findings.leave_out("images without a label", rows[columns.image][named & ~labelled & (count > 0)].tolist())
    findings.leave_out("labels without an image", rows[columns.image][named & (count == 0)].tolist())
    findings.leave_out("names that fit several files", rows[columns.image][named & (count > 1)].tolist())
    others = images_beside(file for several in files for file in several)
    findings.leave_out("images without a row in the table", [below(root, file) for file in others])
    kept = np.flatnonzero(named & labelled & (count == 1))
    _refuse_one_file_twice(sheet, [files[i][0] for i in kept])
    rows = rows.iloc[kept].reset_index(drop=True)
    names = rows[columns.image].tolist()
    table = ImageTable(
        source=SOURCE.words,
        root=root,
        names=names,
        images=[Path(files[i][0]) for i in kept],
        labels=labels[kept],
        classes=classes,
        groups=None if columns.group is None else groups_or_alone(rows[columns.group].tolist(), names, findings),
        splits=None if columns.split is None else _parts(sheet, rows[columns.split]),
        extra=rows.drop(columns=[c for c in (columns.image, *columns.labels, columns.group, columns.split) if c]),
    )
    return finish(table, findings, options.strict)


def _the_manifest(path: Path, options: DataOptions) -> Path:
    if path.is_file():
        return path
    asked = {c for c in (options.image_column, options.group_column, options.split_column) if c}
    tables = [file for file in plain_files(path, SUFFIXES) if asked <= set(read_columns(file))] if asked else find(path)
    if len(tables) != 1:
        found = f"several tables that fit: {listed([t.name for t in tables])}" if tables else "no table that fits"
        raise InputError(f"{path} holds {found}. Give the CSV or Parquet file itself.")
    return tables[0]


def _could_be_manifest(columns: list[str]) -> bool:
    """An image column and a label column, or at least two more that may be columns of zeros and ones."""
    plain = {_plain(column) for column in columns}
    return bool(plain & set(_IMAGE)) and (bool(plain & set(_LABEL)) or len(plain - {*_IMAGE, *GROUP, *PART}) > 1)


def image_column(sheet: Path, rows: pd.DataFrame, asked: str | None = None) -> str:
    """The column that names the images: the one asked for, else one of the usual names."""
    known = [str(column) for column in rows.columns]
    image = find_column(sheet, known, asked, _IMAGE)
    if image is None:
        raise InputError(
            f"{sheet}: no column names the images. Say which with image_column (--image-column); "
            f"there are: {listed(known, 40)}."
        )
    return image


def _choose_columns(sheet: Path, rows: pd.DataFrame, options: DataOptions) -> Columns:
    known = [str(column) for column in rows.columns]
    image = image_column(sheet, rows, options.image_column)
    group = find_column(sheet, known, options.group_column, GROUP)
    part = find_column(sheet, known, options.split_column, PART)
    taken = {image, group, part}
    return Columns(image, find_label_columns(sheet, rows, options.label_column, taken), group, part)


def find_column(sheet: Path, known: list[str], asked: str | None, usual: Sequence[str]) -> str | None:
    if asked:
        if asked not in known:
            raise unknown(f"column of {sheet.name}", asked, known)
        return asked
    by_plain_name = {_plain(column): column for column in reversed(known)}
    return next((by_plain_name[name] for name in usual if name in by_plain_name), None)


def find_label_columns(
    sheet: Path, rows: pd.DataFrame, asked: str | Sequence[str] | None, taken: set[str | None]
) -> tuple[str, ...]:
    known = [str(column) for column in rows.columns]
    if asked:
        several = [asked] if isinstance(asked, str) else list(asked)
        if isinstance(asked, str) and asked not in known:
            several = [name.strip() for name in asked.split(",")]
        return tuple(find_column(sheet, known, name, ()) or "" for name in several)
    usual = [column for column in known if _plain(column) in _LABEL and column not in taken]
    if len(usual) > 1:
        raise InputError(
            f"{sheet}: {listed(usual)} may all be the label. Say which with label_column (--label-column)."
        )
    if usual:
        return (usual[0],)
    marked = [column for column in known if column not in taken and _is_marks(rows[column])]
    if len(marked) < 2:
        raise InputError(
            f"{sheet}: no column of labels, nor several of zeros and ones. Say which with label_column "
            f"(--label-column NAME, or NAME,NAME,…); there are: {listed(known, 40)}."
        )
    return tuple(marked)


def _is_marks(cells: pd.Series[str]) -> bool:
    values = {value.lower() for value in cells.unique()}
    return bool(values - {""}) and values <= {*_MARKS, ""}


def _without_doubles(sheet: Path, rows: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """The same row twice counts once; an image with two different rows is refused, for which of them is right?"""
    said = [c for c in (columns.image, *columns.labels, columns.group, columns.split) if c]
    rows = rows.drop_duplicates(said)
    doubled = rows[columns.image].duplicated() & (rows[columns.image] != "")
    if doubled.any():
        raise InputError(
            f"{sheet}: images have several rows that differ: {listed(sorted(set(rows[columns.image][doubled])))}. "
            "Several labels of one image belong in one row (A|B), or in columns of zeros and ones."
        )
    return rows


def _refuse_one_file_twice(sheet: Path, files: list[str]) -> None:
    if len(set(files)) < len(files):
        twice = sorted(file for file, count in Counter(files).items() if count > 1)
        raise InputError(f"{sheet}: several rows mean the same file: {listed(twice)}.")


def labels_of(
    sheet: Path, rows: pd.DataFrame, columns: Columns, options: DataOptions
) -> tuple[npt.NDArray[np.int64] | npt.NDArray[np.uint8], tuple[str, ...], npt.NDArray[np.bool_]]:
    """Labels, class names, and which rows have a label at all."""
    if len(columns.labels) > 1:
        return _marked_labels(sheet, rows, columns.labels)
    cells: list[str] = rows[columns.labels[0]].tolist()
    labelled = np.array([cell != "" for cell in cells], dtype=np.bool_)
    separator = options.label_separator or next((s for s in _SEPARATORS if any(s in cell for cell in cells)), None)
    if separator is None:
        _, classes = encode([cell for cell in cells if cell])
        index = {name: i for i, name in enumerate(classes)}
        return np.array([index.get(cell, -1) for cell in cells], dtype=np.int64), classes, labelled
    split = [[name for part in cell.split(separator) if (name := part.strip())] for cell in cells]
    _, classes = encode([name for names in split for name in names])
    index = {name: i for i, name in enumerate(classes)}
    labels = np.zeros((len(cells), len(classes)), dtype=np.uint8)
    for row, names in enumerate(split):
        labels[row, [index[name] for name in names]] = 1
    return labels, classes, labelled


def _marked_labels(
    sheet: Path, rows: pd.DataFrame, columns: tuple[str, ...]
) -> tuple[npt.NDArray[np.int64] | npt.NDArray[np.uint8], tuple[str, ...], npt.NDArray[np.bool_]]:
    """Columns of zeros and ones. Where every row has exactly one, each image has one label; else several."""
    marks = np.zeros((len(rows), len(columns)), dtype=np.uint8)
    labelled = np.ones(len(rows), dtype=np.bool_)
    odd: list[str] = []
    for i, column in enumerate(columns):
        cells = rows[column].str.lower()
        labelled &= (cells != "").to_numpy()
        odd += [f"{column}={value}" for value in cells.unique() if value not in _MARKS and value]
        marks[:, i] = cells.map(_MARKS).fillna(0).to_numpy(dtype=np.uint8)
    if odd:
        raise InputError(f"{sheet}: columns of labels must hold 0 and 1, found {listed(odd)}.")
    if (marks[labelled].sum(axis=1) == 1).all():
        return marks.argmax(axis=1).astype(np.int64), columns, labelled
    return marks, columns, labelled


def _parts(sheet: Path, cells: pd.Series[str]) -> npt.NDArray[np.str_]:
    odd = sorted({cell or "(empty)" for cell in cells if cell.lower() not in SPLIT_NAMES})
    if odd:
        raise InputError(f"{sheet}: parts must be among {', '.join(SPLIT_NAMES)}; found {listed(odd)}.")
    return np.array([SPLIT_NAMES[cell.lower()] for cell in cells], dtype=np.str_)


def _plain(column: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", column.lower()).strip("_")


SOURCE = Source(
    words="manifest",
    layout="a CSV, TSV or Parquet table with a column for the image and one for the label, images beside it",
    find=find,
    read=read,
)
