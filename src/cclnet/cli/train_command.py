"""`cclnet train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cclnet.cli import Accelerator, Data, Preset, Quiet, with_settings
from cclnet.cli.executor_options import with_executor
from cclnet.errors import Interrupted
from cclnet.settings import Settings


@with_settings(Settings)
@with_executor
def train(
    data: Data = "",
    out: Annotated[Path | None, typer.Option(help="The run folder to create. Default: runs/NAME.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder, with its own settings.")] = None,
    preset: Preset = "",
    recipe: Annotated[Path | None, typer.Option(help="Settings from a TOML file.")] = None,
    accelerator: Accelerator = "auto",
    devices: Annotated[
        int | None, typer.Option(help="Number of devices to train on. torchrun and SLURM set it.")
    ] = None,
    executor: Any = None,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Train a classifier on DATA and write its run folder: model, predictions, scores, report.

    Without arguments it trains on the embedded synthetic set, in a few minutes on two CPU cores. With --folds it trains
    one run per fold and combines them into an ensemble; --parallel, --executor and --shard choose the machines, and the
    same command continues an interrupted training.
    """
    from cclnet.api import train as run_training

    machine: dict[str, Any] = {"accelerator": accelerator, "devices": devices}
    try:
        run_training(
            data or None,
            out,
            resume=resume,
            preset=preset,
            recipe=recipe,
            progress=not quiet,
            summary=True,
            executor=executor,
            **machine,
            **settings,
        )
    except Interrupted as stopped:
        # Not wrapped: the command in it is to be copied.
        text = f"{stopped}{executor.command_options if executor else ''}"
        Console(stderr=True).print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(128 + stopped.signal) from None
