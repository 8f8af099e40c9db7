"""`cclnet evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cclnet.cli import Calibration, Draws, MovedData, with_settings
from cclnet.settings import Settings

OUT = "Folder to write to. Default: that of RUN, which then also gets calibration.json. With another, RUN is unchanged."


@with_settings(
    Settings,
    only=("decision", "cost", "by", "ordered"),
    defaults={"decision": "that of the run", "by": "those of the run"},
)
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, a predictions.csv, or the .json result of a run.")],
    out: Annotated[Path | None, typer.Option(help=OUT)] = None,
    data: MovedData = None,
    draws: Draws = 1000,
    calibration: Calibration = "auto",
    **chosen: Any,
) -> None:
    """Evaluate RUN from its predictions alone: scores.json, report.html and report.md."""
    from cclnet import api

    api.evaluate(run, out, data=data, draws=draws, calibration=calibration, summary=True, **chosen)
