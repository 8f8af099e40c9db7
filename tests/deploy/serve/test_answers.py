"""Sentences that explain a prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from served import colour_model, unlike_statistics

from cclnet.deploy.predictor import Prediction
from cclnet.deploy.serve.answers import (
    UNLIKE,
    explain_confidence,
    heat_location,
    make_answer,
    model_info,
    per_hundred,
    percent,
)
from cclnet.deploy.serve.decoding import Upload
from cclnet.deploy.serve.guard import ServeSettings
from cclnet.evaluation.decision import measure_curve
from cclnet.runs.decision_rule import DecisionRule
from cclnet.runs.model import Calibration, ConformalThresholds, FittedTemperature


def predicted(*p: float, multilabel: bool = False) -> Prediction:
    (found,) = colour_model(Path(), multilabel=multilabel).describe(np.array([p]))
    return found


@pytest.mark.parametrize(
    ("p", "words"), [(0.99, "Very sure"), (0.8, "Fairly sure"), (0.6, "Not very sure"), (0.4, "Unsure")]
)
def test_sureness(p: float, words: str) -> None:
    upload = Upload(np.zeros((16, 16, 3), np.uint8), (0.0, 0.1, 1.0, 0.8), "hash", "")
    output = (np.array([p, (1 - p) / 2, (1 - p) / 2]), None, None)
    answer = make_answer(ServeSettings("m"), colour_model(Path()), upload, output, None)
    assert (answer.label, answer.sureness) == ("red", words)
    assert (answer.seen.left, answer.seen.top, answer.seen.width, answer.seen.height) == upload.seen


def test_second_class_and_calibrated_frequency() -> None:
    lines = explain_confidence(predicted(0.9, 0.08, 0.02), multilabel=False, calibrated=True, curve=None)
    assert lines == [
        "The second most probable class is green (8.0%).",
        "By its calibration, about 90 in 100 such images are of this class.",
    ]


def test_without_a_temperature_no_frequency_is_claimed() -> None:
    lines = explain_confidence(predicted(0.9, 0.08, 0.02), multilabel=False, calibrated=False, curve=None)
    assert "not calibrated" in lines[1] and not any("in 100" in line for line in lines)


def test_the_offsets_are_told(tmp_path: Path) -> None:
    offsets = (0.5, -0.75, 0.25)
    model = colour_model(tmp_path, calibration=Calibration(FittedTemperature(1.5, offsets=offsets)))
    info = model_info(model, ServeSettings("m"))
    assert info.offsets == list(offsets) and info.calibrated and info.temperature == 1.5


def test_below_50_percent_a_person_should_look() -> None:
    (line, _) = explain_confidence(predicted(0.4, 0.35, 0.25), multilabel=False, calibrated=True, curve=None)
    assert line == (
        "No class reaches 50%; the second most probable is green (35.0%). A person should look at this image."
    )


@pytest.mark.parametrize(
    ("sure", "about", "wrong"), [(0.9, "60", "none"), (0.7, "80", "25.0%"), (0.55, "100", "30.0%")]
)
def test_error_rate_is_that_of_images_at_least_as_sure(sure: float, about: str, wrong: str) -> None:
    confidence = np.repeat([0.95, 0.8, 0.6], [60, 20, 20])
    right = np.repeat([True, False, True, False], [60, 20, 10, 10])
    curve = measure_curve(confidence, right, "val")
    lines = explain_confidence(predicted(sure, 1 - sure, 0.0), multilabel=False, calibrated=True, curve=curve)
    assert lines[2] == (
        f"On 100 held-out images it was at least this confident for {about}, and wrong for {wrong} of these."
    )


def test_few_images_give_no_error_rate() -> None:
    curve = measure_curve(np.array([0.99, 0.5, 0.4]), np.array([True, True, False]), "val")
    assert len(explain_confidence(predicted(0.45, 0.4, 0.15), multilabel=False, calibrated=True, curve=curve)) == 2
    assert len(explain_confidence(predicted(1.0, 0.0, 0.0), multilabel=False, calibrated=True, curve=curve)) == 2


def test_multilabel_names_the_closest_call() -> None:
    found = predicted(0.9, 0.45, 0.7, multilabel=True)
    (line,) = explain_confidence(found, multilabel=True, calibrated=True, curve=None)
    assert line == "2 of 3 findings have a probability of at least 50%. Closest call: green (45.0%)."


@pytest.mark.parametrize(
    ("row", "column", "words"),
    [(0, 0, "in the upper left"), (0, 4, "in the upper part"), (4, 8, "on the right"), (8, 8, "in the lower right"),
     (4, 4, "in the centre or all over the image")],
)  # fmt: skip
def test_heat_location(row: int, column: int, words: str) -> None:
    heat = np.full((9, 9), 0.1, np.float32)
    heat[row, column] = 1.0
    assert heat_location(heat) == words


def test_heat_location_of_other_maps() -> None:
    corner = np.array([[1, 0, 0], [0, 0, 0], [0, 0, 0]], np.float32)
    assert heat_location(corner) == "in the upper left"
    assert heat_location(np.ones((3, 3), np.float32)) == "in the centre or all over the image"
    assert heat_location(np.zeros((3, 3), np.float32)) == "nowhere"


def test_probabilities_in_words() -> None:
    assert [percent(p) for p in (0.9341, 0.0004, 1.0, 0.0)] == ["93.4%", "less than 0.1%", "100%", "0%"]
    words = [per_hundred(p) for p in (0.934, 0.998, 0.002)]
    assert words == ["about 93 in 100", "more than 99 in 100", "fewer than 1 in 100"]


def test_an_unlike_image_is_refused() -> None:
    """The features of the served model are colours; it was trained on dark red ones."""
    model = colour_model(Path(), statistics=unlike_statistics())
    upload = Upload(np.zeros((16, 16, 3), np.uint8), (0.0, 0.0, 1.0, 1.0), "hash", "")
    for colour, refused in (((60, 5, 5), False), ((10, 10, 200), True)):
        p, heat, ood = model.run_scored(np.full((1, 16, 16, 3), colour, np.uint8))
        assert ood is not None
        answer = make_answer(ServeSettings("m"), model, upload, (p[0], None, float(ood[0])), None)
        assert answer.ood is not None and answer.ood.refused == refused == (answer.ood.score > answer.ood.limit)
        assert (answer.sureness == UNLIKE) == refused and heat is None


def test_too_few_held_out_images_refuse_nothing() -> None:
    """The threshold would be infinite, which JSON does not have."""
    few = unlike_statistics()
    model = colour_model(Path(), statistics=replace(few, held_out=few.held_out[:20]))
    p, _, ood = model.run_scored(np.full((1, 16, 16, 3), 255, np.uint8))
    upload = Upload(np.zeros((16, 16, 3), np.uint8), (0.0, 0.0, 1.0, 1.0), "hash", "")
    assert ood is not None and make_answer(ServeSettings("m"), model, upload, (p[0], None, ood[0]), None).ood is None


def test_the_prediction_set_and_the_rule_are_told() -> None:
    thresholds = ConformalThresholds("val", 50, "aps", (0.8, 0.9), {"aps": (0.4, 0.75)})
    rule = DecisionRule("costs", costs=((0.0, 1.0, 1.0), (20.0, 0.0, 20.0), (1.0, 1.0, 0.0)))
    model = colour_model(Path(), calibration=Calibration(sets=thresholds), rule=rule)
    upload = Upload(np.zeros((16, 16, 3), np.uint8), (0.0, 0.0, 1.0, 1.0), "hash", "")
    output = (np.array([0.6, 0.25, 0.15]), None, None)
    answer = make_answer(ServeSettings("m", sets="0.9"), model, upload, output, None)
    assert answer.set is not None and (answer.set.level, answer.set.classes) == (0.9, ["red", "green"])
    assert (answer.label, answer.rule, answer.confidence) == ("green", "costs", 0.25)
    assert answer.words[0] == "Chosen by the costs of errors; the most probable class is red (60.0%)."
