"""Bootstrap intervals over groups (lesions, patients) where they are known, else over images.

Every built-in metric depends on the images only through totals (counts of a confusion matrix, counts of a histogram,
sums of a loss). Resampling units with replacement gives each unit an integer weight, so a draw is a weighted total: all
draws together are one product of a sparse matrix with a matrix of weights, and no metric is recomputed from the images.
A metric that is only a function of predictions (``Resampled``) is recomputed from the resampled images of each draw.

The interval is ``g⁻¹(g(θ) ± t · s g'(θ))``: s the standard deviation of the draws (times √(G/(G−1)) for G units), t the
Student quantile with G − 1 degrees of freedom, g the logit of θ within its bounds (the logarithm where the upper bound
is infinite). It stays within the bounds, contains θ, and on simulated clustered data covered better than percentiles
and BCa when units are few or the score is near one.

A calibration error is a sum of absolute values, so its estimate is biased upwards, the more the better the model is
calibrated. With b the mean of the draws minus θ (the bias that the bootstrap shows, which is less than all of it), the
interval is ``θ − 2b − t s`` to ``θ − b + t s``. In simulations it covers the true value in 90 to 95% of cases (ECE and
adaptive ECE), in 79 to 90% where that is zero, which the uncorrected interval never covers. Class-wise ECE on few
images is covered less often (200 images: 13 to 71%; benchmarks/evaluation.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import sparse, stats

from cclnet.runs.predictions import Floats, Integers, Predictions
from cclnet.runs.scores import Estimate, Intervals, finite

LEVEL = 0.95
Bounds = tuple[float, float]


@dataclass(frozen=True)
class Units:
    """What is resampled: ``index`` [N] is the unit of each image, of ``count`` units."""

    index: npt.NDArray[np.intp]
    count: int
    kind: str  # "groups" or "images"


@dataclass(frozen=True)
class Statistic:
    """Scores that depend on totals alone."""

    features: sparse.csr_array  # what each image adds to the M totals, [N, M]
    # From totals [D, M] of D draws to scores by name, [D] or (one per class) [D, K]; NaN where a score is undefined.
    scores: Callable[[Floats], dict[str, Floats]]


@dataclass(frozen=True)
class Resampled:
    """A score that is recomputed from the resampled predictions of every draw. Slow: ``draws`` calls of ``score``,
    from several threads."""

    name: str
    predictions: Predictions
    score: Callable[[Predictions], float | Floats]

    def draw(self, weights: Floats) -> float | Floats:
        """The score of the images, each repeated as often as its weight [N] says."""
        rows = np.repeat(np.arange(len(weights)), weights.astype(np.intp))
        return self.score(self.predictions.select(rows, np.arange(len(rows)).astype(np.str_)))


def units_of(predictions: Predictions) -> Units:
    """Groups where the predictions name any (an image without one is its own group), else images."""
    if predictions.groups is None or not (named := predictions.groups != "").any():
        return Units(np.arange(len(predictions)), len(predictions), "images")
    index = np.empty(len(predictions), np.intp)
    groups, index[named] = np.unique(predictions.groups[named], return_inverse=True)
    alone = int((~named).sum())
    index[~named] = len(groups) + np.arange(alone)
    return Units(index, len(groups) + alone, "groups")


def units_with(flags: npt.NDArray[np.bool_], units: Units) -> Integers:
    """The number of units in which each column of [N, K] is set, [K]."""
    return np.array([len(np.unique(units.index[column])) for column in flags.T], dtype=np.int64)


def _weights(units: int, draws: range, seed: int) -> Floats:
    """How often each unit was drawn, [units, draws]; each draw has its own generator, so chunks do not matter."""
    weights = np.empty((units, len(draws)))
    for column, draw in enumerate(draws):
        drawn = np.random.default_rng((seed, draw)).integers(0, units, units, dtype=np.int32)
        weights[:, column] = np.bincount(drawn, minlength=units)
    return weights


def bootstrap(
    statistics: Sequence[Statistic | Resampled], units: Units, draws: int, seed: int
) -> list[dict[str, Floats]]:
    """The scores of every statistic in every draw (first axis) of units with replacement.

    All statistics get the same draws, so those of two runs on the same images are paired.
    """
    images = len(units.index)
    of_unit = sparse.csr_array((np.ones(images), (units.index, np.arange(images))), shape=(units.count, images))
    # Column format reads the weights of each unit once, in order: twice as fast as row format.
    totals = {
        i: sparse.csc_array((of_unit @ s.features).T) for i, s in enumerate(statistics) if isinstance(s, Statistic)
    }
    chunk = min(max(3_000_000 // units.count, 16), 64)

    def scores(i: int, weights: Floats) -> dict[str, Floats]:
        statistic = statistics[i]
        if isinstance(statistic, Statistic):
            return statistic.scores(np.ascontiguousarray((totals[i] @ weights).T))
        return {statistic.name: np.array([statistic.draw(column[units.index]) for column in weights.T])}

    def scores_of_chunk(start: int) -> list[dict[str, Floats]]:
        weights = _weights(units.count, range(start, min(start + chunk, draws)), seed)
        return [scores(i, weights) for i in range(len(statistics))]

    with ThreadPoolExecutor(min(os.cpu_count() or 1, 4)) as pool:
        chunks = list(pool.map(scores_of_chunk, range(0, draws, chunk)))
    return [
        {name: np.concatenate([own[i][name] for own in chunks]) for name in chunks[0][i]}
        for i in range(len(statistics))
    ]


def intervals_summary(units: Units, draws: int, seed: int) -> Intervals:
    words = f"{LEVEL:.0%} intervals from {draws:,} bootstrap draws of {units.count:,} {units.kind}."
    if units.kind == "images":
        words += " No groups are known: images of one lesion or patient would make these intervals too narrow."
    return Intervals(LEVEL, draws, seed, units.kind, units.count, words)


def estimate(
    value: float,
    draws: Floats,
    units: int,
    bounds: Bounds = (0.0, 1.0),
    trials: int | None = None,
    biased: bool = False,
) -> Estimate:
    """A score with its :func:`interval`; None for numbers that are undefined."""
    ends = interval(value, draws, units, bounds, trials, biased)
    return Estimate(*(finite(float(number)) for number in (value, *ends)))


def interval(
    value: float,
    draws: Floats,
    units: int,
    bounds: Bounds = (0.0, 1.0),
    trials: int | None = None,
    biased: bool = False,
) -> Bounds:
    """The interval of a score within ``bounds`` from its draws [D]; (NaN, NaN) where it is undefined.

    A proportion of exactly 0 or 1 does not vary between draws: with ``trials``, the number of units it is computed
    from, its interval is the exact binomial one; without, it has none. ``biased``: a calibration error.

    >>> round(interval(1.0, np.ones(100), 50, trials=50)[0], 4)  # 0.025^(1/50)
    0.9289
    """
    draws = draws[np.isfinite(draws)]
    if not math.isfinite(value) or units < 2 or len(draws) < 2:
        return math.nan, math.nan
    low, high = bounds
    if value in (low, high):
        if not trials:
            return math.nan, math.nan
        reach = (high - low) * ((1 - LEVEL) / 2) ** (1 / trials)
        return (low, high - reach) if value == low else (low + reach, high)
    spread = float(draws.std(ddof=1)) * math.sqrt(units / (units - 1))
    if spread == 0:
        return math.nan, math.nan
    reach = float(stats.t.ppf((1 + LEVEL) / 2, units - 1)) * spread
    if biased:
        bias = max(float(draws.mean()) - value, 0.0)
        return max(low, value - 2 * bias - reach), min(high, max(value, value - bias + reach))
    if math.isinf(high):
        factor = math.exp(min(reach / (value - low), 700.0))
        return low + (value - low) / factor, low + (value - low) * factor
    share = (value - low) / (high - low)
    odds, factor = share / (1 - share), math.exp(min(reach / (high - low) / (share * (1 - share)), 700.0))
    return tuple(low + (high - low) * x / (1 + x) for x in (odds / factor, odds * factor))  # type: ignore[return-value]
