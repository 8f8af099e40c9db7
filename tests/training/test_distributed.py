"""Several processes and one give the same run."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from started import Command

SETTINGS = [
    "data=synthetic:images=130,size=32", "short_side=32", "backbone=test_resnet", "epochs=6", "batch_size=16", "lr=.02",
    "lr_ccl=.5", "split.val=.25", "augment.crop=28", "method_settings.widths=[16, 8]", "method_settings.patience=1",
    "precision=64", "batch_norm=frozen", "warmup_epochs=1",
]  # fmt: skip


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def command(out: str, settings: Sequence[str] = SETTINGS) -> list[str]:
    words = ["train", "--accelerator", "cpu", "--quiet", "--out", out]
    return words + [f"--set={setting}" for setting in settings]


def run(cwd: Path, processes: int) -> Path:
    """A run of processes as torchrun starts them, or of one."""
    words = [sys.executable, "-m", "cclnet", *command(f"run{processes}")]
    if processes > 1:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        words[1:1] = [*torchrun, "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return cwd / f"run{processes}"


def torchrun_tasks(cwd: Path, words: Sequence[str], processes: int) -> list[Command]:
    """Processes with the variables that torchrun gives them; alone without."""
    if processes == 1:
        return [Command(words, cwd)]
    count = str(processes)
    shared = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": "0",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # fmt: skip
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return [Command(words, cwd, os.environ | shared | own) for own in ranks]


def slurm_tasks(cwd: Path, words: Sequence[str], job_name: str = "bash") -> list[Command]:
    """Two tasks with the variables that ``srun -n 2`` of SLURM 22.05 gives them."""
    shared = {"SLURM_JOB_ID": "70", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1",
              "SLURM_STEP_NODELIST": "localhost", "SLURM_NODELIST": "localhost", "SLURM_NTASKS": "2",
              "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_NAME": job_name,
              "MASTER_PORT": str(free_port())}  # fmt: skip
    return [
        Command(words, cwd, os.environ | shared | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
        for rank in range(2)
    ]  # fmt: skip


def finish(tasks: Sequence[Command]) -> list[int | None]:
    """Wait for the tasks and return their exit codes. pytest shows the output if a test fails."""
    for task in tasks:
        print(*task.communicate(timeout=300))
    return [task.returncode for task in tasks]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("distributed")
    return run(folder, 1), run(folder, 2)


def test_tasks_of_slurm_train_together(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Also if the job is named like a shell, which Lightning takes for an interactive session."""
    assert finish(slurm_tasks(tmp_path, command("slurm"), job_name="bash")) == [0, 0]
    assert (tmp_path / "slurm" / "metrics.jsonl").read_text().count("\n") == 6
    torchrun, slurm = (pd.read_csv(folder / "predictions.csv") for folder in (runs[1], tmp_path / "slurm"))
    assert slurm["image"].tolist() == torchrun["image"].tolist()
    columns = [name for name in slurm if name.startswith("p_")]
    np.testing.assert_allclose(slurm[columns], torchrun[columns], atol=1e-5)


def test_processes_stop_and_resume_together(tmp_path: Path) -> None:
    """A signal to one process stops both within an epoch, and the resumed run ends in the same bits: dropout differs
    between the processes, and each gets its own random state again."""
    settings = [
        "data=synthetic:images=280,size=32", "short_side=32", "augment.crop=28", "split.val=.2", "backbone=test_resnet",
        "method=ccl-confusion", "epochs=3", "batch_size=4", "lr=.01", "drop_rate=.5",
    ]  # fmt: skip
    assert finish(slurm_tasks(tmp_path, command("whole", settings))) == [0, 0]
    words, resume = command("stopped", settings), [*command("")[:4], "--resume", "stopped"]
    for _ in range(5):  # until the signal arrives within an epoch
        tasks = slurm_tasks(tmp_path, words)
        metrics = tmp_path / "stopped" / "metrics.jsonl"
        while not metrics.exists() and all(task.poll() is None for task in tasks):
            time.sleep(0.05)
        time.sleep(0.3)
        tasks[1].terminate()
        assert finish(tasks) == [143, 143]
        newest = max(path.stem for path in (tmp_path / "stopped" / "checkpoints").iterdir())
        if not newest.endswith("step-00000000"):
            break
        shutil.rmtree(tmp_path / "stopped")
    else:
        pytest.fail("was never stopped within an epoch")
    assert finish(slurm_tasks(tmp_path, resume)) == [0, 0]
    whole, stopped = (tmp_path / name for name in ("whole", "stopped"))
    assert (whole / "model.safetensors").read_bytes() == (stopped / "model.safetensors").read_bytes()
    assert (whole / "predictions.csv").read_bytes() == (stopped / "predictions.csv").read_bytes()
    for a, b in zip(*(map(json.loads, (r / "metrics.jsonl").open()) for r in (whole, stopped)), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-12)


def test_losses_and_freeze_agree(runs: tuple[Path, Path]) -> None:
    one, two = ([json.loads(line) for line in (r / "metrics.jsonl").read_text().splitlines()] for r in runs)
    assert len(one) == len(two) == 6
    for a, b in zip(one, two, strict=True):
        for term in ("loss", "cross_entropy", "kl", "head_cross_entropy", "class_correlation", "softness", "val_loss"):
            assert a[term] == pytest.approx(b[term], abs=1e-6), (a["epoch"], term)
        assert a["frozen"] == b["frozen"]
    assert one[-1]["frozen"] == 1.0  # so the freeze happened in both


@pytest.mark.parametrize(("method", "processes"), [("ccl-centroid", 2), ("ccl-confusion", 4)])
def test_similarity_labels_agree(tmp_path: Path, method: str, processes: int) -> None:
    settings = ["data=synthetic:images=112,size=32", "short_side=32", "backbone=test_resnet", "epochs=3",
                "batch_size=16", "lr=.02", "split.val=.25", "augment.crop=28", "precision=64", "batch_norm=frozen",
                f"method={method}"]  # fmt: skip
    for count in (1, processes):
        assert finish(torchrun_tasks(tmp_path, command(f"run{count}", settings), count)) == [0] * count
    folders = tmp_path / "run1", tmp_path / f"run{processes}"
    one, several = ([json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in folders)
    for a, b in zip(one, several, strict=True):
        for term in ("loss", "cross_entropy", "kl", "softness", "structure", "frozen", "val_loss"):
            assert a[term] == pytest.approx(b[term], abs=1e-6), (a["epoch"], term)
    one_labels, labels = (
        np.loadtxt(f / "soft_labels.csv", delimiter=",", skiprows=1, usecols=range(1, 8)) for f in folders
    )
    assert one_labels.std() > 0.01
    np.testing.assert_allclose(one_labels, labels, atol=1e-6)


def test_each_image_is_evaluated_once(runs: tuple[Path, Path]) -> None:
    one, two = (pd.read_csv(r / "predictions.csv") for r in runs)
    assert two["image"].is_unique and set(one["image"]) == set(two["image"])
    columns = [name for name in one if name.startswith("p_")]
    merged = one.merge(two, on="image")
    np.testing.assert_allclose(
        merged[[f"{c}_x" for c in columns]].to_numpy(), merged[[f"{c}_y" for c in columns]].to_numpy(), atol=1e-5
    )


def test_the_evaluated_weights_are_the_shipped_ones(tmp_path: Path) -> None:
    """Batch norm statistics differ between ranks; those of rank 0 are shipped, so all ranks must evaluate with them."""
    settings = ["data=synthetic:images=130,size=32", "short_side=32", "backbone=test_resnet", "epochs=2",
                "batch_size=16", "lr=.05", "method=hard", "split.val=.25", "augment.crop=28"]  # fmt: skip
    started = [sys.executable, "-m", "cclnet", *command("run", settings), "--devices", "2"]
    done = subprocess.run(started, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report: run/report.html") == 1  # printed by rank 0 only
    together = pd.read_csv(tmp_path / "run" / "predictions.csv").set_index("image")
    again = [*command("")[:4], "--resume", "run"]  # finished: one process evaluates the same weights again
    assert finish([Command(again, tmp_path)]) == [0]
    alone = pd.read_csv(tmp_path / "run" / "predictions.csv").set_index("image").loc[together.index]
    columns = [name for name in together if name.startswith("p_")]
    np.testing.assert_allclose(together[columns], alone[columns], atol=1e-5)
