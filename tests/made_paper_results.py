"""Kept results of paper cells, made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import made_runs
from cclnet.reproduce.experiments import PaperCell, read_recipes
from cclnet.reproduce.seeds import PaperResult
from cclnet.sweep.cells import Cell

CLASSES = made_runs.CLASSES


def cell_of(cell: PaperCell) -> Cell:
    return cell.cell(read_recipes()["lesion" if "lesion" in cell.split else "paper"], "/somewhere/isic")


def made_run(folder: Path, cell: PaperCell, wrong: int, **more: Any) -> Path:
    """The run of a cell; see ``made_runs``."""
    return made_runs.made_run(folder, cell_of(cell), wrong, **more)


def kept(folder: Path, cell: PaperCell) -> PaperResult:
    """The result of a cell that was run in ``folder / "runs"``, in ``folder / "results"``."""
    return PaperResult(**vars(made_runs.kept(folder, cell_of(cell))))


def made_result(folder: Path, cell: PaperCell, wrong: int, **more: Any) -> PaperResult:
    made_run(folder / "runs", cell, wrong, **more)
    return kept(folder, cell)
