"""Compare runs on the same images: differences with intervals, tests, and a verdict in plain words.

``compare(runs)`` takes run folders or predictions.csv files, as a list (grouped into methods by what their
model.json says; the seeds of one method differ) or as a dict of lists under a method's name, and returns the
dict below. Runs that differ in images, labels or classes are refused, all at once.

comparison.json::

    {
      "format": 1,
      "kind": "comparison",
      "task": "single-label" | "multi-label",
      "classes": [...], "split": {...}, "intervals": {...},    # as in scores.json (cclnet.evaluation.evaluate)
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
      "correlation": {                      # null unless at least two runs have a soft_labels.csv
        "runs": ["ccl-0", "ccl-1"], "agreement": [[1.0, 0.94], [0.94, 1.0]],   # Spearman of the off-diagonals
        "mean_agreement": 0.94, "matrices": [[[...]], ...]        # row k: the soft label of class k
      } | null,
      "warnings": [...],
      "versions": {...}
    }
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cclnet.errors import InputError, unknown
from cclnet.evaluation import statistics
from cclnet.evaluation.bootstrap import Units, bootstrap, interval, units_of
from cclnet.evaluation.calibration import calibrate, calibration_statistic, fitting_split, measure
from cclnet.evaluation.evaluate import intervals_of, split_summary, versions
from cclnet.evaluation.metrics import decision_statistic, decisions, ranking_statistic, score
from cclnet.evaluation.similarity import agreement
from cclnet.runs.folder import OpenedRun, open_run
from cclnet.runs.predictions import Floats, Predictions

# Which runs are seeds of one method, and all runs in one order of images: what a comparison starts from.


OF_THE_METHOD = ("method", "method_settings", "backbone", "lr_ccl")


@dataclass(frozen=True)
class Group:
    """The runs of one method, in the order of their seeds where these are known."""

    name: str
    runs: tuple[OpenedRun, ...]

    @property
    def seeds(self) -> tuple[int | None, ...]:
        return tuple(run.seed for run in self.runs)

    def paired_with(self, other: Group) -> bool:
        """Whether both have the same seeds, each once."""
        known = None not in self.seeds and len(set(self.seeds)) == len(self.seeds)
        return known and self.seeds == other.seeds


def open_groups(runs: Sequence[str | Path] | Mapping[str, Sequence[str | Path]]) -> tuple[list[Group], list[str]]:
    """Open runs and group them: as named in a dict, else by method, its settings and backbone in model.json; a run
    without a model.json stands alone. Also what to beware of."""
    if isinstance(runs, Mapping):
        opened = {name: [open_run(path) for path in paths] for name, paths in runs.items()}
        if empty := [name for name, members in opened.items() if not members]:
            raise InputError(f"no run of {', '.join(empty)}: give every method at least one run.")
        names = _unique_names([run for members in opened.values() for run in members])
        groups = [_group(name, [names[id(run)] for run in members]) for name, members in opened.items()]
        warnings: list[str] = []
    else:
        found = [open_run(path) for path in runs]
        names = _unique_names(found)
        groups, warnings = _by_model(list(names.values()))
    if not groups:
        raise InputError("nothing to compare: give run folders or predictions.csv files.")
    warnings += [words for group in groups for words in _setting_warnings(group)]
    return groups, warnings + _differences_beside_the_method(groups)


def _unique_names(runs: list[OpenedRun]) -> dict[int, OpenedRun]:
    """Runs by identity, those of equal name under their path instead; a path given twice is refused."""
    paths = Counter(run.path.resolve() for run in runs)
    if doubled := [str(path) for path, count in paths.items() if count > 1]:
        raise InputError(f"given more than once: {', '.join(doubled)}. A run can stand for one seed only.")
    names = Counter(run.name for run in runs)
    return {id(run): run if names[run.name] == 1 else replace(run, name=str(run.path)) for run in runs}


def _group(name: str, runs: Sequence[OpenedRun]) -> Group:
    known = all(run.seed is not None for run in runs)
    return Group(name, tuple(sorted(runs, key=lambda run: run.seed or 0) if known else runs))


def _by_model(runs: list[OpenedRun]) -> tuple[list[Group], list[str]]:
    alike: dict[str, list[OpenedRun]] = {}
    for run in runs:
        model = run.model
        known = model is not None and model.method
        kind = [model.method, model.method_settings, model.backbone] if model is not None else []
        key = json.dumps(kind, sort_keys=True) if known else f"alone: {run.name}"
        alike.setdefault(key, []).append(run)
    groups: list[Group] = []
    warnings = []
    several_backbones = len({run.model.backbone for run in runs if run.model}) > 1
    shared = Counter(_name(members[0], several_backbones) for members in alike.values())
    for members in alike.values():
        repeated = [str(seed) for seed, count in Counter(run.seed for run in members).items() if count > 1]
        if repeated:  # the same seed twice is no repetition: something else was changed
            warnings.append(
                f"{', '.join(run.name for run in members)} are of one method and backbone but repeat seed "
                f"{', '.join(repeated)}: each stands for itself. If some are seeds of one method all the same, "
                "give these alone, each seed once, or name the groups in Python: "
                "cclnet.evaluation.compare.compare({name: [run, ...], ...})."
            )
            groups += [_group(run.name, [run]) for run in members]
        else:
            name = _name(members[0], several_backbones)
            if shared[name] > 1:
                name = _name(members[0], several_backbones, with_settings=True)
            groups.append(_group(name, members))
    return groups, warnings


def _name(run: OpenedRun, with_backbone: bool, with_settings: bool = False) -> str:
    """Its method, and of what else tells it from the others as much as is needed."""
    if run.model is None or not run.model.method:
        return run.name
    settings = ", ".join(f"{name}={value}" for name, value in run.model.method_settings.items())
    name = f"{run.model.method} ({settings or 'defaults'})" if with_settings else run.model.method
    return f"{name}, {run.model.backbone}" if with_backbone else name


def _setting_warnings(group: Group) -> list[str]:
    """Runs counted as seeds of one method that were not trained alike."""
    settings = [run.settings() for run in group.runs]
    known = [s for s in settings if s]
    names = {name for s in known for name in s}
    differing = sorted(name for name in names if len({json.dumps(s.get(name), default=str) for s in known}) > 1)
    if not differing:
        return []
    return [f"The runs of {group.name} are counted as seeds of one method but differ in {', '.join(differing)}."]


def _differences_beside_the_method(groups: Sequence[Group]) -> list[str]:
    """Settings, other than those of the method and the backbone, in which methods were trained differently."""
    known = {group.name: settings for group in groups if (settings := group.runs[0].settings())}
    names = set.intersection(*map(set, known.values())) if known else set()
    shown = []
    for name in sorted(name for name in names if name.partition(".")[0] not in OF_THE_METHOD):
        values = {group: settings[name] for group, settings in known.items()}
        if len({json.dumps(value, default=str) for value in values.values()}) > 1:
            shown.append(f"{name} ({', '.join(f'{group}: {value}' for group, value in values.items())})")
    if not shown:
        return []
    return [f"Not only the methods differ, so a difference may not be theirs: {'; '.join(shown)}."]


def line_up(runs: Sequence[OpenedRun]) -> list[Predictions]:
    """The reported predictions of every run, images and classes in the order of the first. Runs that are not about
    the same images, labels, classes and groups are refused, all in one error."""
    first = runs[0].predictions.of_split(runs[0].split)
    order = np.argsort(first.images)
    lined, problems = [], []
    for run in runs:
        own = run.predictions.of_split(run.split)
        found = _differences(first, own, runs[0].name)
        if found:
            problems.append(f"{run.name} ({run.split}, {len(own):,} images): {'; '.join(found)}.")
            continue
        place = np.empty(len(own), np.intp)
        place[order] = np.argsort(own.images)
        lined.append(_in_class_order(own.select(place), first.classes))
    if not problems:
        labels = [(run, int((p.labels != first.labels).reshape(len(p), -1).any(axis=1).sum()))
                  for run, p in zip(runs, lined, strict=True)]  # fmt: skip
        problems = [f"{run.name}: other labels than {runs[0].name} for {n:,} images." for run, n in labels if n]
        problems += _group_problems(runs, lined)
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise InputError(
            f"these runs cannot be compared, they are not about the same thing:{listed}\n"
            "Train them on one split (the split.csv of one run serves for all)."
        )
    groups = next((p.groups for p in lined if p.groups is not None), None)
    return [replace(p, groups=groups) for p in lined]


def _differences(first: Predictions, own: Predictions, name: str) -> list[str]:
    found = []
    if own.multilabel != first.multilabel:
        kinds = {True: "several labels", False: "one label"}
        found.append(f"{kinds[own.multilabel]} an image, where {name} has {kinds[first.multilabel]}")
    for words, ours, theirs in (("class", own.classes, first.classes), ("image", own.images, first.images)):
        extra, missing = np.setdiff1d(ours, theirs), np.setdiff1d(theirs, ours)
        if len(extra):
            found.append(f"{_some(extra, words)} that {name} does not have")
        if len(missing):
            found.append(f"without {_some(missing, words)} of {name}")
    return found


def _some(names: np.typing.NDArray[np.str_], what: str) -> str:
    plural = {"class": "classes", "image": "images"}[what]
    shown = ", ".join(names[:3].tolist()) + (", ..." if len(names) > 3 else "")
    return f"{len(names):,} {what if len(names) == 1 else plural} ({shown})"


def _in_class_order(predictions: Predictions, classes: tuple[str, ...]) -> Predictions:
    order = np.array([predictions.classes.index(name) for name in classes])
    labels = predictions.labels[:, order] if predictions.multilabel else np.argsort(order)[predictions.labels]
    return replace(predictions, labels=labels, probabilities=predictions.probabilities[:, order], classes=classes)


def _group_problems(runs: Sequence[OpenedRun], lined: Sequence[Predictions]) -> list[str]:
    known = [(run, p.groups) for run, p in zip(runs, lined, strict=True) if p.groups is not None]
    problems = []
    for run, groups in known[1:]:
        differing = int((groups != known[0][1]).sum())
        if differing:
            problems.append(f"{run.name}: other groups than {known[0][0].name} for {differing:,} images.")
    return problems


# A comparison in plain words.


LOWER_IS_BETTER = ("nll", "brier", "ece", "nll_calibrated", "ece_calibrated", "hamming_loss")
IN_OWN_UNITS = ("nll", "nll_calibrated", "brier")  # everything else reads as points of a hundred
FEW_SEEDS = 5


def title(metric: str) -> str:
    """The name of a score in a sentence.

    >>> title("macro_f1"), title("ece_calibrated")
    ('macro F1', 'ECE after temperature')
    """
    words = metric.replace("_calibrated", " after temperature").replace("_", " ")
    for plain, written in (("f1", "F1"), ("nll", "NLL"), ("ece", "ECE"), ("auroc", "AUROC"), ("jaccard", "Jaccard"),
                           ("brier", "Brier score")):  # fmt: skip
        words = words.replace(plain, written)
    return words


def amount(metric: str, value: float) -> str:
    """A difference as a reader says it.

    >>> amount("accuracy", 0.0214), amount("nll", 0.0214), amount("accuracy", -0.0004)
    ('2.1 points', '0.021', '0.0 points')
    """
    return _number(metric, value) + ("" if metric in IN_OWN_UNITS else " points")


def _number(metric: str, value: float) -> str:
    scale, digits = (1, 3) if metric in IN_OWN_UNITS else (100, 1)
    text = f"{scale * value:.{digits}f}"
    return text if float(text) else text.lstrip("-")  # nothing has no sign


def _range(metric: str, low: float, high: float) -> str:
    return "" if math.isnan(low + high) else f" [{_number(metric, low)}, {_number(metric, high)}]"


def seeds_in_words(a: int, b: int, paired: bool) -> str:
    """How many seeds stand behind a comparison, and whether that is enough for a claim.

    >>> seeds_in_words(5, 5, True)
    '5 seeds each, paired by seed.'
    """
    if min(a, b) == 1:
        count = "One seed each" if a == b else f"{a} and {b} seeds"
        return f"{count}: too few to say anything about the methods, only about these models."
    count = f"{a} seeds each" if a == b else f"{a} and {b} seeds"
    words = f"{count}, {'paired by seed' if paired else 'not paired'}."
    if min(a, b) < FEW_SEEDS:
        words += f" Fewer than {FEW_SEEDS} are few: only large differences can be told from luck."
    return words


def permutation_in_words(p: float, smallest: float, seeds: int, paired: bool) -> str:
    """What the exact test over seeds says, and what it never can."""
    kind = "signs of the differences between seeds" if paired else "seeds between the methods"
    words = f"Exact permutation of the {kind}: p = {p:.4g}."
    if smallest > 0.05:
        words += f" With {seeds} seeds it cannot fall below {smallest:.4g}: alone it never shows a difference at .05."
    return words


def verdict(metric: str, a: str, b: str, test: Mapping[str, Any], seeds: tuple[int, int]) -> str:
    """One sentence on one score: who is better and by how much, or that nothing is known."""
    difference, low, high = (math.nan if test[key] is None else test[key] for key in ("difference", "low", "high"))
    if math.isnan(difference):
        return "Cannot be compared: undefined for at least one of the runs."
    ahead = (difference < 0) if metric in LOWER_IS_BETTER else (difference > 0)
    winner = a if ahead else b
    ends = sorted((math.copysign(1, difference) * low, math.copysign(1, difference) * high))
    by = f"better by {amount(metric, abs(difference))}{_range(metric, *ends)}"
    open_question = f"{a} minus {b} is {amount(metric, difference)}{_range(metric, low, high)}"
    if min(seeds) == 1:
        words = "One seed" + (" each" if seeds == (1, 1) else f" of {a if seeds[0] == 1 else b}")
        words += ": nothing can be said about the methods, only about these models: "
        distinct = test["p_holm"] is not None and test["p_holm"] < 0.05
        return words + (f"that of {winner} is {by}." if distinct else f"no evidence of a difference ({open_question}).")
    if test["evidence"]:
        return f"{winner} is {by}."
    if test["p"] is not None and test["p"] < 0.05:
        return f"No evidence of a difference once corrected for several comparisons: {open_question}."
    return f"No evidence of a difference: {open_question}."


def overall(primary: str, comparison: Mapping[str, Any]) -> str:
    """The verdict on the primary score and, for several seeds each, which other scores differ."""
    tests = comparison["metrics"]
    first = f"{title(primary)[0].upper()}{title(primary)[1:]}: {tests[primary]['verdict']}"
    if min(comparison["seeds"]["a"], comparison["seeds"]["b"]) == 1:
        return first
    others = [(title(m), comparison[t["better"]]) for m, t in tests.items() if m != primary and t["better"]]
    if others:
        listed = ", ".join(f"{name} ({winner} better)" for name, winner in others)
        return f"{first} Evidence of a difference in: {listed}."
    return f"{first} No evidence of a difference in any other score."


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
        "split": split_summary(opened[0].predictions, opened[0].split),
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
    runs: Sequence[OpenedRun], lined: Sequence[Predictions], units: Units, draws: int, seed: int, warnings: list[str]
) -> Scores:
    """Every compared score of every run, and in every draw of units; the draws are the same for all runs."""
    found = [_score_run(run, reported, units, draws, seed) for run, reported in zip(runs, lined, strict=True)]
    metrics = list(compared_scores(lined[0].multilabel))
    if missing := [run.name for run, own in zip(runs, found, strict=True) if AFTER[0] not in own]:
        warnings.append(f"No temperature could be fitted for {', '.join(missing)}: no scores after temperature.")
        metrics = [name for name in metrics if name not in AFTER]
    return {m: (np.array([own[m][0] for own in found]), np.stack([own[m][1] for own in found])) for m in metrics}


def _score_run(
    run: OpenedRun, reported: Predictions, units: Units, draws: int, seed: int
) -> dict[str, tuple[float, Floats]]:
    """The scores of one run and their draws [D]; those after temperature only where one could be fitted."""
    part = fitting_split(run.predictions, run.split)
    fitting = run.predictions.of_split(part) if part else reported
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


def _correlation(runs: Sequence[OpenedRun]) -> dict[str, Any] | None:
    learned = [run for run in runs if run.soft_labels is not None]
    if len(learned) < 2:
        return None
    classes = learned[0].predictions.classes
    matrices = []
    for run in learned:
        order = [run.predictions.classes.index(name) for name in classes]
        matrices.append(np.asarray(run.soft_labels)[np.ix_(order, order)])
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
