"""The figures of a run: calibration, risk against coverage, and how training went."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
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

from cclnet.report.text import count_text, value_text
from cclnet.runs.scores import CalibrationStage

# A small chart as SVG inside a page.
#
# Colours, dashes and fonts come from the page's style sheet through class names, so one figure serves light, dark
# and paper, and its words stay words. No element carries an id, so any number of charts share a page.


Point = tuple[float, float]
WIDEST_LABEL = 56  # signs that fit into a chart of the usual width


@dataclass(frozen=True)
class Axis:
    """One direction of a chart: its range, its label, and how its values read."""

    low: float
    high: float
    label: str = ""
    percent: bool = False
    log: bool = False
    whole: bool = False  # whole numbers only: epochs
    bare: bool = False  # neither ticks nor grid: the rows of a list

    @classmethod
    def around(
        cls, values: Iterable[float], label: str, *, percent: bool = False, log: bool = False, zero: bool = False
    ) -> Axis:
        """An axis that holds all finite values with some room; ``zero`` makes it hold zero too."""
        kept = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
        low, high = min(kept), max(kept)
        if zero:
            low, high = min(low, 0.0), max(high, 0.0)
        if log:
            return cls(low / 2, high * 2, label, percent, log)
        room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        starts, ends = zero and low == 0 < high, zero and low < 0 == high  # what begins or ends at zero stays there
        return cls(low if starts else low - room, high if ends else high + room, label, percent)

    def place(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high end."""
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
    """A frame with two axes; marks are added in the order they are painted.

    Args:
        x, y: the axes.
        alt: what the figure shows, in a sentence or two, for those who do not see it.
    """

    def __init__(self, x: Axis, y: Axis, alt: str, width: int = 380, height: int = 250) -> None:
        self.x, self.y = x, y
        self.left, self.right = (10 if y.bare else 46), width - 14
        self.top, self.bottom = 22, height - 42
        self.root = Element("svg", {"class": "chart", "viewBox": f"0 0 {width} {height}", "role": "img",
                                    "aria-label": alt})  # fmt: skip
        self._draw_axes(height)

    def line(self, points: Sequence[Point], style: str) -> None:
        """A line through the points; those that are not finite (or not positive on a logarithmic axis) are left out."""
        shown = [p for p in points if self._shown(p)]
        if shown:
            path = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in shown)
            SubElement(self.root, "polyline", {"class": f"line {style}", "points": path})
        if len(shown) == 1:
            self.dot(*shown[0], style)

    def dot(self, x: float, y: float, style: str, radius: float = 4.0, title: str = "") -> None:
        place = {"cx": f"{self._x(x):.1f}", "cy": f"{self._y(y):.1f}", "r": f"{radius:.1f}"}
        element = SubElement(self.root, "circle", {"class": f"dot {style}", **place})
        if title:
            SubElement(element, "title").text = title

    def segment(self, start: Point, end: Point, style: str) -> None:
        (x1, y1), (x2, y2) = start, end
        self._segment(self._x(x1), self._y(y1), self._x(x2), self._y(y2), style)

    def level(self, y: float, label: str) -> None:
        """A horizontal mark across the chart with its label at the right end, on the side that has more room."""
        self._segment(self.left, self._y(y), self.right, self._y(y), "mark")
        self.text(self.right, self._y(y) + (14 if self.y.place(y) > 0.5 else -5), label, "end")

    def moment(self, x: float, label: str) -> None:
        """A vertical mark with its label above the frame, towards the side that has more room."""
        self._segment(self._x(x), self.top, self._x(x), self.bottom, "mark")
        self.text(self._x(x), self.top - 6, label, "end" if self.x.place(x) > 0.5 else "start")

    def row_label(self, y: float, label: str, shift: float = -9) -> None:
        """A label at the left end of a row, above what is drawn at ``y``; the whole of a long one is its tooltip."""
        shown = label if len(label) <= WIDEST_LABEL else label[: WIDEST_LABEL - 1] + "…"
        element = self.text(self.left, self._y(y) + shift, shown, "start", "row")
        if shown != label:
            SubElement(element, "title").text = label

    def text(self, x: float, y: float, words: str, anchor: str, style: str = "note") -> Element:
        """Words at a place in the chart's own units, not those of its axes."""
        element = SubElement(self.root, "text", {"class": style, "x": f"{x:.1f}", "y": f"{y:.1f}",
                                                 "text-anchor": anchor})  # fmt: skip
        element.text = words
        return element

    def markup(self) -> Markup:
        # ElementTree has escaped every text and attribute.
        return Markup(tostring(self.root, encoding="unicode"))

    def _draw_axes(self, height: int) -> None:
        for value, text in self.x.ticks():
            self._segment(self._x(value), self.top, self._x(value), self.bottom, "grid")
            self.text(self._x(value), self.bottom + 15, text, "middle", "tick")
        for value, text in self.y.ticks():
            self._segment(self.left, self._y(value), self.right, self._y(value), "grid")
            self.text(self.left - 6, self._y(value) + 4, text, "end", "tick")
        self._segment(self.left, self.bottom, self.right, self.bottom, "axis")
        self.text((self.left + self.right) / 2, height - 8, self.x.label, "middle", "label")
        if self.y.label:
            self.text(4, 13, self.y.label, "start", "label")

    def _segment(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
        SubElement(self.root, "line", {"class": style, **{k: f"{v:.1f}" for k, v in ends.items()}})

    def _shown(self, point: Point) -> bool:
        return all(
            math.isfinite(v) and (v > 0 or not axis.log) for v, axis in zip(point, (self.x, self.y), strict=True)
        )

    def _x(self, value: float) -> float:
        return self.left + self.x.place(value) * (self.right - self.left)

    def _y(self, value: float) -> float:
        return self.bottom - self.y.place(value) * (self.bottom - self.top)


Records = Sequence[Mapping[str, Any]]

STYLES = tuple(f"s{i}" for i in range(1, 7))  # colours and dashes of page.css


@dataclass(frozen=True)
class Figure:
    """A chart with its words. ``legend`` pairs a style with the name of what is drawn in it."""

    title: str
    svg: Markup
    caption: str
    legend: tuple[tuple[str, str], ...] = ()


def reliability(side: CalibrationStage, title: str, unit: str = "images") -> Figure:
    """Accuracy against confidence, one dot a bin, its area the share of the images (or other units, where an
    image is judged more than once). The stalk to the diagonal is the bin's part in the calibration error."""
    bins = side.reliability
    total = sum(b.images for b in bins) or 1
    ece = value_text(side.scores["ece"].value, "ece")
    listed = "; ".join(f"{b.confidence:.0%} sure, {b.accuracy:.0%} right, {b.images} {unit}" for b in bins)
    chart = Chart(
        Axis(0, 1, "Confidence", percent=True), Axis(0, 1, "Accuracy", percent=True),
        f"{title}: accuracy against confidence in {len(bins)} bins, calibration error {ece}. {listed}.", height=300,
    )  # fmt: skip
    chart.segment((0, 0), (1, 1), "mark")
    for b in bins:
        over = b.confidence > b.accuracy
        chart.segment((b.confidence, b.confidence), (b.confidence, b.accuracy), f"stalk {_side(over)}")
        words = f"{b.images:,} {unit}, {b.confidence:.1%} sure on average, {b.accuracy:.1%} right"
        radius = 2.5 + 14 * math.sqrt(b.images / total)
        chart.dot(b.confidence, b.accuracy, f"bubble {_side(over)}", radius, words)
    legend = (("s2 patch", "surer than right"), ("s1 patch", "less sure than right"))
    return Figure(title, chart.markup(), f"Calibration error (ECE) {ece}.", legend)


def _side(over: bool) -> str:
    return "s2" if over else "s1"


def risk_coverage(before: CalibrationStage, after: CalibrationStage | None, unit: str = "images") -> Figure:
    """Error rate of what is kept, when the least sure images (or other units) go to a person."""
    curves = [("as trained", before)] + ([("after temperature", after)] if after else [])
    lines = [[(p.coverage, p.risk) for p in side.risk_coverage] for _, side in curves]
    highest = max((risk for line in lines for _, risk in line), default=0.0)
    at = "; ".join(f"keeping {c:.0%}: {r:.1%} wrong" for c, r in (kept_at(before, share) for share in (0.5, 0.8, 1.0)))
    chart = Chart(
        Axis(0, 1, f"Share of {unit} kept, surest first", percent=True),
        Axis(0, max(1.08 * highest, 0.01), "Wrong among those kept", percent=True),
        f"Error rate against the share of {unit} kept. {at}.",
        height=300,
    )
    for line, style in zip(lines, STYLES, strict=False):
        chart.line(line, style)
    names = [f"{name}, area {value_text(side.scores['aurc'].value, 'aurc')}" for name, side in curves]
    caption = f"The lower the better. Far left, few {unit} are kept and the curve is rough."
    return Figure("Risk against coverage", chart.markup(), caption, tuple(zip(STYLES, names, strict=False)))


def kept_at(side: CalibrationStage, share: float) -> Point:
    """The point of the risk-coverage curve at a share of images kept (the first that reaches it)."""
    curve = side.risk_coverage
    found = next((p for p in curve if p.coverage >= share - 1e-9), curve[-1])
    return found.coverage, found.risk


def training_curves(records: Records, collapse: float | None) -> list[Figure]:
    """Losses, terms, validation scores, learning rates and softness over the epochs: those that were recorded."""
    found = [
        _curves(records, ["loss", "val_loss"], "Loss",
                "Total loss in training, and cross entropy on the validation part."),
        _curves(records, loss_terms(records), "Terms of the training loss", "What the training loss is the sum of."),
        _curves(records, validation_scores(records), "Validation", "Scores on the validation part.", percent=True),
        _curves(records, ["lr", "lr_method"], "Learning rate", "Of the network, and of the method's own parameters.",
                log=True),
        softness(records, collapse),
    ]  # fmt: skip
    return [figure for figure in found if figure is not None]


def loss_terms(records: Records) -> list[str]:
    """Names of the loss terms: the keys between "loss" and "lr". Older runs have diagnostics there, softness first."""
    names = list(dict.fromkeys(name for record in records for name in record))
    after_loss = names[names.index("loss") + 1 :] if "loss" in names else []
    terms = list(takewhile(lambda name: name not in ("softness", "lr") and not name.startswith("val_"), after_loss))
    return terms[: len(STYLES)] if len(terms) > 1 else []  # a single term is the loss itself


def validation_scores(records: Records) -> list[str]:
    names = dict.fromkeys(name for record in records for name in record)
    return [name for name in names if name.startswith("val_") and name != "val_loss"][: len(STYLES)]


def series(records: Records, name: str) -> list[Point]:
    """The epochs that recorded a finite value under a name."""
    numbers = [(float(r["epoch"]), r[name]) for r in records if isinstance(r.get(name), (int, float))]
    return [(epoch, float(value)) for epoch, value in numbers if math.isfinite(value)]


def _curves(
    records: Records, names: Sequence[str], title: str, caption: str, percent: bool = False, log: bool = False
) -> Figure | None:
    lines = {_plain(name): points for name in names if (points := series(records, name))}
    if not lines:
        return None
    ends = "; ".join(f"{name}: {points[0][1]:.4g} at epoch {points[0][0]:.0f}, {points[-1][1]:.4g} at epoch "
                     f"{points[-1][0]:.0f}" for name, points in lines.items())  # fmt: skip
    values = [value for points in lines.values() for _, value in points]
    y = Axis.around(values, "", percent=percent, log=log, zero=not (log or percent))
    chart = Chart(_epochs(records), y, f"{title} over {len(records)} epochs. {ends}.")
    for points, style in zip(lines.values(), STYLES, strict=False):
        chart.line(points, style)
    return Figure(title, chart.markup(), caption, tuple(zip(STYLES, lines, strict=False)))


def softness(records: Records, collapse: float | None) -> Figure | None:
    """Mean of the soft labels' diagonal over epochs; for a learned dictionary also where it collapses to, and when
    it was frozen."""
    points = series(records, "softness")
    if not points:
        return None
    learned = any("frozen" in record for record in records)
    frozen = next((epoch for epoch, flag in series(records, "frozen") if flag), None)
    level = [collapse] if learned and collapse is not None else []
    words = [f"Softness over {len(records)} epochs, from {points[0][1]:.3f} to {points[-1][1]:.3f}."]
    words += [f"The collapse point is {level[0]:.3f}."] if level else []
    words += [f"The soft labels were frozen at epoch {frozen:.0f}."] if frozen is not None else []
    words += ["The soft labels were never frozen."] if learned and frozen is None else []
    values = [value for _, value in points] + level
    span = [max(values) - 0.1]  # a change in the fourth decimal is no slope
    chart = Chart(_epochs(records), Axis.around(values + span, ""), " ".join(words))
    chart.line(points, "s1")
    if level:
        chart.level(level[0], "collapse point")
    if frozen is not None:
        chart.moment(frozen, f"frozen at {frozen:.0f}")
    caption = "Mean weight that a soft label leaves on its own class: lower is softer."
    if level:
        caption += " At the collapse point all classes are equally far apart and nothing is known about their likeness."
    return Figure("Softness", chart.markup(), " ".join([caption, *words[2:]]))


def _epochs(records: Records) -> Axis:
    last = max(float(record["epoch"]) for record in records)
    return Axis(0, max(last, 1.0), "Epoch", whole=True)


def _plain(name: str) -> str:
    return {"lr": "network", "lr_method": "method", "loss": "training", "val_loss": "validation"}.get(
        name, name.removeprefix("val_").replace("_", " ")
    )


# Square tables of classes, coloured: the confusion matrix and the soft labels.


Matrix = npt.NDArray[np.float64]

MOST_CELLS = 40  # classes up to which every cell is written out; beyond it the table is a picture
MOST_SHARES = 12  # classes up to which a cell has room for its count and its share


@dataclass(frozen=True)
class Cell:
    """One cell: its words, and how strongly (0 to 1) it takes the colour of its kind."""

    text: str
    strength: float
    kind: str  # "hit": on the diagonal, "miss": off it, "own": the diagonal where it is not judged
    small: str = ""
    title: str = ""


@dataclass(frozen=True)
class HeatTable:
    """A square table, written out in cells (rows) or, for many classes, as a picture (a data URI)."""

    classes: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    picture: str = ""


def confusion_table(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> HeatTable:
    """Counts with the share of their row (the true class); the colour follows the share, by its root off the diagonal,
    where shares are small."""
    matrix = np.asarray(counts, dtype=np.float64)
    totals = matrix.sum(axis=1, keepdims=True)
    shares = np.divide(matrix, totals, out=np.zeros_like(matrix), where=totals > 0)
    if len(classes) > MOST_CELLS:
        return HeatTable(tuple(classes), (), _picture(shares))
    rows = []
    for i, true in enumerate(classes):
        cells = []
        for j, said in enumerate(classes):
            share, count = float(shares[i, j]), int(matrix[i, j])
            small = f"{share:.0%}" if count and len(classes) <= MOST_SHARES else ""
            title = f"{true} taken for {said}" if i != j else f"{true} recognised"
            kind, strength = ("hit", share) if i == j else ("miss", share**0.5)
            cells.append(Cell(f"{count:,}", strength, kind, small, f"{title}: {count:,} ({share:.1%})"))
        rows.append(tuple(cells))
    return HeatTable(tuple(classes), tuple(rows))


def soft_label_table(matrix: Sequence[Sequence[float]], classes: Sequence[str]) -> HeatTable:
    """Soft labels, one row a class. The colour spans the weights off the diagonal, where the likeness is; the
    diagonal, always the largest, is left plain."""
    weights = np.asarray(matrix, dtype=np.float64)
    off = weights[~np.eye(len(classes), dtype=bool)]
    low, high = (float(off.min()), float(off.max())) if off.size else (0.0, 1.0)
    strength = (weights - low) / (high - low) if high > low else np.full_like(weights, 0.5)
    if len(classes) > MOST_CELLS:
        np.fill_diagonal(strength, 0.0)
        return HeatTable(tuple(classes), (), _picture(strength))
    rows = tuple(
        tuple(
            Cell(
                f"{weights[i, j]:.2f}" if len(classes) <= MOST_SHARES else f"{100 * weights[i, j]:.0f}",
                0.0 if i == j else float(strength[i, j]),
                "own" if i == j else "hit",
                title=f"soft label of {row}, weight on {column}: {weights[i, j]:.4f}",
            )
            for j, column in enumerate(classes)
        )
        for i, row in enumerate(classes)
    )
    return HeatTable(tuple(classes), rows)


def agreement_table(agreement: Sequence[Sequence[float | None]], runs: Sequence[str]) -> HeatTable:
    """Rank correlations between runs, -1 to 1: blue where they agree, orange where they contradict."""
    values = np.array([[np.nan if v is None else v for v in row] for row in agreement], dtype=np.float64)
    if len(runs) > MOST_CELLS:
        return HeatTable(tuple(runs), (), _picture(np.nan_to_num(values)))
    rows = tuple(
        tuple(
            Cell(
                "–" if np.isnan(value) else f"{value:.2f}".replace("-", "−"),
                0.0 if i == j or np.isnan(value) else abs(float(value)),
                "own" if i == j else "hit" if value >= 0 else "miss",
                title=f"{runs[i]} and {runs[j]}",
            )
            for j, value in enumerate(row)
        )
        for i, row in enumerate(values)
    )
    return HeatTable(tuple(runs), rows)


def _picture(strength: Matrix) -> str:
    """One pixel a cell, in one colour that is see-through where the strength is low: right on any background."""
    pixels = np.empty((*strength.shape, 4), dtype=np.uint8)
    pixels[..., :3] = (46, 134, 200)
    pixels[..., 3] = np.rint(255 * np.clip(strength, 0, 1) ** 0.5)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


# Did the soft labels know beforehand what the model would confuse?


Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ConfusedPair:
    """Two classes taken for each other: how many images either way, the share of a class's images this is (mean of
    both ways), and where the pair stands among all pairs of the soft labels, 1 the most alike (None without any)."""

    a: str
    b: str
    a_as_b: int
    b_as_a: int
    share: float
    rank: int | None
    predicted: bool


@dataclass(frozen=True)
class Confusions:
    """The most frequent confusions, and in words how many of them the matrix had among its most alike pairs."""

    pairs: tuple[ConfusedPair, ...]
    in_words: str


def frequent_confusions(
    confusion: Sequence[Sequence[int]], classes: Sequence[str], matrix: Sequence[Sequence[float]] | None, most: int = 10
) -> Confusions:
    """The pairs of classes most often taken for each other, against the pairs the matrix holds most alike.

    How often is a share of the images of the class, so that a common class does not head every pair: a soft label
    too speaks of one image of its class. As many pairs are taken from the matrix as there are confusions shown, at
    most a third of all pairs, so that chance stays low.

    >>> found = frequent_confusions([[9, 3, 0], [2, 8, 0], [0, 1, 5]], ["A", "B", "C"], None)
    >>> found.pairs[0].a, found.pairs[0].b, found.pairs[0].a_as_b + found.pairs[0].b_as_a
    ('A', 'B', 5)
    """
    counts = np.asarray(confusion, dtype=np.int64)
    first, second = np.triu_indices(len(classes), k=1)
    shares = _pair_shares(counts)[first, second]
    shown = max(1, min(most, len(shares) // 3))
    order = [int(k) for k in np.argsort(-shares, kind="stable")[:shown] if shares[k] > 0]
    ranks = None if matrix is None else _ranks(np.asarray(matrix, dtype=np.float64)[first, second],
                                               np.asarray(matrix, dtype=np.float64)[second, first])  # fmt: skip
    pairs = []
    for k in order:
        i, j = int(first[k]), int(second[k])
        rank = None if ranks is None else int(ranks[k])
        pairs.append(ConfusedPair(
            classes[i], classes[j], int(counts[i, j]), int(counts[j, i]), float(shares[k]), rank,
            rank is not None and rank <= len(order),
        ))  # fmt: skip
    return Confusions(tuple(pairs), _in_words(pairs, len(shares), ranks is not None))


def _pair_shares(counts: Integers) -> Floats:
    """Share of a class's images taken for the other, averaged over both directions (over one, if the other class has
    no image), [K, K]."""
    images = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, images, out=np.zeros(counts.shape), where=images > 0)
    known = (images > 0).astype(np.float64)
    return (shares + shares.T) / np.maximum(known + known.T, 1.0)


def _ranks(one_way: Floats, other_way: Floats) -> Integers:
    """Rank of each pair by its weight, averaged over both directions, 1 the largest. Of equal pairs all have the last
    rank: a matrix that tells none apart has predicted nothing."""
    weights = np.round(one_way + other_way, 12)
    return stats.rankdata(-weights, method="max").astype(np.int64)


def _in_words(pairs: Sequence[ConfusedPair], of: int, known: bool) -> str:
    if not pairs:
        return "No two classes were confused."
    if not known:
        return ""
    n, hits = len(pairs), sum(pair.predicted for pair in pairs)
    return (
        f"Of the {count_text(n, 'most frequent confusion')}, {hits} {'is' if hits == 1 else 'are'} among the "
        f"{count_text(n, 'most alike pair')} of the soft labels, out of {count_text(of, 'pair')}. "
        f"Chance alone would give {n * n / of:.1f}."
    )
