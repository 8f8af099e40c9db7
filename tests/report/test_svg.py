from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cclnet.report.figures import Axis, Chart


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.booleans())
def test_an_axis_around_values_holds_them_all(values: list[float], zero: bool) -> None:
    axis = Axis.around(values, "", zero=zero)
    assert all(-1e-9 <= axis.place(v) <= 1 + 1e-9 for v in [*values, *([0.0] if zero else [])])
    assert axis.high > axis.low


def test_a_logarithmic_axis_puts_the_geometric_mean_in_the_middle() -> None:
    assert Axis(0.001, 10.0, log=True).place(0.1) == pytest.approx(0.5)
    assert [text for _, text in Axis(0.0005, 0.2, log=True).ticks()] == ["0.001", "0.01", "0.1"]


def test_ticks_lie_inside_and_read_well() -> None:
    assert Axis(0, 1, percent=True).ticks() == [
        (0.0, "0%"), (pytest.approx(0.2), "20%"), (pytest.approx(0.4), "40%"), (pytest.approx(0.6), "60%"),
        (pytest.approx(0.8), "80%"), (1.0, "100%"),
    ]  # fmt: skip
    assert "−2" in [text for _, text in Axis(-3, 3).ticks()]
    assert Axis(0, 3, bare=True).ticks() == []
    assert [text for _, text in Axis(0, 2, whole=True).ticks()] == ["0", "1", "2"]


def test_values_that_no_axis_can_hold_are_left_out() -> None:
    assert Axis.around([math.nan, 2.0, math.inf], "").place(2.0) == pytest.approx(0.5)
    assert Axis.around([0.0, 0.1], "", log=True).low == pytest.approx(0.05)  # a rate that ends at zero
    chart = Chart(Axis(0, 3), Axis(0.01, 1, log=True), "")
    chart.line([(0, 0.1), (1, math.nan), (2, 0.0), (3, 1.0)], "s1")
    points = chart.root.find("polyline").get("points").split()  # type: ignore[union-attr]
    assert len(points) == 2


def test_a_line_of_one_point_is_seen() -> None:
    chart = Chart(Axis(0, 1), Axis(0, 1), "")
    chart.line([(0.5, 0.5)], "s1")
    assert len(chart.root.findall("circle")) == 1


def test_marks_lie_where_their_values_are() -> None:
    chart = Chart(Axis(0, 10), Axis(0, 1), "")
    chart.dot(10, 1, "s1")
    chart.dot(0, 0, "s1")
    last, first = chart.root.findall("circle")
    assert (float(last.get("cx", 0)), float(last.get("cy", 0))) == (chart.right, chart.top)
    assert (float(first.get("cx", 0)), float(first.get("cy", 0))) == (chart.left, chart.bottom)


def test_text_is_escaped_and_no_element_has_an_id() -> None:
    chart = Chart(Axis(0, 1, '<script>"x"'), Axis(0, 1, "a & b"), 'alt "<b>"')
    chart.dot(0.5, 0.5, "s1", title="<img src=x>")
    chart.level(0.5, "<i>")
    chart.moment(0.2, "<u>")
    markup = str(chart.markup())
    assert not re.search(r"<(script|img|i|u|b)\b", markup) and " id=" not in markup
    parsed = ElementTree.fromstring(markup)
    assert parsed.get("aria-label") == 'alt "<b>"' and parsed.get("role") == "img"
    assert '<script>"x"' in [element.text for element in parsed.iter("text")]
