"""The cells: how many, under which names, with which settings; what is asked for, shards, and every error message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cclnet import InputError
from cclnet.cli import app
from cclnet.functional import collapse_point
from cclnet.reproduce import experiments
from cclnet.reproduce.experiments import (
    BACKBONES,
    EXPERIMENTS,
    LR_CCL,
    METHODS,
    MOVED,
    PAPER_SCORES,
    TABLE2,
    PaperCell,
    Request,
    cells_of,
    published,
    read_recipes,
    unique,
)
from cclnet.sweep.cells import parse_shard
from made_paper_results import made_result


def test_each_table_has_its_cells_and_they_share_one() -> None:
    one, two = experiments.table1(), experiments.table2()
    assert (len(one), len(two)) == (18, 6)
    assert {cell.name for cell in one} & {cell.name for cell in two} == {"paper-resnet18-ccl-seed0"}
    assert len(unique([*one, *two])) == 23
    assert len(unique(experiments.figures())) == 3 + 5 + 2


def test_names_differ_wherever_settings_do() -> None:
    every = [*experiments.table1((0, 1)), *experiments.table1((0, 1), split="lesion"), *experiments.figures()]
    recipes = read_recipes()
    settings = {cell.name: repr(cell.settings(recipes[cell.split], "data" + cell.split)) for cell in every}
    assert len(settings) == len(set(settings.values())) == len({cell.name for cell in every})


def test_the_first_seed_comes_first() -> None:
    assert [cell.seed for cell in experiments.table1((3, 5), methods=("hard",))] == [3, 3, 3, 5, 5, 5]


def test_the_recipe_is_the_papers_protocol() -> None:
    settings = PaperCell(seed=2).settings(read_recipes()["paper"], "isic")
    assert (settings.optimizer, settings.momentum, settings.weight_decay) == ("sgd", 0.9, 1e-4)
    assert (settings.lr, settings.lr_ccl, settings.batch_size, settings.drop_factor) == (0.1, 0.0005, 128, 0.1)
    assert (settings.short_side, settings.augment.crop, len(settings.drops)) == (256, 224, 2)
    assert not settings.pretrained and settings.schedule == "step" and settings.clip > 0
    assert (settings.split.by, settings.split.val, settings.split.calibration) == ("class", 0.2, 0.0)
    assert settings.epochs > 147  # the paper's head freezes at its epoch 137 + 10
    assert (settings.seed, settings.split.seed) == (2, 0)


def test_the_recipes_differ_in_the_split_alone() -> None:
    recipes = read_recipes()
    assert recipes["lesion"]["split"].pop("by") == "group" and recipes["paper"]["split"].pop("by") == "class"
    assert recipes["lesion"] == recipes["paper"]


def test_without_the_freeze_rule_nothing_is_frozen() -> None:
    off = [cell for cell in experiments.figures() if cell.variant]
    patience = {cell.settings(read_recipes()["paper"], "isic").method_settings["patience"] for cell in off}
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


def test_some_numbers_read_again() -> None:
    assert published("resnet18", "hard") == {
        "accuracy": 0.8347, "macro_f1": 0.7073, "kappa": 0.6775, "macro_jaccard": 0.5655,
    }  # fmt: skip
    assert published("efficientnet_b0", "lsr-a1")["kappa"] == 0.5526
    assert published("mobilenetv2_100", "lsr-u5")["macro_jaccard"] == 0.5281
    assert published("mobilenetv2_100", "lsr-a5")["macro_f1"] == 0.2306
    names = ("lr_ccl", "softness", "accuracy", "kappa", "converged")
    assert TABLE2[0.001] == dict(zip(names, (0.001, 0.38, 0.8452, 0.6972, 76), strict=True))
    assert TABLE2[0.05] == dict(zip(names, (0.05, 0.30, 0.8417, 0.6884, 5), strict=True))


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("score", PAPER_SCORES)
def test_what_the_text_claims_about_the_table(backbone: str, score: str) -> None:
    value = {method: published(backbone, method)[score] for method in METHODS}
    assert value["ccl"] == max(value.values())
    assert max(value["lsr-a1"], value["lsr-a5"]) < value["hard"]


def test_the_two_tables_share_a_run() -> None:
    shared, cell = TABLE2[LR_CCL], published("resnet18", "ccl")
    assert (shared["accuracy"], shared["kappa"]) == (cell["accuracy"], cell["kappa"])


def test_the_faster_the_head_the_sooner_and_softer() -> None:
    rates = [TABLE2[rate] for rate in sorted(TABLE2)]
    epochs = [rate["converged"] for rate in rates[1:]]
    assert "converged" not in rates[0] and epochs == sorted(epochs, key=lambda epoch: -epoch)
    softness = [rate["softness"] for rate in rates]
    assert softness == sorted(softness, reverse=True) and max(softness) < collapse_point(7)[1]


def request(*what: str, **more: Any) -> Request:
    return Request(what=what, data="isic", out=Path("out"), results=Path("results"), **more)


def test_several_tables_share_their_cells() -> None:
    assert len(cells_of(request("table1", "table2", "figures"))) == 18 + 5 + 2
    chosen = cells_of(request("table1", seeds=(1, 2), backbones=("resnet18",), methods=("hard", "ccl"), split="lesion"))
    assert [cell.name for cell in chosen] == [
        "lesion-resnet18-hard-seed1", "lesion-resnet18-ccl-seed1",
        "lesion-resnet18-hard-seed2", "lesion-resnet18-ccl-seed2",
    ]  # fmt: skip


def test_all_is_what_the_pages_report_and_the_most_important_comes_first() -> None:
    names = [cell.name for cell in cells_of(request("all"))]
    assert len(names) == len(set(names))
    parts = [request("table1", "table2", "figures")]
    some = {"backbones": ("resnet18",), "methods": ("hard", "lsr-u5", "ccl")}
    parts += [request("table1", seeds=(0, 1, 2), split=split, **some) for split in ("paper", "lesion")]
    assert {cell.name for part in parts for cell in cells_of(part)} <= set(names)
    assert not any(name.startswith("tune") for name in names)  # choices are made, not run again
    assert [name.split("-")[1] for name in names[:6]] == ["resnet18"] * 6


def test_complete_has_several_seeds_in_every_cell_and_all_folds() -> None:
    cells = cells_of(request("complete"))
    names = [cell.name for cell in cells]
    assert len(names) == len(set(names)) and {cell.name for cell in cells_of(request("all"))} <= set(names)
    for method in ("hard", "lsr-u1", "lsr-u5", "ccl"):
        assert {f"paper-resnet18-{method}-seed{seed}" for seed in range(8)} <= set(names)
        assert {f"paper-mobilenetv2_100-{method}-seed{seed}" for seed in range(3)} <= set(names)
        assert {f"lesion-resnet18-{method}-fold{k}-seed{seed}" for k in range(5) for seed in (0, 1)} <= set(names)
    assert {f"paper-{b}-lsr-a5-seed1" for b in ("resnet18", "efficientnet_b0", "mobilenetv2_100")} <= set(names)
    assert {f"paper-resnet18-ccl-lr{rate}-seed2" for rate in ("0.0001", "0.001", "0.005", "0.01", "0.05")} <= set(names)
    fold = next(cell for cell in cells if cell.name == "lesion-resnet18-hard-fold3-seed1")
    split = fold.settings(read_recipes()["lesion"], "isic").split
    assert (split.by, split.folds, split.fold, split.seed) == ("group", 5, 3, 0)


def test_a_dry_run_lists_what_is_finished_and_runs_nothing(tmp_path: Path) -> None:
    made_result(tmp_path, PaperCell(method="hard"), wrong=3)
    arguments = ["reproduce", "complete", "--dry-run", "--out", str(tmp_path / "out"), "--results",
                 str(tmp_path / "results")]  # fmt: skip
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "finished  paper-resnet18-hard-seed0" in done.output
    assert "to run    lesion-resnet18-lsr-u1-fold4-seed1" in done.output and "1 of 140 runs are finished" in done.output
    assert not (tmp_path / "out").exists()


def test_cells_by_name_come_in_the_order_asked_for() -> None:
    asked = ("paper-mobilenetv2_100-lsr-a?-*", "paper-resnet18-ccl-lr0.00?-seed0", "paper-*-lsr-a1-seed0")
    assert [cell.name for cell in cells_of(request("all", only=asked))] == [
        "paper-mobilenetv2_100-lsr-a1-seed0", "paper-mobilenetv2_100-lsr-a5-seed0",
        "paper-resnet18-ccl-lr0.001-seed0", "paper-resnet18-ccl-lr0.005-seed0",
        "paper-resnet18-lsr-a1-seed0", "paper-efficientnet_b0-lsr-a1-seed0",
    ]  # fmt: skip
    with pytest.raises(InputError, match="unknown cell 'paper-resnet18-cll-seed0'; did you mean 'paper-resnet18-ccl-"):
        cells_of(request("all", only=("*-hard-*", "paper-resnet18-cll-seed0")))


def test_shards_share_the_cells() -> None:
    whole = {cell.name for cell in cells_of(request("table1"))}
    requests = [request("table1", shard=(i, 4)) for i in (1, 2, 3, 4)]
    shards = [[cell.name for cell in one.own_shard(cells_of(one))] for one in requests]
    assert sum(map(len, shards)) == 18 and set().union(*shards) == whole


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(InputError, match="unknown experiment 'table3'; did you mean 'table"):
        request("table3")
    for moved in MOVED:
        with pytest.raises(InputError, match=rf"'{moved}' .*experiments/similarity/run.py {moved}"):
            request(moved)
    for split in ("bogus", "tune"):
        for what in EXPERIMENTS:
            with pytest.raises(InputError, match=f"unknown split '{split}'.* Known: lesion, paper"):
                request(what, split=split)
    with pytest.raises(InputError, match="backbones and methods select cells of table1"):
        request("table1", "table2", methods=("ccl",))
    with pytest.raises(InputError, match="give the folder of the ISIC 2018 images as --data, or --smoke"):
        Request(what=("table1",), data="", out=Path("out"), results=Path("results"))
    with pytest.raises(InputError, match="shard is i/n with i from 1 to n, got 5/4"):
        request("table1", shard=(5, 4))
    with pytest.raises(InputError, match="such as 1/4 for the first of four machines; got 'half'"):
        parse_shard("half")
