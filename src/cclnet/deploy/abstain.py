"""When to leave an image to a person: the confidence that keeps a chosen share of images, or of errors.

The curve is that of the run on images it was not trained on: keep the n most confident ones, look at their share of all
(coverage) and at how many of them are wrong (risk). An image is judged by its confidence: the probability of the
predicted class; where it may carry several labels, how sure the least sure decision is, ``min_k max(p_k, 1 - p_k)``,
and one wrong label makes it wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cclnet.errors import InputError

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


@dataclass(frozen=True)
class Curve:
    """Coverage and risk of keeping what is at least as confident as each threshold, most confident first, [B] each.

    Attributes:
        part, images: what it was measured on.
        independent: how many independent images those kept are worth, where groups (patients, lesions) are known.
    """

    split: str
    images: int
    threshold: Floats
    coverage: Floats
    risk: Floats
    independent: Floats | None = None

    def at(self, coverage: float | None = None, risk: float | None = None) -> int:
        """The point that keeps at least ``coverage`` of the images, or the most with at most ``risk`` wrong."""
        if (coverage is None) == (risk is None):
            raise InputError("give either a coverage or a risk to abstain by, and not both.")
        if coverage is not None:
            if not 0 < coverage <= 1:
                raise InputError(f"coverage is the share of images to keep, above 0 and at most 1; got {coverage:g}.")
            return int(np.searchsorted(self.coverage, coverage - 1e-9))
        assert risk is not None
        if not 0 <= risk < 1:
            raise InputError(f"risk is the share of errors to allow, from 0 to less than 1; got {risk:g}.")
        allowed = np.flatnonzero(self.risk <= risk)
        if len(allowed) == 0:
            least = int(self.risk.argmin())
            raise InputError(
                f"no threshold keeps the risk at {risk:.3g} on the {self.images:,} images of part '{self.split}': the "
                f"least is {self.risk[least]:.3g}, for {self.coverage[least]:.1%} of them. Allow that much, or choose "
                "a coverage."
            )
        return int(allowed[-1])

    def in_words(self, point: int) -> str:
        """What to expect at a point, with a 95% interval for its risk (Wilson): over groups where they are known."""
        kept, over = float(round(float(self.coverage[point]) * self.images)), ""
        if self.independent is not None:
            kept, over = float(self.independent[point]), " over patients or lesions"
        low, high = _wilson(float(self.risk[point]), kept)
        return (
            f"abstains below a confidence of {self.threshold[point]:.7g}: of {self.images:,} images of part "
            f"'{self.split}' that keeps {self.coverage[point]:.1%}, of which {self.risk[point]:.1%} are wrong (95% "
            f"interval {low:.1%} to {high:.1%}{over})"
        )

    def to_json(self) -> dict[str, Any]:
        rows = np.column_stack([self.threshold, self.coverage, self.risk])
        curve = {"split": self.split, "images": self.images, "columns": ["threshold", "coverage", "risk"],
                 "rows": [[float(f"{v:.12g}") for v in row] for row in rows]}  # fmt: skip
        if self.independent is not None:
            curve["independent"] = [float(f"{v:.6g}") for v in self.independent]
        return curve


def _wilson(share: float, count: float) -> tuple[float, float]:
    z = 1.959964
    centre, spread = share + z * z / (2 * count), z * np.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return tuple(float(np.clip((centre + s) / (1 + z * z / count), 0, 1)) for s in (-spread, spread))  # type: ignore[return-value]


def measure_curve(
    sure: Floats, right: npt.NDArray[np.bool_], part: str, groups: npt.NDArray[np.intp] | None = None
) -> Curve:
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
    return Curve(part, len(sure), between[shown], kept / len(sure), wrong[shown] / kept, worth)


def curve_of_run(folder: Path, temperature: float | None) -> Curve:
    """The curve of a run folder, from its predictions of the part that is reported."""
    from cclnet.evaluation.bootstrap import units_of
    from cclnet.evaluation.calibration import with_temperature
    from cclnet.evaluation.classification import decisions
    from cclnet.runs.folder import open_run

    run = open_run(folder)
    held_out = run.predictions.of_split(run.split)
    if run.split == "all":
        raise InputError(f"{folder}: predictions.csv names no held-out part (val, test) to choose a threshold on.")
    right = decisions(held_out) == held_out.labels  # a temperature changes no decision
    if temperature is not None:
        held_out = with_temperature(held_out, temperature)
    sure = confidence(held_out.probabilities, held_out.multilabel)
    units = units_of(held_out)
    groups = units.index if units.kind == "groups" else None
    return measure_curve(sure, right.all(axis=1) if held_out.multilabel else right, run.split, groups)


def curve_from_json(value: Any, where: Path) -> Curve:
    """The curve that an exported model.json carries, checked; earlier ones do not tell how many are independent."""
    try:
        rows = np.asarray(value["rows"], dtype=np.float64).reshape(-1, 3)
        worth = np.asarray(value["independent"], dtype=np.float64) if "independent" in value else None
        threshold, coverage, risk = np.ascontiguousarray(rows.T)
        curve = Curve(str(value["split"]), int(value["images"]), threshold, coverage, risk, worth)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{where}: 'thresholds' is not a curve of threshold, coverage and risk ({error}).") from error
    fine = len(rows) and ((rows >= 0) & (rows <= 1)).all() and (np.diff(curve.coverage) > 0).all()
    if not fine or curve.images < 1:
        raise InputError(f"{where}: 'thresholds' must hold shares in 0..1 with rising coverage.")
    if worth is not None and not (worth.shape == rows[:, 0].shape and ((worth > 0) & (worth <= curve.images)).all()):
        raise InputError(f"{where}: 'thresholds' must tell of each row how many independent images it is worth.")
    return curve
