"""The linear probe: against scikit-learn, nested folds, cached features, and a run folder like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression
from typer.testing import CliRunner

import cclnet
from cclnet import InputError
from cclnet.cli import app
from cclnet.data.sources import open_data
from cclnet.network import TimmClassifier
from cclnet.runs.checksums import remove_covered
from cclnet.runs.folder import RunFolder, SplitTable, open_run
from cclnet.training import features as features_module
from cclnet.training.probe import Basis, LinearLayer, Problem, fit_linear, fit_probe

DATA = "synthetic:images=120,size=32"


def made_problem(count: int = 240, width: int = 12, folds: int = 4) -> tuple[Problem, np.ndarray]:
    """Three classes of unequal frequency whose features overlap."""
    rng = np.random.default_rng(0)
    labels = rng.choice(3, count, p=[0.7, 0.2, 0.1])
    features = rng.normal(size=(count, width)).astype(np.float32) @ rng.normal(size=(width, width)).astype(np.float32)
    features[:, :3] += 2.0 * np.eye(3, dtype=np.float32)[labels]
    targets = np.eye(3, dtype=np.float32)[labels]
    return Problem(labels, targets, np.arange(count) % folds, False), features


@pytest.mark.parametrize("balanced", [False, True])
def test_the_fit_is_that_of_scikit_learn(balanced: bool) -> None:
    problem, features = made_problem()
    basis = Basis.of(features)
    reduced, rows = basis(features), np.ones(len(features), bool)
    weights = problem.weights(rows, balanced)
    fitted = fit_linear(reduced, basis.variances, problem.targets, weights, 0.03)
    reference = LogisticRegression(C=1 / (0.03 * weights.sum()), tol=1e-10, max_iter=10_000)
    reference.fit(reduced.astype(np.float64), problem.labels, sample_weight=weights)
    np.testing.assert_allclose(fitted.weight, reference.coef_.T, atol=5e-3)
    expected = reference.predict_proba(reduced.astype(np.float64))
    np.testing.assert_allclose(torch.softmax(torch.from_numpy(fitted(reduced)), 1), expected, atol=2e-3)


def test_soft_targets_and_several_labels_have_their_closed_forms() -> None:
    """With features of no use, the probabilities are the weighted means of the targets."""
    targets = np.array([[0.8, 0.1, 0.1], [0.1, 0.6, 0.3]], np.float32)
    weights, features = np.array([1.0, 3.0], np.float32), np.zeros((2, 1), np.float32)
    layer = fit_linear(features, np.ones(1), targets, weights, 0.1)
    np.testing.assert_allclose(torch.softmax(torch.from_numpy(layer.bias), 0), weights @ targets / 4, atol=1e-3)
    several = fit_linear(features, np.ones(1), targets, weights, 0.1, multilabel=True)
    np.testing.assert_allclose(torch.sigmoid(torch.from_numpy(several.bias)), weights @ targets / 4, atol=1e-3)


def test_components_unfold_to_the_same_logits() -> None:
    _, features = made_problem()
    features[:, 5] = 4.0  # constant
    basis = Basis.of(features)
    reduced = basis(features)
    assert reduced.shape[1] == len(basis.variances) == features.shape[1] - 1
    np.testing.assert_allclose(np.cov(reduced.T, bias=True), np.diag(basis.variances), atol=1e-3)
    layer = LinearLayer(np.random.default_rng(1).normal(size=(reduced.shape[1], 3)), np.array([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(basis.unfold(layer)(features), layer(reduced), atol=1e-3)


def test_no_label_of_a_fold_decides_its_own_predictions() -> None:
    problem, features = made_problem()
    changed = problem.labels.copy()
    changed[problem.fold == 1] = (changed[problem.fold == 1] + 1) % 3
    other = Problem(changed, np.eye(3, dtype=np.float32)[changed], problem.fold, False)
    first, second = fit_probe(problem, features), fit_probe(other, features)
    own = problem.fold == 1
    assert first.fold_choices[1] == second.fold_choices[1]
    np.testing.assert_array_equal(first.logits[own], second.logits[own])
    assert not np.array_equal(first.logits[~own], second.logits[~own])


def test_logits_contain_the_class_frequencies_whatever_the_weights() -> None:
    """The mean probabilities are about the class frequencies, of a balanced fit too."""
    problem, features = made_problem(1200)
    found = fit_probe(problem, features)
    mean = torch.softmax(torch.from_numpy(found.logits), 1).mean(0).numpy()
    np.testing.assert_allclose(mean, np.bincount(problem.labels) / 1200, atol=0.05)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of a small network, as a file of pretrained ones."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "test_resnet.safetensors"
    save_file({k: v.contiguous() for k, v in timm.create_model("test_resnet").state_dict().items()}, path)
    return path


SMALL = {"short_side": 36, "augment": {"crop": 32}}


def test_a_probe_is_a_run_like_any_other(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"weights": str(weights), "tta": "flip", "cache_dir": str(tmp_path / "cache"), "progress": False, **SMALL}
    run = cclnet.probe(DATA, tmp_path / "run", folds=3, **given)
    table, opened = open_data(DATA), open_run(run)
    assert sorted(opened.predictions.images) == sorted(table.names)  # every image once
    assert opened.split == "val" and set(opened.predictions.splits.tolist()) == {"val"}
    folds = RunFolder(run).read_split().folds
    assert folds is not None and set(folds.tolist()) == {"0", "1", "2"}
    assert opened.model is not None and opened.model.class_counts == tuple(table.class_counts().tolist())
    trained = opened.model.extra["probe"]
    assert opened.model.tta == "flip" and len(trained["folds"]) == 3
    backbone, exported = load_file(weights), load_file(run / "model.safetensors")
    assert all(torch.equal(backbone[name], value) for name, value in exported.items() if not name.startswith("fc."))
    assert (run / "report.html").is_file() and RunFolder(run).read_calibration().decision.name == "balanced"
    own = RunFolder(run).read_split()
    first = set(own.images[folds == "0"].tolist())  # held out of the statistics of the features
    held_out = [image for name, image in zip(table.names, table.images, strict=True) if name in first]
    statistics = RunFolder(run).read_feature_statistics()
    assert statistics is not None
    scores = sorted(prediction.ood for prediction in cclnet.load(run).predict(held_out))
    np.testing.assert_allclose(scores, statistics.held_out, rtol=1e-3)
    monkeypatch.setattr(features_module, "_compute", None)  # cached: nothing is computed again
    again = cclnet.probe(DATA, tmp_path / "again", folds=3, **given)
    np.testing.assert_array_equal(open_run(again).predictions.probabilities, opened.predictions.probabilities)


def test_features_resume_after_a_damaged_part(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features_module, "PART", 50)
    given = {"weights": str(weights), "tta": "none", "cache_dir": str(tmp_path / "cache"), "progress": False, **SMALL}
    first = cclnet.probe(DATA, tmp_path / "a", folds=3, **given)
    parts = sorted((tmp_path / "cache" / "features").rglob("*.npz"))
    assert len(parts) == 3
    parts[1].write_bytes(parts[1].read_bytes()[:100])
    computed = []
    compute = features_module._compute
    monkeypatch.setattr(features_module, "_compute", lambda *a: (computed.append(len(a[4])), compute(*a))[1])
    with pytest.warns(UserWarning, match="is damaged, its features are computed again"):
        second = cclnet.probe(DATA, tmp_path / "b", folds=3, **given)
    assert computed == [50]
    content = bytearray(parts[2].read_bytes())
    content[len(content) // 2] ^= 1
    parts[2].write_bytes(content)
    with pytest.warns(UserWarning, match="is damaged, its features are computed again"):
        cclnet.probe(DATA, tmp_path / "c", folds=3, **given)
    assert len(computed) == 2
    expected = open_run(first).predictions.probabilities
    np.testing.assert_allclose(open_run(second).predictions.probabilities, expected, atol=1e-6)


def test_onnx_runtime_gives_the_features_of_pytorch(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    classifier = TimmClassifier("test_resnet", 1000).eval()
    classifier.model.load_state_dict(load_file(weights))
    forward = features_module.onnx_forward(classifier, 32)
    assert forward is not None
    images = torch.randn(5, 3, 32, 32)
    with torch.inference_mode():
        np.testing.assert_allclose(forward(images), classifier.features(images), atol=1e-4)
    monkeypatch.setattr(features_module, "LARGEST_DIFFERENCE", 0.0)  # what differs is not used
    assert features_module.onnx_forward(classifier, 32) is None
    monkeypatch.setattr(features_module, "find_spec", lambda _: None)  # without the extra
    assert features_module.onnx_forward(classifier, 32) is None


@pytest.mark.parametrize("pooling", ["last", "stages"])
def test_the_test_split_is_predicted_by_the_exported_model(weights: Path, tmp_path: Path, pooling: str) -> None:
    rng = np.random.default_rng(0)
    splits = {"train": 60, "test": 12}
    from PIL import Image

    for split, count in splits.items():
        for name, level in (("dark", 60), ("light", 190)):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for i in range(count // 2):
                pixels = np.clip(rng.normal(level, 40, (40, 40, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / "data" / split / name / f"{split}{i}.png")
    given = {"weights": str(weights), "cache_dir": str(tmp_path / "cache"), "progress": False, "tta": "turns", **SMALL}
    run = cclnet.probe(tmp_path / "data", tmp_path / "run", folds=3, method="lsr", pooling=pooling, **given)
    scores = RunFolder(run).read_scores()
    assert scores is not None and scores.copies is not None and scores.copies.exact == 0  # the images were compared
    held_out = open_run(run).predictions.of_split("test")
    assert len(held_out) == 12 and open_run(run).split == "test"
    calibration = RunFolder(run).read_calibration()
    assert calibration.temperature.fitted_on in ("val", None)
    remove_covered(RunFolder(run).calibration)  # probabilities of predictions.csv have no temperature
    model = cclnet.load(run, device="cpu")
    assert model.description.pooling == pooling
    names = {path.relative_to(tmp_path / "data").as_posix(): path for path in (tmp_path / "data").rglob("*.png")}
    found = [p for name in held_out.images for key, p in names.items() if name in (key, key.removesuffix(".png"))]
    predicted = np.stack([model.predict(path).probabilities for path in found])
    np.testing.assert_allclose(predicted, held_out.probabilities, atol=1e-4)


def test_what_a_probe_cannot_do_is_refused(weights: Path, tmp_path: Path) -> None:
    given = {"weights": str(weights), "cache_dir": str(tmp_path), "progress": False, **SMALL}
    with pytest.raises(InputError, match="at least 3"):
        cclnet.probe(DATA, tmp_path / "run", folds=2, **given)
    with pytest.raises(InputError, match="'ccl'"):
        cclnet.probe(DATA, tmp_path / "run", method="ccl", **given)
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="pretrained weights"):
        cclnet.probe(DATA, tmp_path / "run", backbone="test_resnet")
    missing = CliRunner().invoke(app, ["probe", str(tmp_path / "nowhere"), "--weights", str(weights)])
    assert isinstance(missing.exception, InputError)


def test_subgroups_are_scored_from_columns_of_the_table(weights: Path, tmp_path: Path) -> None:
    """--by needs metadata.csv in the run folder, as `train` writes it."""
    from PIL import Image

    rng, lines = np.random.default_rng(0), ["image,label,sex"]
    for i in range(45):
        level = (60, 120, 190)[i % 3]
        pixels = np.clip(rng.normal(level, 40, (40, 40, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
        lines.append(f"{i}.png,{'abc'[i % 3]},{('male', 'female')[i % 2]}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    given = {"weights": str(weights), "cache_dir": str(tmp_path / "cache"), "progress": False, "by": "sex", **SMALL}
    run = cclnet.probe(tmp_path / "table.csv", tmp_path / "run", folds=3, **given)
    metadata = RunFolder(run).read_metadata()
    assert list(metadata.columns) == ["sex"] and len(metadata) == 45
    scores = RunFolder(run).read_scores()
    assert scores is not None and {row.column for row in scores.subgroups} >= {"sex"}


def test_a_leak_between_folds_is_found(tmp_path: Path) -> None:
    """An image of a fold shares a group with another fold; one of the test split with any fold."""
    from made_predictions import single_label

    made = single_label(6)
    folds = np.array(["0", "0", "1", "1", "", ""])
    splits = np.array(["val"] * 4 + ["test"] * 2)
    groups = np.array(["a", "a", "a", "b", "b", "c"])
    run = RunFolder(tmp_path)
    run.write_split(SplitTable(made.images, splits, groups, None, folds))
    from dataclasses import replace

    for split, shared in (("val", 3), ("test", 1)):
        rows = splits == split
        own = made.select(rows)
        run.write_predictions(replace(own, splits=splits[rows], groups=groups[rows]))
        leak = open_run(tmp_path).leak()
        assert leak is not None and leak.images == shared
