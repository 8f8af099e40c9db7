"""Conformal prediction sets: closed forms, and the coverage that they promise, over many draws."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cclnet import InputError
from cclnet.evaluation.conformal import (
    KINDS,
    LEVELS,
    conformity,
    fit_thresholds,
    parse_sets,
    scores_of_labels,
    sets,
    threshold,
)
from cclnet.evaluation.evaluate import evaluate
from cclnet.runs.folder import RunFolder
from cclnet.runs.predictions import Predictions
from made_predictions import several_labels, single_label, write_run


def clustered(groups: int, seed: int, classes: int = 5, skill: float = 1.5) -> Predictions:
    """Overconfident predictions of groups of 1 to 4 images that share their class and most of their noise."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(groups), rng.integers(1, 5, groups))
    labels = rng.choice(classes, groups, p=np.arange(1, classes + 1) / np.arange(1, classes + 1).sum())[group]
    noise = 0.8 * rng.normal(size=(groups, classes))[group] + 0.6 * rng.normal(size=(len(group), classes))
    logits = 3 * (noise + skill * np.eye(classes)[labels])
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    names = np.arange(len(group)).astype(str)
    return Predictions(names, labels, p / p.sum(axis=1, keepdims=True), tuple("abcde")[:classes], group.astype(str))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
def test_coverage_is_nominal_over_200_draws_of_patients(kind: str, level: float) -> None:
    """Held-out and new images are of different patients; the mean coverage of 200 such draws is the level."""
    covered = []
    for draw in range(200):
        held_out, new = clustered(150, 2 * draw), clustered(150, 2 * draw + 1)
        limit = threshold(scores_of_labels(held_out, kind), level)
        inside = sets(new.probabilities, kind, limit)
        covered.append(inside[np.arange(len(new)), new.labels].mean())
    error = np.std(covered) / math.sqrt(len(covered))
    assert abs(np.mean(covered) - level) < 0.01 and error < 0.004


def test_scores_by_hand() -> None:
    p = np.array([[0.5, 0.1, 0.3, 0.1]])
    np.testing.assert_allclose(conformity(p, "aps"), [[0.25, 0.85, 0.65, 0.95]])  # the first of equal ones comes first
    np.testing.assert_allclose(conformity(p, "raps"), [[0.25, 0.85 + 0.2, 0.65 + 0.1, 0.95 + 0.3]])


@given(arrays(np.float64, st.integers(1, 80), elements=st.floats(0, 1)), st.sampled_from(LEVELS))
def test_the_threshold_is_the_conformal_quantile(scores: np.ndarray, level: float) -> None:
    limit, rank = threshold(scores, level), math.ceil(round((len(scores) + 1) * level, 6))
    assert limit == (math.inf if rank > len(scores) else np.sort(scores)[rank - 1])


@given(st.integers(0, 10_000), st.sampled_from(KINDS))
def test_sets_are_never_empty_and_grow_with_the_level(seed: int, kind: str) -> None:
    p = np.random.default_rng(seed).dirichlet(np.full(4, 0.3), 20)
    small, large = sets(p, kind, 0.1), sets(p, kind, 0.8)
    assert small.any(axis=1).all() and (small <= large).all() and sets(p, kind, math.inf).all()
    # A set is the most probable classes: none outside of it is more probable than one inside.
    inside, outside = np.where(large, p, np.inf).min(axis=1), np.where(large, -np.inf, p).max(axis=1)
    assert (outside <= inside).all()


def test_few_images_give_all_classes() -> None:
    fitted = fit_thresholds(single_label(15), "val")
    assert fitted.at(0.95) == math.inf and fitted.at(0.5) < math.inf


def test_a_level_between_two_stored_ones_gets_the_larger() -> None:
    fitted = fit_thresholds(single_label(500), "val")
    assert fitted.at(0.901) == fitted.at(0.91) >= fitted.at(0.9)


def test_a_run_reports_the_coverage_of_other_images_than_it_was_fitted_on(tmp_path: Path) -> None:
    made = clustered(600, 0)
    scores = evaluate(write_run(tmp_path / "run", made), draws=50)
    assert scores.sets is not None and scores.sets.fitted_on == "cross-fitted halves"
    for row in scores.sets.rows:
        assert row.coverage.value == pytest.approx(row.level, abs=0.03)
        assert row.coverage.low is not None and row.coverage.high is not None
        assert row.coverage.low < row.coverage.value < row.coverage.high
        assert 1 <= (row.size.value or 0) <= 5
    stored = RunFolder(tmp_path / "run").read_calibration().sets
    assert stored is not None and stored.images == len(made) and stored.kind == scores.sets.chosen


def test_a_split_for_calibration_is_used(tmp_path: Path) -> None:
    made = clustered(400, 1)
    assert made.groups is not None
    splits = np.where(made.groups.astype(int) % 2 == 1, "calibration", "test")
    run = write_run(tmp_path / "run", replace(made, splits=splits))
    scores = evaluate(run, draws=20)
    stored = RunFolder(run).read_calibration().sets
    assert scores.sets is not None and scores.sets.fitted_on == "calibration"
    assert stored is not None and stored.images == int((splits == "calibration").sum())


def test_several_labels_have_no_sets(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", several_labels())
    assert evaluate(run, draws=2).sets is None and RunFolder(run).read_calibration().sets is None


@pytest.mark.parametrize("text", ["0.3", "1", "x", "abc:0.9", "0.999", "nan", "aps:"])
def test_wrong_levels_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_sets(text)
