"""Decisions and rankings of predictions: point estimates by scikit-learn, and the same as functions of totals.

A macro mean runs over the classes that have an image. A class without one has no score. If the model predicts such a
class, the image counts as missed by its true class, and against accuracy and kappa. A class that has images but is
never predicted has recall, F1 and Jaccard 0, which count, and no precision. Undefined scores are NaN.

The ``*_values`` functions return the point estimates of a family of metrics by name, [K] for those of single classes.
The ``*_statistic`` functions return the same metrics as functions of totals, as the bootstrap needs them (see
bootstrap.py); a class that is missing from a draw is left out of that draw's macro means. Rankings (AUROC, average
precision) are computed from a histogram of the probabilities of each class. It is exact up to BLOCKS distinct
probabilities; beyond that, neighbouring ones count as equal, which is far less than the spread between draws.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy import sparse
from sklearn import metrics

from cclnet.evaluation.bootstrap import Statistic
from cclnet.runs.predictions import Floats, Integers, Predictions

TOP_K = (2, 3, 5)
SPECIFICITIES = {"sensitivity_at_90_specificity": 0.9, "sensitivity_at_95_specificity": 0.95}
BLOCKS = 250
TOLERANCE = 1e-9  # 1 - 0.9 is not 0.1

Bools = npt.NDArray[np.bool_]
Values = dict[str, float | Floats]


def decisions(predictions: Predictions) -> npt.NDArray[np.int64] | npt.NDArray[np.uint8]:
    """Predicted class indices [N] (the first of a tie); for several labels zeros and ones [N, K], 1 where p ≥ 0.5."""
    if predictions.multilabel:
        return (predictions.probabilities >= 0.5).astype(np.uint8)
    return predictions.probabilities.argmax(axis=1)


def predicted_classes(predictions: Predictions) -> npt.NDArray[np.uint8]:
    """Zeros and ones [N, K]: which classes were predicted, for both kinds of labels."""
    predicted = decisions(predictions)
    if predictions.multilabel:
        return predicted.astype(np.uint8)
    return (predicted[:, None] == np.arange(predictions.num_classes)).astype(np.uint8)


def rank_of_label(predictions: Predictions) -> Integers:
    """How many classes are ranked above the true one, [N]: 0 where the prediction is right.

    Among equal probabilities the first class is ranked first, as in argmax.
    """
    p, labels = predictions.probabilities, predictions.labels
    own = p[np.arange(len(labels)), labels][:, None]
    earlier = np.arange(predictions.num_classes) < labels[:, None]
    return ((p > own) | ((p == own) & earlier)).sum(axis=1)


def confusion(predictions: Predictions) -> Integers:
    """Counts [K, K], row: true class, column: predicted class."""
    classes = np.arange(predictions.num_classes)
    return metrics.confusion_matrix(predictions.labels, decisions(predictions), labels=classes)


def decision_values(predictions: Predictions) -> Values:
    """Metrics of the decisions: accuracies, F1, kappa, Jaccard …, and those of each class."""
    overall = _multilabel_values(predictions) if predictions.multilabel else _single_label_values(predictions)
    targets, predicted = predictions.targets, predicted_classes(predictions)
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(targets, predicted, zero_division=np.nan)
    jaccard = metrics.jaccard_score(targets, predicted, average=None, zero_division=0)
    per_class = {"precision": precision, "recall": recall, "f1": f1, "jaccard": jaccard}
    absent = predictions.class_counts == 0
    return {**overall, **{name: np.where(absent, np.nan, values) for name, values in per_class.items()}}


def _single_label_values(predictions: Predictions) -> dict[str, float]:
    labels, predicted = predictions.labels, decisions(predictions)
    classes, present = np.arange(predictions.num_classes), np.flatnonzero(predictions.class_counts)
    macro = {"labels": present, "average": "macro", "zero_division": 0}
    constant = (labels == labels[0]).all() and (predicted == labels[0]).all()  # chance agreement is 1: kappa is 0/0
    scores = {
        "accuracy": metrics.accuracy_score(labels, predicted),
        "balanced_accuracy": metrics.recall_score(labels, predicted, **macro),
        "macro_f1": metrics.f1_score(labels, predicted, **macro),
        "kappa": math.nan if constant else metrics.cohen_kappa_score(labels, predicted, labels=classes),
        "macro_jaccard": metrics.jaccard_score(labels, predicted, **macro),
    }
    if predictions.ordered:
        weighted = metrics.cohen_kappa_score(labels, predicted, labels=classes, weights="quadratic")
        scores["quadratic_weighted_kappa"] = math.nan if constant else weighted
    rank = rank_of_label(predictions)
    top = {f"top_{k}_accuracy": (rank < k).mean() for k in TOP_K if k < predictions.num_classes}
    return {name: float(value) for name, value in (scores | top).items()}


def _multilabel_values(predictions: Predictions) -> dict[str, float]:
    targets, predicted = predictions.targets, decisions(predictions)
    present = np.flatnonzero(predictions.class_counts)
    f1 = math.nan  # undefined without any label
    if len(present):
        f1 = metrics.f1_score(targets, predicted, labels=present, average="macro", zero_division=0)
    scores = {
        "macro_f1": f1,
        "micro_f1": metrics.f1_score(targets, predicted, average="micro", zero_division=np.nan),
        "subset_accuracy": metrics.accuracy_score(targets, predicted),
        "hamming_loss": metrics.hamming_loss(targets, predicted),
    }
    return {name: float(value) for name, value in scores.items()}


def ranking_values(predictions: Predictions) -> Values:
    """AUROC and average precision of each class against the rest, and their macro means."""
    targets, count = predictions.targets, len(predictions)
    auroc, precision = np.full((2, predictions.num_classes), np.nan)
    for k, positives in enumerate(predictions.class_counts):
        if positives:
            precision[k] = metrics.average_precision_score(targets[:, k], predictions.probabilities[:, k])
        if 0 < positives < count:
            auroc[k] = metrics.roc_auc_score(targets[:, k], predictions.probabilities[:, k])
    means = {"macro_auroc": _mean(auroc), "mean_average_precision": _mean(precision)}
    at = {name: sensitivity_at(predictions, specificity)[0] for name, specificity in SPECIFICITIES.items()}
    return {**means, "auroc": auroc, "average_precision": precision, **at}


def sensitivity_at(predictions: Predictions, specificity: float) -> tuple[Floats, Floats]:
    """The largest sensitivity of each class with at least this specificity, and its threshold, [K] each.

    The class is found where its probability is at or above the threshold, one of the probabilities that occur, or
    infinite where even the largest would leave too few of the others out. NaN for a class without images, or without
    others.
    """
    targets = predictions.targets == 1
    sensitivity, threshold = np.full((2, predictions.num_classes), np.nan)
    for k in range(predictions.num_classes):
        p, own = predictions.probabilities[:, k], targets[:, k]
        if own.all() or not own.any():
            continue
        false_positive, found, levels = metrics.roc_curve(own, p, drop_intermediate=False)
        last = np.flatnonzero(false_positive <= 1 - specificity + TOLERANCE)[-1]
        sensitivity[k], threshold[k] = found[last], levels[last]
    return sensitivity, threshold


def _mean(values: Floats) -> float:
    """Mean over the classes that have the score; NaN when none has."""
    defined = values[np.isfinite(values)]
    return float(defined.mean()) if len(defined) else math.nan


def columns(index: npt.NDArray[np.intp], count: int, values: Floats | None = None) -> sparse.csr_array:
    """Sparse [N, count] with one entry per row: ``values`` (or ones) in the column of ``index``."""
    size = len(index)
    return sparse.csr_array((np.ones(size) if values is None else values, index, np.arange(size + 1)), (size, count))


def blocks_of(values: Floats, limit: int = BLOCKS) -> tuple[npt.NDArray[np.intp], int]:
    """The block of each value, [N], in rising order, equal values in one block; and the number of blocks.

    Beyond ``limit`` distinct values, neighbours share a block so that all blocks have about the same count.
    """
    levels = np.unique(values)
    if len(levels) > limit:
        levels = np.unique(np.sort(values)[np.arange(limit) * len(values) // limit])
    return np.searchsorted(levels, values, side="right") - 1, len(levels)


def mean_where(values: Floats, defined: Bools) -> Floats:
    """Mean over the last axis of the defined entries; NaN where there are none."""
    with np.errstate(invalid="ignore"):
        return np.where(defined, values, 0.0).sum(axis=-1) / defined.sum(axis=-1)


def ratio(above: Floats, below: Floats) -> Floats:
    """``above / below``, NaN where 0/0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return above / below


def count_scores(hits: Floats, actual: Floats, predicted: Floats) -> dict[str, Floats]:
    """Scores from counts [D, K] of each class: correctly predicted, actual and predicted images."""
    present = actual > 0
    by_class = {
        "precision": np.where(present, ratio(hits, predicted), np.nan),
        "recall": ratio(hits, actual),
        "f1": np.where(present, ratio(2 * hits, actual + predicted), np.nan),
        "jaccard": np.where(present, ratio(hits, actual + predicted - hits), np.nan),
    }
    means = {f"macro_{name}": mean_where(by_class[name], present) for name in ("recall", "f1", "jaccard")}
    return by_class | means


def confusion_scores(counts: Floats) -> dict[str, Floats]:
    """Scores of confusion matrices [D, K, K] (row: true class)."""
    hits = np.diagonal(counts, axis1=1, axis2=2)
    actual, predicted = counts.sum(axis=2), counts.sum(axis=1)
    total = actual.sum(axis=1)
    scores = count_scores(hits, actual, predicted)
    accuracy = ratio(hits.sum(axis=1), total)
    by_chance = ratio((actual * predicted).sum(axis=1), total**2)
    scores |= {"accuracy": accuracy, "kappa": ratio(accuracy - by_chance, 1 - by_chance)}
    places = np.arange(counts.shape[1])
    distance = (places[:, None] - places).astype(np.float64) ** 2
    expected = actual[:, :, None] * predicted[:, None, :] / np.maximum(total, 1)[:, None, None]
    wrong = ratio((counts * distance).sum(axis=(1, 2)), (expected * distance).sum(axis=(1, 2)))
    scores["quadratic_weighted_kappa"] = 1 - wrong
    return scores | {"balanced_accuracy": scores.pop("macro_recall")}


def ranking_scores(negatives: Floats, positives: Floats) -> tuple[Floats, Floats]:
    """AUROC and average precision [D] from histograms [D, B] of the probabilities, lowest block first.

    ``AUROC = Σ_b pos_b (neg below b + neg_b / 2) / (P N)``; ``AP = Σ_b pos_b/P · precision at the threshold of b``.
    """
    below = np.cumsum(negatives, axis=1) - negatives
    count = positives.sum(axis=1)
    auroc = ratio((positives * (below + negatives / 2)).sum(axis=1), count * negatives.sum(axis=1))
    true = np.cumsum(positives[:, ::-1], axis=1)[:, ::-1]
    false = np.cumsum(negatives[:, ::-1], axis=1)[:, ::-1]
    precision = np.divide(true, true + false, out=np.zeros_like(true), where=true > 0)
    return auroc, ratio((positives * precision).sum(axis=1), count)


def sensitivity_scores(negatives: Floats, positives: Floats, specificity: float) -> Floats:
    """The largest sensitivity [D] with at least this specificity, from histograms as in ``ranking_scores``."""
    false, true = (np.cumsum(own[:, ::-1], axis=1) for own in (negatives, positives))
    allowed = false <= (1 - specificity + TOLERANCE) * negatives.sum(axis=1, keepdims=True)
    defined = (positives.sum(axis=1) > 0) & (negatives.sum(axis=1) > 0)
    found = ratio(np.where(allowed, true, 0.0).max(axis=1), positives.sum(axis=1))
    return np.where(defined, found, np.nan)


def decision_statistic(predictions: Predictions) -> Statistic:
    """The metrics of ``decision_values`` as functions of totals."""
    return _multilabel_statistic(predictions) if predictions.multilabel else _single_label_statistic(predictions)


def _single_label_statistic(predictions: Predictions) -> Statistic:
    size = predictions.num_classes
    top = [k for k in TOP_K if k < size]
    rank = rank_of_label(predictions)
    cells = columns(np.asarray(predictions.labels * size + decisions(predictions), np.intp), size * size)
    hits = sparse.csr_array((rank[:, None] < np.array([*top, size])).astype(np.float64))

    def scores(totals: Floats) -> dict[str, Floats]:
        found = confusion_scores(totals[:, : size * size].reshape(-1, size, size))
        if not predictions.ordered:
            del found["quadratic_weighted_kappa"]
        shares = totals[:, size * size : -1] / totals[:, -1:]  # the last column counts the images
        return found | {f"top_{k}_accuracy": shares[:, i] for i, k in enumerate(top)}

    return Statistic(sparse.csr_array(sparse.hstack([cells, hits], format="csr")), scores)


def _multilabel_statistic(predictions: Predictions) -> Statistic:
    targets, predicted = predictions.targets, decisions(predictions)
    size = predictions.num_classes
    exact = (targets == predicted).all(axis=1)
    counts = np.column_stack([targets & predicted, targets, predicted, exact, np.ones(len(targets))])

    def scores(totals: Floats) -> dict[str, Floats]:
        hits, actual, positive = (totals[:, i * size : (i + 1) * size] for i in range(3))
        images = totals[:, -1]
        wrong = (actual + positive - 2 * hits).sum(axis=1)
        found = count_scores(hits, actual, positive) | {
            "micro_f1": ratio(2 * hits.sum(axis=1), (actual + positive).sum(axis=1)),
            "subset_accuracy": totals[:, -2] / images,
            "hamming_loss": wrong / (images * size),
        }
        return {name: value for name, value in found.items() if name not in ("macro_recall", "macro_jaccard")}

    return Statistic(sparse.csr_array(counts.astype(np.float64)), scores)


def ranking_statistic(predictions: Predictions) -> Statistic:
    """The metrics of ``ranking_values`` as functions of totals."""
    targets, features, counts = predictions.targets, [], []
    for k in range(predictions.num_classes):
        block, count = _ranking_blocks(predictions.probabilities[:, k], targets[:, k] == 1)
        features.append(columns(2 * block + targets[:, k], 2 * count))
        counts.append(count)
    ends = 2 * np.cumsum(counts)

    def scores(totals: Floats) -> dict[str, Floats]:
        histograms = [own.reshape(len(totals), -1, 2) for own in np.split(totals, ends[:-1], axis=1)]
        pairs = [ranking_scores(h[:, :, 0], h[:, :, 1]) for h in histograms]
        auroc, precision = (np.column_stack(own) for own in zip(*pairs, strict=True))
        at = {
            name: np.column_stack([sensitivity_scores(h[:, :, 0], h[:, :, 1], specificity) for h in histograms])
            for name, specificity in SPECIFICITIES.items()
        }
        return at | {
            "auroc": auroc,
            "average_precision": precision,
            "macro_auroc": mean_where(auroc, np.isfinite(auroc)),
            "mean_average_precision": mean_where(precision, np.isfinite(precision)),
        }

    return Statistic(sparse.csr_array(sparse.hstack(features, format="csr")), scores)


def _ranking_blocks(values: Floats, positive: Bools) -> tuple[npt.NDArray[np.intp], int]:
    """As ``blocks_of``, with half of the blocks cut at the positives: the average precision of a rare class depends on
    the few values at the top."""
    levels = np.unique(values)
    if len(levels) > BLOCKS:
        halves = [np.sort(half) for half in (values[positive], values[~positive]) if len(half)]
        cuts = [half[np.arange(BLOCKS // 2) * len(half) // (BLOCKS // 2)] for half in halves]
        levels = np.unique(np.concatenate([*cuts, [-np.inf]]))
    return np.searchsorted(levels, values, side="right") - 1, len(levels)
