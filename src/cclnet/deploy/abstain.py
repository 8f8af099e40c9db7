"""When to leave an image to a person: the confidence that keeps a chosen share of images, or of errors.

The curve is that of the run on images it was not trained on: keep the n most confident ones, look at their share of all
(coverage) and at how many of them are wrong (risk). An image is judged by its confidence: the probability of the
predicted class; where it may carry several labels, how sure the least sure decision is, ``min_k max(p_k, 1 - p_k)``,
and one wrong label makes it wrong.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from cclnet.errors import InputError
from cclnet.runs.model import AbstentionCurve

Floats = npt.NDArray[np.float64]
POINTS = 1000
SAME = 1e-6  # confidences nearer than this are taken for equal: engines differ by as much


def confidence(probabilities: Floats, multilabel: bool) -> Floats:
    """How sure each image's decision is, [N] from [N, K].

    >>> confidence(np.array([[0.9, 0.1], [0.6, 0.4]]), multilabel=True).tolist()
    [0.9, 0.6]
    """
    if multilabel:
        return np.maximum(probabilities, 1 - probabilities).min(axis=1)
    return probabilities.max(axis=1)


def measure_curve(
    sure: Floats, right: npt.NDArray[np.bool_], part: str, groups: npt.NDArray[np.intp] | None = None
) -> AbstentionCurve:
    """The curve of N decisions from their confidence and whether they are right; equally confident ones go together.

    A threshold lies half-way between what it keeps and what it does not, so that neither rounding nor another engine
    moves an image across it; the last keeps everything. ``groups`` [N] says which images are of one patient or lesion.

    >>> curve = measure_curve(np.array([0.9, 0.5, 0.8, 0.5]), np.array([True, False, True, True]), "val")
    >>> curve.threshold.round(3).tolist(), curve.coverage.tolist(), curve.risk.tolist()
    ([0.85, 0.65, 0.0], [0.25, 0.5, 1.0], [0.0, 0.0, 0.25])
    """
    from cclnet.evaluation.statistics import independent_images

    order = np.argsort(-sure, kind="stable")
    sure, wrong = sure[order], np.cumsum(~right[order])
    last = np.flatnonzero(np.append(sure[:-1] - sure[1:] > SAME, True))  # of each block of equal confidence
    shown = last[np.unique(np.linspace(0, len(last) - 1, min(POINTS, len(last))).round().astype(np.intp))]
    kept = shown + 1
    between = np.append((sure[:-1] + sure[1:]) / 2, 0.0)
    worth = None if groups is None else independent_images(~right[order], groups[order])[shown]
    return AbstentionCurve(part, len(sure), between[shown], kept / len(sure), wrong[shown] / kept, worth)


def curve_of_run(folder: Path, temperature: float | None) -> AbstentionCurve:
    """The curve of a run folder, from its predictions of the part that is reported."""
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
    sure = confidence(held_out.probabilities, held_out.multilabel)
    units = units_of(held_out)
    groups = units.index if units.kind == "groups" else None
    return measure_curve(sure, right.all(axis=1) if held_out.multilabel else right, run.split, groups)
