"""Several cells in processes of their own: what is skipped, what fails, what dies, what is left for next time."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from made import RECIPES, made_result, made_run

from cclnet import InputError
from cclnet.reproduce.experiments import Cell, read_recipes
from cclnet.reproduce.results import read_results
from cclnet.reproduce.runner import run_cells
from cclnet.reproduce.worker import Message, Work

GOOD, WRONG, DEADLY, DONE, TRAINED = (Cell(method=m) for m in ("ccl", "hard", "lsr-u1", "lsr-u5", "lsr-a1"))


def work(folder: Path, **changes: Any) -> Work:
    return Work(folder / "runs", folder / "results", read_recipes(RECIPES), {"paper": "/somewhere/isic"}, **changes)


def staged(connection: Connection, device: str | None, threads: int, work: Work) -> None:
    """Trains by hand: one cell well, one with an error, and dies of one."""
    while (cell := connection.recv()) is not None:
        if cell.method == "lsr-u1":
            os._exit(7)
        if cell.method == "hard":
            connection.send(Message("failed", "the images ran out"))
            continue
        connection.send(Message("training", "epoch 1/1"))
        made_run(work.runs, cell, wrong=6)
        connection.send(Message("trained"))


def test_one_cell_that_fails_or_dies_stops_no_other(tmp_path: Path) -> None:
    made_result(tmp_path, DONE, wrong=12)
    made_run(tmp_path / "runs", TRAINED, wrong=3)
    outcome = run_cells([DEADLY, WRONG, DONE, TRAINED, GOOD], work(tmp_path), parallel=1, trainer=staged)
    assert sorted(outcome.done) == sorted([GOOD.name, TRAINED.name])
    assert outcome.skipped == [DONE.name] and not outcome.unfinished
    assert outcome.failed == {
        DEADLY.name: "its process ended with code 7",
        WRONG.name: "the images ran out",
    }
    assert {r.path.stem: r.value("accuracy") for r in read_results(tmp_path / "results")} == pytest.approx(
        {GOOD.name: 0.9, TRAINED.name: 0.95, DONE.name: 0.8}
    )


def test_after_the_deadline_nothing_is_begun(tmp_path: Path) -> None:
    outcome = run_cells([GOOD, WRONG], work(tmp_path, deadline=time.time() - 1), trainer=staged)
    assert outcome.unfinished == [GOOD.name, WRONG.name]
    assert not outcome.done and not outcome.failed and not (tmp_path / "runs").exists()


def test_results_of_another_recipe_are_not_mixed_in(tmp_path: Path) -> None:
    made_result(tmp_path, DONE, wrong=12)
    now = work(tmp_path)
    recipe = {**now.recipes["paper"], "epochs": 90, "clip": 5.0}
    with pytest.raises(InputError, match=r"(?s)1 results were made.*epochs was 160, is 90; clip was 1.0, is 5.0"):
        run_cells([DONE, GOOD], replace(now, recipes={"paper": recipe}), trainer=staged)


def test_parallel_must_be_a_count(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="parallel must be at least 1, got 0"):
        run_cells([GOOD], work(tmp_path), parallel=0)
