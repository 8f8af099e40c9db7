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

Calibration is ``p_T = softmax(log p / T)`` (temperature scaling) or ``softmax(log p / T + b)`` with an offset for each
class (bias-corrected temperature scaling; Alexandari, Kundaje, Shrikumar 2020): log-probabilities are logits up to a
constant that softmax ignores. For several labels each probability is the sigmoid of its logit divided by T. T > 1 makes
a model less confident and changes no decision; offsets correct classes that are predicted too often on unseen images,
and change decisions. The log-likelihood is concave in 1/T and b, so it has one maximum: T alone is found by bounded
search in log T, both by L-BFGS. They are fitted on images that are not reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse, special

from cclnet.errors import InputError, unknown
from cclnet.evaluation.bootstrap import Statistic, Units, units_of
from cclnet.evaluation.classification import BLOCKS, Values, blocks_of, columns, decisions
from cclnet.runs.calibration_map import CalibrationMap
from cclnet.runs.decision_rule import keeps_frequencies
from cclnet.runs.predictions import Floats, Integers, Labels, Predictions
from cclnet.runs.scores import ReliabilityBin, RiskPoint, Temperature

BINS = 15
# A probability such as 0.6 lies on the border of two bins. Rounding must not decide on which side: files have nine
# digits, and normalising a row changes the last bit.
ON_BORDER = 1e-8
SMALLEST = float(np.finfo(np.float64).eps)
BOUNDS = (0.01, 100.0)  # of the temperature
CALIBRATIONS = ("auto", "temperature", "offsets")
CROSS_FITTED = "cross-fitted halves"
FOLDS = 5  # in which offsets are compared with the temperature alone


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


def calibrated(predictions: Predictions, used: CalibrationMap) -> Predictions:
    """The predictions after a calibration map; the same object where none was fitted."""
    return with_logits(predictions, used.apply(logits_of(predictions))) if used.is_fitted else predictions


def with_logits(predictions: Predictions, logits: Floats) -> Predictions:
    """The predictions with the probabilities of other logits [N, K]."""
    p = special.expit(logits) if predictions.multilabel else special.softmax(logits, axis=1)
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


def fit_offsets(predictions: Predictions) -> CalibrationMap | None:
    """The temperature T and class offsets b that minimise ``mean(-log p_y) + Σ_k b_k² / (2 N)``; None where there is no
    best temperature between BOUNDS. One label per image.

    Offsets sum to zero, since softmax ignores a constant. The penalty is that of a standard normal prior: it is worth
    about one image per class, vanishes with the number N of images, and keeps the offsets of small sets finite. A class
    without an image gets the offset 0, the mean of the others: its absence says nothing about how its probability
    should rank, and the likelihood alone would put it at −∞, so that the class could never be predicted.

    >>> p, labels = np.full((10_000, 2), [0.5, 0.5]), np.repeat([0, 1], [8000, 2000])
    >>> found = fit_offsets(Predictions(np.arange(10_000).astype(str), labels, p, ("a", "b")))
    >>> np.round(np.diff(found.offsets), 2).tolist()  # log(2000 / 8000)
    [-1.39]
    """
    logits, present = logits_of(predictions), predictions.class_counts > 0
    loss = offsets_loss(logits, predictions.labels)
    low, high = 1 / BOUNDS[1], 1 / BOUNDS[0]
    bounds = [(low, high), *[(None, None)] * int(present.sum())]
    start = np.append(1.0, np.zeros(int(present.sum())))
    options = {"maxiter": 1000, "ftol": 1e-13, "gtol": 1e-9}
    best = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
    if not low * 1.001 < best[0] < high / 1.001:
        return None
    return CalibrationMap(float(1 / best[0]), tuple(spread_offsets(best[1:], present).tolist()))


def spread_offsets(values: Floats, present: npt.NDArray[np.bool_]) -> Floats:
    """The offsets [K] with sum zero from one value per class with images; 0 for the others."""
    offsets = np.zeros(len(present))
    offsets[present] = values - values.mean()
    return offsets


def offsets_loss(logits: Floats, labels: Labels) -> Callable[[Floats], tuple[float, Floats]]:
    """What :func:`fit_offsets` minimises, with its gradient, as a function of 1/T and one value per class with images,
    whose differences from their mean are the offsets."""
    images, rows = len(logits), np.arange(len(logits))
    present = np.bincount(labels, minlength=logits.shape[1]) > 0

    def loss(point: Floats) -> tuple[float, Floats]:
        offsets = spread_offsets(point[1:], present)
        scaled = logits * point[0] + offsets
        largest = scaled.max(axis=1, keepdims=True)
        p = np.exp(scaled - largest)
        total = p.sum(axis=1, keepdims=True)
        value = (np.log(total) + largest)[:, 0] - scaled[rows, labels]
        p /= total
        p[rows, labels] -= 1  # the gradient of each image's loss by its logits
        by_offset = (p.sum(axis=0) + offsets)[present] / images
        gradient = np.append((p * logits).sum() / images, by_offset - by_offset.mean())
        return float(value.mean() + (offsets**2).sum() / (2 * images)), gradient

    return loss


def gain_of_offsets(predictions: Predictions, units: Units, seed: int) -> tuple[float, float]:
    """How much lower the cross-fitted log loss is with offsets than with the temperature alone, and the standard error
    of that over units; NaN where one of them cannot be fitted.

    The units are divided into FOLDS folds, or fewer if there are fewer units; each is scored by the maps that were
    fitted on the others.
    """
    folds = min(FOLDS, units.count)
    fold = (np.random.default_rng((seed, 3)).permutation(units.count) % max(folds, 1))[units.index]
    gain = np.full(len(predictions), math.nan)
    for own in (fold == k for k in range(folds if folds > 1 else 0)):
        rest, new = predictions.select(~own), predictions.select(own)
        plain, full = fit_map(rest, False), fit_map(rest, True)
        if plain is None or full is None:
            return math.nan, math.nan
        gain[own] = losses(calibrated(new, plain))[0] - losses(calibrated(new, full))[0]
    mean = float(gain.mean())
    of_units = np.bincount(units.index, gain - mean, minlength=units.count)
    return mean, math.sqrt((of_units**2).sum() * units.count / max(units.count - 1, 1)) / len(gain)


def fit_map(predictions: Predictions, offsets: bool) -> CalibrationMap | None:
    """The temperature with or without offsets; None where there is no best temperature."""
    if offsets:
        return fit_offsets(predictions)
    value = fit_temperature(predictions)
    return None if math.isnan(value) else CalibrationMap(value)


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
    reported: Predictions, split: str | None, fitting: Predictions, units: Units, seed: int, kind: str = "auto"
) -> tuple[Temperature, Predictions | None]:
    """What was fitted, and the reported predictions after it (None where no temperature could be fitted).

    It is fitted on the predictions ``fitting`` of ``split``. Where that is None, it is cross-fitted: each half of the
    reported ``units`` is calibrated by what was fitted on the other half; the geometric mean of the two temperatures
    and the mean of the two offsets are kept.

    ``kind``: "temperature", "offsets" (a temperature and offsets), or "auto": offsets if :func:`gain_of_offsets` is
    above one standard error, on all images that are fitted on; else exactly what "temperature" gives.
    """
    if kind not in CALIBRATIONS:
        raise unknown("calibration", kind, CALIBRATIONS)
    if kind == "offsets" and reported.multilabel:
        raise InputError("calibration 'offsets' is for one label per image; several labels have a temperature alone.")
    halves, where = [fitting], f"the split '{split}' ({len(fitting):,} images)"
    second = np.zeros(len(reported), bool)
    if split is None:
        second = halves_of(units, seed)
        if not second.any() or second.all():
            return _not_fitted(f"a single one of the {units.kind}, which has no two halves"), None
        halves = [reported.select(half) for half in (~second, second)]
        where = f"one half of the reported split ({len(reported):,} images in all)"
    found, why = [fit_map(half, False) for half in halves], ""
    if None in found:
        return _not_fitted(where), None
    if kind != "temperature" and not reported.multilabel:
        gain, error = gain_of_offsets(fitting, units if split is None else units_of(fitting), seed)
        larger = [fit_map(half, True) for half in halves] if kind == "offsets" or gain > error else []
        if larger and None not in larger:
            found, why = larger, _why_offsets(gain, error)
    maps = [own for own in found if own is not None]
    if split is not None:
        return _of_split(maps[0], split, len(fitting), why), calibrated(reported, maps[0])
    logits = logits_of(reported)
    after = np.where(second[:, None], maps[0].apply(logits), maps[1].apply(logits))
    return _of_halves(maps, reported, units, why), with_logits(reported, after)


def _of_split(found: CalibrationMap, split: str, images: int, why: str) -> Temperature:
    added = "" if found.offsets is None else " and an offset for each class,"
    words = (
        f"One temperature, {found.temperature:.3g},{added} fitted on the {images:,} images of the split '{split}'.{why}"
    )
    return Temperature(found.temperature, split, images, None, words, found.offsets)


def _of_halves(maps: Sequence[CalibrationMap], reported: Predictions, units: Units, why: str) -> Temperature:
    first, second = (own.temperature or math.nan for own in maps)
    value = math.sqrt(first * second)
    offsets = tuple(own.offsets for own in maps if own.offsets is not None)
    added = " and offsets of the classes" if offsets else ""
    words = (
        f"No split was set aside for calibration: each half of the reported split (by {units.kind}) is scaled by the "
        f"temperature{added} fitted on the other, {first:.3g} and {second:.3g}; their mean, {value:.3g}, is kept.{why}"
    )
    mean = tuple(np.mean(offsets, axis=0).tolist()) if offsets else None
    return Temperature(value, CROSS_FITTED, len(reported), (first, second), words, mean, offsets or None)


def _why_offsets(gain: float, error: float) -> str:
    words = (
        " The offsets correct classes that are predicted too often or too rarely, so they change decisions: decision "
    )
    words += "rules, abstention and prediction sets are scored with them, accuracy and the other metrics without."
    if math.isnan(gain):
        return words
    change = "lower" if gain > 0 else "raise"
    return words + f" In cross-fitting they {change} the log loss by {abs(gain):.3f} (standard error {error:.3f})."


def _not_fitted(where: str) -> Temperature:
    words = f"No temperature could be fitted on {where}: there is no best one between {BOUNDS[0]:g} and {BOUNDS[1]:g}."
    return Temperature(None, None, 0, None, words)


def kind_for(kind: str, settings: Mapping[str, Any]) -> str:
    """The kind of calibration of a run that was trained with ``settings``: "auto" is "temperature" where the training
    balanced the classes, since offsets would undo that."""
    return "temperature" if kind == "auto" and not keeps_frequencies(settings) else kind
