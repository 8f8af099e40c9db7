"""Kept results: their content, how they are compared with cells, and what is refused."""

from __future__ import annotations

import bz2
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cclnet import InputError
from cclnet.cli import app
from cclnet.evaluation.calibration import calibration_values, logits_of, with_logits
from cclnet.evaluation.evaluate import evaluate
from cclnet.runs.folder import RunFolder, open_run
from cclnet.runs.kept_result import LEVELS, encode
from cclnet.runs.predictions import Predictions
from cclnet.settings import Settings, make_settings
from cclnet.sweep.cells import Cell
from cclnet.sweep.results import differs_from_result, differs_from_run, read_results
from made_runs import CLASSES, kept, made_result, made_run

CELL = Cell("ccl-seed0", Settings(data="/somewhere/isic"), {"method": "ccl", "seed": 0})


def test_what_is_kept(tmp_path: Path) -> None:
    result = made_result(tmp_path, CELL, wrong=6, softness=[0.5, 0.4, 0.42, 0.43], frozen=3)
    [read] = read_results(tmp_path / "results")
    assert read == result and read.keys == CELL.keys and read.path.name == "ccl-seed0.json"
    content = read.to_json()
    assert (content["freeze_epoch"], content["converged_epoch"]) == (3, 2)
    assert content["softness"] == [0.5, 0.4, 0.42, 0.43] and content["images_per_second"] == 250.0
    assert read.value("accuracy") == 0.9 and content["scores"]["accuracy"]["low"] < 0.9
    assert content["leak"]["images"] == 0 and content["settings"]["data"] == "isic"
    assert np.asarray(content["soft_labels"]).shape == (3, 3) and content["final_softness"] == pytest.approx(0.43)
    assert content["inverse_frequency_agreement"] is not None and "/somewhere" not in read.path.read_text()
    assert {path.name for path in read.path.parent.glob("ccl-seed0.predictions.*")} == {"ccl-seed0.predictions.npy.xz"}
    assert read.path.stat().st_size < 10_000


def test_kept_results_are_calibrated_by_the_temperature_alone(tmp_path: Path) -> None:
    """So that the figures of earlier results stay as they are, also where a user's evaluation would choose offsets."""
    run = RunFolder(made_run(tmp_path / "runs", CELL, wrong=6))
    before = run.read_predictions()
    run.write_predictions(with_logits(before, logits_of(before) + np.array([2.0, -2.0, 0.0])))
    result = kept(tmp_path, CELL)
    assert evaluate(result.path, tmp_path, draws=2).calibration.temperature.offsets is not None
    alone = evaluate(result.path, tmp_path, draws=2, calibration="temperature").calibration
    assert alone.after is not None and result.temperature == pytest.approx(alone.temperature.value, abs=1e-6)
    assert result.value("ece_calibrated") == pytest.approx(alone.after.scores["ece"].value, abs=1e-6)


def test_what_is_known_of_leaks_is_not_lost(tmp_path: Path) -> None:
    path = made_result(tmp_path, CELL, wrong=6).path
    content = json.loads(path.read_text())
    words = "24 of 60 images (40%) show a lesion or patient that the model was trained on."
    for leak in (content["leak"], {"images": 24, "share": 0.4, "in_words": words}):
        path.write_text(json.dumps(content | {"leak": leak}))
        done = CliRunner().invoke(app, ["evaluate", str(path), "--out", str(tmp_path / "out"), "--draws", "10"])
        assert done.exit_code == 0, done.output
        for page in ("report.md", "report.html"):
            assert leak["in_words"] in (tmp_path / "out" / page).read_text()
    assert f"{words} Scores on new patients will be lower." in evaluate(path, draws=10).warnings
    path.write_text(json.dumps(content | {"leak": None}))
    assert open_run(path).leak() is None


@pytest.mark.parametrize("multilabel", [False, True])
def test_what_is_kept_of_a_small_probability_is_not_nothing(tmp_path: Path, multilabel: bool) -> None:
    rng = np.random.default_rng(0)
    logits = 6 * rng.normal(size=(400, 3))
    p = 1 / (1 + np.exp(-logits)) if multilabel else np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = (rng.random((400, 3)) < 0.5).astype(np.uint8) if multilabel else rng.integers(0, 3, 400)
    predictions = Predictions(np.arange(400).astype(str), labels, p, CLASSES)
    kept = dataclasses.replace(predictions, probabilities=LEVELS[encode(p, multilabel)])
    assert (np.abs(kept.probabilities - p) <= 5e-5).all() and kept.probabilities.min() > 0
    assert calibration_values(kept)["nll"] == pytest.approx(calibration_values(predictions)["nll"], rel=0.02)
    rounded = dataclasses.replace(predictions, probabilities=p.round(4))
    assert calibration_values(rounded)["nll"] > 1.2 * calibration_values(predictions)["nll"]  # which is why


def test_a_setting_without_end_is_kept_and_found_again(tmp_path: Path) -> None:
    endless = dataclasses.replace(CELL.settings, method="mbls", method_settings={"margin": float("inf")})
    cell = dataclasses.replace(CELL, settings=endless)
    assert differs_from_result(cell, made_result(tmp_path, cell, wrong=1)) == []


def test_methods_without_soft_labels_keep_no_matrix(tmp_path: Path) -> None:
    content = made_result(tmp_path, Cell("hard-seed0", Settings(method="hard")), wrong=6).to_json()
    assert [content[key] for key in ("softness", "freeze_epoch", "soft_labels", "final_softness")] == [None] * 4


def test_settings_that_came_later_had_their_defaults(tmp_path: Path) -> None:
    kept = made_result(tmp_path, CELL, wrong=6)
    cell = Cell("ccl-seed0", make_settings({"data": "/elsewhere/isic", "resident": True}))
    del kept.settings["ema"]
    assert differs_from_result(cell, kept) == []
    kept.settings["augment"]["hue"] = 0.5
    kept.settings["method_settings"]["patience"] = 3
    assert differs_from_result(cell, kept) == [
        "augment.hue was 0.5, is 0.02",
        "method_settings.patience was 3, is None",
    ]


def test_former_names_of_method_settings_are_the_same_settings(tmp_path: Path) -> None:
    former = dataclasses.replace(CELL.settings, method="ccl-centroid", method_settings={"hold": 0.2, "memory": 0.4})
    current = dataclasses.replace(former, method_settings={"freeze_ratio": 0.2, "ema_decay": 0.4})
    kept = made_result(tmp_path, dataclasses.replace(CELL, settings=current), wrong=6)
    for settings in (former, current):
        assert differs_from_result(dataclasses.replace(CELL, settings=settings), kept) == []
    older = {**kept.settings, "method_settings": {"hold": 0.3, "memory": 0.4}}  # as an older version wrote it
    kept = dataclasses.replace(kept, settings=older)
    different = ["method_settings.freeze_ratio was 0.3, is 0.2"]
    assert differs_from_result(dataclasses.replace(CELL, settings=current), kept) == different


def test_other_data_are_another_run_unless_said_otherwise(tmp_path: Path) -> None:
    kept = made_result(tmp_path, CELL, wrong=6)
    other = Settings(data="/elsewhere/HAM10000")
    assert differs_from_result(Cell("ccl-seed0", other), kept) == ["data was isic, is HAM10000"]
    assert differs_from_result(Cell("ccl-seed0", other, ignored_settings=("data",)), kept) == []


def test_other_images_under_the_same_name_are_other_data(tmp_path: Path) -> None:
    cell = dataclasses.replace(CELL, fingerprint="0123")
    kept = made_result(tmp_path, cell, wrong=6)
    assert kept.fingerprint == "0123" and differs_from_result(cell, kept) == []
    other = dataclasses.replace(cell, fingerprint="4567")
    assert differs_from_result(other, kept) == ["it was trained on other images or labels"]
    assert differs_from_result(other, dataclasses.replace(kept, fingerprint="")) == []  # older results do not say


def test_a_run_goes_on_with_its_data_however_the_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path / "run")
    run.create(Settings(data="some/images"))
    assert differs_from_run(Cell("ccl-seed0", Settings(data="some/images")), run) == []
    assert differs_from_run(Cell("ccl-seed0", Settings(data=str(tmp_path / "some" / "images"))), run) == []
    found = differs_from_run(Cell("ccl-seed0", Settings(data="other/images", epochs=7)), run)
    assert found == [f"data was {tmp_path}/some/images, is {tmp_path}/other/images", "epochs was 160, is 7"]


def test_files_that_are_no_results_are_told(tmp_path: Path) -> None:
    path = tmp_path / "ccl-seed0.json"
    path.write_text("{")
    with pytest.raises(InputError, match=r"ccl-seed0.json is not JSON.*remove it"):
        read_results(tmp_path)
    path.write_text("[]")
    with pytest.raises(InputError, match="expected an object, got list"):
        read_results(tmp_path)
    path.write_text("{}")
    with pytest.raises(InputError, match=r"is not a kept result: cell .*settings"):
        read_results(tmp_path)
    assert read_results(tmp_path / "nothing") == []


def test_a_result_is_opened_like_a_run(tmp_path: Path) -> None:
    cell = Cell("ols-seed3", make_settings({"method": "ols", "seed": 3, "method_settings": {"alpha": 0.25}}))
    kept = open_run(made_result(tmp_path, cell, wrong=6).path)
    whole = open_run(tmp_path / "runs" / "ols-seed3")
    assert (kept.name, kept.seed, kept.split, kept.folder) == ("ols-seed3", 3, "val", None)
    assert kept.model is not None and kept.model.method_settings == {"alpha": 0.25}
    np.testing.assert_allclose(kept.predictions.probabilities, whole.predictions.probabilities, atol=1e-4)
    assert kept.predictions.images.tolist() == whole.predictions.images.tolist()
    assert kept.settings()["method"] == "ols" and "seed" not in kept.settings()


def test_runs_on_the_same_images_share_their_names(tmp_path: Path) -> None:
    cells = [Cell(f"hard-seed{seed}", make_settings({"method": "hard", "seed": seed})) for seed in (0, 1)]
    first, second = (made_result(tmp_path, cell, wrong=6) for cell in cells)
    assert first.image_table == second.image_table
    assert len(list(first.path.parent.glob("images-*.csv.bz2"))) == 1
    assert open_run(first.path).predictions.images.tolist() == open_run(second.path).predictions.images.tolist()


def test_a_result_without_its_predictions_is_refused(tmp_path: Path) -> None:
    result = made_result(tmp_path, CELL, wrong=6)
    table = result.path.with_name(result.image_table)
    for file in (table, result.predictions):
        hidden = file.rename(tmp_path / "hidden")
        with pytest.raises(InputError, match=rf"needs {file.name} beside it"):
            open_run(result.path)
        hidden.rename(file)
    shorter = "\n".join(bz2.decompress(table.read_bytes()).decode().splitlines()[:-1])
    table.write_bytes(bz2.compress(shorter.encode()))
    with pytest.raises(InputError, match="they do not belong to the same images"):
        open_run(result.path)


def test_the_names_of_the_images_are_looked_for_beside_the_result_only(tmp_path: Path) -> None:
    result = made_result(tmp_path, CELL, wrong=6)
    table = result.image_table
    result.path.with_name(table).rename(tmp_path / table)
    result.path.write_text(json.dumps({**result.to_json(), "image_table": f"../{table}"}))
    with pytest.raises(InputError, match=f"needs {table} beside it"):
        open_run(result.path)


def test_no_result_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no none-seed0.json in"):
        open_run(tmp_path / "none-seed0.json")
