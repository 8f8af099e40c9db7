"""Tests between runs on the same images, over several seeds.

Two things vary: the seed of a run, and the images (or groups) that were tested. A claim about a method must hold for
both. With d_s the difference of two methods at seed s on all images, s = 1..S:

- *seeds*: ``V_seed = var(d_s) / S``, S − 1 degrees of freedom (seeds not paired: Welch's);
- *images*: ``V_image = variance over bootstrap draws of groups of mean_s d_s``, G − 1 degrees of freedom for G groups.

The interval is ``D ± √(t²_{S−1} V_seed + t²_{G−1} V_image)``, D the mean of d_s, and p the level at which it touches 0.

The plain hierarchical bootstrap (draw seeds, then groups), which is reported beside it, separates equal methods too
often: with five seeds that dominate the variance, in 15% of cases (|t_4| > 1.96 √0.8) instead of 5%. Here t² V_seed
enters in full, so p is never below that of the t-test over seeds, nor below that of the images alone. The errors of a
single model on single images enter both terms; the test is conservative by that much. Simulated (five seeds, 2,000
images in 1,500 groups, seeds changing accuracy by 0.5 to 1 point): 1 to 3% false positives, and a gap of two points
found in 88 to 57% of cases (benchmarks/evaluation.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import optimize, stats

from cclnet.evaluation.bootstrap import LEVEL
from cclnet.runs.predictions import Floats

EXACT_SEEDS = 16  # up to 2^16 sign patterns are enumerated, beyond that 2^16 are sampled
POWER = 0.8  # of the difference that a design can detect
FEW_DISCORDANT = 25  # images, below which McNemar's test is exact


@dataclass(frozen=True)
class Spread:
    """A variance of an estimate and its degrees of freedom."""

    variance: float
    freedom: float


def over_seeds(values: Floats) -> Spread:
    """Spread of the mean of one value per seed, [S]; variance NaN for a single seed."""
    count = len(values)
    return Spread(float(values.var(ddof=1)) / count, count - 1) if count > 1 else Spread(math.nan, 0)


def over_seeds_unpaired(a: Floats, b: Floats) -> Spread:
    """Spread of mean(a) − mean(b), with Welch's degrees of freedom."""
    first, second = over_seeds(a), over_seeds(b)
    if not (first.freedom and second.freedom):
        return Spread(math.nan, 0)
    variance = first.variance + second.variance
    if variance == 0:
        return Spread(0.0, first.freedom + second.freedom)
    return Spread(variance, variance**2 / (first.variance**2 / first.freedom + second.variance**2 / second.freedom))


def over_images(draws: Floats, units: int) -> Spread:
    """Spread of a score or difference from bootstrap draws [D] of ``units`` groups; NaN if all draws are equal."""
    draws = draws[np.isfinite(draws)]
    if units < 2 or len(draws) < 2 or np.ptp(draws) == 0:
        return Spread(math.nan, 0)
    return Spread(float(draws.var(ddof=1)) * units / (units - 1), units - 1)


def reach(spreads: Sequence[Spread], level: float = LEVEL) -> float:
    """Half the width of the interval: ``√(Σ t² V)`` over the sources of spread; NaN if one is unknown."""
    if any(not s.freedom for s in spreads):
        return math.nan
    return math.sqrt(sum(float(stats.t.ppf((1 + level) / 2, s.freedom)) ** 2 * s.variance for s in spreads))


def detectable(spreads: Sequence[Spread]) -> float:
    """The smallest true difference that the test at 5% finds with probability ``POWER``: ``√(Σ t²_0.975 V) +
    √(Σ t²_0.8 V)``. NaN if a spread is unknown.

    >>> round(detectable([Spread(1.0, 1_000_000)]), 2)  # one source, many degrees of freedom: 1.96 + 0.84
    2.8
    """
    return reach(spreads) + reach(spreads, 2 * POWER - 1)


def p_value(difference: float, spreads: Sequence[Spread]) -> float:
    """The level at which the interval just touches zero.

    >>> d = np.array([1.0, 2.0, 4.0, 3.0])  # one source alone: the t-test
    >>> p = p_value(d.mean(), [over_seeds(d)])
    >>> bool(np.isclose(p, stats.ttest_1samp(d, 0).pvalue))
    True
    """
    if difference == 0:
        return 1.0
    if any(not math.isfinite(s.variance) for s in spreads) or not math.isfinite(difference):
        return math.nan
    if all(s.variance == 0 for s in spreads):
        return 0.0

    def short_of(log_p: float) -> float:
        terms = [float(stats.t.isf(math.exp(log_p) / 2, s.freedom)) ** 2 * s.variance for s in spreads]
        return math.sqrt(sum(terms)) - abs(difference)

    smallest = math.log(1e-12)  # smaller values have no meaning
    if short_of(smallest) <= 0:
        return 1e-12
    return math.exp(optimize.brentq(short_of, smallest, 0.0, xtol=1e-10))


def permutation_test(differences: Floats) -> tuple[float, float, int]:
    """Exact sign-flip test over seeds: p, the smallest p that S seeds can give (2/2^S), and the number of patterns.

    If the methods are equal, each difference d_s is as likely with the other sign; p is the share of sign patterns
    whose mean is at least as far from zero.

    >>> permutation_test(np.array([1.0, 2.0, 1.5, 0.5, 3.0]))
    (0.0625, 0.0625, 32)
    """
    count = len(differences)
    if count <= EXACT_SEEDS:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=count)))
    else:
        signs = np.random.default_rng(0).choice((1.0, -1.0), size=(2**EXACT_SEEDS, count))
        signs[0] = 1.0  # the observed pattern is one of them
    sums = np.abs(signs @ differences)
    return float((sums >= sums[0] * (1 - 1e-12)).mean()), 2.0 / len(signs), len(signs)


def permutation_test_unpaired(a: Floats, b: Floats) -> tuple[float, float, int]:
    """The same for seeds that are not paired: over every assignment of the S_a + S_b values to the two methods."""
    together, count = np.concatenate([a, b]), len(a)
    ways = math.comb(len(together), count)
    if ways <= 2**EXACT_SEEDS:
        dealt = np.array(list(itertools.combinations(range(len(together)), count)))
    else:
        rng = np.random.default_rng(0)
        dealt = np.array([rng.permutation(len(together))[:count] for _ in range(2**EXACT_SEEDS)])
        dealt[0] = np.arange(count)
    sums = together[dealt].sum(axis=1)
    gaps = np.abs(sums / count - (together.sum() - sums) / len(b))
    smallest = (2 if len(a) == len(b) else 1) / len(dealt)
    return float((gaps >= gaps[0] - 1e-12 * max(1.0, gaps[0])).mean()), smallest, len(dealt)


def hierarchical_draws(a: Floats, b: Floats, paired: bool, seed: int) -> Floats:
    """Differences of means in draws over both seeds and groups, [D], from the scores of each run in each draw of
    groups, a [S_a, D] and b [S_b, D]: within each draw, seeds are drawn with replacement (as pairs if paired)."""
    rng = np.random.default_rng((seed, 3))
    draws = np.arange(a.shape[1])[:, None]
    chosen = rng.integers(0, len(a), (len(draws), len(a)))
    other = chosen if paired else rng.integers(0, len(b), (len(draws), len(b)))
    return a[chosen, draws].mean(axis=1) - b[other, draws].mean(axis=1)


def percentile_interval(draws: Floats) -> tuple[float, float, float]:
    """Low and high percentile of the draws, and p: twice the share of draws beyond zero (plus one, so never 0)."""
    draws = draws[np.isfinite(draws)]
    if len(draws) < 2:
        return math.nan, math.nan, math.nan
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    beyond = min((draws <= 0).sum(), (draws >= 0).sum())
    return float(low), float(high), min(1.0, 2.0 * float(beyond + 1) / (len(draws) + 1))


def mcnemar(right_a: npt.NDArray[np.bool_], right_b: npt.NDArray[np.bool_]) -> tuple[int, int, float, str]:
    """McNemar's test: how many images only a and only b classifies correctly, p, and the kind of test: exact (binomial)
    below 25 such images, else χ² with continuity correction. It assumes that images are independent of each other."""
    only_a, only_b = int((right_a & ~right_b).sum()), int((right_b & ~right_a).sum())
    discordant = only_a + only_b
    if discordant < FEW_DISCORDANT:
        p = float(stats.binomtest(only_a, discordant).pvalue) if discordant else 1.0
        kind = "exact binomial test"
    else:
        p = float(stats.chi2.sf(max(abs(only_a - only_b) - 1, 0) ** 2 / discordant, 1))
        kind = "χ² with continuity correction"
    return only_a, only_b, p, kind


def holm(p: Sequence[float]) -> list[float]:
    """Holm's correction: the i-th smallest of m values times m − i + 1, never below an earlier one, at most 1.
    NaN stays NaN and is not counted.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    defined = [i for i, value in enumerate(p) if math.isfinite(value)]
    adjusted, highest = [math.nan] * len(p), 0.0
    for rank, i in enumerate(sorted(defined, key=lambda i: p[i])):
        highest = max(highest, min(1.0, p[i] * (len(defined) - rank)))
        adjusted[i] = highest
    return adjusted


def effect_size(a: Floats, b: Floats, paired: bool) -> float:
    """Cohen's d_z = mean(d) / sd(d) over paired seeds, else d with the pooled standard deviation; NaN for one seed
    or no spread."""
    if min(len(a), len(b)) < 2:
        return math.nan
    if paired:
        spread = float((a - b).std(ddof=1))
    else:
        squares = a.var(ddof=1) * (len(a) - 1) + b.var(ddof=1) * (len(b) - 1)
        spread = math.sqrt(squares / (len(a) + len(b) - 2))
    return float(a.mean() - b.mean()) / spread if spread > 0 else math.nan


def independent_images(wrong: npt.NDArray[np.bool_], groups: npt.NDArray[np.intp]) -> Floats:
    """The effective sample size of the first n of N images, for n = 1..N, from whether each is wrong and its group.

    Images of one group (lesion, patient) are correlated. With r the error rate of n images, n_g of them in group g and
    w_g of these wrong, the variance of r over G groups is ``V = G / (G − 1) · Σ (w_g − r n_g)² / n²`` (ratio
    estimator); for n independent images it is ``r (1 − r) / n``. The effective sample size is n times the second over
    the first. V of few groups is uncertain, so it is multiplied by ``(t / z)²``, t the Student quantile with G − 1
    degrees of freedom (Korn and Graubard 1998). The result is at most n and at least ``n² / Σ n_g²``, its value if
    groups are right or wrong as a whole; that is also used where nothing or everything is wrong, which shows nothing
    about the correlation.

    Simulated (5 to 500 groups, 5 and 20% wrong, from uncorrelated to nearly equal within a group): Wilson's interval
    with this sample size covers the truth in 88 to 98% of cases; with all images as independent, in 38 to 97%.

    >>> two_of_ten = np.repeat(np.arange(10) < 2, 100)  # groups of 100 images, wrong as a whole
    >>> float(independent_images(two_of_ten, np.repeat(np.arange(10), 100))[-1])
    10.0
    >>> float(independent_images(two_of_ten, np.arange(1000))[-1])
    1000.0
    """
    own = wrong.astype(np.float64)
    of_group = pd.Series(own).groupby(groups)
    size, errors = of_group.cumcount().to_numpy(), of_group.cumsum().to_numpy() - own  # in its group, before each image
    n, count = np.arange(1, len(own) + 1), np.cumsum(size == 0)
    share = np.cumsum(own) / n
    sizes, both, squares = (np.cumsum(x) for x in (2 * size + 1, errors + own * (size + 1), own * (2 * errors + 1)))
    least = n**2 / sizes
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = count / (count - 1) * (squares - 2 * share * both + share**2 * sizes) / n**2
        upper = (1 + LEVEL) / 2
        effective = share * (1 - share) / variance * (stats.norm.ppf(upper) / stats.t.ppf(upper, count - 1)) ** 2
    return np.clip(np.where((share > 0) & (share < 1) & (count > 1), effective, least), least, n)
