"""What is kept of a run, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from made import CLASSES, RECIPES, made_result

from cclnet import InputError
from cclnet.reproduce.experiments import Cell, read_recipes
from cclnet.reproduce.results import differing_settings, read_results

CELL = Cell()


def test_what_is_kept(tmp_path: Path) -> None:
    result = made_result(tmp_path, CELL, wrong=6, softness=[0.5, 0.4, 0.42, 0.43], frozen=3)
    [read] = read_results(tmp_path / "results")
    assert read == result and read.cell == CELL and read.path.name == "paper-resnet18-ccl-seed0.json"
    content = read.content
    assert (content["freeze_epoch"], content["converged_epoch"]) == (3, 2)
    assert content["softness"] == [0.5, 0.4, 0.42, 0.43] and content["images_per_second"] == 250.0
    assert read.value("accuracy") == 0.9 and content["scores"]["accuracy"]["low"] < 0.9
    assert content["leak"]["images"] == 0 and content["settings"]["data"] == "isic"
    assert np.asarray(content["correlation"]).shape == (3, 3) and content["final_softness"] == pytest.approx(0.43)
    assert content["rarity_agreement"] is not None and "/somewhere" not in read.path.read_text()
    kept = pd.read_csv(read.predictions)[[f"p_{name}" for name in CLASSES]].to_numpy() * 1e4
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-6)
    assert read.path.stat().st_size < 10_000


def test_methods_without_soft_labels_keep_no_matrix(tmp_path: Path) -> None:
    content = made_result(tmp_path, Cell(method="hard"), wrong=6).content
    assert [content[key] for key in ("softness", "freeze_epoch", "correlation", "final_softness")] == [None] * 4


def test_settings_that_came_later_had_their_defaults(tmp_path: Path) -> None:
    kept = json.loads(json.dumps(made_result(tmp_path, CELL, wrong=6).content["settings"]))
    settings = CELL.settings(read_recipes(RECIPES)["paper"], "/elsewhere/data")
    del kept["ema"]
    assert differing_settings(settings, kept) == []
    kept["augment"]["hue"] = 0.5
    kept["method_settings"]["patience"] = 3
    assert differing_settings(settings, kept) == [
        "augment.hue was 0.5, is 0.02",
        "method_settings.patience was 3, is None",
    ]


def test_files_that_are_no_results_are_told(tmp_path: Path) -> None:
    path = tmp_path / "paper-resnet18-ccl-seed0.json"
    path.write_text("{")
    with pytest.raises(InputError, match=r"is not JSON.*Remove it to run its cell again"):
        read_results(tmp_path)
    path.write_text("[]")
    with pytest.raises(InputError, match="is no result of an experiment"):
        read_results(tmp_path)
    assert read_results(tmp_path / "nothing") == []
