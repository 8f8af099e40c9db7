"""Judge one run: everything there is to say about a predictions.csv, as plain JSON.

``evaluate(run)`` takes a run folder or a predictions.csv and returns (and writes as scores.json) the dict below.
``compare(runs)`` of ``cclnet.evaluation.compare`` returns comparison.json; its schema stands there.

A *number with interval* is ``{"value": x, "low": x, "high": x}``; all three may be null (undefined), or the
two ends alone (every draw gave the same value, so nothing is known about the spread). K classes, in file
order, everywhere. No NaN or infinity is ever written: what is undefined is null.

scores.json::

    {
      "format": 1,
      "kind": "scores",
      "name": "ccl-0",                      # of the run folder, or of the file
      "model": {...} | null,                # model.json as it stands (method, backbone, trained, ...), null without one
      "task": "single-label" | "multi-label",
      "classes": ["MEL", ...],              # K names
      "split": {
        "name": "test" | "val" | "all",     # what is reported: test if there, else val, else everything
        "images": 2003,
        "groups": 1500 | null,              # null: no groups known
        "class_counts": [...],              # K, images of each class in this part
        "missing_classes": ["DF"],          # without an image in this part: left out of every macro mean
        "images_of_splits": {"val": 2003, "calibration": 800}   # all the parts in the file; {"all": n} if it names none
      },
      "intervals": {
        "level": 0.95, "draws": 1000, "seed": 0,
        "over": "groups" | "images", "units": 1500,
        "in_words": "95% intervals from 1,000 bootstrap draws of 1,500 groups."
      },
      "scores": {                           # numbers with interval; single-label:
        "accuracy", "balanced_accuracy", "macro_f1", "kappa", "macro_jaccard",
        "macro_auroc", "mean_average_precision", "top_2_accuracy", "top_3_accuracy", "top_5_accuracy"   # k < K only
                                            # multi-label:
        "mean_average_precision", "macro_auroc", "macro_f1", "micro_f1", "subset_accuracy", "hamming_loss"
      },
      "per_class": [                        # K, in class order
        {"class": "MEL", "support": 223, "predicted": 198,        # counts
         "precision", "recall", "f1", "jaccard", "auroc", "average_precision"}   # numbers with interval
      ],
      "confusion": [[...]] | null,          # K x K counts, row: true class, column: predicted; null for multi-label
      "calibration": {
        "temperature": {
          "value": 1.37 | null,             # what is saved in calibration.json; null: could not be fitted
          "fitted_on": "calibration" | "val" | "cross-fitted halves" | null,
          "images": 800,                    # how many images it was fitted on
          "halves": [1.35, 1.39] | null,    # cross-fitted: the temperature of each half
          "in_words": "One temperature, 1.37, fitted on ..."
        },
        "before": {                         # probabilities as in the file
          "nll", "brier", "ece", "adaptive_ece", "classwise_ece", "aurc",       # numbers with interval
          "mean_confidence": 0.81,
          "reliability": [                  # the 15 equal-width bins of the ECE; empty ones are left out
            {"low": 0.6, "high": 0.667, "images": 130, "confidence": 0.64, "accuracy": 0.71}
          ],
          "risk_coverage": [{"coverage": 0.005, "risk": 0.0}, ..., {"coverage": 1.0, "risk": 0.14}]   # at most 200
        },
        "after": {...} | null               # the same after the temperature; null when none could be fitted
      },
      "leak": {                             # from split.csv; null without one, or when it names no groups
        "images": 790, "share": 0.394,      # of the reported part, whose group is also in the training part
        "per_class": [{"class": "MEL", "images": 158, "share": 0.71}],   # [] for what is kept of a run
        "in_words": "790 of 2,003 images (39%) show a lesion or patient that the model was trained on."
      } | null,
      "correlation": {...} | null,          # of soft_labels.csv, see cclnet.evaluation.similarity.summary
      "mistakes": [                         # the most confident errors, worst first, at most 24; [] for multi-label
        {"image": "ISIC_0024", "label": "MEL", "predicted": "NV", "probability": 0.99, "probability_of_label": 0.01}
      ],
      "warnings": ["...", ...],             # what a reader must know, in whole sentences
      "versions": {"cclnet": ..., "numpy": ..., "scikit-learn": ..., "scipy": ...}
    }

correlation::

    {
      "matrix": [[...]],                    # K x K, row k the soft label of class k
      "softness": 0.41,                     # mean of the diagonal
      "collapse_softness": 0.5519 | null,   # where an overfitted dictionary ends; null for methods without one
      "uniform_smoothing": {"epsilon": 0.69, "distance_mean": 0.07, "distance_max": 0.12},   # total variation of rows
                                            # from uniform label smoothing of the same softness
      "per_class": [{"class": "MEL", "softness": 0.40, "most_alike": "NV", "weight": 0.13}],
      "most_alike_pairs": [{"a": "DF", "b": "VASC", "weight": 0.17}],          # softest first, at most 10
      "rarity_agreement": 0.84 | null,      # Spearman of the off-diagonal with class rarity; null without class counts
      "confusion_agreement": 0.31 | null    # Spearman of the off-diagonal with how often the model confused the pair
    }
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from cclnet.evaluation import calibration
from cclnet.evaluation import similarity as correlation
from cclnet.evaluation.bootstrap import LEVEL, Units, bootstrap, interval, units_of, units_with
from cclnet.evaluation.calibration import SMALLEST, calibrate, fitting_split
from cclnet.evaluation.metrics import PER_CLASS, confusion, decision_statistic, decisions, ranking_statistic, score
from cclnet.files import make_folder
from cclnet.runs.folder import OpenedRun, RunFolder, open_run
from cclnet.runs.model import Calibration, FittedTemperature
from cclnet.runs.predictions import Floats, Integers, Predictions
from cclnet.runs.provenance import package_versions

# What scores.json and comparison.json say alike: numbers with intervals, the part, the draws, the versions.


def number(
    value: float,
    drawn: Floats,
    units: Units,
    bounds: tuple[float, float] = (0.0, 1.0),
    trials: int | None = None,
    biased: bool = False,
) -> dict[str, float | None]:
    """A number with interval, null where undefined."""
    low, high = interval(value, drawn, units.count, bounds, trials, biased=biased)
    return {name: None if math.isnan(x) else float(x) for name, x in (("value", value), ("low", low), ("high", high))}


def split_summary(predictions: Predictions, part: str) -> dict[str, Any]:
    """The "split" of scores.json and comparison.json."""
    reported = predictions.of_split(part)
    units = units_of(reported)
    counts = reported.class_counts
    of_parts = {"all": len(predictions)}
    if predictions.splits is not None:
        names, sizes = np.unique(predictions.splits, return_counts=True)
        of_parts = dict(zip(names.tolist(), sizes.tolist(), strict=True))
    return {
        "name": part,
        "images": len(reported),
        "groups": units.count if units.kind == "groups" else None,
        "class_counts": counts.tolist(),
        "missing_classes": [name for name, count in zip(reported.classes, counts, strict=True) if count == 0],
        "images_of_splits": of_parts,
    }


def intervals_of(units: Units, draws: int, seed: int) -> dict[str, Any]:
    """The "intervals" of scores.json and comparison.json."""
    words = f"{LEVEL:.0%} intervals from {draws:,} bootstrap draws of {units.count:,} {units.kind}."
    if units.kind == "images":
        words += " No groups are known: images of one lesion or patient would make these intervals too narrow."
    return {"level": LEVEL, "draws": draws, "seed": seed, "over": units.kind, "units": units.count, "in_words": words}


def versions() -> dict[str, str]:
    return package_versions(("numpy", "scikit-learn", "scipy", "pandas"))


# What a reader of scores must know before believing them, in whole sentences.


FEW_UNITS = 10  # a class on fewer groups (or images) than this has no interval worth the name


def cautions(judged: dict[str, Any], reported: Predictions, units: Units, fitting: Predictions | None) -> list[str]:
    """The "warnings" of a judgement; ``fitting`` is what the temperature was fitted on, None when cross-fitted."""
    part, found = judged["split"], []
    if part["name"] == "all" and reported.splits is not None:
        found.append("The file names no part 'test' or 'val', so all of its images are reported.")
    if missing := part["missing_classes"]:
        found.append(f"No image of {', '.join(missing)} in the reported part: left out of every macro mean.")
        taken = sum(row["predicted"] for row in judged["per_class"] if row["class"] in missing)
        if taken and not reported.multilabel:
            found.append(f"The model took {_images(taken)} for a class that is not in the reported part.")
    behind = dict(zip(reported.classes, units_with(reported.targets == 1, units).tolist(), strict=True))
    if few := [f"{name} ({count})" for name, count in behind.items() if 0 < count < FEW_UNITS]:
        found.append(
            f"Fewer than {FEW_UNITS} {units.kind} of {', '.join(few)}: its own scores, and macro means through it, can "
            "move further than their intervals say."
        )
    if undefined := [name for name, x in judged["scores"].items() if x["value"] is None]:
        found.append(f"Undefined on these images: {', '.join(undefined)}.")
    if judged["leak"] and judged["leak"]["images"]:
        found.append(judged["leak"]["in_words"] + " Scores on new patients will be lower.")
    if fitting is not None and reported.groups is not None and fitting.groups is not None:
        shared = int(np.isin(reported.groups, fitting.groups[fitting.groups != ""]).sum())
        if shared:
            found.append(f"The temperature was fitted on groups that are reported as well ({_images(shared)}).")
    impossible = int((reported.probabilities[reported.targets == 1] == 0).sum())
    if impossible:
        found.append(f"The true class had probability 0 on {_images(impossible)}; the nll counts it as {SMALLEST:.1g}.")
    follows = (judged["correlation"] or {}).get("rarity_agreement")
    if follows is not None and follows >= 0.7:
        found.append(
            f"The learned matrix mostly follows how rare the classes are (rank correlation {follows:.2f}), which says "
            "little about how alike they look."
        )
    return found


def _images(count: int) -> str:
    return f"{count:,} image{'' if count == 1 else 's'}"


MISTAKES = 24
PROPORTIONS = ("accuracy", "top_2_accuracy", "top_3_accuracy", "top_5_accuracy", "subset_accuracy", "hamming_loss")


def evaluate(run: str | Path, out: str | Path | None = None, draws: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Judge a run folder or a predictions.csv; see above for what comes back.

    A run folder gets its scores.json and its calibration.json. Where ``out`` names another folder, that gets
    scores.json, with the temperature in it, and the run is left alone. For a file alone nothing is written without
    ``out``. ``draws`` bootstrap draws, from ``seed``: the same call gives the same numbers.
    """
    opened = open_run(run)
    reported = opened.predictions.of_split(opened.split)
    units = units_of(reported)
    fit_on = fitting_split(opened.predictions, opened.split)
    fitting = opened.predictions.of_split(fit_on) if fit_on else reported
    temperature = calibrate(reported, fit_on, fitting, units, seed)
    stages = [p for p in (reported, temperature.after) if p is not None]
    statistics = [decision_statistic(reported), ranking_statistic(reported)]
    statistics += [calibration.calibration_statistic(stage) for stage in stages]
    decided, ranked, *calibrated = bootstrap(statistics, units, draws, seed)
    values, table = score(reported)
    before, *after = (_stage(p, drawn, units) for p, drawn in zip(stages, calibrated, strict=True))
    counts = None if reported.multilabel else confusion(reported)
    judged = {
        "format": 1,
        "kind": "scores",
        "name": opened.name,
        "model": None if opened.model is None else opened.model.to_json(),
        "task": "multi-label" if reported.multilabel else "single-label",
        "classes": list(reported.classes),
        "split": split_summary(opened.predictions, opened.split),
        "intervals": intervals_of(units, draws, seed),
        "scores": _headline(values, decided | ranked, units),
        "per_class": _per_class(reported, table, decided | ranked, units),
        "confusion": None if counts is None else counts.tolist(),
        "calibration": {
            "temperature": {
                "value": temperature.value,
                "fitted_on": temperature.fitted_on,
                "images": temperature.images,
                "halves": temperature.halves and list(temperature.halves),
                "in_words": temperature.in_words,
            },
            "before": before,
            "after": after[0] if after else None,
        },
        "leak": opened.leak(),
        "correlation": _correlation(opened, counts),
        "mistakes": _mistakes(reported),
        "warnings": [],
        "versions": versions(),
    }
    judged["warnings"] = cautions(judged, reported, units, fitting if fit_on else None)
    folder = opened.folder if out is None else RunFolder(out)
    if folder is not None:
        make_folder(folder.path)
        if opened.folder is not None and folder.path.samefile(opened.folder.path):
            fitted = FittedTemperature(temperature.value, temperature.fitted_on, temperature.images, temperature.halves)
            folder.write_calibration(Calibration(fitted))
        folder.write_scores(judged)
    return judged


def _headline(values: dict[str, float], drawn: dict[str, Floats], units: Units) -> dict[str, Any]:
    return {
        name: number(
            value,
            drawn[name],
            units,
            (-1.0, 1.0) if name == "kappa" else (0.0, 1.0),
            units.count if name in PROPORTIONS else None,
        )
        for name, value in values.items()
    }


def _per_class(
    reported: Predictions, table: dict[str, Floats], drawn: dict[str, Floats], units: Units
) -> list[dict[str, Any]]:
    predicted = decisions(reported)
    chosen = predicted == 1 if reported.multilabel else predicted[:, None] == np.arange(reported.num_classes)
    trials = {"recall": units_with(reported.targets == 1, units), "precision": units_with(chosen, units)}
    rows = []
    for k, name in enumerate(reported.classes):
        scores = {
            key: number(
                float(table[key][k]),
                drawn[key][:, k],
                units,
                trials=int(trials[key][k]) if key in trials else None,
            )
            for key in PER_CLASS
        }
        counts = {"support": int(table["support"][k]), "predicted": int(table["predicted"][k])}
        rows.append({"class": name, **counts, **scores})
    return rows


def _stage(predictions: Predictions, drawn: dict[str, Floats], units: Units) -> dict[str, Any]:
    """The calibration of probabilities before or after the temperature."""
    bounds = {"nll": (0.0, math.inf), "brier": (0.0, 1.0 if predictions.multilabel else 2.0)}
    values = calibration.measure(predictions)
    numbers = {
        name: number(value, drawn[name], units, bounds.get(name, (0.0, 1.0)), biased=name in calibration.BIASED)
        for name, value in values.items()
    }
    return numbers | {
        "mean_confidence": float(calibration.confidences(predictions)[0].mean()),
        "reliability": calibration.reliability(predictions),
        "risk_coverage": calibration.risk_coverage(predictions),
    }


def _correlation(run: OpenedRun, counts: Integers | None) -> dict[str, Any] | None:
    if run.soft_labels is None:
        return None
    model = run.model
    known = model is not None and model.classes == run.predictions.classes
    return correlation.summary(
        run.predictions.classes,
        run.soft_labels,
        None if model is None else model.collapse_softness,
        model.class_counts if model is not None and known else None,
        counts,
    )


def _mistakes(reported: Predictions) -> list[dict[str, Any]]:
    if reported.multilabel:
        return []
    predicted, p = decisions(reported), reported.probabilities
    wrong = np.flatnonzero(predicted != reported.labels)
    worst = wrong[np.argsort(-p[wrong, predicted[wrong]], kind="stable")][:MISTAKES]
    return [
        {
            "image": str(reported.images[i]),
            "label": reported.classes[reported.labels[i]],
            "predicted": reported.classes[predicted[i]],
            "probability": float(p[i, predicted[i]]),
            "probability_of_label": float(p[i, reported.labels[i]]),
        }
        for i in worst
    ]
