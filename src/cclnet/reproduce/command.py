"""What ``cclnet reproduce`` does: choose cells, run them, write tables and figures from the results."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console

from cclnet.errors import InputError, unknown
from cclnet.reproduce import experiments
from cclnet.reproduce import experiments as looks_cells
from cclnet.reproduce.experiments import LOOKS, SMOKE_DATA, SPLITS, TUNING, Cell, read_recipes, unique
from cclnet.reproduce.paper import BACKBONES, METHODS
from cclnet.sweep.cells import Work
from cclnet.sweep.local import Log, Outcome, Show, run_jobs

EXPERIMENTS = ("all", "table1", "table2", "figures", "tune", "looks", "tune-looks", "uses")
RECIPES = Path(__file__).parents[3] / "recipes" / "isic2018"  # of a source tree


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        what: names of EXPERIMENTS.
        data: the ISIC 2018 images; not needed with ``smoke``.
        out: the folder of the run folders; results go into ``results`` there unless given.
        seeds, backbones, methods, split: which cells of the tables.
        max_minutes: for all of it; 0 for no limit.
        parallel: cells trained at once.
        only: names of cells, with * and ? for any, in the order in which they are to run; () for all of them.
        shard: (i, n): every n-th cell beginning with the i-th, to spread the cells over n machines.
    """

    what: tuple[str, ...]
    data: str
    out: Path
    results: Path
    seeds: tuple[int, ...] = (0,)
    backbones: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    split: str = "paper"
    max_minutes: float = 0.0
    parallel: int = 1
    only: tuple[str, ...] = ()
    shard: tuple[int, int] = (1, 1)
    smoke: bool = False
    recipes: Path = RECIPES
    accelerator: str = "auto"
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        check_names(self.what, self.split)
        if (self.backbones or self.methods) and (len(self.what) != 1 or self.what[0] not in ("table1", "looks")):
            raise InputError(
                "backbones and methods choose among the cells of table1 or looks: leave them out, or ask for one alone."
            )
        if not self.data and not self.smoke:
            raise InputError("give the folder of the ISIC 2018 images as --data, or --smoke to try it on drawn ones.")
        if not 1 <= self.shard[0] <= self.shard[1]:
            raise InputError(f"shard is i/n with i from 1 to n, got {self.shard[0]}/{self.shard[1]}.")


def check_names(what: Sequence[str], split: str) -> None:
    """Names of experiments and the split as they may be asked for; the slices for tuning are no splits to report."""
    for name in what:
        if name not in EXPERIMENTS:
            raise unknown("experiment", name, EXPERIMENTS)
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)


def cells_of(request: Request) -> list[Cell]:
    """The cells that are asked for, each once."""
    seeds, split = request.seeds, request.split
    chosen: list[Cell] = []
    for name in request.what:
        if name == "all":  # with the seeds and splits that are reported
            chosen += everything()
        elif name == "table1":
            backbones, methods = request.backbones or tuple(BACKBONES), request.methods or tuple(METHODS)
            chosen += experiments.table1(seeds, backbones, methods, split)
        elif name == "looks":
            backbones, methods = request.backbones or ("resnet18",), request.methods or tuple(LOOKS)
            chosen += looks_cells.looks(seeds, backbones, methods)
        elif name in ("tune", "tune-looks", "uses"):
            make = {"tune": experiments.tune, "tune-looks": looks_cells.tune_looks, "uses": looks_cells.uses}
            chosen += make[name](seeds)
        else:
            chosen += {"table2": experiments.table2, "figures": experiments.figures}[name](seeds, split)
    chosen = _named(unique(chosen), request.only) if request.only else unique(chosen)
    first, count = request.shard
    return chosen[first - 1 :: count]


def _named(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    named: list[Cell] = []
    for pattern in patterns:
        fitting = [cell for cell in cells if fnmatchcase(cell.name, pattern)]
        if not fitting:
            raise unknown("cell", pattern, [cell.name for cell in cells])
        named += fitting
    return unique(named)


def everything() -> list[Cell]:
    """All that the pages report, what matters most first: where time runs out, the least is missing."""
    seeds, compared = (0, 1, 2), ("hard", "lsr-u5", "ccl")
    others = [backbone for backbone in BACKBONES if backbone != "resnet18"]
    return [
        *experiments.table1(backbones=("resnet18",)),
        *looks_cells.looks(seeds),
        *experiments.table2(),
        *experiments.table1(backbones=others),
        *experiments.table1(seeds, ("resnet18",), compared),
        *experiments.table1((1,), ("efficientnet_b0",), ("hard",)),  # where seed 0 alone was far from the paper
        *experiments.table1((1,), ("resnet18",), ("lsr-a1",)),
        *experiments.figures(),
        *looks_cells.looks(backbones=others, rows=(*compared, looks_cells.OURS, "ccl-confusion", "yardstick")),
    ]


def reproduce(request: Request, console: Console | None = None) -> Outcome:
    """Run what is asked for and has no result yet, then write the tables and figures of all results."""
    console = console or Console()
    began = time.time()
    asked = {"what": request.what, "split": request.split, "seeds": request.seeds, "parallel": request.parallel}
    asked |= {"only": request.only} if request.only else {}
    log = Log(request.results, began, asked)
    cells = cells_of(request)
    recipes, data = read_recipes(request.recipes), _prepared(request, cells)
    work = Work(
        runs=request.out / "runs",
        results=request.results,
        deadline=began + 60 * request.max_minutes if request.max_minutes else float("inf"),
        accelerator=request.accelerator,
        cache_dir=request.cache_dir,
    )
    jobs = [cell.job(recipes, data, request.smoke) for cell in cells]
    outcome = run_jobs(jobs, work, request.parallel, Show(console), on_end=log.write)
    for page in write_all(request.results):
        console.print(f"{page}", highlight=False, soft_wrap=True)
    console.print(outcome.in_words(log.seconds), highlight=False, markup=False)
    return outcome


def write_again(what: Sequence[str], split: str, results: Path) -> list[Path]:
    """The tables and figures of results that are there, running nothing."""
    from cclnet.reproduce.pages import refuse_nothing

    check_names(what, split)
    refuse_nothing(results)
    return write_all(results)


def write_all(results: Path) -> list[Path]:
    """Figures first: the pages show them."""
    from cclnet.reproduce.pages import write_tables
    from cclnet.reproduce.paper_figures import write_figures

    write_figures(results)
    return write_tables(results)


def _prepared(request: Request, cells: Sequence[Cell]) -> dict[str, str]:
    """The data of each split. Images are decoded here, once, before the processes that share them start."""
    from cclnet.data.cache import decode
    from cclnet.data.sources import open_data
    from cclnet.reproduce.experiments import write_tuning_data

    data = SMOKE_DATA if request.smoke else request.data
    recipes = read_recipes(request.recipes)
    table = open_data(data)
    short_side = recipes["paper"].get("short_side", 256)
    of_split = {"paper": data, "lesion": data}
    if any(cell.split not in TUNING for cell in cells) and not request.smoke:
        decode(table, short_side, cache_dir=request.cache_dir)
    for slice_ in {cell.split for cell in cells} & set(TUNING):
        sheet = write_tuning_data(table, recipes[slice_], request.out / f"{slice_}-data")
        of_split[slice_] = str(sheet)
        if not request.smoke:
            decode(open_data(sheet), short_side, cache_dir=request.cache_dir)
    return of_split


def parse_shard(text: str) -> tuple[int, int]:
    """
    >>> parse_shard("2/4")
    (2, 4)
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if not found:
        raise InputError(f"shard is i/n, such as 1/4 for the first of four machines; got '{text}'.")
    return int(found[1]), int(found[2])
