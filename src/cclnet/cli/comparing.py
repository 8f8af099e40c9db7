"""`cclnet compare-methods`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cclnet.cli.options import parse_seeds


def compare_methods(
    data: Annotated[
        str, typer.Argument(help="Folder, CSV, .npz or 'synthetic'. None: the embedded set, small settings.")
    ] = "",
    methods: Annotated[
        str, typer.Option(help="Separated by commas, settings after a colon: hard,lsr:epsilon=0.3. Default: all.")
    ] = "",
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0,1,2",
    out: Annotated[Path, typer.Option(help="Where the runs are kept.")] = Path("runs/methods"),
    results: Annotated[
        Path | None, typer.Option(help="Where the comparison and what is kept of each run go. Default: OUT.")
    ] = None,
    against: Annotated[
        str, typer.Option(help="Compare every method with this one; all: every pair. Default: hard labels.")
    ] = "",
    primary: Annotated[str | None, typer.Option(help="The score the verdict speaks of. Default: accuracy.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Settings from a TOML file.")] = None,
    backbone: Annotated[str | None, typer.Option(help="Any timm model name.")] = None,
    epochs: Annotated[int | None, typer.Option()] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting, name=value: --set augment.hue=0.1 --set clip=5"),
    ] = None,
    max_minutes: Annotated[float, typer.Option(help="For all of it; what is unfinished goes on next time.")] = 0.0,
    parallel: Annotated[int, typer.Option(help="Runs at once, spread over the GPUs or sharing the cores.")] = 1,
    draws: Annotated[int, typer.Option(min=2, help="Bootstrap draws behind the intervals.")] = 1000,
    accelerator: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    cache_dir: Annotated[Path | None, typer.Option(help="Where decoded images are kept.")] = None,
) -> None:
    """Train every method with every seed on DATA, and compare them: paired tests, and verdicts in words.

    May be stopped at any moment; the same command goes on where it was, and skips what has its result.
    """
    from cclnet.settings import make_settings, parse_overrides, read_settings
    from cclnet.sweep import compare_methods as command
    from cclnet.sweep.compare_methods import parse_contestants
    from cclnet.training import quick_start

    named: dict[str, Any] = {"data": data or None, "backbone": backbone, "epochs": epochs}
    given = {name: value for name, value in named.items() if value is not None}
    base = read_settings(recipe) if recipe else {} if data else quick_start()
    request = command.Request(
        settings=make_settings(base, given, parse_overrides(set_ or [])),
        out=out,
        results=results or out,
        contestants=tuple(parse_contestants(methods)),
        seeds=parse_seeds(seeds),
        against=against,
        primary=primary,
        draws=draws,
        max_minutes=max_minutes,
        parallel=parallel,
        accelerator=accelerator,
        cache_dir=cache_dir,
    )
    if command.compare_methods(request).failed:
        raise typer.Exit(1)
