"""What several seeds say together: means with intervals, and the paired comparison of methods, from results alone.

Both come from ``cclnet.evaluation.compare`` and take seconds each, so they are kept in ``comparisons.json.bz2`` beside
the results, each with the fingerprints of the predictions it was made from; it is made anew when these change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cclnet.evaluation.compare import Comparison, compare
from cclnet.files import read_json_bz2, write_json_bz2
from cclnet.reproduce.experiments import Cell
from cclnet.reproduce.paper import METHODS
from cclnet.runs.kept_result import KeptResult
from cclnet.schema import to_plain
from cclnet.sweep import results

# Results of the experiments: what ``cclnet.sweep`` keeps of any run, with the cell it belongs to.


__all__ = ["SCORES", "Result", "read_results"]

SCORES = ("accuracy", "macro_f1", "kappa", "macro_jaccard", "balanced_accuracy")


class Result(KeptResult):
    @property
    def cell(self) -> Cell:
        return Cell(**self.keys)

    @property
    def matrix(self) -> list[list[float]]:
        """The soft labels of a method that learns them."""
        assert self.soft_labels is not None
        return self.soft_labels


def read_results(folder: Path) -> list[Result]:
    """Every result in a folder, in the order of their names."""
    return [Result(**vars(result)) for result in results.read_results(folder)]


RIVALS = ("ccl", "hard", "lsr-u5")  # compared in pairs, the first of a pair first
RULES = 3  # of judging: to be raised when the same predictions come to be judged otherwise
METRICS = (*SCORES, "nll", "ece", "ece_calibrated")
SHOWN = ("difference", "low", "high")  # kept whole: rounded twice they would read otherwise than in the verdict
TEST = (*SHOWN, "p", "p_holm", "evidence", "better", "seed_differences", "verdict")


class Seeds:
    """Statistics over the seeds of results in one folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "comparisons.json.bz2"
        self.kept: dict[str, Any] = {}
        if self.path.exists():
            self.kept = read_json_bz2(self.path)
        self._used: dict[str, Any] = {}

    def mean(self, results: Sequence[Result]) -> dict[str, dict[str, Any]]:
        """Of each score over the seeds of one cell: mean, sd, and an interval over seeds and lesions (for one seed:
        over lesions)."""
        if len(results) == 1:
            scores = results[0].scores
            return {
                name: {"mean": s["value"], "sd": None, "low": s["low"], "high": s["high"], "values": [s["value"]]}
                for name, s in scores.items()
            }
        return self._once(f"mean of {_without_seed(results[0])}", results, lambda: _mean(results))

    def rivals(self, results: Sequence[Result]) -> dict[str, Any] | None:
        """CCL-Net, hard labels and uniform smoothing of one backbone and split against each other, over the seeds
        that all of them have; None where CCL-Net or both others are missing."""
        of_method = {m: {r.cell.seed: r for r in results if r.cell.method == m} for m in RIVALS}
        of_method = {m: runs for m, runs in of_method.items() if runs}
        seeds = sorted(set.intersection(*(set(runs) for runs in of_method.values()))) if of_method else []
        if "ccl" not in of_method or len(of_method) < 2 or not seeds:
            return None
        chosen = {METHODS[m]: [runs[seed] for seed in seeds] for m, runs in of_method.items()}
        cell = chosen[METHODS["ccl"]][0].cell
        together = [result for runs in chosen.values() for result in runs]
        return self._once(f"rivals on {cell.split}, {cell.backbone}", together, lambda: _compared(chosen))

    def against(self, groups: Mapping[str, Sequence[Result]], reference: str, title: str) -> dict[str, Any] | None:
        """Every group against the one named ``reference``, over the seeds that the two have both; None where it or all
        others are missing. ``title`` tells this comparison from others."""
        own = {result.cell.seed for result in groups.get(reference, ())}
        shared = {name: [r for r in runs if r.cell.seed in own] for name, runs in groups.items()}
        shared = {name: runs for name, runs in shared.items() if runs}
        if reference not in shared or len(shared) < 2:
            return None
        together = [result for runs in shared.values() for result in runs]
        return self._once(f"{title}, against {reference}", together, lambda: _compared(shared, reference))

    def write(self) -> None:
        """Keep what was used."""
        if self._used:
            write_json_bz2(self.path, dict(sorted(self._used.items())))

    def _once(self, key: str, results: Sequence[Result], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        made_from = {"rules": str(RULES)} | {result.path.stem: _fingerprint(result.predictions) for result in results}
        kept = self.kept.get(key)
        if kept is None or kept["made_from"] != made_from:
            kept = {"made_from": made_from, "content": make()}
        self._used[key] = kept
        return kept["content"]


def _without_seed(result: Result) -> str:
    return result.path.stem.rpartition("-seed")[0]


def _fingerprint(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def _compare(groups: Mapping[str, Sequence[Result]], against: str | None = None) -> Comparison:
    return compare({name: [result.path for result in results] for name, results in groups.items()}, against)


def _mean(results: Sequence[Result]) -> dict[str, Any]:
    scores = to_plain(_compare({"cell": results}).methods[0].scores)
    undefined = {"mean": None, "sd": None, "low": None, "high": None, "values": [None] * len(results)}
    return {name: _rounded(scores.get(name, undefined)) for name in METRICS}  # no temperature, nothing after it


def _compared(groups: Mapping[str, Sequence[Result]], against: str | None = None) -> dict[str, Any]:
    comparison = _compare(groups, against)
    pairs = []
    for pair in to_plain(comparison.comparisons):
        tests = {
            name: {key: test[key] if key in SHOWN else _rounded(test[key]) for key in TEST}
            for name in METRICS
            if (test := pair["metrics"].get(name))
        }
        pairs.append({key: pair[key] for key in ("a", "b", "seeds", "in_words", "verdict")} | {"metrics": tests})
    return {"intervals": comparison.intervals.in_words, "pairs": pairs, "warnings": list(comparison.warnings)}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
