"""The cells: how many, under which names, with which settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from cclnet import InputError
from cclnet.reproduce import experiments
from cclnet.reproduce.experiments import Cell, read_recipes, unique

RECIPES = Path(__file__).parents[2] / "recipes" / "isic2018"


def test_each_table_has_its_cells_and_they_share_one() -> None:
    one, two = experiments.table1(), experiments.table2()
    assert (len(one), len(two)) == (18, 6)
    assert {cell.name for cell in one} & {cell.name for cell in two} == {"paper-resnet18-ccl-seed0"}
    assert len(unique([*one, *two])) == 23
    assert len(unique(experiments.figures())) == 3 + 5 + 2


def test_names_differ_wherever_settings_do() -> None:
    every = [*experiments.table1((0, 1)), *experiments.table1((0, 1), split="lesion"), *experiments.figures(),
             *experiments.tune()]  # fmt: skip
    recipes = read_recipes(RECIPES)
    settings = {cell.name: repr(cell.settings(recipes[cell.split], "data" + cell.split)) for cell in every}
    assert len(settings) == len(set(settings.values())) == len({cell.name for cell in every})


def test_the_first_seed_comes_first() -> None:
    assert [cell.seed for cell in experiments.table1((3, 5), methods=("hard",))] == [3, 3, 3, 5, 5, 5]


def test_the_recipe_is_the_papers_protocol() -> None:
    settings = Cell(seed=2).settings(read_recipes(RECIPES)["paper"], "isic")
    assert (settings.optimizer, settings.momentum, settings.weight_decay) == ("sgd", 0.9, 1e-4)
    assert (settings.lr, settings.lr_ccl, settings.batch_size, settings.drop_factor) == (0.1, 0.0005, 128, 0.1)
    assert (settings.short_side, settings.augment.crop, len(settings.drops)) == (256, 224, 2)
    assert not settings.pretrained and settings.schedule == "step" and settings.clip > 0
    assert (settings.split.by, settings.split.val, settings.split.calibration) == ("class", 0.2, 0.0)
    assert settings.epochs > 147  # the paper's head freezes at its epoch 137 + 10
    assert (settings.seed, settings.split.seed) == (2, 0)


def test_the_recipes_differ_in_the_split_alone() -> None:
    recipes = read_recipes(RECIPES)
    assert recipes["lesion"]["split"].pop("by") == "group" and recipes["paper"]["split"].pop("by") == "class"
    assert recipes["lesion"] == recipes["paper"]


def test_tuning_starts_where_it_is_written_whatever_the_recipe_became() -> None:
    recipe = read_recipes(RECIPES)["tune"] | {"epochs": 7, "clip": 9.0}
    found = {cell.variant: cell.settings(recipe, "slice.csv") for cell in experiments.tune()}
    assert (found["start"].epochs, found["start"].clip, found["start"].method) == (160, 1.0, "hard")
    assert found["epochs-100"].epochs == 100 and found["clip-none"].clip == 0.0
    assert found["jitter-strong"].augment.hue == 0.1 and found["jitter-strong"].augment.horizontal_flip == 0.5
    assert {settings.split.by for settings in found.values()} == {"given"}


def test_without_the_freeze_rule_nothing_is_frozen() -> None:
    off = [cell for cell in experiments.figures() if cell.variant]
    patience = {cell.settings(read_recipes(RECIPES)["paper"], "isic").method_settings["patience"] for cell in off}
    assert min(patience) > 10_000


def test_unknown_names_are_told() -> None:
    with pytest.raises(InputError, match="unknown backbone of the paper 'resnet19'; did you mean 'resnet18'"):
        experiments.table1(backbones=("resnet19",))
    with pytest.raises(InputError, match="unknown method of the paper 'focal'"):
        experiments.table1(methods=("focal",))
    with pytest.raises(InputError, match="unknown split 'patient'"):
        experiments.table1(split="patient")


def test_missing_recipes_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no recipe .*paper\.toml"):
        read_recipes(tmp_path)
