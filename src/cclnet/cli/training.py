"""`cclnet train` and `cclnet benchmark`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cclnet.cli.options import (
    FollowLinks,
    GroupColumn,
    ImageColumn,
    ImageFolder,
    LabelColumn,
    LabelSeparator,
    SplitColumn,
)
from cclnet.errors import InputError


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
    source: Annotated[str | None, typer.Option(help="The layout of the data, where two fit.")] = None,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    group_column: GroupColumn = None,
    split_column: SplitColumn = None,
    label_separator: LabelSeparator = None,
    image_folder: ImageFolder = None,
    follow_links: FollowLinks = None,
    strict: Annotated[bool | None, typer.Option(help="Refuse images without label, labels without image.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting, name=value: --set clip=5 --set method_settings.softness=.7"),
    ] = None,
    accelerator: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    devices: Annotated[int | None, typer.Option(help="Devices to train on. torchrun and SLURM say themselves.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where decoded images are kept.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Train a classifier on DATA and write its run folder: model, predictions, scores, report.

    Without arguments it trains on the embedded synthetic set, in a few minutes on two CPU cores.
    """
    from cclnet.runs.folder import free_name
    from cclnet.settings import make_settings, parse_overrides, read_settings
    from cclnet.training import quick_start
    from cclnet.training.loop import Interrupted
    from cclnet.training.loop import train as run_training
    from cclnet.training.setup import speaks_for_all

    named: dict[str, Any] = {
        "data": data or None, "method": method, "backbone": backbone, "pretrained": pretrained, "weights": weights,
        "epochs": epochs, "batch_size": batch_size, "lr": lr, "lr_ccl": lr_ccl, "seed": seed, "compile": compile,
        "deterministic": deterministic, "max_minutes": max_minutes, "source": source, "image_column": image_column,
        "label_column": label_column, "group_column": group_column, "split_column": split_column, "strict": strict,
        "label_separator": label_separator, "image_folder": image_folder, "follow_links": follow_links,
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

    if speaks_for_all():
        print_summary(run)


def benchmark(
    data: Annotated[str, typer.Argument(help="Any data set. None: drawn images of the right size.")] = "",
    backbones: Annotated[str, typer.Option(help="timm names, separated by commas.")] = (
        "resnet18,mobilenetv2_100,efficientnet_b0"
    ),
    methods: Annotated[str, typer.Option(help="What to train with, separated by commas.")] = "hard,ccl",
    parts: Annotated[str, typer.Option(help="What to measure: epochs, ceiling, reference.")] = (
        "epochs,ceiling,reference"
    ),
    size: Annotated[int, typer.Option(help="Side of the crop; images have a short side of 8/7 of it.")] = 224,
    batch_size: Annotated[int, typer.Option()] = 128,
    epochs: Annotated[int, typer.Option(help="Timed epochs, after one for warming up.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
    accelerator: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Measure training on this machine: against the network's own ceiling and against a DataLoader."""
    from cclnet.files import write_whole
    from cclnet.settings import make_settings
    from cclnet.training.benchmark import benchmark as measure
    from cclnet.training.benchmark import results_table

    short_side = size * 8 // 7
    drawn = f"synthetic:images=2048,size={short_side}"
    settings = make_settings(
        {"data": data or drawn, "short_side": short_side, "batch_size": batch_size, "augment": {"crop": size}}
    )
    measured = measure(
        settings,
        backbones.split(","),
        methods.split(","),
        parts.split(","),
        epochs=epochs,
        accelerator=accelerator,
    )
    Console().print(results_table(measured))
    if out:
        write_whole(out, json.dumps(measured, indent=1) + "\n")
