"""Killed at any moment and resumed, a run ends in the same bits as one that was left alone."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SETTINGS = [
    "data=synthetic:images=128,size=32", "short_side=32", "backbone=test_resnet", "epochs=6", "batch_size=16", "lr=.02",
    "lr_ccl=.01", "split.val=.25", "augment.crop=28", "method_settings.widths=[16, 8]", "method_settings.patience=2",
    "ema=.9", "deterministic=true",
]  # fmt: skip
SAME = ("model.safetensors", "predictions.csv", "soft_labels.csv")


def start(arguments: list[str], cwd: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cclnet", "train", "--accelerator", "cpu", "--quiet", *arguments]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()


def new_run(name: str, resident: bool) -> list[str]:
    sets = [f"--set={setting}" for setting in (*SETTINGS, f"resident={str(resident).lower()}")]
    return ["--out", name, *sets]


def wait_for_checkpoint(run: Path, process: subprocess.Popen[bytes], after: str = "") -> str:
    """Wait until the run has written a checkpoint newer than ``after``; its name."""
    for _ in range(6000):
        names = sorted(p.name for p in (run / "checkpoints").glob("epoch-*.pt"))
        if names and names[-1] > after:
            return names[-1]
        assert process.poll() is None, process.communicate()[1].decode()
        time.sleep(0.01)
    raise AssertionError("no checkpoint within a minute")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(start(new_run("whole", resident=True), folder))
    return folder / "whole"


def same(run: Path, undisturbed: Path) -> bool:
    return all((run / name).read_bytes() == (undisturbed / name).read_bytes() for name in SAME)


@pytest.mark.parametrize(("resident", "kills"), [(True, 2), (False, 1)])
def test_kill_nine_changes_nothing(tmp_path: Path, undisturbed: Path, resident: bool, kills: int) -> None:
    """Streamed or resident, it is the run that was left alone. How often more: benchmarks/kills.py."""
    chance = random.Random(resident)
    process, newest = start(new_run("killed", resident), tmp_path), ""
    for _ in range(kills):
        newest = wait_for_checkpoint(tmp_path / "killed", process, newest)
        time.sleep(chance.uniform(0.0, 0.15))
        process.kill()
        process.wait()
        assert not (tmp_path / "killed" / "predictions.csv").exists(), "it ended before it was killed"
        process = start(["--resume", "killed"], tmp_path)
    finish(process)
    assert same(tmp_path / "killed", undisturbed)


def test_a_signal_ends_between_two_steps_with_a_checkpoint(tmp_path: Path, undisturbed: Path) -> None:
    process = start(new_run("stopped", True), tmp_path)
    wait_for_checkpoint(tmp_path / "stopped", process)
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, errors.decode()
    assert b"cclnet train --resume stopped" in errors.replace(b"\n", b" ")
    finish(start(["--resume", "stopped"], tmp_path))
    assert same(tmp_path / "stopped", undisturbed)


def test_resume_takes_no_other_settings(tmp_path: Path) -> None:
    process = start(["--resume", "anything", "--lr", "0.5"], tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and b"resume" in errors
