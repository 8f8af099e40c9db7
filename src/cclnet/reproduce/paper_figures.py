"""The paper's figures from results: correlation matrices, softness over epochs, and the drift to uniform smoothing."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from cclnet.evaluation.similarity import agreement, inverse_frequency_agreement
from cclnet.files import write_whole
from cclnet.functional import collapse_point
from cclnet.reproduce.experiments import DRIFT_RATES, LOOKS, NEVER, Cell
from cclnet.reproduce.paper import BACKBONES, TABLE2
from cclnet.reproduce.seeds import Result, read_results
from cclnet.reproduce.similarity_tables import rows_of_looks, yardsticks
from cclnet.runs.predictions import Floats

# Figures as small PNG files.


if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = 128  # a palette: lines and maps look the same in a quarter of the bytes


def save_picture(figure: Figure, path: Path, dots: int = 110) -> None:
    """Write a figure, ``dots`` an inch. The same figure gives the same file, whatever wrote it."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dots, format="png", metadata={"Software": None})
    picture = Image.open(drawn).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    write_whole(path, lambda file: picture.save(file, format="PNG", optimize=True))


# How structure rises, fades and is held on real images: what the soft labels follow, epoch by epoch.


if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOKED, RARE = "#31688e", "#b5523b"


def looks_figure(results: Sequence[Result], backbone: str = "resnet18") -> Figure | None:
    """A panel a method, a line a seed; None before the yardstick and a method that learns labels are there."""
    from matplotlib.figure import Figure

    rows = rows_of_looks(results, backbone)
    measured = yardsticks(rows)
    shown = [(name, [r for r in own if r.soft_label_history]) for name, own in rows.items()]
    shown = [(name, own) for name, own in shown if own]
    if measured is None or not shown:
        return None
    figure = Figure(figsize=(2.8 * len(shown) + 0.6, 3.4), layout="constrained")
    axes = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
    own_rarity = inverse_frequency_agreement(measured.balanced, shown[0][1][0].class_counts)
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
    history, held = result.soft_label_history, result.freeze_epoch
    assert history is not None  # only those that have one are shown
    counts = result.class_counts
    for colour, values in (
        (LOOKED, [agreement(matrix, yardstick) for matrix in history["matrices"]]),
        (RARE, [inverse_frequency_agreement(matrix, counts) for matrix in history["matrices"]]),
    ):
        axis.plot(history["epochs"], values, color=colour, alpha=0.8, linewidth=1.3)
        if held is not None:
            near = min(range(len(values)), key=lambda i: abs(history["epochs"][i] - held))
            axis.plot(history["epochs"][near], values[near], "o", color=colour, markersize=5)


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN_RATES = (0.0005, 0.005, 0.05)


def write_figures(results: Path) -> list[Path]:
    """Write every figure whose runs have results, into ``figures`` beside them; returns their paths."""
    found = {result.cell.name: result for result in read_results(results)}
    made = {
        "correlation-by-rate": _matrices([(f"rate {rate:g}", _of(found, Cell(lr_ccl=rate))) for rate in SHOWN_RATES]),
        "correlation-by-backbone": _matrices([(title, _of(found, Cell(name))) for name, title in BACKBONES.items()]),
        "softness-over-epochs": _softness([(f"{rate:g}", _of(found, Cell(lr_ccl=rate))) for rate in TABLE2]),
        "drift-without-freeze": _drift(found),
        "looks-over-epochs": looks_figure(list(found.values())),
    }
    paths = []
    for name, figure in made.items():
        if figure is not None:
            folder = results / "figures"
            folder.mkdir(parents=True, exist_ok=True)
            save_picture(figure, folder / f"{name}.png")
            paths.append(folder / f"{name}.png")
    return paths


def _of(found: dict[str, Result], cell: Cell) -> Result | None:
    return found.get(cell.name)


def _new(rows: int, columns: int, width: float, height: float) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _matrices(shown: Sequence[tuple[str, Result | None]]) -> Figure | None:
    """Soft labels side by side, one scale for all, and how far they agree."""
    there = [(title, result) for title, result in shown if result is not None and result.soft_labels]
    if not there:
        return None
    figure, axes = _new(1, len(there), 3.6 * len(there) + 0.6, 4.3)
    highest = max(max(map(max, result.matrix)) for _, result in there)
    for axis, (title, result) in zip(axes[0], there, strict=True):
        drawn = _matrix(axis, result.matrix, result.classes, highest)
        axis.set_title(f"{title}\nsoftness {result.final_softness:.3f}", fontsize=10)
    figure.colorbar(drawn, ax=axes[0], shrink=0.75)
    figure.suptitle(_agreement_in_words(there), fontsize=9)
    return figure


def _agreement_in_words(there: Sequence[tuple[str, Result]]) -> str:
    pairs = [
        f"{a} and {b} {agreement(first.matrix, second.matrix):+.2f}"
        for (a, first), (b, second) in itertools.combinations(there, 2)
    ]
    rarity = [
        f"{title} {result.inverse_frequency_agreement:+.2f}"
        for title, result in there
        if result.inverse_frequency_agreement is not None
    ]
    lines = [f"Rank correlation off the diagonal: {', '.join(pairs)}"] if pairs else []
    lines += [f"with class rarity: {', '.join(rarity)}"] if rarity else []
    return "\n".join(lines)


def _matrix(axis: Axes, matrix: Sequence[Sequence[float]], classes: Sequence[str], highest: float) -> Any:
    drawn = axis.imshow(matrix, vmin=0.0, vmax=highest, cmap="viridis")
    axis.set_xticks(range(len(classes)), classes, rotation=60, fontsize=8)
    axis.set_yticks(range(len(classes)), classes, fontsize=8)
    for row, values in enumerate(matrix):
        for column, value in enumerate(values):
            colour = "black" if value > 0.6 * highest else "white"
            axis.text(column, row, f"{value:.2f}".lstrip("0"), ha="center", va="center", color=colour, fontsize=7)
    return drawn


def _softness(shown: Sequence[tuple[str, Result | None]]) -> Figure | None:
    """Softness after each epoch at every rate of the head; a dot where the dictionary was frozen."""
    there = [(title, result) for title, result in shown if result is not None and result.softness]
    if not there:
        return None
    figure, axes = _new(1, 1, 7.5, 4.2)
    axis = axes[0][0]
    for title, result in there:
        _curve(axis, result, title)
    _finish(axis, len(there[0][1].classes), "learning rate of the head")
    axis.set_title("Softness over epochs (ResNet-18)", fontsize=10)
    return figure


def _curve(axis: Axes, result: Result, title: str, style: str = "-") -> None:
    softness, frozen = result.softness or [], result.freeze_epoch
    line = axis.plot(range(1, len(softness) + 1), softness, style, label=title, linewidth=1.4)[0]
    if frozen is not None:
        axis.plot([frozen], [softness[frozen - 1]], "o", color=line.get_color(), markersize=5)


def _finish(axis: Axes, classes: int, legend: str) -> None:
    collapsed = collapse_point(classes)[1]
    axis.axhline(collapsed, color="grey", linestyle="--", linewidth=1)
    axis.annotate(f"collapse point {collapsed:.4f}", (0.99, collapsed), xycoords=("axes fraction", "data"),
                  ha="right", va="bottom", fontsize=8, color="dimgrey")  # fmt: skip
    axis.set_xlabel("epoch")
    axis.set_ylabel("softness: mean probability of the own class")
    axis.legend(title=f"{legend}\n(dot: frozen)", fontsize=8, title_fontsize=8, frameon=False,
                loc="upper left", bbox_to_anchor=(1.0, 1.0))  # beside the curves, none of which it hides  # fmt: skip
    axis.grid(alpha=0.3)


def _drift(found: dict[str, Result]) -> Figure | None:
    """With the freeze rule off: softness climbs to the collapse point, and the rows become uniform smoothing."""
    off = {"method_settings": {"patience": NEVER}}
    there = [(rate, r) for rate in DRIFT_RATES
             if (r := _of(found, Cell(lr_ccl=rate, variant="no-freeze", changes=off))) is not None]  # fmt: skip
    if not there:
        return None
    figure, axes = _new(1, 1 + len(there), 6.0 + 3.8 * len(there), 4.3)
    axis = axes[0][0]
    for rate, result in there:
        _curve(axis, result, f"{rate:g}, never frozen")
        if (frozen := _of(found, Cell(lr_ccl=rate))) is not None:
            _curve(axis, frozen, f"{rate:g}", "--")
    _finish(axis, len(there[0][1].classes), "learning rate of the head")
    axis.set_title("Without the freeze rule the labels drift", fontsize=10)
    highest = max(max(map(max, result.matrix)) for _, result in there)
    for place, (rate, result) in zip(axes[0][1:], there, strict=True):
        matrix, classes = result.matrix, result.classes
        _matrix(place, matrix, classes, highest)
        place.set_title(f"rate {rate:g}, last epoch\n{_distance_in_words(matrix)}", fontsize=9)
    return figure


def _distance_in_words(matrix: Sequence[Sequence[float]]) -> str:
    """How far the rows are from what the proposition says they become."""
    import numpy as np

    epsilon = collapse_point(len(matrix))[0]
    uniform = (1 - epsilon) * np.eye(len(matrix)) + epsilon / len(matrix)
    furthest = float(np.abs(np.asarray(matrix) - uniform).max())
    return f"furthest from uniform smoothing of {epsilon:.4f}: {furthest:.4f}"
