"""Results of the experiments: what ``cclnet.jobs`` keeps of any run, with the cell it belongs to."""

from __future__ import annotations

from pathlib import Path

from cclnet.jobs import results
from cclnet.reproduce.experiments import Cell

__all__ = ["SCORES", "Result", "read_results"]

SCORES = results.SCORES


class Result(results.Result):
    @property
    def cell(self) -> Cell:
        return Cell(**self.content["cell"])


def read_results(folder: Path) -> list[Result]:
    """Every result in a folder, in the order of their names."""
    return [Result(result.path, result.content) for result in results.read_results(folder)]
