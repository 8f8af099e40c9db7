from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cclnet.errors import InputError
from cclnet.evaluation.calibration import MEASURES, fit_temperature, measure
from cclnet.evaluation.evaluate import evaluate
from cclnet.evaluation.metrics import PER_CLASS, score
from cclnet.runs.folder import RunFolder
from cclnet.runs.predictions import Predictions, write_predictions
from made_predictions import SEVERAL_LABELS, SINGLE_LABEL, given, several_labels, single_label, write_run

EVERY = {**SINGLE_LABEL, **{f"several labels, {name}": made for name, made in SEVERAL_LABELS.items()}}


def parted(made: Predictions, *parts: str) -> Predictions:
    return replace(made, splits=np.resize(np.array(parts), len(made)))


def judged_file(folder: Path, made: Predictions, **options: Any) -> dict[str, Any]:
    write_predictions(folder / "p.csv", made)
    return evaluate(folder / "p.csv", **options)


def numbers_with_interval(judged: dict[str, Any]) -> list[tuple[str, dict[str, float | None]]]:
    found = list(judged["scores"].items())
    found += [(name, row[name]) for row in judged["per_class"] for name in PER_CLASS]
    stages = [judged["calibration"][stage] for stage in ("before", "after")]
    return found + [(name, stage[name]) for stage in stages if stage for name in MEASURES]


@pytest.mark.parametrize("made", EVERY.values(), ids=EVERY.keys())
def test_every_case_gives_the_whole_dict_as_plain_json(tmp_path: Path, made: Predictions) -> None:
    judged = judged_file(tmp_path, made, draws=50)
    assert json.loads(json.dumps(judged, allow_nan=False)) == judged
    assert list(judged) == [
        "format", "kind", "name", "model", "task", "classes", "split", "intervals", "scores", "per_class", "confusion",
        "calibration", "leak", "correlation", "mistakes", "warnings", "versions",
    ]  # fmt: skip
    for name, number in numbers_with_interval(judged):
        value, low, high = number["value"], number["low"], number["high"]
        assert (low is None) == (high is None), name
        assert value is None or low is None or high is None or low <= value <= high, name
    assert judged["model"] is None and judged["leak"] is None and judged["correlation"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.csv"]  # a file alone is only read


@pytest.mark.parametrize("made", [single_label(90, groups=30), several_labels(90)], ids=["one label", "several"])
def test_the_values_are_those_of_scores_and_calibration(tmp_path: Path, made: Predictions) -> None:
    made = replace(made, probabilities=made.probabilities.astype(np.float32).astype(np.float64))
    judged = judged_file(tmp_path, made, draws=50)
    values, table = score(made)
    for name, value in values.items():
        assert judged["scores"][name]["value"] == pytest.approx(value, abs=1e-7), name
        assert judged["scores"][name]["low"] < value < judged["scores"][name]["high"], name
    for k, row in enumerate(judged["per_class"]):
        assert row["support"] == table["support"][k] and row["predicted"] == table["predicted"][k]
        for name in PER_CLASS:
            assert row[name]["value"] == pytest.approx(table[name][k], abs=1e-7), name
    for name, value in measure(made).items():
        assert judged["calibration"]["before"][name]["value"] == pytest.approx(value, abs=1e-6), name
    assert judged["intervals"]["over"] == ("images" if made.groups is None else "groups")
    assert ("No groups are known" in judged["intervals"]["in_words"]) == (made.groups is None)


def test_a_run_folder_gets_its_scores_and_its_temperature(tmp_path: Path) -> None:
    made = parted(single_label(400), "test", "val", "calibration", "test")
    run = write_run(tmp_path / "run", made, extra="kept")
    before = (run / "model.json").read_bytes()
    judged = evaluate(run, draws=50)
    assert json.loads((run / "scores.json").read_text()) == judged
    assert (run / "model.json").read_bytes() == before  # no stage edits the file of an earlier one
    assert judged["model"] == RunFolder(run).read_model().to_json() and judged["model"]["extra"] == "kept"
    aside, fitted = judged["calibration"]["temperature"], RunFolder(run).read_calibration().temperature
    assert fitted.value == aside["value"] == pytest.approx(fit_temperature(made.of_split("calibration")), rel=1e-5)
    assert (fitted.fitted_on, fitted.images, fitted.halves) == ("calibration", 100, None)
    assert aside["fitted_on"] == "calibration" and aside["images"] == 100
    assert judged["name"] == "run" and judged["split"]["name"] == "test" and judged["split"]["images"] == 200
    assert judged["split"]["images_of_splits"] == {"test": 200, "val": 100, "calibration": 100}
    assert evaluate(run, draws=50) == judged  # again the same
    assert evaluate(run, draws=50, seed=1)["scores"] != judged["scores"]


def test_a_run_judged_elsewhere_is_left_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", parted(single_label(100), "test", "calibration"))
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    judged = evaluate(run, tmp_path / "elsewhere", draws=20)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    written = json.loads((tmp_path / "elsewhere" / "scores.json").read_text())
    fitted = written["calibration"]["temperature"]["value"]
    assert fitted == judged["calibration"]["temperature"]["value"] is not None
    evaluate(run, run / ".." / "run", draws=20)  # the run folder by another name
    assert RunFolder(run).read_calibration().temperature.value == fitted


def test_scores_of_a_file_go_where_they_are_asked_to(tmp_path: Path) -> None:
    judged = judged_file(tmp_path, single_label(20), draws=20, out=tmp_path / "new" / "folder")
    assert json.loads((tmp_path / "new" / "folder" / "scores.json").read_text()) == judged


@pytest.mark.parametrize(
    ("splits", "reported"), [(("test", "val"), "test"), (("val", "train"), "val"), (("train", "calibration"), "all")]
)
def test_test_is_reported_else_val_else_all(tmp_path: Path, splits: tuple[str, ...], reported: str) -> None:
    judged = judged_file(tmp_path, parted(single_label(40), *splits), draws=20)
    assert judged["split"]["name"] == reported
    assert ("The file names no part 'test' or 'val', so all of its images are reported." in judged["warnings"]) == (
        reported == "all"
    )


def test_a_missing_class_and_what_was_taken_for_it_are_named(tmp_path: Path) -> None:
    judged = judged_file(tmp_path, given([0, 0, 1], [[0.8, 0.1, 0.1], [0.1, 0.1, 0.8], [0.1, 0.8, 0.1]]), draws=20)
    assert judged["split"]["missing_classes"] == ["cat"]
    assert "No image of cat in the reported part: left out of every macro mean." in judged["warnings"]
    assert "The model took 1 image for a class that is not in the reported part." in judged["warnings"]
    assert judged["per_class"][2]["f1"] == {"value": None, "low": None, "high": None}
    assert judged["scores"]["macro_f1"]["value"] == pytest.approx((2 / 3 + 1) / 2)


def test_thin_classes_and_undefined_scores_are_named(tmp_path: Path) -> None:
    judged = judged_file(tmp_path, SINGLE_LABEL["one class throughout"], draws=20)
    assert any(w.startswith("Fewer than 10 images of bee (3)") for w in judged["warnings"])
    assert "Undefined on these images: kappa, macro_auroc." in judged["warnings"]
    assert judged["scores"]["accuracy"] == {"value": 1.0, "low": pytest.approx(0.025 ** (1 / 3)), "high": 1.0}


def test_probability_zero_for_the_truth_is_told(tmp_path: Path) -> None:
    judged = judged_file(tmp_path, SINGLE_LABEL["impossible"], draws=20)
    assert "The true class had probability 0 on 1 image; the nll counts it as 2e-16." in judged["warnings"]


def test_groups_seen_in_training_are_counted(tmp_path: Path) -> None:
    made = given([0, 0, 1, 1], [[0.8, 0.2]] * 4)
    made = replace(made, images=np.array(["w", "x", "y", "z"]), groups=np.array(["g1", "g2", "g3", "g4"]))
    split = (
        "image,part,group,label\na,train,g1,ant\nb,train,g3,bee\nw,val,g1,ant\nx,val,g2,ant\ny,val,g3,bee\nz,val,,bee\n"
    )
    judged = evaluate(write_run(tmp_path / "run", made, split=split), draws=20)
    assert judged["leak"]["images"] == 2 and judged["leak"]["share"] == 0.5
    assert judged["leak"]["per_class"] == [
        {"class": "ant", "images": 1, "share": 0.5}, {"class": "bee", "images": 1, "share": 0.5},
    ]  # fmt: skip
    assert "2 of 4 images (50%) show a lesion or patient that the model was trained on." in judged["leak"]["in_words"]
    assert any(w.endswith("Scores on new patients will be lower.") for w in judged["warnings"])
    clean = evaluate(write_run(tmp_path / "clean", made, split=split.replace("train", "test")), draws=20)
    assert clean["leak"]["images"] == 0 and clean["leak"]["in_words"].startswith("None of 3 images")
    assert clean["leak"]["in_words"].endswith("Of 1 others it is not known.")
    elsewhere = replace(made, images=np.array([f"folder/{name}" for name in made.images]))
    assert evaluate(write_run(tmp_path / "elsewhere", elsewhere, split=split), draws=20)["leak"] is None
    no_groups = "image,part,label\nw,val,ant\n"
    assert evaluate(write_run(tmp_path / "none", made, split=no_groups), draws=20)["leak"] is None


def test_a_temperature_fitted_on_reported_groups_is_told(tmp_path: Path) -> None:
    made = replace(
        parted(single_label(40), "val", "calibration"), groups=np.array(["g"] * 2 + [f"h{i}" for i in range(38)])
    )
    judged = judged_file(tmp_path, made, draws=20)
    assert "The temperature was fitted on groups that are reported as well (1 image)." in judged["warnings"]


def test_the_matrix_is_summed_up_in_the_order_of_the_classes(tmp_path: Path) -> None:
    made = single_label(60, 3)
    matrix = np.array([[0.6, 0.1, 0.3], [0.1, 0.7, 0.2], [0.3, 0.2, 0.5]])
    run = write_run(tmp_path / "run", made, matrix=matrix, class_counts=[10, 100, 1], collapse_softness=0.5)
    found = evaluate(run, draws=20)
    assert found["correlation"]["matrix"] == matrix.tolist()
    assert found["correlation"]["collapse_softness"] == 0.5
    assert found["correlation"]["rarity_agreement"] == pytest.approx(1.0)
    assert any("mostly follows how rare the classes are (rank correlation 1.00)" in w for w in found["warnings"])
    # the same matrix with its classes in another order
    order = [2, 0, 1]
    text = ["class," + ",".join(made.classes[k] for k in order)]
    text += [f"{made.classes[i]}," + ",".join(str(matrix[i, k]) for k in order) for i in order]
    (run / "soft_labels.csv").write_text("\n".join(text) + "\n")
    assert evaluate(run, draws=20)["correlation"]["matrix"] == matrix.tolist()
    (run / "soft_labels.csv").write_text("class,a,b\na,0.5,0.5\nb,0.5,0.5\n")
    with pytest.raises(InputError, match="They do not belong to one run"):
        evaluate(run, draws=20)


def test_the_most_confident_errors_come_first(tmp_path: Path) -> None:
    made = given([0, 0, 1, 1], [[0.1, 0.9], [0.4, 0.6], [0.2, 0.8], [0.7, 0.3]])
    judged = judged_file(tmp_path, made, draws=20)
    assert [m["image"] for m in judged["mistakes"]] == ["0", "3", "1"]
    assert judged["mistakes"][0] == {
        "image": "0", "label": "ant", "predicted": "bee", "probability": 0.9, "probability_of_label": 0.1,
    }  # fmt: skip
    assert len(judged_file(tmp_path, single_label(300, skill=-3), draws=20)["mistakes"]) == 24


def test_model_json_says_whether_labels_are_several(tmp_path: Path) -> None:
    made = replace(several_labels(30, 2), labels=np.resize(np.array([[1, 0], [0, 1]], np.uint8), (30, 2)))
    judged = evaluate(write_run(tmp_path / "run", made), draws=20)  # one label each, as if of one kind
    assert judged["task"] == "multi-label"


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "expected an object, got list")])
def test_a_broken_model_json_is_named(tmp_path: Path, text: str, message: str) -> None:
    run = write_run(tmp_path / "run", single_label(10))
    (run / "model.json").write_text(text)
    with pytest.raises(InputError, match=message):
        evaluate(run)


@pytest.mark.parametrize(
    ("text", "message"), [("", "cannot be read as comma-separated text"), ("image,group\nx,g\n", "has no column split")]
)
def test_a_broken_split_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"split\.csv {message}"):
        evaluate(write_run(tmp_path / "run", single_label(10), split=text), draws=10)


def test_a_folder_without_predictions_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no predictions\.csv"):
        evaluate(tmp_path)
