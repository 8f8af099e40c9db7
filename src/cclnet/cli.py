"""The command line: one function a command, each a few lines over the API."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown

from cclnet.errors import InputError

app = typer.Typer(
    help="CCL-Net: train medical image classifiers with soft labels learned from the images.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
data_app = typer.Typer(help="Look at a data set before training on it.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@app.command()
def train(
    data: Annotated[
        str, typer.Argument(help="Folder, CSV, .npz or 'synthetic'. None: the embedded set, small settings.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="The run folder to make. Default: runs/NAME.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder, exactly.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Settings from a TOML file.")] = None,
    method: Annotated[str | None, typer.Option(help="Label-softening method; see `cclnet methods`.")] = None,
    backbone: Annotated[str | None, typer.Option(help="Any timm model name.")] = None,
    pretrained: Annotated[bool | None, typer.Option(help="Start from timm's pretrained weights.")] = None,
    weights: Annotated[str | None, typer.Option(help="Start from a .safetensors file or plain state dict.")] = None,
    epochs: Annotated[int | None, typer.Option()] = None,
    batch_size: Annotated[int | None, typer.Option(help="Over all devices together.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the network.")] = None,
    lr_ccl: Annotated[float | None, typer.Option(help="Learning rate of the CCL head.")] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    compile: Annotated[bool | None, typer.Option(help="torch.compile. Default: on a GPU only.")] = None,
    deterministic: Annotated[bool | None, typer.Option(help="The same bits every time, slower.")] = None,
    max_minutes: Annotated[float | None, typer.Option(help="Stop training after so long.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting, name=value: --set augment.hue=0.1 --set clip=5"),
    ] = None,
    accelerator: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    devices: Annotated[int | None, typer.Option(help="Devices to train on. torchrun and SLURM say themselves.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where decoded images are kept.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Train a classifier on DATA and write its run folder: model, predictions, scores, report.

    Without arguments it trains on the embedded synthetic set, in a few minutes on two CPU cores.
    """
    from cclnet.training import quick_start
    from cclnet.training.loop import Interrupted
    from cclnet.training.loop import train as run_training
    from cclnet.training.run_folder import free_name
    from cclnet.training.settings import make_settings, parse_overrides, read_settings

    named: dict[str, Any] = {
        "data": data or None, "method": method, "backbone": backbone, "pretrained": pretrained, "weights": weights,
        "epochs": epochs, "batch_size": batch_size, "lr": lr, "lr_ccl": lr_ccl, "seed": seed, "compile": compile,
        "deterministic": deterministic, "max_minutes": max_minutes,
    }  # fmt: skip
    given = {name: value for name, value in named.items() if value is not None}
    overrides = parse_overrides(set_ or [])
    if resume is None:
        base = read_settings(recipe) if recipe else {} if data else quick_start()
        settings = make_settings(base, given, overrides)
        folder = out or free_name(Path("runs"), settings)
    elif out or recipe or given or overrides:
        raise InputError("--resume goes on with the settings of the run: give no others beside it.")
    else:
        settings, folder = None, resume
    try:
        run = run_training(
            settings, folder, devices=devices, accelerator=accelerator, cache_dir=cache_dir, progress=not quiet
        )
    except Interrupted as stopped:
        Console(stderr=True).print(f"[yellow]{stopped}[/yellow]", highlight=False)
        raise typer.Exit(128 + stopped.signal) from None
    from cclnet.report.terminal import print_summary

    if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == 0:  # one process speaks for all
        print_summary(run)


@app.command()
def methods(
    name: Annotated[str, typer.Argument(help="A method, to read its card; none to list them all.")] = "",
) -> None:
    """List the label-softening methods, or read the card of one."""
    from cclnet.methods import METHODS, method_card, method_settings

    console = Console()
    if name:
        console.print(Markdown(method_card(name)))
        return
    for known in METHODS:
        settings = ", ".join(f"{key}={value}" for key, value in method_settings(known).items())
        console.print(f"[bold]{known}[/bold]  {settings}", highlight=False)


def main() -> None:
    """Run a command; what the user can mend is one line on stderr and exit code 2, never a traceback."""
    try:
        app(prog_name="cclnet")
    except InputError as error:
        Console(stderr=True).print(f"[bold red]error:[/bold red] {error}", highlight=False, markup=True)
        sys.exit(2)
