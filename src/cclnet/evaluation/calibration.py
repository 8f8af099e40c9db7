"""Calibration: proper scores, calibration errors, risk and coverage, and temperature scaling.

The confidence of a decision is the probability of the predicted class. For several labels each class is a decision of
its own with confidence max(p, 1 − p), and all N·K decisions are pooled.

- nll: mean of ``−log p`` of the true class (several labels: binary, mean over images and classes), p at least 2.2e-16
  as in scikit-learn.
- brier: mean of ``Σ_k (p_k − y_k)²``, in [0, 2] (several labels: mean over images and classes of ``(p − y)²``).
- ece: ``Σ_b |Σ_{i in b} (right_i − confidence_i)| / N`` over 15 bins of equal width, each without its lower end.
- adaptive_ece: the same over 15 bins of equal count (equal confidences stay together).
- classwise_ece: the same for the probability of each class against its presence, 15 bins of equal width, mean over the
  classes that have an image.
- aurc: area under the risk-coverage curve: the error rate of the n most confident decisions, averaged over n = 1..N.
  Equally confident decisions are kept in random order, in expectation.

Temperature scaling is ``p_T = softmax(log p / T)``: log-probabilities are logits up to a constant that softmax ignores.
For several labels each probability is the sigmoid of its logit divided by T. T > 1 makes a model less confident. The
log-likelihood is concave in 1/T, so its only maximum is found by bounded search in log T. T is fitted on images that
are not reported.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse, special

from cclnet.evaluation.bootstrap import Statistic, Units
from cclnet.evaluation.classification import BLOCKS, Values, blocks_of, columns, decisions
from cclnet.runs.predictions import Floats, Integers, Predictions
from cclnet.runs.scores import ReliabilityBin, RiskPoint, Temperature

BINS = 15
# A probability such as 0.6 lies on the border of two bins. Rounding must not decide on which side: files have nine
# digits, and normalising a row changes the last bit.
ON_BORDER = 1e-8
SMALLEST = float(np.finfo(np.float64).eps)
BOUNDS = (0.01, 100.0)  # of the temperature


def confidences(predictions: Predictions) -> tuple[Floats, Floats]:
    """Confidence of each decision, and 1 where it is right, else 0: both [N], or [N, K] for several labels."""
    p = predictions.probabilities
    right = (decisions(predictions) == predictions.labels).astype(np.float64)
    return (np.maximum(p, 1 - p) if predictions.multilabel else p.max(axis=1)), right


def losses(predictions: Predictions) -> tuple[Floats, Floats]:
    """Negative log-likelihood and Brier score of each image, both [N]."""
    p, targets = predictions.probabilities, predictions.targets
    square = (p - targets) ** 2
    if predictions.multilabel:
        clipped = np.clip(p, SMALLEST, 1 - SMALLEST)
        return -np.log(np.where(targets == 1, clipped, 1 - clipped)).mean(axis=1), square.mean(axis=1)
    own = p[np.arange(len(p)), predictions.labels]
    return -np.log(np.clip(own, SMALLEST, 1.0)), square.sum(axis=1)


def equal_width_bins(values: Floats) -> npt.NDArray[np.intp]:
    """The bin of each value, 0..14: ``(b/15, (b+1)/15]``, zero in the first; within ON_BORDER of a border is on it."""
    return np.searchsorted(np.arange(1, BINS) / BINS + ON_BORDER, values, side="left")


def equal_count_bins(values: Floats) -> npt.NDArray[np.intp]:
    """The bin of each value, cut where the sorted values pass each fifteenth; equal values stay together."""
    cuts = np.sort(values)[np.arange(1, BINS) * len(values) // BINS]
    return np.searchsorted(np.unique(cuts), values, side="right")


def area_under_risk(kept: Floats, wrong: Floats) -> Floats:
    """AURC [D] from the decisions and errors in blocks of equal confidence, both [D, B], most confident first.

    Within a block the expected errors grow evenly, so the sum over n of ``errors(n) / n`` has the closed form
    ``r c + (E − r n) (H(n + c) − H(n))`` for a block of c decisions with error rate r after n decisions with E errors.
    """
    before, errors = np.cumsum(kept, axis=1) - kept, np.cumsum(wrong, axis=1) - wrong
    rate = np.divide(wrong, kept, out=np.zeros_like(kept), where=kept > 0)
    harmonic = special.digamma(before + kept + 1) - special.digamma(before + 1)
    return (wrong + (errors - rate * before) * harmonic).sum(axis=1) / kept.sum(axis=1)


def calibration_values(predictions: Predictions) -> Values:
    """The calibration metrics, by name."""
    statistic = calibration_statistic(predictions, exact=True)
    totals = np.asarray(statistic.features.sum(axis=0), dtype=np.float64)[None]
    return {name: float(value[0]) for name, value in statistic.scores(totals).items()}


def calibration_statistic(predictions: Predictions, exact: bool = False) -> Statistic:
    """The calibration metrics as functions of totals. The bins are those of all images, in every draw. Beyond BLOCKS
    distinct confidences, the risk-coverage curve counts neighbouring ones as equal, unless ``exact``."""
    confidence, right = confidences(predictions)
    each = 1 if right.ndim == 1 else right.shape[1]  # decisions per image
    flat, hit = confidence.ravel(), right.ravel()
    block, blocks = blocks_of(-flat, len(flat) if exact else BLOCKS)
    pooled = [
        columns(equal_width_bins(flat), BINS, hit - flat),
        columns(equal_count_bins(flat), BINS, hit - flat),
        columns(block, blocks),
        columns(block, blocks, 1 - hit),
    ]
    owner = columns(np.repeat(np.arange(len(right)), each), len(right)).T  # sums the decisions of an image
    p, targets, present = predictions.probabilities, predictions.targets, np.flatnonzero(predictions.class_counts)
    by_class = [columns(equal_width_bins(p[:, k]), BINS, targets[:, k] - p[:, k]) for k in present]
    of_image = sparse.csr_array(np.column_stack([np.ones(len(right)), *losses(predictions)]))
    features = sparse.hstack([of_image, *by_class, *(owner @ own for own in pooled)], format="csr")
    ends = np.cumsum([3, len(present) * BINS, BINS, BINS, blocks])

    def scores(totals: Floats) -> dict[str, Floats]:
        sums, classes, width, count, kept, wrong = np.split(totals, ends, axis=1)
        images = sums[:, 0]
        return {
            "nll": sums[:, 1] / images,
            "brier": sums[:, 2] / images,
            "ece": np.abs(width).sum(axis=1) / (images * each),
            "adaptive_ece": np.abs(count).sum(axis=1) / (images * each),
            "classwise_ece": np.abs(classes).sum(axis=1) / (images * max(len(present), 1)),
            "aurc": area_under_risk(kept, wrong),
        }

    return Statistic(sparse.csr_array(features), scores)


def aurc_statistic(confidence: Floats, right: npt.NDArray[np.bool_], exact: bool = False) -> Statistic:
    """The AURC of N decisions with any confidence, as in ``calibration_statistic``."""
    block, blocks = blocks_of(-confidence, len(confidence) if exact else BLOCKS)
    features = sparse.hstack(
        [columns(block, blocks), columns(block, blocks, (~right).astype(np.float64))], format="csr"
    )

    def scores(totals: Floats) -> dict[str, Floats]:
        return {"aurc": area_under_risk(totals[:, :blocks], totals[:, blocks:])}

    return Statistic(sparse.csr_array(features), scores)


def reliability(predictions: Predictions) -> tuple[ReliabilityBin, ...]:
    """The non-empty bins of the ECE: bounds, number of decisions, mean confidence, accuracy."""
    confidence, right = (values.ravel() for values in confidences(predictions))
    index = equal_width_bins(confidence)
    count, total, hits = (np.bincount(index, w, minlength=BINS) for w in (None, confidence, right))
    return tuple(
        ReliabilityBin(b / BINS, (b + 1) / BINS, int(count[b]), float(total[b] / count[b]), float(hits[b] / count[b]))
        for b in np.flatnonzero(count).tolist()
    )


def risk_coverage(predictions: Predictions, points: int = 200) -> tuple[RiskPoint, ...]:
    """The error rate among the most confident decisions, at no more than ``points`` coverages; the last is 1."""
    confidence, right = (values.ravel() for values in confidences(predictions))
    block, blocks = blocks_of(-confidence, len(confidence))
    kept: Integers = np.cumsum(np.bincount(block, minlength=blocks))
    wrong = np.cumsum(np.bincount(block, 1 - right, minlength=blocks))
    shown = np.unique(np.linspace(0, blocks - 1, min(points, blocks)).round().astype(np.intp))
    return tuple(RiskPoint(float(kept[b] / kept[-1]), float(wrong[b] / kept[b])) for b in shown)


def logits_of(predictions: Predictions) -> Floats:
    """Logits [N, K] of the probabilities, which are first clipped away from 0 (and 1) by the float64 epsilon."""
    p = np.clip(predictions.probabilities, SMALLEST, 1 - SMALLEST if predictions.multilabel else 1.0)
    return special.logit(p) if predictions.multilabel else np.log(p)


def with_temperature(predictions: Predictions, temperature: float | Floats) -> Predictions:
    """The predictions at a temperature (one, or one for each image as [N])."""
    scaled = logits_of(predictions) / np.reshape(temperature, (-1, 1))
    p = special.expit(scaled) if predictions.multilabel else special.softmax(scaled, axis=1)
    return replace(predictions, probabilities=p)


def fit_temperature(predictions: Predictions) -> float:
    """The temperature with the highest likelihood; NaN where there is none (no decision is wrong, or none right).

    >>> p = np.full((10, 2), [0.9, 0.1])  # confidence 0.9, accuracy 0.7
    >>> labels = np.array([0, 0, 0, 0, 0, 0, 0, 1, 1, 1])
    >>> made = Predictions(np.arange(10).astype(str), labels, p, ("a", "b"))
    >>> round(fit_temperature(made), 3)  # logit(0.9) / logit(0.7)
    2.593
    """
    logits, targets = logits_of(predictions), predictions.targets
    rows = np.arange(len(logits))

    def loss(log_temperature: float) -> float:
        scaled = logits * math.exp(-log_temperature)
        if predictions.multilabel:
            return float(np.logaddexp(0, np.where(targets == 1, -scaled, scaled)).mean())
        largest = scaled.max(axis=1)
        spread = np.log(np.exp(scaled - largest[:, None]).sum(axis=1))
        return float((spread + largest - scaled[rows, predictions.labels]).mean())

    low, high = (math.log(bound) for bound in BOUNDS)
    best = optimize.minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-7})
    return math.exp(best.x) if best.fun < min(loss(low), loss(high)) else math.nan


def halves_of(units: Units, seed: int) -> npt.NDArray[np.bool_]:
    """Split images into two halves by unit: True for the second, [N]."""
    order = np.random.default_rng((seed, 2)).permutation(units.count)
    return (order % 2 == 1)[units.index]


def fitting_split(predictions: Predictions, reported: str) -> str | None:
    """The split to fit the temperature on: "calibration" if there is one, else "val" beside a reported test split, else
    None. Never the training split, where the model is overconfident."""
    splits = () if predictions.splits is None else set(predictions.splits.tolist())
    return next((name for name in ("calibration", "val") if name in splits and reported not in (name, "all")), None)


def calibrate(
    reported: Predictions, split: str | None, fitting: Predictions, units: Units, seed: int
) -> tuple[Temperature, Predictions | None]:
    """The temperature, and the reported predictions after it (None where none could be fitted).

    It is fitted on the predictions ``fitting`` of ``split``. Where that is None, it is cross-fitted: each half of the
    reported ``units`` is scaled by the temperature of the other half, and the geometric mean of the two is kept.
    """
    if split is not None:
        value = fit_temperature(fitting)
        if math.isnan(value):
            return _not_fitted(f"the split '{split}' ({len(fitting):,} images)"), None
        words = f"One temperature, {value:.3g}, fitted on the {len(fitting):,} images of the split '{split}'."
        return Temperature(value, split, len(fitting), None, words), with_temperature(reported, value)
    second = halves_of(units, seed)
    if not second.any() or second.all():
        return _not_fitted(f"a single one of the {units.kind}, which has no two halves"), None
    first_value, second_value = (fit_temperature(reported.select(half)) for half in (~second, second))
    if math.isnan(first_value) or math.isnan(second_value):
        return _not_fitted(f"one half of the reported split ({len(reported):,} images in all)"), None
    value = math.sqrt(first_value * second_value)
    words = (
        f"No split was set aside for calibration: each half of the reported split (by {units.kind}) is scaled by the "
        f"temperature fitted on the other, {first_value:.3g} and {second_value:.3g}; their mean, {value:.3g}, is kept."
    )
    after = with_temperature(reported, np.where(second, first_value, second_value))
    return Temperature(value, "cross-fitted halves", len(reported), (first_value, second_value), words), after


def _not_fitted(where: str) -> Temperature:
    words = f"No temperature could be fitted on {where}: there is no best one between {BOUNDS[0]:g} and {BOUNDS[1]:g}."
    return Temperature(None, None, 0, None, words)
