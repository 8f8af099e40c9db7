"""The scores once more, as functions of totals: what a bootstrap draw needs (see bootstrap.py).

Same definitions as scores.py, in which a class that vanishes from a draw is left out of that draw's macro means.
Rankings (AUROC, average precision) come from a histogram of the probabilities of each class, exact where a class
has at most BLOCKS distinct probabilities; beyond that, neighbours among them count as equal, which is nothing
beside the spread between draws.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import sparse

from cclnet.evaluation.bootstrap import Statistic
from cclnet.evaluation.scores import TOP_K, decisions, place_of_label
from cclnet.predictions import Floats, Predictions

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
