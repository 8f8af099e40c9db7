from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cclnet.evaluation import statistics
from cclnet.evaluation.statistics import Spread

values = st.lists(st.floats(-1, 1).map(lambda x: round(x, 4)), min_size=2, max_size=8).map(np.array)


@given(values)
@settings(deadline=None)
def test_seeds_alone_are_the_t_test(d: np.ndarray) -> None:
    spread = statistics.over_seeds(d)
    if np.ptp(d) == 0:
        return
    expected = stats.ttest_1samp(d, 0)
    assert statistics.p_value(d.mean(), [spread]) == pytest.approx(max(expected.pvalue, 1e-12), rel=1e-6)
    low, high = expected.confidence_interval(0.95)
    assert statistics.reach([spread]) == pytest.approx((high - low) / 2)


@given(values, values)
@settings(deadline=None)
def test_seeds_that_are_not_paired_are_welchs_test(a: np.ndarray, b: np.ndarray) -> None:
    if np.ptp(a) == 0 or np.ptp(b) == 0 or abs(a.mean() - b.mean()) < 1e-9:
        return
    expected = stats.ttest_ind(a, b, equal_var=False).pvalue
    found = statistics.p_value(a.mean() - b.mean(), [statistics.over_seeds_unpaired(a, b)])
    assert found == pytest.approx(max(expected, 1e-12), rel=1e-5)


def test_images_alone_take_the_variance_of_their_draws() -> None:
    draws = np.random.default_rng(0).normal(0.02, 0.01, 500)
    spread = statistics.over_images(draws, 40)
    assert spread == Spread(pytest.approx(draws.var(ddof=1) * 40 / 39), 39)
    assert statistics.over_images(np.append(draws, np.nan), 40) == spread
    assert math.isnan(statistics.over_images(draws, 1).variance)


@given(st.floats(0.001, 5), st.floats(0.001, 5), st.floats(-3, 3).filter(lambda x: abs(x) > 1e-3))
@settings(deadline=None)
def test_two_sources_are_never_surer_than_either_alone(a: float, b: float, difference: float) -> None:
    both = [Spread(a, 4), Spread(b, 200)]
    p = statistics.p_value(difference, both)
    assert p >= max(statistics.p_value(difference, [s]) for s in both) - 1e-9
    # p is the level whose interval touches zero
    if 1e-6 < p < 0.999:
        assert statistics.reach(both, 1 - p) == pytest.approx(abs(difference), rel=1e-6)


def test_what_has_no_spread_or_no_value() -> None:
    assert statistics.p_value(0.0, [Spread(1.0, 4)]) == 1.0
    assert statistics.p_value(0.5, [Spread(0.0, 4)]) == 0.0
    assert math.isnan(statistics.p_value(0.5, [statistics.over_seeds(np.array([1.0]))]))
    assert math.isnan(statistics.p_value(math.nan, [Spread(1.0, 4)]))
    assert math.isnan(statistics.reach([Spread(math.nan, 0)]))
    assert statistics.p_value(1e9, [Spread(1e-9, 50)]) == 1e-12
    assert math.isnan(statistics.over_seeds_unpaired(np.array([1.0]), np.array([1.0, 2.0])).variance)
    assert statistics.over_seeds_unpaired(np.array([1.0, 1.0]), np.array([2.0, 2.0])) == Spread(0.0, 2)


@given(values)
@settings(deadline=None, max_examples=25)
def test_sign_flips_equal_scipys_exact_permutation(d: np.ndarray) -> None:
    p, smallest, count = statistics.permutation_test(d)
    expected = stats.permutation_test(
        (d,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    )
    assert count == 2 ** len(d) and smallest == 2 / count
    # scipy doubles the smaller tail; the means are symmetric, so that is the same where no mean is zero
    if abs(d.sum()) > 1e-9:
        assert p == pytest.approx(expected.pvalue, abs=1e-9)
    else:
        assert p == 1


def test_five_seeds_cannot_fall_below_one_sixteenth() -> None:
    assert statistics.permutation_test(np.array([3.0, 3.1, 2.9, 3.2, 2.8])) == (0.0625, 0.0625, 32)
    assert statistics.permutation_test(np.array([3.0, 3.1, -0.1]))[1] == 0.25


def test_dealing_seeds_equals_scipys_exact_permutation() -> None:
    rng = np.random.default_rng(1)
    for sizes in ((3, 3), (2, 5)):
        a, b = rng.normal(0.5, 1, sizes[0]), rng.normal(0, 1, sizes[1])
        p, smallest, count = statistics.permutation_test_unpaired(a, b)
        gaps = stats.permutation_test(
            (a, b), lambda x, y: abs(np.mean(x) - np.mean(y)), n_resamples=np.inf, alternative="greater"
        )
        assert count == math.comb(sum(sizes), sizes[0])
        assert p == pytest.approx(gaps.pvalue)
        assert smallest == pytest.approx((2 if sizes[0] == sizes[1] else 1) / count)


def test_many_seeds_are_flipped_at_random() -> None:
    rng = np.random.default_rng(0)
    p, _, count = statistics.permutation_test(rng.normal(0.0, 1.0, 30))
    assert count == 2**16 and 0.01 < p <= 1
    p, smallest, _ = statistics.permutation_test(rng.normal(3.0, 0.1, 30))
    assert 0 < p <= smallest
    p, _, count = statistics.permutation_test_unpaired(rng.normal(0, 1, 20), rng.normal(5, 1, 20))
    assert count == 2**16 and p < 1e-3


def test_hierarchical_draws_keep_pairs_together() -> None:
    a = np.tile(np.arange(4.0)[:, None], (1, 300))
    same = statistics.hierarchical_draws(a, a - 0.5, paired=True, seed=0)
    np.testing.assert_allclose(same, 0.5)
    free = statistics.hierarchical_draws(a, a - 0.5, paired=False, seed=0)
    assert free.std() == pytest.approx(math.sqrt(2 * np.arange(4.0).var() / 4), rel=0.15)
    # one seed each: only the draws of groups are left
    draws = np.random.default_rng(0).normal(size=(2, 50))
    np.testing.assert_allclose(statistics.hierarchical_draws(draws[:1], draws[1:], True, 0), draws[0] - draws[1])


def test_percentiles_of_draws() -> None:
    draws = np.arange(1, 1001) / 1000
    low, high, p = statistics.percentile_interval(draws)
    assert (low, high) == pytest.approx(tuple(np.quantile(draws, [0.025, 0.975])))
    assert p == pytest.approx(2 / 1001)
    assert statistics.percentile_interval(np.array([-1.0, 0.0, 1.0]))[2] == 1.0
    assert all(math.isnan(x) for x in statistics.percentile_interval(np.full(5, np.nan)))


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 0), (5, 1), (12, 12), (24, 0)])
def test_few_discordant_images_are_tested_exactly(only_a: int, only_b: int) -> None:
    only_a_right, only_b_right, p, kind = statistics.mcnemar(*_right(only_a, only_b))
    n = only_a + only_b
    tail = sum(math.comb(n, k) for k in range(max(only_a, only_b), n + 1)) / 2**n
    assert p == pytest.approx(min(1.0, 2 * tail))
    assert (only_a_right, only_b_right) == (only_a, only_b) and "exact" in kind


def test_many_discordant_images_are_tested_by_chi_square() -> None:
    _, _, p, kind = statistics.mcnemar(*_right(40, 20))
    assert p == pytest.approx(stats.chi2.sf((20 - 1) ** 2 / 60, 1)) and "continuity" in kind
    assert statistics.mcnemar(*_right(20, 20))[2] == 1.0


def _right(only_a: int, only_b: int) -> tuple[np.ndarray, np.ndarray]:
    a = np.array([True] * only_a + [False] * only_b + [True] * 7 + [False] * 3)
    b = np.array([False] * only_a + [True] * only_b + [True] * 7 + [False] * 3)
    return a, b


def test_holm_by_hand() -> None:
    assert statistics.holm([0.01, 0.02, 0.03, 0.005]) == pytest.approx([0.03, 0.04, 0.04, 0.02])
    assert statistics.holm([0.6, 0.9]) == [1.0, 1.0]
    corrected = statistics.holm([0.04, math.nan])
    assert corrected[0] == 0.04 and math.isnan(corrected[1])
    assert statistics.holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
def test_holm_rejects_what_its_steps_reject(p: list[float]) -> None:
    rejected = set()
    for place, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        if p[i] * (len(p) - place) >= 0.05:
            break
        rejected.add(i)
    assert {i for i, q in enumerate(statistics.holm(p)) if q < 0.05} == rejected


def test_effect_sizes() -> None:
    a, b = np.array([1.0, 2.0, 4.0]), np.array([0.0, 2.0, 1.0])
    d = a - b
    assert statistics.effect_size(a, b, paired=True) == pytest.approx(d.mean() / d.std(ddof=1))
    pooled = math.sqrt((a.var(ddof=1) + b.var(ddof=1)) / 2)
    assert statistics.effect_size(a, b, paired=False) == pytest.approx(d.mean() / pooled)
    assert math.isnan(statistics.effect_size(a[:1], b[:1], True))
    assert math.isnan(statistics.effect_size(a, a - 1, True))


def test_equal_methods_are_rarely_told_apart_and_unequal_ones_mostly_are() -> None:
    """A quick look with five seeds; benchmarks/statistics.py looks properly, through compare(). Images are hard or
    easy for all models alike, and seeds move a whole model by .7 points."""

    def found(gap: float, rng: np.random.Generator) -> bool:
        hard = rng.normal(size=600)
        margins = [
            1.0 + gap * (s < 5) + 0.03 * rng.normal() + 0.9 * hard + 0.43 * rng.normal(size=600) for s in range(10)
        ]
        right = np.array(margins) > 0
        weights = rng.multinomial(600, np.full(600, 1 / 600), 200)
        drawn, own = right @ weights.T / 600, right.mean(axis=1)
        d = own[:5] - own[5:]
        images = statistics.over_images((drawn[:5] - drawn[5:]).mean(axis=0), 600)
        return statistics.p_value(d.mean(), [statistics.over_seeds(d), images]) < 0.05

    rng = np.random.default_rng(0)
    assert sum(found(0.0, rng) for _ in range(60)) <= 5  # more than that at a level of .05 has probability .03
    assert sum(found(0.25, rng) for _ in range(20)) >= 15


@pytest.mark.parametrize("freedom", [2, 4, 9, 200])
def test_the_detectable_difference_is_found_in_four_of_five_cases(freedom: int) -> None:
    """Against the noncentral t distribution, for one source of spread."""
    variance = 0.3
    found = statistics.detectable([Spread(variance, freedom)])
    power = stats.nct.sf(stats.t.ppf(0.975, freedom), freedom, found / math.sqrt(variance))
    assert power == pytest.approx(0.8, abs=0.04)  # the sum of two quantiles is an approximation
    assert statistics.detectable([Spread(variance, freedom), Spread(0.1, 50)]) > found
    assert math.isnan(statistics.detectable([Spread(math.nan, 0)]))
