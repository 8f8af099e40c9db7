"""Decisions and rankings against oracles, and the same from totals, for all images and for any resample."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn import metrics

from cclnet.evaluation.bootstrap import Statistic
from cclnet.evaluation.classification import (
    SPECIFICITIES,
    blocks_of,
    confusion,
    decision_statistic,
    decisions,
    predicted_classes,
    rank_of_label,
    ranking_statistic,
    sensitivity_at,
)
from cclnet.evaluation.metrics import metrics_for, overall_metrics, point_estimates, task_of
from cclnet.runs.predictions import Floats, Predictions
from made_predictions import SEVERAL_LABELS, SINGLE_LABEL, given, single_label

single = pytest.mark.parametrize("made", SINGLE_LABEL.values(), ids=SINGLE_LABEL.keys())
several = pytest.mark.parametrize("made", SEVERAL_LABELS.values(), ids=SEVERAL_LABELS.keys())


EVERY = {**SINGLE_LABEL, **{f"several labels, {name}": made for name, made in SEVERAL_LABELS.items()}}
every = pytest.mark.parametrize("made", EVERY.values(), ids=EVERY.keys())


def score(made: Predictions) -> tuple[dict[str, Any], dict[str, Any]]:
    """The overall metrics and those of each class, [K]."""
    task = task_of(made)
    of_classes = [metric for metric in metrics_for(task) if metric.per_class]
    return point_estimates(made, overall_metrics(task)), point_estimates(made, of_classes)


def same(found: float, expected: float) -> None:
    assert (math.isnan(found) and math.isnan(expected)) or found == pytest.approx(expected, abs=1e-12, rel=1e-12)


def test_the_papers_four_from_a_matrix_worked_by_hand() -> None:
    counts = [[5, 1, 0], [2, 6, 2], [0, 1, 3]]
    labels = [i for i in range(3) for _ in range(sum(counts[i]))]
    predicted = [j for i in range(3) for j in range(3) for _ in range(counts[i][j])]
    made = given(labels, np.where(np.eye(3)[predicted] == 1, 0.8, 0.1).tolist())
    scores, _ = score(made)
    assert confusion(made).tolist() == counts
    same(scores["accuracy"], 14 / 20)
    same(scores["macro_f1"], (2 * 5 / (6 + 7) + 2 * 6 / (10 + 8) + 2 * 3 / (4 + 5)) / 3)
    chance = (6 * 7 + 10 * 8 + 4 * 5) / 400
    same(scores["kappa"], (0.7 - chance) / (1 - chance))
    same(scores["macro_jaccard"], (5 / 8 + 6 / 12 + 3 / 6) / 3)
    same(scores["balanced_accuracy"], (5 / 6 + 6 / 10 + 3 / 4) / 3)


def pairs_auroc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The chance that a positive is ranked above a negative, ties half: pair by pair."""
    pairs = list(itertools.product(scores[positive], scores[~positive]))
    return sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs) if pairs else math.nan


def threshold_precision(scores: np.ndarray, positive: np.ndarray) -> float:
    """Precision at each distinct threshold, weighted by the recall it adds."""
    if not positive.any():
        return math.nan
    total, before = 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        kept = scores >= threshold
        recall = positive[kept].sum() / positive.sum()
        total += (recall - before) * positive[kept].mean()
        before = recall
    return total


def class_scores(actual: np.ndarray, guessed: np.ndarray) -> dict[str, float]:
    tp, fp, fn = (actual & guessed).sum(), (~actual & guessed).sum(), (actual & ~guessed).sum()
    if not actual.any():
        return dict.fromkeys(("precision", "recall", "f1", "jaccard"), math.nan)
    return {
        "precision": tp / (tp + fp) if tp + fp else math.nan,
        "recall": tp / (tp + fn),
        "f1": 2 * tp / (2 * tp + fp + fn),
        "jaccard": tp / (tp + fp + fn),
    }


def class_oracle(made: Predictions) -> list[dict[str, float]]:
    targets = made.targets == 1
    guessed = decisions(made) == 1 if made.multilabel else decisions(made)[:, None] == np.arange(made.num_classes)
    p = made.probabilities
    return [
        class_scores(targets[:, k], guessed[:, k])
        | {
            "auroc": pairs_auroc(p[:, k], targets[:, k]) if targets[:, k].any() else math.nan,
            "average_precision": threshold_precision(p[:, k], targets[:, k]),
        }
        for k in range(made.num_classes)
    ]


def mean_of_present(rows: list[dict[str, float]], name: str) -> float:
    values = [row[name] for row in rows if not math.isnan(row[name])]
    return sum(values) / len(values) if values else math.nan


@single
def test_single_label_scores_equal_their_oracles(made: Predictions) -> None:
    scores, table = score(made)
    rows = class_oracle(made)
    labels, predicted = made.labels, decisions(made)
    same(scores["accuracy"], sum(a == b for a, b in zip(labels, predicted, strict=True)) / len(labels))
    for name, of in (("balanced_accuracy", "recall"), ("macro_f1", "f1"), ("macro_jaccard", "jaccard"),
                     ("macro_auroc", "auroc"), ("mean_average_precision", "average_precision")):  # fmt: skip
        same(scores[name], mean_of_present(rows, of))
    chance = sum((labels == k).mean() * (predicted == k).mean() for k in range(made.num_classes))
    same(scores["kappa"], math.nan if chance == 1 else (scores["accuracy"] - chance) / (1 - chance))
    for k, row in enumerate(rows):
        for name, value in row.items():
            same(table[name][k], value)
        assert (
            made.class_counts[k] == (labels == k).sum()
            and predicted_classes(made)[:, k].sum() == (predicted == k).sum()
        )


@single
def test_top_k_counts_the_rank_of_the_label(made: Predictions) -> None:
    scores, _ = score(made)
    ordered = [sorted(range(made.num_classes), key=lambda k: (-row[k], k)) for row in made.probabilities]
    ranks = [row.index(label) for row, label in zip(ordered, made.labels, strict=True)]
    assert rank_of_label(made).tolist() == ranks
    assert {n for n in scores if n.startswith("top")} == {
        f"top_{k}_accuracy" for k in (2, 3, 5) if k < made.num_classes
    }
    for k in (2, 3):
        if k < made.num_classes:
            same(scores[f"top_{k}_accuracy"], sum(rank < k for rank in ranks) / len(ranks))


def test_scores_equal_scikit_learns_multiclass_functions_where_these_are_defined() -> None:
    made = single_label(300, 6, seed=11)
    scores, _ = score(made)
    predicted, p = made.probabilities.argmax(axis=1), made.probabilities
    same(scores["balanced_accuracy"], metrics.balanced_accuracy_score(made.labels, predicted))
    same(scores["macro_f1"], metrics.f1_score(made.labels, predicted, average="macro"))
    same(scores["macro_jaccard"], metrics.jaccard_score(made.labels, predicted, average="macro"))
    same(scores["kappa"], metrics.cohen_kappa_score(made.labels, predicted))
    same(scores["macro_auroc"], metrics.roc_auc_score(made.labels, p, multi_class="ovr"))
    for k in (2, 3, 5):
        same(scores[f"top_{k}_accuracy"], metrics.top_k_accuracy_score(made.labels, p, k=k))


def test_a_missing_class_is_left_out_of_the_means_and_not_counted_as_zero() -> None:
    # two classes found perfectly, a third that is not there but predicted once
    made = given([0, 0, 1, 1], [[0.8, 0.1, 0.1], [0.1, 0.1, 0.8], [0.1, 0.8, 0.1], [0.1, 0.8, 0.1]])
    scores, table = score(made)
    same(scores["macro_f1"], (2 / 3 + 1) / 2)  # zero for the third would give 5/9
    same(scores["balanced_accuracy"], 0.75)
    same(scores["accuracy"], 0.75)
    assert all(math.isnan(table[name][2]) for name in ("precision", "recall", "f1", "jaccard", "auroc"))
    assert predicted_classes(made)[:, 2].sum() == 1


@several
def test_several_label_scores_equal_their_oracles(made: Predictions) -> None:
    scores, table = score(made)
    rows = class_oracle(made)
    targets, guessed = made.targets == 1, made.probabilities >= 0.5
    same(scores["mean_average_precision"], mean_of_present(rows, "average_precision"))
    same(scores["macro_auroc"], mean_of_present(rows, "auroc"))
    same(scores["macro_f1"], mean_of_present(rows, "f1"))
    marked = targets.sum() + guessed.sum()
    same(scores["micro_f1"], 2 * (targets & guessed).sum() / marked if marked else math.nan)
    same(scores["subset_accuracy"], np.mean([(t == g).all() for t, g in zip(targets, guessed, strict=True)]))
    same(scores["hamming_loss"], (targets != guessed).sum() / targets.size)
    for k, row in enumerate(rows):
        for name, value in row.items():
            same(table[name][k], value)


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
    assert set(found) == set(expected) | set(table)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)
    for name in table:
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


@pytest.mark.parametrize("classes", [3, 5])
def test_quadratic_weighted_kappa_against_the_oracle(classes: int) -> None:
    made = replace(single_label(200, classes, seed=classes), ordered=True)
    expected = metrics.cohen_kappa_score(made.labels, decisions(made), weights="quadratic")
    overall, _ = score(made)
    same(overall["quadratic_weighted_kappa"], expected)
    draw = np.random.default_rng(0).integers(0, 3, len(made)).astype(float)  # weights of the images
    weighted = metrics.cohen_kappa_score(made.labels, decisions(made), weights="quadratic", sample_weight=draw)
    statistic = decision_statistic(made)
    same(float(statistic.scores((statistic.features.T @ draw)[None])["quadratic_weighted_kappa"][0]), weighted)
    assert "quadratic_weighted_kappa" not in score(replace(made, ordered=False))[0]


def test_an_error_of_two_grades_counts_more_than_two_of_one() -> None:
    near = given([0, 1, 2, 3], np.eye(4)[[1, 0, 3, 2]].tolist())  # four errors of one grade
    far = given([0, 1, 2, 3], np.eye(4)[[3, 1, 2, 0]].tolist())  # two of three grades
    near, far = (replace(made, ordered=True) for made in (near, far))
    assert score(near)[0]["quadratic_weighted_kappa"] == pytest.approx(1 - 4 / 10)  # 1 - Σwo / Σwe, by hand
    assert score(far)[0]["quadratic_weighted_kappa"] == pytest.approx(1 - 18 / 10)


@every
def test_sensitivity_at_fixed_specificity_against_every_threshold(made: Predictions) -> None:
    """The largest sensitivity over all thresholds that keep the specificity, by trying each."""
    _, of_classes = score(made)
    for name, specificity in SPECIFICITIES.items():
        thresholds = sensitivity_at(made, specificity)[1]
        for k in range(made.num_classes):
            p, own = made.probabilities[:, k], made.targets[:, k] == 1
            if own.all() or not own.any():
                assert math.isnan(of_classes[name][k]) and math.isnan(thresholds[k])
                continue
            possible = [t for t in (*np.unique(p), np.inf) if (p[~own] < t).mean() >= specificity - 1e-12]
            same(of_classes[name][k], max((p[own] >= t).mean() for t in possible))
            assert (p[~own] < thresholds[k]).mean() >= specificity - 1e-12
            same(float((p[own] >= thresholds[k]).mean()), of_classes[name][k])


@every
def test_sensitivity_from_totals_is_that_of_the_images(made: Predictions) -> None:
    statistic = ranking_statistic(made)
    found = statistic.scores(np.asarray(statistic.features.sum(axis=0)).reshape(1, -1))
    for name, specificity in SPECIFICITIES.items():
        np.testing.assert_allclose(found[name][0], sensitivity_at(made, specificity)[0], atol=1e-12)
