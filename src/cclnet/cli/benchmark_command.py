"""`cclnet benchmark`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cclnet.cli import Accelerator

BACKBONES = "resnet18,mobilenetv2_100,efficientnet_b0"


def benchmark(
    data: Annotated[str, typer.Argument(help="Any data set. Default: synthetic images of the right size.")] = "",
    backbones: Annotated[str, typer.Option(help="timm names, separated by commas.")] = BACKBONES,
    methods: Annotated[str, typer.Option(help="Methods to train with, separated by commas.")] = "hard,ccl",
    parts: Annotated[str, typer.Option(help="What to measure, separated by commas.")] = "epochs,ceiling,reference",
    size: Annotated[int, typer.Option(help="Side of the crop; images have a short side of 8/7 of it.")] = 224,
    batch_size: Annotated[int, typer.Option(help="Images per step.")] = 128,
    epochs: Annotated[int, typer.Option(help="Timed epochs, after one to warm up.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Write the measurements as JSON.")] = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Measure training speed on this machine, relative to the network alone and to a DataLoader."""
    from cclnet.settings import make_settings

    short_side = size * 8 // 7
    data = data or f"synthetic:images=2048,size={short_side}"
    settings = make_settings(
        {"data": data, "short_side": short_side, "batch_size": batch_size, "augment": {"crop": size}}
    )
    from cclnet.files import write_whole
    from cclnet.training.benchmark import benchmark as measure
    from cclnet.training.benchmark import results_table

    chosen = backbones.split(","), methods.split(","), parts.split(",")
    measured = measure(settings, *chosen, epochs=epochs, accelerator=accelerator)
    Console().print(results_table(measured))
    if out:
        write_whole(out, json.dumps(measured, indent=1) + "\n")
