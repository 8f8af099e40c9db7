from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cclnet.errors import InputError
from cclnet.evaluation.calibration import calibration_values, fit_temperature
from cclnet.evaluation.evaluate import evaluate
from cclnet.evaluation.metrics import metrics_for, overall_metrics, point_estimates, task_of
from cclnet.runs.folder import RunFolder
from cclnet.runs.predictions import Predictions, write_predictions
from cclnet.runs.scores import ClassLeak, Estimate, Mistake, Scores, read_scores
from made_predictions import SEVERAL_LABELS, SINGLE_LABEL, given, several_labels, single_label, write_run

EVERY = {**SINGLE_LABEL, **{f"several labels, {name}": made for name, made in SEVERAL_LABELS.items()}}


def in_splits(made: Predictions, *splits: str) -> Predictions:
    return replace(made, splits=np.resize(np.array(splits), len(made)))


def evaluated_file(folder: Path, made: Predictions, **options: Any) -> Scores:
    write_predictions(folder / "p.csv", made)
    return evaluate(folder / "p.csv", **options)


def estimates(scores: Scores) -> list[tuple[str, Estimate]]:
    found = list(scores.overall.items())
    found += [pair for row in scores.per_class for pair in row.scores.items()]
    return found + [pair for stage in scores.calibration.stages() for pair in stage.scores.items()]


@pytest.mark.parametrize("made", EVERY.values(), ids=EVERY.keys())
def test_every_case_survives_json(tmp_path: Path, made: Predictions) -> None:
    scores = evaluated_file(tmp_path, made, draws=50)
    content = scores.to_json()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert Scores.from_json(content) == scores
    assert list(content) == [
        "format", "kind", "name", "model", "task", "classes", "split", "intervals", "scores", "per_class", "confusion",
        "calibration", "leak", "soft_labels", "mistakes", "warnings", "versions", "decisions",
        "abstention", "sets", "subgroups", "copies",
    ]  # fmt: skip
    for name, number in estimates(scores):
        value, low, high = number.value, number.low, number.high
        assert (low is None) == (high is None), name
        assert value is None or low is None or high is None or low <= value <= high, name
    assert scores.model is None and scores.leak is None and scores.soft_labels is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.csv"]  # a file alone is only read


@pytest.mark.parametrize("made", [single_label(90, groups=30), several_labels(90)], ids=["one label", "several"])
def test_the_values_are_those_of_scores_and_calibration(tmp_path: Path, made: Predictions) -> None:
    made = replace(made, probabilities=made.probabilities.astype(np.float32).astype(np.float64))
    scores = evaluated_file(tmp_path, made, draws=50)
    for name, value in point_estimates(made, overall_metrics(task_of(made))).items():
        number = scores.overall[name]
        assert number.value == pytest.approx(value, abs=1e-7), name
        assert number.low is not None and number.high is not None and number.low < value < number.high, name
    table = point_estimates(made, [metric for metric in metrics_for(task_of(made)) if metric.per_class])
    predicted = made.probabilities >= 0.5 if made.multilabel else np.eye(4)[made.probabilities.argmax(axis=1)]
    for k, row in enumerate(scores.per_class):
        assert row.support == made.class_counts[k] and row.predicted == predicted[:, k].sum()
        for name, values in table.items():
            assert row.scores[name].value == pytest.approx(values[k], abs=1e-7), name  # type: ignore[index]
    for name, value in calibration_values(made).items():
        assert scores.calibration.before.scores[name].value == pytest.approx(value, abs=1e-6), name
    assert scores.intervals.over == ("images" if made.groups is None else "groups")
    assert ("No groups are known" in scores.intervals.in_words) == (made.groups is None)


def test_a_run_folder_gets_its_scores_and_its_temperature(tmp_path: Path) -> None:
    made = in_splits(single_label(400), "test", "val", "calibration", "test")
    run = write_run(tmp_path / "run", made, extra="kept")
    before = (run / "model.json").read_bytes()
    scores = evaluate(run, draws=50)
    assert read_scores(run / "scores.json") == scores
    fitted = scores.calibration.temperature
    assert (run / "model.json").read_bytes() == before  # no stage edits the file of an earlier one
    assert scores.model == RunFolder(run).read_model().to_json() and scores.model["extra"] == "kept"
    assert fitted.value == pytest.approx(fit_temperature(made.of_split("calibration")), rel=1e-5)
    assert fitted.fitted_on == "calibration" and fitted.images == 100
    kept = RunFolder(run).read_calibration().temperature
    assert (kept.value, kept.fitted_on, kept.images, kept.halves) == (fitted.value, "calibration", 100, None)
    assert scores.name == "run" and scores.split.name == "test" and scores.split.images == 200
    assert scores.split.images_of_splits == {"test": 200, "val": 100, "calibration": 100}
    assert evaluate(run, draws=50) == scores  # again the same
    assert evaluate(run, draws=50, seed=1).overall != scores.overall


def test_a_run_evaluated_elsewhere_is_left_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", in_splits(single_label(100), "test", "calibration"))
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    scores = evaluate(run, tmp_path / "elsewhere", draws=20)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    written = read_scores(tmp_path / "elsewhere" / "scores.json")
    assert written.calibration.temperature.value == scores.calibration.temperature.value is not None
    assert not (tmp_path / "elsewhere" / "calibration.json").exists()
    evaluate(run, run / ".." / "run", draws=20)  # the run folder by another name
    fitted = json.loads((run / "calibration.json").read_text())["temperature"]
    assert fitted["value"] == written.calibration.temperature.value


def test_scores_of_a_file_go_where_they_are_asked_to(tmp_path: Path) -> None:
    scores = evaluated_file(tmp_path, single_label(20), draws=20, out=tmp_path / "new" / "folder")
    assert read_scores(tmp_path / "new" / "folder" / "scores.json") == scores


@pytest.mark.parametrize(
    ("splits", "reported"), [(("test", "val"), "test"), (("val", "train"), "val"), (("train", "calibration"), "all")]
)
def test_test_is_reported_else_val_else_all(tmp_path: Path, splits: tuple[str, ...], reported: str) -> None:
    scores = evaluated_file(tmp_path, in_splits(single_label(40), *splits), draws=20)
    assert scores.split.name == reported
    assert ("The file has no split 'test' or 'val', so all of its images are reported." in scores.warnings) == (
        reported == "all"
    )


def test_a_missing_class_and_what_was_taken_for_it_are_named(tmp_path: Path) -> None:
    scores = evaluated_file(tmp_path, given([0, 0, 1], [[0.8, 0.1, 0.1], [0.1, 0.1, 0.8], [0.1, 0.8, 0.1]]), draws=20)
    assert scores.split.missing_classes == ("cat",)
    assert "No image of cat in the reported split: left out of every macro mean." in scores.warnings
    assert "The model predicted a class that is not in the reported split for 1 image." in scores.warnings
    assert scores.per_class[2].scores["f1"] == Estimate(None, None, None)
    assert scores.overall["macro_f1"].value == pytest.approx((2 / 3 + 1) / 2)


def test_thin_classes_and_undefined_scores_are_named(tmp_path: Path) -> None:
    scores = evaluated_file(tmp_path, SINGLE_LABEL["one class throughout"], draws=20)
    assert any(w.startswith("Fewer than 10 images of bee (3)") for w in scores.warnings)
    assert "Undefined on these images: kappa, macro_auroc." in scores.warnings
    assert scores.overall["accuracy"] == Estimate(1.0, pytest.approx(0.025 ** (1 / 3)), 1.0)


def test_probability_zero_for_the_truth_is_told(tmp_path: Path) -> None:
    scores = evaluated_file(tmp_path, SINGLE_LABEL["impossible"], draws=20)
    assert "The true class had probability 0 on 1 image; the NLL counts it as 2e-16." in scores.warnings


def test_groups_seen_in_training_are_counted(tmp_path: Path) -> None:
    made = given([0, 0, 1, 1], [[0.8, 0.2]] * 4)
    made = replace(made, images=np.array(["w", "x", "y", "z"]), groups=np.array(["g1", "g2", "g3", "g4"]))
    split = (
        "image,part,group,label\na,train,g1,ant\nb,train,g3,bee\nw,val,g1,ant\nx,val,g2,ant\ny,val,g3,bee\nz,val,,bee\n"
    )
    scores = evaluate(write_run(tmp_path / "run", made, split=split), draws=20)
    assert scores.leak is not None and scores.leak.images == 2 and scores.leak.share == 0.5
    assert scores.leak.per_class == (ClassLeak("ant", 1, 0.5), ClassLeak("bee", 1, 0.5))
    assert "2 of 4 images (50%) show a lesion or patient that the model was trained on." in scores.leak.in_words
    assert any(w.endswith("Scores on new patients will be lower.") for w in scores.warnings)
    clean = evaluate(write_run(tmp_path / "clean", made, split=split.replace("train", "test")), draws=20)
    assert clean.leak is not None and clean.leak.images == 0 and clean.leak.in_words.startswith("None of 3 images")
    assert clean.leak.in_words.endswith("Of 1 others it is not known.")
    elsewhere = replace(made, images=np.array([f"folder/{name}" for name in made.images]))
    assert evaluate(write_run(tmp_path / "elsewhere", elsewhere, split=split), draws=20).leak is None
    no_groups = "image,part,label\nw,val,ant\n"
    assert evaluate(write_run(tmp_path / "none", made, split=no_groups), draws=20).leak is None


def test_a_temperature_fitted_on_reported_groups_is_told(tmp_path: Path) -> None:
    made = replace(
        in_splits(single_label(40), "val", "calibration"), groups=np.array(["g"] * 2 + [f"h{i}" for i in range(38)])
    )
    scores = evaluated_file(tmp_path, made, draws=20)
    assert "The temperature was fitted on groups that are reported as well (1 image)." in scores.warnings


def test_the_matrix_is_summed_up_in_the_order_of_the_classes(tmp_path: Path) -> None:
    made = single_label(60, 3)
    matrix = np.array([[0.6, 0.1, 0.3], [0.1, 0.7, 0.2], [0.3, 0.2, 0.5]])
    run = write_run(tmp_path / "run", made, matrix=matrix, class_counts=[10, 100, 1], collapse_softness=0.5)
    found = evaluate(run, draws=20)
    assert found.soft_labels is not None and found.soft_labels.matrix == tuple(map(tuple, matrix.tolist()))
    assert found.soft_labels.collapse_softness == 0.5
    assert found.soft_labels.inverse_frequency_agreement == pytest.approx(1.0)
    assert any("mostly follow inverse class frequency (rank correlation 1.00)" in w for w in found.warnings)
    # the same matrix with its classes in another order
    order = [2, 0, 1]
    text = ["class," + ",".join(made.classes[k] for k in order)]
    text += [f"{made.classes[i]}," + ",".join(str(matrix[i, k]) for k in order) for i in order]
    (run / "soft_labels.csv").write_text("\n".join(text) + "\n")
    assert evaluate(run, draws=20).soft_labels == found.soft_labels
    (run / "soft_labels.csv").write_text("class,a,b\na,0.5,0.5\nb,0.5,0.5\n")
    with pytest.raises(InputError, match="do not belong to one run"):
        evaluate(run, draws=20)


def test_the_most_confident_errors_come_first(tmp_path: Path) -> None:
    made = given([0, 0, 1, 1], [[0.1, 0.9], [0.4, 0.6], [0.2, 0.8], [0.7, 0.3]])
    scores = evaluated_file(tmp_path, made, draws=20)
    assert [m.image for m in scores.mistakes] == ["0", "3", "1"]
    assert scores.mistakes[0] == Mistake("0", "ant", "bee", 0.9, 0.1)
    assert len(evaluated_file(tmp_path, single_label(300, skill=-3), draws=20).mistakes) == 24


def test_model_json_says_whether_labels_are_several(tmp_path: Path) -> None:
    made = replace(several_labels(30, 2), labels=np.resize(np.array([[1, 0], [0, 1]], np.uint8), (30, 2)))
    scores = evaluate(write_run(tmp_path / "run", made), draws=20)  # one label each, as if of one kind
    assert scores.task == "multi-label"


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
