"""What describes a trained model beside its weights: model.json, calibration.json and soft_labels.csv.

The files may come from anywhere, so every value is checked and all faults are reported in one error. model.json names
no files: those of a model lie beside it under fixed names, so no path in it can lead elsewhere.

Old files are read too: format 1 of model.json holds the temperature and the abstention curve ("thresholds"), which are
in calibration.json since format 2.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from cclnet.errors import InputError, unknown
from cclnet.files import MAX_LINES, Writer, check_regular, read_json, write_json, write_whole
from cclnet.runs.calibration_map import OFFSETS, TEMPERATURE, CalibrationMap
from cclnet.runs.checksums import check_file
from cclnet.runs.decision_rule import DecisionRule
from cclnet.runs.provenance import Commit
from cclnet.runs.spreadsheet import mark_texts, unmark_texts
from cclnet.schema import from_plain, rule, to_plain
from cclnet.settings import POOLINGS, TTA

Floats = npt.NDArray[np.float64]

MAX_CLASSES = 100_000
MAX_SIDE = 8192  # pixels
MAX_CROP = 2048  # pixels per side: the activations of one image take about a gigabyte
MAX_TEXT = 1000  # characters
MAX_MEMBERS = 100  # of an ensemble
COUNT, TEXT, SHARE = rule(low=0), rule(max_text=MAX_TEXT), rule(low=0, high=1)
NAMES = {"probability": "confidence", "logit_norm": "logit divided by the norm of the logits"}  # to abstain by
CONFIDENCES = tuple(NAMES)


@dataclass(frozen=True)
class TrainedInfo:
    """How and on what a model was trained; None where the file does not say."""

    epochs: int | None = field(default=None, metadata=COUNT)  # trained
    of_epochs: int | None = field(default=None, metadata=COUNT)  # asked for
    best: Mapping[str, float] | None = None  # the best validation accuracy with its epoch
    seconds: float | None = None  # of training, over all resumes
    seed: int | None = None
    device: str | None = field(default=None, metadata=TEXT)
    devices: int | None = field(default=None, metadata=COUNT)  # processes
    precision: str | None = field(default=None, metadata=TEXT)
    versions: Mapping[str, str] | None = field(default=None, metadata=TEXT)
    commit: Commit | None = None
    images: int | None = field(default=None, metadata=COUNT)  # of the training split
    data: str | None = field(default=None, metadata=TEXT)  # the setting
    fingerprint: str | None = field(default=None, metadata=TEXT)  # hash of names, labels, classes and groups
    cut: bool | None = None  # whether max_minutes ended training before the last epoch
    split: str | None = field(default=None, metadata=TEXT)  # how it was made: "given", "group", "class" or "file"
    folds: int | None = field(default=None, metadata=COUNT)  # of the out-of-fold predictions of the split val


@dataclass(frozen=True)
class ExportInfo:
    """What ``cclnet export`` adds to model.json."""

    format: str = field(default="", metadata=TEXT)  # "onnx", "torch", "safetensors" or "timm"
    file: str = field(default="", metadata=TEXT)  # name of the exported file
    preprocessing: tuple[str, ...] = field(default=(), metadata=TEXT)  # how an image is prepared, step by step
    done_by_the_file: tuple[str, ...] = field(default=(), metadata=TEXT)  # steps in the exported program
    output: str = field(default="", metadata=TEXT)  # the formula from logits to probabilities
    label_threshold: float | None = field(default=None, metadata=SHARE)  # from which a label is given; multi-label only
    maps: bool = False  # whether class activation maps are an output
    checked: Mapping[str, Any] = field(default_factory=dict)  # the largest differences from PyTorch
    versions: Mapping[str, str] = field(default_factory=dict, metadata=TEXT)


_BESIDE_EXPORTED = ("preprocessing", "done_by_the_file", "output", "label_threshold", "maps")  # not in "exported"


@dataclass(frozen=True)
class Member:
    """A network of an ensemble: what may differ from the other members. The fields are those of ModelDescription."""

    backbone: str = field(metadata=rule(max_text=200))
    short_side: int = field(metadata=rule(low=1, high=MAX_SIDE))
    crop: tuple[int, int] = field(metadata=rule(low=1, high=MAX_SIDE))
    mean: tuple[float, float, float] = field(metadata=rule(low=-1000, high=1000))
    std: tuple[float, float, float] = field(metadata=rule(low=1e-6, high=1000))
    target: tuple[tuple[float, ...], ...] | None = field(default=None, metadata=SHARE)
    tta: str = field(default="none", metadata=rule(choices=tuple(TTA)))
    pooling: str = field(default="last", metadata=rule(choices=POOLINGS))
    temperature: float | None = field(default=None, metadata=TEMPERATURE)  # None: not calibrated
    offsets: tuple[float, ...] | None = field(default=None, metadata=OFFSETS)  # [K]; None: temperature alone

    @classmethod
    def of(cls, model: ModelDescription, calibration: CalibrationMap) -> Member:
        calibration.check(len(model.classes), model.multilabel)
        own = {name: getattr(model, name) for name in MEMBER_FIELDS}
        return cls(**own, temperature=calibration.temperature, offsets=calibration.offsets)

    @property
    def map(self) -> CalibrationMap:
        return CalibrationMap(self.temperature, self.offsets)

    def to_json(self) -> dict[str, Any]:
        """As in model.json and in exported programs; without offsets as in older versions."""
        return {name: value for name, value in to_plain(self).items() if name != "offsets" or value is not None}


_OF_MAP = ("temperature", "offsets")
MEMBER_FIELDS = tuple(own.name for own in fields(Member) if own.name not in _OF_MAP)


@dataclass(frozen=True)
class ModelDescription:
    """The checked content of model.json."""

    backbone: str = field(metadata=rule(max_text=200))  # name of the timm model
    classes: tuple[str, ...] = field(metadata=TEXT)  # [K]
    multilabel: bool  # whether an image may carry several labels
    # Images are resized to this short side, then the centre [height, width] is cut out.
    short_side: int = field(metadata=rule(low=1, high=MAX_SIDE))
    crop: tuple[int, int] = field(metadata=rule(low=1, high=MAX_CROP))
    mean: tuple[float, float, float] = field(metadata=rule(low=-1000, high=1000))  # of the channels, in 0..1
    std: tuple[float, float, float] = field(metadata=rule(low=1e-6, high=1000))
    method: str = field(default="", metadata=TEXT)  # empty where unknown
    method_settings: Mapping[str, Any] = field(default_factory=dict)
    class_counts: tuple[int, ...] | None = field(default=None, metadata=COUNT)  # training images of each class, [K]
    collapse_softness: float | None = field(default=None, metadata=SHARE)  # of collapsed class features
    # The soft labels that are removed from the probabilities, [K][K]; None where they are left as they are.
    target: tuple[tuple[float, ...], ...] | None = field(default=None, metadata=SHARE)
    tta: str = field(default="none", metadata=rule(choices=tuple(TTA)))  # views whose logits are averaged
    pooling: str = field(default="last", metadata=rule(choices=POOLINGS))  # the feature maps the classifier sees
    # The networks of an ensemble; the weights of member i are named "i.". Short side and crop above are then those of
    # the image that all members take their own crop from.
    members: tuple[Member, ...] = ()
    trained: TrainedInfo = TrainedInfo()
    export: ExportInfo | None = field(default=None, metadata=rule(key="exported"))  # None for a run
    extra: Mapping[str, Any] = field(default_factory=dict, metadata=rule(inline=True))  # unknown keys
    ordered: bool | None = None  # whether the classes have an order; None: as their names say

    def to_json(self) -> dict[str, Any]:
        """The content of model.json (format 2)."""
        content = {"format": 2, **to_plain(self), "method": self.method or None}
        plain = {"tta": self.tta == "none", "pooling": self.pooling == "last", "members": not self.members}
        for name in (*self.extra, *(name for name, default in plain.items() if default)):
            del content[name]
        if self.members:
            content["members"] = [own.to_json() for own in self.members]
        content["trained"] = {name: value for name, value in content["trained"].items() if value is not None}
        if exported := content.pop("exported"):
            content |= {name: exported.pop(name) for name in _BESIDE_EXPORTED}
            content["exported"] = exported
        return content | dict(self.extra)

    def baked_in(self, calibration: CalibrationMap) -> dict[str, Any]:
        """What is part of an exported program, so that it must not be changed in the files beside it alone."""
        names = ("classes", "multilabel", "crop", "mean", "std", "target")
        baked_in = {name: to_plain(getattr(self, name)) for name in names} | calibration.to_plain()
        baked_in |= {} if self.tta == "none" else {"tta": self.tta}  # older programs do not say it
        return baked_in | ({"members": [own.to_json() for own in self.members]} if self.members else {})

    def member(self, index: int) -> ModelDescription:
        """The description of a member of an ensemble, as of a model of its own."""
        own = self.members[index]
        return replace(self, members=(), **{name: getattr(own, name) for name in MEMBER_FIELDS})

    def with_tta(self, tta: str) -> ModelDescription:
        """The description with other views. Those of an exported program and of an ensemble are fixed."""
        if tta not in TTA:
            raise unknown("tta", tta, TTA)
        if self.members:
            raise InputError("the members of an ensemble have their own tta: set it when they are trained.")
        return replace(self, tta=tta)

    @property
    def passes(self) -> int:
        """Forward passes per image."""
        return sum(len(TTA[own.tta]) for own in self.members or (self,))


def write_model_file(path: str | Path, description: ModelDescription, write: Writer = write_whole) -> None:
    """Write model.json whole."""
    write_json(Path(path), description.to_json(), write)


def read_model_file(path: str | Path) -> ModelDescription:
    """Read and check a model.json (format 1 or 2)."""
    check_file(Path(path))
    return model_from_json(read_json(path, "it says how images are prepared for the model"), path)


def model_from_json(content: Mapping[str, Any], path: str | Path) -> ModelDescription:
    """The description in the content of a model.json, checked; ``path`` is named in errors."""
    _check_format(content, path, (1, 2))
    of_calibration = ("format", "temperature", "thresholds")  # the last two in format 1
    given = {name: value for name, value in content.items() if value is not None and name not in of_calibration}
    beside = {name: given.pop(name) for name in _BESIDE_EXPORTED if name in given}
    if isinstance(exported := given.get("exported"), Mapping):
        given["exported"] = beside | {name: value for name, value in exported.items() if value is not None}
    try:
        description = from_plain(ModelDescription, given)
        _check_consistency(description)
    except InputError as error:
        raise InputError(f"{path} is refused: {error}.") from error
    return description


def _check_consistency(model: ModelDescription) -> None:
    """Refuse values that are right each by itself but not together."""
    size, wrong = len(model.classes), []
    if not model.backbone:
        wrong.append("backbone must be the name of a timm model, got an empty text")
    if not 2 <= size <= MAX_CLASSES or len(set(model.classes)) < size or "" in model.classes:
        wrong.append(f"classes must be 2 to {MAX_CLASSES:,} different names, got {size:,}: {str(model.classes)[:60]}")
    if model.target is not None:
        sums = [math.fsum(row) for row in model.target if len(row) == size]
        if model.multilabel or len(model.target) != size or len(sums) != size or any(abs(s - 1) >= 1e-4 for s in sums):
            wrong.append("target must be null, or for each class shares that sum to one (single-label only)")
    if model.class_counts is not None and len(model.class_counts) != size:
        wrong.append(f"class_counts must be {size} counts, one per class, got {len(model.class_counts)}")
    if len(model.members) > MAX_MEMBERS or (model.members and model.tta != "none"):
        wrong.append(f"an ensemble has at most {MAX_MEMBERS} members, which have their own tta")
    for index in range(min(len(model.members), MAX_MEMBERS)):
        try:
            _check_consistency(model.member(index))
            model.members[index].map.check(size, model.multilabel)
        except InputError as error:
            wrong.append(f"members[{index}]: {error}")
    if model.tta == "turns" and model.crop[0] != model.crop[1]:
        wrong.append(f"tta 'turns' needs a square crop, got {list(model.crop)}")
    if max(model.crop) > model.short_side:
        wrong.append(f"crop {list(model.crop)} does not fit into images with a short side of {model.short_side}")
    if wrong:
        raise InputError("; ".join(wrong))


@dataclass(frozen=True)
class AbstentionCurve:
    """Coverage and risk of keeping the images that are at least as confident as a threshold, [B] each.

    The points are sorted from the most confident images to all images: coverage rises, the last one is 1 and its
    threshold 0. ``independent``: how many independent images the kept ones are worth, where groups are known.
    """

    split: str  # that it was measured on
    images: int
    threshold: Floats
    coverage: Floats
    risk: Floats
    independent: Floats | None = None
    confidence: str = "probability"  # what the thresholds are of

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
        z, share = 1.959964, float(self.risk[point])
        centre, spread = share + z * z / (2 * kept), z * np.sqrt(share * (1 - share) / kept + (z / (2 * kept)) ** 2)
        low, high = (float(np.clip((centre + s) / (1 + z * z / kept), 0, 1)) for s in (-spread, spread))
        return (
            f"abstains where the {NAMES[self.confidence]} is below {self.threshold[point]:.7g}. On the {self.images:,} "
            f"images of split '{self.split}' this keeps {self.coverage[point]:.1%}; {self.risk[point]:.1%} of those "
            f"are wrong (95% interval {low:.1%} to {high:.1%}{over})"
        )

    def to_json(self) -> dict[str, Any]:
        rows = np.column_stack([self.threshold, self.coverage, self.risk])
        curve = {"split": self.split, "images": self.images, "columns": ["threshold", "coverage", "risk"],
                 "rows": [[float(f"{v:.12g}") for v in row] for row in rows]}  # fmt: skip
        if self.confidence != "probability":
            curve["confidence"] = self.confidence
        if self.independent is not None:
            curve["independent"] = [float(f"{v:.6g}") for v in self.independent]
        return curve


@dataclass(frozen=True)
class _CurveContent:
    """An abstention curve as in the file; early ones have no ``independent``."""

    split: str = field(metadata=rule(max_text=MAX_TEXT, old_name="part"))
    images: int = field(metadata=rule(low=1))
    rows: tuple[tuple[float, float, float], ...] = field(metadata=SHARE)
    # No fewer than one; half of one leaves room for rounding.
    independent: tuple[float, ...] = field(default=(), metadata=rule(low=0.5))
    confidence: str = field(default="probability", metadata=rule(choices=CONFIDENCES))


def curve_from_json(content: Any, path: str | Path) -> AbstentionCurve:
    """The abstention curve in the content of a file, checked; ``path`` is named in errors."""
    try:
        own = from_plain(_CurveContent, content)
        if not own.rows:
            raise InputError("there is no row")
        threshold, coverage, risk = np.ascontiguousarray(np.array(own.rows).T)
        if (np.diff(coverage) <= 0).any() or (np.diff(threshold) > 0).any():
            raise InputError("the coverage must rise from row to row, and the threshold must not")
        if coverage[0] * own.images < 0.5:
            raise InputError(f"the first row keeps no image: coverage {coverage[0]:g} of {own.images:,} images")
        if abs(coverage[-1] - 1) > 1e-9 or threshold[-1] != 0:
            raise InputError(
                "the last point must keep all images, coverage 1 at threshold 0; got "
                f"coverage {coverage[-1]:g} at threshold {threshold[-1]:g}"
            )
        worth = np.array(own.independent) if "independent" in content else None
        if worth is not None and (worth.shape != threshold.shape or (worth > own.images).any()):
            raise InputError(f"independent must be one number per row, at most {own.images:,}")
    except InputError as error:
        raise InputError(f"{path}: the abstention curve is refused: {error}. Export again.") from error
    return AbstentionCurve(own.split, own.images, threshold, coverage, risk, worth, own.confidence)


@dataclass(frozen=True)
class FittedTemperature:
    """The temperature by which logits are divided, and the offsets that are added to them."""

    value: float | None = field(default=None, metadata=TEMPERATURE)  # None where it could not be fitted
    fitted_on: str | None = field(default=None, metadata=TEXT)  # the split, or "cross-fitted halves"; None: unknown
    images: int | None = field(default=None, metadata=COUNT)  # that it was fitted on
    halves: tuple[float, float] | None = field(default=None, metadata=TEMPERATURE)  # of each half, if cross-fitted
    offsets: tuple[float, ...] | None = field(default=None, metadata=OFFSETS)  # [K]; None: temperature alone

    @property
    def map(self) -> CalibrationMap:
        return CalibrationMap(self.value, self.offsets)

    def to_json(self) -> dict[str, Any]:
        """As in calibration.json; without offsets as in older versions."""
        return {name: value for name, value in to_plain(self).items() if name != "offsets" or value is not None}


@dataclass(frozen=True)
class ConformalThresholds:
    """Thresholds of conformal prediction sets (see evaluation/conformal.py)."""

    fitted_on: str = field(metadata=TEXT)  # the split
    images: int = field(metadata=rule(low=1))
    kind: str = field(metadata=rule(choices=("aps", "raps")))  # that is used by default: it had the smaller sets
    levels: tuple[float, ...] = field(metadata=rule(above=0, below=1, ascending=True))  # [L]
    # By kind, [L]; None where there were too few images for the level, so that a set has all classes.
    thresholds: Mapping[str, tuple[float | None, ...]]

    def at(self, level: float, kind: str | None = None) -> float:
        """The threshold of the smallest level that is at least ``level``."""
        limits, index = self.thresholds.get(kind or self.kind), int(np.searchsorted(self.levels, level - 1e-9))
        if limits is None or len(limits) != len(self.levels) or index == len(limits):
            raise InputError(f"there are no prediction sets of kind '{kind or self.kind}' and level {level:g}.")
        limit = limits[index]
        return math.inf if limit is None else limit


@dataclass(frozen=True)
class Calibration:
    """What was fitted or chosen after training (calibration.json): temperature and offsets, decision rule, confidence
    score for abstention, thresholds of prediction sets and, of an exported model, abstention curve."""

    temperature: FittedTemperature = FittedTemperature()
    abstention: AbstentionCurve | None = None
    decision: DecisionRule | None = None  # None where none was chosen
    confidence: str = field(default="probability", metadata=rule(choices=CONFIDENCES))  # by which to abstain
    sets: ConformalThresholds | None = None  # None before evaluation, and with several labels

    def to_json(self) -> dict[str, Any]:
        """The content of calibration.json."""
        number = 1 if self.temperature.offsets is None else 2  # a version that knows no offsets must refuse them
        content = {"format": number, "temperature": self.temperature.to_json(), "confidence": self.confidence}
        content |= {} if self.decision is None else {"decision": to_plain(self.decision)}
        content |= {} if self.sets is None else {"sets": to_plain(self.sets)}
        return content if self.abstention is None else content | {"abstention": self.abstention.to_json()}

    @property
    def map(self) -> CalibrationMap:
        return self.temperature.map


def read_calibration_file(path: str | Path) -> Calibration:
    """Read and check a calibration.json. Without one, the values are taken from a model.json of format 1 beside it;
    without those, nothing was fitted."""
    path = Path(path)
    check_file(path)
    if path.is_file():
        content = read_json(path)
        _check_format(content, path, (1, 2))
    else:
        path = path.with_name("model.json")
        content = read_json(path) if path.is_file() else {}
        if content.get("format") != 1:
            return Calibration()
        content = {"temperature": {"value": content.get("temperature")}, "abstention": content.get("thresholds")}
    given = {name: own for name, own in content.items() if own is not None}
    curve = given.pop("abstention", None)  # it has rules of its own
    abstention = None if curve is None else curve_from_json(curve, path)
    try:
        if "temperature" not in given:
            raise InputError("temperature must be a table of keys and values, got nothing")
        found = replace(from_plain(Calibration, given), abstention=abstention)
        if found.temperature.offsets is not None:
            found.map.check(len(found.temperature.offsets))
        return found
    except InputError as error:
        raise InputError(f"{path} is refused: {error}.") from error


def _check_format(content: Mapping[str, Any], path: str | Path, known: tuple[int, ...]) -> None:
    found, reads = content.get("format"), " and ".join(map(str, known))
    if found not in known:
        raise InputError(f"{path} has format {found!r}; this version of cclnet reads format {reads}.")


def write_soft_labels(
    path: str | Path, classes: Sequence[str], matrix: npt.ArrayLike, write: Writer = write_whole
) -> None:
    """Write soft_labels.csv: the header ``class,<name>,...``, then one row per class, row k the soft label of class k.

    17 digits restore a float64 exactly. Names that a spreadsheet would run as a formula are marked.
    """
    values = np.asarray(matrix, dtype=np.float64)
    if values.shape != (len(classes), len(classes)):
        raise InputError(f"{len(classes)} classes need a matrix of that size, got {list(values.shape)}.")
    names = mark_texts(classes)
    frame = pd.DataFrame(values, columns=names)
    frame.insert(0, "class", names, allow_duplicates=True)
    write(Path(path), frame.to_csv(index=False, float_format="%.17g", lineterminator="\n"))


def read_soft_labels(path: str | Path) -> tuple[tuple[str, ...], Floats]:
    """The class names and the [K, K] matrix of a soft_labels.csv."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"no file {path}. Methods that learn soft labels write it; hard labels have none.")
    check_regular(path, MAX_LINES)
    check_file(path)
    # The header is read as a row like any other: a class may be called "class", and names may look like numbers.
    try:
        text = path.read_text(encoding="utf-8-sig")
        if (columns := text.partition("\n")[0].count(",")) > MAX_CLASSES:
            raise ValueError(f"it has {columns:,} columns, at most {MAX_CLASSES:,} classes are read")
        cells = pd.read_csv(io.StringIO(text), header=None, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:  # pandas' parser errors and undecodable bytes are ValueErrors
        raise InputError(f"{path} cannot be read as comma-separated text: {error}") from error
    classes, rows = (tuple(unmark_texts(map(str, names))) for names in (cells.iloc[0, 1:], cells.iloc[1:, 0]))
    if len(classes) < 2 or rows != classes:
        first = (", ".join(names[:20]) or "none" for names in (classes, rows))
        raise InputError(f"{path}: rows and columns must name the same classes in the same order, at least two; "
                         "columns {}; rows {}.".format(*first))  # fmt: skip
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
