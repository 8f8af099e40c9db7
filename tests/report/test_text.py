"""Numbers as text."""

from __future__ import annotations

from cclnet.report.text import difference_interval_text, difference_text, signed_text, value_text, with_interval
from cclnet.runs.scores import Estimate


def test_what_is_undefined_is_a_dash_without_interval() -> None:
    nothing = Estimate(None, None, None)
    assert with_interval(nothing, "accuracy") == "–" == difference_text(None, "accuracy") == signed_text(None)
    assert difference_interval_text(nothing, "accuracy") == ""


def test_a_metric_that_is_not_registered_is_shown_as_a_fraction() -> None:
    assert value_text(0.25, "new_score") == "0.250"
