"""Two processes and one give the same run."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

SETTINGS = [
    "data=synthetic:images=130,size=32", "short_side=32", "backbone=test_resnet", "epochs=6", "batch_size=16", "lr=.02",
    "lr_ccl=.5", "split.val=.25", "augment.crop=28", "method_settings.widths=[16, 8]", "method_settings.patience=1",
    "precision=64", "batch_norm=frozen",
]  # fmt: skip


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(cwd: Path, processes: int) -> Path:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        launcher += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = [*launcher, "-m", "cclnet", "train", "--accelerator", "cpu", "--quiet", "--out", f"run{processes}"]
    command += [f"--set={setting}" for setting in SETTINGS]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return cwd / f"run{processes}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("distributed")
    return run(folder, 1), run(folder, 2)


def test_losses_and_freeze_agree(runs: tuple[Path, Path]) -> None:
    one, two = ([json.loads(line) for line in (r / "metrics.jsonl").read_text().splitlines()] for r in runs)
    assert len(one) == len(two) == 6
    for a, b in zip(one, two, strict=True):
        for term in ("loss", "cross_entropy", "kl", "head_cross_entropy", "class_correlation", "softness", "val_loss"):
            assert a[term] == pytest.approx(b[term], abs=1e-5), (a["epoch"], term)
        assert a["frozen"] == b["frozen"]
    assert one[-1]["frozen"] == 1.0  # so that the freeze was seen on both


def test_each_image_is_tested_once(runs: tuple[Path, Path]) -> None:
    one, two = (pd.read_csv(r / "predictions.csv") for r in runs)
    assert two["image"].is_unique and set(one["image"]) == set(two["image"])
    columns = [name for name in one if name.startswith("p_")]
    merged = one.merge(two, on="image")
    np.testing.assert_allclose(
        merged[[f"{c}_x" for c in columns]].to_numpy(), merged[[f"{c}_y" for c in columns]].to_numpy(), atol=1e-5
    )


def test_what_is_tested_is_what_is_shipped(tmp_path: Path) -> None:
    """Batch norm keeps averages of its own on every rank; those of rank 0 are shipped, and all must test with them."""
    settings = ["data=synthetic:images=130,size=32", "short_side=32", "backbone=test_resnet", "epochs=2",
                "batch_size=16", "lr=.05", "method=hard", "split.val=.25", "augment.crop=28"]  # fmt: skip
    command = [sys.executable, "-m", "cclnet", "train", "--accelerator", "cpu", "--quiet"]
    started = [*command, "--out", "run", "--devices", "2", *(f"--set={setting}" for setting in settings)]
    done = subprocess.run(started, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report: run/report.html") == 1  # one process speaks for all
    together = pd.read_csv(tmp_path / "run" / "predictions.csv").set_index("image")
    again = [*command, "--resume", "run"]  # finished: one process tests the same weights again
    done = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    alone = pd.read_csv(tmp_path / "run" / "predictions.csv").set_index("image").loc[together.index]
    columns = [name for name in together if name.startswith("p_")]
    np.testing.assert_allclose(together[columns], alone[columns], atol=1e-5)
