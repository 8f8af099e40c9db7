"""`cclnet evaluate` and `cclnet compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, a predictions.csv, or the .json kept of a run.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where to write. Default: the run folder (with calibration.json, the temperature of the deployed "
            "model), or the folder of the file. Elsewhere, the run folder stays as it is."
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Where the images are, if they have moved since training.")] = None,
    draws: Annotated[int, typer.Option(min=2, help="Bootstrap draws behind the intervals.")] = 1000,
) -> None:
    """Evaluate RUN from its predictions alone: scores.json, calibration.json, report.html and report.md."""
    from cclnet.evaluation.evaluate import evaluate
    from cclnet.report import write_report
    from cclnet.report.terminal import print_scores

    folder = out or (run if run.is_dir() else run.parent)
    scores = evaluate(run, folder, draws)
    print_scores(scores, write_report(run, scores, folder, data))


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or predictions.csv files.")],
    out: Annotated[Path, typer.Option(help="The folder to write comparison.html, .md and .json, and scores.md into.")],
    against: Annotated[str | None, typer.Option(help="Compare every method with this one. Default: all pairs.")] = None,
    primary: Annotated[str | None, typer.Option(help="The score the verdict speaks of. Default: accuracy.")] = None,
    draws: Annotated[int, typer.Option(min=2, help="Bootstrap draws behind the intervals.")] = 1000,
) -> None:
    """Compare RUNS on the same images: paired tests, and a verdict in words. Runs of one method are its seeds."""
    from cclnet.evaluation.compare import compare as compare_runs
    from cclnet.report import write_comparison
    from cclnet.report.terminal import print_comparison

    comparison = compare_runs(runs, against, primary, draws)
    print_comparison(comparison, write_comparison(out, comparison))
