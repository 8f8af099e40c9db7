"""model.json: what someone needs to use a model. It may come from anywhere, so nothing in it is taken on trust.

It names no files: those of a model lie beside it under names that are known here, so no path in it can lead away.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cclnet.errors import InputError

MAX_BYTES = 64 * 2**20  # of model.json: a hundred thousand class names and a curve take a few
MAX_CLASSES = 100_000
MAX_SIDE = 8192  # pixels; a batch of such crops alone is past any network here


@dataclass(frozen=True)
class Description:
    """The checked content of model.json.

    Attributes:
        backbone: name of the timm model.
        classes: names of the K classes.
        multilabel: whether an image may carry several labels.
        short_side, crop: images are resized to this short side, then the centre [height, width] is cut out.
        mean, std: of the channels, in 0..1.
        temperature: by which logits are divided; None where none was fitted.
        info: model.json as it stands.
        target: the soft labels that are taken out of the probabilities, [K][K]; None where they are left as they are.
    """

    backbone: str
    classes: tuple[str, ...]
    multilabel: bool
    short_side: int
    crop: tuple[int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    temperature: float | None
    info: dict[str, Any]
    target: tuple[tuple[float, ...], ...] | None = None

    def baked_in(self) -> dict[str, Any]:
        """What is part of an exported program, so that changing it in model.json alone would deceive."""
        return {
            "classes": list(self.classes),
            "multilabel": self.multilabel,
            "crop": list(self.crop),
            "mean": list(self.mean),
            "std": list(self.std),
            "temperature": self.temperature,
            "target": None if self.target is None else [list(row) for row in self.target],
        }


def read_description(path: Path) -> Description:
    """Read and check a model.json; everything wrong with it is named in one error. The temperature is that of the
    calibration.json beside it, if there is one (a run that was evaluated), else its own."""
    if not path.is_file():
        raise InputError(f"there is no {path.name} in {path.parent}: it says how images are prepared for the model.")
    info = _read_object(path)
    calibration = path.with_name("calibration.json")
    if calibration.is_file():
        fitted = _read_object(calibration).get("temperature")
        if not isinstance(fitted, dict) or "value" not in fitted:
            raise InputError(f"{calibration}: expected a temperature with a value. Run cclnet evaluate again.")
        info["temperature"] = fitted["value"]
    wrong = [
        f"{name} must be {words}, got {_shown(info[name]) if name in info else 'nothing'}"
        for name, (words, right) in _FIELDS.items()
        if not right(info.get(name))
    ]
    if not wrong and info.get("target") is not None and not _labels(info["target"], info):
        wrong = ["target must be null, or for each class shares of all classes that sum to one (of one label an image)"]
    if not wrong and max(info["crop"]) > info["short_side"]:
        wrong = [f"crop {info['crop']} does not fit into images with a short side of {info['short_side']}"]
    if wrong:
        raise InputError(f"{path} is refused:" + "".join(f"\n  - {fault}" for fault in wrong))
    return Description(
        backbone=info["backbone"],
        classes=tuple(info["classes"]),
        multilabel=info["multilabel"],
        short_side=info["short_side"],
        crop=(info["crop"][0], info["crop"][1]),
        mean=tuple(map(float, info["mean"])),  # type: ignore[arg-type]  # three, as checked
        std=tuple(map(float, info["std"])),  # type: ignore[arg-type]
        temperature=None if info.get("temperature") is None else float(info["temperature"]),
        info=info,
        target=None if info.get("target") is None else tuple(tuple(map(float, row)) for row in info["target"]),
    )


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object of format 1, of limited size."""
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"{path} has {path.stat().st_size:,} bytes; a model is described in less than {MAX_BYTES:,}.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected an object, got {type(content).__name__}.")
    if content.get("format") != 1:
        raise InputError(f"{path} has format {content.get('format')!r}; this version of cclnet reads format 1.")
    return content


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _side(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SIDE


def _names(value: object) -> bool:
    return (
        isinstance(value, list)
        and 2 <= len(value) <= MAX_CLASSES
        and all(isinstance(name, str) and 0 < len(name) <= 1000 for name in value)
        and len(set(value)) == len(value)
    )


def _channels(value: object, least: float) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(_number(v) and least <= v <= 1000 for v in value)


def _labels(value: object, info: dict[str, Any]) -> bool:
    size = len(info["classes"])

    def distribution(row: object) -> bool:
        shares = isinstance(row, list) and len(row) == size and all(_number(v) and 0 <= v <= 1 for v in row)
        return shares and abs(math.fsum(row) - 1) < 1e-4  # type: ignore[arg-type]

    return not info["multilabel"] and isinstance(value, list) and len(value) == size and all(map(distribution, value))


_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "backbone": ("the name of a timm model", lambda v: isinstance(v, str) and 0 < len(v) <= 200),
    "classes": (f"2 to {MAX_CLASSES:,} different names", _names),
    "multilabel": ("true or false", lambda v: isinstance(v, bool)),
    "short_side": (f"whole pixels, 1 to {MAX_SIDE}", _side),
    "crop": (
        f"[height, width], each 1 to {MAX_SIDE}",
        lambda v: isinstance(v, list) and len(v) == 2 and all(map(_side, v)),
    ),
    "mean": ("three finite numbers", lambda v: _channels(v, -1000)),
    "std": ("three numbers above zero", lambda v: _channels(v, 1e-6)),
    "temperature": ("null, or between .001 and 1,000", lambda v: v is None or (_number(v) and 1e-3 <= v <= 1e3)),
}


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:60] + "…"
