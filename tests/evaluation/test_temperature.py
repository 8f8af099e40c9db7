from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import special

from cclnet.evaluation.bootstrap import Units, units_of
from cclnet.evaluation.calibration import (
    calibrate,
    calibration_values,
    fit_temperature,
    fitting_split,
    halves_of,
)
from cclnet.runs.predictions import Predictions
from made_predictions import given, several_labels, single_label, with_temperature


def calibrated(images: int, seed: int = 0) -> Predictions:
    """Labels drawn from the probabilities themselves: the best temperature is one."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(5), images)
    labels = (p.cumsum(axis=1) < rng.random((images, 1))).sum(axis=1).clip(0, 4)
    return Predictions(np.arange(images).astype(str), labels, p, tuple("abcde"))


@pytest.mark.parametrize("planted", [0.5, 1.0, 3.0])
def test_a_planted_temperature_is_found(planted: float) -> None:
    sharpened = with_temperature(calibrated(20_000), 1 / planted)
    assert fit_temperature(sharpened) == pytest.approx(planted, rel=0.03)


def test_the_fit_is_where_the_likelihood_is_highest() -> None:
    made = single_label(300, 4, skill=1.0)
    best = fit_temperature(made)
    losses = [calibration_values(with_temperature(made, best * factor))["nll"] for factor in (0.999, 1.0, 1.001)]
    assert losses[1] < losses[0] and losses[1] < losses[2]


def test_temperature_divides_logits_and_keeps_decisions() -> None:
    made = single_label(20)
    half = with_temperature(made, 2.0)
    np.testing.assert_allclose(half.probabilities, special.softmax(np.log(made.probabilities) / 2, axis=1), rtol=1e-12)
    np.testing.assert_array_equal(half.probabilities.argmax(axis=1), made.probabilities.argmax(axis=1))
    np.testing.assert_allclose(with_temperature(made, 1.0).probabilities, made.probabilities, rtol=1e-12)
    several = several_labels(20)
    np.testing.assert_allclose(
        with_temperature(several, 2.0).probabilities,
        special.expit(special.logit(several.probabilities) / 2),
        rtol=1e-12,
    )


def test_several_labels_have_one_temperature_too() -> None:
    rng = np.random.default_rng(0)
    p = rng.beta(1, 2, (8000, 3))
    made = Predictions(np.arange(8000).astype(str), (rng.random(p.shape) < p).astype(np.uint8), p, tuple("abc"))
    assert fit_temperature(with_temperature(made, 0.4)) == pytest.approx(2.5, rel=0.04)


def test_probability_zero_is_survived() -> None:
    made = given([0, 1, 1, 0], [[0.0, 1.0], [0.0, 1.0], [0.1, 0.9], [1.0, 0.0]])
    found = fit_temperature(made)
    assert math.isfinite(found) and found > 1
    assert np.isfinite(with_temperature(made, found).probabilities).all()


def test_nothing_wrong_has_no_best_temperature() -> None:
    perfect = single_label(30, skill=40.0)
    assert math.isnan(fit_temperature(perfect))
    found, after = calibrate(perfect, "calibration", perfect, units_of(perfect), 0)
    assert found.value is None and after is None
    assert "No temperature could be fitted on the split 'calibration' (30 images)" in found.in_words


@pytest.mark.parametrize(
    ("splits", "reported", "expected"),
    [
        (["test", "val", "calibration"], "test", "calibration"),
        (["test", "val"], "test", "val"),
        (["val", "calibration"], "val", "calibration"),
        (["val", "train"], "val", None),
        (["train", "calibration"], "all", None),
        (None, "all", None),
    ],
)
def test_the_part_to_fit_on_is_not_the_one_reported(
    splits: list[str] | None, reported: str, expected: str | None
) -> None:
    made = single_label(len(splits) if splits else 3)
    made = replace(made, splits=None if splits is None else np.array(splits))
    assert fitting_split(made, reported) == expected


def test_a_part_set_aside_gives_the_temperature() -> None:
    reported, aside = single_label(100, seed=1), single_label(400, seed=2, skill=0.5)
    found, after = calibrate(reported, "calibration", aside, units_of(reported), 0)
    assert found.value == fit_temperature(aside) and found.fitted_on == "calibration" and found.images == 400
    assert after is not None and found.halves is None
    np.testing.assert_array_equal(after.probabilities, with_temperature(reported, found.value).probabilities)
    assert "fitted on the 400 images of the split 'calibration'" in found.in_words


def test_without_one_each_half_is_judged_with_the_temperature_of_the_other() -> None:
    made = single_label(300, groups=80, skill=0.7)
    units = units_of(made)
    second = halves_of(units, 5)
    for unit in range(units.count):  # no group in both halves
        assert len(set(second[units.index == unit].tolist())) == 1
    assert abs(len(np.unique(units.index[second])) - units.count / 2) <= 1
    found, after = calibrate(made, None, made, units, 5)
    assert found.halves is not None and after is not None and found.fitted_on == "cross-fitted halves"
    assert found.halves == (fit_temperature(made.select(~second)), fit_temperature(made.select(second)))
    assert found.value == pytest.approx(math.sqrt(found.halves[0] * found.halves[1]))
    expected = with_temperature(made.select(second), found.halves[0]).probabilities
    np.testing.assert_allclose(after.probabilities[second], expected, rtol=1e-14)
    assert "No split was set aside" in found.in_words and "by groups" in found.in_words


def test_one_group_has_no_halves() -> None:
    made = single_label(20)
    found, _ = calibrate(made, None, made, Units(np.zeros(20, np.intp), 1, "groups"), 0)
    assert found.value is None and "no two halves" in found.in_words
