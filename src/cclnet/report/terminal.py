"""The terminal output after an evaluation or comparison: scores, soft labels, warnings, the path of the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from cclnet.evaluation.compare import Comparison
from cclnet.evaluation.metrics import find
from cclnet.evaluation.similarity import agreement
from cclnet.evaluation.subgroups import GROUP_SIZE
from cclnet.report.html import headline
from cclnet.report.text import value_text
from cclnet.runs.scores import DecisionScores, Scores, SoftLabelSummary, SubgroupColumn

MAX_CLASSES = 12  # a wider matrix does not fit a terminal


def print_scores(scores: Scores, report: Path, console: Console | None = None) -> None:
    """Print the headline scores, the soft labels, the warnings and the path of the report."""
    console = console or Console()
    console.print(_scores_table(scores))
    if scores.decisions:
        console.print(_rules_table(scores.decisions))
    for column in (own for own in scores.subgroups if own.column != GROUP_SIZE):  # the report has all of them
        console.print(_subgroup_table(column))
    if scores.soft_labels and scores.soft_labels.softness < 1:  # hard labels are no news
        if len(scores.classes) <= MAX_CLASSES:
            console.print(_matrix_table(scores.classes, scores.soft_labels))
        console.print(_soft_label_line(scores, scores.soft_labels), highlight=False)
    _print_end(scores.warnings, report, console)


def print_comparison(comparison: Comparison, report: Path, console: Console | None = None) -> None:
    """Print the verdicts of a comparison and the path of its report."""
    console = console or Console()
    for pair in comparison.comparisons:
        names = f"{pair.a} against {pair.b}"
        console.print(f"[bold]{escape(names)}[/bold] ({escape(pair.in_words.rstrip('.'))})", highlight=False)
        console.print(f"  {escape(pair.verdict)}", highlight=False)
    _print_end(comparison.warnings, report, console)


def _print_end(warnings: Sequence[str], report: Path, console: Console) -> None:
    for warning in warnings:
        console.print(f"[yellow]note:[/yellow] {escape(warning)}", highlight=False)
    console.print(f"report: {escape(str(report))}", highlight=False, soft_wrap=True)


def _scores_table(scores: Scores) -> Table:
    split, calibration = scores.split, scores.calibration
    title = f"{split.images:,} images of the split '{split.name}', 95% intervals"
    numbers = [Column(name, justify="right") for name in ("value", "interval")]
    table = Table("score", *numbers, title=title, title_justify="left")
    after = "" if calibration.after is None else f"… at temperature {calibration.temperature.value:.2f}"
    after += "" if calibration.temperature.offsets is None else " and offsets"
    rows = []
    for name, number in headline(scores):
        rows.append((find(name).short, number))
        if calibration.after and name in calibration.after.scores:
            rows.append((after, calibration.after.scores[name]))
    for name, number in rows:
        interval = "" if number.low is None or number.high is None else f"{number.low:.4f} – {number.high:.4f}"
        table.add_row(escape(name), "–" if number.value is None else f"{number.value:.4f}", interval)
    return table


def _rules_table(decisions: DecisionScores) -> Table:
    """The decision rules side by side; the chosen one is bold."""
    heads = [Column(find(name).short, justify="right") for name in decisions.rules[0].scores]
    table = Table("decision rule", *heads, title="decision rules, calibrated probabilities", title_justify="left")
    for own in decisions.rules:
        cells = [own.rule, *("–" if score.value is None else f"{score.value:.4f}" for score in own.scores.values())]
        table.add_row(*cells, style="bold" if own.rule == decisions.chosen else "")
    return table


def _subgroup_table(column: SubgroupColumn) -> Table:
    names = list(column.subgroups[0].scores)
    numbers = [Column(name, justify="right") for name in ("images", *(find(name).short for name in names))]
    table = Table(escape(column.column), *numbers, title=f"by {escape(column.column)}", title_justify="left")
    for own in column.subgroups:
        cells = [value_text(own.scores[name].value, name) for name in names]  # the intervals are in the report
        table.add_row(escape(own.name), f"{own.images:,}", *cells)
    return table


def _matrix_table(classes: Sequence[str], soft_labels: SoftLabelSummary) -> Table:
    columns = [Column(escape(name), justify="right") for name in classes]
    table = Table("class", *columns, title="soft labels, one row per class", title_justify="left")
    for row, (name, values) in enumerate(zip(classes, soft_labels.matrix, strict=True)):
        cells = [f"[bold]{v:.3f}[/bold]" if column == row else f"{v:.3f}" for column, v in enumerate(values)]
        table.add_row(escape(name), *cells)
    return table


def _soft_label_line(scores: Scores, soft_labels: SoftLabelSummary) -> str:
    line = f"softness {soft_labels.softness:.3f}"
    if soft_labels.collapse_softness is not None:
        line += f", collapse point {soft_labels.collapse_softness:.3f}"
    data = (scores.model or {}).get("trained", {}).get("data", "")
    if data.partition(":")[0] == "synthetic":
        from cclnet.data.synthetic import geometry_of, known_similarity

        truth = agreement(soft_labels.matrix, known_similarity(len(scores.classes), geometry_of(data)))
        if not math.isnan(truth):  # undefined for constant soft labels
            line += f", rank correlation with the known similarity {truth:.2f}"
    if soft_labels.inverse_frequency_agreement is not None:
        line += f", with inverse class frequency {soft_labels.inverse_frequency_agreement:.2f}"
    return line
