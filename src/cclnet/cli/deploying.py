"""`cclnet predict` and `cclnet export`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cclnet.errors import InputError
from cclnet.files import make_folder
from cclnet.runs.folder import PREDICTIONS, RunFolder

RunOrExport = Annotated[Path, typer.Argument(help="A run folder, or what `cclnet export` wrote.")]


def predict(
    run: RunOrExport,
    images: Annotated[list[str], typer.Argument(help="Image files, folders of them, or one table (CSV) or data set.")],
    out: Annotated[Path, typer.Option(help="The table to write.")] = Path("predictions.csv"),
    coverage: Annotated[float | None, typer.Option(help="Abstain so that this share of images is kept: .9")] = None,
    risk: Annotated[float | None, typer.Option(help="Abstain so that this share of those kept is wrong: .05")] = None,
    explain: Annotated[Path | None, typer.Option(help="A folder for maps of where the network looked.")] = None,
    image_column: Annotated[str | None, typer.Option(help="Column of a table that names the images.")] = None,
    image_folder: Annotated[Path | None, typer.Option(help="Where the names in a table start from.")] = None,
    engine: Annotated[str, typer.Option(help="auto, torch or onnx.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    batch_size: Annotated[int, typer.Option(min=1, help="Images that go through the network at once.")] = 16,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that decode. Default: one a core.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Predict IMAGES with the model of RUN and write a table: calibrated probabilities, and where to ask a person.

    Images that cannot be read are listed in the table with the reason; the exit code is then 1.
    """
    from cclnet.deploy import predict as predicting
    from cclnet.deploy.predict import gather

    own = run if run.is_dir() else run.parent
    if out.resolve() in [(own / name).resolve() for name in PREDICTIONS]:
        raise InputError(f"{out} holds the run's own predictions, which its scores come from: choose another --out.")
    if out.resolve() in [Path(place).expanduser().resolve() for place in images] and not out.is_dir():
        raise InputError(f"{out} is what is to be predicted: choose another --out.")
    if out.is_dir():
        raise InputError(f"{out} is a folder: give --out the name of a table, such as {out / 'predictions.csv'}.")
    make_folder(out.parent)  # now, and not after an hour of predicting
    inputs = gather(images, image_column, image_folder)
    console = Console(stderr=True)
    with console.status("Loading the model"):
        model = predicting.open_model(run, len(inputs), device, engine, explain is not None)
    if model.temperature is None:
        console.print("[yellow]note:[/yellow] there is no temperature, so probabilities are as trained. `cclnet "
                      "evaluate` fits one where the held-out images allow it.", highlight=False)  # fmt: skip
    threshold = None
    if coverage is not None or risk is not None:
        point = model.curve.at(coverage, risk)
        threshold = float(model.curve.threshold[point])
        console.print(model.curve.in_words(point), highlight=False)
    began = time.perf_counter()
    found = predicting.predict(model, inputs, threshold, explain, batch_size, workers, progress=not quiet)
    seconds = time.perf_counter() - began
    predicting.write_csv(out, model, found)
    read = len(inputs) - len(found.problems)
    abstained = "" if threshold is None else f", {found.abstained:,} of them left to a person"
    speed = f"{read / seconds:,.0f} a second by {model.engine} on {model.device}"
    console.print(f"{read:,} of {len(inputs):,} images predicted{abstained} ({speed}): {escape(str(out))}",
                  highlight=False, soft_wrap=True)  # fmt: skip
    if found.problems:
        for row, reason in sorted(found.problems.items())[:10]:
            console.print(f"  [red]unreadable[/red] {escape(inputs.names[row])}: {escape(reason)}", highlight=False)
        if len(found.problems) > 10:
            console.print(
                f"  and {len(found.problems) - 10:,} more, all of them in the column 'problem'", highlight=False
            )
        raise typer.Exit(1)


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run that was trained to the end.")],
    format: Annotated[str, typer.Option(help="onnx, torch (a .pt2 program) or safetensors.")] = "onnx",
    out: Annotated[Path | None, typer.Option(help="A new folder. Default: export-FORMAT in the run folder.")] = None,
    licence: Annotated[str, typer.Option(help="Of the weights, for the model card.")] = "",
) -> None:
    """Export the model of RUN with its description and a model card, checked against PyTorch before it is kept."""
    from cclnet.deploy.export import FORMATS
    from cclnet.deploy.export import export as write_export

    console = Console(stderr=True)
    with console.status(f"Exporting to {FORMATS.get(format, format)} and holding it against PyTorch"):
        folder = write_export(run, format, out, licence)
    if not RunFolder(run).scores.is_file():
        console.print("[yellow]note:[/yellow] the run has not been judged: its card tells no scores, and there may be "
                      "no temperature. `cclnet evaluate` it, then export again.", highlight=False)  # fmt: skip
    console.print(f"{escape(str(folder))}: {FORMATS[format]}, model.json, README.md", highlight=False, soft_wrap=True)
