"""The study of soft labels with whole networks: its cells, its manifests, and from drawn images to the table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import end_to_end
from bench_tables import read_cell
from cclnet.data.cache import file_entries
from cclnet.data.sources import open_data
from cclnet.settings import DataOptions

METHODS = ("hard", "ccl-forward")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder aptos/ with drawn images: the brightness is the grade."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "data" / "aptos"
    (folder / "images").mkdir(parents=True)
    grades = np.arange(100) % 5
    for i, grade in enumerate(grades):
        pixels = 40 * grade + rng.integers(0, 60, (32, 32, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"images/i{i:03d}.png")
    table = pd.DataFrame({"id_code": [f"i{i:03d}" for i in range(100)], "diagnosis": grades})
    table.to_csv(folder / "train.csv", index=False)
    return folder.parent


def test_cells_have_the_planned_settings_in_an_order_of_whole_seeds(tmp_path: Path) -> None:
    (tmp_path / "tf_efficientnet_lite0.safetensors").touch()
    words = ["--data-root", "x", "--weights", str(tmp_path), "--training", "small", "finetune", "scratch"]
    cells = end_to_end.wanted_cells(end_to_end.arguments([*words, "--compile", "false"]))
    assert len({cell.name for cell in cells}) == len(cells) == 3 * 2 * 3 * 8 * len(end_to_end.METHODS)
    per_seed = 2 * len(end_to_end.METHODS)
    assert {cell.keys["seed"] for cell in cells[:per_seed]} == {0} and cells[per_seed].keys["seed"] == 1
    by_name = {cell.name: cell.settings for cell in cells}
    small, early = (
        by_name["isic2018-small-noise40-ccl-forward-seed3"],
        by_name["aptos-small-clean-hard-epochs=7-seed0"],
    )
    assert (small.short_side, small.augment.crop, small.epochs, small.validate_every) == (146, 128, 20, 20)
    assert (small.input_mean, small.input_std, small.pretrained) == ((0.5,) * 3, (0.5,) * 3, False)
    assert (small.method, small.seed, small.compile, early.epochs, early.validate_every) == (
        "ccl-forward", 3, False, 7, 7
    )  # fmt: skip
    large, scratch = (by_name[f"aptos-{name}-noise20-ols-seed0"] for name in ("finetune", "scratch"))
    assert (large.augment.crop, large.short_side, large.validate_every, large.method) == (224, 256, 1, "ols")
    assert (scratch.backbone, scratch.weights, scratch.epochs) == ("resnet18", "", 60)
    for crop, short_side in ((128, 146), (64, 73)):
        words = ["--data-root", "x", "--training", "scratch-small", "--crop", str(crop)]
        for cell in end_to_end.wanted_cells(end_to_end.arguments(words)):
            own = cell.settings
            assert (own.backbone, own.augment.crop, own.short_side) == ("resnet18", crop, short_side)
            assert own.method_settings.get("warmup", 15) == 15 and bool(own.method_settings.get("warmup")) == (
                own.method == "ccl-forward"
            )
            assert own.validate_every == own.epochs


def test_only_the_training_labels_are_noisy_and_all_seeds_share_the_cache(root: Path, tmp_path: Path) -> None:
    frames, keys = [], []
    options = DataOptions(image_folder=str(root / "aptos"))
    for seed in (0, 1):
        path = tmp_path / f"{seed}.csv"
        frames.append(pd.read_csv(end_to_end.write_manifest(path, "aptos", root, "noise40", seed, None)))
        table = open_data(str(path), options)
        keys.append(file_entries(table.images, table.root)[0]["key"])
    true, test = np.arange(100) % 5, frames[0]["split"] == "test"
    for frame in frames:
        assert (frame["label"] == true)[test].all() and 0.4 < (frame["label"] == true)[~test].mean() < 0.8
        assert np.abs(frame["label"] - true).max() == 1
    assert not frames[0]["label"].equals(frames[1]["label"]) and frames[0]["split"].equals(frames[1]["split"])
    np.testing.assert_array_equal(*keys)


def test_tuning_leaves_the_reported_images_out_and_all_seeds_have_one_split(root: Path, tmp_path: Path) -> None:
    reported = pd.read_csv(end_to_end.write_manifest(tmp_path / "r.csv", "aptos", root, "noise40", 101))
    test_images = set(reported["image"][reported["split"] == "test"])
    first, second = (
        pd.read_csv(end_to_end.write_manifest(tmp_path / f"t{s}.csv", "aptos", root, "noise40", s, tuning=True))
        for s in (101, 102)
    )
    assert test_images and not test_images & set(first["image"]) and len(first) == 100 - len(test_images)
    assert first["split"].equals(second["split"]) and not first["label"].equals(second["label"])
    grades = first["image"].str.extract(r"i(\d+)", expand=False).astype(int) % 5
    own_test = first["split"] == "test"
    assert 10 < own_test.sum() < 30 and (grades == first["label"])[own_test].all()
    options = end_to_end.arguments(["--data-root", "x", "--tuning", "--out", "t"])
    assert tuple(options.seeds) == (101, 102) and options.tables == options.out == Path("t")


@pytest.mark.usefixtures("forked_sweep")
def test_from_images_to_the_table(root: Path, tmp_path: Path) -> None:
    out, tables = tmp_path / "out", tmp_path / "tables"
    words = ["--smoke", "--training", "small", "--data", "aptos", "--regimes", "noise40", "--seeds", "0", "1",
             "--methods", *METHODS, "--data-root", str(root), "--out", str(out), "--tables", str(tables),
             "--cache-dir", str(tmp_path / "cache"), "--accelerator", "cpu"]  # fmt: skip
    assert end_to_end.main(words) == 0
    assert len(list((out / "results").glob("*-seed*.json"))) == 4
    cells = [read_cell(path) for path in sorted((out / "cells" / "small").glob("*.npz"))]
    assert {(c["method"], c["seed"]) for c in cells} == {(method, seed) for method in METHODS for seed in (0, 1)}
    for cell in cells:
        true = [int(name[1:]) % 5 for name in cell["images"]]
        assert cell["labels"].tolist() == true and len(set(cell["groups"])) == len(true) == 25
        np.testing.assert_allclose(cell["probabilities"].sum(axis=1), 1.0, atol=1e-5)
        np.testing.assert_allclose(cell["train_mean"], cell["probabilities"].mean(axis=0), atol=1e-6)
        assert cell["matrix"].shape == ((5, 5) if cell["method"] == "ccl-forward" else (0, 0))
    page = (tables / "whole_networks.md").read_text(encoding="utf-8")
    assert "**APTOS 2019, fine-tuned at 128 pixels: 40% of the training labels wrong.**" in page
    assert all(f"| `{method}` | 2 |" in page for method in METHODS) and "Quadratic kappa" in page
    content = json.loads((tables / "whole_networks.json").read_text(encoding="utf-8"))
    assert {"commit", "versions", "device"} <= set(content)
    assert content["results"][0]["tests"]["hard"]["ccl-forward"]["macro_auroc"]["seeds"] == 2
    # The kept results alone give the same tables, without images and run folders.
    assert end_to_end.main(["--tables-only", "--results", str(out / "results"), "--out", str(tmp_path / "other"),
                            "--tables", str(tmp_path / "again")]) == 0  # fmt: skip
    assert (tmp_path / "again" / "whole_networks.md").read_text(encoding="utf-8") == page
