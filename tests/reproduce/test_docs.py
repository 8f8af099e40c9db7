"""The documents say what the results say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cclnet.evaluation.evaluate import evaluate
from cclnet.reproduce.seeds import SeedStatistics, read_results
from cclnet.reproduce.tables import fill_markers, markdown, paper_grids
from cclnet.reproduce.verdict import paper_blocks
from cclnet.runs.kept_result import predictions_path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "isic2018"


def test_documents_agree_with_the_results() -> None:
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in paper_blocks(RESULTS)}
    stale = [name for name, blocks in paper_blocks(RESULTS).items() if fill_markers(pages[name], blocks) != pages[name]]
    assert not stale, "run: cclnet reproduce table1 --results results/isic2018 --tables-only --documents"


def test_tables_beside_the_results_agree_with_them() -> None:
    if not read_results(RESULTS):
        pytest.skip("no results yet")
    for name, content in paper_grids(read_results(RESULTS), SeedStatistics(RESULTS)).items():
        assert (RESULTS / f"{name}.md").read_text(encoding="utf-8") == markdown(*content), name


KEPT = [path for path in sorted((ROOT / "results").rglob("*-seed*.json")) if predictions_path(path).exists()]


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_scores_are_those_of_the_kept_predictions(path: Path) -> None:
    """Kept results must be evaluated again when the evaluation changes."""
    content, scores = json.loads(path.read_text(encoding="utf-8")), evaluate(path, draws=2, calibration="temperature")
    before, after = scores.calibration.stages()
    found = scores.overall | {"ece": before.scores["ece"], "ece_calibrated": after.scores["ece"]}
    for name, kept in content["scores"].items():
        assert kept["value"] == pytest.approx(found[name].value, abs=1e-5), name
    assert content["temperature"] == pytest.approx(scores.calibration.temperature.value, abs=1e-4)


def test_results_say_nothing_about_where_files_lay() -> None:
    paths = [*RESULTS.glob("*.json"), *RESULTS.glob("tune/*.json"), *RESULTS.glob("*.jsonl"), *RESULTS.glob("*.md")]
    telling = [path.name for path in paths if any(place in path.read_text() for place in ("/tmp/", "/home/", "/root/"))]
    assert not telling
