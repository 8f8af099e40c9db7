from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from sklearn import metrics

from cclnet.evaluation import calibration
from cclnet.evaluation.calibration import calibration_statistic, calibration_values, reliability, risk_coverage
from cclnet.evaluation.metrics import calibration_metrics, task_of
from cclnet.runs.predictions import Predictions
from cclnet.runs.scores import RiskPoint
from made_predictions import SEVERAL_LABELS, SINGLE_LABEL, given, single_label

EVERY = {**SINGLE_LABEL, **{f"several labels, {name}": made for name, made in SEVERAL_LABELS.items()}}
every = pytest.mark.parametrize("made", EVERY.values(), ids=EVERY.keys())


def decided(made: Predictions) -> list[tuple[float, bool]]:
    """(confidence, right) of each decision."""
    if made.multilabel:
        flat = zip(made.probabilities.ravel(), made.labels.ravel(), strict=True)
        return [(max(p, 1 - p), (p >= 0.5) == bool(y)) for p, y in flat]
    return [(max(row), int(np.argmax(row)) == y) for row, y in zip(made.probabilities, made.labels, strict=True)]


def gap(pairs: list[tuple[float, float]], bin_of: list[int]) -> float:
    """Σ over bins of (share of pairs in it) · |mean outcome − mean probability|."""
    total = 0.0
    for b in set(bin_of):
        inside = [pair for pair, own in zip(pairs, bin_of, strict=True) if own == b]
        p, y = (sum(column) / len(inside) for column in zip(*inside, strict=True))
        total += len(inside) / len(pairs) * abs(y - p)
    return total


def width_bin(p: float) -> int:
    return next(b for b in range(15) if p <= (b + 1) / 15 or b == 14)


def count_bins(values: list[float]) -> list[int]:
    ordered = sorted(values)
    cuts = sorted({ordered[b * len(values) // 15] for b in range(1, 15)})
    return [sum(cut <= value for cut in cuts) for value in values]


def expected_area(pairs: list[tuple[float, bool]]) -> float:
    """Mean over n of the expected share of errors among the n most confident, ties in random order."""
    total, errors, kept = Fraction(0), Fraction(0), 0
    for level in sorted({c for c, _ in pairs}, reverse=True):
        block = [right for c, right in pairs if c == level]
        rate = Fraction(block.count(False), len(block))
        for _ in block:
            kept += 1
            errors += rate
            total += errors / kept
    return float(total / kept)


def oracle(made: Predictions) -> dict[str, float]:
    eps = np.finfo(np.float64).eps
    p, y = made.probabilities, made.targets.astype(float)
    pairs = decided(made)
    confidence = [c for c, _ in pairs]
    present = [k for k in range(made.num_classes) if y[:, k].any()]
    by_class = [gap(list(zip(p[:, k], y[:, k], strict=True)), [width_bin(x) for x in p[:, k]]) for k in present]
    if made.multilabel:
        q = np.clip(p, eps, 1 - eps)
        nll, brier = -(y * np.log(q) + (1 - y) * np.log(1 - q)).mean(), ((p - y) ** 2).mean()
    else:
        nll = -sum(math.log(max(row[k], eps)) for row, k in zip(p, made.labels, strict=True)) / len(p)
        brier = sum(
            sum((row[j] - (j == k)) ** 2 for j in range(len(row))) for row, k in zip(p, made.labels, strict=True)
        )
        brier /= len(p)
    return {
        "nll": nll,
        "brier": brier,
        "ece": gap(pairs, [width_bin(c) for c in confidence]),
        "adaptive_ece": gap(pairs, count_bins(confidence)),
        "classwise_ece": sum(by_class) / len(by_class) if by_class else 0.0,
        "aurc": expected_area(pairs),
    }


@every
def test_every_measure_equals_its_oracle(made: Predictions) -> None:
    found, expected = calibration_values(made), oracle(made)
    assert list(found) == [metric.name for metric in calibration_metrics(task_of(made))]
    for name in found:
        assert found[name] == pytest.approx(expected[name], abs=1e-12, rel=1e-12), name


def test_nll_and_brier_equal_scikit_learn() -> None:
    made = single_label(200, 5)
    found = calibration_values(made)
    assert found["nll"] == pytest.approx(metrics.log_loss(made.labels, made.probabilities), abs=1e-12)
    binary = single_label(200, 2)
    half = metrics.brier_score_loss(binary.labels, binary.probabilities[:, 1])
    assert calibration_values(binary)["brier"] == pytest.approx(2 * half, abs=1e-12)


@every
def test_totals_give_the_measures_of_the_whole(made: Predictions) -> None:
    statistic = calibration_statistic(made)  # as drawn, with blocks; few images here, so nothing is lost
    found = statistic.scores(np.asarray(statistic.features.sum(axis=0))[None])
    for name, value in calibration_values(made).items():
        assert found[name][0] == pytest.approx(value, abs=1e-12), name


def test_blocks_change_the_area_little() -> None:
    made = single_label(5000, 5, skill=2.0)
    statistic = calibration_statistic(made)
    found = statistic.scores(np.asarray(statistic.features.sum(axis=0))[None])["aurc"][0]
    assert found == pytest.approx(calibration_values(made)["aurc"], rel=2e-3)


def test_bins_close_at_their_upper_end() -> None:
    values = np.array([0.0, 1 / 15, 1 / 15 + 1e-6, 14 / 15, 1.0])
    assert calibration.equal_width_bins(values).tolist() == [0, 0, 1, 13, 14]


def test_bins_of_equal_count_are_equal_for_distinct_values_and_one_for_equal_ones() -> None:
    distinct = np.random.default_rng(0).permutation(150) / 150
    assert np.bincount(calibration.equal_count_bins(distinct)).tolist() == [10] * 15
    assert len(set(calibration.equal_count_bins(np.full(100, 0.7)).tolist())) == 1


def test_a_perfectly_ordered_model_has_the_smallest_area() -> None:
    # the two errors come last of four: (0 + 0 + 1/3 + 2/4) / 4
    made = given([0, 0, 1, 1], [[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    assert calibration_values(made)["aurc"] == pytest.approx((0 + 0 + 1 / 3 + 2 / 4) / 4)


def test_reliability_bins_add_up_to_the_calibration_error() -> None:
    made = single_label(300, 4, skill=2)
    bins = reliability(made)
    assert sum(b.images for b in bins) == 300
    error = sum(b.images / 300 * abs(b.accuracy - b.confidence) for b in bins)
    assert error == pytest.approx(calibration_values(made)["ece"], abs=1e-12)
    assert all(b.low < b.confidence <= b.high + 1e-12 for b in bins)


def test_the_risk_coverage_curve_is_thinned_and_ends_at_the_error_rate() -> None:
    made = single_label(5000, 4)
    points = risk_coverage(made)
    assert len(points) == 200
    assert points[-1] == RiskPoint(1.0, pytest.approx(1 - (decisions_right(made)).mean()))
    coverage = [point.coverage for point in points]
    assert coverage == sorted(set(coverage)) and coverage[0] == pytest.approx(1 / 5000)
    assert risk_coverage(given([0, 1], [[0.5, 0.5], [0.5, 0.5]])) == (RiskPoint(1.0, 0.5),)


def decisions_right(made: Predictions) -> np.ndarray:
    return made.probabilities.argmax(axis=1) == made.labels


def test_rounding_does_not_decide_on_which_side_of_a_border_a_probability_lies() -> None:
    borders = np.arange(1, 15) / 15
    for error in (-1e-9, 0.0, 1e-9):
        np.testing.assert_array_equal(calibration.equal_width_bins(borders + error), np.arange(14))
    np.testing.assert_array_equal(calibration.equal_width_bins(borders + 1e-6), np.arange(1, 15))
