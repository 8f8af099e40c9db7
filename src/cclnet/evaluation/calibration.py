"""How far the model's probabilities can be believed: proper scores, calibration errors, risk and coverage.

The confidence of a decision is the probability of the predicted class; where an image may carry several labels each
class is a decision of its own, with confidence max(p, 1 − p), and all N·K of them are taken together.

- nll: mean of ``−log p`` of the true class (several labels: binary, mean over images and classes), p at least 2.2e-16
  as in scikit-learn.
- brier: mean of ``Σ_k (p_k − y_k)²``, in [0, 2] (several labels: mean over images and classes of ``(p − y)²``).
- ece: ``Σ_b |Σ_{i in b} (right_i − confidence_i)| / N`` over 15 bins of equal width, each without its lower end.
- adaptive_ece: the same over 15 bins of equal count (equal confidences stay together).
- classwise_ece: the same for the probability of each class against its presence, 15 bins of equal width, mean over the
  classes that have an image.
- aurc: area under the risk-coverage curve: keep the n most confident decisions, take their share of errors, average
  over n = 1..N. Equally confident decisions are kept in random order, on average.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse, special

from cclnet.evaluation.bootstrap import Statistic
from cclnet.evaluation.scores import decisions
from cclnet.evaluation.weighted import BLOCKS, blocks_of, columns
from cclnet.predictions import Floats, Integers, Predictions

BINS = 15
SMALLEST = float(np.finfo(np.float64).eps)
MEASURES = ("nll", "brier", "ece", "adaptive_ece", "classwise_ece", "aurc")
BIASED = ("ece", "adaptive_ece", "classwise_ece")  # sums of absolute values: too high, the more the fewer the images


def confidences(predictions: Predictions) -> tuple[Floats, Floats]:
    """Confidence of each decision, and 1 where it is right, else 0: both [N], or [N, K] for several labels."""
    p = predictions.probabilities
    right = (decisions(predictions) == predictions.labels).astype(np.float64)
    return (np.maximum(p, 1 - p) if predictions.multilabel else p.max(axis=1)), right


def losses(predictions: Predictions) -> tuple[Floats, Floats]:
    """Negative log-likelihood and Brier score of each image, two of [N]."""
    p, targets = predictions.probabilities, predictions.targets
    square = (p - targets) ** 2
    if predictions.multilabel:
        clipped = np.clip(p, SMALLEST, 1 - SMALLEST)
        return -np.log(np.where(targets == 1, clipped, 1 - clipped)).mean(axis=1), square.mean(axis=1)
    own = p[np.arange(len(p)), predictions.labels]
    return -np.log(np.clip(own, SMALLEST, 1.0)), square.sum(axis=1)


def equal_width_bins(values: Floats) -> npt.NDArray[np.intp]:
    """The bin of each value, 0..14: ``(b/15, (b+1)/15]``, zero in the first."""
    return np.searchsorted(np.arange(1, BINS) / BINS, values, side="left")


def equal_count_bins(values: Floats) -> npt.NDArray[np.intp]:
    """The bin of each value, cut where the sorted values pass each fifteenth; equal values stay together."""
    cuts = np.sort(values)[np.arange(1, BINS) * len(values) // BINS]
    return np.searchsorted(np.unique(cuts), values, side="right")


def area_under_risk(kept: Floats, wrong: Floats) -> Floats:
    """AURC [D] from decisions and errors in blocks of equal confidence, two of [D, B], most confident first.

    Within a block the expected errors grow evenly, so the sum over n of ``errors(n) / n`` has the closed form
    ``r c + (E − r n) (H(n + c) − H(n))`` for a block of c decisions with error rate r after n decisions with E errors.
    """
    before, errors = np.cumsum(kept, axis=1) - kept, np.cumsum(wrong, axis=1) - wrong
    rate = np.divide(wrong, kept, out=np.zeros_like(kept), where=kept > 0)
    harmonic = special.digamma(before + kept + 1) - special.digamma(before + 1)
    return (wrong + (errors - rate * before) * harmonic).sum(axis=1) / kept.sum(axis=1)


def measure(predictions: Predictions) -> dict[str, float]:
    """Each of MEASURES, by name."""
    statistic = calibration_statistic(predictions, exact=True)
    totals = np.asarray(statistic.features.sum(axis=0), dtype=np.float64)[None]
    return {name: float(value[0]) for name, value in statistic.scores(totals).items()}


def calibration_statistic(predictions: Predictions, exact: bool = False) -> Statistic:
    """MEASURES as functions of totals; bins are those of the whole part, whatever is drawn. The risk-coverage curve
    takes neighbouring confidences for equal beyond BLOCKS of them, unless ``exact``."""
    confidence, right = confidences(predictions)
    each = 1 if right.ndim == 1 else right.shape[1]  # decisions an image
    flat, hit = confidence.ravel(), right.ravel()
    gap, block_gap = equal_width_bins(flat), equal_count_bins(flat)
    block, blocks = blocks_of(-flat, len(flat) if exact else BLOCKS)
    pooled = [
        columns(gap, BINS, hit - flat),
        columns(block_gap, BINS, hit - flat),
        columns(block, blocks),
        columns(block, blocks, 1 - hit),
    ]
    owner = columns(np.repeat(np.arange(len(right)), each), len(right)).T  # image from its decisions
    by_class = _class_gaps(predictions)
    of_image = sparse.csr_array(np.column_stack([np.ones(len(right)), *losses(predictions)]))
    features = sparse.hstack([of_image, by_class, *(owner @ part for part in pooled)], format="csr")
    ends = np.cumsum([3, by_class.shape[1], BINS, BINS, blocks])

    def scores(totals: Floats) -> dict[str, Floats]:
        sums, classes, width, count, kept, wrong = np.split(totals, ends, axis=1)
        images = sums[:, 0]
        present = max(classes.shape[1] // BINS, 1)
        return {
            "nll": sums[:, 1] / images,
            "brier": sums[:, 2] / images,
            "ece": np.abs(width).sum(axis=1) / (images * each),
            "adaptive_ece": np.abs(count).sum(axis=1) / (images * each),
            "classwise_ece": np.abs(classes).sum(axis=1) / (images * present),
            "aurc": area_under_risk(kept, wrong),
        }

    return Statistic(sparse.csr_array(features), scores)


def _class_gaps(predictions: Predictions) -> sparse.csr_array:
    """Presence minus probability in the bins of each class that has an image, [N, present · 15]."""
    p, targets = predictions.probabilities, predictions.targets
    present = np.flatnonzero(predictions.class_counts)
    parts = [columns(equal_width_bins(p[:, k]), BINS, targets[:, k] - p[:, k]) for k in present]
    return sparse.csr_array(sparse.hstack(parts, format="csr")) if parts else sparse.csr_array((len(p), 0))


def reliability(predictions: Predictions) -> list[dict[str, Any]]:
    """The bins of the ECE that hold a decision: their ends, count, mean confidence and share that is right."""
    confidence, right = (values.ravel() for values in confidences(predictions))
    index = equal_width_bins(confidence)
    count, sure, hit = (np.bincount(index, w, minlength=BINS) for w in (None, confidence, right))
    return [
        {
            "low": b / BINS,
            "high": (b + 1) / BINS,
            "images": int(count[b]),
            "confidence": float(sure[b] / count[b]),
            "accuracy": float(hit[b] / count[b]),
        }
        for b in np.flatnonzero(count)
    ]


def risk_coverage(predictions: Predictions, points: int = 200) -> list[dict[str, float]]:
    """The share of errors among the most confident decisions, at no more than ``points`` coverages; the last is 1."""
    confidence, right = (values.ravel() for values in confidences(predictions))
    block, blocks = blocks_of(-confidence, len(confidence))
    kept: Integers = np.cumsum(np.bincount(block, minlength=blocks))
    wrong = np.cumsum(np.bincount(block, 1 - right, minlength=blocks))
    shown = np.unique(np.linspace(0, blocks - 1, min(points, blocks)).round().astype(np.intp))
    return [{"coverage": float(kept[b] / kept[-1]), "risk": float(wrong[b] / kept[b])} for b in shown]
