"""The run folder: every file is read as it was written, old runs are still read, and torch is not needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import cclnet.runs
from cclnet.errors import InputError
from cclnet.evaluation.evaluate import evaluate
from cclnet.runs.checksums import accept_folder
from cclnet.runs.folder import RunFolder, SplitTable, free_name, open_run, read_split_file, write_split_file
from cclnet.runs.model import Calibration, FittedTemperature, ModelDescription, TrainedInfo
from cclnet.settings import Settings
from made_predictions import single_label

CLASSES = ("ant", "bee", "cat", "dog")
MODEL = ModelDescription(
    "resnet18", CLASSES, False, 36, (32, 32), (0.5, 0.4, 0.6), (0.2, 0.25, 0.3), "ccl", {}, (4, 3, 2, 1), 0.5,
    trained=TrainedInfo(epochs=3, seed=7, images=10),
)  # fmt: skip
MATRIX = np.array([[0.6, 0.2, 0.15, 0.05], [0.1, 0.7, 0.1, 0.1], [0.3, 0.05, 0.6, 0.05], [0.1, 0.2, 0.1, 0.6]])
SPLIT = SplitTable(np.array(["a", "b"]), np.array(["train", "val"]), np.array(["g", ""]), np.array(["ant", "bee"]))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A finished run."""
    run = RunFolder(tmp_path / "run")
    run.create(Settings(seed=7))
    run.write_split(SPLIT)
    run.write_history([{"epoch": 1, "loss": 1.0}, {"epoch": 2, "loss": 0.5}])
    run.write_model(b"weights", MODEL)
    run.write_soft_labels(CLASSES, MATRIX)
    run.write_predictions(single_label(40))
    return run


def test_runs_do_not_import_torch() -> None:
    modules = [f"cclnet.runs.{path.stem}" for path in Path(cclnet.runs.__path__[0]).glob("*.py")]
    assert "cclnet.runs.folder" in modules and len(modules) <= 13  # twelve and __init__
    code = f"import sys, {', '.join(name.removesuffix('.__init__') for name in modules)}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_every_file_is_read_as_it_was_written(run: RunFolder) -> None:
    assert run.read_settings() == Settings(seed=7) and run.read_settings_table()["seed"] == 7
    split = run.read_split()
    for name in ("images", "splits", "groups", "labels"):
        np.testing.assert_array_equal(getattr(split, name), getattr(SPLIT, name))
    assert run.read_history() == [{"epoch": 1, "loss": 1.0}, {"epoch": 2, "loss": 0.5}]
    assert run.read_model() == MODEL and run.weights.read_bytes() == b"weights"
    soft_labels = run.read_soft_labels(CLASSES)
    np.testing.assert_array_equal(soft_labels, MATRIX)
    np.testing.assert_allclose(run.read_predictions().probabilities, single_label(40).probabilities, rtol=1e-8)
    assert run.read_calibration() == Calibration()
    fitted = Calibration(FittedTemperature(1.25, "cross-fitted halves", 40, (1.2, 1.3)))
    run.write_calibration(fitted)
    assert run.read_calibration() == fitted
    assert run.read_scores() is None
    scores = evaluate(run.path, draws=10)  # writes scores.json and calibration.json
    assert run.read_scores() == scores


def test_new_weights_remove_the_evaluation_of_the_old_ones(run: RunFolder) -> None:
    evaluate(run.path, draws=10)
    assert run.calibration.exists() and run.scores.exists()
    run.write_model(b"resumed", MODEL)
    assert not run.calibration.exists() and not run.scores.exists()
    assert run.read_calibration() == Calibration() and run.read_scores() is None and run.predictions.exists()


def test_soft_labels_come_in_the_order_that_is_asked_for(run: RunFolder) -> None:
    order = [2, 0, 3, 1]
    np.testing.assert_array_equal(run.read_soft_labels([CLASSES[k] for k in order]), MATRIX[np.ix_(order, order)])
    with pytest.raises(InputError, match="do not belong to one run"):
        run.read_soft_labels(("ant", "bee", "cat", "eel"))
    run.soft_labels.unlink()
    with pytest.raises(InputError, match=r"soft_labels.csv is missing.*verify"):
        run.read_soft_labels(CLASSES)
    accept_folder(run.path)
    assert run.read_soft_labels(CLASSES) is None


def test_files_of_an_empty_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.read_settings_table() == {} and run.read_history() == [] and run.find_predictions() is None
    assert run.read_soft_label_history() is None
    for read, missing in (
        (run.read_settings, "settings.toml"),
        (run.read_split, "split.csv"),
        (run.read_model, "model.json"),
        (run.read_predictions, "predictions.csv"),
    ):
        with pytest.raises(InputError, match=missing):
            read()


def test_a_folder_with_a_run_is_not_used_again(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--resume"):
        run.create(Settings())
    run.settings.unlink()
    with pytest.raises(InputError, match=r"split\.csv, metrics\.jsonl"):
        run.create(Settings())
    settings = Settings(data="some/isic.csv", seed=3)
    assert free_name(tmp_path, settings).name == "isic-resnet18-ccl-seed3"
    (tmp_path / "isic-resnet18-ccl-seed3").mkdir()
    assert free_name(tmp_path, settings).name == "isic-resnet18-ccl-seed3-2"


def test_a_run_without_checkpoint_is_discarded(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.create(Settings())
    run.write_split(SPLIT)
    run.checkpoints.mkdir()
    (run.checkpoints / "1.pt").touch()
    run.discard()
    assert run.settings.exists() and run.split.exists()
    (run.checkpoints / "1.pt").unlink()
    run.discard()
    assert not run.path.exists()


def test_a_run_of_version_0_1_is_read(run: RunFolder) -> None:
    """format 1 with the temperature in model.json, correlation.csv, the column and the setting of the old names."""
    run.checksums.unlink()
    run.soft_labels.rename(run.path / "correlation.csv")
    content = MODEL.to_json() | {"format": 1, "temperature": 1.5}
    run.model.write_text(json.dumps(content))
    run.split.write_text("image,part,group,label\na,train,g,ant\nb,val,,bee\n")
    run.settings.write_text('data = "x"\npart_column = "fold"\n')
    text = run.predictions.read_text().replace("image,label", "image,part,label").splitlines()
    run.predictions.write_text("\n".join([text[0], *(line.replace(",", ",val,", 1) for line in text[1:])]) + "\n")
    assert run.read_settings().split_column == "fold"
    assert run.read_split().splits.tolist() == ["train", "val"]
    opened = open_run(run.path)
    assert opened.model == MODEL and opened.seed == 7 and opened.split == "val" and opened.name == "run"
    assert run.read_calibration().temperature == FittedTemperature(1.5)
    np.testing.assert_array_equal(opened.soft_labels, MATRIX)
    run.write_calibration(Calibration(FittedTemperature(2.0)))  # a new evaluation wins over the old file
    assert run.read_calibration().temperature.value == 2.0


def test_a_model_json_that_is_not_ours_is_refused(run: RunFolder) -> None:
    run.checksums.unlink()
    run.model.write_text(json.dumps({"classes": list(CLASSES), "name": "x"}))
    with pytest.raises(InputError, match=r"model\.json has format None"):
        open_run(run.path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"epoch": 1}\n{"epo', "line 2 is not JSON"),
        ("[1]\n", "line 1: expected an object with an 'epoch'"),
        ('{"epoch": true}\n', "line 1: expected an object with an 'epoch'"),
        ('{"epoch": 1, "val_accuracy": "high"}\n', "line 1: expected numbers, but val_accuracy is none"),
        (f'{{"epoch": 1, "loss": 1{"0" * 400}}}\n', "line 1: expected numbers, but loss is none"),
        (f'{{"epoch": {"9" * 5000}}}\n', "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ('{"epoch": 1, "lr": "\\ud800"}\n', "line 1 is not JSON"),
        ("\udcff", "metrics.jsonl cannot be read"),  # a byte that is not UTF-8
    ],
)
def test_a_broken_history_is_refused(run: RunFolder, text: str, message: str) -> None:
    run.history.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=message):
        run.read_history()


@pytest.mark.parametrize("matrix", ["", ', "matrix": [[1, 2]]', ', "matrix": {}', ', "matrix": [["a"]]'])
def test_a_broken_history_of_soft_labels_is_refused(run: RunFolder, matrix: str) -> None:
    run.soft_label_history.write_text(f'{{"epoch": 1{matrix}}}\n')
    with pytest.raises(InputError, match=r"soft_labels\.jsonl"):
        run.read_soft_label_history()


def test_soft_labels_that_are_not_utf8_are_refused(run: RunFolder) -> None:
    run.soft_labels.write_bytes(run.soft_labels.read_bytes().replace(b"ant", b"\xe4nt"))
    run.checksums.unlink()
    with pytest.raises(InputError, match=r"soft_labels\.csv cannot be read"):
        open_run(run.path)


def test_scores_of_another_kind_are_refused(run: RunFolder) -> None:
    run.scores.write_text('{"format": 1, "kind": "comparison"}')
    with pytest.raises(InputError, match=r"scores\.json is not what cclnet evaluate writes .*'comparison'"):
        run.read_scores()


def test_a_file_alone_knows_nothing_else(run: RunFolder) -> None:
    opened = open_run(run.predictions)
    assert opened.name == "predictions" and opened.split == "all"
    assert (opened.folder, opened.model, opened.seed, opened.soft_labels, opened.leak()) == (None,) * 5
    assert opened.settings() == {}


def test_settings_that_say_where_and_how_are_not_compared(run: RunFolder) -> None:
    settings = open_run(run.path).settings()
    assert settings["lr"] == 0.1 and settings["augment.crop"] == 224
    assert not {"seed", "split.seed", "data", "validate_every"} & set(settings)


def test_names_stay_text(tmp_path: Path) -> None:
    table = SplitTable(
        np.array(["007", 'a, "b"', "NA"]), np.array(["train", "val", "test"]), None, np.array(["1", "", "a|b"])
    )
    write_split_file(tmp_path / "split.csv", table)
    read = read_split_file(tmp_path / "split.csv")
    assert read.groups is None and read.labels is not None and table.labels is not None
    assert (read.images.tolist(), read.splits.tolist()) == (table.images.tolist(), table.splits.tolist())
    assert read.labels.tolist() == table.labels.tolist()


def test_image_and_split_suffice_and_the_old_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "split.csv").write_text("\ufeffpart,image\nval,a\n", encoding="utf-8")  # with a byte order mark
    read = read_split_file(tmp_path / "split.csv")
    assert (read.images.tolist(), read.splits.tolist(), read.groups, read.labels) == (["a"], ["val"], None, None)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "cannot be read"), (b"\xff\xfe\x00", "cannot be read"), (b"image,x\na,b\n", "no column split; found image"),
     (b"a,b\n1,2\n", "no column image and split")],
)  # fmt: skip
def test_what_is_no_split_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "split.csv").write_bytes(content)
    with pytest.raises(InputError, match=reason):
        read_split_file(tmp_path / "split.csv")


def test_faults_of_metadata_are_told_apart(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.metadata.write_text("file,sex\na.png,female\n")
    with pytest.raises(InputError, match=r"column 'image'.*file, sex"):
        run.read_metadata()
    run.metadata.unlink()
    run.write_metadata(["a.png", "b.png"], pd.DataFrame({"sex": ["female", "male"]}))
    assert run.read_metadata().loc["b.png", "sex"] == "male"
    run.metadata.write_bytes(run.metadata.read_bytes().replace(b"female", b"femals"))
    with pytest.raises(InputError) as damaged:
        run.read_metadata()
    assert "column 'image'" not in str(damaged.value)
