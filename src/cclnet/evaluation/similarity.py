"""Soft labels of a run: how soft they are, and how far they agree with other matrices of the classes.

The agreement of two matrices is the Spearman rank correlation of their off-diagonal entries. It runs over all K·(K − 1)
ordered pairs, because matrices need not be symmetric; for symmetric ones it is the same as over unordered pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import stats

from cclnet.errors import InputError
from cclnet.runs.predictions import Floats
from cclnet.runs.scores import ClassPair, ClassSoftLabel, SoftLabelSummary, UniformSmoothing, finite

EXACT_CLASSES, PERMUTATIONS = 7, math.factorial(7)


def off_diagonal(matrix: npt.ArrayLike) -> Floats:
    """The K·(K − 1) entries off the diagonal, row by row.

    >>> off_diagonal([[9, 1], [2, 9]])
    array([1., 2.])
    """
    values = np.asarray(matrix, dtype=np.float64)
    return values[~np.eye(len(values), dtype=bool)]


def agreement(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Spearman's rank correlation of the off-diagonals of two [K, K] matrices, over the entries that are NaN in
    neither; NaN if one of them is constant, as uniform label smoothing is.

    >>> agreement([[0, 1, 2], [1, 0, 3], [2, 3, 0]], [[0, 10, 20], [10, 0, 30], [20, 30, 0]])
    1.0
    """
    first, second = off_diagonal(a), off_diagonal(b)
    if first.shape != second.shape:
        raise InputError(f"expected matrices of equal size, got {np.shape(a)[0]} and {np.shape(b)[0]} classes.")
    both = np.isfinite(first) & np.isfinite(second)
    first, second = first[both], second[both]
    # differences below rounding error are not ranked
    if len(first) < 2 or np.ptp(first) < 1e-9 or np.ptp(second) < 1e-9:
        return math.nan
    return float(stats.spearmanr(first, second).statistic)


def agreement_p(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """p of :func:`agreement`: the share of relabellings of the classes of ``b`` that agree with ``a`` at least as
    strongly (in either direction), the observed one included.

    Entries of a matrix are not independent, so the usual p of a rank correlation is too small. Exact up to seven
    classes (5,040 permutations), else from 5,040 random ones. NaN where the agreement is undefined.

    >>> line = np.abs(np.subtract.outer(np.arange(5), np.arange(5)))
    >>> agreement_p(line, line)  # the order and its reverse, of 120 permutations
    0.016666666666666666
    """
    observed = agreement(a, b)
    if math.isnan(observed):
        return math.nan
    return float((np.abs(_correlations(_relabelled(b), a)) >= abs(observed) - 1e-9).mean())


def _relabelled(matrix: npt.ArrayLike) -> Floats:
    """The ranks of the off-diagonal under each relabelling of the classes, [P, K (K − 1)], the given one first."""
    values = np.asarray(matrix, np.float64)
    size = len(values)
    if size <= EXACT_CLASSES:
        orders = list(itertools.permutations(range(size)))
    else:
        rng = np.random.default_rng(0)
        orders = [tuple(range(size)), *(tuple(rng.permutation(size)) for _ in range(PERMUTATIONS - 1))]
    ranks = np.zeros_like(values)
    ranks[~np.eye(size, dtype=bool)] = stats.rankdata(off_diagonal(values))  # a relabelling permutes these
    return np.stack([off_diagonal(ranks[np.ix_(order, order)]) for order in orders])


def _correlations(relabelled: Floats, other: npt.ArrayLike) -> Floats:
    """The rank correlation of each relabelling with another matrix, [P]."""
    ours = stats.rankdata(off_diagonal(other))
    ours, theirs = ours - ours.mean(), relabelled - relabelled.mean(axis=1, keepdims=True)
    return theirs @ ours / math.sqrt(float((ours**2).sum() * (theirs[0] ** 2).sum()))


def partial_agreement_p(a: npt.ArrayLike, b: npt.ArrayLike, control: npt.ArrayLike) -> float:
    """p of :func:`partial_agreement`, as in :func:`agreement_p`: the classes of ``a`` are relabelled, those of ``b``
    and of the control are not. NaN where it is undefined.

    >>> line = np.abs(np.subtract.outer(np.arange(5), np.arange(5)))
    >>> partial_agreement_p(line, line, np.add.outer(np.arange(5) ** 2, np.arange(5) ** 2))
    0.016666666666666666
    """
    observed, bc = partial_agreement(a, b, control), agreement(b, control)
    if math.isnan(observed):
        return math.nan
    relabelled = _relabelled(a)
    ab, ac = _correlations(relabelled, b), _correlations(relabelled, control)
    left = np.maximum((1 - ac**2) * (1 - bc**2), 1e-9)
    return float((np.abs((ab - ac * bc) / np.sqrt(left)) >= abs(observed) - 1e-9).mean())


def partial_agreement(a: npt.ArrayLike, b: npt.ArrayLike, control: npt.ArrayLike) -> float:
    """Partial rank correlation of a and b given a third matrix. NaN if a or b is constant or determined by the third.

    >>> a = [[0, 1, 2], [3, 0, 4], [5, 6, 0]]
    >>> partial_agreement(a, a, [[0, 2, 1], [4, 0, 3], [6, 5, 0]])
    1.0
    """
    ab, ac, bc = agreement(a, b), agreement(a, control), agreement(b, control)
    left = (1 - ac**2) * (1 - bc**2)
    return math.nan if math.isnan(left) or left < 1e-9 else (ab - ac * bc) / math.sqrt(left)


def inverse_frequency(counts: npt.ArrayLike) -> Floats:
    """``−(log n_i + log n_j)`` for every pair of classes, [K, K]: high where both are rare."""
    logs = np.log(np.maximum(np.asarray(counts, dtype=np.float64), 0.5))  # no image counts as half an image
    return -(logs[:, None] + logs[None, :])


def inverse_frequency_agreement(matrix: npt.ArrayLike, counts: npt.ArrayLike) -> float:
    """Agreement with inverse class frequency: near 1, the matrix is large where classes are rare."""
    return agreement(matrix, inverse_frequency(counts))


def confusion_agreement(matrix: npt.ArrayLike, confusion: npt.ArrayLike) -> float:
    """Agreement with the row-normalised confusion matrix of the model."""
    counts = np.asarray(confusion, dtype=np.float64)
    images = counts.sum(axis=1, keepdims=True)
    return agreement(matrix, np.divide(counts, images, out=np.full_like(counts, np.nan), where=images > 0))


def mean_confusion(labels: npt.ArrayLike, probabilities: npt.ArrayLike, counts: npt.ArrayLike | None = None) -> Floats:
    """The reference confusion matrix of a classifier, [K, K], symmetric: ``(C + Cᵀ) / 2`` with ``C_ij`` the mean
    probability of class j over the images of class i. Rows of classes without images are NaN.

    With ``counts`` (of the training images) the probabilities are first divided by the class frequencies,
    ``q_k / n_k``, and normalised: an estimate of what the classifier would predict if all classes were equally
    frequent.

    >>> mean_confusion([0, 0, 1], [[0.8, 0.2], [0.6, 0.4], [0.1, 0.9]]).round(2)
    array([[0.7, 0.2],
           [0.2, 0.9]])
    """
    of_class, p = np.asarray(labels), np.asarray(probabilities, dtype=np.float64)
    if counts is not None:
        p = p / np.maximum(np.asarray(counts, dtype=np.float64), 0.5)
        p = p / p.sum(axis=1, keepdims=True)
    size = p.shape[1]
    rows = [p[of_class == k] for k in range(size)]
    confusion = np.stack([own.mean(axis=0) if len(own) else np.full(size, np.nan) for own in rows])
    return np.asarray((confusion + confusion.T) / 2)


def smoothing_distance(matrix: Floats) -> tuple[float, Floats]:
    """ε of uniform label smoothing with the same softness, and the total variation distance of each row from it, [K].

    ``ε = (1 − softness) K / (K − 1)``; total variation is half the sum of absolute differences.
    """
    size = len(matrix)
    epsilon = (1 - float(np.diagonal(matrix).mean())) * size / (size - 1)
    smoothed = (1 - epsilon) * np.eye(size) + epsilon / size
    return epsilon, np.abs(matrix - smoothed).sum(axis=1) / 2


def summarise(
    classes: Sequence[str],
    matrix: Floats,
    collapse_softness: float | None = None,
    counts: npt.ArrayLike | None = None,
    confusion: npt.ArrayLike | None = None,
) -> SoftLabelSummary:
    """The summary of soft labels [K, K] in scores.json; agreements only where class or confusion counts are given."""
    epsilon, distance = smoothing_distance(matrix)
    own = np.diagonal(matrix)
    others = np.where(np.eye(len(classes), dtype=bool), -np.inf, matrix)
    pairs = [
        ClassPair(classes[i], classes[j], float(matrix[i, j] + matrix[j, i]) / 2)
        for i in range(len(classes))
        for j in range(i + 1, len(classes))
    ]
    return SoftLabelSummary(
        matrix=tuple(map(tuple, matrix.tolist())),
        softness=float(own.mean()),
        collapse_softness=collapse_softness,
        uniform_smoothing=UniformSmoothing(epsilon, float(distance.mean()), float(distance.max())),
        per_class=tuple(
            ClassSoftLabel(name, float(own[k]), classes[near], float(matrix[k, near]))
            for k, (name, near) in enumerate(zip(classes, others.argmax(axis=1), strict=True))
        ),
        most_similar_pairs=tuple(sorted(pairs, key=lambda pair: -pair.weight)[:10]),
        inverse_frequency_agreement=None if counts is None else finite(inverse_frequency_agreement(matrix, counts)),
        confusion_agreement=None if confusion is None else finite(confusion_agreement(matrix, confusion)),
    )
