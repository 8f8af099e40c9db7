"""The study of fine-tuning: its cells, its tuning table, pooled folds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from cclnet.data.sources import open_data
from cclnet.data.split import make_split
from cclnet.errors import InputError
from cclnet.files import read_json
from cclnet.runs.predictions import Predictions
from cclnet.settings import DataOptions, SplitSettings
from finetune_study import (
    DESIGNS,
    SIZES,
    STUDIES,
    TUNE,
    WHOLE_SIDE,
    Row,
    balanced_rule,
    on_the_images_of,
    pooled,
    quadratic_kappa,
    rows_of,
    runs_of,
    screening_runs,
    table_options,
    write_screening,
    write_study_table,
)


def test_every_cell_has_valid_settings_and_a_name_of_its_own() -> None:
    cells = [run.cell({run.study: "data"}, None, False) for study in STUDIES for run in runs_of(study)]
    assert len({cell.name for cell in cells}) == len(cells) > 60
    by_name = {cell.name: cell.settings for cell in cells}
    lite4, paper = by_name["isic-lite4-fold3-seed2"], by_name["isic-paper-fold3-seed0"]
    assert (lite4.backbone, lite4.augment.crop, lite4.split.fold) == ("tf_efficientnet_lite4", 300, 3)
    assert lite4.augment.crop == SIZES[lite4.backbone] and lite4.input_mean == (0.5, 0.5, 0.5)
    assert (lite4.tta, lite4.folds) == ("none", 0)
    assert list(by_name).index("isic-lite0-fold0-seed0") < list(by_name).index("isic-lite4-fold1-seed0")
    assert (paper.optimizer, paper.pretrained, paper.split.by) == ("sgd", False, "group")
    assert by_name["tune-start-seed0"].split.by == "given" == by_name["brain-lite0-seed1"].split.by
    others = {name: by_name[f"tune-{name}-seed0"] for name in TUNE}
    assert len({repr(settings) for settings in others.values()}) == len(TUNE)  # every change changes something


@pytest.mark.parametrize("design", list(DESIGNS))
def test_a_screening_design_is_balanced_and_its_first_run_is_the_preset(design: str) -> None:
    prefix, factors = DESIGNS[design]
    runs = dict(screening_runs(design))
    assert len(runs) == 16 and runs[f"{prefix}-0000"] == ()
    for first in factors:
        assert sum(first in changed for changed in runs.values()) == 8
        for second in set(factors) - {first}:  # orthogonal: each is as frequent with the other as without
            assert sum(first in changed and second in changed for changed in runs.values()) == 4
    cells = {run.model: run.cell({"tune": "data"}, None, False).settings for run in runs_of("tune")}
    assert cells["screen-0000"] == cells["start"] and cells["start"].augment.warp == 1.0
    assert cells["second-0000"].prior_bias and cells["second-0000"].augment.warp == 0.5


def test_a_view_of_the_whole_side_follows_the_crop_of_the_backbone() -> None:
    cells = [replace(run, changes={**run.changes, **WHOLE_SIDE}).cell({}, None, False) for run in runs_of("isic")]
    sides = {(cell.settings.backbone, cell.settings.short_side, cell.settings.augment.crop) for cell in cells}
    assert {("tf_efficientnet_lite4", 300, 300), ("tf_efficientnet_lite0", 224, 224)} <= sides


def write_images(folder: Path, grouped: bool) -> str:
    """60 images of two classes and 30 patients; where they are not grouped, both images of a patient are the same."""
    generator = np.random.default_rng(0)
    (folder / "images").mkdir()
    rows, pixels = [], generator.integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    for i in range(60):
        Image.fromarray(pixels[i if grouped else i // 2]).save(folder / f"images/{i}.png")
        rows.append((f"images/{i}.png", "ab"[i % 2], f"patient{i // 2}"))
    columns = ["image", "label", "patient"] if grouped else ["image", "label"]
    pd.DataFrame([row[: len(columns)] for row in rows], columns=columns).to_csv(folder / "all.csv", index=False)
    return str(folder / "all.csv")


@pytest.mark.parametrize("grouped", [True, False])
def test_no_image_of_the_first_fold_is_tuned_on_and_copies_stay_together(tmp_path: Path, grouped: bool) -> None:
    source = write_images(tmp_path, grouped)
    whole = write_study_table("aptos", source, tmp_path / "aptos.csv")
    options = table_options("aptos", whole)
    table = open_data(whole["aptos"], DataOptions(**options))
    held_out = make_split(table, SplitSettings(by="group", folds=5, fold=0)) == "val"
    names = {Path(table.images[i]).name for i in np.flatnonzero(held_out)}
    data = write_study_table("aptos-tune", source, tmp_path / "tune.csv")
    tuned = pd.read_csv(data["aptos-tune"])
    assert names and not names & set(tuned["image"]) and len(tuned) == 60 - len(names)
    assert set(tuned["split"]) == {"train", "val"} and tuned.groupby("group")["split"].nunique().max() == 1
    assert table_options("aptos-tune", data)["split_column"] == "split" and "split_column" not in options
    patients = [int(Path(name).stem) // 2 for name in tuned["image"]]
    assert tuned.groupby(patients)["group"].nunique().max() == 1 and tuned["group"].nunique() == len(set(patients))


def kept(study: str, model: str, right: float, log_loss_shift: float = 0.0, seed: int = 0) -> Any:
    """A kept result on 200 images of three classes: the share ``right`` of them is predicted as what it is."""
    generator = np.random.default_rng([seed, 7])
    labels = np.arange(200) % 3
    predicted = np.where(generator.random(200) < right, labels, (labels + 1) % 3)
    p = np.full((200, 3), 0.15) + 0.55 * np.eye(3)[predicted]
    p += 0.1 * generator.random((200, 3))
    found = Predictions(np.array([f"x{i}" for i in range(200)]), labels, p / p.sum(1, keepdims=True), ("a", "b", "c"),
                        None, np.array(["val"] * 200))  # fmt: skip
    keys = {"study": study, "model": model, "fold": None, "seed": seed}
    return SimpleNamespace(keys=keys, read_predictions=lambda: found, name=model, class_counts=(1, 1, 1), device="cpu",
                           versions={}, to_json=lambda: {"commit": None})  # fmt: skip


def test_what_is_better_is_adopted_for_each_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"lr-0.002": 0.08, "whole-side": 0.04, "cutmix-0.5": -0.06}
    results = [kept("tune", name, 0.7 + sum(good.get(own, 0.0) for own in changed))
               for name, changed in screening_runs("second")]  # fmt: skip
    graded = {"start": 0.7, "whole-side": 0.7, "ordinal": 0.85, "whole-side-ordinal": 0.85}
    results += [kept("aptos-tune", name, right, seed=seed) for name, right in graded.items() for seed in (0, 1)]
    monkeypatch.setattr("finetune_study.read_results", lambda folder: results)
    write_screening(tmp_path, "second")
    adopted = read_json(tmp_path / "adopted.json")
    assert adopted["from_isic"] == ["lr-0.002", "whole-side"]
    assert adopted["adopted"]["isic"] == adopted["adopted"]["brain"] == {"lr": 0.002, "short_side": "crop"}
    assert adopted["adopted"]["aptos"] == {"lr": 0.002, "method": "ordinal"}  # chooses its view itself
    effects = read_json(tmp_path / "second_screening.json")["effects"]
    assert effects["cutmix-0.5"]["log_loss"] > 0.004 > abs(effects["erasing-0.25"]["log_loss"])


def result(fold: int, seed: int, shift: float = 0.0, model: str = "lite0", images: str = "x") -> Any:
    first = 0.6 + 0.1 * fold + shift
    found = Predictions(
        np.array([f"{images}{fold}{i}" for i in range(2)]), np.array([0, 1]),
        np.array([[first, 1 - first], [0.3, 0.7]]), ("a", "b"), None, np.array(["val", "val"]),
    )  # fmt: skip
    keys = {"study": "isic", "model": model, "fold": fold, "seed": seed}
    return SimpleNamespace(keys=keys, read_predictions=lambda: found, name=f"{model}-{fold}-{seed}")


def test_folds_are_joined_and_runs_of_a_fold_averaged() -> None:
    joined = pooled([result(0, 0), result(1, 0), result(0, 1, 0.2), result(1, 1, -0.2)])
    assert joined.images.tolist() == ["x00", "x01", "x10", "x11"]
    np.testing.assert_allclose(joined.probabilities[:, 0], [0.7, 0.3, 0.6, 0.3])
    with pytest.raises(InputError, match="different images"):
        pooled([result(0, 0), result(0, 1, images="y")])


def test_rows_of_the_table() -> None:
    lite0 = [result(fold, seed, model="lite0-tta") for fold in (0, 1) for seed in (0, 1)]
    rows = rows_of([*lite0, result(0, 0, model="lite4-tta"), result(0, 0, model="paper")])
    assert {name: len(own) for name, own in rows.items()} == {
        "isic lite0-tta": 2, "isic lite0-tta, ensemble of seeds": 4, "isic lite4-tta": 1,
        "isic lite4-tta + lite0-tta, ensemble": 3, "isic paper": 1,
    }  # fmt: skip


def test_quadratic_kappa_in_closed_form() -> None:
    assert quadratic_kappa(np.array([0, 1, 2, 2]), np.array([0.0, 1.0, 2.0, 2.0])) == 1.0
    # All graded 1: no agreement beyond chance.
    assert quadratic_kappa(np.array([0, 1, 2]), np.ones(3)) == pytest.approx(0.0)


def test_the_balanced_rule_divides_by_the_class_frequencies() -> None:
    p = np.array([[0.8, 0.2], [0.95, 0.05], [0.7, 0.3], [0.6, 0.4]])
    found = Predictions(np.array(list("abcd")), np.array([0, 0, 1, 0]), p, ("x", "y"), None, None)
    row = Row("row", found, (), (90, 10), 0.0, "", None, {})
    scores = balanced_rule(row)  # chosen: 1, 0, 1, 1
    assert scores["accuracy"]["value"] == 0.5
    assert scores["balanced_accuracy"]["value"] == pytest.approx((1 / 3 + 1) / 2)
    assert scores["balanced_accuracy"]["low"] < 2 / 3 < scores["balanced_accuracy"]["high"]


def test_a_row_is_restricted_to_the_images_of_another() -> None:
    both = pooled([result(0, 0), result(1, 0)])
    one = pooled([result(1, 0)])
    rows = [Row("lite0", own, (), (1, 1), 0.0, "", None, {}) for own in (both, one)]
    same = on_the_images_of(*rows)
    assert same.predictions.images.tolist() == one.images.tolist() and same.name.startswith("lite0, ")
