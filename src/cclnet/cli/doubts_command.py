"""`cclnet doubts`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cclnet.cli import MovedData

RUNS = "A cross-validated run, or the runs of all folds: run folders or predictions.csv files."
OUT = "Folder for doubts.csv and doubts.html. Default: that of the first run."


def doubts(
    runs: Annotated[list[Path], typer.Argument(help=RUNS)],
    out: Annotated[Path | None, typer.Option(help=OUT)] = None,
    data: MovedData = None,
    top: Annotated[int, typer.Option(min=1, max=1000, help="Images with a picture on the page.")] = 100,
) -> None:
    """List the labels to check first, from predictions of images that the model was not trained on."""
    from cclnet.evaluation.doubts import find_doubts
    from cclnet.report.doubts_page import write_doubts
    from cclnet.runs.folder import open_run

    found = find_doubts(runs)
    folder = out or (runs[0] if runs[0].is_dir() else runs[0].parent)
    page = write_doubts(folder, found, open_run(runs[0]).settings_table, data, top)
    console = Console()
    for row in found.table.head(5).to_dict("records"):
        line = f"{row['image']}: labelled {row['label']}, suggested {row['suggested']} (doubt {row['doubt']:.2f})"
        console.print(escape(line), highlight=False, soft_wrap=True)
    left_out = f", {found.left_out:,} without a held-out prediction left out" if found.left_out else ""
    console.print(f"{len(found.table):,} labels ranked{left_out}: {escape(str(page))}", highlight=False, soft_wrap=True)
