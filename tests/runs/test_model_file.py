"""model.json and calibration.json: written and read again, old forms read, foreign values refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cclnet.errors import InputError
from cclnet.runs.calibration_map import CalibrationMap
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import (
    AbstentionCurve,
    Calibration,
    ExportInfo,
    FittedTemperature,
    Member,
    ModelDescription,
    TrainedInfo,
    model_from_json,
    read_calibration_file,
    read_model_file,
    write_model_file,
)
from cclnet.runs.provenance import Commit

MODEL = ModelDescription("resnet18", ("a", "b"), False, 256, (224, 192), (0.5, 0.4, 0.6), (0.2, 0.25, 0.3))
FULL = replace(
    MODEL,
    method="ccl",
    method_settings={"margin": "inf"},
    class_counts=(10, 3),
    collapse_softness=0.5,
    target=((0.9, 0.1), (0.2, 0.8)),
    trained=TrainedInfo(
        5, 6, {"val_accuracy": 0.9, "epoch": 4.0}, 12.5, 1, "CPU", 2, "32-true", {"torch": "2"}, Commit("abc", False),
        13, "isic", "0f",
    ),
    export=ExportInfo(
        "onnx", "model.onnx", ("resize",), ("normalise",), "softmax", None, True, {"images": 8}, {"x": "1"}
    ),
    extra={"note": "kept [1,  2]", "export": "a name that a field has"},
)  # fmt: skip
CURVE = AbstentionCurve("val", 4, *np.array([[0.8, 0.0], [0.5, 1.0], [0.0, 0.25], [2.0, 3.0]]))


@pytest.mark.parametrize("model", [MODEL, FULL], ids=["least", "full"])
def test_a_description_is_read_as_it_was_written(tmp_path: Path, model: ModelDescription) -> None:
    write_model_file(tmp_path / "model.json", model)
    assert read_model_file(tmp_path / "model.json") == model
    content = json.loads((tmp_path / "model.json").read_text())
    assert content["format"] == 2 and not {"temperature", "thresholds"} & set(content)
    assert '"crop": [ 224, 192 ]' in (tmp_path / "model.json").read_text()  # rows of numbers stay on one line


@given(
    st.dictionaries(
        st.sampled_from(sorted(FULL.to_json())), st.none() | st.booleans() | st.integers() | st.text("a", max_size=1)
    )
)
def test_any_content_is_read_or_refused(changes: dict[str, Any]) -> None:
    try:
        read = model_from_json(FULL.to_json() | changes, "model.json")
    except InputError:
        return
    assert model_from_json(read.to_json(), "model.json") == read


@pytest.mark.parametrize(
    ("temperature", "curve"),
    [(FittedTemperature(), None), (FittedTemperature(1.3, "val", 100), CURVE),
     (FittedTemperature(1.3, "cross-fitted halves", 100, (1.2, 1.4)), None),
     (FittedTemperature(1.3, "val", 100, None, (0.25, -0.1, -0.15)), CURVE)],
)  # fmt: skip
def test_a_calibration_is_read_as_it_was_written(
    tmp_path: Path, temperature: FittedTemperature, curve: AbstentionCurve | None
) -> None:
    RunFolder(tmp_path).write_calibration(Calibration(temperature, curve))
    read = read_calibration_file(tmp_path / "calibration.json")
    assert read.temperature == temperature and (read.abstention is None) == (curve is None)
    if curve is not None and read.abstention is not None:
        assert read.abstention.to_json() == curve.to_json()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_offsets_that_are_no_numbers_are_refused(tmp_path: Path, value: float) -> None:
    content = {"format": 2, "temperature": {"value": 1.5, "offsets": [0.5, value]}}
    (tmp_path / "calibration.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"calibration\.json .*(NaN|Infinity|finite|offsets)"):
        read_calibration_file(tmp_path / "calibration.json")


def test_offsets_of_other_classes_are_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.write_calibration(Calibration(FittedTemperature(1.5, offsets=(0.5, -0.75, 0.25))))
    assert run.read_calibration().map.offsets == (0.5, -0.75, 0.25)
    run.write_description(MODEL)
    with pytest.raises(InputError, match=r"calibration\.json is refused: .*3 offsets, but 2 are needed"):
        run.read_calibration()
    run.write_description(replace(MODEL, classes=("a", "b", "c"), multilabel=True))
    with pytest.raises(InputError, match="with several labels there are none"):
        run.read_calibration()


def test_the_members_of_an_ensemble_have_offsets_of_their_own(tmp_path: Path) -> None:
    members = (Member.of(MODEL, CalibrationMap(1.5, (0.5, -0.5))), Member.of(MODEL, CalibrationMap(1.2)))
    whole = replace(MODEL, members=members)
    write_model_file(tmp_path / "model.json", whole)
    assert read_model_file(tmp_path / "model.json") == whole
    first, second = json.loads((tmp_path / "model.json").read_text())["members"]
    assert first["offsets"] == [0.5, -0.5] and "offsets" not in second  # as in older versions
    with pytest.raises(InputError, match=r"members\[0\]: the calibration has 3 offsets, but 2 are needed"):
        write_model_file(tmp_path / "odd.json", replace(whole, members=(replace(members[0], offsets=(0.1, 0.2, 0.3)),)))
        read_model_file(tmp_path / "odd.json")
    with pytest.raises(InputError, match="3 offsets, but 2 are needed"):
        Member.of(MODEL, CalibrationMap(1.5, (0.5, -0.75, 0.25)))


def test_the_calibration_of_an_old_export_is_in_its_model_json(tmp_path: Path) -> None:
    old = {"part": "val", "images": 4, "rows": [[0.8, 0.5, 0.0], [0.0, 1.0, 0.25]]}
    content = MODEL.to_json() | {"format": 1, "temperature": 1.5, "thresholds": old}
    (tmp_path / "model.json").write_text(json.dumps(content))
    read = read_calibration_file(tmp_path / "calibration.json")
    assert read.temperature.value == 1.5 and read.abstention is not None
    assert (read.abstention.split, read.abstention.at(coverage=1.0), read.abstention.independent) == ("val", 1, None)
    write_model_file(tmp_path / "model.json", MODEL)  # format 2 has nothing of this
    assert read_calibration_file(tmp_path / "calibration.json") == Calibration()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"format": 3}, "has format 3; this version of cclnet reads format 1 and 2"),
        ({"format": 1, "temperature": 1.5}, "temperature must be a table .*got 1.5"),
        (
            {"format": 1, "temperature": {"value": 0}},
            r"temperature\.value must be .*at least 0\.001 and at most 1000, got 0",
        ),
        ({"format": 1, "temperature": {"value": 1, "images": -1}}, r"temperature\.images must be at least 0, got -1"),
        ({"format": 2, "temperature": {"value": 1, "offsets": [0.5, 1e9]}}, r"offsets\[1\] must be .*at most 1000"),
        ({"format": 2, "temperature": {"value": 1, "offsets": [0.5, "0"]}}, r"offsets\[1\] must be a number, got '0'"),
        ({"format": 2, "temperature": {"value": 1, "offsets": 0.5}}, r"offsets must be a list of numbers"),
        ({"format": 2, "temperature": {"offsets": [0.5, -0.5]}}, "2 offsets, but they need a temperature"),
        ({"format": 1, "temperature": {"value": 1, "halves": [1]}}, r"temperature\.halves must be a list of 2 numbers"),
        ({"format": 1, "temperature": {"value": 1, "halves": [1, 0]}}, r"temperature\.halves\[1\] must be .*got 0"),
        ({"format": 1, "abstention": []}, r"abstention curve is refused: .*got \[\]"),
        ({"format": 1, "abstention": CURVE.to_json() | {"rows": [[0.5, 0.5, 0], [0, 0.9, 0]]}}, "must keep all images"),
        ({"format": 1, "abstention": CURVE.to_json() | {"rows": [[0.5, 0.5, 0], [0.1, 1, 0]]}}, "at threshold 0.1"),
        ({"format": 1, "abstention": CURVE.to_json() | {"rows": [[0, 0.5, 0], [0.5, 0.9, 0], [0, 1, 0]]}}, "must not"),
        ({"format": 1, "abstention": CURVE.to_json() | {"rows": [[0.5, 1e-9, 0], [0, 1, 0]]}}, "keeps no image"),
        ({"format": 1, "abstention": CURVE.to_json() | {"images": True}}, "images must be a whole number, got True"),
        ({"format": 1, "abstention": CURVE.to_json() | {"images": 10**400}}, r"images must be below 2\^63"),
        (
            {"format": 1, "abstention": CURVE.to_json() | {"independent": [1e-300] * len(CURVE.coverage)}},
            r"independent\[0\] must be .*at least 0\.5",
        ),
    ],
)
def test_a_calibration_from_elsewhere_is_checked(tmp_path: Path, content: object, reason: str) -> None:
    (tmp_path / "calibration.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=reason):
        read_calibration_file(tmp_path / "calibration.json")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"trained": {"seed": 10**400}}, r"trained\.seed must be below 2\^63"),
        ({"trained": {"seconds": 10**400}}, r"trained\.seconds must be a number"),
        ({"trained": 3}, "trained must be a table"),
        ({"trained": {"images": True}}, r"trained\.images must be a whole number, got True"),
        ({"class_counts": [2**63, 1]}, r"class_counts\[0\] must be below 2\^63"),
        ({"method": "\ud800"}, "half a surrogate pair"),
        ({"anything": ["\ud800"]}, "half a surrogate pair"),
    ],
)
def test_values_that_no_program_can_use(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    (tmp_path / "model.json").write_text(json.dumps(MODEL.to_json() | change))
    with pytest.raises(InputError, match=reason):
        read_model_file(tmp_path / "model.json")


def test_numbers_of_thousands_of_digits_and_endless_nesting(tmp_path: Path) -> None:
    for text in (f'{{"format": {"9" * 5000}}}', "[" * 100_000):
        (tmp_path / "model.json").write_text(text)
        with pytest.raises(InputError, match="is not JSON"):
            read_model_file(tmp_path / "model.json")


def test_markup_in_names_is_text(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(MODEL.to_json() | {"method": "[/red]"}))
    assert read_model_file(tmp_path / "model.json").method == "[/red]"
