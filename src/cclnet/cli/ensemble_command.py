"""`cclnet ensemble`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def ensemble(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs of the same classes.")],
    out: Annotated[Path, typer.Option(help="The run folder to create.")],
) -> None:
    """Make one model of RUNS, which averages their calibrated probabilities: a run folder like any other."""
    from cclnet import api

    api.ensemble(runs, out, summary=True)
