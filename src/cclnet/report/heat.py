"""Square tables of classes, coloured: the confusion matrix and the soft labels."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

Matrix = npt.NDArray[np.float64]

MOST_CELLS = 40  # classes up to which every cell is written out; beyond it the table is a picture
MOST_SHARES = 12  # classes up to which a cell has room for its count and its share


@dataclass(frozen=True)
class Cell:
    """One cell: its words, and how strongly (0 to 1) it takes the colour of its kind."""

    text: str
    strength: float
    kind: str  # "hit": on the diagonal, "miss": off it, "own": the diagonal where it is not judged
    small: str = ""
    title: str = ""


@dataclass(frozen=True)
class HeatTable:
    """A square table, written out in cells (rows) or, for many classes, as a picture (a data URI)."""

    classes: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    picture: str = ""


def confusion_table(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> HeatTable:
    """Counts with the share of their row (the true class); the colour follows the share, by its root off the diagonal,
    where shares are small."""
    matrix = np.asarray(counts, dtype=np.float64)
    totals = matrix.sum(axis=1, keepdims=True)
    shares = np.divide(matrix, totals, out=np.zeros_like(matrix), where=totals > 0)
    if len(classes) > MOST_CELLS:
        return HeatTable(tuple(classes), (), _picture(shares))
    rows = []
    for i, true in enumerate(classes):
        cells = []
        for j, said in enumerate(classes):
            share, count = float(shares[i, j]), int(matrix[i, j])
            small = f"{share:.0%}" if count and len(classes) <= MOST_SHARES else ""
            title = f"{true} taken for {said}" if i != j else f"{true} recognised"
            kind, strength = ("hit", share) if i == j else ("miss", share**0.5)
            cells.append(Cell(f"{count:,}", strength, kind, small, f"{title}: {count:,} ({share:.1%})"))
        rows.append(tuple(cells))
    return HeatTable(tuple(classes), tuple(rows))


def soft_label_table(matrix: Sequence[Sequence[float]], classes: Sequence[str]) -> HeatTable:
    """Soft labels, one row a class. The colour spans the weights off the diagonal, where the likeness is; the
    diagonal, always the largest, is left plain."""
    weights = np.asarray(matrix, dtype=np.float64)
    off = weights[~np.eye(len(classes), dtype=bool)]
    low, high = (float(off.min()), float(off.max())) if off.size else (0.0, 1.0)
    strength = (weights - low) / (high - low) if high > low else np.full_like(weights, 0.5)
    if len(classes) > MOST_CELLS:
        np.fill_diagonal(strength, 0.0)
        return HeatTable(tuple(classes), (), _picture(strength))
    rows = tuple(
        tuple(
            Cell(
                f"{weights[i, j]:.2f}" if len(classes) <= MOST_SHARES else f"{100 * weights[i, j]:.0f}",
                0.0 if i == j else float(strength[i, j]),
                "own" if i == j else "hit",
                title=f"soft label of {row}, weight on {column}: {weights[i, j]:.4f}",
            )
            for j, column in enumerate(classes)
        )
        for i, row in enumerate(classes)
    )
    return HeatTable(tuple(classes), rows)


def agreement_table(agreement: Sequence[Sequence[float | None]], runs: Sequence[str]) -> HeatTable:
    """Rank correlations between runs, -1 to 1: blue where they agree, orange where they contradict."""
    values = np.array([[np.nan if v is None else v for v in row] for row in agreement], dtype=np.float64)
    if len(runs) > MOST_CELLS:
        return HeatTable(tuple(runs), (), _picture(np.nan_to_num(values)))
    rows = tuple(
        tuple(
            Cell(
                "–" if np.isnan(value) else f"{value:.2f}".replace("-", "−"),
                0.0 if i == j or np.isnan(value) else abs(float(value)),
                "own" if i == j else "hit" if value >= 0 else "miss",
                title=f"{runs[i]} and {runs[j]}",
            )
            for j, value in enumerate(row)
        )
        for i, row in enumerate(values)
    )
    return HeatTable(tuple(runs), rows)


def _picture(strength: Matrix) -> str:
    """One pixel a cell, in one colour that is see-through where the strength is low: right on any background."""
    pixels = np.empty((*strength.shape, 4), dtype=np.uint8)
    pixels[..., :3] = (46, 134, 200)
    pixels[..., 3] = np.rint(255 * np.clip(strength, 0, 1) ** 0.5)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
