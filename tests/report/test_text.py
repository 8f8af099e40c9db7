"""Numbers as text."""

from __future__ import annotations

from cclnet.report.text import (
    count_text,
    difference_interval_text,
    difference_text,
    interval_text,
    p_text,
    signed_text,
    value_text,
    with_interval,
)
from cclnet.runs.predictions import duration_text
from cclnet.runs.scores import Estimate


def test_a_value_is_shown_in_its_unit() -> None:
    assert value_text(0.8617, "accuracy") == "86.2%" and value_text(0.8617, "kappa") == "0.862"
    assert value_text(None, "kappa") == "–"
    assert interval_text(Estimate(0.5, 0.4, 0.6), "accuracy") == "[40.0, 60.0]"
    assert with_interval(Estimate(0.5, None, None), "accuracy") == "50.0%"
    assert with_interval(Estimate(0.5, 0.4, 0.6), "accuracy") == "50.0% [40.0, 60.0]"


def test_a_difference_has_a_sign() -> None:
    assert difference_text(0.021, "accuracy") == "+2.1 points" and difference_text(-0.2, "nll") == "−0.200"
    assert signed_text(-0.314) == "−0.31" and signed_text(2.0) == "+2.00"
    assert signed_text(-0.001) == "0.00" and signed_text(-0.001, 3) == "−0.001"


def test_p_values_counts_and_durations() -> None:
    assert [p_text(p) for p in (0.0004, 0.0625, 0.27)] == ["< 0.001", "0.0625", "0.27"]
    assert count_text(1, "image") == "1 image" and count_text(2003, "image") == "2,003 images"
    assert count_text(2, "class", "classes") == "2 classes"
    assert [duration_text(s) for s in (42.3, 600, 8000, 259_200)] == [
        "42 seconds",
        "10 minutes",
        "2.2 hours",
        "3.0 days",
    ]


def test_what_is_undefined_is_a_dash_without_interval() -> None:
    nothing = Estimate(None, None, None)
    assert with_interval(nothing, "accuracy") == "–" == difference_text(None, "accuracy") == signed_text(None)
    assert difference_interval_text(nothing, "accuracy") == ""


def test_a_metric_that_is_not_registered_is_shown_as_a_fraction() -> None:
    assert value_text(0.25, "new_score") == "0.250"
