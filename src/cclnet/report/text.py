"""Numbers as text. How a metric is shown comes from the registry, ``cclnet.evaluation.metrics``."""

from __future__ import annotations

import re

from cclnet.evaluation.compare import ALPHA, MeanScore, MetricTest, PairComparison, amount
from cclnet.evaluation.metrics import find
from cclnet.runs.scores import Estimate

NONE = "–"  # undefined


def value_text(value: float | None, name: str) -> str:
    """One value of a score: "86.2%", or "0.862" for a score that is no share."""
    if value is None:
        return NONE
    return f"{100 * value:.1f}%" if find(name).unit == "percent" else f"{value:.3f}"


def interval_text(number: Estimate | MeanScore, name: str) -> str:
    """The interval in the unit of its score, "[40.0, 60.0]"; empty where there is none."""
    low, high = number.low, number.high
    if low is None or high is None:
        return ""
    return f"[{100 * low:.1f}, {100 * high:.1f}]" if find(name).unit == "percent" else f"[{low:.3f}, {high:.3f}]"


def with_interval(number: Estimate, name: str) -> str:
    """Value and interval: "50.0% [40.0, 60.0]"."""
    return " ".join(text for text in (value_text(number.value, name), interval_text(number, name)) if text)


def difference_text(value: float | None, name: str) -> str:
    """A difference of two values of a score, with its sign: "+2.1 points" (hundredths), or "−0.200"."""
    if value is None:
        return NONE
    text = f"{100 * value:+.1f} points" if find(name).unit != "own" else f"{value:+.3f}"
    return text.replace("-", "−")


def difference_interval_text(test: MetricTest | Estimate, name: str) -> str:
    """The interval of a difference, in the unit of ``difference_text``."""
    low, high = test.low, test.high
    if low is None or high is None:
        return ""
    text = f"[{100 * low:+.1f}, {100 * high:+.1f}]" if find(name).unit != "own" else f"[{low:+.3f}, {high:+.3f}]"
    return text.replace("-", "−")


def amount_text(value: float | None, name: str) -> str:
    """The size of a difference, without its sign: "2.1 points"."""
    return NONE if value is None else amount(find(name), value)


def outcome_text(test: MetricTest, pair: PairComparison, name: str) -> str:
    """The verdict on one score in a few words. With one seed, two models are compared, not two methods."""
    if test.difference is None:
        return "undefined"
    if test.evidence and test.better is not None:
        return f"{pair.a if test.better == 'a' else pair.b} is better"
    if min(pair.seeds.a, pair.seeds.b) == 1 and test.p_holm is not None and test.p_holm < ALPHA:
        winner = pair.a if (test.difference > 0) == find(name).higher_is_better else pair.b
        return f"the model of {winner} is better"
    return "no evidence of a difference"


def p_text(p: float | None) -> str:
    """A p-value as journals print it: "< 0.001", "0.0625"."""
    if p is None:
        return NONE
    return "< 0.001" if p < 0.001 else f"{p:.3g}"


def signed_text(value: float | None, digits: int = 2) -> str:
    """A number around zero: "−0.31", "+2.00", "0.00"."""
    if value is None:
        return NONE
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if float(text) else text[1:]  # no sign on zero


def count_text(number: int, what: str, many: str = "") -> str:
    """A count with its noun: "1 image", "2,003 images"."""
    return f"{number:,} {what if number == 1 else many or what + 's'}"


def minus_signs(text: str) -> str:
    """A sentence with minus signs before its negative numbers: "lsr minus ccl-net is −5.0 points"."""
    return re.sub(r"(?<!\w)-(?=\d)", "−", text)


def threshold_text(value: float | None) -> str:
    """A threshold on a probability, with the digits that distinguish small ones: "0.310", "0.000421"."""
    return NONE if value is None else f"{value:#.3g}"
