"""A table file (CSV, TSV, semicolons, Parquet) as text cells, with the faults of its form named."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pandas as pd

from cclnet.data.sources.source import listed
from cclnet.errors import InputError

TEXT_SUFFIXES = (".csv", ".tsv", ".tab", ".txt", "")
PARQUET_SUFFIXES = (".parquet", ".pq")
MAX_BYTES = 512 * 2**20  # a table of ten million images; what is larger is not a table of labels
_NO_VALUE = {"", "nan", "<na>", "null"}


def read_sheet(path: Path) -> pd.DataFrame:
    """All cells as text without surrounding spaces, and "" where there is no value."""
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"{path} has {path.stat().st_size:,} bytes; a table of labels may have {MAX_BYTES:,}.")
    if path.suffix.lower() in PARQUET_SUFFIXES:
        return _read_parquet(path)
    text = _decode(path, path.read_bytes())
    header, _, _ = text.partition("\n")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(header))
    try:
        columns = [cell.strip() for cell in next(reader, [])]
        _refuse_doubled(path, columns)
        rows, ragged = [], []
        for row in reader:
            while len(row) > len(columns) and not row[-1].strip():
                row.pop()
            if len(row) == len(columns):
                rows.append([_clean(cell) for cell in row])
            elif any(cell.strip() for cell in row):
                ragged.append(f"line {reader.line_num} has {len(row)}")
    except csv.Error as error:
        raise InputError(f"{path} cannot be read as a table: {error} (line {reader.line_num}).") from error
    if ragged:
        raise InputError(f"{path}: the header has {len(columns)} columns, but {listed(ragged)}.")
    table = pd.DataFrame(rows, columns=pd.Index(columns, dtype=object), dtype=object)
    return table.loc[:, [name for name in columns if name]]  # an index column written without a name


def read_columns(path: Path) -> list[str]:
    """The column names alone; none if the file is not a table, so that one can look at any file."""
    if path.suffix.lower() in PARQUET_SUFFIXES:
        return _parquet_columns(path)
    try:
        with path.open("rb") as file:
            header = _decode(path, file.readline(2**20))
        return [cell.strip() for cell in next(csv.reader([header], delimiter=_delimiter(header)), [])]
    except (OSError, csv.Error, InputError):
        return []


def _decode(path: Path, content: bytes) -> str:
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text in UTF-8 (byte {error.start}). Save it as CSV in UTF-8.") from error


def _delimiter(header: str) -> str:
    return max((",", "\t", ";"), key=header.count)


def _clean(cell: str) -> str:
    cell = cell.strip()
    return "" if cell.lower() in _NO_VALUE else cell


def _refuse_doubled(path: Path, columns: list[str]) -> None:
    doubled = sorted({name for name in columns if name and columns.count(name) > 1})
    if doubled:
        raise InputError(f"{path} has columns of the same name: {listed(doubled)}. Rename or remove one of each.")


def _read_parquet(path: Path) -> pd.DataFrame:
    _need_pyarrow(path)
    import pyarrow

    try:
        table = pd.read_parquet(path, engine="pyarrow")
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}") from error
    columns = [str(name) for name in table.columns]
    _refuse_doubled(path, columns)
    cells = {name: [_as_text(cell) for cell in table.iloc[:, i].convert_dtypes()] for i, name in enumerate(columns)}
    return pd.DataFrame(cells, dtype=object)


def _parquet_columns(path: Path) -> list[str]:
    _need_pyarrow(path)
    import pyarrow
    import pyarrow.parquet

    try:
        return list(pyarrow.parquet.read_schema(path).names)
    except (pyarrow.ArrowException, OSError):
        return []


def _need_pyarrow(path: Path) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise InputError(f"{path} is Parquet, which needs pyarrow: pip install 'cclnet[parquet]'") from error


def _as_text(cell: object) -> str:
    """A list of labels becomes labels with a bar between them, as a CSV would have them."""
    if isinstance(cell, list | tuple | np.ndarray):
        return "|".join(_as_text(part) for part in cell)
    return "" if cell is None or cell is pd.NA else _clean(str(cell))
