"""Soft labels that follow looks, in whole runs: the same when resumed, the same on two processes, nothing shipped."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from cclnet.settings import make_settings
from cclnet.training.loop import train

TINY: dict[str, Any] = {
    "data": "synthetic:images=112,size=32", "short_side": 32, "backbone": "test_resnet", "epochs": 3, "batch_size": 16,
    "lr": 0.02, "lr_ccl": 0.1, "split": {"val": 0.25}, "augment": {"crop": 28},
}  # fmt: skip
WIDTHS = {"method_settings": {"widths": (16, 8)}}


class Stop(Exception):
    pass


def stop(record: dict[str, Any], _: object) -> None:
    if record["epoch"] == 2:
        raise Stop


def run(folder: Path, method: str, **more: Any) -> Path:
    without_head = method in ("ccl-centroid", "ccl-confusion", "hard")
    settings = make_settings(TINY, {"method": method}, {} if without_head else WIDTHS)
    return train(settings, folder, accelerator="cpu", progress=False, **more)


@pytest.mark.parametrize("method", ["ccl-centroid", "ccl-confusion", "ccl-balanced"])
def test_stopped_and_resumed_it_is_the_same_run(tmp_path: Path, method: str) -> None:
    whole = run(tmp_path / "whole", method)
    with pytest.raises(Stop):
        run(tmp_path / "cut", method, on_epoch=stop)
    cut = train(None, tmp_path / "cut", accelerator="cpu", progress=False)
    for name in ("soft_labels.csv", "predictions.csv", "model.safetensors"):
        assert (whole / name).read_bytes() == (cut / name).read_bytes()
    assert correlation(whole)[0, 1:].std() > 1e-4  # it had learned something to go on with
    hard = run(tmp_path / "hard", "hard")
    shipped, plain = load_file(whole / "model.safetensors"), load_file(hard / "model.safetensors")
    assert {name: v.shape for name, v in shipped.items()} == {name: v.shape for name, v in plain.items()}


def correlation(folder: Path) -> np.ndarray[Any, Any]:
    return np.loadtxt(folder / "soft_labels.csv", delimiter=",", skiprows=1, usecols=range(1, 8))


def test_two_processes_and_one_give_the_same_labels(tmp_path: Path) -> None:
    flat = ["data=synthetic:images=112,size=32", "short_side=32", "backbone=test_resnet", "epochs=2", "batch_size=16",
            "lr=.02", "split.val=.25", "augment.crop=28", "precision=64", "batch_norm=frozen",
            "method=ccl-centroid"]  # fmt: skip
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    two = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    for name, launcher in (("one", []), ("two", two)):
        command = [sys.executable, *launcher, "-m", "cclnet", "train", "--accelerator", "cpu", "--quiet", "--out", name]
        command += [f"--set={setting}" for setting in flat]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    alone, together = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    for a, b in zip(alone, together, strict=True):
        for term in ("cross_entropy", "kl", "softness", "structure", "frozen"):
            assert a[term] == pytest.approx(b[term], abs=1e-5), (a["epoch"], term)
    np.testing.assert_allclose(correlation(tmp_path / "one"), correlation(tmp_path / "two"), atol=1e-5)
