"""The report of a comparison: comparison.html, .md and .json, and scores.md with one row per method."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from cclnet.evaluation.compare import ComparedMetric, Comparison, MethodScores, MetricTest, PairComparison
from cclnet.evaluation.metrics import AFTER, calibration_metrics, find, headline_metrics
from cclnet.files import make_folder, write_whole
from cclnet.report import text
from cclnet.report.figures import Axis, Chart, Figure, agreement_table, soft_label_table
from cclnet.report.html import evaluated_on, render, sentences
from cclnet.runs.scores import Estimate

ROW = 36  # height of a row with its label
SUMMARY = 3  # overall metrics of a task in scores.md; the terminal shows one less
MAX_MATRICES = 12  # shown side by side; the agreement is that of all runs


def write_comparison(out: str | Path, comparison: Comparison) -> Path:
    """Write comparison.html, .md and .json, and scores.md into the folder ``out``; returns the path of the page."""
    folder = make_folder(out)
    content = comparison_content(comparison)
    content_json = json.dumps(comparison.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(folder / "comparison.json", content_json + "\n")
    write_whole(folder / "comparison.md", render("comparison.md", **content))
    write_whole(folder / "scores.md", in_markdown(comparison))
    write_whole(folder / "comparison.html", render("comparison.html", **content))
    return folder / "comparison.html"


def comparison_content(comparison: Comparison) -> dict[str, Any]:
    """Everything that the two templates show."""
    soft_labels = comparison.soft_labels
    matrices = zip(soft_labels.runs, soft_labels.matrices, strict=True) if soft_labels else ()
    return {
        "comparison": comparison,
        "names": [method.name for method in comparison.methods],
        "evaluated_on": evaluated_on(comparison),
        "verdicts": [
            text.minus_signs(" ".join(sentences("pair_verdict", pair, comparison.primary)))
            for pair in comparison.comparisons
        ],
        "difference_figures": [differences(pair, comparison.metrics) for pair in comparison.comparisons],
        "seed_figures": [seed_points(comparison.methods, metric) for metric in comparison.metrics],
        "agreement": agreement_table(soft_labels.agreement, soft_labels.runs) if soft_labels else None,
        "agreement_sentences": sentences("agreement", soft_labels) if soft_labels else [],
        "matrices": [(run, soft_label_table(m, comparison.classes)) for run, m in islice(matrices, MAX_MATRICES)],
        "versions": list(comparison.versions.items()),
    }


def differences(pair: PairComparison, metrics: Sequence[ComparedMetric]) -> list[Figure]:
    """One row per metric: the difference in favour of the first method, so that right is always better. Metrics in
    points share one chart, those in their own units another."""
    tested = [m for m in metrics if m.name in pair.metrics and pair.metrics[m.name].difference is not None]
    points = [m for m in tested if find(m.name).unit != "own"]
    own_units = [m for m in tested if find(m.name).unit == "own"]
    return [_differences(pair, group, 100 if group is points else 1) for group in (points, own_units) if group]


def _differences(pair: PairComparison, metrics: Sequence[ComparedMetric], scale: float) -> Figure:
    tests = [pair.metrics[m.name] for m in metrics]
    signs = [scale if m.higher_is_better else -scale for m in metrics]
    ends = [sign * end for t, sign in zip(tests, signs, strict=True) for end in (t.difference, t.low, t.high)
            if end is not None]  # fmt: skip
    titles = [find(m.name).title for m in metrics]
    texts = [_difference_with_interval(test, m.name) for m, test in zip(metrics, tests, strict=True)]
    listed = "; ".join(f"{title}: {shown}" for title, shown in zip(titles, texts, strict=True))
    unit = "points of 0.01" if scale == 100 else "own units"
    x, y = Axis.around(ends, f"← worse  ·  {unit}  ·  better →", zero=True), Axis(0, len(tests), bare=True)
    chart = Chart(x, y, f"Differences {pair.a} minus {pair.b}. {listed}.", height=64 + ROW * len(tests))
    chart.segment((0, 0), (0, len(tests)), "zero")
    for row, (test, sign) in enumerate(zip(tests, signs, strict=True)):
        height = len(tests) - row - 0.68
        style = "s1" if test.evidence else "s5"
        if test.low is not None and test.high is not None:
            chart.segment((sign * test.low, height), (sign * test.high, height), f"whisker {style}")
        if test.difference is not None:
            chart.dot(sign * test.difference, height, style if test.evidence else f"{style} open", 5, texts[row])
        chart.row_label(height, titles[row])
    title = "Differences in points" if scale == 100 else "Differences in other units"
    caption = "Right of zero the first method is better, also in scores where lower is better. Lines are 95% intervals."
    return Figure(title, chart.markup(), caption, (("s1 patch", "evidence"), ("s5 open patch", "no evidence")))


def _difference_with_interval(test: MetricTest, name: str) -> str:
    return f"{text.difference_text(test.difference, name)} {text.difference_interval_text(test, name)}".strip()


def seed_points(methods: Sequence[MethodScores], metric: ComparedMetric) -> Figure:
    """One row per method: a ring per seed, and a dot for their mean with its interval."""
    name, title = metric.name, find(metric.name).title
    scores = [method.scores[name] for method in methods]
    values = [v for s in scores for v in (*s.values, s.low, s.high, s.mean) if v is not None]
    listed = "; ".join(f"{m.name}: mean {text.with_interval(Estimate(s.mean, s.low, s.high), name)}, seeds "
                       f"{', '.join(text.value_text(v, name) for v in s.values)}"
                       for m, s in zip(methods, scores, strict=True))  # fmt: skip
    label = "higher is better" if metric.higher_is_better else "lower is better"
    x, y_axis = Axis.around(values, label, percent=find(name).unit == "percent"), Axis(0, len(methods), bare=True)
    chart = Chart(x, y_axis, f"{title} of every seed. {listed}.", height=64 + ROW * len(methods))
    for row, (method, found) in enumerate(zip(methods, scores, strict=True)):
        y = len(methods) - row - 0.68
        chart.row_label(y, method.name)
        if found.low is not None and found.high is not None:
            chart.segment((found.low, y), (found.high, y), "whisker s1")
        if found.mean is not None:
            chart.dot(found.mean, y, "s1", 4.5, f"mean {text.value_text(found.mean, name)}")
        for run, value in zip(method.runs, found.values, strict=True):
            if value is not None and len(method.runs) > 1:
                chart.dot(value, y, "seed s2 open", 3.5, f"{run.name}: {text.value_text(value, name)}")
    return Figure(title, chart.markup(), "")


def comparison_table(comparison: Comparison) -> Table:
    """The means of each method over its seeds, and its difference from the method that all are compared with."""
    overall, headline = _headline(comparison)
    shown = _shown(comparison, {*overall[: SUMMARY - 1], *(name + AFTER for name in headline)})
    against = reference(comparison)
    heads = [*(find(name).title for name in shown), *([f"against {against}"] if against else [])]
    columns = [Column("method", no_wrap=True), *(Column(head, justify="right") for head in heads)]
    table = Table(*columns, title="mean over seeds", title_justify="left")
    for method in comparison.methods:
        means = [text.value_text(method.scores[name].mean, name) for name in shown]
        table.add_row(escape(method.name), *means, *([_difference(comparison, method.name)] if against else []))
    return table


def in_markdown(comparison: Comparison) -> str:
    """The same table with more metrics, and with the interval of the primary one."""
    twice = [metric.name for metric in calibration_metrics(comparison.task) if metric.compared_after]
    names = {*_headline(comparison)[0][:SUMMARY], *twice, *(name + AFTER for name in twice)}
    differences = {method.name: _difference(comparison, method.name) for method in comparison.methods}
    shown, against = _shown(comparison, names), reference(comparison)
    return render("scores.md", comparison=comparison, shown=shown, against=against, differences=differences)


def reference(comparison: Comparison) -> str | None:
    """The method that all others are compared with; None if there is none."""
    second = {pair.b for pair in comparison.comparisons}
    alone = len(second) == 1 and len(comparison.comparisons) == len(comparison.methods) - 1
    return second.pop() if alone else None


def _headline(comparison: Comparison) -> tuple[list[str], list[str]]:
    """The headline metrics of the task: overall, and of calibration."""
    metrics = headline_metrics(comparison.task)
    return [m.name for m in metrics if not m.calibration], [m.name for m in metrics if m.calibration]


def _shown(comparison: Comparison, names: Collection[str]) -> list[str]:
    return [m.name for m in comparison.metrics if m.name in names or m.name == comparison.primary]


def _difference(comparison: Comparison, name: str) -> str:
    """The difference of a method from the reference in the primary metric, with interval and direction."""
    primary = comparison.primary
    test = next((pair.metrics[primary] for pair in comparison.comparisons if pair.a == name), None)
    if test is None:
        return text.NONE
    direction = {"a": " better", "b": " worse", None: ""}[test.better]
    return _difference_with_interval(test, primary) + direction
