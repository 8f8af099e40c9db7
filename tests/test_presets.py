"""Presets, the choice of one, and the input of pretrained backbones."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cclnet import presets, pretrained
from cclnet.api import run_settings
from cclnet.cli import app
from cclnet.errors import InputError
from cclnet.settings import Settings, make_settings, read_settings

BACKBONE = "tf_efficientnet_lite0"
ROOT = Path(__file__).parents[1]


def test_the_table_of_the_readme_is_that_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("presets_benchmark", ROOT / "benchmarks" / "presets.py")
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    expected = f"<!-- what you get -->\n{benchmark.what_you_get()}\n<!-- /what you get -->"
    assert expected in (ROOT / "README.md").read_text(encoding="utf-8"), "run: python benchmarks/presets.py --tables"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight can be had."""
    monkeypatch.setattr(presets, "find_weights", lambda backbone: ("from the hub", ""))


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_is_valid_printed_and_usable_as_a_recipe(name: str, tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["presets", "show", name])
    assert printed.exit_code == 0 and name in CliRunner().invoke(app, ["presets", "list"]).stdout
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(printed.stdout)
    assert run_settings("images", recipe, {}).data == "images"
    assert read_settings(recipe) == read_settings(presets.preset_file(name))


def test_preset_paper_is_the_defaults() -> None:
    assert make_settings(read_settings(presets.preset_file("paper"))) == Settings()


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"fintune.*finetune"):
        run_settings("images", None, {}, "fintune")


def test_without_weights_training_is_from_scratch_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_settings("images", None, {}, announce=True) == make_settings({"data": "images"})
    said = capsys.readouterr().err
    assert "preset paper" in said and BACKBONE in said and "HF_HUB_OFFLINE" in said and said.count("\n") == 1
    for preset in ("finetune", "best"):
        with pytest.raises(InputError, match=rf"preset {preset} .*--weights"):
            run_settings("images", None, {}, preset)
    quick = run_settings("images", None, {}, "quick")
    assert (quick.pretrained, quick.backbone) == (False, "resnet10t")
    assert "timm has no" in pretrained.find_weights("efficientnet_b6")[1]


@pytest.mark.usefixtures("hub")
def test_with_weights_training_fine_tunes(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = run_settings("images", None, {"epochs": 3}, announce=True)
    assert (chosen.backbone, chosen.pretrained, chosen.optimizer, chosen.epochs) == (BACKBONE, True, "adamw", 3)
    assert (chosen.augment.crop, chosen.short_side) == (224, 256) and chosen.input_mean == (0.5, 0.5, 0.5)
    assert "preset finetune" in capsys.readouterr().err
    larger = run_settings("images", None, {"backbone": "tf_efficientnet_lite4"})
    assert (larger.augment.crop, larger.short_side) == (380, 413)  # 380 / 0.92
    assert run_settings("images", None, {"augment": {"crop": 112}}).short_side == 128  # the same proportion
    assert run_settings("images", None, {"augment": {"crop": 112}, "short_side": 120}).short_side == 120
    assert run_settings("images", None, {"pretrained": False}).optimizer == "sgd"
    assert run_settings("images", None, {}, "quick").augment.crop == 96
    assert run_settings(None, None, {}).backbone == "test_resnet"  # the embedded demo asks nobody


def test_a_file_of_weights_sets_backbone_and_normalisation() -> None:
    chosen = run_settings("images", None, {"weights": "elsewhere/tf_efficientnet_lite0.safetensors"})
    assert (chosen.backbone, chosen.pretrained, chosen.input_std) == (BACKBONE, False, (0.5, 0.5, 0.5))
    assert run_settings("images", None, {"weights": "w.pt", "backbone": "resnet18"}).input_mean[0] == 0.485
    assert Settings(backbone=BACKBONE).input_mean[0] == 0.485  # from scratch: as before


def test_a_recipe_is_not_mixed_with_a_preset(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("epochs = 7\n")
    assert run_settings("images", recipe, {}) == make_settings({"data": "images", "epochs": 7})
    assert run_settings("images", recipe, {"lr": 0.2}, "paper").epochs == 7


def test_wrong_settings_are_reported_before_the_weights_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "find_weights", lambda backbone: pytest.fail("asked"))
    with pytest.raises(InputError, match="epoch"):
        run_settings("images", None, {"epoch": 3})


def test_weights_are_found_in_the_cache_of_the_hub_and_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    import torch

    asked = []

    def cached(repository: str, name: str, **_: object) -> str | None:
        asked.append((repository, name))
        return "file" if repository == "timm/resnet18.a1_in1k" and name == "model.safetensors" else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    assert "cache" in pretrained.find_weights("resnet18")[0]
    assert pretrained.find_weights(BACKBONE)[1] and ("timm/tf_efficientnet_lite0.in1k", "model.safetensors") in asked
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "tf_efficientnet_lite0-0aa007d2.pth").touch()
    assert "cache" in pretrained.find_weights(BACKBONE)[0]


def test_an_unreachable_hub_costs_a_few_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")  # nothing listens there
    assert "does not answer" in pretrained.find_weights("resnet18")[1]

    def hang(*_: object, **__: object) -> None:
        time.sleep(0.3)
        raise OSError("too late")

    monkeypatch.setattr(pretrained.urllib.request, "urlopen", hang)
    assert "no answer within 0.05 s" in pretrained._reach("http://127.0.0.1:1", 0.05)
