"""Figures of the reports: charts as inline SVG, tables of matrices, and the most frequent confusions.

Colours, dashes and fonts come from page.css through class names, so that one figure serves light, dark and print. No
element has an id, so that any number of charts share a page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.ticker import LogLocator, MaxNLocator
from PIL import Image
from scipy import stats

from cclnet.data.image_io import data_uri
from cclnet.report.text import count_text, value_text
from cclnet.runs.scores import CalibrationStage

Point = tuple[float, float]
Records = Sequence[Mapping[str, Any]]
Floats = npt.NDArray[np.float64]

STYLES = tuple(f"s{i}" for i in range(1, 7))  # colours and dashes of page.css
WIDTH = 380  # of every chart, in units of the SVG
MAX_LABEL = 56  # characters that fit into that width
MAX_CELLS = 30  # classes up to which every cell is written out; beyond, the matrix is a picture
MAX_SHARES = 12  # classes up to which a cell has room for its count and its share
FULL_COLOUR = 4.0  # ratio to the uniform weight from which the colour gets no stronger; below uniform, its inverse
FULL_BAR = 16.0  # the same for the length of a bar


@dataclass(frozen=True)
class Axis:
    """One direction of a chart: its range, its label, and how its values are written."""

    low: float
    high: float
    label: str = ""
    percent: bool = False
    log: bool = False
    whole: bool = False  # ticks at whole numbers only: epochs
    bare: bool = False  # neither ticks nor grid: the rows of a list

    @classmethod
    def around(
        cls, values: Iterable[float], label: str, *, percent: bool = False, log: bool = False, zero: bool = False
    ) -> Axis:
        """An axis that covers all finite values with a margin; ``zero``: it also covers zero."""
        kept = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
        low, high = min(kept), max(kept)
        if zero:
            low, high = min(low, 0.0), max(high, 0.0)
        if log:
            return cls(low / 2, high * 2, label, percent, log)
        margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        starts, ends = zero and low == 0 < high, zero and low < 0 == high  # no margin beyond zero
        return cls(low if starts else low - margin, high if ends else high + margin, label, percent)

    def position(self, value: float) -> float:
        """Position of a value, 0 at the low end and 1 at the high end."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        return ((math.log(value) if self.log else value) - low) / (high - low)

    def ticks(self) -> list[tuple[float, str]]:
        if self.bare:
            return []
        locator = LogLocator() if self.log else MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], integer=self.whole)
        slack = 1e-9 * (self.high - self.low)
        low, high = self.low - slack, self.high + slack
        return [(float(v), self._text(v)) for v in locator.tick_values(self.low, self.high) if low <= v <= high]

    def _text(self, value: float) -> str:
        rounded = round(100 * value if self.percent else value, 10) + 0.0  # no -0
        return (f"{rounded:g}" + ("%" if self.percent else "")).replace("-", "−")


class Chart:
    """A frame with two axes; marks are painted in the order they are added. ``alt`` is the text alternative."""

    def __init__(self, x: Axis, y: Axis, alt: str, height: int = 250) -> None:
        self.x, self.y = x, y
        self.left, self.right = (10 if y.bare else 46), WIDTH - 14
        self.top, self.bottom = 22, height - 42
        attributes = {"class": "chart", "viewBox": f"0 0 {WIDTH} {height}", "role": "img", "aria-label": alt}
        self.root = Element("svg", attributes)
        for value, text in x.ticks():
            self._segment(self._x(value), self.top, self._x(value), self.bottom, "grid")
            self.text(self._x(value), self.bottom + 15, text, "middle", "tick")
        for value, text in y.ticks():
            self._segment(self.left, self._y(value), self.right, self._y(value), "grid")
            self.text(self.left - 6, self._y(value) + 4, text, "end", "tick")
        self._segment(self.left, self.bottom, self.right, self.bottom, "axis")
        self.text((self.left + self.right) / 2, height - 8, x.label, "middle", "label")
        if y.label:
            self.text(4, 13, y.label, "start", "label")

    def line(self, points: Sequence[Point], style: str) -> None:
        """A line through the points; those that are not finite (or not positive on a logarithmic axis) are left out."""
        shown = [(x, y) for x, y in points if _fits(self.x, x) and _fits(self.y, y)]
        if shown:
            path = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in shown)
            SubElement(self.root, "polyline", {"class": f"line {style}", "points": path})
        if len(shown) == 1:
            self.dot(*shown[0], style)

    def dot(self, x: float, y: float, style: str, radius: float = 4.0, title: str = "") -> None:
        centre = {"cx": f"{self._x(x):.1f}", "cy": f"{self._y(y):.1f}", "r": f"{radius:.1f}"}
        element = SubElement(self.root, "circle", {"class": f"dot {style}", **centre})
        if title:
            SubElement(element, "title").text = title

    def segment(self, start: Point, end: Point, style: str) -> None:
        (x1, y1), (x2, y2) = start, end
        self._segment(self._x(x1), self._y(y1), self._x(x2), self._y(y2), style)

    def level(self, y: float, label: str) -> None:
        """A horizontal line across the chart with its label at the right end, on the side that has more room."""
        self._segment(self.left, self._y(y), self.right, self._y(y), "mark")
        self.text(self.right, self._y(y) + (14 if self.y.position(y) > 0.5 else -5), label, "end")

    def moment(self, x: float, label: str) -> None:
        """A vertical line with its label above the frame, towards the side that has more room."""
        self._segment(self._x(x), self.top, self._x(x), self.bottom, "mark")
        self.text(self._x(x), self.top - 6, label, "end" if self.x.position(x) > 0.5 else "start")

    def row_label(self, y: float, label: str) -> None:
        """A label at the left end of a row, above the marks at ``y``; a label that is cut has a tooltip."""
        shown = label if len(label) <= MAX_LABEL else label[: MAX_LABEL - 1] + "…"
        element = self.text(self.left, self._y(y) - 9, shown, "start", "row")
        if shown != label:
            SubElement(element, "title").text = label

    def text(self, x: float, y: float, text: str, anchor: str, style: str = "note") -> Element:
        """Text at a position in the units of the SVG, not of the axes."""
        position = {"x": f"{x:.1f}", "y": f"{y:.1f}"}
        element = SubElement(self.root, "text", {"class": style, **position, "text-anchor": anchor})
        element.text = text
        return element

    def markup(self) -> Markup:
        return Markup(tostring(self.root, encoding="unicode"))  # ElementTree has escaped every text and attribute

    def _segment(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
        SubElement(self.root, "line", {"class": style, **{k: f"{v:.1f}" for k, v in ends.items()}})

    def _x(self, value: float) -> float:
        return self.left + self.x.position(value) * (self.right - self.left)

    def _y(self, value: float) -> float:
        return self.bottom - self.y.position(value) * (self.bottom - self.top)


def _fits(axis: Axis, value: float) -> bool:
    return math.isfinite(value) and (value > 0 or not axis.log)


@dataclass(frozen=True)
class Figure:
    """A chart with title, caption and legend (pairs of style and name)."""

    title: str
    svg: Markup
    caption: str
    legend: tuple[tuple[str, str], ...] = ()


def reliability(stage: CalibrationStage, title: str, unit: str = "images") -> Figure:
    """Accuracy against confidence, one dot per bin, its area proportional to the number of images (or other units).
    The stalk to the diagonal is the gap of the bin in the calibration error."""
    bins = stage.reliability
    total = sum(b.images for b in bins) or 1
    ece = value_text(stage.scores["ece"].value, "ece")
    listed = "; ".join(f"confidence {b.confidence:.0%}, accuracy {b.accuracy:.0%}, {b.images} {unit}" for b in bins)
    alt = f"{title}: accuracy against confidence in {len(bins)} bins, calibration error {ece}. {listed}."
    chart = Chart(Axis(0, 1, "Confidence", percent=True), Axis(0, 1, "Accuracy", percent=True), alt, height=300)
    chart.segment((0, 0), (1, 1), "mark")
    for b in bins:
        style = "s2" if b.confidence > b.accuracy else "s1"
        chart.segment((b.confidence, b.confidence), (b.confidence, b.accuracy), f"stalk {style}")
        tooltip = f"{b.images:,} {unit}, mean confidence {b.confidence:.1%}, accuracy {b.accuracy:.1%}"
        chart.dot(b.confidence, b.accuracy, f"bubble {style}", 2.5 + 14 * math.sqrt(b.images / total), tooltip)
    legend = (("s2 patch", "overconfident"), ("s1 patch", "underconfident"))
    return Figure(title, chart.markup(), f"Calibration error (ECE) {ece}.", legend)


def risk_coverage(before: CalibrationStage, after: CalibrationStage | None, unit: str = "images") -> Figure:
    """Error rate among the most confident images (or other units) against the share that is kept."""
    curves = [("as trained", before)] + ([("calibrated", after)] if after else [])
    lines = [[(p.coverage, p.risk) for p in stage.risk_coverage] for _, stage in curves]
    highest = max((risk for line in lines for _, risk in line), default=0.0)
    at = "; ".join(f"keeping {c:.0%}: {r:.1%} wrong" for c, r in (kept_at(before, share) for share in (0.5, 0.8, 1.0)))
    chart = Chart(
        Axis(0, 1, f"Share of {unit} kept, most confident first", percent=True),
        Axis(0, max(1.08 * highest, 0.01), "Wrong among those kept", percent=True),
        f"Error rate against the share of {unit} kept. {at}.",
        height=300,
    )
    for line, style in zip(lines, STYLES, strict=False):
        chart.line(line, style)
    names = [f"{name}, area {value_text(stage.scores['aurc'].value, 'aurc')}" for name, stage in curves]
    caption = f"Lower is better. At the far left few {unit} are kept, so the curve is noisy."
    return Figure("Risk against coverage", chart.markup(), caption, tuple(zip(STYLES, names, strict=False)))


def kept_at(stage: CalibrationStage, share: float) -> Point:
    """Coverage and risk of the first point of the risk-coverage curve that keeps at least this share of the images."""
    curve = stage.risk_coverage
    found = next((p for p in curve if p.coverage >= share - 1e-9), curve[-1])
    return found.coverage, found.risk


def training_curves(records: Records, collapse: float | None) -> list[Figure]:
    """Losses, loss terms, validation scores, learning rates and softness over the epochs, as far as recorded."""
    names = list(dict.fromkeys(name for record in records for name in record))
    scores = [name for name in names if name.startswith("val_") and name != "val_loss"][: len(STYLES)]
    loss = "Total training loss, and cross entropy on the validation split."
    rates = "Learning rate of the network, and of the parameters of the method if it has any."
    found = [
        _curves(records, ["loss", "val_loss"], "Loss", loss),
        _curves(records, loss_terms(records), "Terms of the training loss", "The training loss is their sum."),
        _curves(records, scores, "Validation", "Scores on the validation split.", percent=True),
        _curves(records, ["lr", "lr_method"], "Learning rate", rates, log=True),
        _softness(records, collapse),
    ]
    return [figure for figure in found if figure is not None]


def loss_terms(records: Records) -> list[str]:
    """Names of the loss terms: the keys between "loss" and "lr". Older runs have diagnostics there, softness first."""
    names = list(dict.fromkeys(name for record in records for name in record))
    after_loss = names[names.index("loss") + 1 :] if "loss" in names else []
    terms = list(takewhile(lambda name: name not in ("softness", "lr") and not name.startswith("val_"), after_loss))
    return terms[: len(STYLES)] if len(terms) > 1 else []  # a single term is the loss itself


def series(records: Records, name: str) -> list[Point]:
    """The finite values under a name, each with its epoch."""
    numbers = [(float(r["epoch"]), r[name]) for r in records if isinstance(r.get(name), (int, float))]
    return [(epoch, float(value)) for epoch, value in numbers if math.isfinite(value)]


def _curves(
    records: Records, names: Sequence[str], title: str, caption: str, percent: bool = False, log: bool = False
) -> Figure | None:
    plain = {"lr": "network", "lr_method": "method", "loss": "training", "val_loss": "validation"}
    found = {name: points for name in names if (points := series(records, name))}
    lines = {plain.get(name, name.removeprefix("val_").replace("_", " ")): points for name, points in found.items()}
    if not lines:
        return None
    ends = "; ".join(
        f"{name}: {points[0][1]:.4g} at epoch {points[0][0]:.0f}, {points[-1][1]:.4g} at epoch {points[-1][0]:.0f}"
        for name, points in lines.items()
    )
    values = [value for points in lines.values() for _, value in points]
    y = Axis.around(values, "", percent=percent, log=log, zero=not (log or percent))
    chart = Chart(_epochs(records), y, f"{title} over {len(records)} epochs. {ends}.")
    for points, style in zip(lines.values(), STYLES, strict=False):
        chart.line(points, style)
    return Figure(title, chart.markup(), caption, tuple(zip(STYLES, lines, strict=False)))


def _softness(records: Records, collapse: float | None) -> Figure | None:
    """Mean of the soft labels' diagonal over the epochs; for a learned dictionary also the collapse point and the epoch
    at which it was frozen."""
    points = series(records, "softness")
    if not points:
        return None
    learned = any("frozen" in record for record in records)
    frozen = next((epoch for epoch, flag in series(records, "frozen") if flag), None)
    level = [collapse] if learned and collapse is not None else []
    alt = [f"Softness over {len(records)} epochs, from {points[0][1]:.3f} to {points[-1][1]:.3f}."]
    alt += [f"The collapse point is {level[0]:.3f}."] if level else []
    alt += [f"The soft labels were frozen at epoch {frozen:.0f}."] if frozen is not None else []
    alt += ["The soft labels were never frozen."] if learned and frozen is None else []
    values = [value for _, value in points] + level
    span = [max(values) - 0.1]  # so that a change in the fourth decimal does not fill the chart
    chart = Chart(_epochs(records), Axis.around(values + span, ""), " ".join(alt))
    chart.line(points, "s1")
    if level:
        chart.level(level[0], "collapse point")
    if frozen is not None:
        chart.moment(frozen, f"frozen at {frozen:.0f}")
    caption = "Mean weight that a soft label leaves on its own class: lower is softer."
    if level:
        caption += " At the collapse point all classes are equally far apart: no similarity is learned."
    return Figure("Softness", chart.markup(), " ".join([caption, *alt[2:]]))


def _epochs(records: Records) -> Axis:
    return Axis(0, max(1.0, *(float(record["epoch"]) for record in records)), "Epoch", whole=True)


@dataclass(frozen=True)
class Cell:
    """One cell of a matrix; ``strength`` (0 to 1) is that of the colour of its kind."""

    text: str
    strength: float
    kind: str  # "hit" (blue), "miss" (orange) or "diagonal" (no colour)
    small: str = ""
    title: str = ""


@dataclass(frozen=True)
class MatrixTable:
    """A square matrix, written out in cells (rows) or, for many classes, as a picture (a data URI)."""

    classes: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    picture: str = ""


def _matrix_table(names: Sequence[str], strength: Floats, cell: Callable[[int, int], Cell]) -> MatrixTable:
    if len(names) > MAX_CELLS:
        return MatrixTable(tuple(names), (), _picture(strength))
    indices = range(len(names))
    return MatrixTable(tuple(names), tuple(tuple(cell(i, j) for j in indices) for i in indices))


def confusion_table(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> MatrixTable:
    """Counts with the share of their row (the true class). The colour follows the share, and off the diagonal its
    square root, because shares are small there."""
    matrix = np.asarray(counts, dtype=np.float64)
    totals = matrix.sum(axis=1, keepdims=True)
    shares = np.divide(matrix, totals, out=np.zeros_like(matrix), where=totals > 0)

    def cell(i: int, j: int) -> Cell:
        share, count = float(shares[i, j]), int(matrix[i, j])
        small = f"{share:.0%}" if count and len(classes) <= MAX_SHARES else ""
        title = f"{classes[i]} classified as {classes[j]}: {count:,} ({share:.1%})"
        kind, strength = ("hit", share) if i == j else ("miss", share**0.5)
        return Cell(f"{count:,}", strength, kind, small, title)

    return _matrix_table(classes, shares, cell)


def soft_label_table(matrix: Sequence[Sequence[float]], classes: Sequence[str]) -> MatrixTable:
    """Soft labels, one row per class. The colour of a weight is its ratio to the weight in uniform labels of the same
    softness, which is one number for the whole matrix: equal weights have equal colours (blue is more, orange is less,
    on a logarithmic scale), and uniform labels have none. The diagonal, always the largest, has none either."""
    weights = np.asarray(matrix, dtype=np.float64)
    off = ~np.eye(len(classes), dtype=bool)
    uniform = float(weights[off].mean()) if off.any() else 0.0
    relative = weights / uniform if uniform > 0 else np.ones_like(weights)
    strength = np.where(off, ratio_strength(relative), 0.0)

    def cell(i: int, j: int) -> Cell:
        text = f"{weights[i, j]:.2f}" if len(classes) <= MAX_SHARES else f"{100 * weights[i, j]:.0f}"
        title = f"soft label of {classes[i]}, weight on {classes[j]}: {weights[i, j]:.4f}"
        kind = "diagonal" if i == j else "hit" if strength[i, j] >= 0 else "miss"
        return Cell(text, abs(float(strength[i, j])), kind, title=f"{title}, {relative[i, j]:.2f} times uniform")

    return _matrix_table(classes, strength, cell)


def log_position(ratio: Floats | float, full: float) -> Floats:
    """Position of a ratio on a logarithmic scale: 0 at 1, 1 at ``full`` and above, -1 at ``1 / full`` and below.

    >>> log_position(np.array([0.0, 0.25, 0.5, 1.0, 2.0, 8.0]), 4).tolist()
    [-1.0, -1.0, -0.5, 0.0, 0.5, 1.0]
    """
    return np.log(np.clip(ratio, 1 / full, full)) / math.log(full)


def ratio_strength(ratio: Floats | float) -> Floats:
    """Strength of the colour of a ratio to uniform, negative for less than uniform. Less has at most half the strength,
    because most weights of a sparse matrix are near zero."""
    position = log_position(ratio, FULL_COLOUR)
    return np.where(position < 0, position / 2, position)


@dataclass(frozen=True)
class Bar:
    """A ratio to uniform as a bar from the middle: the ends in percent of the width, and whether it is cut."""

    left: float
    right: float
    cut: bool

    @property
    def less(self) -> bool:
        return self.right == 50 > self.left


def ratio_bar(ratio: float) -> Bar:
    """The bar of a ratio, on a logarithmic scale from ``1 / FULL_BAR`` to ``FULL_BAR``; beyond, it is cut.

    >>> ratio_bar(4.0), ratio_bar(0.25), ratio_bar(20).cut
    (Bar(left=50.0, right=75.0, cut=False), Bar(left=25.0, right=50.0, cut=False), True)
    """
    end = 50 + 50 * float(log_position(ratio, FULL_BAR))
    return Bar(min(end, 50.0), max(end, 50.0), not 1 / FULL_BAR <= ratio <= FULL_BAR)


def colour_legend(table: MatrixTable) -> list[tuple[str, str, float]]:
    """The colours of :func:`soft_label_table`: label, kind and strength of ratios to uniform. A picture shows the
    square root of the strength."""
    ratios = {f"1/{FULL_COLOUR:g} or less": 1 / FULL_COLOUR, "1/2": 0.5, "uniform": 1, "2 times": 2}
    ratios |= {f"{FULL_COLOUR:g} times or more": FULL_COLOUR}
    found = [(label, float(ratio_strength(ratio))) for label, ratio in ratios.items()]
    power = 0.5 if table.picture else 1
    return [(label, "hit" if strength >= 0 else "miss", abs(strength) ** power) for label, strength in found]


def agreement_table(agreement: Sequence[Sequence[float | None]], runs: Sequence[str]) -> MatrixTable:
    """Rank correlations between runs, -1 to 1: blue where positive, orange where negative."""
    values = np.array([[np.nan if v is None else v for v in row] for row in agreement], dtype=np.float64)

    def cell(i: int, j: int) -> Cell:
        value = float(values[i, j])
        text = "–" if math.isnan(value) else f"{value:.2f}".replace("-", "−")
        kind = "diagonal" if i == j else "hit" if value >= 0 else "miss"
        strength = 0.0 if i == j or math.isnan(value) else abs(value)
        return Cell(text, strength, kind, title=f"{runs[i]} and {runs[j]}")

    return _matrix_table(runs, np.nan_to_num(values), cell)


def _picture(strength: Floats) -> str:
    """One pixel per cell, blue or (below zero) orange, transparent where the strength is low: it suits any
    background."""
    pixels = np.empty((*strength.shape, 4), dtype=np.uint8)
    pixels[..., :3] = np.where(strength[..., None] >= 0, (46, 134, 200), (220, 130, 30))
    pixels[..., 3] = np.rint(255 * np.clip(np.abs(strength), 0, 1) ** 0.5)
    return data_uri(Image.fromarray(pixels), "PNG", optimize=True)


@dataclass(frozen=True)
class ConfusedPair:
    """Two classes that are confused with each other."""

    a: str
    b: str
    a_as_b: int  # images of a that are classified as b
    b_as_a: int
    share: float  # of the images of a class, mean of both directions
    rank: int | None  # among all pairs of the soft labels, 1 the most similar; None without soft labels
    predicted: bool  # whether it is among the most similar pairs of the soft labels


@dataclass(frozen=True)
class Confusions:
    """The most frequent confusions, and a sentence on how many of them are among the most similar pairs."""

    pairs: tuple[ConfusedPair, ...]
    in_words: str


def frequent_confusions(
    confusion: Sequence[Sequence[int]], classes: Sequence[str], matrix: Sequence[Sequence[float]] | None, most: int = 10
) -> Confusions:
    """The pairs of classes that are confused most often, compared with the most similar pairs of the soft labels.

    Frequency is the share of the images of a class, so that a common class is not part of every pair; a soft label also
    describes one image of its class. As many similar pairs are considered as confusions are shown, at most a third of
    all pairs, so that the agreement expected by chance stays low.
    """
    counts = np.asarray(confusion, dtype=np.int64)
    first, second = np.triu_indices(len(classes), k=1)
    shares = _pair_shares(counts)[first, second]
    shown = max(1, min(most, len(shares) // 3))
    order = [int(k) for k in np.argsort(-shares, kind="stable")[:shown] if shares[k] > 0]
    ranks = None
    if matrix is not None:
        weights = np.asarray(matrix, dtype=np.float64)
        # Equal pairs all get the last rank: a matrix without differences has predicted nothing.
        ranks = stats.rankdata(-np.round(weights[first, second] + weights[second, first], 12), method="max")
    pairs = []
    for k in order:
        i, j = int(first[k]), int(second[k])
        rank = None if ranks is None else int(ranks[k])
        predicted = rank is not None and rank <= len(order)
        a_as_b, b_as_a = int(counts[i, j]), int(counts[j, i])
        pairs.append(ConfusedPair(classes[i], classes[j], a_as_b, b_as_a, float(shares[k]), rank, predicted))
    if not pairs:
        return Confusions((), "No two classes were confused.")
    if ranks is None:
        return Confusions(tuple(pairs), "")
    n, hits = len(pairs), sum(pair.predicted for pair in pairs)
    return Confusions(
        tuple(pairs),
        f"Of the {count_text(n, 'most frequent confusion')}, {hits} {'is' if hits == 1 else 'are'} among the "
        f"{count_text(n, 'most similar pair')} of the soft labels, out of {count_text(len(shares), 'pair')}. "
        f"Chance alone would give {n * n / len(shares):.1f}.",
    )


def _pair_shares(counts: npt.NDArray[np.int64]) -> Floats:
    """Share of a class's images that are classified as the other class, mean of both directions, [K, K]; if one class
    has no image, the other direction alone."""
    images = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, images, out=np.zeros(counts.shape), where=images > 0)
    known = (images > 0).astype(np.float64)
    return (shares + shares.T) / np.maximum(known + known.T, 1.0)
