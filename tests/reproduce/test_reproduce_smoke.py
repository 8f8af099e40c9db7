"""The command as a user gives it, on drawn images, with a real network; a part of the matrix, for time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cclnet.cli import app

COMMAND = ["reproduce", "table1", "--smoke", "--accelerator", "cpu", "--backbones", "mobilenetv2_100",
           "--methods", "hard,ccl"]  # fmt: skip


def run(out: Path) -> str:
    done = CliRunner().invoke(app, [*COMMAND, "--out", str(out)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.usefixtures("forked_sweep")
def test_part_of_the_matrix_and_then_nothing_more_to_do(tmp_path: Path) -> None:
    output = run(tmp_path)
    assert "2 runs done in" in output and "already" not in output
    results = sorted((tmp_path / "results").glob("*-seed0.json"))
    assert [path.stem for path in results] == ["paper-mobilenetv2_100-ccl-seed0", "paper-mobilenetv2_100-hard-seed0"]
    assert json.loads(results[0].read_text())["settings"]["backbone"] == "mobilenetv2_100"
    assert "| MobileNetV2 | CCL-Net | 1 |" in (tmp_path / "results" / "table1.md").read_text()
    [line] = (tmp_path / "results" / "log.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["done"]) == [path.stem for path in results]
    assert not list(tmp_path.glob("runs/*/checkpoints"))
    assert "2 runs had their result already." in run(tmp_path)
