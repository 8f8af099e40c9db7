"""scores.json: what ``cclnet evaluate`` found about one run, as frozen dataclasses.

The fields of the dataclasses are the keys of the JSON, except where ``json_key`` names another one. Undefined numbers
are None (null); NaN and infinity are never written. K classes, in the order of predictions.csv, everywhere.

``to_json`` and ``parse`` convert any of these dataclasses; ``cclnet.evaluation.compare`` uses them for comparison.json.
They are written by hand because this package must work without pydantic.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, Union

from cclnet.errors import InputError
from cclnet.files import write_whole

FORMAT = 1
T = TypeVar("T")
INLINE = {"inline": True}  # metadata of a dict whose entries stand beside the other fields in JSON


def json_key(name: str, *older: str) -> dict[str, Any]:
    """Metadata of a field with another name in JSON; ``older`` names are read as well."""
    return {"keys": (name, *older)}


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval. All three are None if it is undefined, the ends alone if the interval is."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class SplitSummary:
    """The reported split: test if there is one, else val, else all images."""

    name: str
    images: int
    groups: int | None  # None: no groups are known
    class_counts: tuple[int, ...]  # images of each class, [K]
    missing_classes: tuple[str, ...]  # classes without an image: left out of every macro mean
    images_of_splits: dict[str, int] = field(
        metadata=json_key("images_of_splits", "images_of_parts")
    )  # {"all": n} without splits


@dataclass(frozen=True)
class Intervals:
    """How the intervals were computed."""

    level: float
    draws: int
    seed: int
    over: str  # what was resampled: "groups" or "images"
    units: int  # how many of them there are
    in_words: str


@dataclass(frozen=True)
class ClassScores:
    """The metrics of one class, by name."""

    name: str = field(metadata=json_key("class"))
    support: int  # images of the class
    predicted: int  # images that were predicted as the class
    scores: dict[str, Estimate] = field(metadata=INLINE)


@dataclass(frozen=True)
class ReliabilityBin:
    """One bin of the reliability diagram; empty bins are left out."""

    low: float
    high: float
    images: int
    confidence: float  # mean
    accuracy: float


@dataclass(frozen=True)
class RiskPoint:
    """The error rate (risk) among the most confident decisions, a share (coverage) of all."""

    coverage: float
    risk: float


@dataclass(frozen=True)
class CalibrationStage:
    """Calibration of the probabilities before or after temperature scaling; the metrics by name."""

    scores: dict[str, Estimate] = field(metadata=INLINE)
    mean_confidence: float
    reliability: tuple[ReliabilityBin, ...]  # the 15 equal-width bins of the ECE
    risk_coverage: tuple[RiskPoint, ...]  # at most 200 points


@dataclass(frozen=True)
class Temperature:
    """The fitted temperature; ``value`` is None where none could be fitted."""

    value: float | None
    fitted_on: str | None  # "calibration", "val" or "cross-fitted halves"
    images: int
    halves: tuple[float, float] | None  # cross-fitted: the temperature of each half
    in_words: str


@dataclass(frozen=True)
class CalibrationScores:
    """Calibration before and after temperature scaling; ``after`` is None where no temperature could be fitted."""

    temperature: Temperature
    before: CalibrationStage
    after: CalibrationStage | None

    def stages(self) -> tuple[CalibrationStage, ...]:
        return (self.before,) if self.after is None else (self.before, self.after)


@dataclass(frozen=True)
class ClassLeak:
    """The images of one class whose group is also in the training split."""

    name: str = field(metadata=json_key("class"))
    images: int
    share: float | None


@dataclass(frozen=True)
class Leak:
    """The reported images whose group (lesion, patient) is also in the training split."""

    images: int
    share: float | None
    per_class: tuple[ClassLeak, ...]  # empty where only the total was kept
    in_words: str


@dataclass(frozen=True)
class UniformSmoothing:
    """Uniform label smoothing with the same softness, and the total variation distance of the rows from it."""

    epsilon: float
    distance_mean: float
    distance_max: float


@dataclass(frozen=True)
class ClassSoftLabel:
    """The weight that the soft label of a class leaves on the class, and the other class with the largest weight."""

    name: str = field(metadata=json_key("class"))
    softness: float
    most_similar: str = field(metadata=json_key("most_similar", "most_alike"))
    weight: float


@dataclass(frozen=True)
class ClassPair:
    """Two classes and the mean of their weights in each other's soft label."""

    a: str
    b: str
    weight: float


@dataclass(frozen=True)
class SoftLabelSummary:
    """The soft labels of a run. Agreements are Spearman correlations over the off-diagonal entries."""

    matrix: tuple[tuple[float, ...], ...]  # [K, K], row k: the soft label of class k
    softness: float  # mean of the diagonal
    collapse_softness: float | None  # softness of a collapsed dictionary; None for methods without one
    uniform_smoothing: UniformSmoothing
    per_class: tuple[ClassSoftLabel, ...]
    most_similar_pairs: tuple[ClassPair, ...] = field(
        metadata=json_key("most_similar_pairs", "most_alike_pairs")
    )  # at most 10
    inverse_frequency_agreement: float | None = field(
        metadata=json_key("inverse_frequency_agreement", "rarity_agreement")
    )
    confusion_agreement: float | None  # with the model's confusion matrix


@dataclass(frozen=True)
class Mistake:
    """A misclassified image."""

    image: str
    label: str
    predicted: str
    probability: float  # of the predicted class
    probability_of_label: float


@dataclass(frozen=True)
class Scores:
    """The evaluation of one run."""

    name: str  # of the run folder or the predictions file
    model: dict[str, Any] | None  # model.json
    task: str  # "single-label" or "multi-label"
    classes: tuple[str, ...]
    split: SplitSummary = field(metadata=json_key("split", "part"))
    intervals: Intervals
    overall: dict[str, Estimate] = field(metadata=json_key("scores"))  # metrics over all classes, by name
    per_class: tuple[ClassScores, ...]
    confusion: tuple[tuple[int, ...], ...] | None  # [K, K] counts, row: true class; None for multi-label
    calibration: CalibrationScores
    leak: Leak | None  # None without a split.csv that names groups
    soft_labels: SoftLabelSummary | None = field(
        metadata=json_key("soft_labels", "correlation")
    )  # None if the method learns none
    mistakes: tuple[Mistake, ...]  # most confident first, at most 24; empty for multi-label
    warnings: tuple[str, ...]
    versions: dict[str, str]

    @property
    def multilabel(self) -> bool:
        return self.task == "multi-label"

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": "scores", **to_json(self)}

    @classmethod
    def from_json(cls, content: object) -> Scores:
        check_kind(content, "scores")
        return parse(cls, content)


def write_scores(path: Path, scores: Scores) -> None:
    write_whole(path, json.dumps(scores.to_json(), indent=1, allow_nan=False) + "\n")


def read_scores(path: Path) -> Scores:
    """Read and check a scores.json."""
    try:
        return Scores.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not what cclnet evaluate writes ({error}). Run cclnet evaluate again.") from error


def to_json(value: Any) -> Any:
    """Dataclasses as dicts under their JSON keys, tuples as lists."""
    if dataclasses.is_dataclass(value):
        content: dict[str, Any] = {}
        for own in dataclasses.fields(value):
            item = to_json(getattr(value, own.name))
            content |= item if own.metadata.get("inline") else {_keys(own)[0]: item}
        return content
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def check_kind(content: object, kind: str) -> None:
    """Refuse JSON that is not of this kind and format."""
    found = (content.get("format"), content.get("kind")) if isinstance(content, Mapping) else None
    if found != (FORMAT, kind):
        raise InputError(f"expected an object of format {FORMAT} and kind '{kind}', got {_short(content)}")


def parse(kind: type[T], content: object) -> T:
    """A dataclass from its JSON. Unknown keys are ignored; a missing or ill-typed one is named in the error."""
    return typing.cast(T, _parse(kind, content, ""))


def _parse(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):  # X | None
        return None if value is None else _parse(arguments[0], value, where)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return _parse_fields(typing.cast(type, kind), value, where)
    if origin is dict and isinstance(value, Mapping):
        return {key: _parse(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is tuple and isinstance(value, (list, tuple)) and (arguments[-1] is ... or len(value) == len(arguments)):
        return tuple(_parse(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise InputError(f"expected {getattr(kind, '__name__', kind)} at '{where.lstrip('.')}', got {_short(value)}")


def _parse_fields(kind: type, content: Mapping[str, Any], where: str) -> Any:
    hints, values = _hints(kind), {}
    taken = {key for own in dataclasses.fields(kind) for key in _keys(own)}
    for own in dataclasses.fields(kind):
        if own.metadata.get("inline"):
            rest = {key: item for key, item in content.items() if key not in taken}
            values[own.name] = _parse(hints[own.name], rest, where)
            continue
        key = next((key for key in _keys(own) if key in content), None)
        if key is None:
            raise InputError(f"'{f'{where}.{_keys(own)[0]}'.lstrip('.')}' is missing")
        values[own.name] = _parse(hints[own.name], content[key], f"{where}.{key}")
    return kind(**values)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _keys(own: dataclasses.Field[Any]) -> tuple[str, ...]:
    return tuple(own.metadata.get("keys", (own.name,)))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
