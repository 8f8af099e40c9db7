"""Results of cells, made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import made_runs
from cclnet.reproduce.experiments import SPLITS, TUNING, Cell, read_recipes
from cclnet.reproduce.seeds import Result
from cclnet.sweep.cells import Job

CLASSES = made_runs.CLASSES
RECIPES = Path(__file__).parents[2] / "recipes" / "isic2018"


def job_of(cell: Cell) -> Job:
    return cell.job(read_recipes(RECIPES), dict.fromkeys((*SPLITS, *TUNING), "/somewhere/isic"))


def made_run(folder: Path, cell: Cell, wrong: int, **more: Any) -> Path:
    """The run of a cell; see ``made_runs``."""
    return made_runs.made_run(folder, job_of(cell), wrong, **more)


def kept(folder: Path, cell: Cell) -> Result:
    """The result of a cell that was run in ``folder / "runs"``, in ``folder / "results"``."""
    result = made_runs.kept(folder, job_of(cell))
    return Result(**vars(result))


def made_result(folder: Path, cell: Cell, wrong: int, **more: Any) -> Result:
    made_run(folder / "runs", cell, wrong, **more)
    return kept(folder, cell)
