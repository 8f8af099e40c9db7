"""correlation.csv: the matrix of soft labels with the names of its classes.

The header is ``class,<name>,<name>,...``, then one row a class: row k is the soft label of class k.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from cclnet.errors import InputError
from cclnet.files import write_whole


def write_soft_labels(path: str | Path, classes: Sequence[str], matrix: npt.ArrayLike) -> None:
    """Write a [K, K] matrix with the names of its classes; 17 digits bring a float64 back exactly."""
    values = np.asarray(matrix, dtype=np.float64)
    if values.shape != (len(classes), len(classes)):
        raise InputError(f"{len(classes)} classes need a matrix of that size, got {list(values.shape)}.")
    frame = pd.DataFrame(values, columns=list(classes))
    frame.insert(0, "class", list(classes), allow_duplicates=True)
    write_whole(path, frame.to_csv(index=False, float_format="%.17g", lineterminator="\n"))


def tells_classes_apart(matrix: npt.ArrayLike) -> bool:
    """Whether some classes are more alike than others by these labels. Hard labels and label smoothing, uniform or by
    class frequency, give every other class the same share whatever the class: they say nothing of likeness.

    >>> tells_classes_apart(np.eye(3)), tells_classes_apart([[0.8, 0.2, 0.0], [0.2, 0.8, 0.0], [0.1, 0.1, 0.8]])
    (False, True)
    """
    values = np.array(matrix, dtype=np.float64)
    np.fill_diagonal(values, np.nan)
    if len(values) == 2:
        return bool(np.nanmax(values) > 0)  # there is one other class
    return bool((np.nanmax(values, axis=0) - np.nanmin(values, axis=0)).max() > 1e-6)


def read_soft_labels(path: str | Path) -> tuple[tuple[str, ...], npt.NDArray[np.float64]]:
    """The names of the classes and the [K, K] matrix of a correlation.csv."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no file {path}. Methods that learn soft labels write it; hard labels have none.")
    # the header is read as a row like any other: a class may be called "class", and names may look like numbers
    text = path.read_text(encoding="utf-8-sig")
    try:
        cells = pd.read_csv(io.StringIO(text), header=None, dtype=str, keep_default_na=False)
    except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
        raise InputError(f"{path} cannot be read as comma-separated text: {error}") from error
    classes = tuple(str(name) for name in cells.iloc[0, 1:])
    rows = tuple(str(name) for name in cells.iloc[1:, 0])
    if len(classes) < 2 or rows != classes:
        raise InputError(f"{path}: rows and columns must name the same classes in the same order, at least two; "
                         f"columns {', '.join(classes) or 'none'}; rows {', '.join(rows) or 'none'}.")  # fmt: skip
    matrix = cells.iloc[1:, 1:].apply(pd.to_numeric, errors="coerce").to_numpy(dtype=np.float64)
    if not ((matrix >= 0) & (matrix <= 1)).all():
        i, k = np.argwhere(~((matrix >= 0) & (matrix <= 1)))[0]
        raise InputError(f"{path}: entries must be probabilities in [0, 1]; row {classes[i]}, column {classes[k]} "
                         f"holds '{cells.iloc[i + 1, k + 1]}'.")  # fmt: skip
    return classes, matrix
