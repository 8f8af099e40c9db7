"""From what is asked for to the comparison: with runs made by hand, and once as a user gives the command."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cclnet.cli import app
from cclnet.errors import InputError
from cclnet.evaluation.compare import compare
from cclnet.schema import to_plain
from cclnet.settings import make_settings
from cclnet.sweep.compare_methods import Contestant, Request, compare_methods, jobs_of
from made_runs import made_result

SETTINGS = make_settings(
    {"data": "synthetic:images=84,size=32", "short_side": 32, "augment": {"crop": 28},
     "method": "ccl", "method_settings": {"widths": [16, 8]}}
)  # fmt: skip
HARD, CCL, SMOOTH = Contestant("hard"), Contestant("ccl"), Contestant("lsr", {"epsilon": 0.3})


def request(folder: Path, *contestants: Contestant) -> Request:
    return Request(SETTINGS, folder / "out", folder / "results", contestants, seeds=(0, 1), draws=50)


def told(asked: Request) -> str:
    console = Console(file=io.StringIO(), width=200)
    compare_methods(asked, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_settings_of_the_recipe_belong_to_its_method(tmp_path: Path) -> None:
    jobs = jobs_of(request(tmp_path, HARD, CCL, SMOOTH), [HARD, CCL, SMOOTH])
    assert list(jobs) == ["hard", "ccl", "lsr (epsilon=0.3)"]
    assert [job.name for own in jobs.values() for job in own] == [
        "hard-seed0", "hard-seed1", "ccl-seed0", "ccl-seed1", "lsr-epsilon-0.3-seed0", "lsr-epsilon-0.3-seed1",
    ]  # fmt: skip
    assert [own[1].settings.method_settings for own in jobs.values()] == [{}, {"widths": (16, 8)}, {"epsilon": 0.3}]
    assert {job.settings.split.seed for own in jobs.values() for job in own} == {0}


def test_what_has_its_result_is_compared_and_not_run_again(tmp_path: Path) -> None:
    asked = request(tmp_path, HARD, CCL, SMOOTH)
    for wrong, own in enumerate(jobs_of(asked, asked.contestants).values()):
        for job in own:
            made_result(tmp_path, job, wrong=12 + 3 * wrong + job.settings.seed)
    said = told(asked)
    assert "3 methods, 2 seeds each, 84 images of 7 classes." in said
    assert "0 runs done and 6 had their result already" in said and "−5.0 points" in said
    compared = json.loads((asked.results / "comparison.json").read_text())
    assert [(pair["a"], pair["b"], pair["seeds"]["paired"]) for pair in compared["comparisons"]] == [
        ("ccl", "hard", True),
        ("lsr (epsilon=0.3)", "hard", True),
    ]
    assert compared["methods"][1]["runs"][0]["path"] == "ccl-seed0.json"  # no place of this machine
    again = compare(sorted(asked.results.glob("*-seed*.json")), draws=50)  # from what is kept alone
    by_name = sorted(compared["methods"], key=lambda method: method["name"])
    assert [to_plain(method.scores) for method in again.methods] == [method["scores"] for method in by_name]
    row = next(line for line in (asked.results / "scores.md").read_text().splitlines() if "lsr" in line)
    assert row.startswith("| `lsr (epsilon=0.3)` | 2 | 69.2%<br>[") and "−10.0 points [" in row

    other = replace(asked, settings=replace(SETTINGS, epochs=2))
    with pytest.raises(InputError, match=r"(?s)6 results were made of.*epochs was 160, is 2"):
        compare_methods(other, Console(quiet=True))


def test_every_pair_and_another_score(tmp_path: Path) -> None:
    asked = replace(request(tmp_path, HARD, CCL, SMOOTH), against="all", primary="kappa", seeds=(0,))
    for own in jobs_of(asked, asked.contestants).values():
        made_result(tmp_path, own[0], wrong=9)
    assert "comparison:" in told(asked)
    compared = json.loads((asked.results / "comparison.json").read_text())
    assert len(compared["comparisons"]) == 3 and compared["primary"] == "kappa"
    assert "Cohen's kappa" in (asked.results / "scores.md").read_text()


def test_a_score_that_is_not_known_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown score 'acuracy'; did you mean 'accuracy'"):
        compare_methods(replace(request(tmp_path, HARD), primary="acuracy"), Console(quiet=True))
    assert not (tmp_path / "results").exists() and not (tmp_path / "out").exists()


def test_out_of_time_nothing_is_begun_and_nothing_compared(tmp_path: Path) -> None:
    said = told(replace(request(tmp_path, HARD, SMOOTH), max_minutes=1e-9))
    assert "no comparison yet: no run of hard has finished." in said
    assert "4 unfinished, go on with the same command: hard-seed0, lsr-epsilon-0.3-seed0, hard-seed1" in said
    assert not (tmp_path / "results" / "comparison.html").exists()


def test_the_reference_must_take_part(tmp_path: Path) -> None:
    asked = replace(request(tmp_path, HARD, CCL), against="ols")
    with pytest.raises(InputError, match=r"unknown method to compare against 'ols'.*Known: all, ccl, hard"):
        compare_methods(asked, Console(quiet=True))


def test_the_command_runs_compares_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    words = ["compare-methods", "synthetic:images=84,size=32", "--methods", "label-relaxation,hard", "--seeds", "3",
             "--backbone", "test_resnet", "--epochs", "1", "--set", "short_side=32", "--set", "augment.crop=28",
             "--set", "batch_size=16", "--set", "augment.mixup=0.2", "--out", str(tmp_path), "--accelerator", "cpu",
             "--draws", "50"]  # fmt: skip
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, done.output
    assert "1 runs done and 0 had their result already" in done.output
    assert "failed: label-relaxation-seed3: " in done.output  # it cannot take mixed images
    kept = {path.name for path in tmp_path.iterdir()}
    assert {"hard-seed3.json", "hard-seed3.predictions.csv.bz2", "comparison.html", "log.jsonl", "runs"} <= kept
