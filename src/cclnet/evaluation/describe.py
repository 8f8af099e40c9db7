"""What scores.json and comparison.json say alike: numbers with intervals, the part, the draws, the versions."""

from __future__ import annotations

import math
from importlib.metadata import version
from typing import Any

import numpy as np

import cclnet
from cclnet.evaluation.bootstrap import LEVEL, Units, interval, units_of
from cclnet.predictions import Floats, Predictions


def number(
    value: float,
    drawn: Floats,
    units: Units,
    bounds: tuple[float, float] = (0.0, 1.0),
    trials: int | None = None,
    biased: bool = False,
) -> dict[str, float | None]:
    """A number with interval, null where undefined."""
    low, high = interval(value, drawn, units.count, bounds, trials, biased=biased)
    return {name: None if math.isnan(x) else float(x) for name, x in (("value", value), ("low", low), ("high", high))}


def part_of(predictions: Predictions, part: str) -> dict[str, Any]:
    """The "part" of scores.json and comparison.json."""
    reported = predictions.of_part(part)
    units = units_of(reported)
    counts = reported.class_counts
    of_parts = {"all": len(predictions)}
    if predictions.parts is not None:
        names, sizes = np.unique(predictions.parts, return_counts=True)
        of_parts = dict(zip(names.tolist(), sizes.tolist(), strict=True))
    return {
        "name": part,
        "images": len(reported),
        "groups": units.count if units.kind == "groups" else None,
        "class_counts": counts.tolist(),
        "missing_classes": [name for name, count in zip(reported.classes, counts, strict=True) if count == 0],
        "images_of_parts": of_parts,
    }


def intervals_of(units: Units, draws: int, seed: int) -> dict[str, Any]:
    """The "intervals" of scores.json and comparison.json."""
    words = f"{LEVEL:.0%} intervals from {draws:,} bootstrap draws of {units.count:,} {units.kind}."
    if units.kind == "images":
        words += " No groups are known: images of one lesion or patient would make these intervals too narrow."
    return {"level": LEVEL, "draws": draws, "seed": seed, "over": units.kind, "units": units.count, "in_words": words}


def versions() -> dict[str, str]:
    packages = ("numpy", "scikit-learn", "scipy", "pandas")
    return {"cclnet": cclnet.__version__} | {name: version(name) for name in packages}
