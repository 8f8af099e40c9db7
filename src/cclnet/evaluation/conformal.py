"""Conformal prediction sets: the classes that together contain the true one with a chosen probability (the level).

The conformity score of class y is the probability of all classes ranked above it plus half of its own,
``s_y = Σ_{p_k > p_y} p_k + p_y / 2`` (APS, Romano et al. 2020, with its random share of p_y fixed at one half), and for
RAPS (Angelopoulos et al. 2021) further ``PENALTY`` for each rank beyond ``FREE_RANKS``. On n held-out images the
threshold is the ⌈(n + 1) level⌉-th smallest score of the true classes; a set has every class with a score of at most
that. A new image from the same population then has its class in the set with at least this probability, whatever the
model: the guarantee needs only that held-out and new patients are exchangeable, so groups are never divided. With the
share fixed, an image has the same set each time and in each engine. The most probable class is always in the set, so
the coverage is above the level where the accuracy is.

The coverage is an average over all images: that of a rare class can be lower.

It is written here because it is a few lines of NumPy on stored thresholds: MAPIE wraps a scikit-learn estimator whose
fitted state would have to be pickled, and TorchCP needs torch, torch_geometric and transformers to predict.

SciPy is imported where it is used, so that prediction does without it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cclnet.errors import InputError, unknown
from cclnet.runs.calibration_map import CalibrationMap
from cclnet.runs.model import ConformalThresholds
from cclnet.runs.predictions import Floats, Predictions
from cclnet.runs.scores import PredictionSets, SetScores, Temperature

if TYPE_CHECKING:
    from cclnet.evaluation.bootstrap import Units

KINDS = ("aps", "raps")
LEVELS = tuple(round(percent / 100, 2) for percent in range(50, 100))
DEFAULT_LEVEL = 0.9
REPORTED = (0.8, 0.9, 0.95)
FREE_RANKS, PENALTY = 1, 0.1
Bools = npt.NDArray[np.bool_]


def conformity(probabilities: Floats, kind: str) -> Floats:
    """The conformity score of each class of each image, [N, K]; equal probabilities rank in the order of the classes.

    >>> conformity(np.array([[0.5, 0.2, 0.3]]), "aps").round(3).tolist()
    [[0.25, 0.9, 0.65]]
    """
    if kind not in KINDS:
        raise unknown("kind of prediction sets", kind, KINDS)
    order = np.argsort(-probabilities, axis=1, kind="stable")
    falling = np.take_along_axis(probabilities, order, axis=1)
    ranked = np.cumsum(falling, axis=1) - falling / 2
    if kind == "raps":
        ranked += PENALTY * np.maximum(np.arange(1, ranked.shape[1] + 1) - FREE_RANKS, 0)
    scores = np.empty_like(ranked)
    np.put_along_axis(scores, order, ranked, axis=1)
    return scores


def threshold(scores: Floats, level: float) -> float:
    """The ⌈(n + 1) level⌉-th smallest of n scores of true classes; infinite where n is too small for the level.

    >>> threshold(np.arange(1.0, 10.0), 0.9), threshold(np.arange(1.0, 10.0), 0.8)
    (9.0, 8.0)
    """
    rank = math.ceil((len(scores) + 1) * level - 1e-9)
    return math.inf if rank > len(scores) else float(np.partition(scores, rank - 1)[rank - 1])


def sets(probabilities: Floats, kind: str, limit: float | Floats) -> Bools:
    """The prediction sets of threshold ``limit`` (one, or [N]) as flags [N, K]; never empty."""
    found = conformity(probabilities, kind) <= np.reshape(limit, (-1, 1)) + 1e-9
    found[np.arange(len(found)), probabilities.argmax(axis=1)] = True
    return found


def scores_of_labels(predictions: Predictions, kind: str) -> Floats:
    """The conformity scores of the true classes, [N]."""
    return conformity(predictions.probabilities, kind)[np.arange(len(predictions)), predictions.labels]


def fit_thresholds(calibrated: Predictions, split: str) -> ConformalThresholds:
    """The thresholds of all levels on held-out predictions; ``kind`` is the one with the smaller sets on them."""
    found, sizes = {}, {}
    for kind in KINDS:
        scores = scores_of_labels(calibrated, kind)
        limits = [threshold(scores, level) for level in LEVELS]
        found[kind] = tuple(None if math.isinf(limit) else limit for limit in limits)
        sizes[kind] = sets(calibrated.probabilities, kind, threshold(scores, DEFAULT_LEVEL)).sum(axis=1).mean()
    return ConformalThresholds(split, len(calibrated), min(KINDS, key=lambda kind: sizes[kind]), LEVELS, found)


def score_sets(
    reported: Predictions, fitting: Predictions | None, temperature: Temperature, units: Units, draws: int, seed: int
) -> tuple[ConformalThresholds, PredictionSets | None]:
    """The thresholds to use, and coverage and size of the sets of ``reported`` predictions (before calibration).

    Thresholds are fitted on ``fitting``. Where that is None, those of all reported images are used, and the scores are
    cross-fitted like the temperature: the sets of each half of the groups get the calibration and the thresholds of the
    other half; there are no scores where there are no two halves.
    """
    from cclnet.evaluation.calibration import CROSS_FITTED, calibrated, halves_of

    split = CROSS_FITTED if fitting is None else (temperature.fitted_on or "calibration")
    used = fit_thresholds(calibrated(reported if fitting is None else fitting, temperature.map), split)
    second = halves_of(units, seed)
    if fitting is None and (not second.any() or second.all()):
        return used, None
    wholes: list[tuple[Bools, Predictions, CalibrationMap]]
    if fitting is not None:
        wholes = [(np.full(len(reported), True), fitting, temperature.map)]
    else:
        maps = temperature.maps_of_halves or (CalibrationMap(), CalibrationMap())
        wholes = [(second, reported.select(~second), maps[0]), (~second, reported.select(second), maps[1])]
    pairs = [(new, calibrated(reported.select(new), own), calibrated(half, own)) for new, half, own in wholes]
    found, flags = [(kind, level) for kind in KINDS for level in REPORTED], []
    for kind, level in found:
        inside = np.zeros((len(reported), reported.num_classes), np.bool_)
        for members, new, held_out in pairs:
            inside[members] = sets(new.probabilities, kind, threshold(scores_of_labels(held_out, kind), level))
        flags.append(inside)
    rows = [_set_scores(reported, *own, inside, units, draws, seed) for own, inside in zip(found, flags, strict=True)]
    return used, PredictionSets(used.kind, split, tuple(rows))


def _set_scores(
    reported: Predictions, kind: str, level: float, inside: Bools, units: Units, draws: int, seed: int
) -> SetScores:
    from scipy import sparse

    from cclnet.evaluation.bootstrap import Statistic, bootstrap, estimate

    covered, size = inside[np.arange(len(inside)), reported.labels], inside.sum(axis=1)
    features = np.column_stack([np.ones(len(inside)), covered, size, size == 1]).astype(np.float64)

    def scores(totals: Floats) -> dict[str, Floats]:
        return {name: totals[:, k] / totals[:, 0] for k, name in enumerate(("coverage", "size", "single"), start=1)}

    statistic = Statistic(sparse.csr_array(features), scores)
    values, (drawn,) = scores(features.sum(axis=0)[None]), bootstrap([statistic], units, draws, seed)
    estimates = {}
    for name, value in values.items():
        bounds, trials = ((1.0, float(reported.num_classes)), None) if name == "size" else ((0.0, 1.0), units.count)
        estimates[name] = estimate(float(value[0]), drawn[name], units.count, bounds, trials)
    members = [reported.labels == k for k in range(reported.num_classes)]
    of_classes = tuple(float(covered[own].mean()) if own.any() else None for own in members)
    return SetScores(kind, level, **estimates, coverage_of_classes=of_classes)


def parse_sets(text: str | float) -> tuple[float, str | None]:
    """Level and kind of "0.9" or "raps:0.9".

    >>> parse_sets("raps:0.95"), parse_sets(0.9)
    ((0.95, 'raps'), (0.9, None))
    """
    kind, colon, level = str(text).rpartition(":")
    try:
        value = float(level)
    except ValueError:
        value = math.nan
    if not LEVELS[0] <= value <= LEVELS[-1]:
        raise InputError(f"the level of prediction sets is from {LEVELS[0]:g} to {LEVELS[-1]:g}, got '{text}'.")
    if colon and kind not in KINDS:
        raise unknown("kind of prediction sets", kind, KINDS)
    return value, kind or None
