"""Evaluate one run from its predictions: metrics with intervals, calibration, soft labels, mistakes, warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from cclnet.errors import InputError
from cclnet.evaluation.bootstrap import Units, intervals_summary, units_of, units_with
from cclnet.evaluation.calibration import (
    SMALLEST,
    calibrate,
    calibrated,
    confidences,
    fitting_split,
    kind_for,
    reliability,
    risk_coverage,
)
from cclnet.evaluation.classification import SPECIFICITIES, confusion, decisions, predicted_classes, sensitivity_at
from cclnet.evaluation.conformal import score_sets
from cclnet.evaluation.decision import rule_of_run, score_abstention, score_rules
from cclnet.evaluation.metrics import Sample, calibration_metrics, compute, metrics_for, task_of
from cclnet.evaluation.similarity import summarise
from cclnet.evaluation.subgroups import score_subgroups
from cclnet.files import make_folder
from cclnet.runs.decision_rule import DecisionRule, balancing_weights, make_rule
from cclnet.runs.folder import OpenedRun, RunFolder, open_run
from cclnet.runs.model import Calibration, FittedTemperature
from cclnet.runs.predictions import Integers, Predictions, counted
from cclnet.runs.provenance import package_versions
from cclnet.runs.scores import (
    CalibrationScores,
    CalibrationStage,
    ClassScores,
    Copies,
    Mistake,
    Scores,
    SoftLabelSummary,
    SplitSummary,
    Temperature,
    finite,
)

PACKAGES = ("numpy", "scikit-learn", "scipy", "pandas")  # that the numbers depend on
MISTAKES = 24  # listed at most
FEW_UNITS = 10  # a class with fewer groups (or images) has no reliable interval
FREQUENCY_AGREEMENT = 0.7  # from here on, soft labels mostly reflect class frequency


def evaluate(
    run: str | Path, out: str | Path | None = None, draws: int = 1000, seed: int = 0, decision: str | None = None,
    cost: str | None = None, by: str | None = None, ordered: bool | None = None, calibration: str = "auto",
) -> Scores:  # fmt: skip
    """Evaluate a run; the arguments are those of :func:`cclnet.evaluate`, and ``seed`` that of the bootstrap draws.

    scores.json is written to ``out``, by default the run folder, which also gets calibration.json. For a file alone
    nothing is written without ``out``.
    """
    opened = open_run(run)
    if ordered is not None:
        opened = replace(opened, predictions=replace(opened.predictions, ordered=ordered))
    scores, found = evaluate_opened(opened, draws, seed, decision, cost, by, calibration)
    folder = opened.folder if out is None else RunFolder(out)
    if folder is not None:
        _write(folder, opened, scores, found)
    return scores


def evaluate_opened(
    opened: OpenedRun, draws: int = 1000, seed: int = 0, decision: str | None = None, cost: str | None = None,
    by: str | None = None, calibration: str = "auto",
) -> tuple[Scores, Calibration]:  # fmt: skip
    """The scores of a run and what was fitted to compute them; nothing is written."""
    reported = opened.predictions.of_split(opened.split)
    units, task = units_of(reported), task_of(reported)
    fit_on = fitting_split(opened.predictions, opened.split)
    fitting = opened.predictions.of_split(fit_on) if fit_on else reported
    kind = kind_for(calibration, opened.settings_table)
    temperature, after = calibrate(reported, fit_on, fitting, units, seed, kind)
    rule = _rule(opened, reported, fitting, fit_on, temperature, decision, cost)
    stages = [(reported, metrics_for(task))]
    stages += [] if after is None else [(after, calibration_metrics(task))]
    samples, *later = compute(stages, units, draws, seed)
    counts = None if reported.multilabel else confusion(reported)
    scores = Scores(
        name=opened.name,
        model=None if opened.model is None else opened.model.to_json(),
        task=task,
        classes=tuple(reported.classes),
        split=split_summary(opened.predictions, opened.split),
        intervals=intervals_summary(units, draws, seed),
        overall={
            name: sample.estimates(reported, units)[0]
            for name, sample in samples.items()
            if not (sample.metric.per_class or sample.metric.calibration)
        },
        per_class=_per_class(reported, samples, units),
        confusion=None if counts is None else tuple(map(tuple, counts.tolist())),
        calibration=CalibrationScores(
            temperature=temperature,
            before=_stage(reported, samples, units),
            after=None if after is None else _stage(after, later[0], units),
        ),
        leak=opened.leak(),
        soft_labels=_soft_labels(opened, reported, counts),
        mistakes=_mistakes(reported),
        warnings=(),
        versions=package_versions(PACKAGES),
        subgroups=score_subgroups(reported, *_columns(opened, by), draws, seed),
        copies=_copies(opened, len(reported)),
    )
    found = Calibration(
        FittedTemperature(
            temperature.value, temperature.fitted_on, temperature.images, temperature.halves, temperature.offsets
        )
    )
    if not reported.multilabel:
        held_out = opened.predictions.of_split(fit_on) if fit_on else None
        scores, found = _with_decisions(scores, found, reported, after, held_out, rule, units, draws, seed)
    return replace(scores, warnings=_warnings(scores, reported, units, fitting if fit_on else None)), found


def _write(folder: RunFolder, opened: OpenedRun, scores: Scores, found: Calibration) -> None:
    """Write scores.json and, into the run's own folder, calibration.json."""
    make_folder(folder.path)
    if opened.folder is not None and folder.path.samefile(opened.folder.path):
        folder.write_calibration(found)
    folder.write_scores(scores)


def _with_decisions(
    scores: Scores, found: Calibration, reported: Predictions, after: Predictions | None, held_out: Predictions | None,
    rule: DecisionRule, units: Units, draws: int, seed: int,
) -> tuple[Scores, Calibration]:  # fmt: skip
    """Scores and calibration with decision rules, abstention and prediction sets.

    ``after``: the reported predictions, calibrated; ``held_out``: the predictions that the calibration was fitted on,
    None if it was cross-fitted.
    """
    new, temperature = after or reported, scores.calibration.temperature
    fitting = None if held_out is None else calibrated(held_out, temperature.map)
    abstention = score_abstention(new, fitting, rule, units, draws, seed)
    thresholds, sets = score_sets(reported, held_out, temperature, units, draws, seed)
    decided = score_rules(new, rule, units, draws, seed)
    scores = replace(scores, decisions=decided, abstention=abstention, sets=sets)
    return scores, replace(found, decision=rule, confidence=abstention.chosen, sets=thresholds)


def _trained_counts(opened: OpenedRun, reported: Predictions) -> tuple[int, ...] | None:
    """The training images of each class; None where they are unknown, or of other classes."""
    return None if opened.model is None or opened.model.classes != reported.classes else opened.model.class_counts


def _soft_labels(opened: OpenedRun, reported: Predictions, confusions: Integers | None) -> SoftLabelSummary | None:
    if opened.soft_labels is None:
        return None
    collapse = None if opened.model is None else opened.model.collapse_softness
    counts = _trained_counts(opened, reported)
    return summarise(reported.classes, opened.soft_labels, collapse, counts, confusions)


def _copies(opened: OpenedRun, images: int) -> Copies | None:
    found = opened.data.duplicates
    if found is None or opened.split not in found.exact:
        return None
    exact, near = found.exact[opened.split], None if found.near is None else found.near.get(opened.split, 0)
    share = (exact + (near or 0)) / images if images else None
    return Copies(exact, near, share, found.in_words(opened.split, images))


def _rule(
    opened: OpenedRun, reported: Predictions, fitting: Predictions, fit_on: str | None, temperature: Temperature,
    decision: str | None, cost: str | None,
) -> DecisionRule:  # fmt: skip
    """The decision rule. Class frequencies are those of the images that offsets (of the model, or of the members of
    an ensemble) were fitted on; without offsets those of the training, else of the split that the temperature is of."""
    classes, counts, settings = reported.classes, _trained_counts(opened, reported), opened.settings_table
    members = () if opened.model is None else opened.model.members
    has_offsets = temperature.offsets is not None or any(own.offsets is not None for own in members)
    if has_offsets:
        counts, settings = _calibrated_counts(fitting, counts), {}
    elif counts is None and fit_on is not None:
        counts = tuple(fitting.class_counts.tolist())
    weights = balancing_weights(counts, settings)
    if opened.folder is None:
        return make_rule(classes, reported.multilabel, DecisionRule(weights=weights), decision, cost)
    # The weights in calibration.json hold until offsets come or go.
    changed = has_offsets or opened.folder.read_calibration().map.offsets is not None
    new = weights if changed else None
    return rule_of_run(opened.folder, classes, reported.multilabel, counts, decision, cost, new)


def _calibrated_counts(fitting: Predictions, trained: Sequence[int] | None) -> tuple[int, ...]:
    """The images of each class that offsets were fitted on. A class without any keeps its share of the training, as it
    keeps its probability."""
    counts = fitting.class_counts
    if trained is not None:
        expected = np.rint(np.asarray(trained) * len(fitting) / max(sum(trained), 1)).astype(np.int64)
        counts = np.where(counts > 0, counts, expected)
    return tuple(counts.tolist())


def _columns(opened: OpenedRun, by: str | None) -> tuple[pd.DataFrame, list[str]]:
    """The columns of the images, and those to score subgroups of. Columns that only the settings name may be missing:
    the result kept of a run has none."""
    chosen = str(opened.settings_table.get("by", "")) if by is None else by
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    if not names:
        return pd.DataFrame(), []
    metadata = opened.metadata()
    if by is None:
        names = [name for name in names if name in metadata]
    elif metadata.empty:
        raise InputError(
            f"{opened.path} has no further columns for subgroups. They are kept when a run is trained on a table that "
            "has some, in metadata.csv; a predictions.csv may have them beside its own."
        )
    return metadata, names


def split_summary(predictions: Predictions, split: str) -> SplitSummary:
    """The reported split, and the number of images in all splits."""
    reported = predictions.of_split(split)
    units = units_of(reported)
    counts = reported.class_counts.tolist()
    sizes = {"all": len(predictions)}
    if predictions.splits is not None:
        names, images = np.unique(predictions.splits, return_counts=True)
        sizes = dict(zip(names.tolist(), images.tolist(), strict=True))
    return SplitSummary(
        name=split,
        images=len(reported),
        groups=units.count if units.kind == "groups" else None,
        class_counts=tuple(counts),
        missing_classes=tuple(name for name, count in zip(reported.classes, counts, strict=True) if count == 0),
        images_of_splits=sizes,
    )


def _per_class(reported: Predictions, samples: dict[str, Sample], units: Units) -> tuple[ClassScores, ...]:
    columns = {m: sample.estimates(reported, units) for m, sample in samples.items() if sample.metric.per_class}
    thresholds = {name: sensitivity_at(reported, level)[1] for name, level in SPECIFICITIES.items() if name in columns}
    support, predicted = reported.class_counts, predicted_classes(reported).sum(axis=0, dtype=np.int64)
    return tuple(
        ClassScores(
            name,
            int(support[k]),
            int(predicted[k]),
            {metric: own[k] for metric, own in columns.items()},
            {metric: finite(float(own[k])) for metric, own in thresholds.items()},
        )
        for k, name in enumerate(reported.classes)
    )


def _stage(predictions: Predictions, samples: dict[str, Sample], units: Units) -> CalibrationStage:
    """Calibration of the probabilities as trained, or calibrated."""
    metrics = calibration_metrics(task_of(predictions))
    return CalibrationStage(
        scores={metric.name: samples[metric.name].estimates(predictions, units)[0] for metric in metrics},
        mean_confidence=float(confidences(predictions)[0].mean()),
        reliability=reliability(predictions),
        risk_coverage=risk_coverage(predictions),
    )


def _mistakes(reported: Predictions) -> tuple[Mistake, ...]:
    """The misclassified images, most confident first."""
    if reported.multilabel:
        return ()
    predicted, p = decisions(reported), reported.probabilities
    wrong = np.flatnonzero(predicted != reported.labels)
    worst = wrong[np.argsort(-p[wrong, predicted[wrong]], kind="stable")][:MISTAKES]
    return tuple(
        Mistake(
            image=str(reported.images[i]),
            label=reported.classes[reported.labels[i]],
            predicted=reported.classes[predicted[i]],
            probability=float(p[i, predicted[i]]),
            probability_of_label=float(p[i, reported.labels[i]]),
        )
        for i in worst
    )


def _warnings(scores: Scores, reported: Predictions, units: Units, fitting: Predictions | None) -> tuple[str, ...]:
    """What changes the meaning of the scores; ``fitting``: what the calibration was fitted on, None if cross-fitted."""
    split, found = scores.split, []
    trained = (scores.model or {}).get("trained") or {}
    if trained.get("cut"):
        found.append(
            f"max_minutes ended training after {trained.get('epochs')} of {trained.get('of_epochs')} epochs: a run to "
            "the end will score differently."
        )
    if split.name == "all" and reported.splits is not None:
        found.append("The file has no split 'test' or 'val', so all of its images are reported.")
    if missing := split.missing_classes:
        found.append(f"No image of {', '.join(missing)} in the reported split: left out of every macro mean.")
        confused = sum(row.predicted for row in scores.per_class if row.name in missing)
        if confused and not reported.multilabel:
            found.append(
                f"The model predicted a class that is not in the reported split for {counted(confused, 'image')}."
            )
    with_images = dict(zip(reported.classes, units_with(reported.targets == 1, units).tolist(), strict=True))
    if few := [f"{name} ({count})" for name, count in with_images.items() if 0 < count < FEW_UNITS]:
        found.append(
            f"Fewer than {FEW_UNITS} {units.kind} of {', '.join(few)}: the intervals of these classes, and of macro "
            "means over them, may be too narrow."
        )
    if undefined := [name for name, estimate in scores.overall.items() if estimate.value is None]:
        found.append(f"Undefined on these images: {', '.join(undefined)}.")
    if scores.leak and scores.leak.images:
        found.append(scores.leak.in_words + " Scores on new patients will be lower.")
    if scores.copies and scores.copies.in_words:
        found.append(scores.copies.in_words + " Scores on new images will be lower.")
    if fitting is not None and reported.groups is not None and fitting.groups is not None:
        shared = int(np.isin(reported.groups, fitting.groups[fitting.groups != ""]).sum())
        if shared:
            found.append(
                f"The temperature was fitted on groups that are reported as well ({counted(shared, 'image')})."
            )
    if impossible := int((reported.probabilities[reported.targets == 1] == 0).sum()):
        found.append(
            f"The true class had probability 0 on {counted(impossible, 'image')}; the NLL counts it as {SMALLEST:.1g}."
        )
    follows = None if scores.soft_labels is None else scores.soft_labels.inverse_frequency_agreement
    if follows is not None and follows >= FREQUENCY_AGREEMENT:
        found.append(
            f"The soft labels mostly follow inverse class frequency (rank correlation {follows:.2f}), so they say "
            "little about visual similarity."
        )
    return tuple(found)
