"""The paper's figures from kept results: soft labels, softness over epochs, and the drift to uniform smoothing."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from cclnet.evaluation.similarity import agreement
from cclnet.files import make_folder, write_whole
from cclnet.functional import collapse_point
from cclnet.reproduce.experiments import BACKBONES, NO_FREEZE_RATES, TABLE2, PaperCell, no_freeze
from cclnet.reproduce.seeds import PaperResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = 128  # a palette: lines and maps look the same in a quarter of the bytes
SHOWN_RATES = (0.0005, 0.005, 0.05)
Named = list[tuple[str, PaperResult]]


def save_picture(figure: Figure, path: Path, dots: int = 110) -> None:
    """Write a figure as a small PNG, ``dots`` per inch. The same figure gives the same bytes."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dots, format="png", metadata={"Software": None})
    picture = Image.open(drawn).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    write_whole(path, lambda file: picture.save(file, format="PNG", optimize=True))


def write_figures(results: Path, found: Sequence[PaperResult]) -> list[Path]:
    """Write every figure whose runs have results into ``figures`` in the folder of results; returns their paths."""
    by_name = {result.cell.name: result for result in found}

    def learned(titles: dict[str, PaperCell]) -> Named:
        named = [(title, by_name.get(cell.name)) for title, cell in titles.items()]
        return [(title, result) for title, result in named if result is not None and result.soft_labels]

    rates = learned({f"{rate:g}": PaperCell(lr_ccl=rate) for rate in TABLE2})
    never_frozen = learned({f"{rate:g}": no_freeze(rate) for rate in NO_FREEZE_RATES})
    drawings: dict[str, tuple[Callable[[Named], Figure], Named]] = {
        "correlation-by-rate": (_matrices, learned({f"rate {r:g}": PaperCell(lr_ccl=r) for r in SHOWN_RATES})),
        "correlation-by-backbone": (_matrices, learned({title: PaperCell(b) for b, title in BACKBONES.items()})),
        "softness-over-epochs": (_softness, rates),
        "drift-without-freeze": (partial(_drift, frozen=rates), never_frozen),
    }
    paths = []
    for name, (draw, shown) in drawings.items():
        if shown:
            paths.append(make_folder(results / "figures") / f"{name}.png")
            save_picture(draw(shown), paths[-1])
    return paths


def _new(columns: int, width: float, height: float) -> tuple[Figure, Any]:
    """A figure with one row of axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _matrices(shown: Named) -> Figure:
    """Soft labels side by side on one scale, and their rank correlations."""
    figure, axes = _new(len(shown), 3.6 * len(shown) + 0.6, 4.3)
    highest = max(max(map(max, result.matrix)) for _, result in shown)
    for axis, (title, result) in zip(axes, shown, strict=True):
        drawn = _matrix(axis, result, highest)
        axis.set_title(f"{title}\nsoftness {result.final_softness:.3f}", fontsize=10)
    figure.colorbar(drawn, ax=axes, shrink=0.75)
    pairs = [
        f"{a} and {b} {agreement(first.matrix, second.matrix):+.2f}"
        for (a, first), (b, second) in itertools.combinations(shown, 2)
    ]
    frequency = [
        f"{title} {r.inverse_frequency_agreement:+.2f}"
        for title, r in shown
        if r.inverse_frequency_agreement is not None
    ]
    lines = [f"Rank correlation off the diagonal: {', '.join(pairs)}"] if pairs else []
    lines += [f"with inverse class frequency: {', '.join(frequency)}"] if frequency else []
    figure.suptitle("\n".join(lines), fontsize=9)
    return figure


def _matrix(axis: Axes, result: PaperResult, highest: float) -> Any:
    drawn = axis.imshow(result.matrix, vmin=0.0, vmax=highest, cmap="viridis")
    classes = result.classes
    axis.set_xticks(range(len(classes)), classes, rotation=60, fontsize=8)
    axis.set_yticks(range(len(classes)), classes, fontsize=8)
    for (row, column), value in np.ndenumerate(result.matrix):
        colour = "black" if value > 0.6 * highest else "white"
        axis.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=7)
    return drawn


def _softness(shown: Named) -> Figure:
    """Softness after each epoch at every learning rate of the head."""
    figure, (axis,) = _new(1, 7.5, 4.2)
    for title, result in shown:
        _curve(axis, result, title)
    _finish_curves(axis, len(shown[0][1].classes))
    axis.set_title("Softness over epochs (ResNet-18)", fontsize=10)
    return figure


def _curve(axis: Axes, result: PaperResult, title: str, style: str = "-") -> None:
    """Softness over epochs; a dot where the dictionary was frozen."""
    softness, frozen = result.softness or [], result.freeze_epoch
    line = axis.plot(range(1, len(softness) + 1), softness, style, label=title, linewidth=1.4)[0]
    if frozen is not None:
        axis.plot([frozen], [softness[frozen - 1]], "o", color=line.get_color(), markersize=5)


def _finish_curves(axis: Axes, classes: int) -> None:
    collapsed = collapse_point(classes)[1]
    axis.axhline(collapsed, color="grey", linestyle="--", linewidth=1)
    axis.annotate(f"collapse point {collapsed:.4f}", (0.99, collapsed), xycoords=("axes fraction", "data"),
                  ha="right", va="bottom", fontsize=8, color="dimgrey")  # fmt: skip
    axis.set_xlabel("epoch")
    axis.set_ylabel("softness: mean probability of the own class")
    axis.legend(title="learning rate of the head\n(dot: frozen)", fontsize=8, title_fontsize=8, frameon=False,
                loc="upper left", bbox_to_anchor=(1.0, 1.0))  # beside the curves  # fmt: skip
    axis.grid(alpha=0.3)


def _drift(never_frozen: Named, frozen: Named) -> Figure:
    """Without the freeze rule softness rises to the collapse point, and the rows become uniform smoothing."""
    figure, axes = _new(1 + len(never_frozen), 6.0 + 3.8 * len(never_frozen), 4.3)
    for rate, result in never_frozen:
        _curve(axes[0], result, f"{rate}, never frozen")
        if rate in dict(frozen):
            _curve(axes[0], dict(frozen)[rate], rate, "--")
    classes = len(never_frozen[0][1].classes)
    _finish_curves(axes[0], classes)
    axes[0].set_title("Without the freeze rule the labels drift", fontsize=10)
    highest = max(max(map(max, result.matrix)) for _, result in never_frozen)
    epsilon = collapse_point(classes)[0]
    uniform = (1 - epsilon) * np.eye(classes) + epsilon / classes
    for axis, (rate, result) in zip(axes[1:], never_frozen, strict=True):
        _matrix(axis, result, highest)
        distance = float(np.abs(np.asarray(result.matrix) - uniform).max())
        words = f"largest distance from uniform smoothing of {epsilon:.4f}: {distance:.4f}"
        axis.set_title(f"rate {rate}, last epoch\n{words}", fontsize=9)
    return figure
