"""One temperature for all images, fitted where nothing is reported.

``p_T = softmax(log p / T)``: log-probabilities are logits up to a constant that softmax does not see. Where an image
may carry several labels, each probability is the sigmoid of its logit divided by T. T > 1 makes a model less sure. The
log-likelihood has one maximum in T (it is concave in 1/T), found by bounded search in log T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from cclnet.evaluation.bootstrap import Units
from cclnet.evaluation.calibration import SMALLEST
from cclnet.predictions import Floats, Predictions

BOUNDS = (0.01, 100.0)


@dataclass(frozen=True)
class Temperature:
    """A fitted temperature and the reported predictions after it; ``value`` None where none could be fitted."""

    value: float | None
    fitted_on: str | None
    images: int
    halves: tuple[float, float] | None
    after: Predictions | None
    in_words: str


def logits_of(predictions: Predictions) -> Floats:
    """Logits [N, K] that give the probabilities; those of 0 (and 1) are held at what float64 can tell from them."""
    p = np.clip(predictions.probabilities, SMALLEST, 1 - SMALLEST if predictions.multilabel else 1.0)
    return special.logit(p) if predictions.multilabel else np.log(p)


def with_temperature(predictions: Predictions, temperature: float | Floats) -> Predictions:
    """The predictions at a temperature (one, or one for each image as [N])."""
    scaled = logits_of(predictions) / np.reshape(temperature, (-1, 1))
    return replace(
        predictions,
        probabilities=special.expit(scaled) if predictions.multilabel else special.softmax(scaled, axis=1),
    )


def fit_temperature(predictions: Predictions) -> float:
    """The temperature with the highest likelihood; NaN where there is no best one (nothing is wrong, or nothing right).

    >>> sure = np.full((10, 2), [0.9, 0.1])  # .9 sure, right seven times of ten
    >>> labels = np.array([0, 0, 0, 0, 0, 0, 0, 1, 1, 1])
    >>> fitted = fit_temperature(Predictions(np.arange(10).astype(str), labels, sure, ("a", "b")))
    >>> round(fitted, 3)  # logit(.9) / logit(.7)
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


def fitting_part(predictions: Predictions, part: str) -> str | None:
    """Where to fit a temperature when ``part`` is reported: "calibration" if there, else "val" beside a reported
    test part, else nowhere. What was trained on is no place to fit: the model is too sure there."""
    there = () if predictions.parts is None else set(predictions.parts.tolist())
    return next((name for name in ("calibration", "val") if name in there and part not in (name, "all")), None)


def calibrate(reported: Predictions, part: str | None, fitting: Predictions, units: Units, seed: int) -> Temperature:
    """Fit on the predictions ``fitting`` of the ``part`` that was set aside; where there is none (None), cross-fit: two
    halves of what is reported, by its ``units``, each judged with the temperature of the other, their geometric mean
    kept."""
    if part is not None:
        value = fit_temperature(fitting)
        if math.isnan(value):
            return _not_fitted(f"the part '{part}' ({len(fitting):,} images)")
        words = f"One temperature, {value:.3g}, fitted on the {len(fitting):,} images of the part '{part}'."
        return Temperature(value, part, len(fitting), None, with_temperature(reported, value), words)
    second = halves_of(units, seed)
    if not second.any() or second.all():
        return _not_fitted(f"a single one of the {units.kind}, which has no two halves")
    first_value, second_value = (fit_temperature(reported.select(half)) for half in (~second, second))
    if math.isnan(first_value) or math.isnan(second_value):
        return _not_fitted(f"one half of the reported part ({len(reported):,} images in all)")
    value = math.sqrt(first_value * second_value)
    words = (
        f"No part was set aside for calibration: each half of the reported part (by {units.kind}) is judged with the "
        f"temperature fitted on the other, {first_value:.3g} and {second_value:.3g}; their mean, {value:.3g}, is kept."
    )
    after = with_temperature(reported, np.where(second, first_value, second_value))
    return Temperature(value, "cross-fitted halves", len(reported), (first_value, second_value), after, words)


def _not_fitted(where: str) -> Temperature:
    words = f"No temperature could be fitted on {where}: there is no best one between {BOUNDS[0]:g} and {BOUNDS[1]:g}."
    return Temperature(None, None, 0, None, None, words)
