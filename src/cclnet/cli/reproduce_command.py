"""`cclnet reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cclnet.cli import (
    Accelerator,
    Address,
    CellCpus,
    CellGpus,
    CellMemory,
    Executor,
    MaxMinutes,
    Parallel,
    Shard,
    StallMinutes,
    parse_list,
    parse_seeds,
)

WHAT = (
    "table1, table2, figures or folds: a part of the reproduction. all: every run that docs/reproduce.md reports. "
    "complete: the same with more seeds, and folds. verify: recompute every figure of --results from the kept "
    "predictions."
)
ONLY = "Patterns of the names of runs, which are run in this order: 'paper-resnet18-*,*-ccl-seed1'. Default: all."


def reproduce(
    what: Annotated[list[str], typer.Argument(help=WHAT)],
    data: Annotated[str, typer.Option(help="The ISIC 2018 images, as downloaded.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/reproduce"),
    results: Annotated[Path | None, typer.Option(help="Folder for results and tables. Default: OUT/results.")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    backbones: Annotated[str, typer.Option(help="Backbones of table1, separated by commas.")] = "",
    methods: Annotated[str, typer.Option(help="Methods of table1, separated by commas.")] = "",
    split: Annotated[str, typer.Option(help="paper: that of the paper; lesion: no lesion in two splits.")] = "paper",
    max_minutes: MaxMinutes = 0.0,
    parallel: Parallel = 1,
    only: Annotated[str, typer.Option(help=ONLY)] = "",
    shard: Shard = "1/1",
    stall_minutes: StallMinutes = 10.0,
    executor: Executor = "local",
    address: Address = None,
    cell_cpus: CellCpus = None,
    cell_gpus: CellGpus = None,
    cell_memory: CellMemory = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run everything with tiny settings on synthetic images.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the runs, and which are finished.")] = False,
    tables_only: Annotated[bool, typer.Option("--tables-only", help="Only write the tables of the results.")] = False,
    documents: Annotated[bool, typer.Option("--documents", help="Also update docs/ and README.md.")] = False,
    recipes: Annotated[Path | None, typer.Option(help="Folder of paper.toml and lesion.toml.")] = None,
    accelerator: Accelerator = "auto",
    cache_dir: Annotated[Path | None, typer.Option(help="Folder for decoded images.")] = None,
) -> None:
    """Run the paper's experiments on ISIC 2018 and write its tables and figures next to the published numbers."""
    from cclnet.reproduce import experiments
    from cclnet.reproduce.tables import check_has_results, write_documents
    from cclnet.reproduce.verdict import paper_blocks
    from cclnet.sweep.cells import choose_executor, parse_shard

    folder = results or out / "results"
    console = Console()
    if "verify" in what:
        verify_results(what, folder, documents, console)
        return
    exit_code = 0
    if tables_only:
        experiments.print_pages(experiments.write_again(what, split, folder), console)
    else:
        ray = choose_executor(
            executor, address=address, cell_cpus=cell_cpus, cell_gpus=cell_gpus, cell_memory=cell_memory
        )
        request = experiments.Request(
            what=tuple(what),
            data=data,
            out=out,
            results=folder,
            seeds=parse_seeds(seeds),
            backbones=parse_list(backbones),
            methods=parse_list(methods),
            split=split,
            max_minutes=max_minutes,
            parallel=parallel,
            only=parse_list(only),
            shard=parse_shard(shard),
            stall_minutes=stall_minutes,
            ray=ray,
            smoke=smoke,
            dry_run=dry_run,
            recipes=recipes or experiments.RECIPES,
            accelerator=accelerator,
            cache_dir=cache_dir,
        )
        if dry_run:
            experiments.list_cells(request, console)
            return
        exit_code = experiments.reproduce(request, console).exit_code
    if documents:
        check_has_results(folder)
        write_documents(Path(), paper_blocks(folder))
    if exit_code:
        raise typer.Exit(exit_code)


def verify_results(what: list[str], results: Path, documents: bool, console: Console) -> None:
    """Print how many figures agree, and every one that does not; exit code 1 if any."""
    from cclnet.errors import InputError
    from cclnet.reproduce.tables import check_has_results
    from cclnet.reproduce.verify import verify

    if what != ["verify"]:
        raise InputError("verify stands alone: it runs no experiment.")
    check_has_results(results)
    found = verify(results, Path() if documents else None)
    for problem in found.problems:
        console.print(problem, highlight=False, markup=False, soft_wrap=True)
    console.print(found.in_words(), highlight=False)
    if found.problems:
        raise typer.Exit(1)
