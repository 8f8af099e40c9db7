"""The metric registry: everything that the rest of cclnet knows about a metric.

scores.json, the intervals, comparisons and their verdicts, the HTML report, the terminal, sweep results and the model
card all derive from it. A new metric needs one entry in metrics.toml. From outside the package::

    from cclnet.evaluation.metrics import Metric, register

    def error_rate(predictions):
        return float((predictions.probabilities.argmax(axis=1) != predictions.labels).mean())

    register(Metric("error_rate", "Error rate", "Share of images that are misclassified.", error_rate,
                    higher_is_better=False, unit="percent", tasks=("single-label",)))

It then appears in scores.json, the report, the terminal and comparisons. Such a function is recomputed on the resampled
images of every bootstrap draw, which takes as many calls as there are draws. Where that is too slow, give a ``Family``
with a statistic of totals (see bootstrap.py), as the built-in metrics do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cclnet.errors import InputError
from cclnet.evaluation import calibration, classification
from cclnet.evaluation.bootstrap import Bounds, Resampled, Statistic, Units, bootstrap, estimate, units_with
from cclnet.evaluation.classification import Values, predicted_classes
from cclnet.runs.predictions import Floats, Integers, Predictions
from cclnet.runs.scores import Estimate
from cclnet.settings import read_settings

Task = str  # "single-label" or "multi-label"
BOTH: tuple[Task, ...] = ("single-label", "multi-label")
AFTER = "_calibrated"  # ends the name of a metric of calibrated probabilities
OF_CLASS = ":"  # between the name of a metric and the class that it is about, in comparisons
MAX_COMPARED_CLASSES = 12


@dataclass(frozen=True)
class Family:
    """Metrics that are computed together."""

    # Point estimates by metric name, a float, or [K] for one per class; those that do not apply are left out.
    values: Callable[[Predictions], Values]
    statistic: Callable[[Predictions], Statistic]  # the same as functions of totals, for the bootstrap


@dataclass(frozen=True)
class Metric:
    """One metric. ``source`` is a function of the predictions that returns a float (``per_class``: [K]), NaN where
    undefined; or the family that computes it under its name."""

    name: str  # key in scores.json
    title: str  # heads a table
    description: str  # one sentence
    source: Family | Callable[[Predictions], float | Floats]
    short: str = ""  # name in a sentence; by default the name with spaces
    higher_is_better: bool = True
    bounds: Bounds | Mapping[Task, Bounds] = (0.0, 1.0)  # smallest and largest value, by task if they depend on it
    # "percent" shows 0.862 as 86.2%, "fraction" as 0.862, both with differences in points of 0.01; "own" shows values
    # and differences as they are.
    unit: Literal["percent", "fraction", "own"] = "fraction"
    tasks: tuple[Task, ...] = BOTH  # where it is defined
    per_class: bool = False  # one value per class instead of one overall
    calibration: bool = False  # depends on the confidence: computed as trained and calibrated
    biased: bool = False  # a calibration error, whose estimate is biased upwards
    # Of a proportion, the number of units (per_class: [K]) that it is computed from. At 0 or 1 it then has the exact
    # binomial interval.
    trials: Callable[[Predictions, Units], int | Integers] | None = None
    compared: bool = True  # whether runs are compared by it; of metrics per class only those with compared_per_class
    compared_per_class: bool = False  # whether runs are compared by it class by class
    compared_after: bool = False  # whether they are also compared by it after calibration
    ordered: bool = False  # defined only where the classes have an order
    subgroups: tuple[Task, ...] = ()  # tasks in which it is computed for subgroups (sex, site, …)
    headline: tuple[Task, ...] = BOTH  # tasks in which it is shown where space is short (tiles, terminal, sweeps)
    primary: tuple[Task, ...] = ()  # tasks in which it comes first and overall verdicts are about it

    def __post_init__(self) -> None:
        if not self.short:
            object.__setattr__(self, "short", self.name.replace("_", " "))

    def bounds_for(self, task: Task) -> Bounds:
        return self.bounds[task] if isinstance(self.bounds, Mapping) else self.bounds

    def after_calibration(self) -> Metric:
        """The same metric of calibrated probabilities, as comparisons name it."""
        title, short = f"{self.title} after calibration", f"{self.short} after calibration"
        return replace(self, name=self.name + AFTER, title=title, short=short, compared=self.compared_after)


_registry: dict[str, Metric] = {}


def register(metric: Metric) -> Metric:
    """Add a metric; a name that is taken is refused."""
    if metric.name in _registry:
        raise InputError(f"a metric '{metric.name}' is registered already; choose another name.")
    if metric.per_class and metric.calibration:
        raise InputError(f"metric '{metric.name}': calibration metrics are overall, not per class.")
    _registry[metric.name] = metric
    return metric


def unregister(name: str) -> None:
    """Remove a metric."""
    if name not in _registry:
        raise InputError(f"there is no metric '{name}'.")
    del _registry[name]


def find(name: str) -> Metric:
    """The metric of this name, also "ece_calibrated". One that is not registered here (a scores.json may come from
    elsewhere) is described by its name alone.

    >>> find("ece_calibrated").title, find("top_3_accuracy").title, find("new_score").title
    ('Calibration error after calibration', 'Top-3 accuracy', 'New score')
    """
    if name in _registry:
        return _registry[name]
    base, _, of_class = name.partition(OF_CLASS)
    if of_class and base in _registry:
        own = _registry[base]
        return replace(own, name=name, title=f"{own.title} of {of_class}", short=f"{own.short} of {of_class}")
    plain = name.removesuffix(AFTER)
    if plain in _registry and _registry[plain].calibration:
        return _registry[plain].after_calibration()
    return Metric(name, name.replace("_", " ").capitalize(), "", lambda predictions: math.nan)


def task_of(predictions: Predictions) -> Task:
    return "multi-label" if predictions.multilabel else "single-label"


def metrics_for(task: Task) -> list[Metric]:
    """All metrics of a task in the order of registration, the primary one first."""
    own = [metric for metric in _registry.values() if task in metric.tasks]
    return sorted(own, key=lambda metric: task not in metric.primary)


def overall_metrics(task: Task) -> list[Metric]:
    return [metric for metric in metrics_for(task) if not (metric.per_class or metric.calibration)]


def calibration_metrics(task: Task) -> list[Metric]:
    return [metric for metric in metrics_for(task) if metric.calibration]


def compared_metrics(task: Task) -> list[Metric]:
    """What runs are compared by: overall, then calibration, then after calibration, then class by class."""
    before = calibration_metrics(task)
    after = [metric.after_calibration() for metric in before]
    per_class = [metric for metric in metrics_for(task) if metric.compared_per_class]
    return [metric for metric in (*overall_metrics(task), *before, *after) if metric.compared] + per_class


def names_of_classes(metric: Metric, classes: Sequence[str]) -> list[str]:
    """The names by which runs are compared in a metric of classes; none with many classes, which would bury the rest.

    >>> names_of_classes(find("auroc"), ["MEL", "NV"])
    ['auroc:MEL', 'auroc:NV']
    """
    return [f"{metric.name}{OF_CLASS}{name}" for name in classes] if len(classes) <= MAX_COMPARED_CLASSES else []


def headline_metrics(task: Task) -> list[Metric]:
    """What is shown where space is short: overall metrics, then calibration."""
    own = (*overall_metrics(task), *calibration_metrics(task))
    return [metric for metric in own if task in metric.headline]


def subgroup_metrics(task: Task) -> list[Metric]:
    """What is computed for subgroups of the images."""
    return [metric for metric in metrics_for(task) if task in metric.subgroups]


@dataclass(frozen=True)
class Sample:
    """A metric on some predictions: its point estimate and its bootstrap draws (first axis), [K] and [D, K] if it is
    one per class."""

    metric: Metric
    value: float | Floats
    draws: Floats

    def estimates(self, predictions: Predictions, units: Units) -> list[Estimate]:
        """The value with its interval; one per class for a metric of classes."""
        own, bounds = self.metric, self.metric.bounds_for(task_of(predictions))
        trials = None if own.trials is None else np.atleast_1d(own.trials(predictions, units))
        draws = self.draws.reshape(len(self.draws), -1)
        return [
            estimate(value, draws[:, k], units.count, bounds, None if trials is None else int(trials[k]), own.biased)
            for k, value in enumerate(np.atleast_1d(self.value).tolist())
        ]


def point_estimates(predictions: Predictions, metrics: Sequence[Metric]) -> Values:
    """The values of metrics by name, [K] for one per class. Metrics of one family are computed once, together; a metric
    that does not apply to these predictions is left out."""
    values: Values = {}
    for family in _families(metrics):
        values |= family.values(predictions)
    values |= {m.name: m.source(predictions) for m in metrics if not isinstance(m.source, Family)}
    return {metric.name: values[metric.name] for metric in metrics if metric.name in values}


def compute(
    stages: Sequence[tuple[Predictions, Sequence[Metric]]], units: Units, draws: int, seed: int
) -> list[dict[str, Sample]]:
    """For each stage (predictions and the metrics to compute on them) the samples by metric name. All stages get the
    same bootstrap draws."""
    statistics: list[Statistic | Resampled] = []
    ends = [0]
    for predictions, metrics in stages:
        statistics += [family.statistic(predictions) for family in _families(metrics)]
        statistics += [Resampled(m.name, predictions, m.source) for m in metrics if not isinstance(m.source, Family)]
        ends.append(len(statistics))
    drawn = bootstrap(statistics, units, draws, seed)
    samples = []
    for (predictions, metrics), begin, end in zip(stages, ends, ends[1:], strict=False):
        of_stage = {name: own for family in drawn[begin:end] for name, own in family.items()}
        values = point_estimates(predictions, metrics)
        samples.append({m.name: Sample(m, values[m.name], of_stage[m.name]) for m in metrics if m.name in values})
    return samples


def _families(metrics: Sequence[Metric]) -> list[Family]:
    return list(dict.fromkeys(metric.source for metric in metrics if isinstance(metric.source, Family)))


_FAMILIES = {
    "decisions": Family(classification.decision_values, classification.decision_statistic),
    "ranking": Family(classification.ranking_values, classification.ranking_statistic),
    "calibration": Family(calibration.calibration_values, calibration.calibration_statistic),
}
_TRIALS: dict[str, Callable[[Predictions, Units], int | Integers]] = {
    "all": lambda predictions, units: units.count,
    "class": lambda predictions, units: units_with(predictions.targets == 1, units),
    "predicted": lambda predictions, units: units_with(predicted_classes(predictions) == 1, units),
}


def _register_built_in() -> None:
    """Register the metrics of metrics.toml."""
    for name, entry in read_settings(Path(__file__).with_name("metrics.toml")).items():
        own: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        if isinstance(bounds := own.get("bounds"), dict):
            own["bounds"] = {task: tuple(limits) for task, limits in bounds.items()}
        source, trials = _FAMILIES[own.pop("family")], own.pop("trials", None)
        register(Metric(name, source=source, trials=_TRIALS[trials] if trials else None, **own))


_register_built_in()
