"""Multi-label data from a table of files to the report: the files of a run, and refused input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

from cclnet import InputError
from cclnet.cli import app
from cclnet.data.synthetic import MultilabelSettings, synthetic_multilabel
from cclnet.settings import make_settings
from cclnet.training.loop import train

TINY = [
    "short_side=32",
    "backbone=test_resnet",
    "epochs=3",
    "batch_size=16",
    "lr=.02",
    "split.val=.3",
    "augment.crop=28",
]


def synthetic(images: int, **changes: Any) -> dict[str, Any]:
    return {
        "data": f"synthetic-multilabel:images={images},size=32",
        "method": "ccl-multilabel",
        "short_side": 32,
        "backbone": "test_resnet",
        "batch_size": 16,
        "augment": {"crop": 28},
        **changes,
    }


def command(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(done.exception, Exception):
        raise done.exception
    return done.output


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of image files with the labels in one cell; some images have none."""
    folder = tmp_path_factory.mktemp("films")
    table = synthetic_multilabel(MultilabelSettings(images=120, size=32, classes=4))
    names = [f"{name}.png" for name in table.names]
    for name, pixels in zip(names, table.images, strict=True):
        Image.fromarray(pixels).save(folder / name)
    labels = ["|".join(np.array(table.classes)[row == 1]) or "No Finding" for row in table.labels]
    pd.DataFrame({"image": names, "label": labels}).to_csv(folder / "films.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def run(films: Path) -> Path:
    sets = [f"--set={setting}" for setting in TINY]
    options = ["--method", "ccl-multilabel", "--out", films / "run", "--accelerator", "cpu", "--quiet"]
    command("train", films / "films.csv", *options, *sets, "--cache-dir", films / "cache")
    return films / "run"


def test_files_of_a_run(run: Path) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        assert record["loss"] == pytest.approx(record["binary_cross_entropy"] + record["kl"], rel=1e-5)
        assert record["softness"] == pytest.approx(0.8)
    model = json.loads((run / "model.json").read_text())
    assert model["multilabel"] is True and model["method"] == "ccl-multilabel"
    soft_labels = pd.read_csv(run / "soft_labels.csv", index_col="class")
    assert list(soft_labels) == model["classes"]
    np.testing.assert_allclose(soft_labels.sum(axis=1), 1.0)
    predictions = pd.read_csv(run / "predictions.csv", keep_default_na=False)
    probabilities = predictions[[f"p_{name}" for name in model["classes"]]].to_numpy()
    assert ((probabilities > 0) & (probabilities < 1)).all()
    assert not np.allclose(probabilities.sum(axis=1), 1.0, atol=0.05)  # independent decisions
    assert predictions["label"].str.contains("|", regex=False).any()


def test_evaluation_and_report(run: Path) -> None:
    command("evaluate", run)
    scores = json.loads((run / "scores.json").read_text())
    assert scores["task"] == "multi-label" and 0 < scores["scores"]["mean_average_precision"]["value"] <= 1
    page = (run / "report.html").read_text()
    assert "Mean average precision" in page and "Soft labels" in page


@pytest.mark.parametrize("method", ["ccl", "hard", "ols"])
def test_single_label_methods_are_refused(films: Path, method: str) -> None:
    settings = make_settings(
        {"data": str(films / "films.csv"), "method": method, "augment": {"crop": 28}, "short_side": 32}
    )
    with pytest.raises(InputError, match=f"method '{method}' .* several.* Use 'ccl-multilabel'"):
        train(settings, films / f"refused-{method}", accelerator="cpu", progress=False, cache_dir=films / "never")
    assert not (films / "never").exists()  # before anything was decoded


def test_multilabel_methods_are_refused_for_single_labels(tmp_path: Path) -> None:
    data = {"data": "synthetic:images=40,size=32", "short_side": 32, "augment": {"crop": 28}}
    for method, instead in (("ccl-multilabel", "ccl-centroid"), ("bce", "hard")):
        with pytest.raises(InputError, match=f"one label each. Use '{instead}'"):
            train(make_settings(data, {"method": method}), tmp_path / method, accelerator="cpu", progress=False)


def test_mixup_and_cutmix(tmp_path: Path) -> None:
    changes = synthetic(60, epochs=2, augment={"crop": 28, "mixup": 0.4, "cutmix": 1.0})
    path = train(make_settings(changes), tmp_path / "run", accelerator="cpu", progress=False)
    assert (path / "predictions.csv").exists()


def test_the_state_of_the_method_is_resumed(tmp_path: Path) -> None:
    """The checkpoint contains the whole state of the method."""
    changes = synthetic(80, epochs=3)

    class Stop(Exception):
        pass

    def stop(record: dict, _: object) -> None:
        if record["epoch"] == 2:
            raise Stop

    whole = train(make_settings(changes), tmp_path / "whole", accelerator="cpu", progress=False)
    with pytest.raises(Stop):
        train(make_settings(changes), tmp_path / "stopped", accelerator="cpu", progress=False, on_epoch=stop)
    stopped = train(None, tmp_path / "stopped", accelerator="cpu", progress=False)
    for name in ("soft_labels.csv", "predictions.csv", "model.safetensors"):
        assert (whole / name).read_bytes() == (stopped / name).read_bytes()
    matrix = np.loadtxt(whole / "soft_labels.csv", delimiter=",", skiprows=1, usecols=range(1, 8))
    assert matrix[0, 1:].std() > 1e-4  # the method had learned something to resume
