"""Recomputing the figures of kept results, and the verdict on the paper."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cclnet.cli import app
from cclnet.reproduce.experiments import PaperCell
from cclnet.reproduce.seeds import SeedStatistics, read_results
from cclnet.reproduce.tables import write_paper
from cclnet.reproduce.verdict import best_counts, verdict_text
from cclnet.reproduce.verify import Verification, verify
from made_paper_results import made_result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made")
    for method, wrong in {"ccl": (3, 6), "hard": (12, 18)}.items():
        for seed, count in enumerate(wrong):
            made_result(made, PaperCell(method=method, seed=seed), count)
    write_paper(made / "results")
    return made / "results"


def test_all_figures_agree_then_one_is_changed(folder: Path) -> None:
    found = verify(folder)
    assert found.problems == [] and found.figures > 100
    assert found.in_words() == f"{found.figures:,} of {found.figures:,} figures agree"

    path = folder / "paper-resnet18-hard-seed0.json"
    kept, table = path.read_text(), (folder / "table1.md").read_text()
    content = json.loads(kept)
    content["scores"]["accuracy"]["value"] += 0.001
    path.write_text(json.dumps(content))
    (folder / "table1.md").write_text(table.replace("0.750", "0.751"))
    try:
        result = CliRunner().invoke(app, ["reproduce", "verify", "--results", str(folder)])
    finally:
        path.write_text(kept)
        (folder / "table1.md").write_text(table)
    assert result.exit_code == 1
    assert "scores.accuracy.value is kept as 0.801, recomputed 0.8" in result.output
    assert "table1.md, line" in result.output and f"{found.figures - 2:,} of {found.figures:,}" in result.output


def test_figures_that_only_one_side_has_disagree() -> None:
    found = Verification()
    found.compare("x", {"a": 1.0, "b": [1, None]}, {"a": 1.0, "c": {"d": 2.0}})
    assert found.figures == 3 and len(found.problems) == 2
    found.compare_text("page", "one 1\ntwo 2", "one 1")
    assert found.problems[2:] == ["page: 2 lines are kept, 1 recomputed"]


def test_figures_agree_to_six_decimals() -> None:
    found = Verification()
    found.compare("x", {"ece": {"value": 0.1, "low": 0.05}}, {"ece": {"value": 0.1, "low": 0.050001}})
    assert not found.problems
    found.compare("x", {"ece": {"value": 0.1, "low": 0.05}}, {"ece": {"value": 0.1, "low": 0.05001}})
    assert len(found.problems) == 1


def test_verify_stands_alone(folder: Path) -> None:
    result = CliRunner().invoke(app, ["reproduce", "verify", "table1", "--results", str(folder)])
    assert result.exit_code != 0


def test_the_verdict_counts_who_is_best(folder: Path, tmp_path: Path) -> None:
    results, seeds = read_results(folder), SeedStatistics(folder)
    assert best_counts(results, seeds) == {"hard": 0, "lsr-u1": 0, "lsr-u5": 0, "lsr-a1": 0, "lsr-a5": 0, "ccl": 4}
    text = verdict_text(results, seeds)
    assert "best on 4 of 4" in text and "+17.5" in text and "2 common seeds" in text
    assert verdict_text([], SeedStatistics(tmp_path)) == "No cell has been run yet."
