"""`cclnet compare` and `cclnet compare-methods`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cclnet.cli import (
    Accelerator,
    Address,
    CellCpus,
    CellGpus,
    CellMemory,
    Data,
    Draws,
    Executor,
    MaxMinutes,
    Parallel,
    Preset,
    Shard,
    StallMinutes,
    parse_seeds,
    with_settings,
)
from cclnet.settings import Settings

Primary = Annotated[str | None, typer.Option(help="The score of the overall verdict. Default: accuracy.")]


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or predictions.csv files.")],
    out: Annotated[Path, typer.Option(help="Folder for comparison.html, .md and .json, and scores.md.")],
    against: Annotated[str | None, typer.Option(help="Compare every method with this one. Default: all pairs.")] = None,
    primary: Primary = None,
    draws: Draws = 1000,
) -> None:
    """Compare RUNS on the same images: paired tests and verdicts. Runs of one method count as its seeds."""
    from cclnet import api

    api.compare(runs, out, against=against, primary=primary, draws=draws, summary=True)


@with_settings(Settings, without=("method", "seed"))
def compare_methods(
    data: Data = "",
    methods: Annotated[str, typer.Option(help="With settings after a colon: hard,lsr:epsilon=0.3. Default: all.")] = "",
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0,1,2",
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/methods"),
    results: Annotated[Path | None, typer.Option(help="Folder for comparison and results. Default: OUT.")] = None,
    against: Annotated[str, typer.Option(help="Compare with this one; all: every pair. Default: hard labels.")] = "",
    primary: Primary = None,
    preset: Preset = "",
    recipe: Annotated[Path | None, typer.Option(help="Settings from a TOML file.")] = None,
    max_minutes: MaxMinutes = 0.0,
    parallel: Parallel = 1,
    shard: Shard = "1/1",
    stall_minutes: StallMinutes = 10.0,
    executor: Executor = "local",
    address: Address = None,
    cell_cpus: CellCpus = None,
    cell_gpus: CellGpus = None,
    cell_memory: CellMemory = None,
    draws: Draws = 1000,
    accelerator: Accelerator = "auto",
    **settings: Any,
) -> None:
    """Train every method with every seed on DATA, and compare them with paired tests.

    It can be stopped at any time; the same command continues, and skips runs that have a result.
    """
    from cclnet.api import run_settings

    chosen = run_settings(data or None, recipe, settings, preset, announce=True)
    from cclnet.sweep import compare_methods as sweep
    from cclnet.sweep.cells import choose_executor, parse_shard

    ray = choose_executor(executor, address=address, cell_cpus=cell_cpus, cell_gpus=cell_gpus, cell_memory=cell_memory)
    request = sweep.Request(
        settings=chosen,
        out=out,
        results=results or out,
        entries=tuple(sweep.parse_entries(methods)),
        seeds=parse_seeds(seeds),
        against=against,
        primary=primary,
        draws=draws,
        max_minutes=max_minutes,
        parallel=parallel,
        shard=parse_shard(shard),
        stall_minutes=stall_minutes,
        ray=ray,
        accelerator=accelerator,
        cache_dir=chosen.cache_folder,
    )
    raise typer.Exit(sweep.compare_methods(request).exit_code)
