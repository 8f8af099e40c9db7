"""Ensembles: the mean of calibrated probabilities in PyTorch and ONNX, honest predictions, folds that resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from shipped_run import write_images, write_run
from typer.testing import CliRunner

import cclnet
from cclnet import InputError
from cclnet.cli import app
from cclnet.data.sources import open_data
from cclnet.data.views import VIEWS
from cclnet.deploy.ensemble import combine, make_ensemble
from cclnet.deploy.export import check_images, export
from cclnet.deploy.shipped import read_shipped
from cclnet.errors import Interrupted
from cclnet.evaluation.bootstrap import units_of
from cclnet.evaluation.calibration import calibrate
from cclnet.evaluation.evaluate import evaluate
from cclnet.runs.calibration_map import CalibrationMap
from cclnet.runs.checksums import accept_folder
from cclnet.runs.folder import OpenedRun, RunFolder, SplitTable, open_run
from cclnet.runs.model import Calibration, FittedTemperature
from cclnet.settings import TTA
from made_predictions import single_label

DATA = "synthetic:images=90,size=32"


@pytest.mark.parametrize(("view", "expected"), [
    ("0", lambda x: x), ("90", lambda x: torch.rot90(x, 1, (2, 3))), ("180", lambda x: torch.rot90(x, 2, (2, 3))),
    ("270", lambda x: torch.rot90(x, 3, (2, 3))), ("mirrored 0", lambda x: x.flip(3)),
    ("mirrored 180", lambda x: x.flip(2)), ("mirrored 90", lambda x: torch.rot90(x.flip(3), 1, (2, 3))),
    ("mirrored 270", lambda x: torch.rot90(x.flip(3), 3, (2, 3))),
])  # fmt: skip
def test_views_are_the_symmetries_of_the_square(view: str, expected: object) -> None:
    images = torch.arange(2 * 3 * 5 * 5.0).view(2, 3, 5, 5)
    assert torch.equal(VIEWS[view](images), expected(images))  # type: ignore[operator]


def test_tta_averages_the_logits_of_the_views(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", tta="turns")
    model = cclnet.load(run, device="cpu")
    assert model.description.passes == len(TTA["turns"]) == 8
    images = check_images((32, 32), 6)
    shipped = read_shipped(run / "model.safetensors", replace(model.description, tta="none"), CalibrationMap(1.5))
    turned = [
        np.ascontiguousarray(np.rot90(flip, k, (1, 2))) for flip in (images, images[:, :, ::-1]) for k in range(4)
    ]
    with torch.no_grad():
        logits = torch.stack([shipped.model.forward_head(shipped.features(torch.from_numpy(x))) for x in turned])
    expected = torch.softmax(logits.double().mean(0) / 1.5, 1).numpy()
    np.testing.assert_allclose(model.run(images)[0], expected, atol=1e-5)
    assert np.abs(expected - cclnet.load(write_run(tmp_path / "plain")).run(images)[0]).max() > 0.01


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs that differ in backbone, crop, scale, normalisation, views and temperature."""
    folder = tmp_path_factory.mktemp("members")
    return [
        write_run(folder / "a", temperature=1.5),
        write_run(folder / "b", "test_efficientnet", crop=40, short_side=44, temperature=0.8, mean=[0.3, 0.3, 0.3],
                  tta="flip"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def mixed(members: list[Path]) -> Path:
    return cclnet.ensemble(members, members[0].parent / "mixed")


@pytest.mark.parametrize("damage", ["bit", "text"])
def test_damaged_weights_go_into_no_ensemble(tmp_path: Path, damage: str) -> None:
    runs = [write_run(tmp_path / name) for name in "ab"]
    path = runs[1] / "model.safetensors"
    if damage == "bit":
        accept_folder(runs[1])
        content = bytearray(path.read_bytes())
        content[-5] ^= 4
        path.write_bytes(content)
    else:
        path.write_text("these are my weights")
    with pytest.raises(InputError, match=r"model\.safetensors is refused: it is (damaged|not a whole)"):
        make_ensemble(runs, tmp_path / "both")
    assert not (tmp_path / "both" / "model.safetensors").exists()


def test_an_ensemble_keeps_the_columns_of_its_members_for_subgroups(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in "ab"]
    images = open_run(runs[0]).predictions.images.tolist()
    sex = ["f" if i % 2 else "m" for i in range(len(images))]
    for run in runs:
        RunFolder(run).write_metadata(images, pd.DataFrame({"sex": sex}))
    found = open_run(cclnet.ensemble(runs, tmp_path / "both")).metadata()
    assert found["sex"].loc[images].tolist() == sex


def test_an_ensemble_averages_what_its_members_say(mixed: Path, members: list[Path], tmp_path: Path) -> None:
    """To within the rounding of the second resize: each member reads the file by itself at its own scale."""
    paths = write_images(tmp_path / "images")
    together = np.stack([p.probabilities for p in cclnet.load(mixed, device="cpu").predict(paths)])
    alone = [np.stack([p.probabilities for p in cclnet.load(run, device="cpu").predict(paths)]) for run in members]
    calibration = RunFolder(mixed).read_calibration().temperature.value or 1.0
    mean = np.log(np.mean(alone, axis=0)) / calibration
    expected = np.exp(mean) / np.exp(mean).sum(axis=1, keepdims=True)
    assert np.abs(together - expected).mean() < 0.015 < 0.1 < np.abs(alone[0] - alone[1]).mean()
    description = cclnet.load(mixed).description
    assert description.backbone == "1 x test_resnet + 1 x test_efficientnet" and description.passes == 3


def test_one_onnx_file_has_the_probabilities_of_the_python_model(mixed: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    out = export(mixed, "onnx", tmp_path / "onnx")
    images = write_images(tmp_path / "images", 12)
    given = np.stack([p.probabilities for p in cclnet.load(out).predict(images)])
    expected = np.stack([p.probabilities for p in cclnet.load(mixed, device="cpu").predict(images)])
    np.testing.assert_allclose(given, expected, atol=1e-4)
    assert np.ptp(expected, axis=0).max() > 0.05
    assert "3 forward passes" in (out / "README.md").read_text()


def test_members_of_one_kind_have_maps(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, temperature=t) for name, t in (("a", 1.0), ("b", 2.0))]
    model = cclnet.load(cclnet.ensemble(runs, tmp_path / "both"), device="cpu")
    images = check_images((32, 32), 4)
    probabilities, heat = model.run(images, explain=True)
    mean = np.log(np.mean([cclnet.load(run, device="cpu").run(images)[0] for run in runs], axis=0))
    expected = np.exp(mean / (model.temperature or 1.0))
    np.testing.assert_allclose(probabilities, expected / expected.sum(axis=1, keepdims=True), atol=1e-6)
    np.testing.assert_allclose(heat, cclnet.load(runs[0], device="cpu").run(images, explain=True)[1], atol=1e-4)


def test_members_and_the_ensemble_have_offsets_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    runs = [write_run(tmp_path / name) for name in "ab"]
    first, second, whole = (0.9, -0.4, -0.7, 0.2), None, (-0.3, 0.6, -0.5, 0.2)
    for run, offsets in zip(runs, (first, second), strict=True):
        RunFolder(run).write_calibration(Calibration(FittedTemperature(1.5, "val", 150, None, offsets)))
    both = make_ensemble(runs, tmp_path / "both")
    assert [own.offsets for own in RunFolder(both).read_model().members] == [first, None]
    RunFolder(both).write_calibration(Calibration(FittedTemperature(1.2, "val", 150, None, whole)))
    images = check_images((32, 32), 8)
    logits = np.log(np.mean([cclnet.load(run, device="cpu").run(images)[0] for run in runs], axis=0)) / 1.2 + whole
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    model, out = cclnet.load(both, device="cpu"), export(both, "onnx", tmp_path / "onnx")
    np.testing.assert_allclose(model.run(images)[0], expected, atol=1e-6)
    np.testing.assert_allclose(cclnet.load(out).run(images)[0], expected, atol=1e-5)
    description = RunFolder(out).read_model()
    members = (replace(description.members[0], offsets=None), description.members[1])
    RunFolder(out).write_description(replace(description, members=members))
    with pytest.raises(InputError, match="whose members differ"):
        cclnet.load(out)


def test_a_member_with_offsets_is_combined_with_those_of_the_other_half(tmp_path: Path) -> None:
    made = single_label(400, groups=100, seed=2)
    logits = np.log(made.probabilities) + np.array([1.0, -0.5, -1.0, 0.5])
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    runs = []
    for name in "ab":
        run = write_run(tmp_path / name)
        RunFolder(run).write_predictions(replace(made, probabilities=p, splits=np.full(400, "val")))
        evaluate(run, draws=2)
        assert RunFolder(run).read_calibration().map.offsets is not None
        runs.append(run)
    own = open_run(runs[0]).predictions
    expected = calibrate(own, None, own, units_of(own), 0, "offsets")[1]
    assert expected is not None
    found, _ = combine([open_run(run) for run in runs])
    at = np.searchsorted(found.images, own.images)
    np.testing.assert_allclose(found.probabilities[at], expected.probabilities, atol=1e-9)
    scores = evaluate(make_ensemble(runs, tmp_path / "both"), draws=2)
    assert scores.decisions is not None
    weights = RunFolder(tmp_path / "both").read_calibration().decision
    assert weights is not None and weights.weights == pytest.approx(400 / (4 * own.class_counts))


def opened(folder: Path, rows: np.ndarray, split: str = "val", train: bool = True) -> OpenedRun:
    """A run that predicted ``rows`` of 400 images in 100 groups, and was trained on the others."""
    made = single_label(400)
    groups = np.array([f"g{i % 100}" for i in range(400)])
    folder.mkdir(parents=True)
    splits = np.where(rows, split, "train")
    if train:
        RunFolder(folder).write_split(SplitTable(made.images, splits, groups, made.labels.astype(str)))
    RunFolder(folder).write_predictions(replace(made.select(rows), groups=groups[rows], splits=splits[rows]))
    return open_run(folder)


def test_folds_predict_every_image_once_and_no_group_leaks(tmp_path: Path) -> None:
    fold = np.arange(400) % 100 % 4
    runs = [opened(tmp_path / str(f), fold == f) for f in range(4)]
    predictions, split = combine(runs)
    assert predictions.images.tolist() == sorted(single_label(400).images.tolist())
    for f, run in enumerate(runs):
        own = run.predictions
        expected = calibrate(own, None, own, units_of(own), 0)[1]
        assert expected is not None
        at = np.searchsorted(predictions.images, own.images)
        np.testing.assert_allclose(predictions.probabilities[at], expected.probabilities, atol=1e-12)
        assert set(split.folds[np.isin(split.images, own.images)].tolist()) == {str(f)}
    RunFolder(tmp_path).write_split(split)
    RunFolder(tmp_path).write_predictions(predictions)
    leak = open_run(tmp_path).leak()
    assert leak is not None and leak.images == 0


def test_images_unknown_to_all_members_count_alone(tmp_path: Path) -> None:
    index = np.arange(400)
    predictions, split = combine([opened(tmp_path / "a", index < 30), opened(tmp_path / "b", index < 20)])
    assert predictions.images.tolist() == [f"image{i:05d}" for i in range(20)]
    assert split.folds is None and (split.splits == "train").sum() == 380


def test_runs_that_do_not_fit_together_are_refused(members: list[Path], mixed: Path, tmp_path: Path) -> None:
    for runs, words in (
        (members[:1], "2 to"),
        ([members[0], mixed], "ensemble already"),
        ([members[0], tmp_path], "no model.safetensors"),
        ([members[0], write_run(tmp_path / "unevaluated", temperature=None)], "not evaluated"),
    ):
        with pytest.raises(InputError, match=words):
            make_ensemble(runs, tmp_path / "out")
    other = write_run(tmp_path / "other")
    text = (other / "settings.toml").read_text()
    (other / "settings.toml").write_text("class_weights = true\n" + text)
    with pytest.raises(InputError, match="class_weights"):
        make_ensemble([members[0], other], tmp_path / "out")
    with pytest.raises(InputError, match="holds a run already"):
        cclnet.ensemble(members, members[0])
    assert not (tmp_path / "out").exists()
    failed = CliRunner().invoke(app, ["ensemble", str(members[0]), "--out", str(tmp_path / "out")])
    assert isinstance(failed.exception, InputError)


SMALL = {"backbone": "test_resnet", "preset": "paper", "method": "hard", "epochs": 2, "batch_size": 16, "lr": 0.05,
         "short_side": 36, "augment": {"crop": 32}, "folds": 3, "progress": False}  # fmt: skip


def test_training_all_folds_resumes_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**SMALL, "cache_dir": str(tmp_path / "cache")}
    whole = cclnet.train(DATA, tmp_path / "whole", **given)
    seen: list[int] = []

    def stop(record: dict[str, float], _: object) -> None:
        seen.append(int(record["epoch"]))
        if len(seen) == 3:  # the first epoch of the second fold
            raise Interrupted(tmp_path, 15)

    with pytest.raises(Interrupted, match="stopped"):
        cclnet.train(DATA, tmp_path / "stopped", on_epoch=stop, **given)
    assert not (tmp_path / "stopped" / "fold-2").exists()
    cclnet.train(resume=tmp_path / "stopped", cache_dir=str(tmp_path / "cache"), progress=False)
    first, second = (open_run(tmp_path / name).predictions for name in ("whole", "stopped"))
    np.testing.assert_array_equal(first.probabilities, second.probabilities)
    assert sorted(first.images) == sorted(open_data(DATA).names)
    assert len(cclnet.load(whole, device="cpu").description.members) == 3
    comparison = cclnet.compare({"a": [tmp_path / "whole"], "b": [tmp_path / "stopped"]}, draws=50)
    assert comparison.split.images == len(first)
