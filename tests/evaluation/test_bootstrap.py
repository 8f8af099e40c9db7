from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from cclnet.evaluation.bootstrap import Units, bootstrap, interval, units_of, units_with
from cclnet.evaluation.calibration import calibration_statistic, calibration_values
from cclnet.evaluation.classification import decision_statistic, decision_values, ranking_statistic, ranking_values
from cclnet.runs.predictions import Predictions
from made_predictions import SINGLE_LABEL, single_label


def test_units_are_groups_where_known() -> None:
    made = single_label(5)
    assert units_of(made).kind == "images" and units_of(made).count == 5
    grouped = Predictions(made.images, made.labels, made.probabilities, made.classes,
                          np.array(["b", "", "a", "b", ""]))  # fmt: skip
    units = units_of(grouped)
    assert units.kind == "groups" and units.count == 4  # two without a group stand alone
    assert units.index.tolist() == [1, 2, 0, 1, 3]
    unknown = Predictions(made.images, made.labels, made.probabilities, made.classes, np.array([""] * 5))
    assert units_of(unknown).kind == "images"


def test_units_behind_a_column_are_counted_once() -> None:
    flags = np.array([[True, False], [True, True], [False, True]])
    assert units_with(flags, Units(np.array([0, 0, 1]), 2, "groups")).tolist() == [1, 2]


def test_a_draw_holds_whole_groups_and_scores_what_it_holds() -> None:
    made = single_label(60, groups=12)
    units = units_of(made)
    drawn = bootstrap([decision_statistic(made), ranking_statistic(made)], units, draws=7, seed=3)
    for draw in range(7):
        chosen = np.random.default_rng((3, draw)).integers(0, units.count, units.count, dtype=np.int32)
        rows = np.concatenate([np.flatnonzero(units.index == unit) for unit in chosen])
        again = Predictions(np.arange(len(rows)).astype(str), made.labels[rows], made.probabilities[rows], made.classes)
        for name, value in (decision_values(again) | ranking_values(again)).items():
            found = drawn[0] if name in drawn[0] else drawn[1]
            assert found[name][draw] == pytest.approx(value, abs=1e-12), name


def test_draws_are_the_same_however_many_are_asked_for() -> None:
    made = single_label(50)
    few, many = (bootstrap([decision_statistic(made)], units_of(made), n, seed=1)[0]["accuracy"] for n in (20, 150))
    np.testing.assert_array_equal(few, many[:20])
    other = bootstrap([decision_statistic(made)], units_of(made), 20, seed=2)[0]["accuracy"]
    assert (few != other).any()


def test_the_spread_of_draws_is_the_standard_error() -> None:
    made = single_label(400, skill=1.5)
    accuracy = decision_values(made)["accuracy"]
    drawn = bootstrap([decision_statistic(made)], units_of(made), 2000, seed=0)[0]["accuracy"]
    assert drawn.std() == pytest.approx(math.sqrt(accuracy * (1 - accuracy) / 400), rel=0.06)
    assert drawn.mean() == pytest.approx(accuracy, abs=0.002)


def test_the_interval_is_a_t_interval_of_the_logit() -> None:
    draws = 0.8 + 0.02 * np.array([-1.0, 1.0] * 50)
    low, high = interval(0.8, draws, 30)
    spread = draws.std(ddof=1) * math.sqrt(30 / 29) / (0.8 * 0.2)
    reach = stats.t.ppf(0.975, 29) * spread
    assert math.log(low / (1 - low)) == pytest.approx(math.log(4) - reach)
    assert math.log(high / (1 - high)) == pytest.approx(math.log(4) + reach)
    low, high = interval(0.8, draws, 30, bounds=(0.0, math.inf))
    assert low * high == pytest.approx(0.64) and low < 0.8 < high
    low, high = interval(-0.5, draws - 1.3, 30, bounds=(-1.0, 1.0))
    assert -1 < low < -0.5 < high < 1


def test_a_calibration_error_is_corrected_for_its_bias() -> None:
    draws = 0.08 + 0.01 * np.array([-1.0, 1.0] * 50)
    reach = stats.t.ppf(0.975, 29) * draws.std(ddof=1) * math.sqrt(30 / 29)
    assert interval(0.05, draws, 30, biased=True) == (0.0, 0.05)  # which it always holds
    assert interval(0.07, draws, 30, biased=True) == pytest.approx((0.05 - reach, 0.06 + reach))
    assert interval(0.09, draws, 30, biased=True) == pytest.approx((0.09 - reach, 0.09 + reach))


def test_the_interval_of_a_calibrated_model_reaches_zero() -> None:
    held = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        sure = rng.uniform(0.5, 1.0, 400)
        labels = np.where(rng.random(400) < sure, 0, 1)
        made = Predictions(np.arange(400).astype(str), labels, np.column_stack([sure, 1 - sure]), ("a", "b"))
        drawn = bootstrap([calibration_statistic(made)], units_of(made), 200, seed)[0]["ece"]
        held += interval(calibration_values(made)["ece"], drawn, 400, biased=True)[0] < 0.005
    assert held >= 30  # without the correction: none


def test_all_right_or_all_wrong_has_the_exact_binomial_interval() -> None:
    for trials in (1, 5, 100):
        low, high = interval(1.0, np.ones(50), 10, trials=trials)
        expected = stats.binomtest(trials, trials).proportion_ci(0.95, method="exact")
        assert (low, high) == pytest.approx((expected.low, 1.0))
        low, high = interval(0.0, np.zeros(50), 10, trials=trials)
        expected = stats.binomtest(0, trials).proportion_ci(0.95, method="exact")
        assert (low, high) == pytest.approx((0.0, expected.high))


@pytest.mark.parametrize(
    ("value", "draws", "units"),
    [(1.0, np.ones(9), 5), (0.5, np.full(9, 0.5), 5), (math.nan, np.ones(9), 5), (0.5, np.linspace(0, 1, 9), 1),
     (0.5, np.full(9, np.nan), 5)],
)  # fmt: skip
def test_where_nothing_varies_there_is_no_interval(value: float, draws: np.ndarray, units: int) -> None:
    assert all(math.isnan(end) for end in interval(value, draws, units))


def test_a_single_image_is_drawn_over_and_over() -> None:
    made = SINGLE_LABEL["single image"]
    assert (bootstrap([decision_statistic(made)], units_of(made), 5, 0)[0]["accuracy"] == 1).all()


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    """A quick look; benchmarks/evaluation.py looks properly. Groups are all right or all wrong together half of the
    time, so intervals over images would hold the truth far too rarely."""
    rng, held, held_by_images, draws = np.random.default_rng(0), 0, 0, 60
    for _ in range(draws):
        group = np.repeat(np.arange(60), 4)
        alike = rng.random(60) < 0.5
        right = np.where(alike[group], (rng.random(60) < 0.8)[group], rng.random(240) < 0.8)
        p = np.where(right[:, None], [0.9, 0.1], [0.1, 0.9])
        made = Predictions(np.arange(240).astype(str), np.zeros(240, int), p, ("a", "b"), group.astype(str))
        accuracy = float(right.mean())
        for units, count in ((units_of(made), 0), (Units(np.arange(240), 240, "images"), 1)):
            drawn = bootstrap([decision_statistic(made)], units, 200, seed=1)[0]["accuracy"]
            low, high = interval(accuracy, drawn, units.count)
            held, held_by_images = (
                held + (low <= 0.8 <= high) * (1 - count),
                held_by_images + (low <= 0.8 <= high) * count,
            )
    assert 0.88 * draws <= held <= draws
    assert held_by_images < held
