"""Scores from totals are the scores of scores.py, for the images as they are and for any drawn again."""

from __future__ import annotations

import numpy as np
import pytest

from cclnet.evaluation.bootstrap import Statistic
from cclnet.evaluation.metrics import PER_CLASS, blocks_of, decision_statistic, ranking_statistic, score
from cclnet.runs.predictions import Floats, Predictions
from made_predictions import SEVERAL_LABELS, SINGLE_LABEL, single_label

EVERY = {**SINGLE_LABEL, **{f"several labels, {name}": made for name, made in SEVERAL_LABELS.items()}}
every = pytest.mark.parametrize("made", EVERY.values(), ids=EVERY.keys())


def weighted(statistic: Statistic, weights: Floats) -> dict[str, Floats]:
    return {name: x[0] for name, x in statistic.scores((statistic.features.T @ weights)[None]).items()}


def repeated(made: Predictions, weights: Floats) -> Predictions:
    """The images as often as their weight says, each copy under its own name."""
    rows = np.repeat(np.arange(len(made)), weights.astype(int))
    return Predictions(np.arange(len(rows)).astype(str), made.labels[rows], made.probabilities[rows], made.classes)


@every
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_totals_give_the_scores_of_the_drawn_images(made: Predictions, seed: int | None) -> None:
    weights = np.ones(len(made))
    if seed is not None:
        weights = np.bincount(np.random.default_rng(seed).integers(0, len(made), len(made)), minlength=len(made)) * 1.0
    expected, table = score(repeated(made, weights))
    found = weighted(decision_statistic(made), weights) | weighted(ranking_statistic(made), weights)
    assert set(found) == set(expected) | set(PER_CLASS)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)
    for name in PER_CLASS:
        np.testing.assert_allclose(found[name], table[name], rtol=1e-12, atol=1e-12, err_msg=name)


def test_rankings_of_many_images_are_near_enough_for_their_spread() -> None:
    made = single_label(6000, 3, seed=2, skill=2.0)
    found = weighted(ranking_statistic(made), np.ones(len(made)))
    _, table = score(made)
    np.testing.assert_allclose(found["auroc"], table["auroc"], atol=1e-4)
    np.testing.assert_allclose(found["average_precision"], table["average_precision"], atol=2e-3)


def test_blocks_keep_equal_values_together_and_even_counts() -> None:
    index, count = blocks_of(np.array([0.5, 0.1, 0.5, 0.9]))
    assert index.tolist() == [1, 0, 1, 2] and count == 3
    values = np.random.default_rng(0).random(1000)
    index, count = blocks_of(values, limit=10)
    assert count == 10 and np.bincount(index).tolist() == [100] * 10
    assert (np.diff(index[np.argsort(values)]) >= 0).all()
