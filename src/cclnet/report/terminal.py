"""What a person reads when a run has ended: scores, the learned matrix, where the report is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cclnet.evaluation.evaluate import evaluate
from cclnet.evaluation.similarity import agreement
from cclnet.report import write_report

HEADLINE = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "kappa": "Cohen's kappa",
    "macro_jaccard": "macro Jaccard",
    "mean_average_precision": "mean average precision",
}

WIDEST_MATRIX = 12  # classes; a wider one cannot be read on a terminal, the report has it


def print_summary(run: Path, console: Console | None = None) -> None:
    """Judge a run, write its scores and report, and print what matters."""
    judged = evaluate(run)
    print_judged(judged, write_report(run, judged), console)


def print_judged(judged: Mapping[str, Any], report: Path, console: Console | None = None) -> None:
    """What matters of a judgement, and where its report is."""
    console = console or Console()
    console.print(_scores_table(judged))
    if judged["correlation"]:
        if len(judged["classes"]) <= WIDEST_MATRIX:
            console.print(_matrix_table(judged["classes"], judged["correlation"]))
        console.print(_correlation_words(judged), highlight=False)
    _print_end(judged["warnings"], report, console)


def print_comparison(compared: Mapping[str, Any], report: Path, console: Console | None = None) -> None:
    """The verdicts of a comparison, and where its report is."""
    console = console or Console()
    for comparison in compared["comparisons"]:
        names = f"{comparison['a']} against {comparison['b']}"
        console.print(f"[bold]{escape(names)}[/bold] ({escape(comparison['in_words'].rstrip('.'))})", highlight=False)
        console.print(f"  {escape(comparison['verdict'])}", highlight=False)
    _print_end(compared["warnings"], report, console)


def _print_end(warnings: Sequence[str], report: Path, console: Console) -> None:
    for warning in warnings:
        console.print(f"[yellow]note:[/yellow] {escape(warning)}", highlight=False)
    console.print(f"report: {escape(str(report))}", highlight=False, soft_wrap=True)


def _scores_table(judged: Mapping[str, Any]) -> Table:
    part = judged["split"]
    table = Table(title=f"{part['images']:,} images of part '{part['name']}', 95% intervals", title_justify="left")
    table.add_column("score")
    table.add_column("value", justify="right")
    table.add_column("interval", justify="right")
    calibration = judged["calibration"]
    rows = {words: judged["scores"][name] for name, words in HEADLINE.items() if name in judged["scores"]}
    rows["calibration error (ECE)"] = calibration["before"]["ece"]
    if calibration["after"]:
        temperature = calibration["temperature"]["value"]
        rows[f"… at temperature {temperature:.2f}"] = calibration["after"]["ece"]
    for words, number in rows.items():
        low, high = number["low"], number["high"]
        interval = "" if low is None or high is None else f"{low:.4f} – {high:.4f}"
        table.add_row(words, "–" if number["value"] is None else f"{number['value']:.4f}", interval)
    return table


def _matrix_table(classes: Sequence[str], correlation: Mapping[str, Any]) -> Table:
    table = Table(title="soft labels: row, the label of a class", title_justify="left")
    table.add_column("class")
    for name in classes:
        table.add_column(escape(name), justify="right")
    for row, (name, values) in enumerate(zip(classes, correlation["matrix"], strict=True)):
        cells = [f"[bold]{v:.3f}[/bold]" if column == row else f"{v:.3f}" for column, v in enumerate(values)]
        table.add_row(escape(name), *cells)
    return table


def _correlation_words(judged: Mapping[str, Any]) -> str:
    correlation = judged["correlation"]
    words = f"softness {correlation['softness']:.3f}"
    if correlation["collapse_softness"] is not None:
        words += f", collapse point {correlation['collapse_softness']:.3f}"
    data = (judged["model"] or {}).get("trained", {}).get("data", "")
    if data.partition(":")[0] == "synthetic":
        from cclnet.data.synthetic import known_similarity

        truth = agreement(correlation["matrix"], known_similarity(len(judged["classes"])))
        if not math.isnan(truth):  # labels that are the same for all pairs follow nothing
            words += f", rank correlation with the planted similarity {truth:.2f}"
    if correlation["rarity_agreement"] is not None:
        words += f", with class rarity {correlation['rarity_agreement']:.2f}"
    return words
