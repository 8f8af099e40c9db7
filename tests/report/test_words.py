from __future__ import annotations

from cclnet.evaluation.calibration import MEASURES
from cclnet.evaluation.compare import AFTER, CALIBRATION, IN_OWN_UNITS, LOWER_IS_BETTER, MULTI_LABEL, SINGLE_LABEL
from cclnet.evaluation.metrics import PER_CLASS
from cclnet.report.text import SCORES, difference_interval_text, difference_text, score, signed_text, with_interval

COMPARED = {*SINGLE_LABEL, *MULTI_LABEL, *CALIBRATION, *AFTER}


def test_every_score_that_is_judged_has_its_words() -> None:
    for name in {*MEASURES, *PER_CLASS, *COMPARED, "top_2_accuracy"}:
        assert score(name).meaning and score(name).title[0].isupper(), name


def test_figures_and_verdicts_agree_on_direction_and_unit() -> None:
    for name in COMPARED:
        assert score(name).higher_is_better == (name not in LOWER_IS_BETTER), name
        assert score(name).bounded == (name not in IN_OWN_UNITS), name


def test_a_score_not_known_here_is_shown_under_its_own_name() -> None:
    assert "new_score" not in SCORES and score("new_score").title == "New score"


def test_what_is_undefined_is_a_dash_without_interval() -> None:
    nothing = {"value": None, "low": None, "high": None}
    assert with_interval(nothing, "accuracy") == "–" == difference_text(None, "accuracy") == signed_text(None)
    assert difference_interval_text(nothing, "accuracy") == ""
