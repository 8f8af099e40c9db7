"""An interrupted and resumed run ends in the same bits as an uninterrupted one."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cclnet import InputError
from cclnet.runs.checksums import write_covered
from cclnet.settings import make_settings
from cclnet.training.loop import train
from started import Command

SETTINGS = [
    "data=synthetic:images=128,size=32", "short_side=32", "backbone=test_resnet", "epochs=6", "batch_size=16", "lr=.02",
    "lr_ccl=.01", "split.val=.25", "augment.crop=28", "method_settings.widths=[16, 8]", "method_settings.patience=2",
    "ema=.9", "deterministic=true",
]  # fmt: skip
SAME = ("model.safetensors", "predictions.csv", "soft_labels.csv")


TRAIN = ["train", "--accelerator", "cpu", "--quiet"]


def start(arguments: list[str], cwd: Path) -> Command:
    return Command([*TRAIN, *arguments], cwd)


def finish(process: Command) -> None:
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


def new_run(name: str, resident: bool) -> list[str]:
    sets = [f"--set={setting}" for setting in (*SETTINGS, f"resident={str(resident).lower()}")]
    return ["--out", name, *sets]


def wait_for_checkpoint(run: Path, process: Command, after: str = "") -> str:
    """Wait for a checkpoint newer than ``after`` and return its name."""
    for _ in range(6000):
        names = sorted(p.name for p in (run / "checkpoints").glob("epoch-*.pt"))
        if names and names[-1] > after:
            return names[-1]
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    raise AssertionError("no checkpoint within a minute")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    # In a process that has nothing in common with those of the resumed runs.
    subprocess.run([sys.executable, "-m", "cclnet", *TRAIN, *new_run("whole", resident=True)], cwd=folder, check=True)
    return folder / "whole"


def same(run: Path, uninterrupted: Path) -> bool:
    return all((run / name).read_bytes() == (uninterrupted / name).read_bytes() for name in SAME)


@pytest.mark.parametrize(("resident", "kills"), [(True, 2), (False, 1)])
def test_sigkill_and_resume(tmp_path: Path, uninterrupted: Path, resident: bool, kills: int) -> None:
    """With images resident and streamed. benchmarks/kills.py does it more often."""
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
    assert same(tmp_path / "killed", uninterrupted)


def test_a_signal_stops_between_two_steps_with_a_checkpoint(tmp_path: Path, uninterrupted: Path) -> None:
    process = start(new_run("stopped run", True), tmp_path)
    wait_for_checkpoint(tmp_path / "stopped run", process)
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "cclnet train --resume 'stopped run'" in errors.replace("\n", " ")
    finish(start(["--resume", "stopped run"], tmp_path))
    assert same(tmp_path / "stopped run", uninterrupted)


def test_resume_accepts_no_other_settings(tmp_path: Path) -> None:
    process = start(["--resume", "anything", "--lr", "0.5"], tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and "keeps its settings" in errors


SIMILARITY: dict[str, Any] = {
    "data": "synthetic:images=112,size=32", "short_side": 32, "backbone": "test_resnet", "epochs": 3, "batch_size": 16,
    "lr": 0.02, "lr_ccl": 0.1, "split": {"val": 0.25}, "augment": {"crop": 28},
}  # fmt: skip


class Stop(Exception):
    pass


def stop_after_two_epochs(record: dict[str, Any], _: object) -> None:
    if record["epoch"] == 2:
        raise Stop


def test_damage_and_leftovers_of_a_kill(tmp_path: Path) -> None:
    """A newest checkpoint with a flipped bit is not used; unfinished files are removed; the same bits as ever."""
    settings = make_settings(SIMILARITY, {"method": "ccl", "method_settings": {"widths": (16, 8)}})
    whole = train(settings, tmp_path / "whole", accelerator="cpu", progress=False)
    with pytest.raises(Stop):
        train(settings, tmp_path / "stopped", accelerator="cpu", progress=False, on_epoch=stop_after_two_epochs)
    checkpoints = tmp_path / "stopped" / "checkpoints"
    newest = max(checkpoints.glob("*.pt"))
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 16
    newest.write_bytes(content)
    leftovers = [tmp_path / "stopped" / ".model.json.123.partial", checkpoints / f".{newest.name}.123.partial"]
    for path in leftovers:
        path.write_bytes(b"unfinished")
    with pytest.warns(UserWarning, match=rf"{newest.name} is refused.*goes on from .*epoch-000001"):
        stopped = train(None, tmp_path / "stopped", accelerator="cpu", progress=False)
    assert same(stopped, whole)
    assert not any(path.exists() for path in leftovers)


def test_a_checkpoint_of_another_network(tmp_path: Path) -> None:
    settings = make_settings(SIMILARITY, {"method": "hard", "epochs": 2})
    run = train(settings, tmp_path / "run", accelerator="cpu", progress=False)
    newest = max((run / "checkpoints").glob("*.pt"))
    state = torch.load(newest, weights_only=True)
    for wrong in ({"network": {}}, {"optimizer": {"state": {}, "param_groups": []}}, {"terms": None}, {"random": 3}):
        write_covered(newest, partial(torch.save, state | wrong))
        with pytest.raises(InputError, match=r"does not fit the settings|not a cclnet checkpoint"):
            train(None, run, accelerator="cpu", progress=False)
        for path in (run / "checkpoints").glob("*step-00000000.pt*"):
            if path != newest:
                path.unlink()  # so that there is none to fall back to


@pytest.mark.parametrize("method", ["ccl-centroid", "ccl-confusion", "ccl-balanced"])
def test_the_state_of_a_method_is_resumed(tmp_path: Path, method: str) -> None:
    def run(name: str, method: str, **more: Any) -> Path:
        head = {"method_settings": {"widths": (16, 8)}} if method == "ccl-balanced" else {}
        settings = make_settings(SIMILARITY, {"method": method}, head)
        return train(settings, tmp_path / name, accelerator="cpu", progress=False, **more)

    whole = run("whole", method)
    with pytest.raises(Stop):
        run("stopped", method, on_epoch=stop_after_two_epochs)
    stopped = train(None, tmp_path / "stopped", accelerator="cpu", progress=False)
    assert same(stopped, whole)
    soft_labels = np.loadtxt(whole / "soft_labels.csv", delimiter=",", skiprows=1, usecols=range(1, 8))
    assert soft_labels[0, 1:].std() > 1e-4  # the method had learned something to resume
    hard = run("hard", "hard")
    shipped, plain = load_file(whole / "model.safetensors"), load_file(hard / "model.safetensors")
    assert {name: v.shape for name, v in shipped.items()} == {name: v.shape for name, v in plain.items()}
