"""Did the soft labels know beforehand what the model would confuse?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from cclnet.report.words import count_text

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ConfusedPair:
    """Two classes taken for each other: how many images either way, the share of a class's images this is (mean of
    both ways), and where the pair stands among all pairs of the soft labels, 1 the most alike (None without any)."""

    a: str
    b: str
    a_as_b: int
    b_as_a: int
    share: float
    rank: int | None
    predicted: bool


@dataclass(frozen=True)
class Confusions:
    """The most frequent confusions, and in words how many of them the matrix had among its most alike pairs."""

    pairs: tuple[ConfusedPair, ...]
    in_words: str


def frequent_confusions(
    confusion: Sequence[Sequence[int]], classes: Sequence[str], matrix: Sequence[Sequence[float]] | None, most: int = 10
) -> Confusions:
    """The pairs of classes most often taken for each other, against the pairs the matrix holds most alike.

    How often is a share of the images of the class, so that a common class does not head every pair: a soft label
    too speaks of one image of its class. As many pairs are taken from the matrix as there are confusions shown, at
    most a third of all pairs, so that chance stays low.

    >>> found = frequent_confusions([[9, 3, 0], [2, 8, 0], [0, 1, 5]], ["A", "B", "C"], None)
    >>> found.pairs[0].a, found.pairs[0].b, found.pairs[0].a_as_b + found.pairs[0].b_as_a
    ('A', 'B', 5)
    """
    counts = np.asarray(confusion, dtype=np.int64)
    first, second = np.triu_indices(len(classes), k=1)
    shares = _pair_shares(counts)[first, second]
    shown = max(1, min(most, len(shares) // 3))
    order = [int(k) for k in np.argsort(-shares, kind="stable")[:shown] if shares[k] > 0]
    ranks = None if matrix is None else _ranks(np.asarray(matrix, dtype=np.float64)[first, second],
                                               np.asarray(matrix, dtype=np.float64)[second, first])  # fmt: skip
    pairs = []
    for k in order:
        i, j = int(first[k]), int(second[k])
        rank = None if ranks is None else int(ranks[k])
        pairs.append(ConfusedPair(
            classes[i], classes[j], int(counts[i, j]), int(counts[j, i]), float(shares[k]), rank,
            rank is not None and rank <= len(order),
        ))  # fmt: skip
    return Confusions(tuple(pairs), _in_words(pairs, len(shares), ranks is not None))


def _pair_shares(counts: Integers) -> Floats:
    """Share of a class's images taken for the other, averaged over both directions (over one, if the other class has
    no image), [K, K]."""
    images = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, images, out=np.zeros(counts.shape), where=images > 0)
    known = (images > 0).astype(np.float64)
    return (shares + shares.T) / np.maximum(known + known.T, 1.0)


def _ranks(one_way: Floats, other_way: Floats) -> Integers:
    """Rank of each pair by its weight, averaged over both directions, 1 the largest. Of equal pairs all have the last
    rank: a matrix that tells none apart has predicted nothing."""
    weights = np.round(one_way + other_way, 12)
    return stats.rankdata(-weights, method="max").astype(np.int64)


def _in_words(pairs: Sequence[ConfusedPair], of: int, known: bool) -> str:
    if not pairs:
        return "No two classes were confused."
    if not known:
        return ""
    n, hits = len(pairs), sum(pair.predicted for pair in pairs)
    return (
        f"Of the {count_text(n, 'most frequent confusion')}, {hits} {'is' if hits == 1 else 'are'} among the "
        f"{count_text(n, 'most alike pair')} of the soft labels, out of {count_text(of, 'pair')}. "
        f"Chance alone would give {n * n / of:.1f}."
    )
