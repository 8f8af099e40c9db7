"""Charts, matrix tables and the most frequent confusions."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from fake_run import MakeRun
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cclnet import build_method
from cclnet.methods import METHODS, Classes, methods_for
from cclnet.report.figures import (
    Axis,
    Chart,
    Figure,
    agreement_table,
    colour_legend,
    confusion_table,
    frequent_confusions,
    kept_at,
    loss_terms,
    ratio_bar,
    reliability,
    risk_coverage,
    soft_label_table,
    training_curves,
)
from cclnet.runs.folder import RunFolder
from cclnet.runs.scores import CalibrationStage, Estimate, ReliabilityBin, RiskPoint

SIDE = CalibrationStage(
    scores={"ece": Estimate(0.05, 0.04, 0.06), "aurc": Estimate(0.02, None, None)},
    mean_confidence=0.81,
    reliability=(ReliabilityBin(0.4, 0.4667, 10, 0.45, 0.2), ReliabilityBin(0.8, 0.8667, 90, 0.85, 0.9)),
    risk_coverage=(RiskPoint(0.1, 0.0), RiskPoint(0.8, 0.05), RiskPoint(1.0, 0.2)),
)


def curves(run: Path, collapse: float | None = 0.55) -> dict[str, Figure]:
    return {figure.title: figure for figure in training_curves(RunFolder(run).read_history(), collapse)}


def words(figure: Figure) -> str:
    return " ".join(filter(None, (element.text for element in ElementTree.fromstring(figure.svg).iter("text"))))


def test_reliability_draws_a_dot_a_bin_with_the_area_of_its_share() -> None:
    figure = reliability(SIDE, "Reliability")
    dots = ElementTree.fromstring(figure.svg).findall("circle")
    areas = [(float(dot.get("r", 0)) - 2.5) ** 2 for dot in dots]
    assert areas[1] / areas[0] == pytest.approx(9, rel=0.05)
    assert ["s2" in dot.get("class", "") for dot in dots] == [True, False]  # overconfident, then underconfident
    assert "5.0%" in figure.caption and "confidence 45%, accuracy 20%, 10 images" in figure.svg


def test_risk_coverage_draws_both_sides_and_reads_the_curve() -> None:
    assert kept_at(SIDE, 0.5) == (0.8, 0.05) and kept_at(SIDE, 0.8) == (0.8, 0.05) and kept_at(SIDE, 1.0) == (1.0, 0.2)
    both, one = risk_coverage(SIDE, SIDE), risk_coverage(SIDE, None)
    assert len(ElementTree.fromstring(both.svg).findall("polyline")) == 2
    assert [name for _, name in one.legend] == ["as trained, area 0.020"]
    assert "keeping 80%: 5.0% wrong" in one.svg


def test_a_model_without_an_error_has_a_flat_curve() -> None:
    perfect = replace(SIDE, risk_coverage=(RiskPoint(1.0, 0.0),))
    assert "nan" not in risk_coverage(perfect, None).svg


def test_training_shows_the_freeze_and_the_collapse_point(make_run: MakeRun) -> None:
    found = curves(make_run())
    assert list(found) == ["Loss", "Terms of the training loss", "Validation", "Learning rate", "Softness"]
    assert "frozen at 25" in words(found["Softness"]) and "collapse point" in words(found["Softness"])
    assert "frozen at epoch 25" in found["Softness"].caption
    assert [name for _, name in found["Terms of the training loss"].legend] == [
        "cross entropy", "kl", "head cross entropy", "class correlation",
    ]  # fmt: skip
    assert [name for _, name in found["Learning rate"].legend] == ["network", "method"]


def test_hard_labels_have_neither_terms_nor_softness(make_run: MakeRun) -> None:
    assert list(curves(make_run(method="hard"))) == ["Loss", "Validation", "Learning rate"]


def test_softness_that_is_not_learned_has_no_collapse_point(make_run: MakeRun) -> None:
    records = [{"epoch": e, "loss": 1.0, "softness": 0.9, "classes_never_right": 1.0} for e in (1, 2)]
    figure = training_curves(records, 0.55)[-1]
    assert figure.title == "Softness" and "collapse" not in words(figure) + figure.caption
    assert loss_terms(records) == []


def test_a_dictionary_that_was_never_frozen_is_said_so() -> None:
    records = [{"epoch": e, "loss": 1.0, "softness": 0.5, "frozen": 0.0} for e in (1, 2, 3)]
    figure = training_curves(records, 0.55)[-1]
    assert "never frozen" in figure.caption and "frozen at" not in words(figure)


def test_epochs_without_a_value_are_passed_over() -> None:
    lines = ['{"epoch": 1, "loss": 2.0}', '{"epoch": 2, "loss": NaN, "val_loss": 1.0}', '{"epoch": 3, "loss": 1.0}']
    records = [json.loads(line) for line in lines]
    assert math.isnan(records[1]["loss"])
    (figure,) = training_curves(records, None)
    drawn = ElementTree.fromstring(figure.svg).findall("polyline")
    assert [len(line.get("points", "").split()) for line in drawn] == [2, 1]


def test_no_record_gives_no_figure() -> None:
    assert training_curves([], 0.5) == []


@pytest.mark.parametrize("name", METHODS)
def test_loss_terms_are_the_summands_of_the_loss(name: str) -> None:
    """The diagnostics of a method at the end of an epoch are no terms."""
    method = build_method(name, Classes(3, 6, (20, 10, 5)))
    labels = torch.randint(2, (8, 3)) if name in methods_for(multilabel=True) else torch.arange(8) % 3
    loss = method(torch.randn(8, 6), torch.randn(8, 3), labels)
    terms = {term: float(value.detach()) for term, value in loss.terms.items()}
    record = {"epoch": 1, "loss": sum(terms.values()), **terms, **method.end_epoch()}
    assert loss_terms([record]) == (list(terms) if len(terms) > 1 else [])  # a single term is the loss itself


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.booleans())
def test_an_axis_around_values_holds_them_all(values: list[float], zero: bool) -> None:
    axis = Axis.around(values, "", zero=zero)
    assert all(-1e-9 <= axis.position(v) <= 1 + 1e-9 for v in [*values, *([0.0] if zero else [])])
    assert axis.high > axis.low


def test_a_logarithmic_axis_puts_the_geometric_mean_in_the_middle() -> None:
    assert Axis(0.001, 10.0, log=True).position(0.1) == pytest.approx(0.5)
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
    assert Axis.around([math.nan, 2.0, math.inf], "").position(2.0) == pytest.approx(0.5)
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


def test_confusions_show_counts_shares_and_colour() -> None:
    table = confusion_table([[1500, 500], [1, 3]], ["A", "B"])
    (hit, miss), (rare_miss, _) = table.rows
    assert (hit.text, hit.small, hit.kind, hit.strength) == ("1,500", "75%", "hit", 0.75)
    assert (miss.text, miss.small, miss.kind, miss.strength) == ("500", "25%", "miss", 0.5)
    assert rare_miss.strength == miss.strength  # the colour knows the share alone
    assert miss.title == "A classified as B: 500 (25.0%)"


def test_a_class_without_images_is_blank() -> None:
    table = confusion_table([[0, 0], [1, 3]], ["A", "B"])
    assert [cell.strength for cell in table.rows[0]] == [0.0, 0.0]
    assert [cell.small for cell in table.rows[0]] == ["", ""]


def test_soft_labels_are_coloured_relative_to_uniform() -> None:
    table = soft_label_table([[0.6, 0.1, 0.3], [0.2, 0.6, 0.2], [0.4, 0.0, 0.6]], ["A", "B", "C"])  # uniform: 0.2
    assert [cell.strength for cell in table.rows[0]] == pytest.approx([0, 0.25, math.log(1.5) / math.log(4)])
    assert [cell.kind for cell in table.rows[0]] == ["diagonal", "miss", "hit"]
    assert [cell.strength for cell in table.rows[1]] == pytest.approx([0, 0, 0], abs=1e-9)
    assert [cell.strength for cell in table.rows[2]] == pytest.approx([0.5, 0.5, 0])  # twice, and nothing
    assert [cell.kind for cell in table.rows[2]] == ["hit", "miss", "diagonal"]
    assert table.rows[0][2].text == "0.30" and "1.50 times uniform" in table.rows[0][2].title


def test_equal_weights_have_equal_colours_in_soft_and_in_almost_hard_rows() -> None:
    table = soft_label_table([[0.7, 0.3, 0.0], [0.0, 1.0, 0.0], [0.1, 0.3, 0.6]], ["A", "B", "C"])
    colours = {(c.text, c.kind, c.strength) for row in table.rows for c in row if c.kind != "diagonal"}
    assert len(colours) == len({text for text, _, _ in colours}) == 3


def test_a_flat_matrix_looks_flat() -> None:
    for matrix in ([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]], [[1, 0, 0], [0, 1, 0], [0, 0, 1]], [[1.0]]):
        table = soft_label_table(matrix, ["A", "B", "C"][: len(matrix)])
        assert max(cell.strength for row in table.rows for cell in row) < 1e-9
    nearly = soft_label_table([[0.8, 0.101, 0.099], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]], ["A", "B", "C"])
    assert max(cell.strength for row in nearly.rows for cell in row) < 0.01


@given(st.floats(0, 50), st.floats(0, 50))
def test_a_larger_ratio_has_a_longer_bar_until_it_is_cut(a: float, b: float) -> None:
    low, high = (ratio_bar(ratio) for ratio in sorted((a, b)))
    assert 0 <= low.left <= high.left <= 50 <= low.right <= high.right <= 100
    assert low.less == (min(a, b) < 1) or abs(min(a, b) - 1) < 1e-9
    assert ratio_bar(9.35).right - ratio_bar(2.17).right > 20 and not ratio_bar(9.35).cut  # percent of the width
    assert [ratio_bar(ratio).cut for ratio in (0, 1 / 16, 16, 16.1)] == [True, False, False, True]


def test_the_legend_has_the_colours_of_the_matrix() -> None:
    weights = [[0.6, 0.1, 0.3], [0.2, 0.6, 0.2], [0.4, 0.0, 0.6]]
    table = soft_label_table(weights, ["A", "B", "C"])
    legend = {label: (kind, strength) for label, kind, strength in colour_legend(table)}
    half, twice, none = table.rows[0][1], table.rows[2][0], table.rows[2][1]
    for label, cell in {"1/2": half, "2 times": twice, "1/4 or less": none}.items():
        assert legend[label] == (cell.kind, pytest.approx(cell.strength))


def test_many_classes_become_a_picture_with_one_pixel_a_pair() -> None:
    counts = 2 * np.ones((50, 50), int) + 99 * np.eye(50, dtype=int)
    counts[0, 1], counts[0, 2] = 3, 1  # more and less than uniform; all other rows are flat
    names, labels = [str(k) for k in range(50)], counts / counts.sum(axis=1, keepdims=True)
    for table in (confusion_table(counts.tolist(), names), soft_label_table(labels.tolist(), names)):
        assert table.rows == ()
        picture = Image.open(io.BytesIO(base64.b64decode(table.picture.removeprefix("data:image/png;base64,"))))
        assert picture.size == (50, 50) and picture.mode == "RGBA"
    alpha = np.asarray(picture)[..., 3]
    assert (alpha[0, [1, 2]] > 100).all() and (alpha[1:] == 0).all() and (np.diagonal(alpha) == 0).all()
    blue, orange = np.asarray(picture)[0, 1], np.asarray(picture)[0, 2]
    assert blue[2] > blue[0] and orange[0] > orange[2]


def test_agreement_tells_contradiction_from_agreement_and_unknown() -> None:
    table = agreement_table([[1, -0.5, None], [-0.5, 1, 0.9], [None, 0.9, 1]], ["a", "b", "c"])
    assert [(cell.text, cell.kind) for cell in table.rows[0]][:2] == [("1.00", "diagonal"), ("−0.50", "miss")]
    assert (table.rows[0][2].text, table.rows[0][2].strength) == ("–", 0.0)
    assert (table.rows[1][2].kind, table.rows[1][2].strength) == ("hit", 0.9)


CLASSES = ["A", "B", "C", "D"]
# Half of D is classified as A and a tenth of A as D; a fifth of B as C.
CONFUSION = [[90, 0, 0, 10], [0, 8, 2, 0], [0, 0, 10, 0], [2, 0, 0, 2]]


def matrix(alike: tuple[int, int]) -> list[list[float]]:
    weights = np.full((4, 4), 0.1)
    np.fill_diagonal(weights, 0.7)
    weights[alike] = weights[alike[::-1]] = 0.2
    return weights.tolist()


def test_pairs_are_ordered_by_the_share_of_their_images() -> None:
    first, second = frequent_confusions(CONFUSION, CLASSES, None).pairs
    assert (first.a, first.b, first.a_as_b, first.b_as_a, first.share) == ("A", "D", 10, 2, (0.1 + 0.5) / 2)
    assert (second.a, second.b, second.share) == ("B", "C", 0.1)
    assert first.rank is None and not first.predicted


def test_the_matrix_is_credited_with_what_it_had_among_its_most_alike() -> None:
    found = frequent_confusions(CONFUSION, CLASSES, matrix((0, 3)), most=1)
    assert found.pairs[0].rank == 1 and found.pairs[0].predicted
    assert "1 is among the 1 most similar pair of the soft labels, out of 6 pairs" in found.in_words
    assert "Chance alone would give 0.2" in found.in_words  # 1 · 1 / 6
    missed = frequent_confusions(CONFUSION, CLASSES, matrix((1, 2)), most=1)
    assert missed.pairs[0].rank == 6 and not missed.pairs[0].predicted  # equal with four others
    assert ", 0 are among" in missed.in_words


def test_uniform_label_smoothing_predicts_nothing() -> None:
    found = frequent_confusions(CONFUSION, CLASSES, np.full((4, 4), 0.25).tolist())
    assert [pair.predicted for pair in found.pairs] == [False, False]


def test_at_most_a_third_of_the_pairs_is_shown() -> None:
    everything = np.ones((7, 7), int).tolist()
    found = frequent_confusions(everything, list("ABCDEFG"), np.full((7, 7), 1 / 7).tolist())
    assert len(found.pairs) == 7 and "Chance alone would give 2.3" in found.in_words  # 7 · 7 / 21


def test_a_class_without_images_leaves_the_other_direction() -> None:
    pair = frequent_confusions([[0, 0], [1, 3]], ["A", "B"], None).pairs[0]
    assert (pair.a_as_b, pair.b_as_a, pair.share) == (0, 1, 0.25)


def test_a_perfect_model_confuses_nothing() -> None:
    found = frequent_confusions(np.diag([5, 5, 5]).tolist(), ["A", "B", "C"], None)
    assert found.pairs == () and found.in_words == "No two classes were confused."


def test_the_most_frequent_confusion() -> None:
    pair = frequent_confusions([[9, 3, 0], [2, 8, 0], [0, 1, 5]], ["A", "B", "C"], None).pairs[0]
    assert (pair.a, pair.b, pair.a_as_b + pair.b_as_a) == ("A", "B", 5)
