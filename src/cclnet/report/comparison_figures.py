"""The figures of a comparison: differences with their intervals, and every seed as a point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cclnet.report.figures import Figure
from cclnet.report.svg import Axis, Chart
from cclnet.report.words import difference_interval_text, difference_text, score, value_text, with_interval

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
