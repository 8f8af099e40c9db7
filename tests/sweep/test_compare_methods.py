"""From what is asked for to the comparison: with runs made by hand, and once as a user gives the command."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cclnet import METHODS
from cclnet.cli import app
from cclnet.data.table import ImageTable
from cclnet.errors import InputError
from cclnet.evaluation.compare import compare
from cclnet.schema import to_plain
from cclnet.settings import make_settings
from cclnet.sweep.cells import parse_shard
from cclnet.sweep.compare_methods import (
    Entry,
    Request,
    cells_of,
    check_entries,
    compare_methods,
    fitting_entries,
    parse_entries,
)
from made_runs import made_result

SETTINGS = make_settings(
    {"data": "synthetic:images=84,size=32", "short_side": 32, "augment": {"crop": 28},
     "method": "ccl", "method_settings": {"widths": [16, 8]}}
)  # fmt: skip
HARD, CCL, SMOOTH = Entry("hard"), Entry("ccl"), Entry("lsr", {"epsilon": 0.3})


def request(folder: Path, *entries: Entry) -> Request:
    return Request(
        settings=SETTINGS, out=folder / "out", results=folder / "results", entries=entries, seeds=(0, 1), draws=50
    )


def output_of(asked: Request) -> str:
    console = Console(file=io.StringIO(), width=200)
    compare_methods(asked, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_settings_of_the_recipe_belong_to_its_method(tmp_path: Path) -> None:
    cells = cells_of(request(tmp_path, HARD, CCL, SMOOTH), [HARD, CCL, SMOOTH])
    assert list(cells) == ["hard", "ccl", "lsr (epsilon=0.3)"]
    assert [cell.name for own in cells.values() for cell in own] == [
        "hard-seed0", "hard-seed1", "ccl-seed0", "ccl-seed1", "lsr-epsilon-0.3-seed0", "lsr-epsilon-0.3-seed1",
    ]  # fmt: skip
    assert [own[1].settings.method_settings for own in cells.values()] == [{}, {"widths": (16, 8)}, {"epsilon": 0.3}]
    assert {cell.settings.split.seed for own in cells.values() for cell in own} == {0}


def test_what_has_its_result_is_compared_and_not_run_again(tmp_path: Path) -> None:
    asked = request(tmp_path, HARD, CCL, SMOOTH)
    for wrong, own in enumerate(cells_of(asked, asked.entries).values()):
        for cell in own:
            made_result(tmp_path, cell, wrong=12 + 3 * wrong + cell.settings.seed)
    output = output_of(asked)
    assert "3 methods, 2 seeds each, 84 images of 7 classes." in output
    assert "6 runs had their result already." in output and "−5.0 points" in output
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
    with pytest.raises(InputError, match=r"(?s)6 results do not match.*epochs was 160, is 2"):
        compare_methods(other, Console(quiet=True))


def test_every_pair_and_another_score(tmp_path: Path) -> None:
    asked = replace(request(tmp_path, HARD, CCL, SMOOTH), against="all", primary="kappa", seeds=(0,))
    for own in cells_of(asked, asked.entries).values():
        made_result(tmp_path, own[0], wrong=9)
    assert "comparison:" in output_of(asked)
    compared = json.loads((asked.results / "comparison.json").read_text())
    assert len(compared["comparisons"]) == 3 and compared["primary"] == "kappa"
    assert "Cohen's kappa" in (asked.results / "scores.md").read_text()


def test_a_score_that_is_not_known_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown score 'acuracy'; did you mean 'accuracy'"):
        compare_methods(replace(request(tmp_path, HARD), primary="acuracy"), Console(quiet=True))
    assert not (tmp_path / "results").exists() and not (tmp_path / "out").exists()


def test_out_of_time_nothing_is_begun_and_nothing_compared(tmp_path: Path) -> None:
    output = output_of(replace(request(tmp_path, HARD, SMOOTH), max_minutes=1e-9))
    assert "no comparison yet: no run of hard has finished." in output
    assert "4 unfinished, continue with the same command: hard-seed0, lsr-epsilon-0.3-seed0, hard-seed1" in output
    assert not (tmp_path / "results" / "comparison.html").exists()


def test_the_reference_must_take_part(tmp_path: Path) -> None:
    asked = replace(request(tmp_path, HARD, CCL), against="ols")
    with pytest.raises(InputError, match=r"unknown method to compare against 'ols'.*Known: all, ccl, hard"):
        compare_methods(asked, Console(quiet=True))


@pytest.mark.usefixtures("forked_sweep")
def test_the_command_runs_compares_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    words = ["compare-methods", "synthetic:images=84,size=32", "--methods", "label-relaxation,hard", "--seeds", "3",
             "--backbone", "test_resnet", "--epochs", "1", "--set", "short_side=32", "--set", "augment.crop=28",
             "--set", "batch_size=16", "--set", "augment.mixup=0.2", "--out", str(tmp_path), "--accelerator", "cpu",
             "--draws", "50"]  # fmt: skip
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, done.output
    assert "1 run done in" in done.output and "already" not in done.output
    assert "failed: label-relaxation-seed3: " in done.output  # it cannot take mixed images
    kept = {path.name for path in tmp_path.iterdir()}
    assert {"hard-seed3.json", "hard-seed3.predictions.npy.xz", "comparison.html", "log.jsonl", "runs"} <= kept


def table(several_labels: bool = False) -> ImageTable:
    labels = np.eye(3, dtype=np.uint8)[[0, 1, 2, 0]] if several_labels else np.array([0, 1, 2, 0])
    return ImageTable("made", Path(), list("abcd"), np.zeros((4, 8, 8), np.uint8), labels, ("A", "B", "C"))


def test_by_default_fitting_entries_each_once() -> None:
    chosen, left_out = fitting_entries(table())
    names = [entry.method for entry in chosen]
    assert {"hard", "lsr", "lsr-u5", "lsr-a1", "ccl", "ols", "tf-kd", "mbls", "maxsup", "focal"} <= set(names)
    assert left_out == [
        "lsr-u1: the same as lsr",
        "ordinal: for classes that have an order; name it in --methods if these have",
    ]
    check_entries(chosen, table())


def test_a_method_that_balances_classes_is_left_out_where_the_loader_does() -> None:
    chosen, left_out = fitting_entries(table(), classes_balanced=True)
    assert "ccl-balanced" not in [entry.method for entry in chosen]
    assert [reason.partition(":")[0] for reason in left_out] == ["ccl-balanced", "lsr-u1", "ordinal"]
    with pytest.raises(InputError, match=r"ccl-balanced.*class_weights"):
        check_entries([Entry("ccl-balanced")], table(), classes_balanced=True)


def test_several_labels_have_their_own_methods() -> None:
    chosen, left_out = fitting_entries(table(several_labels=True))
    assert [entry.method for entry in chosen] == ["bce", "ccl-multilabel"] and not left_out
    everything = fitting_entries(table())[0] + chosen
    assert {entry.method for entry in everything} == set(METHODS) - {"ordinal", "lsr-u1"}


def test_every_method_that_cannot_take_part_is_named() -> None:
    asked = [Entry("bce"), Entry("hard"), Entry("lsr", {"epsilon": 2.0}), Entry("ols", {"beta": 1})]
    with pytest.raises(InputError) as raised:
        check_entries(asked, table())
    output = str(raised.value)
    assert output.startswith("these methods cannot take part:") and output.count("\n  - ") == 3
    assert "- bce: " in output and "- lsr (epsilon=2.0): " in output and "- ols (beta=1): unknown setting" in output
    with pytest.raises(InputError, match=r"- hard: method 'hard' .* 'bce'"):
        check_entries([Entry("hard")], table(several_labels=True))


def test_one_method_may_take_part_with_several_settings() -> None:
    chosen = parse_entries("lsr, lsr:epsilon=.3, lsr:epsilon=0.3,prior=true")
    assert [dict(entry.settings) for entry in chosen] == [
        {},
        {"epsilon": 0.3},
        {"epsilon": 0.3, "prior": True},
    ]
    assert [entry.name(1) for entry in chosen] == [
        "lsr-seed1",
        "lsr-epsilon-0.3-seed1",
        "lsr-epsilon-0.3-prior-True-seed1",
    ]
    assert parse_entries("") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clc", "unknown method 'clc'; did you mean 'ccl'"),
        ("epsilon=1,lsr", "expected a method first, such as lsr:epsilon=0.3; got 'epsilon=1,lsr'"),
        ("hard,ccl,hard", "given more than once: hard"),
    ],
)
def test_what_names_no_methods(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_entries(text)


def test_a_shard_runs_its_own_cells(tmp_path: Path) -> None:
    output = output_of(replace(request(tmp_path, HARD, SMOOTH), shard=parse_shard("2/2"), max_minutes=1e-9))
    assert "2 unfinished, continue with the same command: lsr-epsilon-0.3-seed0, lsr-epsilon-0.3-seed1" in output
    with pytest.raises(InputError, match="3/2"):
        replace(request(tmp_path, HARD), shard=(3, 2))
    with pytest.raises(InputError, match="stall_minutes"):
        replace(request(tmp_path, HARD), stall_minutes=0.0)
