"""The methods of a comparison in one table, a row a method: for the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from cclnet.report.words import NONE, difference_interval_text, difference_text, interval_text, score, value_text

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
