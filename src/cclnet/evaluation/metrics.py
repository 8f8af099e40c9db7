"""The scores once more, as functions of totals: what a bootstrap draw needs (see bootstrap.py).

Same definitions as scores.py, in which a class that vanishes from a draw is left out of that draw's macro means.
Rankings (AUROC, average precision) come from a histogram of the probabilities of each class, exact where a class
has at most BLOCKS distinct probabilities; beyond that, neighbours among them count as equal, which is nothing
beside the spread between draws.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy import sparse
from sklearn import metrics

from cclnet.evaluation.bootstrap import Statistic
from cclnet.runs.predictions import Floats, Integers, Predictions

# How often the model is right: scores of single-label and multi-label predictions, by scikit-learn.
#
# What a macro mean runs over: the classes that have an image in the part. A class without one is named and left out
# (it has no recall, and an F1 of zero would only say that it was not there). When the model predicts such a class the
# image still counts as missed by its true class and against accuracy and kappa, but no score of the absent class enters
# a mean. A class that is there but never predicted has F1, Jaccard and recall 0, which do count, and no precision.
# Undefined scores are NaN. Predictions are the most probable class (the first of a tie), or p ≥ .5 for several labels.


TOP_K = (2, 3, 5)
PER_CLASS = ("precision", "recall", "f1", "jaccard", "auroc", "average_precision")


def decisions(predictions: Predictions) -> npt.NDArray[np.int64] | npt.NDArray[np.uint8]:
    """Predicted class indices [N], or zeros and ones [N, K] at .5 for several labels."""
    if predictions.multilabel:
        return (predictions.probabilities >= 0.5).astype(np.uint8)
    return predictions.probabilities.argmax(axis=1)


def place_of_label(predictions: Predictions) -> Integers:
    """How many classes come before the true one, [N]: 0 where the prediction is right.

    Among equal probabilities the first class comes first, as in argmax.
    """
    p, labels = predictions.probabilities, predictions.labels
    own = p[np.arange(len(labels)), labels][:, None]
    earlier = np.arange(predictions.num_classes) < labels[:, None]
    return ((p > own) | ((p == own) & earlier)).sum(axis=1)


def confusion(predictions: Predictions) -> Integers:
    """Counts [K, K], row: true class, column: predicted."""
    classes = np.arange(predictions.num_classes)
    return metrics.confusion_matrix(predictions.labels, decisions(predictions), labels=classes)


def score(predictions: Predictions) -> tuple[dict[str, float], dict[str, Floats]]:
    """The scores of the whole part by name, and those of each class: every one of PER_CLASS as [K]."""
    table = per_class(predictions)
    means = {"macro_auroc": _mean(table["auroc"]), "mean_average_precision": _mean(table["average_precision"])}
    scores = _multilabel(predictions, means) if predictions.multilabel else _single_label(predictions, means)
    return {name: float(value) for name, value in scores.items()}, table


def _mean(values: Floats) -> float:
    """Over the classes that have the score; NaN when none has."""
    defined = values[np.isfinite(values)]
    return float(defined.mean()) if len(defined) else math.nan


def _single_label(predictions: Predictions, ranking_means: dict[str, float]) -> dict[str, float]:
    labels, predicted = predictions.labels, decisions(predictions)
    classes, present = np.arange(predictions.num_classes), np.flatnonzero(predictions.class_counts)
    macro = {"labels": present, "average": "macro", "zero_division": 0}
    constant = (labels == labels[0]).all() and (predicted == labels[0]).all()  # agreement by chance is certain: 0/0
    scores = {
        "accuracy": metrics.accuracy_score(labels, predicted),
        "balanced_accuracy": metrics.recall_score(labels, predicted, **macro),
        "macro_f1": metrics.f1_score(labels, predicted, **macro),
        "kappa": math.nan if constant else metrics.cohen_kappa_score(labels, predicted, labels=classes),
        "macro_jaccard": metrics.jaccard_score(labels, predicted, **macro),
    }
    place = place_of_label(predictions)
    top = {f"top_{k}_accuracy": float((place < k).mean()) for k in TOP_K if k < predictions.num_classes}
    return scores | ranking_means | top


def _multilabel(predictions: Predictions, ranking_means: dict[str, float]) -> dict[str, float]:
    targets, predicted = predictions.targets, decisions(predictions)
    present = np.flatnonzero(predictions.class_counts)
    f1 = math.nan  # without a label anywhere there is nothing to find
    if len(present):
        f1 = metrics.f1_score(targets, predicted, labels=present, average="macro", zero_division=0)
    return {
        "mean_average_precision": ranking_means["mean_average_precision"],
        "macro_auroc": ranking_means["macro_auroc"],
        "macro_f1": f1,
        "micro_f1": metrics.f1_score(targets, predicted, average="micro", zero_division=np.nan),
        "subset_accuracy": metrics.accuracy_score(targets, predicted),
        "hamming_loss": metrics.hamming_loss(targets, predicted),
    }


def per_class(predictions: Predictions) -> dict[str, Floats]:
    """Each of PER_CLASS as [K], NaN for a class without an image; with "support" and "predicted", the counts."""
    targets, predicted = predictions.targets, decisions(predictions)
    if not predictions.multilabel:
        predicted = (predicted[:, None] == np.arange(predictions.num_classes)).astype(np.uint8)
    absent = predictions.class_counts == 0
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(targets, predicted, zero_division=np.nan)
    table = {
        "precision": precision,
        "recall": recall,
        "f1": f1,
        "jaccard": metrics.jaccard_score(targets, predicted, average=None, zero_division=0),
    }
    table = {name: np.where(absent, np.nan, values) for name, values in table.items()}
    table["auroc"], table["average_precision"] = ranking(predictions)
    return table | {"support": predictions.class_counts, "predicted": predicted.sum(axis=0, dtype=np.int64)}


def ranking(predictions: Predictions) -> tuple[Floats, Floats]:
    """Area under the ROC curve and average precision of each class against the rest, two of [K]."""
    targets, count = predictions.targets, len(predictions)
    auroc, precision = np.full((2, predictions.num_classes), np.nan)
    for k, positives in enumerate(predictions.class_counts):
        if positives:
            precision[k] = metrics.average_precision_score(targets[:, k], predictions.probabilities[:, k])
        if 0 < positives < count:
            auroc[k] = metrics.roc_auc_score(targets[:, k], predictions.probabilities[:, k])
    return auroc, precision


BLOCKS = 250

Bools = npt.NDArray[np.bool_]


def columns(index: npt.NDArray[np.intp], count: int, values: Floats | None = None) -> sparse.csr_array:
    """Sparse [N, count] with one entry a row: ``values`` (or ones) in the column of ``index``."""
    size = len(index)
    return sparse.csr_array((np.ones(size) if values is None else values, index, np.arange(size + 1)), (size, count))


def blocks_of(values: Floats, limit: int = BLOCKS) -> tuple[npt.NDArray[np.intp], int]:
    """Number the values in rising order, equal ones alike, [N], and how many numbers there are.

    Beyond ``limit`` distinct values, neighbours share a number so that all hold about the same count.
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


def counted_scores(right: Floats, actual: Floats, predicted: Floats) -> dict[str, Floats]:
    """Scores from counts [D, K]: images of each class that were found, that there are, that were predicted."""
    there = actual > 0
    by_class = {
        "precision": np.where(there, ratio(right, predicted), np.nan),
        "recall": ratio(right, actual),
        "f1": np.where(there, ratio(2 * right, actual + predicted), np.nan),
        "jaccard": np.where(there, ratio(right, actual + predicted - right), np.nan),
    }
    means = {f"macro_{name}": mean_where(by_class[name], there) for name in ("recall", "f1", "jaccard")}
    return by_class | means


def confusion_scores(counts: Floats) -> dict[str, Floats]:
    """Scores of confusion matrices [D, K, K] (row: true class): the paper's four, balanced accuracy, per class."""
    right = np.diagonal(counts, axis1=1, axis2=2)
    actual, predicted = counts.sum(axis=2), counts.sum(axis=1)
    total = actual.sum(axis=1)
    scores = counted_scores(right, actual, predicted)
    accuracy = ratio(right.sum(axis=1), total)
    by_chance = ratio((actual * predicted).sum(axis=1), total**2)
    scores |= {"accuracy": accuracy, "kappa": ratio(accuracy - by_chance, 1 - by_chance)}
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


def decision_statistic(predictions: Predictions) -> Statistic:
    """Everything that follows from what was decided, not from how sure the model was."""
    return _multilabel_decisions(predictions) if predictions.multilabel else _single_label_decisions(predictions)


def _single_label_decisions(predictions: Predictions) -> Statistic:
    size = predictions.num_classes
    top = [k for k in TOP_K if k < size]
    place = place_of_label(predictions)
    cells = columns(np.asarray(predictions.labels * size + decisions(predictions), np.intp), size * size)
    hits = sparse.csr_array((place[:, None] < np.array([*top, size])).astype(np.float64))

    def scores(totals: Floats) -> dict[str, Floats]:
        found = confusion_scores(totals[:, : size * size].reshape(-1, size, size))
        shares = totals[:, size * size : -1] / totals[:, -1:]  # the last column holds every image
        return found | {f"top_{k}_accuracy": shares[:, i] for i, k in enumerate(top)}

    return Statistic(sparse.csr_array(sparse.hstack([cells, hits], format="csr")), scores)


def _multilabel_decisions(predictions: Predictions) -> Statistic:
    targets, predicted = predictions.targets, decisions(predictions)
    size = predictions.num_classes
    whole = (targets == predicted).all(axis=1)
    counts = np.column_stack([targets & predicted, targets, predicted, whole, np.ones(len(targets))])

    def scores(totals: Floats) -> dict[str, Floats]:
        right, actual, guessed = (totals[:, i * size : (i + 1) * size] for i in range(3))
        images = totals[:, -1]
        wrong = (actual + guessed - 2 * right).sum(axis=1)
        found = counted_scores(right, actual, guessed) | {
            "micro_f1": ratio(2 * right.sum(axis=1), (actual + guessed).sum(axis=1)),
            "subset_accuracy": totals[:, -2] / images,
            "hamming_loss": wrong / (images * size),
        }
        return {name: value for name, value in found.items() if name not in ("macro_recall", "macro_jaccard")}

    return Statistic(sparse.csr_array(counts.astype(np.float64)), scores)


def ranking_statistic(predictions: Predictions) -> Statistic:
    """AUROC and average precision of each class, and their means."""
    targets, features, counts = predictions.targets, [], []
    for k in range(predictions.num_classes):
        block, count = _ranking_blocks(predictions.probabilities[:, k], targets[:, k] == 1)
        features.append(columns(2 * block + targets[:, k], 2 * count))
        counts.append(count)
    ends = 2 * np.cumsum(counts)

    def scores(totals: Floats) -> dict[str, Floats]:
        histograms = [part.reshape(len(totals), -1, 2) for part in np.split(totals, ends[:-1], axis=1)]
        pairs = [ranking_scores(h[:, :, 0], h[:, :, 1]) for h in histograms]
        auroc, precision = (np.column_stack(part) for part in zip(*pairs, strict=True))
        return {
            "auroc": auroc,
            "average_precision": precision,
            "macro_auroc": mean_where(auroc, np.isfinite(auroc)),
            "mean_average_precision": mean_where(precision, np.isfinite(precision)),
        }

    return Statistic(sparse.csr_array(sparse.hstack(features, format="csr")), scores)


def _ranking_blocks(values: Floats, positive: Bools) -> tuple[npt.NDArray[np.intp], int]:
    """As ``blocks_of``, with half of the blocks cut at the positives: where a class is rare its average precision
    hangs on the few values at the top."""
    levels = np.unique(values)
    if len(levels) > BLOCKS:
        halves = [np.sort(part) for part in (values[positive], values[~positive]) if len(part)]
        cuts = [half[np.arange(BLOCKS // 2) * len(half) // (BLOCKS // 2)] for half in halves]
        levels = np.unique(np.concatenate([*cuts, [-np.inf]]))
    return np.searchsorted(levels, values, side="right") - 1, len(levels)
