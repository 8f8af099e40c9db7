"""Whole runs on the synthetic set: their files, the effect of the settings, divergence, refused input."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import cclnet
from cclnet import CCLNet, InputError, functional
from cclnet.data.sources import open_data
from cclnet.deploy.card import model_card
from cclnet.errors import NotFinite
from cclnet.evaluation.evaluate import evaluate
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import Calibration
from cclnet.runs.predictions import read_predictions
from cclnet.settings import Settings, make_settings
from cclnet.training.loop import train

TINY: dict[str, Any] = {
    "data": "synthetic:images=160,size=32",
    "short_side": 32,
    "backbone": "test_resnet",
    "method_settings": {"widths": (16, 8), "patience": 2},
    "epochs": 3,
    "batch_size": 32,
    "lr": 0.02,
    "lr_ccl": 0.01,
    "split": {"val": 0.25, "calibration": 0.1},
    "augment": {"crop": 28},
}


def tiny(**changes: Any) -> Settings:
    return make_settings(TINY, changes)


def run(tmp_path: Path, name: str = "run", **changes: Any) -> Path:
    return train(tiny(**changes), tmp_path / name, accelerator="cpu", progress=False, cache_dir=tmp_path / "cache")


def metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_files_of_a_run(tmp_path: Path) -> None:
    path = run(tmp_path)
    records = metrics(path)
    assert [record["epoch"] for record in records] == [1, 2, 3]
    for term in ("loss", "cross_entropy", "kl", "head_cross_entropy", "class_correlation", "softness", "val_accuracy"):
        assert all(np.isfinite(record[term]) for record in records)
    assert records[0]["loss"] == pytest.approx(
        sum(records[0][t] for t in ("cross_entropy", "kl", "head_cross_entropy", "class_correlation")), rel=1e-5
    )
    model = json.loads((path / "model.json").read_text())
    assert model["trained"]["versions"]["torch"] and model["trained"]["epochs"] == 3
    assert model["trained"]["split"] == "group" and "cut" not in model["trained"]
    soft_labels = pd.read_csv(path / "soft_labels.csv", index_col="class")
    assert list(soft_labels.columns) == model["classes"] == list(soft_labels.index)
    np.testing.assert_allclose(soft_labels.to_numpy().sum(axis=1), 1.0, atol=1e-6)
    split = pd.read_csv(path / "split.csv")
    predictions = pd.read_csv(path / "predictions.csv")
    assert set(predictions["image"]) == set(split.loc[split["split"] != "train", "image"])
    assert set(predictions["split"]) == {"val", "calibration"}
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == [
        "SHA256SUMS",
        "epoch-000002-step-00000000.pt",
        "epoch-000003-step-00000000.pt",
    ]
    assert any((path / "tensorboard").iterdir())


def test_shipped_weights_give_the_predictions(tmp_path: Path) -> None:
    from cclnet.data.sources import open_data

    path = run(tmp_path)
    model = json.loads((path / "model.json").read_text())
    net = CCLNet(model["backbone"], len(model["classes"]), method="hard").eval()
    net.classifier.shipped.load_state_dict(load_file(path / "model.safetensors"))
    table = open_data(TINY["data"])
    predictions = pd.read_csv(path / "predictions.csv").set_index("image")
    name = predictions.index[0]
    pixels = table.images[list(table.names).index(name)][2:30, 2:30]
    image = torch.tensor(pixels).permute(2, 0, 1)[None].float() / 255
    image = (image - torch.tensor(model["mean"]).view(1, 3, 1, 1)) / torch.tensor(model["std"]).view(1, 3, 1, 1)
    with torch.no_grad():
        probabilities = torch.softmax(net(image), dim=1)[0].numpy()
    expected = predictions.loc[name, [f"p_{c}" for c in model["classes"]]].to_numpy(dtype=float)
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)


def test_automatic_views_are_those_of_training(tmp_path: Path) -> None:
    flips = {"vertical_flip": 0.0}
    automatic, mirrored, plain = (
        run(tmp_path, tta, tta=tta, augment={"crop": 28, **flips}) for tta in ("auto", "flip", "none")
    )
    assert RunFolder(automatic).read_model().tta == "flip"
    found, expected, other = (
        read_predictions(folder / "predictions.csv").probabilities for folder in (automatic, mirrored, plain)
    )
    assert np.array_equal(found, expected) and not np.array_equal(found, other)


def test_a_transformer_is_made_for_the_size_of_the_images(tmp_path: Path) -> None:
    from cclnet.deploy.predictor import load

    path = run(tmp_path, backbone="test_vit", augment={"crop": 32}, epochs=1)  # patches of 16 px, made for 160 px
    assert load_file(path / "model.safetensors")["pos_embed"].shape[1] <= 5
    assert load(path).description.crop == (32, 32)


@pytest.mark.parametrize("method", ["ccl", "ccl-centroid"])
def test_accumulation_gives_the_gradients_of_the_whole_batch(tmp_path: Path, method: str) -> None:
    """32 images in 5 chunks of unequal size; weighted, so that the mean of a chunk is not that of the batch."""
    own = TINY["method_settings"] if method == "ccl" else {}
    same = {**TINY, "precision": "64", "batch_norm": "frozen", "class_weights": True, "method": method}
    whole, accumulated = (
        train(make_settings({**same, "method_settings": own, "accumulate": count}), tmp_path / str(count),
              accelerator="cpu", progress=False)
        for count in (1, 5)
    )  # fmt: skip
    for a, b in zip(metrics(whole), metrics(accumulated), strict=True):
        assert [a["loss"], a["softness"]] == pytest.approx([b["loss"], b["softness"]], rel=1e-6)
    a, b = (load_file(path / "model.safetensors") for path in (whole, accumulated))
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=1e-4, atol=1e-6)


def test_chunks_without_enough_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="batch_size to 64 or more"):
        run(tmp_path, accumulate=32)


def test_dropout_applies_only_in_training(tmp_path: Path) -> None:
    plain, dropped = run(tmp_path, "plain", epochs=1), run(tmp_path, "dropped", epochs=1, drop_rate=0.5)
    assert metrics(plain)[0]["loss"] != metrics(dropped)[0]["loss"]
    again = run(tmp_path, "again", epochs=1, drop_rate=0.5)
    assert (dropped / "predictions.csv").read_bytes() == (again / "predictions.csv").read_bytes()


def test_soft_labels_are_removed_from_the_probabilities(tmp_path: Path) -> None:
    tiny = {**TINY, "method": "lsr-a5", "method_settings": {}, "epochs": 1}
    both = {name: make_settings({**tiny, "unsoften": name == "removed"}) for name in ("plain", "removed")}
    plain, removed = (train(both[name], tmp_path / name, accelerator="cpu", progress=False) for name in both)
    model = json.loads((removed / "model.json").read_text())
    assert json.loads((plain / "model.json").read_text())["target"] is None
    softened, found = (read_predictions(path / "predictions.csv").probabilities for path in (plain, removed))
    expected = functional.unsoften(torch.tensor(softened), torch.tensor(model["target"], dtype=torch.float64))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.abs(found - softened).max() > 0.01
    with pytest.raises(InputError, match=r"unsoften.*'focal' has none"):
        train(make_settings({**tiny, "method": "focal", "unsoften": True}), tmp_path / "none", accelerator="cpu")
    vague = {"method": "ordinal", "method_settings": {"sigma": 3.0}, "unsoften": True}
    with pytest.raises(InputError, match="singular"):
        train(make_settings(tiny, vague), tmp_path / "vague", accelerator="cpu")  # before anything is trained
    assert not (tmp_path / "vague").exists()


@pytest.mark.parametrize("method", ["hard", "lsr-u5", "lsr-a1"])
def test_other_methods(tmp_path: Path, method: str) -> None:
    settings = make_settings({**TINY, "method": method, "method_settings": {}, "epochs": 1})
    record = metrics(train(settings, tmp_path / "run", accelerator="cpu", progress=False))[0]
    assert record["cross_entropy"] == pytest.approx(record["loss"]) and "kl" not in record


def test_settings_change_the_weights(tmp_path: Path) -> None:
    """Each of these settings changes the weights; the same settings give the same weights."""
    plain = load_file(run(tmp_path, "plain", epochs=1) / "model.safetensors")
    changes: dict[str, dict[str, Any]] = {
        "adamw": {"optimizer": "adamw", "lr": 0.001},
        "cosine": {"schedule": "cosine"},
        "warm": {"warmup_epochs": 1},
        "ema": {"ema": 0.9},
        "weights": {"class_weights": True},
        "balanced": {"balanced_sampling": True},
        "seed": {"seed": 1},
        "clip": {"clip": 0.001},
        "frozen": {"batch_norm": "frozen"},
    }
    for name, change in changes.items():
        other = load_file(run(tmp_path, name, epochs=1, **change) / "model.safetensors")
        assert set(other) == set(plain)
        assert any(not torch.equal(other[key], plain[key]) for key in plain), name
    again = load_file(run(tmp_path, "again", epochs=1) / "model.safetensors")
    assert all(torch.equal(again[key], plain[key]) for key in plain)


def test_frozen_batch_norm_keeps_its_statistics(tmp_path: Path) -> None:
    weights = load_file(run(tmp_path, epochs=1, batch_norm="frozen") / "model.safetensors")
    means = [value for name, value in weights.items() if name.endswith("running_mean")]
    assert means and all(torch.equal(value, torch.zeros_like(value)) for value in means)


def test_streamed_and_resident_give_the_same_bits(tmp_path: Path) -> None:
    resident = load_file(run(tmp_path, "resident", resident=True) / "model.safetensors")
    streamed = load_file(run(tmp_path, "streamed", resident=False) / "model.safetensors")
    assert all(torch.equal(resident[name], streamed[name]) for name in resident)


def test_a_time_limit_stops_early(tmp_path: Path) -> None:
    path = run(tmp_path, max_minutes=1e-9)
    trained = json.loads((path / "model.json").read_text())["trained"]
    assert trained["epochs"] == 0 and trained["cut"] is True
    assert any("max_minutes" in warning and "0 of 3" in warning for warning in evaluate(path, draws=20).warnings)
    assert "0 of 3: cut by max_minutes" in model_card(path, RunFolder(path).read_model(), Calibration())
    assert not (path / "metrics.jsonl").exists()


@pytest.mark.parametrize("method", ["hard", "ccl"])
def test_divergence_ends_the_run_and_names_the_step(tmp_path: Path, method: str) -> None:
    diverging = {**TINY, "method": method, "method_settings": {}, "lr": 1e6, "clip": 0.0}
    with pytest.raises(InputError, match=r"diverged at step \d+ of epoch 1 \(.*no earlier checkpoint"):
        train(make_settings(diverging), tmp_path / "run", accelerator="cpu", progress=False)
    assert not (tmp_path / "run" / "predictions.csv").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_divergence_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    def poison(record: dict[str, Any], network: CCLNet) -> None:
        if record["epoch"] == 2:
            with torch.no_grad():
                next(network.classifier.parameters()).fill_(float("nan"))

    with pytest.raises(InputError, match=r"diverged at step 1 of epoch 3.*epoch-000002-step-00000000"):
        train(tiny(), tmp_path / "run", accelerator="cpu", progress=False, on_epoch=poison)


def test_divergence_after_the_last_loss_is_detected(tmp_path: Path) -> None:
    wild = {**TINY, "method": "hard", "method_settings": {}, "lr": 1e3, "clip": 0.0, "schedule": "constant",
            "batch_size": 96}  # fmt: skip
    with pytest.raises(InputError, match="diverged at step"):
        train(make_settings(wild), tmp_path / "run", accelerator="cpu", progress=False)
    assert all(math.isfinite(record["val_loss"]) for record in metrics(tmp_path / "run"))
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"data": "/nowhere"},
        {"backbone": "resnet19"},
        {"method_settings": {"margin": "wide"}},
        {"backbone": "vgg11", "drop_path_rate": 0.1},  # which it does not support
        {"backbone": "vgg11"},  # halves its images more often than 28 px can be
        {"lr": 1e30},  # diverges before the first checkpoint
    ],
)
def test_a_failed_start_leaves_the_folder_free(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises((InputError, NotFinite)):
        run(tmp_path, **changes)
    assert not (tmp_path / "run").exists()
    assert (run(tmp_path, epochs=1) / "predictions.csv").exists()


def test_files_of_another_run_are_not_used(tmp_path: Path) -> None:
    path = run(tmp_path, epochs=1)
    for name in ("split.csv", "checkpoints"):
        (tmp_path / name).mkdir()
        (path / name).rename(tmp_path / name / name)
        with pytest.raises(InputError, match=f"{name} of another run"):
            run(tmp_path, name)


def test_averaged_weights_forget_the_initial_weights(tmp_path: Path) -> None:
    first, averaged = (metrics(run(tmp_path, str(ema), ema=ema, epochs=6, lr=0.05))[-1] for ema in (0.0, 0.999))
    assert averaged["val_loss"] < 1.3 * first["val_loss"]


def test_the_weights_file_is_not_needed_to_resume(tmp_path: Path) -> None:
    first = run(tmp_path, "first", epochs=1)
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes((first / "model.safetensors").read_bytes())
    path = run(tmp_path, weights=str(weights), epochs=1)
    weights.unlink()
    before = (path / "predictions.csv").read_bytes()
    train(None, path, accelerator="cpu", progress=False, cache_dir=tmp_path / "cache")
    assert (path / "predictions.csv").read_bytes() == before


def test_a_folder_with_a_run_is_not_changed(tmp_path: Path) -> None:
    path = run(tmp_path, epochs=1)
    before = (path / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match="holds a run already"):
        run(tmp_path, epochs=1)
    assert (path / "model.safetensors").read_bytes() == before


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run to resume"):
        train(None, tmp_path / "nothing", accelerator="cpu", progress=False)


def test_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made"):
        train(tiny(), tmp_path / "file" / "run", accelerator="cpu", progress=False)


def test_weights_from_a_file(tmp_path: Path) -> None:
    path = run(tmp_path, "first", epochs=1)
    weights = path / "model.safetensors"
    started = run(tmp_path, "second", epochs=1, lr=0.0, lr_ccl=0.0, weights=str(weights), batch_norm="frozen")
    first, second = load_file(weights), load_file(started / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    # The last layer, for other classes, is skipped; the rest is loaded.
    other = {name: value for name, value in first.items() if not name.startswith("fc.")}
    other["fc.weight"], other["fc.bias"] = torch.zeros(1000, first["fc.weight"].shape[1]), torch.zeros(1000)
    save_file(other, tmp_path / "other.safetensors")
    third = load_file(
        run(tmp_path, "third", epochs=1, lr=0.0, weights=str(tmp_path / "other.safetensors"), batch_norm="frozen")
        / "model.safetensors"
    )
    assert all(torch.equal(first[name], third[name]) for name in first if not name.startswith("fc."))


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no weights file"):
        run(tmp_path, "a", weights=str(tmp_path / "none.safetensors"))
    save_file({"nothing": torch.ones(2)}, tmp_path / "odd.safetensors")
    with pytest.raises(InputError, match=r"does not fit.*Missing.*conv1.*Not used: nothing \[2\]"):
        run(tmp_path, "b", weights=str(tmp_path / "odd.safetensors"))
    (tmp_path / "text.safetensors").write_text("not weights")
    with pytest.raises(InputError, match="is refused"):
        run(tmp_path, "c", weights=str(tmp_path / "text.safetensors"))
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(InputError, match="holds no state dict"):
        run(tmp_path, "d", weights=str(tmp_path / "list.pt"))


@pytest.mark.parametrize("given", [None, 31])
def test_images_are_tested_at_the_scale_of_training_here_and_in_deployment(tmp_path: Path, given: int | None) -> None:
    path = run(
        tmp_path, data="synthetic:images=60,size=48", short_side=32, test_short_side=given, epochs=1,
        augment={"crop": 24, "resized_crop": (0.5, 0.5)},
    )  # fmt: skip
    model = cclnet.load(path)
    assert model.description.short_side == (given or 34)  # 32 · 24 / (√0.5 · 32)
    table = open_data("synthetic:images=60,size=48")
    found = read_predictions(path / "predictions.csv")
    rows = [table.names.index(name) for name in found.images]
    predicted = model.run(np.stack([model.prepare(table.images[row]) for row in rows]))[0]
    np.testing.assert_allclose(predicted, found.probabilities, atol=1e-5)


def test_fine_tuning_resumes_exactly_with_all_of_its_settings(tmp_path: Path) -> None:
    warped = {"rotation": 180, "zoom": (0.8, 1.25), "shear": 5, "trivial_colour": 0.5, "erasing": 0.5}
    optimizer = {"optimizer": "adamw", "lr": 0.001, "layer_decay": 0.7, "decay_norms": False, "schedule": "cosine"}
    changes: dict[str, Any] = {
        **optimizer, "ema": 0.9, "epochs": 4, "drop_path_rate": 0.1, "logit_adjustment": 1.0,
        "augment": {"crop": 28, **warped},
    }  # fmt: skip
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"

    class Stop(Exception):
        pass

    def stop_after_two_epochs(record: dict[str, Any], _: CCLNet) -> None:
        if record["epoch"] == 2:
            raise Stop

    train(tiny(**changes), whole, accelerator="cpu", progress=False)
    with pytest.raises(Stop):
        train(tiny(**changes), stopped, accelerator="cpu", progress=False, on_epoch=stop_after_two_epochs)
    assert any((stopped / "checkpoints").iterdir()) and not (stopped / "predictions.csv").exists()
    train(None, stopped, accelerator="cpu", progress=False)
    for file in ("model.safetensors", "predictions.csv"):
        assert (whole / file).read_bytes() == (stopped / file).read_bytes()
    rates = [record["lr"] for record in metrics(whole)]
    assert rates == sorted(rates, reverse=True) and rates[0] <= 0.001


def test_a_new_classifier_on_pretrained_weights_begins_undecided(tmp_path: Path) -> None:
    weights = tmp_path / "tf_efficientnet_lite0.safetensors"
    save_file(CCLNet("tf_efficientnet_lite0", 10, method="hard").export_state(), weights)
    started = run(
        tmp_path, data="synthetic:images=120,size=40", short_side=40, augment={"crop": 32}, epochs=1, batch_size=16,
        lr=0.0, lr_ccl=0.0, backbone="tf_efficientnet_lite0",
        weights=str(weights),
    )  # fmt: skip
    assert metrics(started)[0]["cross_entropy"] == pytest.approx(math.log(7), rel=0.01)  # from scratch it is larger


def test_images_left_out_stay_out_when_resumed(tmp_path: Path) -> None:
    """Unreadable images and copies across splits are listed in data.json, and a resumed run leaves out the same."""
    data, random = tmp_path / "data", np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 4)):
        for label in ("a", "b"):
            folder = data / split / label
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(random.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    (data / "train/a/broken.png").write_bytes(b"no image")
    copied = (data / "train/b/3.png").read_bytes()
    (data / "val/b/copy.png").write_bytes(copied)
    options = {"data": str(data), "split": {"calibration": 0}, "batch_size": 8, "epochs": 2}
    with pytest.raises(InputError, match="--skip-unreadable"):
        run(tmp_path, **options)
    copies = RunFolder(run(tmp_path, "kept", skip_unreadable=True, **options)).read_data_summary()
    assert copies.duplicates is not None and copies.duplicates.exact == {"val": 1}
    scores = cclnet.evaluate(tmp_path / "kept", draws=10)
    assert scores.copies is not None and scores.copies.exact == 1
    first_paragraph = (tmp_path / "kept/report.md").read_text().split("Evaluated on")[1].split("\n")[0]
    assert "1 of 9 val images (11.1%) are copies of training images" in first_paragraph
    whole = run(tmp_path, "left_out", skip_unreadable=True, deduplicate=True, **options)
    summary = RunFolder(whole).read_data_summary()
    assert set(summary.left_out) == {"train/a/broken.png", "train/b/3.png"}
    assert not set(summary.left_out) & set(RunFolder(whole).read_split().images.tolist())
    for stale in ("model.safetensors", "model.json", "predictions.csv"):
        (whole / stale).unlink()
    train(None, whole, accelerator="cpu", progress=False, cache_dir=tmp_path / "cache")
    assert not set(summary.left_out) & set(read_predictions(whole / "predictions.csv").images.tolist())
