"""`cclnet evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cclnet.cli import Draws


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, a predictions.csv, or the .json result of a run.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write to. Default: the run folder, which then also gets calibration.json, "
            "or the file's folder. With another folder the run is not changed."
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Where the images are, if they have moved since training.")] = None,
    draws: Draws = 1000,
) -> None:
    """Evaluate RUN from its predictions alone: scores.json, report.html and report.md."""
    from cclnet import api

    api.evaluate(run, out, data=data, draws=draws, summary=True)
