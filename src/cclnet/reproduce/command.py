"""``cclnet reproduce``: choose cells, run them, and write tables and figures from the results."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cclnet.errors import InputError, unknown
from cclnet.reproduce.experiments import (
    BACKBONES,
    METHODS,
    RECIPES,
    SMOKE_DATA,
    SPLITS,
    PaperCell,
    everything,
    figures,
    read_recipes,
    select,
    table1,
    table2,
    unique,
)
from cclnet.reproduce.pages import check_has_results, write_paper
from cclnet.sweep.cells import SweepOptions, SweepSummary
from cclnet.sweep.local import run_sweep

EXPERIMENTS = ("all", "table1", "table2", "figures")
MOVED = ("similarity", "looks", "tune", "tune-similarity", "tune-looks", "uses")


@dataclass(frozen=True, kw_only=True)
class Request(SweepOptions):
    """The arguments of ``cclnet reproduce``."""

    what: tuple[str, ...]  # names of EXPERIMENTS
    data: str  # the ISIC 2018 images; not needed with smoke
    seeds: tuple[int, ...] = (0,)
    backbones: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    split: str = "paper"
    only: tuple[str, ...] = ()  # names of cells, with * and ?, in the order in which to run them
    smoke: bool = False
    recipes: Path = RECIPES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names(self.what, self.split)
        if (self.backbones or self.methods) and self.what != ("table1",):
            raise InputError("backbones and methods select cells of table1: leave them out, or ask for table1 alone.")
        check_data(self.data, self.smoke)


def check_data(data: str, smoke: bool) -> None:
    if not data and not smoke:
        raise InputError("give the folder of the ISIC 2018 images as --data, or --smoke for synthetic ones.")


def check_names(what: Sequence[str], split: str) -> None:
    for name in what:
        if name in MOVED:
            raise InputError(f"'{name}' is not in the paper: run `python experiments/similarity/run.py {name}`.")
        if name not in EXPERIMENTS:
            raise unknown("experiment", name, EXPERIMENTS)
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)


def cells_of(request: Request) -> list[PaperCell]:
    """The requested cells, each once."""
    seeds, split, chosen = request.seeds, request.split, []
    for name in request.what:
        if name == "all":  # with the seeds and splits that are reported
            chosen += everything()
        elif name == "table1":
            chosen += table1(seeds, request.backbones or tuple(BACKBONES), request.methods or tuple(METHODS), split)
        else:
            chosen += {"table2": table2, "figures": figures}[name](seeds, split)
    return select(unique(chosen), request.only)


def reproduce(request: Request, console: Console) -> SweepSummary:
    """Run the requested cells that have no result yet, then write tables and figures of all results."""
    began = time.time()
    data = SMOKE_DATA if request.smoke else request.data
    recipes = read_recipes(request.recipes)
    if not request.smoke:
        decode_once(data, recipes["paper"], request)
    requested: dict[str, Any] = {"what": request.what, "split": request.split, "seeds": request.seeds}
    requested |= {"parallel": request.parallel} | ({"only": request.only} if request.only else {})
    cells = [cell.cell(recipes[cell.split], data, request.smoke) for cell in cells_of(request)]
    summary = run_sweep(cells, request, requested, console, began)
    print_pages(write_paper(request.results), console)
    console.print(summary.text(), highlight=False, markup=False)
    return summary


def decode_once(data: str | Path, recipe: Mapping[str, Any], options: SweepOptions) -> None:
    """Decode the images into the cache before the processes that share it start."""
    from cclnet.data.cache import decode
    from cclnet.data.sources import open_data

    decode(open_data(data), recipe.get("short_side", 256), cache_dir=options.cache_dir)


def write_again(what: Sequence[str], split: str, results: Path) -> list[Path]:
    """Write the tables and figures of existing results, running nothing."""
    check_names(what, split)
    check_has_results(results)
    return write_paper(results)


def print_pages(pages: Sequence[Path], console: Console) -> None:
    for page in pages:
        console.print(str(page), highlight=False, soft_wrap=True)
