"""The report of a comparison: comparison.html, the same as comparison.md and comparison.json, and a table of scores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from cclnet.files import make_folder, write_whole
from cclnet.report.figures import Axis, Chart, Figure, HeatTable, agreement_table, soft_label_table
from cclnet.report.html import judged_on, render
from cclnet.report.text import (
    NONE,
    difference_interval_text,
    difference_text,
    interval_text,
    score,
    signed_text,
    value_text,
    with_interval,
)

# The figures of a comparison: differences with their intervals, and every seed as a point.


ROW = 36  # height of a row, its label included


def differences(comparison: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """One row a score: the difference in favour of the first method, so that right is always better. Scores within
    0 … 1 share an axis in points; the others have their own."""
    tested = [m for m in metrics if comparison["metrics"].get(m["name"], {}).get("difference") is not None]
    bounded = [m for m in tested if score(m["name"]).bounded]
    free = [m for m in tested if not score(m["name"]).bounded]
    return [_differences(comparison, group, 100 if group is bounded else 1) for group in (bounded, free) if group]


def _differences(comparison: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], scale: float) -> Figure:
    tests = [comparison["metrics"][m["name"]] for m in metrics]
    signs = [scale if m["higher_is_better"] else -scale for m in metrics]
    ends = [sign * t[key] for t, sign in zip(tests, signs, strict=True) for key in ("difference", "low", "high")
            if t[key] is not None]  # fmt: skip
    unit = "points of 0.01" if scale == 100 else "own units"
    words = [_words(test, m["name"]) for m, test in zip(metrics, tests, strict=True)]
    listed = "; ".join(f"{score(m['name']).title}: {text}" for m, text in zip(metrics, words, strict=True))
    chart = Chart(
        Axis.around(ends, f"← worse  ·  {unit}  ·  better →", zero=True), Axis(0, len(tests), bare=True),
        f"Differences {comparison['a']} minus {comparison['b']}. {listed}.", height=64 + ROW * len(tests),
    )  # fmt: skip
    chart.segment((0, 0), (0, len(tests)), "zero")
    for row, (metric, test, sign) in enumerate(zip(metrics, tests, signs, strict=True)):
        y = len(tests) - row - 0.68
        style = "s1" if test["evidence"] else "s5"
        if test["low"] is not None:
            chart.segment((sign * test["low"], y), (sign * test["high"], y), f"whisker {style}")
        chart.dot(sign * test["difference"], y, style if test["evidence"] else f"{style} open", 5, words[row])
        chart.row_label(y, score(metric["name"]).title)
    title = "Differences in points" if scale == 100 else "Differences in other units"
    caption = "Right of zero the first method is better, whichever way the score runs. Lines are 95% intervals."
    return Figure(title, chart.markup(), caption, (("s1 patch", "evidence"), ("s5 open patch", "no evidence")))


def _words(test: Mapping[str, Any], name: str) -> str:
    return f"{difference_text(test['difference'], name)} {difference_interval_text(test, name)}".strip()


def seed_points(methods: Sequence[Mapping[str, Any]], metric: Mapping[str, Any]) -> Figure:
    """One row a method: every seed a ring, their mean a dot with its interval."""
    name = metric["name"]
    scores = [method["scores"][name] for method in methods]
    values = [v for s in scores for v in (*s["values"], s["low"], s["high"], s["mean"]) if v is not None]
    listed = "; ".join(f"{m['name']}: mean {with_interval({**s, 'value': s['mean']}, name)}, seeds "
                       f"{', '.join(value_text(v, name) for v in s['values'])}"
                       for m, s in zip(methods, scores, strict=True))  # fmt: skip
    way = "higher is better" if metric["higher_is_better"] else "lower is better"
    x = Axis.around(values, way, percent=score(name).percent)
    alt = f"{score(name).title} of every seed. {listed}."
    chart = Chart(x, Axis(0, len(methods), bare=True), alt, height=64 + ROW * len(methods))
    for row, (method, found) in enumerate(zip(methods, scores, strict=True)):
        y = len(methods) - row - 0.68
        chart.row_label(y, method["name"])
        if found["low"] is not None and found["high"] is not None:
            chart.segment((found["low"], y), (found["high"], y), "whisker s1")
        if found["mean"] is not None:
            chart.dot(found["mean"], y, "s1", 4.5, f"mean {value_text(found['mean'], name)}")
        for run, value in zip(method["runs"], found["values"], strict=True):
            if value is not None and len(method["runs"]) > 1:
                chart.dot(value, y, "seed s2 open", 3.5, f"{run['name']}: {value_text(value, name)}")
    return Figure(score(name).title, chart.markup(), "")


# The methods of a comparison in one table, a row a method: for the terminal, and as Markdown.


SINGLE_LABEL = ("accuracy", "balanced_accuracy", "macro_f1", "nll", "ece", "nll_calibrated", "ece_calibrated")
MULTI_LABEL = ("mean_average_precision", "macro_auroc", "macro_f1", "nll", "ece", "nll_calibrated", "ece_calibrated")
IN_A_TERMINAL = ("accuracy", "balanced_accuracy", "mean_average_precision", "macro_auroc", "ece_calibrated")


def comparison_table(compared: Mapping[str, Any]) -> Table:
    """The means of each method over its seeds, and its difference from the one that all are compared with."""
    shown = [name for name in _scores(compared) if name in (*IN_A_TERMINAL, compared["primary"])]
    against = reference(compared)
    table = Table(title="mean over seeds", title_justify="left")
    table.add_column("method", no_wrap=True)
    for head in (*(score(name).title for name in shown), *([f"against {against}"] if against else [])):
        table.add_column(head, justify="right")
    for method in compared["methods"]:
        means = [value_text(method["scores"][name]["mean"], name) for name in shown]
        table.add_row(escape(method["name"]), *means, *([_difference(compared, method["name"])] if against else []))
    return table


def in_markdown(compared: Mapping[str, Any]) -> str:
    """More scores of the same, with the interval of the one that decides."""
    shown, primary, against = _scores(compared), compared["primary"], reference(compared)
    heads = ["Method", "Seeds", *(score(name).title for name in shown)]
    heads += [f"{score(primary).title} against `{against}`"] if against else []
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)]]
    for method in compared["methods"]:
        fields = [f"`{method['name']}`", str(len(method["runs"]))]
        for name in shown:
            own = method["scores"][name]
            interval = f"<br>{interval_text(own, name)}" if name == primary else ""
            fields.append(value_text(own["mean"], name) + interval)
        lines.append([*fields, *([_difference(compared, method["name"])] if against else [])])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def reference(compared: Mapping[str, Any]) -> str | None:
    """The method that all others are compared with; None where there is no such one."""
    second = {pair["b"] for pair in compared["comparisons"]}
    alone = len(second) == 1 and len(compared["comparisons"]) == len(compared["methods"]) - 1
    return second.pop() if alone else None


def _scores(compared: Mapping[str, Any]) -> list[str]:
    chosen = MULTI_LABEL if compared["task"] == "multi-label" else SINGLE_LABEL
    there = [metric["name"] for metric in compared["metrics"]]
    return [name for name in there if name in (*chosen, compared["primary"])]


def _difference(compared: Mapping[str, Any], name: str) -> str:
    """Of the primary score from the reference, with its interval, and who is better where there is evidence."""
    primary = compared["primary"]
    test = next((pair["metrics"][primary] for pair in compared["comparisons"] if pair["a"] == name), None)
    if test is None:
        return NONE
    words = {"a": "better", "b": "worse", None: ""}[test["better"]]
    texts = (difference_text(test["difference"], primary), difference_interval_text(test, primary), words)
    return " ".join(text for text in texts if text)


Compared = Mapping[str, Any]

MOST_MATRICES = 12  # shown side by side; the agreement is of all


def write_comparison(out: str | Path, compared: Compared) -> Path:
    """Write comparison.html, .md and .json, and scores.md (a row a method) into a folder; returns the path of the page.

    Args:
        out: the folder to write into, made if need be.
        compared: what ``cclnet.evaluation.compare.compare(runs)`` returned.
    """
    folder = make_folder(out)
    content = comparison_content(compared)
    write_whole(folder / "comparison.json", json.dumps(compared, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    write_whole(folder / "comparison.md", render("comparison.md", **content))
    write_whole(folder / "scores.md", in_markdown(compared))
    write_whole(folder / "comparison.html", render("comparison.html", **content))
    return folder / "comparison.html"


def comparison_content(compared: Compared) -> dict[str, Any]:
    """Everything the two templates show."""
    correlation = compared["correlation"]
    matrices = _matrices(compared) if correlation else []
    return {
        "compared": compared,
        "names": [method["name"] for method in compared["methods"]],
        "judged_on": judged_on(compared),
        "contents": _contents(compared),
        "difference_figures": [differences(c, compared["metrics"]) for c in compared["comparisons"]],
        "seed_figures": [seed_points(compared["methods"], metric) for metric in compared["metrics"]],
        "agreement": agreement_table(correlation["agreement"], correlation["runs"]) if correlation else None,
        "agreement_words": _agreement_words(correlation) if correlation else "",
        "matrices": matrices,
        "matrices_note": _matrices_note(compared, len(matrices)),
        "versions": [(name, str(value)) for name, value in compared["versions"].items()],
    }


def _contents(compared: Compared) -> list[tuple[str, str]]:
    pairs = [(f"pair-{n}", f"{c['a']} against {c['b']}") for n, c in enumerate(compared["comparisons"], start=1)]
    learned = [("correlation", "Soft labels")] if compared["correlation"] else []
    return [
        ("verdict", "Verdict"),
        ("scores", "Scores"),
        *pairs,
        ("seeds", "Every run"),
        *learned,
        ("settings", "Versions"),
    ]


def _agreement_words(correlation: Mapping[str, Any]) -> str:
    mean = correlation["mean_agreement"]
    if mean is None:
        return "Their agreement is undefined: the soft labels of at least one run are all alike."
    return (
        f"On average the soft labels of two runs have a rank correlation of {signed_text(mean)}. Agreement does not "
        "prove that looks were learned: runs also agree when they all follow how rare a class is."
    )


def _matrices(compared: Compared) -> list[tuple[str, HeatTable]]:
    """The soft labels of the runs that have some, as many as are shown."""
    learned = compared["correlation"]
    pairs = zip(learned["runs"], learned["matrices"], strict=True)
    return [(name, soft_label_table(matrix, compared["classes"])) for name, matrix in pairs][:MOST_MATRICES]


def _matrices_note(compared: Compared, shown: int) -> str:
    runs = len(compared["correlation"]["runs"]) if compared["correlation"] else 0
    return f"{shown} of {runs} matrices are shown." if shown < runs else ""
