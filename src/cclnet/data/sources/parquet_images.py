"""Parquet files with the images inside: a column of image bytes beside the label, as Hugging Face datasets have it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cclnet.data.archives import ArchivedImages, bytes_column, import_pyarrow, refuse_bomb, safe_name
from cclnet.data.sources.folder_names import split_of_folder
from cclnet.data.sources.manifest import (
    PARQUET_SUFFIXES,
    as_text,
    find_column,
    find_group_and_split,
    find_label_columns,
    labels_of,
    refuse_many_columns,
    splits_of,
)
from cclnet.data.sources.source import Source, SourceNotes, finish, nfc, plain_files, subfolders
from cclnet.data.table import ImageTable
from cclnet.errors import InputError, first_line
from cclnet.settings import DataOptions

_NAME = ("image_id", "image_name", "file_name", "filename", "path", "id", "name", "isic_id", "key", "__key__")
_TABLE_BYTES = 2**30  # of the columns beside the images


def find(path: Path) -> list[Path]:
    """Return the Parquet files that have a column of image bytes: the file itself, or those of a folder, or of folders
    in it."""
    if path.is_file():
        return [path] if path.suffix.lower() in PARQUET_SUFFIXES and _has_images(path) else []
    folders = [path, *subfolders(path)]
    inside = (plain_files(folder, PARQUET_SUFFIXES) for folder in folders)
    files = next((found for found in inside if found), [])
    if files and files[0].parent != path:  # all of these folders, such as train and test
        files = [file for folder in folders for file in plain_files(folder, PARQUET_SUFFIXES)]
    return files if files and _has_images(files[0]) else []


def _has_images(path: Path) -> bool:
    try:
        return bytes_column(import_pyarrow(path).parquet.read_schema(path)) is not None
    except Exception:  # noqa: BLE001 (without pyarrow the manifest source says what is needed; damage has many errors)
        return False


def read(path: Path, options: DataOptions) -> ImageTable:
    """Return every row with a label. The image bytes are not read here."""
    files = find(path)
    if not files:
        raise InputError(f"expected Parquet files with a column of image bytes in {path}, found none.")
    root = path if path.is_dir() else path.parent
    rows = pd.concat([_read_table(file) for file in files], ignore_index=True)
    counts = [import_pyarrow(file).parquet.read_metadata(file).num_rows for file in files]
    of_file = np.repeat(np.arange(len(files), dtype=np.int32), counts)
    row_of_file = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
    notes, sheet = SourceNotes(), files[0]
    known = [str(column) for column in rows.columns]
    group, split = find_group_and_split(sheet, rows, known, options, notes)
    name = find_column(sheet, known, options.image_column, _NAME)
    label_columns = find_label_columns(sheet, rows, options.label_column, {name, group, split})
    labels, classes, labelled = labels_of(sheet, rows, label_columns, options.label_separator)
    names = _names(rows, name, files, of_file, row_of_file)
    notes.exclude("images without a label", [names[i] for i in np.flatnonzero(~labelled)])
    kept = np.flatnonzero(labelled)
    rows, names = rows.iloc[kept].reset_index(drop=True), [names[i] for i in kept]
    images = ArchivedImages([os.fspath(file) for file in files], of_file[kept], row_of_file[kept], None, names)
    splits = _splits(rows, split, files, of_file[kept], notes)
    groups = None if group is None else notes.fill_groups(rows[group].tolist(), names)
    used = [column for column in (name, *label_columns, group, split) if column]
    extra = rows.drop(columns=used)
    table = ImageTable(SOURCE.title, root, names, images, labels[kept], classes, groups, splits, extra)
    return finish(table, notes, options)


def _read_table(path: Path) -> pd.DataFrame:
    """Return all columns but the images as text. Class numbers get the names that Hugging Face stores in the schema."""
    parquet = import_pyarrow(path).parquet
    try:
        described = parquet.read_metadata(path)
        refuse_many_columns(path, described.num_columns)
        schema = parquet.read_schema(path)
        image = bytes_column(schema)
        if image is None:
            raise InputError(f"{path} has no column of image bytes, unlike the other files. Move it elsewhere.")
        columns = [name for name in schema.names if name != image]
        size = sum(
            described.row_group(g).column(c).total_uncompressed_size
            for g in range(described.num_row_groups)
            for c in range(described.num_columns)
            if described.row_group(g).column(c).path_in_schema.split(".")[0] != image
        )
        if size > _TABLE_BYTES:
            raise InputError(f"{path}: the columns beside the images have {size:,} bytes, at most {_TABLE_BYTES:,}.")
        refuse_bomb(path, columns)
        table = parquet.read_table(path, columns=columns)
        named = _class_names(schema)
        cells = {name: [as_text(cell) for cell in table.column(name).to_pylist()] for name in columns}
    except InputError:
        raise
    except Exception as error:  # damaged files make pyarrow fail in any way
        raise InputError(f"{path} cannot be read as Parquet: {first_line(error)}.") from error
    for name, known in named.items():
        if name in cells and all(not cell or (cell.isdecimal() and int(cell) < len(known)) for cell in cells[name]):
            cells[name] = [known[int(cell)] if cell else "" for cell in cells[name]]
    return pd.DataFrame(cells, index=range(described.num_rows), dtype=object)


def _class_names(schema: Any) -> dict[str, list[str]]:
    """Return the class names of each column of class numbers, as Hugging Face datasets store them in the metadata."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {
            str(column): [str(name) for name in described["names"]]
            for column, described in features.items()
            if described.get("_type") == "ClassLabel"
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _names(rows: pd.DataFrame, column: str | None, files: list[Path], of_file: Any, row_of_file: Any) -> list[str]:
    """Return the names in a column if they are unique and no paths out of the folder; else file and row."""
    if column is not None:
        names = [safe_name(nfc(cell)) for cell in rows[column]]
        if None not in names and len(set(names)) == len(names):
            return [str(name) for name in names]
    stems = [file.stem for file in files]
    if len(set(stems)) < len(stems):
        stems = [f"{file.parent.name}/{file.stem}" for file in files]
    return [f"{stems[file]}/{row:07d}" for file, row in zip(of_file.tolist(), row_of_file.tolist(), strict=True)]


def _splits(rows: pd.DataFrame, column: str | None, files: list[Path], of_file: Any, notes: SourceNotes) -> Any:
    if column is not None:
        return splits_of(files[0], rows[column])
    of_name = [split_of_folder(file.stem.partition("-")[0]) or split_of_folder(file.parent.name) for file in files]
    if len(set(of_name)) < 2 or "" in of_name:
        return None
    notes.note("splits are those of the names of the Parquet files", sorted(set(of_name)))
    return np.array(of_name, dtype=np.str_)[of_file]


SOURCE = Source("Parquet with images", "Parquet files with a column of image bytes and one for the label", find, read)
