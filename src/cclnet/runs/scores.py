"""scores.json: the evaluation of one run, as frozen dataclasses.

The fields are the keys of the JSON, except where a rule names another key. Undefined numbers are None (null); NaN and
infinity are never written. K classes, in the order of predictions.csv, everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cclnet.errors import InputError
from cclnet.files import MAX_LINES, check_regular, parse_json, write_whole
from cclnet.runs.calibration_map import CalibrationMap
from cclnet.schema import from_plain, rule, to_plain

FORMAT = 1


def finite(value: float) -> float | None:
    """The value as JSON has it: None if undefined."""
    return value if math.isfinite(value) else None


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
    # {"all": n} without splits
    images_of_splits: dict[str, int] = field(metadata=rule(old_name="images_of_parts"))


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

    name: str = field(metadata=rule(key="class"))
    support: int  # images of the class
    predicted: int  # images that were predicted as the class
    scores: dict[str, Estimate] = field(metadata=rule(inline=True))
    # On the probability of the class, of each sensitivity at a fixed specificity; None where undefined.
    thresholds: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Subgroup:
    """The images with one value, or within one range of values, of a column."""

    name: str
    images: int
    units: int  # groups where known, else images: what the intervals are over
    class_counts: tuple[int, ...]  # [K]
    scores: dict[str, Estimate]  # by metric


@dataclass(frozen=True)
class SubgroupColumn:
    """The scores of the reported images by a column of the data, such as sex."""

    column: str
    subgroups: tuple[Subgroup, ...]
    in_words: str


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
    """Calibration of the probabilities as trained, or calibrated; the metrics by name."""

    scores: dict[str, Estimate] = field(metadata=rule(inline=True))
    mean_confidence: float
    reliability: tuple[ReliabilityBin, ...]  # the 15 equal-width bins of the ECE
    risk_coverage: tuple[RiskPoint, ...]  # at most 200 points


@dataclass(frozen=True)
class Temperature:
    """The fitted temperature and offsets; ``value`` is None where none could be fitted."""

    value: float | None
    fitted_on: str | None  # "calibration", "val" or "cross-fitted halves"
    images: int
    halves: tuple[float, float] | None  # cross-fitted: the temperature of each half
    in_words: str
    offsets: tuple[float, ...] | None = None  # added to the logits divided by it, [K]; None: temperature alone
    offsets_of_halves: tuple[tuple[float, ...], ...] | None = None  # cross-fitted: those of each half, [2, K]

    @property
    def map(self) -> CalibrationMap:
        return CalibrationMap(self.value, self.offsets)

    @property
    def maps_of_halves(self) -> tuple[CalibrationMap, CalibrationMap] | None:
        """Cross-fitted: the map fitted on each half."""
        if self.halves is None:
            return None
        (first, second), offsets = self.halves, self.offsets_of_halves or (None, None)
        return CalibrationMap(first, offsets[0]), CalibrationMap(second, offsets[1])


@dataclass(frozen=True)
class CalibrationScores:
    """Calibration as trained and calibrated; ``after`` is None where no temperature could be fitted."""

    temperature: Temperature
    before: CalibrationStage
    after: CalibrationStage | None

    def stages(self) -> tuple[CalibrationStage, ...]:
        return (self.before,) if self.after is None else (self.before, self.after)


@dataclass(frozen=True)
class RuleScores:
    """The decisions of one rule: metrics by name, and the confusion matrix."""

    rule: str  # "accuracy", "balanced" or "costs"
    scores: dict[str, Estimate]  # accuracy, balanced_accuracy, macro_f1 and, where costs are known, expected_cost
    confusion: tuple[tuple[int, ...], ...]  # [K, K] counts, row: true class


@dataclass(frozen=True)
class DecisionScores:
    """All decision rules side by side, from the calibrated probabilities; ``chosen`` is the one of the model."""

    chosen: str
    rules: tuple[RuleScores, ...]
    costs: tuple[tuple[float, ...], ...] | None  # [K, K], row: true class; None where none were given
    in_words: str


@dataclass(frozen=True)
class AbstentionScores:
    """Abstention by two kinds of confidence (see evaluation/decision.py), of the decisions by the rule of the model."""

    chosen: str  # the kind that the model abstains by: "probability" or "logit_norm"
    aurc: dict[str, Estimate]  # by kind; lower is better
    aurc_of_choice: float | None  # of a kind that was chosen on other images; None where there were none


@dataclass(frozen=True)
class SetScores:
    """Conformal prediction sets of one kind and level, measured on images that their threshold was not fitted on."""

    kind: str  # "aps" or "raps"
    level: float  # the share of sets that should contain the true class
    coverage: Estimate  # the share that does
    size: Estimate  # mean number of classes
    single: Estimate  # share of sets with one class
    coverage_of_classes: tuple[float | None, ...]  # [K]


@dataclass(frozen=True)
class PredictionSets:
    """Conformal prediction sets; ``chosen`` is the kind that the model uses."""

    chosen: str
    fitted_on: str
    rows: tuple[SetScores, ...]


@dataclass(frozen=True)
class ClassLeak:
    """The images of one class whose group is also in the training split."""

    name: str = field(metadata=rule(key="class"))
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
class Copies:
    """The reported images that are copies of training images: identical, or nearly the same picture."""

    exact: int
    near: int | None  # None where not compared
    share: float | None  # of the reported images
    in_words: str  # "" if there are none


@dataclass(frozen=True)
class UniformSmoothing:
    """Uniform label smoothing with the same softness, and the total variation distance of the rows from it."""

    epsilon: float
    distance_mean: float
    distance_max: float


@dataclass(frozen=True)
class ClassSoftLabel:
    """The weight that the soft label of a class leaves on the class, and the other class with the largest weight."""

    name: str = field(metadata=rule(key="class"))
    softness: float
    most_similar: str = field(metadata=rule(old_name="most_alike"))
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
    most_similar_pairs: tuple[ClassPair, ...] = field(metadata=rule(old_name="most_alike_pairs"))  # at most 10
    inverse_frequency_agreement: float | None = field(metadata=rule(old_name="rarity_agreement"))
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
    split: SplitSummary = field(metadata=rule(old_name="part"))
    intervals: Intervals
    overall: dict[str, Estimate] = field(metadata=rule(key="scores"))  # metrics over all classes, by name
    per_class: tuple[ClassScores, ...]
    confusion: tuple[tuple[int, ...], ...] | None  # [K, K] counts, row: true class; None for multi-label
    calibration: CalibrationScores
    leak: Leak | None  # None without a split.csv that names groups
    # None if the method learns none
    soft_labels: SoftLabelSummary | None = field(metadata=rule(old_name="correlation"))
    mistakes: tuple[Mistake, ...]  # most confident first, at most 24; empty for multi-label
    warnings: tuple[str, ...]
    versions: dict[str, str]
    # None for multi-label, and in files of older versions.
    decisions: DecisionScores | None = None
    abstention: AbstentionScores | None = None
    sets: PredictionSets | None = None
    subgroups: tuple[SubgroupColumn, ...] = ()
    copies: Copies | None = None  # None where the images were not compared

    @property
    def multilabel(self) -> bool:
        return self.task == "multi-label"

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": "scores", **to_plain(self)}

    @classmethod
    def from_json(cls, content: object) -> Scores:
        check_kind(content, "scores")
        return from_plain(cls, content)


def check_kind(content: object, kind: str) -> None:
    """Refuse JSON that is not of this kind and format."""
    found = (content.get("format"), content.get("kind")) if isinstance(content, Mapping) else type(content).__name__
    if found != (FORMAT, kind):
        raise InputError(f"expected an object of format {FORMAT} and kind '{kind}', got {found}")


def write_scores(path: Path, scores: Scores) -> None:
    write_whole(path, json.dumps(scores.to_json(), indent=1, allow_nan=False) + "\n")


def read_scores(path: Path) -> Scores:
    """Read and check a scores.json."""
    check_regular(path, MAX_LINES)
    try:
        return Scores.from_json(parse_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not what cclnet evaluate writes ({error}). Run cclnet evaluate again.") from error
