"""The decision rule of a run, and when to refer an image to a person: the confidence threshold that keeps a chosen
share of images, or of errors.

The abstention curve is measured on images that the run was not trained on: of the n most confident images, their share
of all (coverage) and the share of them that is wrong (risk). The confidence is one of two:

- probability: that of the chosen class. With several labels it is that of the least confident decision,
  ``min_k max(p_k, 1 - p_k)``, and one wrong label makes the image wrong.
- logit_norm: the centred logit of the chosen class divided by the norm of the centred logits, ``z_k / ‖z‖`` with
  ``z = log p - mean(log p)``. Log-probabilities are logits up to a constant, which centring removes, so probabilities
  suffice; a temperature cancels, offsets do not. Training with soft labels bounds the logits by an amount that differs
  between images, which disturbs the order of the probabilities; the norm removes it. With two classes it is constant
  and not used.

A run uses the one with the smaller area under the risk-coverage curve (AURC) on held-out images.

SciPy is imported where it is used, so that prediction does without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cclnet.errors import InputError
from cclnet.runs.calibration_map import CalibrationMap
from cclnet.runs.decision_rule import RULES, DecisionRule, Floats, Indices, balancing_weights, decide, make_rule
from cclnet.runs.folder import RunFolder, open_run
from cclnet.runs.model import CONFIDENCES, AbstentionCurve
from cclnet.runs.predictions import Predictions
from cclnet.runs.scores import AbstentionScores, DecisionScores, RuleScores

if TYPE_CHECKING:
    from cclnet.evaluation.bootstrap import Statistic, Units

IN_WORDS = {
    "accuracy": "The model chooses the most probable class, which is right most often.",
    "balanced": "The model chooses the class whose probability divided by the frequency of the class is largest, "
    "which is right most often when every class counts equally.",
    "costs": "The model chooses the class with the smallest expected cost.",
}
POINTS = 1000
SMALLEST = float(np.finfo(np.float64).eps)  # probability, before its logarithm is taken
TOLERANCE = 1e-6  # confidences that differ by less count as equal: engines differ by as much


def rule_of_run(
    folder: RunFolder, classes: Sequence[str], multilabel: bool, class_counts: Sequence[int] | None,
    decision: str | None = None, cost: str | None = None, weights: tuple[float, ...] | None = None,
) -> DecisionRule:  # fmt: skip
    """The rule of a run folder or an export: as asked, else as chosen before, else as its settings say. ``weights``
    replace those of the balanced rule."""
    settings, known = folder.read_settings_table(), folder.read_calibration().decision
    if known is None:
        known = DecisionRule(weights=balancing_weights(class_counts, settings))
        decision, cost = decision or settings.get("decision"), cost or settings.get("cost")
    known = known if weights is None else replace(known, weights=weights)
    return make_rule(classes, multilabel, known, decision, cost)


def score_rules(predictions: Predictions, chosen: DecisionRule, units: Units, draws: int, seed: int) -> DecisionScores:
    """All rules whose numbers are known, side by side on calibrated predictions; all get the same bootstrap draws."""
    from cclnet.evaluation.bootstrap import bootstrap, estimate

    known = {"balanced": chosen.weights, "costs": chosen.costs}
    names = [name for name in RULES if known.get(name, True) is not None]
    costs = None if chosen.costs is None else np.asarray(chosen.costs)
    size, found = predictions.num_classes, []
    statistics = [rule_statistic(predictions, replace(chosen, name=name), costs) for name in names]
    drawn = bootstrap(statistics, units, draws, seed)
    for name, statistic, of_draws in zip(names, statistics, drawn, strict=True):
        totals = np.asarray(statistic.features.sum(axis=0), np.float64)[None]
        scores = {}
        for metric, value in statistic.scores(totals).items():
            largest = float(costs.max()) if metric == "expected_cost" and costs is not None else 1.0
            trials = units.count if metric == "accuracy" else None
            scores[metric] = estimate(float(value[0]), of_draws[metric], units.count, (0.0, largest), trials)
        counts = totals.reshape(size, size).astype(int).tolist()
        found.append(RuleScores(name, scores, tuple(map(tuple, counts))))
    return DecisionScores(chosen.name, tuple(found), chosen.costs, IN_WORDS[chosen.name])


def rule_statistic(predictions: Predictions, rule: DecisionRule, costs: Floats | None) -> Statistic:
    """Scores of the decisions of a rule as functions of the totals of its confusion matrix."""
    from cclnet.evaluation.bootstrap import Statistic
    from cclnet.evaluation.classification import columns, confusion_scores

    size = predictions.num_classes
    cells = predictions.labels * size + decide(predictions.probabilities, rule)

    def scores(totals: Floats) -> dict[str, Floats]:
        counts = totals.reshape(-1, size, size)
        own = confusion_scores(counts)
        shown = {name: own[name] for name in ("accuracy", "balanced_accuracy", "macro_f1")}
        if costs is not None:
            shown["expected_cost"] = (counts * costs).sum(axis=(1, 2)) / counts.sum(axis=(1, 2))
        return shown

    return Statistic(columns(np.asarray(cells, np.intp), size * size), scores)


def confidence(probabilities: Floats, chosen: Indices | None, kind: str = "probability") -> Floats:
    """The confidence of each image in 0..1, [N] from [N, K] and the chosen classes [N]; None with several labels.

    >>> confidence(np.array([[0.9, 0.1], [0.6, 0.4]]), None).tolist()
    [0.9, 0.6]
    >>> confidence(np.array([[0.5, 0.25, 0.25]]), np.array([0]), "logit_norm").round(4).tolist()  # sqrt(2 / 3)
    [0.8165]
    """
    if chosen is None:
        return np.maximum(probabilities, 1 - probabilities).min(axis=1)
    rows = np.arange(len(chosen))
    if kind == "probability":
        return probabilities[rows, chosen]
    logits = np.log(np.maximum(probabilities, SMALLEST))
    centred = logits - logits.mean(axis=1, keepdims=True)
    norm = np.linalg.norm(centred, axis=1)
    return np.clip(centred[rows, chosen] / np.where(norm > 0, norm, 1.0), 0.0, 1.0)


def score_abstention(
    reported: Predictions, fitting: Predictions | None, rule: DecisionRule, units: Units, draws: int, seed: int
) -> AbstentionScores:
    """The AURC of both kinds of confidence on calibrated predictions by a rule, and the kind to use.

    It is chosen on ``fitting``. Where that is None it is chosen on all reported images, and ``aurc_of_choice`` is
    cross-fitted: the mean over two halves (by group) of the AURC of the kind that is better on the other half.
    """
    from cclnet.evaluation.bootstrap import bootstrap, estimate
    from cclnet.evaluation.calibration import aurc_statistic, halves_of

    def area(predictions: Predictions, kind: str) -> float:
        statistic = aurc_statistic(*_confident_and_right(predictions, rule, kind), exact=True)
        return float(statistic.scores(np.asarray(statistic.features.sum(axis=0))[None])["aurc"][0])

    def better(predictions: Predictions) -> str:
        kinds = CONFIDENCES if predictions.num_classes > 2 else CONFIDENCES[:1]
        return min(kinds, key=lambda kind: area(predictions, kind))

    values = {kind: area(reported, kind) for kind in CONFIDENCES}
    statistics = [aurc_statistic(*_confident_and_right(reported, rule, kind)) for kind in CONFIDENCES]
    estimates = {
        kind: estimate(value, drawn["aurc"], units.count)
        for (kind, value), drawn in zip(values.items(), bootstrap(statistics, units, draws, seed), strict=True)
    }
    second = halves_of(units, seed)
    if fitting is not None or not second.any() or second.all():
        chosen = better(reported if fitting is None else fitting)
        return AbstentionScores(chosen, estimates, None if fitting is None else values[chosen])
    halves = [reported.select(half) for half in (~second, second)]
    crossed = [area(half, better(other)) * len(half) for half, other in (halves, halves[::-1])]
    return AbstentionScores(better(reported), estimates, sum(crossed) / len(reported))


def _confident_and_right(
    predictions: Predictions, rule: DecisionRule, kind: str
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    chosen = decide(predictions.probabilities, rule)
    return confidence(predictions.probabilities, chosen, kind), chosen == predictions.labels


def measure_curve(
    confidences: Floats, right: npt.NDArray[np.bool_], split: str, groups: npt.NDArray[np.intp] | None = None,
    kind: str = "probability",
) -> AbstentionCurve:  # fmt: skip
    """The curve of N decisions from their confidence and correctness; equally confident ones form one point.

    A threshold is half-way between the last image it keeps and the next, so that neither rounding nor another engine
    moves an image across it; the last one keeps everything. ``groups`` [N]: the patient or lesion of each image.

    >>> curve = measure_curve(np.array([0.9, 0.5, 0.8, 0.5]), np.array([True, False, True, True]), "val")
    >>> curve.threshold.round(3).tolist(), curve.coverage.tolist(), curve.risk.tolist()
    ([0.85, 0.65, 0.0], [0.25, 0.5, 1.0], [0.0, 0.0, 0.25])
    """
    from cclnet.evaluation.statistics import independent_images

    order = np.argsort(-confidences, kind="stable")
    sorted_, wrong = confidences[order], np.cumsum(~right[order])
    last = np.flatnonzero(np.append(sorted_[:-1] - sorted_[1:] > TOLERANCE, True))  # of each block of equal confidence
    shown = last[np.unique(np.linspace(0, len(last) - 1, min(POINTS, len(last))).round().astype(np.intp))]
    kept = shown + 1
    between = np.append((sorted_[:-1] + sorted_[1:]) / 2, 0.0)
    independent = None if groups is None else independent_images(~right[order], groups[order])[shown]
    risk = wrong[shown] / kept
    return AbstentionCurve(split, len(order), between[shown], kept / len(order), risk, independent, kind)


def curve_of_run(folder: Path, used: CalibrationMap, rule: DecisionRule, kind: str = "probability") -> AbstentionCurve:
    """The curve of a run folder by a rule and a kind of confidence, from its predictions of the reported split after
    calibration."""
    from cclnet.evaluation.bootstrap import units_of
    from cclnet.evaluation.calibration import calibrated
    from cclnet.evaluation.classification import decisions

    run = open_run(folder)
    held_out = run.predictions.of_split(run.split)
    if run.split == "all":
        raise InputError(f"{folder}: predictions.csv names no held-out split (val, test) to choose a threshold on.")
    held_out = calibrated(held_out, used)
    units = units_of(held_out)
    groups = units.index if units.kind == "groups" else None
    if held_out.multilabel:
        sure, right = confidence(held_out.probabilities, None), (decisions(held_out) == held_out.labels).all(axis=1)
    else:
        sure, right = _confident_and_right(held_out, rule, kind)
    return measure_curve(sure, right, run.split, groups, kind)
