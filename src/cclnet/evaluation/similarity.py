"""What a run learned about its classes: the matrix of soft labels, how soft it is, and what it follows.

Two matrices agree by the rank correlation (Spearman) of their off-diagonal entries, all K·(K − 1) ordered ones, so
that a matrix that is not symmetric has its say; for symmetric ones this is the same as over unordered pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from cclnet.errors import InputError
from cclnet.runs.predictions import Floats


def off_diagonal(matrix: npt.ArrayLike) -> Floats:
    """The K·(K − 1) entries off the diagonal, row by row.

    >>> off_diagonal([[9, 1], [2, 9]])
    array([1., 2.])
    """
    values = np.asarray(matrix, dtype=np.float64)
    return values[~np.eye(len(values), dtype=bool)]


def agreement(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Spearman's rank correlation of the off-diagonals of two [K, K] matrices, over the entries that both have
    (not NaN); NaN when either is constant, as uniform label smoothing is.

    >>> agreement([[0, 1, 2], [1, 0, 3], [2, 3, 0]], [[0, 10, 20], [10, 0, 30], [20, 30, 0]])
    1.0
    """
    first, second = off_diagonal(a), off_diagonal(b)
    if first.shape != second.shape:
        raise InputError(f"matrices of {np.shape(a)[0]} and {np.shape(b)[0]} classes cannot agree or disagree.")
    both = np.isfinite(first) & np.isfinite(second)
    first, second = first[both], second[both]
    # entries that differ by rounding alone are not ranked
    if len(first) < 2 or np.ptp(first) < 1e-9 or np.ptp(second) < 1e-9:
        return math.nan
    return float(stats.spearmanr(first, second).statistic)


def agreement_beside(a: npt.ArrayLike, b: npt.ArrayLike, third: npt.ArrayLike) -> float:
    """Agreement of a and b beyond what both share with a third matrix: the partial rank correlation. NaN where a or b
    is constant or follows the third altogether.

    >>> looks = [[0, 1, 2], [3, 0, 4], [5, 6, 0]]
    >>> agreement_beside(looks, looks, [[0, 2, 1], [4, 0, 3], [6, 5, 0]])
    1.0
    """
    ab, ac, bc = agreement(a, b), agreement(a, third), agreement(b, third)
    left = (1 - ac**2) * (1 - bc**2)
    return math.nan if math.isnan(left) or left < 1e-9 else (ab - ac * bc) / math.sqrt(left)


def rarity(counts: npt.ArrayLike) -> Floats:
    """``−(log n_i + log n_j)`` for every pair of classes, [K, K]: high where both are rare."""
    logs = np.log(np.maximum(np.asarray(counts, dtype=np.float64), 0.5))  # no image: rarer than one
    return -(logs[:, None] + logs[None, :])


def rarity_agreement(matrix: npt.ArrayLike, counts: npt.ArrayLike) -> float:
    """How far the matrix follows class frequency alone: its agreement with the rarity of pairs."""
    return agreement(matrix, rarity(counts))


def confusion_agreement(matrix: npt.ArrayLike, confusion: npt.ArrayLike) -> float:
    """Agreement with how often the model took class i for class j, as a share of the images of class i."""
    counts = np.asarray(confusion, dtype=np.float64)
    images = counts.sum(axis=1, keepdims=True)
    return agreement(matrix, np.divide(counts, images, out=np.full_like(counts, np.nan), where=images > 0))


def mean_confusion(labels: npt.ArrayLike, probabilities: npt.ArrayLike, counts: npt.ArrayLike | None = None) -> Floats:
    """What a classifier confuses, [K, K], symmetric: ``(C + Cᵀ) / 2`` with ``C_ij`` the mean probability of class j
    over the images of class i. Rows of classes without images are NaN.

    With ``counts`` (of the training images) the class frequencies are taken out of the probabilities first,
    ``q_k / n_k`` made a distribution again: what the classifier would say if all classes were equally frequent.

    >>> mean_confusion([0, 0, 1], [[0.8, 0.2], [0.6, 0.4], [0.1, 0.9]]).round(2)
    array([[0.7, 0.2],
           [0.2, 0.9]])
    """
    of_class, said = np.asarray(labels), np.asarray(probabilities, dtype=np.float64)
    if counts is not None:
        said = said / np.maximum(np.asarray(counts, dtype=np.float64), 0.5)
        said = said / said.sum(axis=1, keepdims=True)
    size = said.shape[1]
    rows = [said[of_class == k] for k in range(size)]
    confusion = np.stack([own.mean(axis=0) if len(own) else np.full(size, np.nan) for own in rows])
    return np.asarray((confusion + confusion.T) / 2)


def smoothing_distance(matrix: Floats) -> tuple[float, Floats]:
    """Uniform label smoothing of the same softness: its ε, and the total variation of each row from it, [K].

    ``ε = (1 − softness) K / (K − 1)``; total variation is half the sum of absolute differences.
    """
    size = len(matrix)
    epsilon = (1 - float(np.diagonal(matrix).mean())) * size / (size - 1)
    smoothed = (1 - epsilon) * np.eye(size) + epsilon / size
    return epsilon, np.abs(matrix - smoothed).sum(axis=1) / 2


def summary(
    classes: Sequence[str],
    matrix: Floats,
    collapse_softness: float | None = None,
    counts: npt.ArrayLike | None = None,
    confusion: npt.ArrayLike | None = None,
) -> dict[str, Any]:
    """What scores.json says about a matrix; its schema stands in judge.py."""
    epsilon, distance = smoothing_distance(matrix)
    own = np.diagonal(matrix)
    others = np.where(np.eye(len(classes), dtype=bool), -np.inf, matrix)
    pairs = [
        {"a": classes[i], "b": classes[j], "weight": float(matrix[i, j] + matrix[j, i]) / 2}
        for i in range(len(classes))
        for j in range(i + 1, len(classes))
    ]
    return {
        "matrix": matrix.tolist(),
        "softness": float(own.mean()),
        "collapse_softness": collapse_softness,
        "uniform_smoothing": {
            "epsilon": epsilon,
            "distance_mean": float(distance.mean()),
            "distance_max": float(distance.max()),
        },
        "per_class": [
            {"class": name, "softness": float(own[k]), "most_alike": classes[near], "weight": float(matrix[k, near])}
            for k, (name, near) in enumerate(zip(classes, others.argmax(axis=1), strict=True))
        ],
        "most_alike_pairs": sorted(pairs, key=lambda pair: -float(str(pair["weight"])))[:10],
        "rarity_agreement": None if counts is None else _defined(rarity_agreement(matrix, counts)),
        "confusion_agreement": None if confusion is None else _defined(confusion_agreement(matrix, confusion)),
    }


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value
