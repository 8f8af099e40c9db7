"""Compare runs on the same images: differences with intervals, tests, and verdicts in words.

``compare(runs)`` groups runs into methods, aligns their predictions, computes the compared metrics of the registry with
common bootstrap draws, and tests every pair of methods. comparison.json is ``Comparison.to_json()``: its keys are the
fields of the dataclasses below, undefined numbers are null.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from cclnet.errors import InputError, unknown
from cclnet.evaluation import statistics
from cclnet.evaluation.bootstrap import Units, interval, intervals_summary, units_of
from cclnet.evaluation.calibration import calibrate, fitting_split, kind_for
from cclnet.evaluation.classification import Bools, decisions
from cclnet.evaluation.evaluate import PACKAGES, split_summary
from cclnet.evaluation.metrics import (
    AFTER,
    Metric,
    Sample,
    Task,
    calibration_metrics,
    compared_metrics,
    compute,
    find,
    names_of_classes,
    task_of,
)
from cclnet.evaluation.similarity import agreement
from cclnet.runs.folder import OpenedRun, flattened, open_run
from cclnet.runs.predictions import Floats, Predictions, examples
from cclnet.runs.provenance import package_versions
from cclnet.runs.scores import FORMAT, Intervals, SplitSummary, check_kind, finite
from cclnet.schema import from_plain, rule, to_plain
from cclnet.settings import Settings

METHOD_SETTINGS = ("method", "method_settings", "backbone", "lr_ccl")  # may differ between methods
FEW_SEEDS = 5
ALPHA = 0.05  # p below it is evidence


@dataclass(frozen=True)
class ComparedMetric:
    """A metric that runs are compared by. "_calibrated" ends the name of those after each run's own calibration."""

    name: str
    higher_is_better: bool


@dataclass(frozen=True)
class RunReference:
    name: str
    path: str
    seed: int | None


@dataclass(frozen=True)
class MeanScore:
    """A metric of one method: mean and standard deviation over its seeds, the interval of the mean over seeds and
    images (one seed: over images), and the value of each seed."""

    mean: float | None
    sd: float | None
    low: float | None
    high: float | None
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class MethodScores:
    name: str
    runs: tuple[RunReference, ...]
    scores: dict[str, MeanScore]


@dataclass(frozen=True)
class SeedCounts:
    a: int
    b: int
    paired: bool


@dataclass(frozen=True)
class PercentileTest:
    """Percentiles of the hierarchical bootstrap: over seeds, then groups."""

    low: float | None
    high: float | None
    p: float | None


@dataclass(frozen=True)
class Permutation:
    """Exact permutation test over seeds."""

    p: float
    smallest_possible: float
    arrangements: int
    in_words: str


@dataclass(frozen=True)
class MetricTest:
    """One metric of two methods, a minus b."""

    difference: float | None  # mean over seeds
    low: float | None  # 95% interval over seeds and images
    high: float | None
    p: float | None
    p_holm: float | None  # Holm's correction over the comparisons of this metric
    evidence: bool  # p_holm < 0.05, and more than one seed each
    better: str | None  # "a" or "b" where there is evidence
    seed_differences: tuple[float | None, ...] | None  # paired seeds only
    effect_size: float | None  # Cohen's d_z over seeds (d if not paired); None for one seed
    bootstrap: PercentileTest
    permutation: Permutation | None
    verdict: str
    # The power of the design: a true difference of this size is found in 80% of repetitions, before Holm's correction.
    detectable: float | None = None


@dataclass(frozen=True)
class McNemar:
    only_a_right: int
    only_b_right: int
    p: float
    in_words: str


@dataclass(frozen=True)
class PairComparison:
    """Two methods, metric by metric."""

    a: str
    b: str
    seeds: SeedCounts
    in_words: str
    metrics: dict[str, MetricTest]
    mcnemar: McNemar | None  # one seed each, one label per image
    verdict: str  # on the primary metric, and which others differ


@dataclass(frozen=True)
class SoftLabelAgreement:
    """Spearman correlation of the off-diagonal soft labels of every two runs that learned some."""

    runs: tuple[str, ...]
    agreement: tuple[tuple[float | None, ...], ...]
    mean_agreement: float | None
    matrices: tuple[tuple[tuple[float, ...], ...], ...]


@dataclass(frozen=True)
class Comparison:
    """The comparison of several methods on the same images."""

    task: str
    classes: tuple[str, ...]
    split: SplitSummary = field(metadata=rule(old_name="part"))
    intervals: Intervals
    primary: str  # the metric of the overall verdicts
    metrics: tuple[ComparedMetric, ...]
    methods: tuple[MethodScores, ...]
    comparisons: tuple[PairComparison, ...]
    soft_labels: SoftLabelAgreement | None = field(metadata=rule(old_name="correlation"))
    warnings: tuple[str, ...]
    versions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": "comparison", **to_plain(self)}

    @classmethod
    def from_json(cls, content: object) -> Comparison:
        check_kind(content, "comparison")
        return from_plain(cls, content)


MethodSamples = tuple[Floats, Floats]  # of one metric: the values of S runs [S], their bootstrap draws [S, D]


def compare(
    runs: Sequence[str | Path] | Mapping[str, Sequence[str | Path]],
    against: str | None = None,
    primary: str | None = None,
    draws: int = 1000,
    seed: int = 0,
    calibration: str = "auto",
) -> Comparison:
    """Compare runs (folders, predictions.csv files, or the .json kept of a run). Nothing is written.

    Args:
        runs: a dict from method name to its runs; or a list, which is grouped by method, method settings and backbone
            in model.json. The runs of a method are its seeds. Runs on different images, labels or classes are refused.
        against: the method that every other one is compared with; by default every pair is compared.
        primary: the metric of the overall verdicts; by default accuracy, or mean average precision for several labels.
        draws, seed: number and seed of the bootstrap draws.
        calibration: of each run, as for :func:`cclnet.evaluate`.
    """
    groups, warnings = open_groups(runs)
    opened = [run for group in groups for run in group.runs]
    aligned = align(opened)
    units, task = units_of(aligned[0]), task_of(aligned[0])
    indices = _pairs_of([group.name for group in groups], against)
    sampled = _sample_runs(opened, aligned, units, draws, seed, calibration, warnings)
    if primary is not None and primary not in sampled:
        raise unknown("score", primary, sampled)
    primary = primary or next(iter(sampled))
    ends = np.cumsum([0, *(len(group.runs) for group in groups)])
    of_group = [{m: (v[i:j], d[i:j]) for m, (v, d) in sampled.items()} for i, j in itertools.pairwise(ends)]
    right = [decisions(p) == p.labels for p in aligned]
    compared = [(name, find(name), find(name).bounds_for(task)) for name in sampled]
    pairs = []
    for i, j in indices:
        a, b = groups[i], groups[j]
        count, paired = (len(a.runs), len(b.runs)), a.paired_with(b)
        tests = {
            name: difference_test(of_group[i][name], of_group[j][name], paired, units, seed, metric.biased, high - low)
            for name, metric, (low, high) in compared
        }
        mcnemar = None
        if count == (1, 1) and task == "single-label":
            mcnemar = _mcnemar(a.name, b.name, right[ends[i]], right[ends[j]], units)
        seeds = SeedCounts(*count, paired and count[0] > 1)
        pairs.append(PairComparison(a.name, b.name, seeds, seeds_in_words(*count, paired), tests, mcnemar, verdict=""))
    least = min((min(pair.seeds.a, pair.seeds.b) for pair in pairs), default=FEW_SEEDS)
    if least == 1:
        warnings.append("A method with one seed is compared as one model; train at least five to compare methods.")
    elif least < FEW_SEEDS:
        warnings.append(f"With fewer than {FEW_SEEDS} seeds only large differences can be told from chance.")
    return Comparison(
        task=task,
        classes=tuple(aligned[0].classes),
        split=split_summary(opened[0].predictions, opened[0].split),
        intervals=intervals_summary(units, draws, seed),
        primary=primary,
        metrics=tuple(ComparedMetric(name, metric.higher_is_better) for name, metric, _ in compared),
        methods=tuple(
            MethodScores(
                name=group.name,
                runs=tuple(RunReference(run.name, str(run.path), run.seed) for run in group.runs),
                scores={name: _mean_score(metric, *own[name], units, task) for name, metric, _ in compared},
            )
            for group, own in zip(groups, of_group, strict=True)
        ),
        comparisons=tuple(_decide(pairs, list(sampled), primary)),
        soft_labels=_soft_labels(opened),
        warnings=tuple(warnings),
        versions=package_versions(PACKAGES),
    )


def _pairs_of(names: Sequence[str], against: str | None) -> list[tuple[int, int]]:
    """The methods to compare, by index: every pair, or all with the one named ``against``."""
    if against is None:
        return list(itertools.combinations(range(len(names)), 2))
    if against not in names:
        raise unknown("method", against, names)
    reference = names.index(against)
    return [(i, reference) for i in range(len(names)) if i != reference]


def _sample_runs(
    runs: Sequence[OpenedRun], aligned: Sequence[Predictions], units: Units, draws: int, seed: int, calibration: str,
    warnings: list[str],
) -> dict[str, MethodSamples]:  # fmt: skip
    """Every compared metric of every run with its draws, which are the same for all runs; those after calibration only
    where a temperature could be fitted for every run."""
    task, found = task_of(aligned[0]), []
    classes = aligned[0].classes
    names = [
        name for m in compared_metrics(task) for name in (names_of_classes(m, classes) if m.per_class else [m.name])
    ]
    after = [name for name in names if name.endswith(AFTER)]
    for run, reported in zip(runs, aligned, strict=True):
        split = fitting_split(run.predictions, run.split)
        fitting = run.predictions.of_split(split) if split else reported
        fitting = fitting if fitting.classes == classes else _in_order_of(classes, fitting)
        scaled = calibrate(reported, split, fitting, units, seed, kind_for(calibration, run.settings_table))[1]
        stages = [(reported, [metric for metric in compared_metrics(task) if not metric.name.endswith(AFTER)])]
        if scaled is not None:
            stages.append((scaled, [metric for metric in calibration_metrics(task) if metric.compared_after]))
        first, *second = compute(stages, units, draws, seed)
        samples = first | {name + AFTER: own for later in second for name, own in later.items()}
        found.append({name: own for sample in samples.items() for name, own in _values_and_draws(*sample, reported)})
    names = [name for name in names if not find(name).ordered or all(name in own for own in found)]
    if missing := [run.name for run, own in zip(runs, found, strict=True) if any(name not in own for name in after)]:
        warnings.append(f"No temperature could be fitted for {', '.join(missing)}: no scores after calibration.")
        names = [name for name in names if name not in after]
    return {m: (np.array([own[m][0] for own in found]), np.stack([own[m][1] for own in found])) for m in names}


def _values_and_draws(name: str, sample: Sample, reported: Predictions) -> Iterator[tuple[str, tuple[float, Floats]]]:
    """The value and the draws of a metric by name; of a metric of classes, those of each class."""
    if sample.metric.per_class:
        for k, of_class in enumerate(names_of_classes(sample.metric, reported.classes)):
            yield of_class, (float(np.asarray(sample.value)[k]), sample.draws[:, k])
    else:
        yield name, (float(sample.value), sample.draws)


def difference_test(
    of_a: MethodSamples, of_b: MethodSamples, paired: bool, units: Units, seed: int, biased: bool = False,
    largest: float = math.inf,
) -> MetricTest:  # fmt: skip
    """The test of one metric of two methods, without Holm's correction and verdict, which need the other comparisons.

    Args:
        paired: whether the seeds of a and b are the same.
        seed: of the hierarchical bootstrap.
        biased: a calibration error. One may be biased further above its true value than the other, so the interval
            covers the difference with and without twice the bias that the draws show.
        largest: the largest possible difference.
    """
    (a, draws_a), (b, draws_b) = of_a, of_b
    difference = float(a.mean() - b.mean())
    bias = 2 * float((draws_a.mean() - a.mean()) - (draws_b.mean() - b.mean())) if biased else 0.0
    ends = sorted((difference, difference - bias))
    nearest = ends[0] if ends[0] > 0 else min(ends[1], 0.0)  # the value between the ends that is nearest to zero
    spreads = [statistics.over_images(draws_a.mean(axis=0) - draws_b.mean(axis=0), units.count)]
    several = min(len(a), len(b)) > 1
    if several:
        spreads.append(statistics.over_seeds(a - b) if paired else statistics.over_seeds_unpaired(a, b))
    reach = statistics.reach(spreads)
    low, high, p = statistics.percentile_interval(statistics.hierarchical_draws(draws_a, draws_b, paired, seed))
    permutation = None
    if several and math.isfinite(difference):
        test = statistics.permutation_test(a - b) if paired else statistics.permutation_test_unpaired(a, b)
        seeds = len(a) if paired else len(a) + len(b)
        permutation = Permutation(*test, permutation_in_words(test[0], test[1], seeds, paired))
    return MetricTest(
        difference=finite(difference),
        low=finite(float(np.clip(ends[0] - reach, -largest, largest))),
        high=finite(float(np.clip(ends[1] + reach, -largest, largest))),
        p=finite(statistics.p_value(nearest, spreads)),
        p_holm=None,
        evidence=False,
        better=None,
        seed_differences=tuple(finite(x) for x in (a - b).tolist()) if paired and several else None,
        effect_size=finite(statistics.effect_size(a, b, paired)),
        bootstrap=PercentileTest(finite(low), finite(high), finite(p)),
        permutation=permutation,
        verdict="",
        detectable=finite(statistics.detectable(spreads)),
    )


def _decide(pairs: Sequence[PairComparison], names: Sequence[str], primary: str) -> list[PairComparison]:
    """The pairs with p corrected over the comparisons of each metric, and with verdicts."""
    decided: list[dict[str, MetricTest]] = [{} for _ in pairs]
    for name in names:
        p_values = [math.nan if (p := pair.metrics[name].p) is None else p for pair in pairs]
        for pair, tests, p in zip(pairs, decided, statistics.holm(p_values), strict=True):
            seeds = (pair.seeds.a, pair.seeds.b)
            test = decide(name, replace(pair.metrics[name], p_holm=finite(p)), seeds)
            tests[name] = replace(test, verdict=verdict(name, pair.a, pair.b, test, seeds))
    found = [replace(pair, metrics=tests) for pair, tests in zip(pairs, decided, strict=True)]
    return [replace(pair, verdict=overall_verdict(primary, pair)) for pair in found]


def decide(name: str, test: MetricTest, seeds: tuple[int, int]) -> MetricTest:
    """The test with evidence and the better method by its corrected p; one seed is never evidence about a method."""
    evident = min(seeds) > 1 and test.p_holm is not None and test.p_holm < ALPHA and test.difference is not None
    if not evident or test.difference is None:
        return replace(test, evidence=False, better=None)
    return replace(test, evidence=True, better="a" if (test.difference > 0) == find(name).higher_is_better else "b")


def _mcnemar(a: str, b: str, right_a: Bools, right_b: Bools, units: Units) -> McNemar:
    only_a, only_b, p, kind = statistics.mcnemar(right_a, right_b)
    words = f"{only_a:,} images only {a} got right, {only_b:,} only {b}: p = {p:.3g} ({kind})."
    if units.kind == "groups":
        words += " The test assumes independent images, which those of one group are not: trust the interval instead."
    return McNemar(only_a, only_b, p, words)


def _mean_score(metric: Metric, values: Floats, draws: Floats, units: Units, task: Task) -> MeanScore:
    mean, bounds = float(values.mean()), metric.bounds_for(task)
    if len(values) == 1:
        trials = units.count if metric.trials else None
        low, high = interval(mean, draws[0], units.count, bounds, trials, biased=metric.biased)
    else:
        spreads = [statistics.over_seeds(values), statistics.over_images(draws.mean(axis=0), units.count)]
        reach = statistics.reach(spreads)
        bias = max(float(draws.mean()) - mean, 0.0) if metric.biased else 0.0
        ends = (mean - 2 * bias - reach, max(mean, mean - bias + reach))
        low, high = (float(np.clip(end, *bounds)) for end in ends)
    sd = float(values.std(ddof=1)) if len(values) > 1 else math.nan
    return MeanScore(finite(mean), finite(sd), finite(low), finite(high), tuple(map(finite, values.tolist())))


def _soft_labels(runs: Sequence[OpenedRun]) -> SoftLabelAgreement | None:
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
    return SoftLabelAgreement(
        runs=tuple(run.name for run in learned),
        agreement=tuple(tuple(finite(x) for x in row) for row in table.tolist()),
        mean_agreement=float(between[known].mean()) if known.any() else None,
        matrices=tuple(tuple(map(tuple, matrix.tolist())) for matrix in matrices),
    )


def amount(metric: Metric, value: float) -> str:
    """A difference with its unit.

    >>> amount(find("accuracy"), 0.0214), amount(find("nll"), 0.0214), amount(find("accuracy"), -0.0004)
    ('2.1 points', '0.021', '0.0 points')
    """
    return _number(metric, value) + ("" if metric.unit == "own" else " points")


def _number(metric: Metric, value: float) -> str:
    text = f"{value:.3f}" if metric.unit == "own" else f"{100 * value:.1f}"
    return text if float(text) else text.lstrip("-")  # no sign on zero


def _range(metric: Metric, low: float, high: float) -> str:
    return "" if math.isnan(low + high) else f" [{_number(metric, low)}, {_number(metric, high)}]"


def seeds_in_words(a: int, b: int, paired: bool) -> str:
    """The number of seeds of a comparison, and whether they are paired.

    >>> seeds_in_words(5, 5, True)
    '5 seeds each, paired by seed.'
    """
    if min(a, b) == 1:
        count = "One seed each" if a == b else f"{a} and {b} seeds"
        return f"{count}: too few to say anything about the methods, only about these models."
    count = f"{a} seeds each" if a == b else f"{a} and {b} seeds"
    return f"{count}, {'paired by seed' if paired else 'not paired'}."


def permutation_in_words(p: float, smallest: float, seeds: int, paired: bool) -> str:
    """The result of the exact test over seeds, and its smallest possible p if that is above 0.05."""
    kind = "signs of the differences between seeds" if paired else "seeds between the methods"
    words = f"Exact permutation of the {kind}: p = {p:.4g}."
    if smallest > ALPHA:
        words += f" With {seeds} seeds it cannot fall below {smallest:.4g}: alone it never shows a difference at 0.05."
    return words


def verdict(name: str, a: str, b: str, test: MetricTest, seeds: tuple[int, int]) -> str:
    """One sentence on one metric: which method is better and by how much, or that there is no evidence."""
    metric = find(name)
    difference, low, high = (math.nan if x is None else x for x in (test.difference, test.low, test.high))
    if math.isnan(difference):
        return "Cannot be compared: undefined for at least one of the runs."
    winner = a if (difference > 0) == metric.higher_is_better and difference else b
    ends = sorted((math.copysign(1, difference) * low, math.copysign(1, difference) * high))
    by = f"better by {amount(metric, abs(difference))}{_range(metric, *ends)}"
    open_question = f"{a} minus {b} is {amount(metric, difference)}{_range(metric, low, high)}"
    if min(seeds) == 1:
        words = "One seed" + (" each" if seeds == (1, 1) else f" of {a if seeds[0] == 1 else b}")
        words += ": nothing can be said about the methods, only about these models: "
        distinct = test.p_holm is not None and test.p_holm < ALPHA
        return words + (f"that of {winner} is {by}." if distinct else f"no evidence of a difference ({open_question}).")
    if test.evidence:
        return f"{winner} is {by}."
    if test.p is not None and test.p < ALPHA:
        return f"No evidence of a difference once corrected for several comparisons: {open_question}."
    power = (
        "" if test.detectable is None else f" A true {amount(metric, test.detectable)} would be found in 80% of cases."
    )
    return f"No evidence of a difference: {open_question}.{power}"


def overall_verdict(primary: str, pair: PairComparison) -> str:
    """The verdict on the primary metric and, for several seeds each, which other metrics differ."""
    title = find(primary).short
    first = f"{title[0].upper()}{title[1:]}: {pair.metrics[primary].verdict}"
    if min(pair.seeds.a, pair.seeds.b) == 1:
        return first
    winners = {"a": pair.a, "b": pair.b}
    others = [(find(m).short, winners[t.better]) for m, t in pair.metrics.items() if m != primary and t.better]
    if others:
        listed = ", ".join(f"{name} ({winner} better)" for name, winner in others)
        return f"{first} Evidence of a difference in: {listed}."
    return f"{first} No evidence of a difference in any other score."


@dataclass(frozen=True)
class Group:
    """The runs of one method, in the order of their seeds where these are known."""

    name: str
    runs: tuple[OpenedRun, ...]

    def paired_with(self, other: Group) -> bool:
        """Whether both have the same seeds, each once."""
        seeds = [run.seed for run in self.runs]
        return None not in seeds and len(set(seeds)) == len(seeds) and seeds == [run.seed for run in other.runs]


def open_groups(runs: Sequence[str | Path] | Mapping[str, Sequence[str | Path]]) -> tuple[list[Group], list[str]]:
    """Open runs and group them: as named in a dict, else by method, its settings and backbone in model.json (a run
    without one is its own method). Also returns warnings."""
    given = runs if isinstance(runs, Mapping) else {"": runs}
    opened = {name: [open_run(path) for path in paths] for name, paths in given.items()}
    every = [run for members in opened.values() for run in members]
    if isinstance(runs, Mapping) and (empty := [name for name, members in opened.items() if not members]):
        raise InputError(f"no run of {', '.join(empty)}: give every method at least one run.")
    if not every:
        raise InputError("nothing to compare: give run folders or predictions.csv files.")
    paths = Counter(run.path.resolve() for run in every)
    if doubled := [str(path) for path, count in paths.items() if count > 1]:
        raise InputError(f"given more than once: {', '.join(doubled)}. A run counts as one seed only.")
    names = Counter(run.name for run in every)  # runs of equal name are called by their path
    opened = {
        name: [run if names[run.name] == 1 else replace(run, name=str(run.path)) for run in members]
        for name, members in opened.items()
    }
    groups, warnings = [_group(name, members) for name, members in opened.items()], list[str]()
    if not isinstance(runs, Mapping):
        groups, warnings = _by_model(opened[""])
    return groups, warnings + _setting_warnings(groups)


def _group(name: str, runs: Sequence[OpenedRun]) -> Group:
    known = all(run.seed is not None for run in runs)
    return Group(name, tuple(sorted(runs, key=lambda run: run.seed or 0) if known else runs))


def _by_model(runs: list[OpenedRun]) -> tuple[list[Group], list[str]]:
    by_kind: dict[str, list[OpenedRun]] = {}
    for run in runs:
        model = run.model
        kind = [model.method, model.method_settings, model.backbone] if model and model.method else run.name
        by_kind.setdefault(json.dumps(kind, sort_keys=True), []).append(run)
    several_backbones = len({run.model.backbone for run in runs if run.model}) > 1
    names = Counter(_name(members[0], several_backbones) for members in by_kind.values())
    groups, warnings = list[Group](), list[str]()
    for members in by_kind.values():
        name = _name(members[0], several_backbones)
        if repeated := [str(seed) for seed, count in Counter(run.seed for run in members).items() if count > 1]:
            # Something other than the seed must differ.
            warnings.append(
                f"{', '.join(run.name for run in members)} are of one method and backbone but repeat seed "
                f"{', '.join(repeated)}: each is its own method. If some are seeds of one method all the same, "
                "give these alone, each seed once, or name the groups in Python: "
                "cclnet.evaluation.compare.compare({name: [run, ...], ...})."
            )
            groups += [_group(run.name, [run]) for run in members]
        else:
            groups.append(_group(_name(members[0], several_backbones, names[name] > 1), members))
    return groups, warnings


def _name(run: OpenedRun, with_backbone: bool, with_settings: bool = False) -> str:
    """The method of a run, with backbone and settings where these distinguish it from others."""
    if run.model is None or not run.model.method:
        return run.name
    settings = ", ".join(f"{name}={value}" for name, value in run.model.method_settings.items())
    name = f"{run.model.method} ({settings or 'defaults'})" if with_settings else run.model.method
    return f"{name}, {run.model.backbone}" if with_backbone else name


def _setting_warnings(groups: Sequence[Group]) -> list[str]:
    """Warnings if runs of one method differ in more than their seed, or methods in more than method and backbone."""
    warnings = []
    for group in groups:
        known = [settings for run in group.runs if (settings := run.settings())]
        names = sorted({name for settings in known for name in settings})
        # A run of an earlier version does not name later settings. It was trained like their defaults.
        defaults = dict(flattened(to_plain(Settings())))
        if differing := [name for name in names if _differ(s.get(name, defaults.get(name)) for s in known)]:
            listed = ", ".join(differing)
            warnings.append(f"The runs of {group.name} are counted as seeds of one method but differ in {listed}.")
    of_group = {group.name: settings for group in groups if (settings := group.runs[0].settings())}
    shared = sorted(set.intersection(*map(set, of_group.values()))) if of_group else []
    other = [name for name in shared if name.partition(".")[0] not in METHOD_SETTINGS]
    shown = [
        f"{name} ({', '.join(f'{group}: {settings[name]}' for group, settings in of_group.items())})"
        for name in other
        if _differ(settings[name] for settings in of_group.values())
    ]
    if shown:
        warnings.append(f"Not only the methods differ, so a difference may not be theirs: {'; '.join(shown)}.")
    return warnings


def _differ(values: Iterable[Any]) -> bool:
    return len({json.dumps(value, default=str) for value in values}) > 1


def align(runs: Sequence[OpenedRun]) -> list[Predictions]:
    """The reported predictions of every run, with images and classes in the order of the first. Runs with other images,
    labels, classes or groups are refused, all in one error."""
    reported = [run.predictions.of_split(run.split) for run in runs]
    first, name = reported[0], runs[0].name
    problems = [
        f"{run.name} ({run.split}, {len(own):,} images): {'; '.join(found)}."
        for run, own in zip(runs, reported, strict=True)
        if (found := _differences(first, own, name))
    ]
    groups, known = None, name
    if not problems:
        order = np.argsort(first.images)
        for i, own in enumerate(reported):
            rows = np.empty(len(own), np.intp)
            rows[order] = np.argsort(own.images)
            reported[i] = own = _in_order_of(first.classes, own.select(rows))
            if wrong := int((reported[i].labels != first.labels).reshape(len(own), -1).any(axis=1).sum()):
                problems.append(f"{runs[i].name}: other labels than {name} for {wrong:,} images.")
            if (theirs := reported[i].groups) is not None:
                if groups is None:
                    groups, known = theirs, runs[i].name
                elif differing := int((theirs != groups).sum()):
                    problems.append(f"{runs[i].name}: other groups than {known} for {differing:,} images.")
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise InputError(
            f"these runs cannot be compared, because they differ in what was predicted:{listed}\n"
            "Train them on one split (use the split.csv of one run for all)."
        )
    return [replace(own, groups=groups) for own in reported]


def _in_order_of(classes: tuple[str, ...], own: Predictions) -> Predictions:
    """The predictions with their classes in another order."""
    order = np.array([own.classes.index(name) for name in classes])
    labels = own.labels[:, order] if own.multilabel else np.argsort(order)[own.labels]
    return replace(own, labels=labels, probabilities=own.probabilities[:, order], classes=classes)


def _differences(first: Predictions, own: Predictions, name: str) -> list[str]:
    found = []
    if own.multilabel != first.multilabel:
        kinds = {True: "several labels", False: "one label"}
        found.append(f"{kinds[own.multilabel]} per image, where {name} has {kinds[first.multilabel]}")
    for nouns, ours, theirs in ((("class", "classes"), own.classes, first.classes),
                                (("image", "images"), own.images, first.images)):  # fmt: skip
        new, missing = np.setdiff1d(ours, theirs), np.setdiff1d(theirs, ours)
        for words, names in (("{} that {} does not have", new), ("without {} of {}", missing)):
            if len(names):
                listed = f"{len(names):,} {nouns[len(names) > 1]} ({examples(names)})"
                found.append(words.format(listed, name))
    return found
