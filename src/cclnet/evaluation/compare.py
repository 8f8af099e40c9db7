"""Compare runs on the same images: differences with intervals, tests, and a verdict in plain words.

``compare(runs)`` takes run folders or predictions.csv files, as a list (grouped into methods by what their
model.json says; the seeds of one method differ) or as a dict of lists under a method's name, and returns the
dict below. Runs that differ in images, labels or classes are refused, all at once.

comparison.json::

    {
      "format": 1,
      "kind": "comparison",
      "task": "single-label" | "multi-label",
      "classes": [...], "part": {...}, "intervals": {...},    # as in scores.json (cclnet.evaluation.judge)
      "primary": "accuracy",                # the score that the overall verdicts speak of
      "metrics": [                          # what is compared, in order
        {"name": "accuracy", "higher_is_better": true}, ..., {"name": "nll", "higher_is_better": false}
      ],                                    # last "nll_calibrated", "ece_calibrated": after each run's own temperature
      "methods": [
        {
          "name": "ccl, resnet18",
          "runs": [{"name": "ccl-0", "path": "runs/ccl-0", "seed": 0 | null}],
          "scores": {"accuracy": {"mean": 0.86, "sd": 0.004 | null, "low": 0.84, "high": 0.88, "values": [0.861, ...]}}
        }                                   # low, high: of the mean, over seeds and images (one seed: images alone)
      ],
      "comparisons": [                      # every pair of methods, or each method against the one asked for
        {
          "a": "ccl, resnet18", "b": "hard, resnet18",
          "seeds": {"a": 5, "b": 5, "paired": true},
          "in_words": "5 seeds each, paired by seed.",
          "metrics": {
            "accuracy": {
              "difference": 0.021,          # a - b, mean over seeds
              "low": 0.006, "high": 0.036,  # 95%, over seeds and images both; decides with "p"
              "p": 0.012, "p_holm": 0.036,  # Holm over the comparisons of this metric
              "evidence": true,             # p_holm < 0.05, and more than one seed each
              "better": "a" | "b" | null,   # who, when there is evidence
              "seed_differences": [...] | null,          # paired seeds only
              "effect_size": 1.9 | null,                 # Cohen's d_z over seeds (d for unpaired); null for one seed
              "bootstrap": {"low": 0.004, "high": 0.038, "p": 0.004},    # over seeds, then groups: percentiles
              "permutation": {"p": 0.0625, "smallest_possible": 0.0625, "arrangements": 32, "in_words": "..."} | null,
              "verdict": "ccl, resnet18 is better by 2.1 points [0.6, 3.6]."
            }
          },
          "mcnemar": {"only_a_right": 30, "only_b_right": 12, "p": 0.008, "in_words": "..."} | null,   # one seed each
          "verdict": "..."                  # of the primary score, and what the others say
        }
      ],
      "correlation": {                      # null unless at least two runs have a correlation.csv
        "runs": ["ccl-0", "ccl-1"], "agreement": [[1.0, 0.94], [0.94, 1.0]],   # Spearman of the off-diagonals
        "mean_agreement": 0.94, "matrices": [[[...]], ...]        # row k: the soft label of class k
      } | null,
      "warnings": [...],
      "versions": {...}
    }
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cclnet.errors import unknown
from cclnet.evaluation import statistics
from cclnet.evaluation.bootstrap import Units, bootstrap, interval, units_of
from cclnet.evaluation.calibration import calibration_statistic, measure
from cclnet.evaluation.correlation import agreement
from cclnet.evaluation.describe import intervals_of, part_of, versions
from cclnet.evaluation.grouping import Group, line_up, open_groups
from cclnet.evaluation.runs import Run
from cclnet.evaluation.scores import decisions, score
from cclnet.evaluation.temperature import calibrate, fitting_part
from cclnet.evaluation.verdict import LOWER_IS_BETTER, overall, permutation_in_words, seeds_in_words, verdict
from cclnet.evaluation.weighted import decision_statistic, ranking_statistic
from cclnet.predictions import Floats, Predictions

SINGLE_LABEL = ("accuracy", "balanced_accuracy", "macro_f1", "kappa", "macro_jaccard", "macro_auroc",
                "mean_average_precision")  # fmt: skip
MULTI_LABEL = ("mean_average_precision", "macro_auroc", "macro_f1", "micro_f1", "subset_accuracy", "hamming_loss")
CALIBRATION = ("nll", "brier", "ece")
AFTER = ("nll_calibrated", "ece_calibrated")
BIASED = ("ece", "ece_calibrated")
RANGES = {"kappa": (-1.0, 1.0), "nll": (0.0, math.inf), "nll_calibrated": (0.0, math.inf), "brier": (0.0, 2.0)}

Scores = dict[str, tuple[Floats, Floats]]  # metric -> values of each run [S], their draws [S, D]


def compare(
    runs: Sequence[str | Path] | Mapping[str, Sequence[str | Path]],
    against: str | None = None,
    primary: str | None = None,
    draws: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Compare runs; see above for what comes in and out. Nothing is written.

    ``against`` names the method that every other one is compared with (none: every pair); ``primary`` the score that
    the overall verdicts speak of (none: accuracy, or mean average precision for several labels).
    """
    groups, warnings = open_groups(runs)
    opened = [run for group in groups for run in group.runs]
    lined = line_up(opened)
    units = units_of(lined[0])
    scored = _scores(opened, lined, units, draws, seed, warnings)
    metrics = list(scored)
    if primary is not None and primary not in metrics:
        raise unknown("score", primary, metrics)
    primary = primary or metrics[0]
    ends = np.cumsum([0, *(len(group.runs) for group in groups)])
    of_group = [{m: (v[i:j], d[i:j]) for m, (v, d) in scored.items()} for i, j in itertools.pairwise(ends)]
    right = [decisions(p) == p.labels for p in lined]
    comparisons = []
    for i, j in _pairs([group.name for group in groups], against):
        found = _compare_two(groups[i], groups[j], of_group[i], of_group[j], units, seed)
        if found["seeds"]["a"] == found["seeds"]["b"] == 1 and not lined[0].multilabel:
            found["mcnemar"] = _mcnemar(right[ends[i]], right[ends[j]], found, units)
        comparisons.append(found)
    _decide(comparisons, metrics, primary)
    if any(min(c["seeds"]["a"], c["seeds"]["b"]) == 1 for c in comparisons):
        warnings.append("A method with one seed is judged as one model only; train at least five to compare methods.")
    return {
        "format": 1,
        "kind": "comparison",
        "task": "multi-label" if lined[0].multilabel else "single-label",
        "classes": list(lined[0].classes),
        "part": part_of(opened[0].predictions, opened[0].part),
        "intervals": intervals_of(units, draws, seed),
        "primary": primary,
        "metrics": [{"name": m, "higher_is_better": m not in LOWER_IS_BETTER} for m in metrics],
        "methods": [_method(group, own, units) for group, own in zip(groups, of_group, strict=True)],
        "comparisons": comparisons,
        "correlation": _correlation(opened),
        "warnings": warnings,
        "versions": versions(),
    }


def compared_scores(multilabel: bool) -> tuple[str, ...]:
    """What is compared; those after temperature where one can be fitted."""
    return (*(MULTI_LABEL if multilabel else SINGLE_LABEL), *CALIBRATION, *AFTER)


def _scores(
    runs: Sequence[Run], lined: Sequence[Predictions], units: Units, draws: int, seed: int, warnings: list[str]
) -> Scores:
    """Every compared score of every run, and in every draw of units; the draws are the same for all runs."""
    found = [_score_run(run, reported, units, draws, seed) for run, reported in zip(runs, lined, strict=True)]
    metrics = list(compared_scores(lined[0].multilabel))
    if missing := [run.name for run, own in zip(runs, found, strict=True) if AFTER[0] not in own]:
        warnings.append(f"No temperature could be fitted for {', '.join(missing)}: no scores after temperature.")
        metrics = [name for name in metrics if name not in AFTER]
    return {m: (np.array([own[m][0] for own in found]), np.stack([own[m][1] for own in found])) for m in metrics}


def _score_run(run: Run, reported: Predictions, units: Units, draws: int, seed: int) -> dict[str, tuple[float, Floats]]:
    """The scores of one run and their draws [D]; those after temperature only where one could be fitted."""
    part = fitting_part(run.predictions, run.part)
    fitting = run.predictions.of_part(part) if part else reported
    after = calibrate(reported, part, fitting, units, seed).after
    statistics_of = [decision_statistic(reported), ranking_statistic(reported), calibration_statistic(reported)]
    values = score(reported)[0] | measure(reported)
    if after is not None:
        statistics_of.append(calibration_statistic(after))
        values |= {f"{name}_calibrated": value for name, value in measure(after).items()}
    decided, ranked, before, *later = bootstrap(statistics_of, units, draws, seed)
    drawn = decided | ranked | before
    drawn |= {f"{name}_calibrated": own for part_draws in later for name, own in part_draws.items()}
    return {name: (value, drawn[name]) for name, value in values.items()}


def _pairs(names: list[str], against: str | None) -> list[tuple[int, int]]:
    if against is None:
        return list(itertools.combinations(range(len(names)), 2))
    if against not in names:
        raise unknown("method", against, names)
    reference = names.index(against)
    return [(i, reference) for i in range(len(names)) if i != reference]


def _compare_two(a: Group, b: Group, scores_a: Scores, scores_b: Scores, units: Units, seed: int) -> dict[str, Any]:
    paired = a.paired_with(b)
    count = (len(a.runs), len(b.runs))
    tests = {
        m: difference_test(*scores_a[m], *scores_b[m], paired, units, seed, m in BIASED, _largest_difference(m))
        for m in scores_a
    }
    return {
        "a": a.name,
        "b": b.name,
        "seeds": {"a": count[0], "b": count[1], "paired": paired and count[0] > 1},
        "in_words": seeds_in_words(*count, paired),
        "metrics": tests,
        "mcnemar": None,
        "verdict": "",
    }


def _largest_difference(metric: str) -> float:
    low, high = _range_of(metric)
    return high - low


def _range_of(metric: str) -> tuple[float, float]:
    return RANGES.get(metric, (0.0, 1.0))


def difference_test(
    a: Floats,
    draws_a: Floats,
    b: Floats,
    draws_b: Floats,
    paired: bool,
    units: Units,
    seed: int,
    biased: bool = False,
    largest: float = math.inf,
) -> dict[str, Any]:
    """Everything about one score of two methods but what depends on the other comparisons (Holm, verdict).

    ``biased``: calibration errors, of which one may lie further above the truth than the other; the difference counts
    as far as it stands with and without twice the bias that the draws show. ``largest``: beyond which no difference of
    two such scores can lie.
    """
    difference = float(a.mean() - b.mean())
    bias = 2 * float((draws_a.mean() - a.mean()) - (draws_b.mean() - b.mean())) if biased else 0.0
    ends = sorted((difference, difference - bias))
    nearest = ends[0] if ends[0] > 0 else min(ends[1], 0.0)  # to zero, of all that lies between the ends
    spreads = [statistics.over_images(draws_a.mean(axis=0) - draws_b.mean(axis=0), units.count)]
    several = min(len(a), len(b)) > 1
    if several:
        spreads.append(statistics.over_seeds(a - b) if paired else statistics.over_seeds_unpaired(a, b))
    reach = statistics.reach(spreads)
    mixed = statistics.hierarchical_draws(draws_a, draws_b, paired, seed)
    low, high, p = statistics.percentile_interval(mixed)
    permutation = None
    if several and math.isfinite(difference):
        test = statistics.permutation_test(a - b) if paired else statistics.permutation_test_unpaired(a, b)
        words = permutation_in_words(test[0], test[1], len(a) if paired else len(a) + len(b), paired)
        permutation = dict(zip(("p", "smallest_possible", "arrangements", "in_words"), (*test, words), strict=True))
    return {
        "difference": _null(difference),
        "low": _null(float(np.clip(ends[0] - reach, -largest, largest))),
        "high": _null(float(np.clip(ends[1] + reach, -largest, largest))),
        "p": _null(statistics.p_value(nearest, spreads)),
        "p_holm": None,
        "evidence": False,
        "better": None,
        "seed_differences": [_null(x) for x in (a - b).tolist()] if paired and several else None,
        "effect_size": _null(statistics.effect_size(a, b, paired)),
        "bootstrap": {"low": _null(low), "high": _null(high), "p": _null(p)},
        "permutation": permutation,
        "verdict": "",
    }


def _decide(comparisons: list[dict[str, Any]], metrics: list[str], primary: str) -> None:
    """Correct p over the comparisons of each score, and say in words what follows."""
    for metric in metrics:
        tests = [c["metrics"][metric] for c in comparisons]
        corrected = statistics.holm([math.nan if t["p"] is None else t["p"] for t in tests])
        for comparison, test, p in zip(comparisons, tests, corrected, strict=True):
            seeds = (comparison["seeds"]["a"], comparison["seeds"]["b"])
            test["p_holm"] = _null(p)
            test["evidence"] = min(seeds) > 1 and p < 0.05
            if test["evidence"]:
                test["better"] = "a" if (test["difference"] > 0) == (metric not in LOWER_IS_BETTER) else "b"
            test["verdict"] = verdict(metric, comparison["a"], comparison["b"], test, seeds)
    for comparison in comparisons:
        comparison["verdict"] = overall(primary, comparison)


def _mcnemar(right_a: Any, right_b: Any, comparison: Mapping[str, Any], units: Units) -> dict[str, Any]:
    found = statistics.mcnemar(right_a, right_b)
    words = (
        f"{found['only_a_right']:,} images only {comparison['a']} got right, {found['only_b_right']:,} only "
        f"{comparison['b']}: p = {found['p']:.3g} ({found.pop('kind')})."
    )
    if units.kind == "groups":
        words += " The test takes images for independent, which those of one group are not: trust the interval instead."
    return found | {"in_words": words}


def _method(group: Group, scores: Scores, units: Units) -> dict[str, Any]:
    return {
        "name": group.name,
        "runs": [{"name": run.name, "path": str(run.path), "seed": run.seed} for run in group.runs],
        "scores": {m: _mean_score(m, values, draws, units) for m, (values, draws) in scores.items()},
    }


def _mean_score(metric: str, values: Floats, draws: Floats, units: Units) -> dict[str, Any]:
    mean, bounds = float(values.mean()), _range_of(metric)
    if len(values) == 1:
        trials = units.count if metric == "accuracy" else None
        low, high = interval(mean, draws[0], units.count, bounds, trials, biased=metric in BIASED)
    else:
        spreads = [statistics.over_seeds(values), statistics.over_images(draws.mean(axis=0), units.count)]
        reach = statistics.reach(spreads)
        bias = max(float(draws.mean()) - mean, 0.0) if metric in BIASED else 0.0
        ends = (mean - 2 * bias - reach, max(mean, mean - bias + reach))
        low, high = (float(np.clip(end, *bounds)) for end in ends)
    return {
        "mean": _null(mean),
        "sd": _null(float(values.std(ddof=1))) if len(values) > 1 else None,
        "low": _null(low),
        "high": _null(high),
        "values": [_null(x) for x in values.tolist()],
    }


def _correlation(runs: Sequence[Run]) -> dict[str, Any] | None:
    learned = [run for run in runs if run.correlation is not None]
    if len(learned) < 2:
        return None
    classes = learned[0].predictions.classes
    matrices = []
    for run in learned:
        order = [run.predictions.classes.index(name) for name in classes]
        matrices.append(np.asarray(run.correlation)[np.ix_(order, order)])
    table = np.array([[agreement(a, b) for b in matrices] for a in matrices])
    between = table[np.triu_indices(len(learned), 1)]
    known = np.isfinite(between)
    return {
        "runs": [run.name for run in learned],
        "agreement": [[_null(x) for x in row] for row in table.tolist()],
        "mean_agreement": float(between[known].mean()) if known.any() else None,
        "matrices": [matrix.tolist() for matrix in matrices],
    }


def _null(value: float) -> float | None:
    return value if math.isfinite(value) else None
