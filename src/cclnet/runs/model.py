"""What describes a trained model beside its weights: model.json, calibration.json and soft_labels.csv.

The files may come from anywhere, so the readers check every value and report all faults in one error. model.json names
no files: those of a model lie beside it under fixed names, so no path in it can lead elsewhere.

Old files are read too: format 1 of model.json holds the temperature and the abstention curve ("thresholds"), which are
in calibration.json since format 2.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cclnet.errors import InputError
from cclnet.files import write_whole
from cclnet.runs.provenance import Commit

Floats = npt.NDArray[np.float64]
Check = tuple[str, Callable[[Any], bool]]  # what a value must be, in words and as a function

MAX_BYTES = 64 * 2**20  # of a JSON file: 100,000 class names and an abstention curve take a few MiB
MAX_CLASSES = 100_000
MAX_SIDE = 8192  # pixels


@dataclass(frozen=True)
class TrainedInfo:
    """How and on what a model was trained; None where the file does not say.

    Attributes:
        epochs: epochs trained; ``of_epochs`` is the number asked for.
        best: the best validation accuracy with its epoch.
        seconds: duration of training over all resumes.
        devices: number of processes.
        images: number of training images.
        data: the setting ``data``.
        fingerprint: hash of names, labels, classes and groups of the data.
    """

    epochs: int | None = None
    of_epochs: int | None = None
    best: Mapping[str, float] | None = None
    seconds: float | None = None
    seed: int | None = None
    device: str | None = None
    devices: int | None = None
    precision: str | None = None
    versions: Mapping[str, str] | None = None
    commit: Commit | None = None
    images: int | None = None
    data: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class ExportInfo:
    """What ``cclnet export`` adds to model.json.

    Attributes:
        format, file: "onnx", "torch" or "safetensors", and the name of the file.
        preprocessing: how an image is prepared, step by step.
        done_by_the_file: the steps that are part of the exported program.
        output: the formula from logits to probabilities.
        label_threshold: probability from which a label is given, where an image may carry several; else None.
        maps: whether class activation maps are an output.
        checked: the largest differences from PyTorch.
    """

    format: str = ""
    file: str = ""
    preprocessing: tuple[str, ...] = ()
    done_by_the_file: tuple[str, ...] = ()
    output: str = ""
    label_threshold: float | None = None
    maps: bool = False
    checked: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelDescription:
    """The checked content of model.json.

    Attributes:
        backbone: name of the timm model.
        classes: names of the K classes.
        multilabel: whether an image may carry several labels.
        short_side, crop: images are resized to this short side, then the centre [height, width] is cut out.
        mean, std: of the channels, in 0..1.
        method, method_settings: how it was trained; empty where unknown.
        class_counts: training images of each class, [K].
        collapse_softness: the softness of collapsed class features; None for methods without one.
        target: the soft labels that are removed from the probabilities, [K][K]; None where they are left as they are.
        trained: where the weights come from.
        export: what was exported and how to use it; None for a run.
        extra: keys of the file that this version does not know.
    """

    backbone: str
    classes: tuple[str, ...]
    multilabel: bool
    short_side: int
    crop: tuple[int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    method: str = ""
    method_settings: Mapping[str, Any] = field(default_factory=dict)
    class_counts: tuple[int, ...] | None = None
    collapse_softness: float | None = None
    target: tuple[tuple[float, ...], ...] | None = None
    trained: TrainedInfo = TrainedInfo()
    export: ExportInfo | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The content of model.json (format 2)."""
        content: dict[str, Any] = {"format": 2} | {name: _plain(getattr(self, name)) for name in _KEYS}
        content["method"] = self.method or None
        trained = {f.name: _plain(getattr(self.trained, f.name)) for f in fields(TrainedInfo)}
        content["trained"] = {name: value for name, value in trained.items() if value is not None}
        if self.export is not None:
            content |= {name: _plain(getattr(self.export, name)) for name in _BESIDE_EXPORTED}
            content["exported"] = {name: _plain(getattr(self.export, name)) for name in _EXPORTED}
        return content | dict(self.extra)

    def baked_in(self, temperature: float | None) -> dict[str, Any]:
        """What is part of an exported program, so that it must not be changed in the files beside it alone."""
        names = ("classes", "multilabel", "crop", "mean", "std", "target")
        return {name: _plain(getattr(self, name)) for name in names} | {"temperature": temperature}


_KEYS = tuple(f.name for f in fields(ModelDescription) if f.name not in ("trained", "export", "extra"))
_EXPORTED = ("format", "file", "checked", "versions")  # nested in "exported"
_BESIDE_EXPORTED = tuple(f.name for f in fields(ExportInfo) if f.name not in _EXPORTED)
_FORMAT_1 = ("temperature", "thresholds")


def _plain(value: Any) -> Any:
    """A value as JSON has it: lists for tuples, objects for dataclasses."""
    if isinstance(value, Commit):
        return asdict(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def write_model_file(path: str | Path, description: ModelDescription) -> None:
    """Write model.json whole."""
    write_json(path, description.to_json())


def read_model_file(path: str | Path) -> ModelDescription:
    """Read and check a model.json (format 1 or 2); all faults are reported in one error."""
    return model_from_json(read_json(Path(path), "it says how images are prepared for the model"), path)


def model_from_json(content: Mapping[str, Any], path: str | Path) -> ModelDescription:
    """The description in the content of a model.json, checked; ``path`` is named in errors."""
    _check_format(content, path, (1, 2))
    wrong = _faults(content, _REQUIRED) + _faults(content, _OPTIONAL, optional=True)
    trained, exported = content.get("trained") or {}, content.get("exported") or {}
    if not wrong:
        wrong = _faults(trained, _TRAINED, "trained.", optional=True) + _faults(
            exported, _EXPORT, "exported.", optional=True
        )
    if not wrong:
        wrong = _contradictions(content)
    if wrong:
        raise InputError(f"{path} is refused:" + "".join(f"\n  - {fault}" for fault in wrong))
    known = {"format", "trained", "exported", *_KEYS, *_BESIDE_EXPORTED, *_FORMAT_1}
    given = {f.name: trained[f.name] for f in fields(TrainedInfo) if trained.get(f.name) is not None}
    if "commit" in given:
        given["commit"] = Commit(given["commit"]["sha"], given["commit"]["clean"])
    counts, target = content.get("class_counts"), content.get("target")
    return ModelDescription(
        backbone=content["backbone"],
        classes=tuple(content["classes"]),
        multilabel=content["multilabel"],
        short_side=content["short_side"],
        crop=(content["crop"][0], content["crop"][1]),
        mean=tuple(map(float, content["mean"])),  # type: ignore[arg-type]  # three, as checked
        std=tuple(map(float, content["std"])),  # type: ignore[arg-type]
        method=content.get("method") or "",
        method_settings=content.get("method_settings") or {},
        class_counts=None if counts is None else tuple(counts),
        collapse_softness=content.get("collapse_softness"),
        target=None if target is None else tuple(tuple(map(float, row)) for row in target),
        trained=TrainedInfo(**given),
        export=_export_from_json(content, exported) if "exported" in content else None,
        extra={key: value for key, value in content.items() if key not in known},
    )


def _export_from_json(content: Mapping[str, Any], exported: Mapping[str, Any]) -> ExportInfo:
    values = {name: exported[name] for name in _EXPORTED if exported.get(name) is not None}
    values |= {name: content[name] for name in _BESIDE_EXPORTED if content.get(name) is not None}
    for name in ("preprocessing", "done_by_the_file"):
        values[name] = tuple(values.get(name, ()))
    return ExportInfo(**values)


def _contradictions(content: Mapping[str, Any]) -> list[str]:
    """What is wrong with values that are right each by itself."""
    wrong, size = [], len(content["classes"])
    if content.get("target") is not None and not _is_target(content["target"], size, content["multilabel"]):
        wrong.append("target must be null, or for each class shares of all classes that sum to one (single-label only)")
    if content.get("class_counts") is not None and len(content["class_counts"]) != size:
        wrong.append(f"class_counts must be {size} counts, one per class, got {len(content['class_counts'])}")
    if max(content["crop"]) > content["short_side"]:
        wrong.append(f"crop {content['crop']} does not fit into images with a short side of {content['short_side']}")
    return wrong


@dataclass(frozen=True)
class AbstentionCurve:
    """Coverage and risk of keeping the images that are at least as confident as a threshold, [B] each.

    The points are sorted from the most confident images to all images: coverage rises, the last one is 1 and its
    threshold 0.

    Attributes:
        split, images: what it was measured on.
        independent: how many independent images the kept ones are worth, where groups (patients, lesions) are known.
    """

    split: str
    images: int
    threshold: Floats
    coverage: Floats
    risk: Floats
    independent: Floats | None = None

    def at(self, coverage: float | None = None, risk: float | None = None) -> int:
        """The index of the point that keeps at least ``coverage`` of the images, or the most with at most ``risk``."""
        if (coverage is None) == (risk is None):
            raise InputError("give either a coverage or a risk to abstain by, and not both.")
        if coverage is not None:
            if not 0 < coverage <= 1:
                raise InputError(f"coverage is the share of images to keep, above 0 and at most 1; got {coverage:g}.")
            return int(np.searchsorted(self.coverage, coverage - 1e-9))
        assert risk is not None
        if not 0 <= risk < 1:
            raise InputError(f"risk is the share of errors to allow, from 0 to less than 1; got {risk:g}.")
        allowed = np.flatnonzero(self.risk <= risk)
        if len(allowed) == 0:
            least = int(self.risk.argmin())
            raise InputError(
                f"no threshold keeps the risk at {risk:.3g} on the {self.images:,} images of split '{self.split}': the "
                f"least is {self.risk[least]:.3g}, for {self.coverage[least]:.1%} of them. Allow that much, or choose "
                "a coverage."
            )
        return int(allowed[-1])

    def in_words(self, point: int) -> str:
        """What to expect at a point, with a 95% interval of its risk (Wilson): over groups where they are known."""
        kept, over = float(round(float(self.coverage[point]) * self.images)), ""
        if self.independent is not None:
            kept, over = float(self.independent[point]), " over patients or lesions"
        low, high = _wilson(float(self.risk[point]), kept)
        return (
            f"abstains below a confidence of {self.threshold[point]:.7g}: of {self.images:,} images of split "
            f"'{self.split}' that keeps {self.coverage[point]:.1%}, of which {self.risk[point]:.1%} are wrong (95% "
            f"interval {low:.1%} to {high:.1%}{over})"
        )

    def to_json(self) -> dict[str, Any]:
        rows = np.column_stack([self.threshold, self.coverage, self.risk])
        curve = {"split": self.split, "images": self.images, "columns": ["threshold", "coverage", "risk"],
                 "rows": [[float(f"{v:.12g}") for v in row] for row in rows]}  # fmt: skip
        if self.independent is not None:
            curve["independent"] = [float(f"{v:.6g}") for v in self.independent]
        return curve


def _wilson(share: float, count: float) -> tuple[float, float]:
    z = 1.959964
    centre, spread = share + z * z / (2 * count), z * np.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return tuple(float(np.clip((centre + s) / (1 + z * z / count), 0, 1)) for s in (-spread, spread))  # type: ignore[return-value]


def curve_from_json(content: Any, path: str | Path) -> AbstentionCurve:
    """The abstention curve in the content of a file, checked; ``path`` is named in errors.

    ``split`` was called ``part`` before version 0.2, and early curves have no ``independent``.
    """
    try:
        rows = np.asarray(content["rows"], dtype=np.float64).reshape(-1, 3)
        worth = np.asarray(content["independent"], dtype=np.float64) if "independent" in content else None
        threshold, coverage, risk = np.ascontiguousarray(rows.T)
        split = content["split"] if "split" in content else content["part"]
        curve = AbstentionCurve(str(split), int(content["images"]), threshold, coverage, risk, worth)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"{path}: the abstention curve must be rows of threshold, coverage and risk ({error}). Export again."
        ) from error
    sound = len(rows) and ((rows >= 0) & (rows <= 1)).all() and (np.diff(curve.coverage) > 0).all()
    if not sound or curve.images < 1:
        raise InputError(f"{path}: the abstention curve must be shares in 0..1 with rising coverage. Export again.")
    if abs(coverage[-1] - 1) > 1e-9 or threshold[-1] != 0:
        raise InputError(
            f"{path}: the last point of the abstention curve must keep all images, coverage 1 at threshold 0; got "
            f"coverage {coverage[-1]:g} at threshold {threshold[-1]:g}. Export again."
        )
    if worth is not None and not (worth.shape == threshold.shape and ((worth > 0) & (worth <= curve.images)).all()):
        raise InputError(
            f"{path}: the abstention curve must have one number of independent images per row, above 0 and at most "
            f"{curve.images:,}. Export again."
        )
    return curve


@dataclass(frozen=True)
class FittedTemperature:
    """The temperature by which logits are divided.

    Attributes:
        value: None where it could not be fitted.
        fitted_on: the split, or "cross-fitted halves"; None where unknown.
        images: number of images it was fitted on.
        halves: the temperature of each half, where cross-fitted.
    """

    value: float | None = None
    fitted_on: str | None = None
    images: int | None = None
    halves: tuple[float, float] | None = None


@dataclass(frozen=True)
class Calibration:
    """What was fitted after training (calibration.json): the temperature and, of an exported model, the abstention
    curve."""

    temperature: FittedTemperature = FittedTemperature()
    abstention: AbstentionCurve | None = None

    def to_json(self) -> dict[str, Any]:
        """The content of calibration.json."""
        temperature = {name: _plain(value) for name, value in asdict(self.temperature).items()}
        content: dict[str, Any] = {"format": 1, "temperature": temperature}
        if self.abstention is not None:
            content["abstention"] = self.abstention.to_json()
        return content


def write_calibration_file(path: str | Path, calibration: Calibration) -> None:
    """Write calibration.json whole."""
    write_json(path, calibration.to_json())


def read_calibration_file(path: str | Path) -> Calibration:
    """Read and check a calibration.json. Without one, the values are taken from a model.json of format 1 beside it;
    without those, nothing was fitted."""
    path = Path(path)
    if path.is_file():
        content = read_json(path, "it has what was fitted after training")
        _check_format(content, path, (1,))
        fitted, curve = content.get("temperature") or {}, content.get("abstention")
    else:
        path = path.with_name("model.json")
        content = read_json(path, "it says how images are prepared for the model") if path.is_file() else {}
        if content.get("format") != 1:
            return Calibration()
        fitted, curve = {"value": content.get("temperature")}, content.get("thresholds")
    if not isinstance(fitted, Mapping):
        raise InputError(f"{path} is refused: temperature must be an object, got {_shown(fitted)}.")
    if wrong := _faults(fitted, _TEMPERATURE, "temperature.", optional=True):
        raise InputError(f"{path} is refused:" + "".join(f"\n  - {fault}" for fault in wrong))
    value, halves = fitted.get("value"), fitted.get("halves")
    temperature = FittedTemperature(
        None if value is None else float(value),
        fitted.get("fitted_on"),
        fitted.get("images"),
        None if halves is None else (float(halves[0]), float(halves[1])),
    )
    return Calibration(temperature, None if curve is None else curve_from_json(curve, path))


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write JSON for people to read, rows of numbers on one line each."""
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    # A line break is never inside a string, where JSON escapes it.
    text = re.sub(r"\[\n[\s\d.,e+-]+\]", lambda numbers: " ".join(numbers[0].split()), text)
    write_whole(path, text + "\n")


def read_json(path: Path, purpose: str = "") -> dict[str, Any]:
    """The object in a JSON file of limited size; ``purpose`` says in the error why a missing file is needed."""
    if not path.is_file():
        raise InputError(f"there is no {path.name} in {path.parent}{': ' if purpose else ''}{purpose}.")
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"{path} has {path.stat().st_size:,} bytes; at most {MAX_BYTES:,} are read.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}. Fix it, or remove it.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected an object, got {type(content).__name__}.")
    return content


def _check_format(content: Mapping[str, Any], path: str | Path, known: tuple[int, ...]) -> None:
    if content.get("format") not in known:
        raise InputError(
            f"{path} has format {content.get('format')!r}; this version of cclnet reads format "
            f"{' and '.join(map(str, known))}."
        )


def _faults(
    content: Mapping[str, Any], checks: Mapping[str, Check], prefix: str = "", optional: bool = False
) -> list[str]:
    """What is wrong with the values of an object; where ``optional``, a missing value or null is right."""
    return [
        f"{prefix}{name} must be {words}, got {_shown(content[name]) if name in content else 'nothing'}"
        for name, (words, right) in checks.items()
        if not (optional and content.get(name) is None) and not right(content.get(name))
    ]


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:60] + "…"


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _side(value: object) -> bool:
    return _count(value) and 1 <= value <= MAX_SIDE  # type: ignore[operator]


def _short_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 1000


def _names(value: object) -> bool:
    return (
        isinstance(value, list)
        and 2 <= len(value) <= MAX_CLASSES
        and all(isinstance(name, str) and 0 < len(name) <= 1000 for name in value)
        and len(set(value)) == len(value)
    )


def _channels(value: object, least: float) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(_number(v) and least <= v <= 1000 for v in value)


def _is_temperature(value: object) -> bool:
    return _number(value) and 1e-3 <= value <= 1e3  # type: ignore[operator]


def _is_target(value: object, size: int, multilabel: bool) -> bool:
    def distribution(row: object) -> bool:
        shares = isinstance(row, list) and len(row) == size and all(_number(v) and 0 <= v <= 1 for v in row)
        return shares and abs(math.fsum(row) - 1) < 1e-4  # type: ignore[arg-type]

    return not multilabel and isinstance(value, list) and len(value) == size and all(map(distribution, value))


def _is_commit(value: object) -> bool:
    return isinstance(value, dict) and _short_text(value.get("sha")) and isinstance(value.get("clean"), bool)


def _texts(value: object) -> bool:
    return isinstance(value, dict) and all(_short_text(text) for text in value.values())


def _numbers(value: object) -> bool:
    return isinstance(value, dict) and all(map(_number, value.values()))


def _text_list(value: object) -> bool:
    return isinstance(value, list) and all(map(_short_text, value))


_OBJECT: Check = ("an object", lambda v: isinstance(v, dict))
_TEXT: Check = ("a text of at most 1,000 characters", _short_text)
_WHOLE: Check = ("a whole number, 0 or more", _count)
_FLAG: Check = ("true or false", lambda v: isinstance(v, bool))
_VERSIONS: Check = ("an object of versions", _texts)
_REQUIRED: dict[str, Check] = {
    "backbone": ("the name of a timm model", lambda v: isinstance(v, str) and 0 < len(v) <= 200),
    "classes": (f"2 to {MAX_CLASSES:,} different names", _names),
    "multilabel": _FLAG,
    "short_side": (f"whole pixels, 1 to {MAX_SIDE}", _side),
    "crop": (
        f"[height, width], each 1 to {MAX_SIDE}",
        lambda v: isinstance(v, list) and len(v) == 2 and all(map(_side, v)),
    ),
    "mean": ("three finite numbers", lambda v: _channels(v, -1000)),
    "std": ("three numbers above zero", lambda v: _channels(v, 1e-6)),
}
_OPTIONAL: dict[str, Check] = {
    "method": _TEXT,
    "method_settings": _OBJECT,
    "class_counts": ("one count per class", lambda v: isinstance(v, list) and all(map(_count, v))),
    "collapse_softness": ("null, or a share in 0..1", lambda v: _number(v) and 0 <= v <= 1),
    "trained": _OBJECT,
    "exported": _OBJECT,
    "preprocessing": ("a list of texts", _text_list),
    "done_by_the_file": ("a list of texts", _text_list),
    "output": _TEXT,
    "label_threshold": ("null, or a share in 0..1", lambda v: _number(v) and 0 <= v <= 1),
    "maps": _FLAG,
    "temperature": ("null, or between 0.001 and 1,000", _is_temperature),  # format 1
}
_TRAINED: dict[str, Check] = {
    "epochs": _WHOLE,
    "of_epochs": _WHOLE,
    "best": ("an object of numbers", _numbers),
    "seconds": ("a number", _number),
    "seed": ("a whole number", lambda v: isinstance(v, int) and not isinstance(v, bool)),
    "device": _TEXT,
    "devices": _WHOLE,
    "precision": _TEXT,
    "versions": _VERSIONS,
    "commit": ("an object with sha and clean", _is_commit),
    "images": _WHOLE,
    "data": _TEXT,
    "fingerprint": _TEXT,
}
_EXPORT: dict[str, Check] = {"format": _TEXT, "file": _TEXT, "checked": _OBJECT, "versions": _VERSIONS}
_TEMPERATURE: dict[str, Check] = {
    "value": ("null, or between 0.001 and 1,000", _is_temperature),
    "fitted_on": _TEXT,
    "images": _WHOLE,
    "halves": (
        "null, or two temperatures",
        lambda v: isinstance(v, list) and len(v) == 2 and all(map(_is_temperature, v)),
    ),
}


def write_soft_labels(path: str | Path, classes: Sequence[str], matrix: npt.ArrayLike) -> None:
    """Write soft_labels.csv: the header ``class,<name>,...``, then one row per class, row k the soft label of class k.

    17 digits restore a float64 exactly.
    """
    import pandas as pd  # here, so that a model without soft labels is used without pandas

    values = np.asarray(matrix, dtype=np.float64)
    if values.shape != (len(classes), len(classes)):
        raise InputError(f"{len(classes)} classes need a matrix of that size, got {list(values.shape)}.")
    frame = pd.DataFrame(values, columns=list(classes))
    frame.insert(0, "class", list(classes), allow_duplicates=True)
    write_whole(path, frame.to_csv(index=False, float_format="%.17g", lineterminator="\n"))


def read_soft_labels(path: str | Path) -> tuple[tuple[str, ...], Floats]:
    """The class names and the [K, K] matrix of a soft_labels.csv."""
    import pandas as pd

    path = Path(path)
    if not path.is_file():
        raise InputError(f"no file {path}. Methods that learn soft labels write it; hard labels have none.")
    # The header is read as a row like any other: a class may be called "class", and names may look like numbers.
    text = path.read_text(encoding="utf-8-sig")
    try:
        cells = pd.read_csv(io.StringIO(text), header=None, dtype=str, keep_default_na=False)
    except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
        raise InputError(f"{path} cannot be read as comma-separated text: {error}") from error
    classes = tuple(str(name) for name in cells.iloc[0, 1:])
    rows = tuple(str(name) for name in cells.iloc[1:, 0])
    if len(classes) < 2 or rows != classes:
        raise InputError(f"{path}: rows and columns must name the same classes in the same order, at least two; "
                         f"columns {', '.join(classes) or 'none'}; rows {', '.join(rows) or 'none'}.")  # fmt: skip
    matrix = cells.iloc[1:, 1:].apply(pd.to_numeric, errors="coerce").to_numpy(dtype=np.float64)
    if not ((matrix >= 0) & (matrix <= 1)).all():
        i, k = np.argwhere(~((matrix >= 0) & (matrix <= 1)))[0]
        raise InputError(f"{path}: entries must be probabilities in [0, 1]; row {classes[i]}, column {classes[k]} "
                         f"holds '{cells.iloc[i + 1, k + 1]}'.")  # fmt: skip
    return classes, matrix


def has_similarity(matrix: npt.ArrayLike) -> bool:
    """Whether soft labels make some classes more similar than others. Hard labels and label smoothing, uniform or by
    class frequency, give every other class the same share whatever the class: they carry no similarity.

    >>> has_similarity(np.eye(3)), has_similarity([[0.8, 0.2, 0.0], [0.2, 0.8, 0.0], [0.1, 0.1, 0.8]])
    (False, True)
    """
    values = np.array(matrix, dtype=np.float64)
    np.fill_diagonal(values, np.nan)
    if len(values) == 2:
        return bool(np.nanmax(values) > 0)  # there is one other class
    return bool((np.nanmax(values, axis=0) - np.nanmin(values, axis=0)).max() > 1e-6)
