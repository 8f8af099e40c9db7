"""`cclnet predict`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape

from cclnet.cli import Accelerator, Quiet, Refuse, with_settings
from cclnet.errors import InputError
from cclnet.files import make_folder
from cclnet.settings import Settings

if TYPE_CHECKING:
    from cclnet.deploy.predict import Predicted


@with_settings(
    Settings,
    only=("image_column", "image_folder", "follow_links", "decision", "cost", "tta"),
    defaults={"decision": "that of the run", "tta": "that of the run"},
)
def predict(
    run: Annotated[Path, typer.Argument(help="A run folder, or an exported model.")],
    images: Annotated[list[str], typer.Argument(help="Image files, folders of them, or one table (CSV) or data set.")],
    out: Annotated[Path, typer.Option(help="The table to write.")] = Path("predictions.csv"),
    coverage: Annotated[
        float | None,
        typer.Option(help="Abstain on the least confident images, so that this share is kept, such as 0.9."),
    ] = None,
    risk: Annotated[
        float | None, typer.Option(help="Abstain so that at most this share of the kept images is wrong, such as 0.05.")
    ] = None,
    sets: Annotated[
        str | None,
        typer.Option(help="Add prediction sets that contain the true class with this probability: 0.9, raps:0.9"),
    ] = None,
    refuse: Refuse = None,
    explain: Annotated[Path | None, typer.Option(help="Folder for class activation maps.")] = None,
    engine: Annotated[str, typer.Option(help="Program that computes the network: auto, torch or onnx.")] = "auto",
    device: Accelerator = "auto",
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 16,
    workers: Annotated[int | None, typer.Option(min=1, help="Decoding processes. Default: one per core.")] = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Predict IMAGES with the model of RUN and write a table: calibrated probabilities, and which to refer to a person.

    Images that cannot be read are listed in the table with the reason; the exit code is then 1.
    """
    from cclnet.deploy import predict as predicting

    _check_out(out, run, images)
    make_folder(out.parent)  # before the work, so that a failure costs nothing
    folder = Path(options["image_folder"]).expanduser() if "image_folder" in options else None
    inputs = predicting.gather(images, options.get("image_column"), folder, bool(options.get("follow_links")))
    console = Console(stderr=True)
    with console.status("Loading the model"):
        rule = {name: options.get(name) for name in ("decision", "cost", "tta")}
        model = predicting.open_model(run, len(inputs), device, engine, explain is not None, **rule)
    if model.temperature is None:
        console.print("[yellow]note:[/yellow] there is no temperature, so probabilities are uncalibrated. `cclnet "
                      "evaluate` fits one if there are held-out images to fit it on.", highlight=False)  # fmt: skip
    if (passes := model.description.passes) > 1:
        console.print(f"{passes} forward passes per image", highlight=False)
    threshold = None
    if coverage is not None or risk is not None:
        point = model.curve.at(coverage, risk)
        threshold = float(model.curve.threshold[point])
        console.print(model.curve.in_words(point), highlight=False)
    if refuse is not None:
        model.refuse(refuse)
    if sets is not None:
        model.sets(np.full((1, len(model.classes)), 1 / len(model.classes)), sets)  # an error before the work
    began = time.perf_counter()
    found = predicting.predict(model, inputs, threshold, explain, batch_size, workers, not quiet, sets)
    seconds = time.perf_counter() - began
    predicting.write_csv(out, model, found)
    rate = (len(inputs) - len(found.problems)) / seconds
    speed = f"{rate:,.{0 if rate >= 10 else 1}f} images per second by {model.engine} on {model.device}"
    _print_summary(console, found, f"({speed}): {escape(str(out))}", threshold is not None)
    if found.problems:
        raise typer.Exit(1)


def _check_out(out: Path, run: Path, images: Sequence[str]) -> None:
    """Refuse a folder, an input, and the run's own predictions as the table to write."""
    from cclnet.runs.folder import PREDICTIONS

    own = run if run.is_dir() else run.parent
    target = os.path.realpath(out)  # unlike Path.resolve, it accepts a link to itself
    if target in [os.path.realpath(own / name) for name in PREDICTIONS]:
        raise InputError(f"{out} has the run's own predictions, which its scores come from: choose another --out.")
    if target in [os.path.realpath(Path(place).expanduser()) for place in images] and not out.is_dir():
        raise InputError(f"{out} is also an input: choose another --out.")
    if out.is_dir():
        raise InputError(f"{out} is a folder: give --out the name of a table, such as {out / 'predictions.csv'}.")


def _print_summary(console: Console, found: Predicted, where: str, abstains: bool) -> None:
    """Print how many images were predicted, referred and refused, and the first of those that could not be read."""
    predictions, inputs = [own for own in found.predictions if own], found.inputs
    counts = f"{len(inputs) - len(found.problems):,} of {len(inputs):,} images predicted"
    if abstains:
        counts += f", {sum(bool(own.abstain) for own in predictions):,} of them referred to a person"
    if refused := sum(bool(own.refused) for own in predictions):
        counts += f", {refused:,} refused as unlike the training images"
    console.print(f"{counts} {where}", highlight=False, soft_wrap=True)
    for row, reason in sorted(found.problems.items())[:10]:
        console.print(f"  [red]unreadable[/red] {escape(inputs.names[row])}: {escape(reason)}", highlight=False)
    if (more := len(found.problems) - 10) > 0:
        console.print(f"  and {more:,} more, all listed in the column 'problem'", highlight=False)
