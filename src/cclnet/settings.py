"""Settings of a run: frozen dataclasses, read from TOML, overridden by name, written back whole."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cclnet.errors import InputError, unknown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

S = TypeVar("S")


WAYS = ("auto", "given", "group", "class")


@dataclass(frozen=True)
class SplitSettings:
    """How a table is divided into train, calibration, val and test.

    Attributes:
        by: "group": no group on two sides, classes kept in ratio as near as groups allow; "class": images one by
            one, classes kept in ratio; "given": the parts that came with the data. "auto": given where the data
            has parts, else by group where groups are known, else by class. With "group" or "class" a test part
            that came with the data stays as it is, and the rest is drawn anew.
        val, test, calibration: shares of the images that are divided. The calibration part is taken out of what
            would be the training part, so val and test are the same with and without it.
        folds: cross-validation: fold number ``fold`` of so many is val, and ``val`` is not used.
        seed: the same seed gives the same split, whatever the order of the rows.
        file: a split.csv that was written before; everything else is then ignored but ``allow_leaks``.
        allow_leaks: accept given parts, or a file, with a group on two sides.
    """

    by: str = "auto"
    val: float = 0.2
    test: float = 0.0
    calibration: float = 0.0
    folds: int | None = None
    fold: int = 0
    seed: int = 0
    file: str = ""
    allow_leaks: bool = False

    def __post_init__(self) -> None:
        if self.by not in WAYS:
            raise unknown("way to split", self.by, WAYS)
        shares = {"val": self.val, "test": self.test, "calibration": self.calibration}
        for name, share in shares.items():
            if not 0 <= share < 1:
                raise InputError(f"split: {name} is a share of the images, at least 0 and below 1; got {share}.")
        if self.folds is not None and (self.folds < 2 or not 0 <= self.fold < self.folds):
            raise InputError(
                f"split: folds must be at least 2 and fold from 0 to folds - 1; "
                f"got folds={self.folds}, fold={self.fold}."
            )
        val = self.val if self.folds is None else 1 / self.folds * (1 - self.test)
        if val + self.test + self.calibration >= 1 - 1e-9:
            raise InputError(
                f"split: val ({val:g}), test ({self.test:g}) and calibration ({self.calibration:g}) leave nothing "
                "to train on: their sum must stay below 1."
            )


@dataclass(frozen=True)
class AugmentSettings:
    """What training images go through. The defaults are the paper's recipe (which gives no strengths).

    Colour jitter goes brightness, contrast, saturation, hue, always in this order, where torchvision shuffles
    it: the first three commute but for clamping, so only the place of a slight turn of hue would differ, and
    one order is one compiled kernel instead of 24.

    Attributes:
        crop: side of the square that the network sees.
        horizontal_flip, vertical_flip: probability of a flip.
        brightness, contrast, saturation: strength s; the factor is uniform in [max(0, 1 − s), 1 + s].
        hue: strength; the turn is uniform in [−hue, hue] of the circle, at most 0.5.
        resized_crop: smallest and largest share of the image's area to cut out and resize to the crop, or
            None for a plain crop.
        resized_ratio: narrowest and widest such box, width over height.
        rotation: the angle is uniform in [−rotation, rotation] degrees; 0 for none.
        mixup, cutmix: α of Beta(α, α) for mixing an image with the one before it in the batch; 0 for none.
            With both, every image gets one of the two.
    """

    crop: int = 224
    horizontal_flip: float = 0.5
    vertical_flip: float = 0.5
    brightness: float = 0.1
    contrast: float = 0.1
    saturation: float = 0.1
    hue: float = 0.02
    resized_crop: tuple[float, float] | None = None
    resized_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    rotation: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        for name in ("resized_crop", "resized_ratio"):  # a TOML file gives lists
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(given))
        if wrong := self._wrong():
            raise InputError("augmentation: " + "; ".join(wrong) + ".")

    def _wrong(self) -> list[str]:
        wrong = []
        if self.crop < 1:
            wrong.append(f"crop must be at least 1 pixel, got {self.crop}")
        limits = {"horizontal_flip": 1.0, "vertical_flip": 1.0, "hue": 0.5, "rotation": 180.0}
        for name in ("horizontal_flip", "vertical_flip", "brightness", "contrast", "saturation", "hue", "rotation",
                     "mixup", "cutmix"):  # fmt: skip
            value, limit = getattr(self, name), limits.get(name, math.inf)
            if not 0.0 <= value <= limit or value == math.inf:
                between = f"from 0 to {limit:g}" if limit < math.inf else "0 or more"
                wrong.append(f"{name} must be {between}, got {value}")
        for name, limit in (("resized_crop", 1.0), ("resized_ratio", math.inf)):
            pair = getattr(self, name)
            if pair is not None and not (len(pair) == 2 and 0.0 < pair[0] <= pair[1] <= limit):
                most = " at most 1," if limit == 1.0 else ""
                wrong.append(f"{name} must be two numbers above 0,{most} the smaller first, got {list(pair)}")
        return wrong

    @property
    def warps(self) -> bool:
        """Whether pixels are resampled, so that the whole image is needed and not only a window of it."""
        return self.resized_crop is not None or self.rotation > 0

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with each other, and labels with them."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run. The defaults are the paper's values where it gives them."""

    # data
    data: str = "synthetic"  # a path, or synthetic[:settings]
    short_side: int = 256  # images are decoded once to this short side
    mean: tuple[float, ...] = ()  # of the channels; empty: those the pretrained weights were made with, or ImageNet's
    std: tuple[float, ...] = ()
    split: SplitSettings = field(default_factory=SplitSettings)
    augment: AugmentSettings = field(default_factory=AugmentSettings)
    source: str = ""  # the layout of the data, where two fit
    image_column: str = ""  # columns of a manifest; empty: found by their usual names
    label_column: str = ""
    group_column: str = ""
    split_column: str = ""
    label_separator: str = ""  # between several labels of one image
    image_folder: str = ""  # what the names in a manifest start from; empty: the folder of the manifest
    strict: bool = False  # refuse a set with an image without label or a label without image
    follow_links: bool = False  # allow links that lead out of the data folder
    # network and method
    backbone: str = "resnet18"
    pretrained: bool = False  # timm's pretrained weights
    weights: str = ""  # a .safetensors file, or a state dict without pickled code
    drop_rate: float = 0.0  # dropout before the classifier
    drop_path_rate: float = 0.0  # stochastic depth: the share of images that skip the last block, rising from 0
    method: str = "ccl"
    method_settings: dict[str, Any] = field(default_factory=dict)
    unsoften: bool = False  # take the soft labels out of the probabilities of the finished model again
    # optimisation
    epochs: int = 160
    batch_size: int = 128  # over all devices together
    accumulate: int = 1  # parts that a batch is taken in, one after the other, where memory is short
    optimizer: str = "sgd"  # sgd | adamw
    lr: float = 0.1
    lr_ccl: float = 0.0005  # of the method's own parameters
    momentum: float = 0.9
    weight_decay: float = 1e-4
    clip: float = 1.0  # largest gradient norm of each parameter group; 0 for none
    schedule: str = "step"  # step | cosine | constant
    drops: tuple[float, ...] = (0.5, 0.75)  # where the rate is multiplied by drop_factor, as shares of the epochs
    drop_factor: float = 0.1
    warmup_epochs: float = 0.0
    ema: float = 0.0  # decay of an exponential average of the weights, which is then what is tested; 0 for none
    class_weights: bool = False  # weigh samples by 1 / class frequency
    balanced_sampling: bool = False  # draw classes equally often
    batch_norm: str = "batch"  # batch | sync (over devices) | frozen
    # running
    seed: int = 0
    precision: str = "auto"  # auto | 32 | bf16 | 64
    compile: bool | None = None  # none: on for a GPU, off for a CPU
    resident: bool | None = None  # images kept on the device; none: when they fit
    deterministic: bool = False
    validate_every: int = 1  # epochs
    max_minutes: float = 0.0  # stop after so long; 0 for never

    def __post_init__(self) -> None:
        for name, value in _normalisation(self.backbone if self.pretrained else "").items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        for name, least in (("mean", -_BIG), ("std", 1e-6)):
            value = getattr(self, name)
            if len(value) != 3 or not all(least <= number <= _BIG for number in value):
                raise InputError(f"setting {name} must be three numbers, one a channel (std above 0), got {value}.")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                raise InputError(f"setting {name} must lie in {low} … {high}, got {value}.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise unknown(f"value of setting {name}", getattr(self, name), choices)
        if any(not 0.0 < drop < 1.0 for drop in self.drops) or list(self.drops) != sorted(self.drops):
            raise InputError(f"drops must be rising shares of the epochs between 0 and 1, got {self.drops}.")
        if self.optimizer == "adamw" and self.lr > 0.03:
            raise InputError(f"lr {self.lr} is a rate for sgd; with adamw set one that it can use, such as lr=.001.")
        if self.class_weights and self.balanced_sampling:
            raise InputError("class_weights and balanced_sampling both balance the classes: choose one.")
        if self.augment.crop > self.short_side:
            raise InputError(
                f"augment.crop is {self.augment.crop} but images have a short side of {self.short_side}: "
                "make the crop smaller or short_side larger."
            )


def _normalisation(pretrained: str) -> dict[str, tuple[float, ...]]:
    """Mean and standard deviation of the channels that the weights of a timm model were trained with."""
    usual: dict[str, tuple[float, ...]] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    if not pretrained:
        return usual
    import timm

    config = timm.get_pretrained_cfg(pretrained) if timm.is_model(pretrained) else None
    return usual if config is None else {"mean": tuple(config.mean), "std": tuple(config.std)}


_BIG = 10**9
_RANGES: list[tuple[str, float, float]] = [
    ("epochs", 1, _BIG), ("batch_size", 2, _BIG), ("lr", 0, _BIG), ("lr_ccl", 0, _BIG), ("momentum", 0, 1),
    ("weight_decay", 0, _BIG), ("clip", 0, _BIG), ("drop_factor", 0, 1), ("warmup_epochs", 0, _BIG),
    ("ema", 0, 0.999999), ("validate_every", 1, _BIG), ("max_minutes", 0, _BIG), ("short_side", 8, 65536),
    ("accumulate", 1, 4096), ("drop_rate", 0, 0.99), ("drop_path_rate", 0, 0.99),
]  # fmt: skip
_CHOICES = {
    "optimizer": ("sgd", "adamw"),
    "schedule": ("step", "cosine", "constant"),
    "precision": ("auto", "32", "bf16", "64"),
    "batch_norm": ("batch", "sync", "frozen"),
}


def read_settings(path: str | Path) -> dict[str, Any]:
    """The content of a TOML file, with ``augment`` and the like as tables."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"there is no settings file {path}.") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML: {error}.") from error


def make_settings(*layers: Mapping[str, Any]) -> Settings:
    """Settings from layers of nested values, the later over the earlier. An unknown name is an error.

    >>> make_settings({"lr": 0.1, "augment": {"hue": 0.1}}, {"lr": 1, "augment": {"crop": 64}}).lr
    1.0
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        _merge(merged, layer)
    _point_to_the_method(merged)
    return _build(Settings, merged, "")


def _point_to_the_method(values: Mapping[str, Any]) -> None:
    """Settings of the method stand in a table of their own: one that does not is told where."""
    strange = [key for key in values if key not in typing.get_type_hints(Settings)]
    if not strange:
        return
    from cclnet.methods import METHODS, method_settings

    method = values.get("method", Settings.method)
    if method in METHODS and strange[0] in method_settings(method):
        raise InputError(f"{strange[0]} is a setting of method '{method}': give it as method_settings.{strange[0]}.")


def parse_overrides(assignments: Sequence[str]) -> dict[str, Any]:
    """``name=value`` assignments as nested values; dots go into tables, values are TOML or plain words.

    >>> parse_overrides(["lr=.05", "augment.crop=64", "method=hard"])
    {'lr': 0.05, 'augment': {'crop': 64}, 'method': 'hard'}
    """
    nested: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise InputError(f"a setting is given as name=value, got '{assignment}'.")
        *tables, last = name.strip().split(".")
        place = nested
        for table in tables:
            place = place.setdefault(table, {})
            if not isinstance(place, dict):
                raise InputError(f"setting {table} is given a value and a table ({assignment}).")
        place[last] = _value(text.strip())
    return nested


def to_toml(settings: Settings) -> str:
    """The settings as TOML, the way ``read_settings`` takes them back. What is None is left out, but for settings of
    the method, whose defaults are not known here: of these it is "none"."""
    values = dataclasses.asdict(settings)
    own = values["method_settings"]
    values["method_settings"] = {key: "none" if value is None else value for key, value in own.items()}
    return "\n".join(_toml_lines(values, "")) + "\n"


def in_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a method for JSON, which has no word for what is infinite.

    >>> in_json({"margin": float("inf"), "alpha": 0.1})
    {'margin': 'inf', 'alpha': 0.1}
    """
    return {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


def _toml_lines(values: Mapping[str, Any], table: str) -> list[str]:
    plain = {key: value for key, value in values.items() if not isinstance(value, dict) and value is not None}
    lines = [f"{key} = {_toml_value(value)}" for key, value in plain.items()]
    for key, value in values.items():
        if isinstance(value, dict) and value:
            name = f"{table}{key}"
            lines += ["", f"[{name}]", *_toml_lines(value, f"{name}.")]
    return lines


def _toml_value(value: Any) -> str:
    """As JSON writes it, but for what is infinite.

    >>> _toml_value([1, 2.5]), _toml_value(float("-inf"))
    ('[1, 2.5]', '-inf')
    """
    endless = isinstance(value, float) and not math.isfinite(value)
    return str(value) if endless else json.dumps(value, ensure_ascii=False)


def _value(text: str) -> Any:
    number = f"0{text}" if text.startswith(".") else text  # people write .05, TOML does not
    try:
        return tomllib.loads(f"v = {number}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _merge(into: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, Mapping):
            inner = into.setdefault(key, {})
            if not isinstance(inner, dict):
                raise InputError(f"setting {key} is a plain value, got a table.")
            _merge(inner, value)
        else:
            into[key] = value


def _build(kind: type[S], values: Mapping[str, Any], path: str) -> S:
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise unknown("setting", f"{path}{key}", [f"{path}{name}" for name in hints])
    return kind(**{key: _fit(hints[key], value, f"{path}{key}") for key, value in values.items()})


def _fit(hint: Any, value: Any, name: str) -> Any:
    """``value`` as the type of its field: tables into dataclasses, lists into tuples, whole numbers into
    floats; anything else that does not fit is refused by name."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise InputError(f"setting {name} is a table, got {value!r}.")
        return _build(hint, value, f"{name}.")
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _fit_any(typing.get_args(hint), value, name)
    if origin is tuple and isinstance(value, (list, tuple)):
        inner = typing.get_args(hint)[0]
        return tuple(_fit(inner, item, name) for item in value)
    if origin is dict and isinstance(value, Mapping):
        return {key: _of_method(item) for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)  # precision=32 on the command line
    if isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    wanted = getattr(hint, "__name__", str(hint))
    raise InputError(f"setting {name} must be {wanted}, got {value!r}.")


def _of_method(value: Any) -> Any:
    """A setting of a method, whose type only the method knows."""
    if isinstance(value, list):
        return tuple(value)
    return None if value == "none" else value


def _fit_any(choices: tuple[Any, ...], value: Any, name: str) -> Any:
    if value is None or value == "none":
        if type(None) in choices:
            return None
        raise InputError(f"setting {name} cannot be left empty.")
    errors: list[InputError] = []
    for choice in choices:
        if choice is not type(None):
            try:
                return _fit(choice, value, name)
            except InputError as error:
                errors.append(error)
    raise errors[-1]
