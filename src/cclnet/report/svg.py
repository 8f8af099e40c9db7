"""A small chart as SVG inside a page.

Colours, dashes and fonts come from the page's style sheet through class names, so one figure serves light, dark
and paper, and its words stay words. No element carries an id, so any number of charts share a page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

from markupsafe import Markup
from matplotlib.ticker import LogLocator, MaxNLocator

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
