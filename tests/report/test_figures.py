from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from fake_run import MakeRun

from cclnet import build_method
from cclnet.methods import METHODS, Classes, methods_for
from cclnet.report.figures import Figure, kept_at, loss_terms, reliability, risk_coverage, training_curves
from cclnet.report.html import read_run
from cclnet.runs.scores import CalibrationStage, Estimate, ReliabilityBin, RiskPoint

SIDE = CalibrationStage(
    scores={"ece": Estimate(0.05, 0.04, 0.06), "aurc": Estimate(0.02, None, None)},
    mean_confidence=0.81,
    reliability=(ReliabilityBin(0.4, 0.4667, 10, 0.45, 0.2), ReliabilityBin(0.8, 0.8667, 90, 0.85, 0.9)),
    risk_coverage=(RiskPoint(0.1, 0.0), RiskPoint(0.8, 0.05), RiskPoint(1.0, 0.2)),
)


def curves(run: Path, collapse: float | None = 0.55) -> dict[str, Figure]:
    return {figure.title: figure for figure in training_curves(read_run(run).records, collapse)}


def words(figure: Figure) -> str:
    return " ".join(filter(None, (element.text for element in ElementTree.fromstring(figure.svg).iter("text"))))


def test_reliability_draws_a_dot_a_bin_with_the_area_of_its_share() -> None:
    figure = reliability(SIDE, "Reliability")
    dots = ElementTree.fromstring(figure.svg).findall("circle")
    areas = [(float(dot.get("r", 0)) - 2.5) ** 2 for dot in dots]
    assert areas[1] / areas[0] == pytest.approx(9, rel=0.05)
    assert ["s2" in dot.get("class", "") for dot in dots] == [True, False]  # surer than right, then less sure
    assert "5.0%" in figure.caption and "45% sure, 20% right, 10 images" in figure.svg


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
def test_the_terms_of_a_loss_are_those_that_it_is_the_sum_of(name: str) -> None:
    """What a method tells of itself at the end of an epoch is no term."""
    method = build_method(name, Classes(3, 6, (20, 10, 5)))
    labels = torch.randint(2, (8, 3)) if name in methods_for(multilabel=True) else torch.arange(8) % 3
    loss = method(torch.randn(8, 6), torch.randn(8, 3), labels)
    terms = {term: float(value.detach()) for term, value in loss.terms.items()}
    record = {"epoch": 1, "loss": sum(terms.values()), **terms, **method.end_epoch()}
    assert set(loss_terms([record])) in (set(terms), set())
