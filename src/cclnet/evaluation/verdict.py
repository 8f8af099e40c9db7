"""A comparison in plain words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LOWER_IS_BETTER = ("nll", "brier", "ece", "nll_calibrated", "ece_calibrated", "hamming_loss")
IN_OWN_UNITS = ("nll", "nll_calibrated", "brier")  # everything else reads as points of a hundred
FEW_SEEDS = 5


def title(metric: str) -> str:
    """The name of a score in a sentence.

    >>> title("macro_f1"), title("ece_calibrated")
    ('macro F1', 'ECE after temperature')
    """
    words = metric.replace("_calibrated", " after temperature").replace("_", " ")
    for plain, written in (("f1", "F1"), ("nll", "NLL"), ("ece", "ECE"), ("auroc", "AUROC"), ("jaccard", "Jaccard"),
                           ("brier", "Brier score")):  # fmt: skip
        words = words.replace(plain, written)
    return words


def amount(metric: str, value: float) -> str:
    """A difference as a reader says it.

    >>> amount("accuracy", 0.0214), amount("nll", 0.0214), amount("accuracy", -0.0004)
    ('2.1 points', '0.021', '0.0 points')
    """
    return _number(metric, value) + ("" if metric in IN_OWN_UNITS else " points")


def _number(metric: str, value: float) -> str:
    scale, digits = (1, 3) if metric in IN_OWN_UNITS else (100, 1)
    text = f"{scale * value:.{digits}f}"
    return text if float(text) else text.lstrip("-")  # nothing has no sign


def _range(metric: str, low: float, high: float) -> str:
    return "" if math.isnan(low + high) else f" [{_number(metric, low)}, {_number(metric, high)}]"


def seeds_in_words(a: int, b: int, paired: bool) -> str:
    """How many seeds stand behind a comparison, and whether that is enough for a claim.

    >>> seeds_in_words(5, 5, True)
    '5 seeds each, paired by seed.'
    """
    if min(a, b) == 1:
        count = "One seed each" if a == b else f"{a} and {b} seeds"
        return f"{count}: too few to say anything about the methods, only about these models."
    count = f"{a} seeds each" if a == b else f"{a} and {b} seeds"
    words = f"{count}, {'paired by seed' if paired else 'not paired'}."
    if min(a, b) < FEW_SEEDS:
        words += f" Fewer than {FEW_SEEDS} are few: only large differences can be told from luck."
    return words


def permutation_in_words(p: float, smallest: float, seeds: int, paired: bool) -> str:
    """What the exact test over seeds says, and what it never can."""
    kind = "signs of the differences between seeds" if paired else "seeds between the methods"
    words = f"Exact permutation of the {kind}: p = {p:.4g}."
    if smallest > 0.05:
        words += f" With {seeds} seeds it cannot fall below {smallest:.4g}: alone it never shows a difference at .05."
    return words


def verdict(metric: str, a: str, b: str, test: Mapping[str, Any], seeds: tuple[int, int]) -> str:
    """One sentence on one score: who is better and by how much, or that nothing is known."""
    difference, low, high = (math.nan if test[key] is None else test[key] for key in ("difference", "low", "high"))
    if math.isnan(difference):
        return "Cannot be compared: undefined for at least one of the runs."
    ahead = (difference < 0) if metric in LOWER_IS_BETTER else (difference > 0)
    winner = a if ahead else b
    ends = sorted((math.copysign(1, difference) * low, math.copysign(1, difference) * high))
    by = f"better by {amount(metric, abs(difference))}{_range(metric, *ends)}"
    open_question = f"{a} minus {b} is {amount(metric, difference)}{_range(metric, low, high)}"
    if min(seeds) == 1:
        words = "One seed" + (" each" if seeds == (1, 1) else f" of {a if seeds[0] == 1 else b}")
        words += ": nothing can be said about the methods, only about these models: "
        distinct = test["p_holm"] is not None and test["p_holm"] < 0.05
        return words + (f"that of {winner} is {by}." if distinct else f"no evidence of a difference ({open_question}).")
    if test["evidence"]:
        return f"{winner} is {by}."
    if test["p"] is not None and test["p"] < 0.05:
        return f"No evidence of a difference once corrected for several comparisons: {open_question}."
    return f"No evidence of a difference: {open_question}."


def overall(primary: str, comparison: Mapping[str, Any]) -> str:
    """The verdict on the primary score and, for several seeds each, which other scores differ."""
    tests = comparison["metrics"]
    first = f"{title(primary)[0].upper()}{title(primary)[1:]}: {tests[primary]['verdict']}"
    if min(comparison["seeds"]["a"], comparison["seeds"]["b"]) == 1:
        return first
    others = [(title(m), comparison[t["better"]]) for m, t in tests.items() if m != primary and t["better"]]
    if others:
        listed = ", ".join(f"{name} ({winner} better)" for name, winner in others)
        return f"{first} Evidence of a difference in: {listed}."
    return f"{first} No evidence of a difference in any other score."
