"""The search for settings: its space, the images it may see, and the preset it writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from cclnet.api import run_settings
from cclnet.cli import app
from cclnet.data.sources import open_data
from cclnet.data.split import make_split
from cclnet.data.table import ImageTable
from cclnet.errors import InputError
from cclnet.settings import Settings, SplitSettings, make_settings
from cclnet.sweep.tune import Inside, Range, Request, read_space, tune


def written(folder: Path, text: str) -> Path:
    path = folder / "space.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_space_has_lists_and_ranges(tmp_path: Path) -> None:
    text = """
        batch_size = {int = [16, 64]}
        lr = {loguniform = [1e-4, 0.1]}
        method = ["lsr", "lsr-u5"]
        [augment]
        hue = {uniform = [0, 0.1]}
        [method_settings]
        epsilon = [0.1, 0.2]
    """
    space = read_space(written(tmp_path, text), make_settings({"method": "lsr"}))
    assert space == {
        "batch_size": Range("int", 16, 64), "lr": Range("loguniform", 1e-4, 0.1), "method": ["lsr", "lsr-u5"],
        "augment.hue": Range("uniform", 0, 0.1), "method_settings.epsilon": [0.1, 0.2],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no setting"),
        ("lr = 0.1", "lr is a list of values"),
        ("lr = {loguniform = [0, 1]}", "the first above 0"),
        ("lr = {uniform = [1, 0.1]}", "two ascending numbers"),
        ("batch_size = {int = [1.5, 4]}", "whole numbers"),
        ("learning = [0.1]", "unknown setting 'learning'"),
        ('backbone = ["resnet18", "resnet81"]', "unknown backbone 'resnet81'"),
        ('weights = ["/dev/zero"]', "no weights file /dev/zero"),
        ("momentum = {uniform = [0, 2]}", "momentum"),
        ("method = ['lsr', 'hard']\nmethod_settings.epsilon = [0.1]", "epsilon"),
        ("seed = [1, 2]", "seed cannot be tuned"),
        ("split.test = [0.1, 0.2]", "split.test cannot be tuned"),
        ("label_column = ['a']", "label_column cannot be tuned"),
    ],
)
def test_what_is_no_space_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_space(written(tmp_path, text), Settings())


def test_the_inner_split_is_made_of_training_images_by_group() -> None:
    groups = np.array([f"patient{i // 4}" for i in range(240)])
    labels = np.arange(240) % 3
    table = ImageTable(
        "made", Path(), [f"{i:03d}" for i in range(240)], np.zeros((240, 8, 8), np.uint8), labels, tuple("ABC"), groups
    )
    outer = SplitSettings(test=0.2, val=0.1, calibration=0.1, seed=3)
    own, splits = Inside(outer, 0.25)(table)
    trained = make_split(table, outer) == "train"
    assert own.names == [name for name, kept in zip(table.names, trained, strict=True) if kept]
    assert set(splits) == {"train", "val"} and abs((splits == "val").mean() - 0.25) < 0.05
    assert own.groups is not None and not set(own.groups[splits == "val"]) & set(own.groups[splits == "train"])


def test_the_command_names_the_metrics_it_knows(tmp_path: Path) -> None:
    words = ["tune", "synthetic:images=84,size=32", "--preset", "paper", "--space", str(written(tmp_path, "lr = [1]"))]
    done = CliRunner().invoke(app, [*words, "--metric", "acuracy", "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, InputError) and "did you mean 'accuracy'" in str(done.exception)
    assert not (tmp_path / "out").exists()


def made_folder(folder: Path) -> Path:
    """The synthetic set as files, of which those that do not belong to the training split cannot be read."""
    table = open_data("synthetic:images=420,size=32")
    splits = make_split(table, SplitSettings(test=0.15, val=0.1, by="class"))
    assert isinstance(table.images, np.ndarray)
    rows = ["image,label,patient,split"]
    for row, name in enumerate(table.names):
        file = folder / f"{name}.png"
        if splits[row] == "train":
            Image.fromarray(table.images[row]).save(file)
        else:
            file.write_bytes(b"no image")
        rows.append(f"{file.name},{table.classes[table.labels[row]]},p{row},{splits[row]}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder / "table.csv"


@pytest.mark.usefixtures("ray_folder")
def test_the_search_improves_a_bad_learning_rate_without_the_test_images(tmp_path: Path) -> None:
    pytest.importorskip("ray.tune", reason="cclnet tune needs the extra cclnet[ray]")
    pytest.importorskip("optuna")
    (tmp_path / "images").mkdir()
    settings = make_settings({
        "data": str(made_folder(tmp_path / "images")), "group_column": "patient", "split_column": "split",
        "cache_dir": str(tmp_path / "cache"),
        "backbone": "test_resnet", "method": "hard", "short_side": 32, "augment": {"crop": 28}, "epochs": 6,
        "batch_size": 16, "lr": 1e-6, "schedule": "cosine",
    })  # fmt: skip
    request = Request(
        settings=settings, space=written(tmp_path, "lr = {loguniform = [1e-6, 1.0]}"), out=tmp_path / "out", trials=5,
        accelerator="cpu",
    )  # fmt: skip
    path, received = tune(request, Console(quiet=True))
    assert path is not None and received == 0
    content = json.loads((tmp_path / "out" / "tune.json").read_text())
    first, *others = content["trials"]
    assert len(others) == 4 and first["values"] == {"lr": 1e-6} and content["grouped"]
    assert sum(content["images"].values()) == sum(
        line.endswith(",train") for line in (tmp_path / "images" / "table.csv").read_text().splitlines()
    )
    chosen = run_settings(settings.data, None, {"group_column": "patient"}, str(path))
    best = next(trial for trial in others if trial["values"]["lr"] == chosen.lr)
    assert best["state"] == "complete" and best["score"] > first["score"] + 0.1
    assert (chosen.epochs, chosen.backbone, chosen.split) == (6, "test_resnet", Settings().split)

    again, _ = tune(request, Console(quiet=True))  # all five are there: nothing is trained
    assert again == path and json.loads((tmp_path / "out" / "tune.json").read_text()) == content
    path.write_text(path.read_text() + "learning = 1\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"unknown setting 'augment\.learning'"):
        run_settings(settings.data, None, {}, str(path))
