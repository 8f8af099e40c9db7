"""How sure the model is, in words, and what is known about how far to trust them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cclnet.deploy.model import Prediction
from cclnet.runs.model import AbstentionCurve

NOTICE = (
    "Not a medical device. It is for research and teaching: it does not replace an examination, and nobody's care may "
    "be decided by it."
)
LEVELS = ((0.95, "Very sure"), (0.75, "Fairly sure"), (0.5, "Not very sure"), (0.0, "Unsure"))
_FEWEST = 20  # held-out images behind a share that is told


def sureness(confidence: float) -> str:
    """
    >>> [sureness(p) for p in (0.99, 0.8, 0.6, 0.3)]
    ['Very sure', 'Fairly sure', 'Not very sure', 'Unsure']
    """
    return next(words for least, words in LEVELS if confidence >= least)


def explanation(found: Prediction, multilabel: bool, calibrated: bool, curve: AbstentionCurve | None) -> list[str]:
    """What the confidence means, a sentence each."""
    sentences = [_several(found) if multilabel else _one(found)]
    if not calibrated:
        sentences.append("Its probabilities were not calibrated: read them as an order, not as chances.")
    elif not multilabel:
        sentences.append(f"Calibrated as it is, {in_hundred(found.confidence)} such images are of this class.")
    if curve is not None and (experience := _experience(found.confidence, curve)):
        sentences.append(experience)
    return sentences


def _one(found: Prediction) -> str:
    (_, first), (second, next_p) = found.top(2)
    if first < 0.5:
        return f"No class reaches a half; {second} comes next, with {percent(next_p)}. Let a person look at it."
    return f"Next comes {second}, with {percent(next_p)}."


def _several(found: Prediction) -> str:
    count = len(found.label.split("|")) if found.label else 0
    k = int(np.abs(found.probabilities - 0.5).argmin())
    close = f"{found.classes[k]}, with {percent(float(found.probabilities[k]))}"
    return f"{count} of {len(found.classes)} findings have a probability of at least a half. The closest call: {close}."


def _experience(confidence: float, curve: AbstentionCurve) -> str:
    """How often it was wrong where it was about as sure or surer, on images that it was not trained on."""
    point = int(np.flatnonzero(curve.threshold <= confidence)[0])  # the last keeps everything
    images = round(float(curve.coverage[point]) * curve.images)
    if images < _FEWEST:
        return ""
    wrong = percent(float(curve.risk[point])) if curve.risk[point] > 0 else "none"
    return (
        f"Of {curve.images:,} images that it had not been trained on, it was about this sure, or surer, of {images:,}, "
        f"and wrong about {wrong} of those."
    )


def in_hundred(p: float) -> str:
    """
    >>> in_hundred(0.934), in_hundred(0.998), in_hundred(0.002)
    ('about 93 in 100', 'more than 99 in 100', 'fewer than 1 in 100')
    """
    if p >= 0.995:
        return "more than 99 in 100"
    return "fewer than 1 in 100" if p < 0.005 else f"about {round(100 * p)} in 100"


def percent(p: float) -> str:
    """
    >>> percent(0.9341), percent(0.0004), percent(1.0), percent(0.0)
    ('93.4%', 'less than 0.1%', '100%', '0%')
    """
    if p in (0.0, 1.0):
        return f"{p:.0%}"
    if p < 0.001:
        return "less than 0.1%"
    return "more than 99.9%" if p > 0.999 else f"{100 * p:.1f}%"


def where(heat: npt.NDArray[np.float32]) -> str:
    """The place of the heat [h, w] in words, for those who do not see it.

    >>> where(np.array([[1, 0, 0], [0, 0, 0], [0, 0, 0]], np.float32))
    'in the upper left'
    >>> where(np.ones((3, 3), np.float32)), where(np.zeros((3, 3), np.float32))
    ('in the middle, or all over', 'nowhere')
    """
    strong = np.where(heat >= 0.5 * heat.max(), heat, 0)
    total = float(strong.sum())
    if total == 0:
        return "nowhere"
    height, width = heat.shape
    y = float((strong.sum(axis=1) @ (np.arange(height) + 0.5)) / (height * total))
    x = float((strong.sum(axis=0) @ (np.arange(width) + 0.5)) / (width * total))
    up = "upper" if y < 0.42 else "lower" if y > 0.58 else ""
    side = "left" if x < 0.42 else "right" if x > 0.58 else ""
    if up and side:
        return f"in the {up} {side}"
    if up:
        return f"in the {up} part"
    return f"on the {side}" if side else "in the middle, or all over"
