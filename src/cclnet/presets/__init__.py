"""Presets: named settings in one TOML file each, and the choice of one where none is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cclnet.errors import InputError, unknown
from cclnet.pretrained import find_weights, input_settings
from cclnet.settings import make_settings, merge_layers, read_settings

PRESETS = {
    "paper": "the protocol of the paper, from scratch",
    "finetune": "fine-tune a pretrained backbone",
    "quick": "a first classifier, in minutes on a CPU",
    "best": "the best classifier, at the highest cost",
}


@dataclass(frozen=True)
class Choice:
    """The settings of a preset, and one line that says what was chosen and why."""

    settings: Mapping[str, Any]
    line: str


def preset_file(name: str) -> Path:
    """The TOML file of a preset; a name that ends in .toml is that of the file itself."""
    if name.endswith(".toml"):
        return Path(name)
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS, otherwise="A file of your own ends in .toml")
    return _file(name)


def demo() -> dict[str, Any]:
    """The settings of ``cclnet train`` without arguments."""
    return read_settings(_file("demo"))


def choose_preset(name: str, given: Mapping[str, Any]) -> Choice:
    """The preset of a run with the settings ``given``, which override it.

    Without a name it is ``finetune`` if pretrained weights are available, else ``paper``. A backbone that starts from
    pretrained weights gets the input size these were made for, and a file of weights named after a timm model its
    backbone, unless they are given.
    """
    make_settings({"short_side": 65536}, given)  # wrong names and values are reported before timm is imported
    settings = read_settings(preset_file(name or "finetune"))
    if name.endswith(".toml"):
        make_settings(settings)  # a wrong name or value is reported as that of the file
        if not settings.get("pretrained") and not given.get("weights"):
            return Choice(settings, f"preset {name}.")
    if name == "paper" or (given.get("pretrained") is False and not given.get("weights")):
        settings = settings if name else read_settings(_file("paper"))
        return Choice(settings, f"preset {name or 'paper'}: train from scratch.")
    settings, where, missing = _pretrained(settings, given)
    if missing:
        return _from_scratch(name, missing)
    return Choice(settings, f"preset {name or 'finetune'}: fine-tune {settings['backbone']}, weights {where}.")


def probe_settings(given: Mapping[str, Any]) -> Choice:
    """The settings of ``cclnet probe``, which ``given`` overrides."""
    make_settings({"short_side": 65536}, given)
    settings, where, missing = _pretrained(read_settings(_file("probe")), given)
    if missing:
        raise InputError(f"a probe needs pretrained weights, but {missing}. Give --weights FILE.")
    return Choice(settings, f"probe of {settings['backbone']}, weights {where}.")


def _pretrained(settings: dict[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], str, str]:
    """The settings with the backbone, its weights and the input size they were made for; where the weights come from,
    and why they are not available: one of the two texts is empty."""
    backbone = str(given.get("backbone", settings["backbone"]))
    if weights := given.get("weights"):
        backbone = str(given.get("backbone", "")) or _model_named_like(weights) or backbone
        settings |= {"backbone": backbone, "pretrained": False}
        where, missing = f"from {Path(weights).name}", ""
    else:
        settings |= {"backbone": backbone}
        where, missing = find_weights(backbone)
        if missing:
            missing = f"the pretrained weights of {backbone} are not available: {missing}"
    crop = given.get("augment", {}).get("crop")
    if crop is not None or "crop" not in settings.get("augment", {}):
        settings = merge_layers(settings, input_settings(backbone, crop))
    return settings, where, missing


def _from_scratch(name: str, reason: str) -> Choice:
    """What is done instead of fine-tuning."""
    if name in ("finetune", "best") or name.endswith(".toml"):
        raise InputError(
            f"preset {name} needs pretrained weights, but {reason}. Give --weights FILE, or train from scratch with "
            "--preset paper."
        )
    settings = read_settings(_file(name or "paper"))
    if name == "quick":
        settings = merge_layers(settings, read_settings(_file("quick_from_scratch")))
    return Choice(
        settings, f"preset {name or 'paper'}: train from scratch, because {reason}. To fine-tune, give --weights FILE."
    )


def _file(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.preset.toml")


def _model_named_like(weights: str) -> str:
    """The timm model a file of weights is named after; empty if there is none."""
    import timm

    stem = Path(weights).stem
    return stem if timm.is_model(stem) else ""
