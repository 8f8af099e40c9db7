"""What a reader of scores must know before believing them, in whole sentences."""

from __future__ import annotations

from typing import Any

import numpy as np

from cclnet.evaluation.bootstrap import Units, units_with
from cclnet.evaluation.calibration import SMALLEST
from cclnet.predictions import Predictions

FEW_UNITS = 10  # a class on fewer groups (or images) than this has no interval worth the name


def cautions(judged: dict[str, Any], reported: Predictions, units: Units, fitting: Predictions | None) -> list[str]:
    """The "warnings" of a judgement; ``fitting`` is what the temperature was fitted on, None when cross-fitted."""
    part, found = judged["part"], []
    if part["name"] == "all" and reported.parts is not None:
        found.append("The file names no part 'test' or 'val', so all of its images are reported.")
    if missing := part["missing_classes"]:
        found.append(f"No image of {', '.join(missing)} in the reported part: left out of every macro mean.")
        taken = sum(row["predicted"] for row in judged["per_class"] if row["class"] in missing)
        if taken and not reported.multilabel:
            found.append(f"The model took {_images(taken)} for a class that is not in the reported part.")
    behind = dict(zip(reported.classes, units_with(reported.targets == 1, units).tolist(), strict=True))
    if few := [f"{name} ({count})" for name, count in behind.items() if 0 < count < FEW_UNITS]:
        found.append(
            f"Fewer than {FEW_UNITS} {units.kind} of {', '.join(few)}: its own scores, and macro means through it, can "
            "move further than their intervals say."
        )
    if undefined := [name for name, x in judged["scores"].items() if x["value"] is None]:
        found.append(f"Undefined on these images: {', '.join(undefined)}.")
    if judged["leak"] and judged["leak"]["images"]:
        found.append(judged["leak"]["in_words"] + " Scores on new patients will be lower.")
    if fitting is not None and reported.groups is not None and fitting.groups is not None:
        shared = int(np.isin(reported.groups, fitting.groups[fitting.groups != ""]).sum())
        if shared:
            found.append(f"The temperature was fitted on groups that are reported as well ({_images(shared)}).")
    impossible = int((reported.probabilities[reported.targets == 1] == 0).sum())
    if impossible:
        found.append(f"The true class had probability 0 on {_images(impossible)}; the nll counts it as {SMALLEST:.1g}.")
    follows = (judged["correlation"] or {}).get("rarity_agreement")
    if follows is not None and follows >= 0.7:
        found.append(
            f"The learned matrix mostly follows how rare the classes are (rank correlation {follows:.2f}), which says "
            "little about how alike they look."
        )
    return found


def _images(count: int) -> str:
    return f"{count:,} image{'' if count == 1 else 's'}"
