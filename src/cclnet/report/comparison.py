"""The report of a comparison: comparison.html, the same as comparison.md and comparison.json, and a table of scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cclnet.files import make_folder, write_whole
from cclnet.report.comparison_figures import differences, seed_points
from cclnet.report.comparison_table import in_markdown
from cclnet.report.heat import HeatTable, agreement_table, soft_label_table
from cclnet.report.page import render
from cclnet.report.summary import judged_on
from cclnet.report.words import signed_text

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
