"""How often the model is right: scores of single-label and multi-label predictions, by scikit-learn.

What a macro mean runs over: the classes that have an image in the part. A class without one is named and left out
(it has no recall, and an F1 of zero would only say that it was not there). When the model predicts such a class the
image still counts as missed by its true class and against accuracy and kappa, but no score of the absent class enters
a mean. A class that is there but never predicted has F1, Jaccard and recall 0, which do count, and no precision.
Undefined scores are NaN. Predictions are the most probable class (the first of a tie), or p ≥ .5 for several labels.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from cclnet.predictions import Floats, Integers, Predictions

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
