"""`cclnet compare` and `cclnet compare-methods`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cclnet.cli import Accelerator, Calibration, Data, Draws, MaxMinutes, Preset, parse_seeds, with_settings
from cclnet.cli.executor_options import with_executor
from cclnet.settings import Settings

Primary = Annotated[str | None, typer.Option(help="The score of the overall verdict. Default: accuracy.")]


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or predictions.csv files.")],
    out: Annotated[Path, typer.Option(help="Folder for comparison.html, .md and .json, and scores.md.")],
    against: Annotated[str | None, typer.Option(help="Method to compare all others with. Default: all pairs.")] = None,
    primary: Primary = None,
    draws: Draws = 1000,
    calibration: Calibration = "auto",
) -> None:
    """Compare RUNS on the same images: paired tests and verdicts. Runs of one method count as its seeds."""
    from cclnet import api

    api.compare(runs, out, against=against, primary=primary, draws=draws, calibration=calibration, summary=True)


@with_settings(Settings, without=("method", "seed"))
@with_executor
def compare_methods(
    data: Data = "",
    methods: Annotated[
        str, typer.Option(help="Methods, with settings after a colon: hard,lsr:epsilon=0.3. Default: all.")
    ] = "",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/methods"),
    results: Annotated[Path | None, typer.Option(help="Folder for comparison and results. Default: OUT.")] = None,
    against: Annotated[
        str, typer.Option(help="Method to compare all others with; all: every pair. Default: hard.")
    ] = "",
    primary: Primary = None,
    preset: Preset = "",
    recipe: Annotated[Path | None, typer.Option(help="Settings from a TOML file.")] = None,
    max_minutes: MaxMinutes = 0.0,
    executor: Any = None,
    draws: Draws = 1000,
    accelerator: Accelerator = "auto",
    **settings: Any,
) -> None:
    """Train every method with every seed on DATA, and compare them with paired tests.

    It can be stopped at any time; the same command continues, and skips runs that have a result.
    """
    from cclnet.api import run_settings

    chosen = run_settings(data or None, recipe, settings, preset, announce=True, check=True)
    from cclnet.sweep import compare_methods as sweep
    from cclnet.sweep.cells import Executor

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
        accelerator=accelerator,
        cache_dir=chosen.cache_folder,
        **vars(executor or Executor()),
    )
    raise typer.Exit(sweep.compare_methods(request).exit_code)
