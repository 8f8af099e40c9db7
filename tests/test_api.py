"""The Python API: train, evaluate, compare, open_data and load by keyword."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import cclnet
from cclnet import InputError
from cclnet.api import run_settings
from cclnet.runs.folder import RunFolder, open_run

TINY = {"backbone": "test_resnet", "short_side": 32, "epochs": 1, "batch_size": 16, "augment": {"crop": 28}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [
        cclnet.train("synthetic:images=84,size=32", folder / method, method=method, accelerator="cpu", progress=False,
                     split={"val": 0.3}, **TINY)
        for method in ("hard", "lsr")
    ]  # fmt: skip


def test_train_evaluates_and_reports(runs: list[Path]) -> None:
    settings = RunFolder(runs[1]).read_settings()
    assert (settings.method, settings.augment.crop, settings.split.val) == ("lsr", 28, 0.3)
    assert {"scores.json", "report.html", "report.md", "model.safetensors"} <= {path.name for path in runs[1].iterdir()}
    assert cclnet.load(runs[1]).description.crop == (28, 28)


def test_evaluate_gives_what_it_writes(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (runs[0] / "model.json").read_bytes()
    scores = cclnet.evaluate(runs[0], tmp_path, draws=20)
    written = json.loads((tmp_path / "scores.json").read_text())
    assert written["scores"]["accuracy"]["value"] == scores.overall["accuracy"].value
    assert (tmp_path / "report.html").exists() and (runs[0] / "model.json").read_bytes() == before
    assert capsys.readouterr().out == ""  # printing is for the command


def test_compare_writes_only_where_it_is_told(runs: list[Path], tmp_path: Path) -> None:
    compared = cclnet.compare(runs, against="hard", draws=20)
    assert [pair.b for pair in compared.comparisons] == ["hard"]
    assert not any(tmp_path.iterdir())
    cclnet.compare(runs, tmp_path / "out", draws=20)
    assert (tmp_path / "out" / "comparison.html").exists()


def test_derived_and_given_mean_are_the_same_settings(runs: list[Path], tmp_path: Path) -> None:
    """A run of an earlier version wrote the derived values into settings.toml."""
    earlier = Path(shutil.copytree(runs[0], tmp_path / "earlier"))
    text = (earlier / "settings.toml").read_text()
    text = text.replace("mean = []", "mean = [0.485, 0.456, 0.406]").replace("std = []", "std = [0.229, 0.224, 0.225]")
    (earlier / "settings.toml").write_text(text)
    assert "0.485" in text and open_run(earlier).settings() == open_run(runs[0]).settings()


def test_unknown_names_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'learning_rate'; did you mean 'lr'"):
        cclnet.train("synthetic", tmp_path / "run", learning_rate=0.1)
    with pytest.raises(InputError, match=r"'augment\.image_size'; did you mean 'augment\.crop'"):
        cclnet.train("synthetic", tmp_path / "run", augment={"image_size": 64})
    with pytest.raises(InputError, match="'label_colum'; did you mean 'label_column'"):
        cclnet.open_data("synthetic", label_colum="x")
    assert not (tmp_path / "run").exists()


def test_open_data_takes_options_in_one_form() -> None:
    from cclnet.settings import DataOptions

    assert len(cclnet.open_data("synthetic:images=20,size=16", DataOptions(strict=True))) == 20
    with pytest.raises(TypeError, match="not both"):
        cclnet.open_data("synthetic", DataOptions(), strict=True)


def test_layers_of_settings(tmp_path: Path) -> None:
    assert run_settings(None, None, {}).backbone == "test_resnet"  # the embedded demo
    (tmp_path / "recipe.toml").write_text('lr = 0.03\npart_column = "fold"\n[augment]\nhue = 0.3\n')
    settings = run_settings(Path("images"), tmp_path / "recipe.toml", {"augment": {"crop": 64}, "split_column": "new"})
    assert (settings.data, settings.lr, settings.augment.hue, settings.augment.crop) == ("images", 0.03, 0.3, 64)
    assert settings.split_column == "new"


def test_names_are_listed() -> None:
    assert {"train", "evaluate", "compare", "open_data", "load", "CCLHead"} <= set(dir(cclnet))
    assert set(cclnet.__all__) <= set(dir(cclnet))
