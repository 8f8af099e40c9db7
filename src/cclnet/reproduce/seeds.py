"""Statistics over seeds, from kept results alone: means with intervals, and paired comparisons of methods.

Both come from ``cclnet.evaluation.compare`` and take seconds each. They are cached in ``comparisons.json.bz2`` beside
the results, each with the fingerprints of its predictions, and computed again when these change.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cclnet.evaluation import statistics
from cclnet.evaluation.compare import Comparison, MetricTest, PercentileTest, compare, decide, verdict
from cclnet.evaluation.metrics import find
from cclnet.evaluation.statistics import Spread
from cclnet.files import read_json_bz2, write_json_bz2
from cclnet.reproduce.experiments import FOLDS, METHODS, PAPER_SCORES, RIVALS, PaperCell, folds
from cclnet.runs.kept_result import KeptResult
from cclnet.runs.predictions import Predictions, write_predictions
from cclnet.schema import to_plain
from cclnet.sweep import results as kept_results
from cclnet.sweep.results import rounded

RULES = 5  # version of the evaluation: raise it when the same predictions get other statistics
RANKING = ("macro_auroc", "auroc:MEL", "aurc")  # MEL: melanoma, the class that matters most on ISIC 2018
METRICS = (*PAPER_SCORES, "balanced_accuracy", *RANKING, "nll", "ece", "ece_calibrated")
MAX_SEEDS = 100  # of the folds
FEW = 3  # a cell with fewer seeds takes the seed variance of its table
SHOWN = ("difference", "low", "high")  # not rounded here: rounding twice could contradict the verdict
TEST = (*SHOWN, "p", "p_holm", "evidence", "better", "seed_differences", "detectable", "verdict")


class PaperResult(KeptResult):
    """A kept result of a PaperCell."""

    @property
    def cell(self) -> PaperCell:
        return PaperCell(**self.keys)

    @property
    def matrix(self) -> list[list[float]]:
        """The learned soft labels, [K][K]."""
        assert self.soft_labels is not None
        return self.soft_labels


def read_results(folder: Path) -> list[PaperResult]:
    """Every result in a folder, sorted by name."""
    return [PaperResult(**vars(result)) for result in kept_results.read_results(folder)]


def seeds_of(results: Sequence[PaperResult], cell: PaperCell) -> list[PaperResult]:
    """The results of a cell with any seed, sorted by seed."""
    own = [result for result in results if replace(result.cell, seed=cell.seed) == cell]
    return sorted(own, key=lambda result: result.cell.seed)


def plain_results(results: Sequence[PaperResult], split: str, backbone: str) -> list[PaperResult]:
    """The results of a backbone and split in Table 1: no variant, and the usual learning rate of the head."""
    return [r for r in results if r.cell == PaperCell(backbone, r.cell.method, r.cell.seed, split)]


def _common_seeds(of_method: Mapping[str, Mapping[int, Any]]) -> list[int]:
    """The seeds that all methods have; none if CCL-Net or all others are missing."""
    if "ccl" not in of_method or len(of_method) < 2:
        return []
    return sorted(set.intersection(*map(set, of_method.values())))


class SeedStatistics:
    """Statistics over the seeds of the results in one folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "comparisons.json.bz2"
        self.cached: dict[str, Any] = read_json_bz2(self.path) if self.path.exists() else {}
        self.used: dict[str, Any] = {}

    def mean(
        self, results: Sequence[PaperResult], pooled: Mapping[str, Spread] | None = None
    ) -> dict[str, dict[str, Any]]:
        """For each score of one cell: mean, sd, and the interval over seeds and lesions.

        One seed has no variance of its own, and that of two is hardly known. With ``pooled`` (see
        :meth:`pooled_variance`) fewer than three seeds take that variance; without it, the interval of one seed is over
        lesions only.
        """
        key = f"mean of {results[0].path.stem.rpartition('-seed')[0]}"
        if len(results) > 1:
            own = self._cached(key, results, lambda: _mean(results))
        elif results[0].predictions.exists():
            own = self._cached(f"{key}, seed {results[0].cell.seed} alone", results, lambda: _mean(results))
        else:
            own = _kept_scores(results[0])
        if len(results) >= FEW or not pooled:
            return own
        alone = [self.mean([result]) for result in results] if len(results) > 1 else [own]
        return {n: _widened(n, s, [run[n] for run in alone], pooled[n]) if n in pooled else s for n, s in own.items()}

    def pooled_variance(self, cells: Sequence[Sequence[PaperResult]]) -> dict[str, Spread]:
        """For each score the variance between the seeds of one cell, pooled over the cells with several seeds."""
        found: dict[str, Spread] = {}
        several = [(len(own) - 1, self.mean(own)) for own in cells if len(own) > 1]
        for name in METRICS:
            known = [(freedom, m[name]["sd"] ** 2) for freedom, m in several if m[name]["sd"] is not None]
            if freedom := sum(own for own, _ in known):
                found[name] = Spread(sum(own * variance for own, variance in known) / freedom, freedom)
        return found

    def compare_all(self, results: Sequence[PaperResult]) -> dict[str, Any] | None:
        """CCL-Net, hard labels and uniform smoothing (LSR-u1, LSR-u5) of one backbone and split in pairs, over the
        seeds that all of them have; None if CCL-Net or all others are missing."""
        of_method = {m: {r.cell.seed: r for r in results if r.cell.method == m} for m in RIVALS}
        of_method = {m: runs for m, runs in of_method.items() if runs}
        seeds = _common_seeds(of_method)
        if not seeds:
            return None
        chosen = {METHODS[m]: [runs[seed] for seed in seeds] for m, runs in of_method.items()}
        cell = chosen[METHODS["ccl"]][0].cell
        return self._compared(f"rivals on {cell.split}, {cell.backbone}", chosen)

    def compare_folds(self, results: Sequence[PaperResult]) -> dict[str, Any] | None:
        """RIVALS in pairs on the out-of-fold predictions of every image, over the seeds of which all have all folds;
        None if CCL-Net or all others are missing."""
        wanted = {(cell.method, cell.seed, cell.variant) for cell in folds(range(MAX_SEEDS))}
        own = {(r.cell.method, r.cell.seed, r.cell.variant): r for r in results if r.cell.split == "lesion"}
        of_method: dict[str, dict[int, list[PaperResult]]] = {}
        for method, seed in sorted({(m, seed) for m, seed, _ in own.keys() & wanted}):
            runs = [own[key] for key in sorted(wanted) if key[:2] == (method, seed) and key in own]
            if len(runs) == FOLDS:
                of_method.setdefault(method, {})[seed] = runs
        seeds = _common_seeds(of_method)
        if not seeds:
            return None
        chosen = {METHODS[m]: [of_method[m][seed] for seed in seeds] for m in RIVALS if m in of_method}
        together = [run for sets in chosen.values() for runs in sets for run in runs]
        return self._cached("rivals out of fold, resnet18", together, lambda: _pairs(_compare_pooled(chosen)))

    def compare_with(
        self, groups: Mapping[str, Sequence[PaperResult]], reference: str, title: str
    ) -> dict[str, Any] | None:
        """Every group against the one named ``reference``, over the seeds that both have; None if the reference or all
        others are missing. ``title`` identifies the comparison in the cache."""
        own = {result.cell.seed for result in groups.get(reference, ())}
        shared = {name: [r for r in runs if r.cell.seed in own] for name, runs in groups.items()}
        shared = {name: runs for name, runs in shared.items() if runs}
        if reference not in shared or len(shared) < 2:
            return None
        return self._compared(f"{title}, against {reference}", shared, reference)

    def write(self) -> None:
        """Write the cache, with the entries of other tables that are in it."""
        if self.used:
            write_json_bz2(self.path, dict(sorted((self.cached | self.used).items())))

    def _compared(
        self, key: str, groups: Mapping[str, Sequence[PaperResult]], reference: str | None = None
    ) -> dict[str, Any]:
        together = [result for runs in groups.values() for result in runs]
        return self._cached(key, together, lambda: _pairs(_compare(groups, reference)))

    def _cached(self, key: str, results: Sequence[PaperResult], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        made_from = {"rules": str(RULES)}
        for result in results:
            made_from[result.path.stem] = hashlib.blake2b(result.predictions.read_bytes(), digest_size=8).hexdigest()
        entry = self.cached.get(key)
        if entry is None or entry["made_from"] != made_from:
            entry = {"made_from": made_from, "content": make()}
        self.used[key] = entry
        return entry["content"]


def _compare(groups: Mapping[str, Sequence[PaperResult]], reference: str | None = None) -> Comparison:
    paths = {name: [result.path for result in results] for name, results in groups.items()}
    return compare(paths, reference, calibration="temperature")


def _compare_pooled(groups: Mapping[str, Sequence[Sequence[PaperResult]]]) -> Comparison:
    """Compare methods on the predictions of all folds together, paired by seed."""
    with tempfile.TemporaryDirectory() as scratch:
        paths: dict[str, list[str | Path]] = {}
        for number, (name, sets) in enumerate(groups.items()):
            for seed, runs in enumerate(sets):
                path = Path(scratch) / f"method{number}-seed{seed}.csv"
                write_predictions(path, pooled([run.read_predictions() for run in runs]))
                paths.setdefault(name, []).append(path)
        return compare(paths, calibration="temperature")


def pooled(parts: Sequence[Predictions]) -> Predictions:
    """The predictions of several folds as those of one split."""
    groups = [part.groups for part in parts if part.groups is not None]
    return replace(
        parts[0],
        images=np.concatenate([part.images for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
        probabilities=np.concatenate([part.probabilities for part in parts]),
        groups=np.concatenate(groups) if len(groups) == len(parts) else None,
        splits=None,
    )


def _mean(results: Sequence[PaperResult]) -> dict[str, Any]:
    scores = to_plain(_compare({"cell": results}).methods[0].scores)
    undefined = {"mean": None, "sd": None, "low": None, "high": None, "values": [None] * len(results)}
    return {name: rounded(scores.get(name, undefined)) for name in METRICS}  # without temperature nothing after it


def _kept_scores(result: PaperResult) -> dict[str, Any]:
    """The scores of a run whose predictions were not kept."""
    undefined = {"value": None, "low": None, "high": None}
    kept = {name: result.scores.get(name, undefined) for name in METRICS}
    return {
        name: {"mean": s["value"], "sd": None, "low": s["low"], "high": s["high"], "values": [s["value"]]}
        for name, s in kept.items()
    }


def _widened(name: str, score: Mapping[str, Any], alone: Sequence[Mapping[str, Any]], seeds: Spread) -> dict[str, Any]:
    """A score of few seeds with the interval over lesions (the mean of those of single runs) and the pooled seed
    variance, added in quadrature."""
    if any(run["low"] is None or run["high"] is None for run in alone):
        return dict(score)
    between = statistics.reach([Spread(seeds.variance / len(alone), seeds.freedom)])
    below, above = (sum(abs(run["mean"] - run[end]) for run in alone) / len(alone) for end in ("low", "high"))
    least, most = find(name).bounds_for("single-label")
    low, high = score["mean"] - math.hypot(below, between), score["mean"] + math.hypot(above, between)
    return {**score, "low": round(max(low, least), 6), "high": round(min(high, most), 6)}


def correct_together(pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The pairs of one table with Holm's correction over all of them, metric by metric, and verdicts that follow it."""
    corrected: list[dict[str, Any]] = [{**pair, "metrics": {}} for pair in pairs]
    for name in METRICS:
        own = [(pair, new) for pair, new in zip(pairs, corrected, strict=True) if name in pair["metrics"]]
        p_values = [math.nan if (p := pair["metrics"][name]["p"]) is None else p for pair, _ in own]
        for (pair, new), p in zip(own, statistics.holm(p_values), strict=True):
            test = {**pair["metrics"][name], "p_holm": None if math.isnan(p) else p}
            new["metrics"][name] = decided(name, pair, test)
    return corrected


def decided(name: str, pair: Mapping[str, Any], test: dict[str, Any]) -> dict[str, Any]:
    """The test with evidence, the better method and the verdict as its corrected p has them."""
    unknown: dict[str, Any] = {"effect_size": None, "bootstrap": PercentileTest(None, None, None), "permutation": None}
    seeds = (pair["seeds"]["a"], pair["seeds"]["b"])
    found = decide(name, MetricTest(**{**unknown, **test, "verdict": ""}), seeds)
    words = verdict(name, pair["a"], pair["b"], found, seeds)
    return {**test, "evidence": found.evidence, "better": found.better, "verdict": words}


def _pairs(comparison: Comparison) -> dict[str, Any]:
    pairs = []
    for pair in to_plain(comparison.comparisons):
        tests = {
            name: {key: test[key] if key in SHOWN else rounded(test[key]) for key in TEST}
            for name in METRICS
            if (test := pair["metrics"].get(name))
        }
        pairs.append({key: pair[key] for key in ("a", "b", "seeds", "in_words", "verdict")} | {"metrics": tests})
    return {"intervals": comparison.intervals.in_words, "pairs": pairs, "warnings": list(comparison.warnings)}
