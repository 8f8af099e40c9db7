"""When to refer an image to a person: the confidence threshold that keeps a chosen share of images, or of errors.

The curve is measured on images that the run was not trained on: of the n most confident images, their share of all
(coverage) and the share of them that is wrong (risk). The confidence is the probability of the predicted class. With
several labels it is that of the least confident decision, ``min_k max(p_k, 1 - p_k)``, and one wrong label makes the
image wrong.

SciPy and pandas are imported where they are used, so that prediction does without them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from cclnet.errors import InputError
from cclnet.runs.model import AbstentionCurve

Floats = npt.NDArray[np.float64]
POINTS = 1000
TOLERANCE = 1e-6  # confidences that differ by less count as equal: engines differ by as much


def confidence(probabilities: Floats, multilabel: bool) -> Floats:
    """The confidence of each image, [N] from [N, K].

    >>> confidence(np.array([[0.9, 0.1], [0.6, 0.4]]), multilabel=True).tolist()
    [0.9, 0.6]
    """
    if multilabel:
        return np.maximum(probabilities, 1 - probabilities).min(axis=1)
    return probabilities.max(axis=1)


def measure_curve(
    confidences: Floats, right: npt.NDArray[np.bool_], split: str, groups: npt.NDArray[np.intp] | None = None
) -> AbstentionCurve:
    """The curve of N decisions from their confidence and correctness; equally confident ones form one point.

    A threshold is half-way between the last image it keeps and the next, so that neither rounding nor another engine
    moves an image across it; the last one keeps everything. ``groups`` [N]: the patient or lesion of each image.

    >>> curve = measure_curve(np.array([0.9, 0.5, 0.8, 0.5]), np.array([True, False, True, True]), "val")
    >>> curve.threshold.round(3).tolist(), curve.coverage.tolist(), curve.risk.tolist()
    ([0.85, 0.65, 0.0], [0.25, 0.5, 1.0], [0.0, 0.0, 0.25])
    """
    from cclnet.evaluation.statistics import independent_images

    order = np.argsort(-confidences, kind="stable")
    sorted_, wrong = confidences[order], np.cumsum(~right[order])
    last = np.flatnonzero(np.append(sorted_[:-1] - sorted_[1:] > TOLERANCE, True))  # of each block of equal confidence
    shown = last[np.unique(np.linspace(0, len(last) - 1, min(POINTS, len(last))).round().astype(np.intp))]
    kept = shown + 1
    between = np.append((sorted_[:-1] + sorted_[1:]) / 2, 0.0)
    independent = None if groups is None else independent_images(~right[order], groups[order])[shown]
    return AbstentionCurve(split, len(order), between[shown], kept / len(order), wrong[shown] / kept, independent)


def curve_of_run(folder: Path, temperature: float | None) -> AbstentionCurve:
    """The curve of a run folder, from its predictions of the reported split."""
    from cclnet.evaluation.bootstrap import units_of
    from cclnet.evaluation.calibration import with_temperature
    from cclnet.evaluation.classification import decisions
    from cclnet.runs.folder import open_run

    run = open_run(folder)
    held_out = run.predictions.of_split(run.split)
    if run.split == "all":
        raise InputError(f"{folder}: predictions.csv names no held-out split (val, test) to choose a threshold on.")
    right = decisions(held_out) == held_out.labels  # a temperature changes no decision
    if temperature is not None:
        held_out = with_temperature(held_out, temperature)
    confidences, units = confidence(held_out.probabilities, held_out.multilabel), units_of(held_out)
    groups = units.index if units.kind == "groups" else None
    return measure_curve(confidences, right.all(axis=1) if held_out.multilabel else right, run.split, groups)
