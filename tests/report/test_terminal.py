from __future__ import annotations

import html
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
from fake_run import MakeRun
from rich.console import Console

from cclnet.evaluation.calibration import logits_of, with_logits
from cclnet.evaluation.compare import compare
from cclnet.evaluation.evaluate import evaluate
from cclnet.functional import smoothed_labels
from cclnet.report.html import write_report
from cclnet.report.terminal import print_comparison, print_scores
from cclnet.runs.folder import RunFolder


def test_names_in_brackets_are_no_markup(make_run: MakeRun) -> None:
    run = make_run(classes=("[bold]", "[/red]", "C"), images=60)
    console = Console(file=io.StringIO(), width=200)
    print_scores(evaluate(run, draws=10), Path("out[1]/report.html"), console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[bold]" in said and "[/red]" in said and "report: out[1]/report.html" in said


def test_labels_that_follow_nothing_have_no_rank_correlation(make_run: MakeRun) -> None:
    run = make_run(images=60)
    scores = evaluate(run, draws=10)
    assert scores.soft_labels is not None and scores.model is not None
    matrix = tuple(map(tuple, smoothed_labels(len(scores.classes), 0.5).tolist()))
    scores = replace(scores, soft_labels=replace(scores.soft_labels, matrix=matrix))
    scores.model["trained"]["data"] = "synthetic"
    console = Console(file=io.StringIO(), width=200)
    print_scores(scores, Path("report.html"), console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "softness" in said and "nan" not in said

    hard = replace(scores, soft_labels=replace(scores.soft_labels, softness=1.0))  # type: ignore[type-var]
    print_scores(hard, Path("report.html"), silent := Console(file=io.StringIO(), width=200))
    assert "softness" not in silent.file.getvalue()  # type: ignore[attr-defined]


def test_a_comparison_prints_its_verdicts_and_warnings(make_run: MakeRun) -> None:
    compared = compare({"[a]": [make_run("a", images=80)], "b": [make_run("b", method="hard", images=80)]}, draws=10)
    console = Console(file=io.StringIO(), width=1000)
    print_comparison(compared, Path("comparison.html"), console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[a] against b" in said and compared.comparisons[0].verdict in said
    assert compared.warnings and all(f"note: {warning}" in said for warning in compared.warnings)


def test_a_report_names_the_offsets(make_run: MakeRun) -> None:
    run = make_run(classes=("A", "B|", "C"), images=300)
    before = RunFolder(run).read_predictions()
    shifted = with_logits(before, logits_of(before) + np.array([1.5, -1.5, 0.0]))
    RunFolder(run).write_predictions(shifted)
    scores = evaluate(run, draws=10)
    assert scores.calibration.temperature.offsets is not None
    console = Console(file=io.StringIO(), width=200)
    print_scores(scores, write_report(run, scores), console)
    assert "and offsets" in console.file.getvalue()  # type: ignore[attr-defined]
    page, text = (html.unescape((run / name).read_text()) for name in ("report.html", "report.md"))
    largest = f"B| {max(scores.calibration.temperature.offsets):+.2f}"
    assert scores.decisions is not None
    decided = next(rule.scores["accuracy"].value for rule in scores.decisions.rules if rule.rule == "accuracy")
    assert f"accuracy is then {100 * decided:.1f}%" in page  # that of the shipped model, not of the network as trained
    assert largest in page and scores.calibration.temperature.in_words in page and "change decisions" in text
