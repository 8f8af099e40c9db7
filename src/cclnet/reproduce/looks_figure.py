"""How structure rises, fades and is held on real images: what the soft labels follow, epoch by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cclnet.evaluation.correlation import agreement, rarity_agreement
from cclnet.predictions import Floats
from cclnet.reproduce.looks import rows_of_looks, yardsticks
from cclnet.reproduce.looks_cells import LOOKS
from cclnet.reproduce.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOKED, RARE = "#31688e", "#b5523b"


def looks_figure(results: Sequence[Result], backbone: str = "resnet18") -> Figure | None:
    """A panel a method, a line a seed; None before the yardstick and a method that learns labels are there."""
    from matplotlib.figure import Figure

    rows = rows_of_looks(results, backbone)
    measured = yardsticks(rows)
    shown = [(name, [r for r in own if r.course]) for name, own in rows.items()]
    shown = [(name, own) for name, own in shown if own]
    if measured is None or not shown:
        return None
    figure = Figure(figsize=(2.8 * len(shown) + 0.6, 3.4), layout="constrained")
    axes = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
    own_rarity = rarity_agreement(measured.balanced, shown[0][1][0].content["class_counts"])
    for axis, (name, own) in zip(axes, shown, strict=True):
        axis.axhline(0, color="grey", linewidth=0.6)
        axis.axhline(own_rarity, color=RARE, linestyle=":", linewidth=1.2)
        for result in own:
            _curves(axis, result, measured.balanced)
        axis.set_title(LOOKS[name], fontsize=10)
        axis.set_xlabel("epoch")
    axes[0].set_ylabel("rank correlation")
    told = "Soft labels follow the yardstick (blue) or class rarity (red; dotted: that of the yardstick); a dot: held"
    figure.suptitle(told, fontsize=10)
    return figure


def _curves(axis: Any, result: Result, yardstick: Floats) -> None:
    course, held = result.course, result.content["freeze_epoch"]
    assert course is not None  # only those that have one are shown
    counts = result.content["class_counts"]
    for colour, values in (
        (LOOKED, [agreement(matrix, yardstick) for matrix in course["matrices"]]),
        (RARE, [rarity_agreement(matrix, counts) for matrix in course["matrices"]]),
    ):
        axis.plot(course["epochs"], values, color=colour, alpha=0.8, linewidth=1.3)
        if held is not None:
            near = min(range(len(values)), key=lambda i: abs(course["epochs"][i] - held))
            axis.plot(course["epochs"][near], values[near], "o", color=colour, markersize=5)
