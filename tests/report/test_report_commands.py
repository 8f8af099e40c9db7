from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fake_run import MakeRun
from page_check import read_page

from cclnet.cli import main


def run_command(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["cclnet", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def test_evaluate_writes_scores_and_report_into_the_run(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    assert run_command(monkeypatch, "evaluate", run, "--draws", 20) == 0
    scores = json.loads((run / "scores.json").read_text())
    assert scores["intervals"]["draws"] == 20 and read_page(run / "report.html").problems == []
    said = capsys.readouterr().out
    assert f"{scores['scores']['accuracy']['value']:.4f}" in said and "report.html" in said


def test_evaluate_a_file_elsewhere(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    predictions = make_run() / "predictions.csv"
    assert run_command(monkeypatch, "evaluate", predictions, "--out", tmp_path / "out", "--draws", 20) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"scores.json", "report.html", "report.md"}


def test_compare_groups_seeds_into_methods_and_says_its_verdict(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = [make_run(f"{m}-{s}", method=m, seed=s, images=200) for m in ("ccl", "hard") for s in range(2)]
    assert run_command(monkeypatch, "compare", *runs, "--out", tmp_path / "out", "--draws", 20) == 0
    compared = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [method["name"] for method in compared["methods"]] == ["ccl", "hard"]
    said = " ".join(capsys.readouterr().out.split())
    assert compared["comparisons"][0]["verdict"] in said and "comparison.html" in said


@pytest.mark.parametrize("command", ["evaluate", "compare"])
def test_a_folder_that_cannot_be_made_is_an_error_in_words(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    run = make_run()
    assert run_command(monkeypatch, command, run, "--out", run / "model.json", "--draws", 20) == 2
    assert "cannot be made: File exists. Choose another." in " ".join(capsys.readouterr().err.split())
