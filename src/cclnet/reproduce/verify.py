"""Recompute every figure of the kept results from their predictions, on any machine, without images or a GPU.

Three steps: the scores of each run (values and intervals) from its kept predictions; the statistics over seeds from the
same predictions, ignoring the cached ones; then the tables, and the documents that show them, from both.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cclnet.evaluation.evaluate import evaluate
from cclnet.files import read_json_bz2
from cclnet.reproduce.seeds import SeedStatistics, read_results
from cclnet.reproduce.tables import fill_markers, markdown, paper_grids
from cclnet.reproduce.verdict import paper_blocks
from cclnet.runs.kept_result import predictions_path, read_kept_result
from cclnet.schema import to_plain
from cclnet.sweep.results import headline_scores

TOLERANCE = 2e-6  # kept figures have six decimals
_FIGURE = re.compile(r"(?<![\w.])[−+-]?\d[\d,]*(?:\.\d+)?")


@dataclass
class Verification:
    """How many figures were recomputed, and the places where they disagree."""

    figures: int = 0
    problems: list[str] = field(default_factory=list)

    def compare(self, place: str, kept: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Compare the numbers in two nested mappings; those that only one of them has disagree."""
        ours, theirs = dict(_numbers(kept)), dict(_numbers(found))
        self.figures += len(ours.keys() | theirs.keys())
        for name in sorted(ours.keys() | theirs.keys()):
            a, b = ours.get(name), theirs.get(name)
            if a is None or b is None or abs(a - b) > TOLERANCE:
                self.problems.append(f"{place}: {name} is kept as {a}, recomputed {b}")

    def compare_text(self, place: str, kept: str, found: str) -> None:
        """Compare the numbers in two texts, line by line."""
        self.figures += len(_FIGURE.findall(found))
        if kept == found:
            return
        ours, theirs = kept.splitlines(), found.splitlines()
        if len(ours) != len(theirs):
            self.problems.append(f"{place}: {len(ours)} lines are kept, {len(theirs)} recomputed")
        different = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=False), start=1) if a != b]
        self.problems += [f"{place}, line {i}: is not what the results say" for i in different]

    def in_words(self) -> str:
        """
        >>> Verification(figures=10, problems=["x"]).in_words()
        '9 of 10 figures agree'
        """
        return f"{self.figures - min(len(self.problems), self.figures):,} of {self.figures:,} figures agree"


def verify(results: Path, documents: Path | None = None) -> Verification:
    """Recompute the figures of a results folder; with ``documents``, also those in the documents below that folder."""
    found, own = Verification(), read_results(results)
    paths = [path for path in sorted(results.rglob("*-seed*.json")) if predictions_path(path).exists()]
    with ProcessPoolExecutor(2) as pool:
        for path, (kept, again) in zip(paths, pool.map(_scores_again, paths), strict=True):
            found.compare(str(path.relative_to(results)), kept, again)
    with tempfile.TemporaryDirectory() as empty:  # nothing is cached there
        again_statistics = SeedStatistics(Path(empty))
        grids = paper_grids(own, again_statistics)
        cached = read_json_bz2(results / "comparisons.json.bz2")
        for key, entry in again_statistics.used.items():
            found.compare(f"comparisons.json.bz2, {key}", cached.get(key, {}).get("content", {}), entry["content"])
        for name, content in grids.items():
            table = results / f"{name}.md"
            kept_table = table.read_text(encoding="utf-8") if table.exists() else ""
            found.compare_text(table.name, kept_table, markdown(*content))
        if documents is not None:
            for name, blocks in paper_blocks(results, again_statistics).items():
                page = (documents / name).read_text(encoding="utf-8")
                found.compare_text(name, page, fill_markers(page, blocks, name))
    return found


def _scores_again(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The kept scores of a run, and the same computed from its kept predictions."""
    kept, scores = read_kept_result(path), evaluate(path, calibration="temperature")
    again = to_plain(headline_scores(scores))
    return (
        {"scores": dict(kept.scores), "temperature": kept.temperature},
        {"scores": {name: again.get(name) for name in kept.scores},
         "temperature": scores.calibration.temperature.value},
    )  # fmt: skip


def _numbers(content: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in nested mappings and sequences, by dotted name."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _numbers(value, f"{name}.{key}" if name else str(key))
    elif isinstance(content, Sequence) and not isinstance(content, str):
        for i, value in enumerate(content):
            yield from _numbers(value, f"{name}[{i}]")
    elif isinstance(content, (int, float)) and not isinstance(content, bool):
        yield name, float(content)
