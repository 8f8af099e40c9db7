"""The metric registry: everything that the rest of cclnet knows about a metric.

scores.json, the intervals, comparisons and their verdicts, the HTML report, the terminal, sweep results and the model
card all derive from it. A new metric needs one entry. From outside the package::

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
from typing import Literal

import numpy as np

from cclnet.errors import InputError
from cclnet.evaluation.bootstrap import Resampled, Statistic, Units, bootstrap, interval, units_with
from cclnet.evaluation.calibration import calibration_statistic, calibration_values
from cclnet.evaluation.classification import (
    TOP_K,
    Values,
    decision_statistic,
    decision_values,
    predicted_classes,
    ranking_statistic,
    ranking_values,
)
from cclnet.runs.predictions import Floats, Integers, Predictions
from cclnet.runs.scores import Estimate

Task = str  # "single-label" or "multi-label"
Bounds = tuple[float, float]
SINGLE: tuple[Task, ...] = ("single-label",)
MULTI: tuple[Task, ...] = ("multi-label",)
BOTH: tuple[Task, ...] = ("single-label", "multi-label")
AFTER = "_calibrated"  # ends the name of a metric after temperature scaling


@dataclass(frozen=True)
class Family:
    """Metrics that are computed together.

    Attributes:
        values: point estimates by metric name, a float, or [K] for one per class. A name that is left out does not
            apply to these predictions.
        statistic: the same as functions of totals, for the bootstrap.
    """

    values: Callable[[Predictions], Values]
    statistic: Callable[[Predictions], Statistic]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: key in scores.json.
        title: heads a table.
        description: one sentence.
        source: a function of the predictions that returns a float (``per_class``: [K]), NaN where undefined; or the
            family that computes it under its name.
        short: name in a sentence; by default the name with spaces.
        higher_is_better: direction.
        bounds: smallest and largest value; a mapping if they depend on the task.
        unit: "percent" shows 0.862 as 86.2%, "fraction" as 0.862, both with differences in points of 0.01; "own" shows
            values and differences as they are.
        tasks: where it is defined.
        per_class: one value per class instead of one overall.
        calibration: depends on the confidence, so it is computed before and after temperature scaling.
        biased: a calibration error, whose estimate is biased upwards.
        trials: for a proportion, the number of units (per_class: [K]) that it is computed from. At 0 or 1 it then has
            the exact binomial interval.
        compared: whether runs are compared by it.
        compared_after: whether they are also compared by it after temperature scaling.
        headline: tasks in which it is shown where space is short (tiles, terminal, sweep results).
        primary: tasks in which it comes first and overall verdicts are about it.
    """

    name: str
    title: str
    description: str
    source: Family | Callable[[Predictions], float | Floats]
    short: str = ""
    higher_is_better: bool = True
    bounds: Bounds | Mapping[Task, Bounds] = (0.0, 1.0)
    unit: Literal["percent", "fraction", "own"] = "fraction"
    tasks: tuple[Task, ...] = BOTH
    per_class: bool = False
    calibration: bool = False
    biased: bool = False
    trials: Callable[[Predictions, Units], int | Integers] | None = None
    compared: bool = True
    compared_after: bool = False
    headline: tuple[Task, ...] = BOTH
    primary: tuple[Task, ...] = ()

    def __post_init__(self) -> None:
        if not self.short:
            object.__setattr__(self, "short", self.name.replace("_", " "))

    def bounds_for(self, task: Task) -> Bounds:
        return self.bounds[task] if isinstance(self.bounds, Mapping) else self.bounds

    def after_temperature(self) -> Metric:
        """The same metric after temperature scaling, as comparisons name it."""
        return replace(
            self,
            name=self.name + AFTER,
            title=f"{self.title} after temperature",
            short=f"{self.short} after temperature",
            compared=self.compared_after,
        )


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
    ('Calibration error after temperature', 'Top-3 accuracy', 'New score')
    """
    if name in _registry:
        return _registry[name]
    plain = name.removesuffix(AFTER)
    if plain in _registry and _registry[plain].calibration:
        return _registry[plain].after_temperature()
    return Metric(name, name.replace("_", " ").capitalize(), "", lambda predictions: math.nan)


def task_of(predictions: Predictions) -> Task:
    return "multi-label" if predictions.multilabel else "single-label"


def metrics_for(task: Task) -> list[Metric]:
    """All metrics of a task in the order of registration, the primary one first."""
    own = [metric for metric in _registry.values() if task in metric.tasks]
    return sorted(own, key=lambda metric: task not in metric.primary)


def overall_metrics(task: Task) -> list[Metric]:
    return [metric for metric in metrics_for(task) if not (metric.per_class or metric.calibration)]


def class_metrics(task: Task) -> list[Metric]:
    return [metric for metric in metrics_for(task) if metric.per_class]


def calibration_metrics(task: Task) -> list[Metric]:
    return [metric for metric in metrics_for(task) if metric.calibration]


def compared_metrics(task: Task) -> list[Metric]:
    """What runs are compared by: overall, then calibration, then after temperature scaling."""
    calibration = calibration_metrics(task)
    after = [metric.after_temperature() for metric in calibration]
    return [metric for metric in (*overall_metrics(task), *calibration, *after) if metric.compared]


def headline_metrics(task: Task) -> list[Metric]:
    """What is shown where space is short: overall metrics, then calibration."""
    own = (*overall_metrics(task), *calibration_metrics(task))
    return [metric for metric in own if task in metric.headline]


@dataclass(frozen=True)
class Sample:
    """A metric on some predictions: its point estimate and its bootstrap draws (first axis), [K] and [D, K] if it is
    one per class."""

    metric: Metric
    value: float | Floats
    draws: Floats

    def estimates(self, predictions: Predictions, units: Units) -> list[Estimate]:
        """The value with its interval; one per class for a metric of classes."""
        trials = None if self.metric.trials is None else np.atleast_1d(self.metric.trials(predictions, units))
        values, draws = np.atleast_1d(self.value), self.draws.reshape(len(self.draws), -1)
        return [
            estimate(
                self.metric,
                float(value),
                draws[:, k],
                units,
                task_of(predictions),
                None if trials is None else int(trials[k]),
            )
            for k, value in enumerate(values)
        ]


def estimate(
    metric: Metric, value: float, draws: Floats, units: Units, task: Task, trials: int | None = None
) -> Estimate:
    """A value with the interval of its draws [D]; None where undefined."""
    low, high = interval(value, draws, units.count, metric.bounds_for(task), trials, biased=metric.biased)
    return Estimate(*(None if math.isnan(x) else float(x) for x in (value, low, high)))


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


def _all_units(predictions: Predictions, units: Units) -> int:
    return units.count


def _units_of_class(predictions: Predictions, units: Units) -> Integers:
    return units_with(predictions.targets == 1, units)


def _units_of_prediction(predictions: Predictions, units: Units) -> Integers:
    return units_with(predicted_classes(predictions) == 1, units)


DECISIONS = Family(decision_values, decision_statistic)
RANKING = Family(ranking_values, ranking_statistic)
CALIBRATION = Family(calibration_values, calibration_statistic)

for _metric in (
    # Overall
    Metric(
        "accuracy", "Accuracy", "Share of images whose most probable class is the right one.", DECISIONS,
        unit="percent", tasks=SINGLE, trials=_all_units, primary=SINGLE,
    ),
    Metric(
        "balanced_accuracy", "Balanced accuracy",
        "Mean of the recalls of the classes: a rare class counts as much as a common one.", DECISIONS,
        unit="percent", tasks=SINGLE,
    ),
    Metric(
        "macro_f1", "Macro F1", "Mean over classes of F1, which is high only where precision and recall both are.",
        DECISIONS, short="macro F1",
    ),
    Metric(
        "kappa", "Cohen's kappa", "Agreement with the labels beyond chance: 0 is chance, 1 is perfect.", DECISIONS,
        bounds=(-1.0, 1.0), tasks=SINGLE,
    ),
    Metric(
        "macro_jaccard", "Macro Jaccard",
        "Mean over classes of the true positives divided by all images that are, or are predicted as, the class.",
        DECISIONS, short="macro Jaccard", tasks=SINGLE,
    ),
    Metric(
        "macro_auroc", "Macro AUROC",
        "Probability that an image of a class is ranked above one of another class, mean over classes; 0.5 is chance.",
        RANKING, short="macro AUROC",
    ),
    Metric(
        "mean_average_precision", "Mean average precision",
        "Mean over classes of the precision along the ranking by the probability of the class.", RANKING,
        headline=MULTI, primary=MULTI,
    ),
    *(
        Metric(
            f"top_{k}_accuracy", f"Top-{k} accuracy",
            f"Share of images whose right class is among the {k} most probable.", DECISIONS,
            unit="percent", tasks=SINGLE, trials=_all_units, compared=False, headline=(),
        )
        for k in TOP_K
    ),
    Metric(
        "micro_f1", "Micro F1", "F1 of all labels of all images pooled: common labels count most.", DECISIONS,
        short="micro F1", tasks=MULTI,
    ),
    Metric(
        "subset_accuracy", "Exact matches", "Share of images whose labels are all right.", DECISIONS,
        unit="percent", tasks=MULTI, trials=_all_units,
    ),
    Metric(
        "hamming_loss", "Wrong labels", "Share of all label decisions that are wrong.", DECISIONS,
        higher_is_better=False, unit="percent", tasks=MULTI, trials=_all_units, headline=(),
    ),
    # Calibration, before and after temperature scaling
    Metric(
        "nll", "Log loss (NLL)",
        "Mean of -log of the probability of the true class; a confident error costs most.", CALIBRATION,
        short="NLL", higher_is_better=False, bounds=(0.0, math.inf), unit="own", calibration=True,
        compared_after=True, headline=(),
    ),
    Metric(
        "brier", "Brier score", "Squared distance of the probabilities from the labels.", CALIBRATION,
        short="Brier score", higher_is_better=False, bounds={"single-label": (0.0, 2.0), "multi-label": (0.0, 1.0)},
        unit="own", calibration=True, headline=(),
    ),
    Metric(
        "ece", "Calibration error", "Mean gap between confidence and accuracy, over 15 bins of equal width (ECE).",
        CALIBRATION, short="ECE", higher_is_better=False, unit="percent", calibration=True, biased=True,
        compared_after=True,
    ),
    Metric(
        "adaptive_ece", "Adaptive calibration error", "ECE with bins of equally many images.", CALIBRATION,
        short="adaptive ECE", higher_is_better=False, unit="percent", calibration=True, biased=True, compared=False,
        headline=(),
    ),
    Metric(
        "classwise_ece", "Class-wise calibration error", "ECE of the probability of each class, mean over classes.",
        CALIBRATION, short="class-wise ECE", higher_is_better=False, unit="percent", calibration=True, biased=True,
        compared=False, headline=(),
    ),
    Metric(
        "aurc", "Area under risk-coverage",
        "Mean error rate when the least confident images are left out one by one.", CALIBRATION,
        short="AURC", higher_is_better=False, calibration=True, compared=False, headline=(),
    ),
    # Per class
    Metric(
        "recall", "Recall", "Share of the images of the class that are predicted as it (sensitivity).", DECISIONS,
        unit="percent", per_class=True, trials=_units_of_class,
    ),
    Metric(
        "precision", "Precision", "Share of the images predicted as the class that are of the class.", DECISIONS,
        unit="percent", per_class=True, trials=_units_of_prediction,
    ),
    Metric("f1", "F1", "Harmonic mean of precision and recall.", DECISIONS, short="F1", per_class=True),
    Metric(
        "jaccard", "Jaccard", "True positives divided by all images that are, or are predicted as, the class.",
        DECISIONS, short="Jaccard", per_class=True, headline=(),
    ),
    Metric(
        "auroc", "AUROC", "Probability that an image of the class is ranked above one that is not.", RANKING,
        short="AUROC", per_class=True,
    ),
    Metric(
        "average_precision", "Average precision", "Precision along the ranking by the probability of the class.",
        RANKING, per_class=True,
    ),
):  # fmt: skip
    register(_metric)
