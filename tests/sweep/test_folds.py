"""Folds of one training on every executor: the same files as one after the other in one process, or a clear error."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import cclnet
from cclnet import InputError
from cclnet.cli import app
from cclnet.data.sources import open_data
from cclnet.errors import Interrupted
from cclnet.settings import make_settings
from cclnet.sweep import Executor, RayOptions, folds
from cclnet.sweep.cells import SweepSummary
from cclnet.sweep.folds import LOCK, fold_cells, train_folds
from waiting import wait_for

DATA = "synthetic:images=84,size=32"
EPOCHS = 30  # a few seconds, in which a fold can be interrupted
OPTIONS: dict[str, Any] = {
    "backbone": "test_resnet", "short_side": 32, "epochs": EPOCHS, "batch_size": 32, "method": "ccl",
    "method_settings": {"widths": (16, 8)}, "augment": {"crop": 28}, "deterministic": True, "logger": "none",
    "folds": 3,
}  # fmt: skip
SETTINGS = make_settings({"data": DATA, **OPTIONS})
DURATION = rb"[\d.,]+ (seconds?|minutes?|images per second|images/s)"  # in reports


def train(out: Path, **changes: Any) -> Path:
    given = {"preset": "paper", "accelerator": "cpu", "progress": False, **OPTIONS, **changes}
    return cclnet.train(DATA, out, **given)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All folds one after the other in this process."""
    return train(tmp_path_factory.mktemp("whole") / "run")


def files_of(run: Path) -> dict[str, Any]:
    """The content of every file in a folder of folds, without what depends on the time that training took."""
    return {
        path.relative_to(run).as_posix(): _untimed(path)
        for path in run.rglob("*")
        if path.is_file() and path.name != "SHA256SUMS"  # they cover times, too
    }


def _untimed(path: Path) -> Any:
    if path.suffix == ".pt":
        return _plain({**torch.load(path, weights_only=True), "seconds": None})
    content = path.read_bytes()
    if path.suffix in (".json", ".jsonl"):
        return re.sub(rb'"(seconds|images_per_second)": [\d.e+-]+', b"", content)
    return re.sub(DURATION, b"", content) if path.name.startswith("report.") else content


def _plain(value: Any) -> Any:
    """The content of a checkpoint, of which the pickled form depends on which of its strings are one object."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(own) for name, own in value.items()}
    return [_plain(own) for own in value] if isinstance(value, (list, tuple)) else value


def with_folds(whole: Path, out: Path, *names: str) -> Path:
    """A folder that has the settings and these folds, but no ensemble yet."""
    out.mkdir(exist_ok=True)
    shutil.copy(whole / "settings.toml", out)
    for name in names:
        shutil.copytree(whole / name, out / name)
    return out


def test_processes_continue_what_one_process_began_and_write_the_same_files(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"

    def stop(record: Mapping[str, Any], network: Any) -> None:
        if record["epoch"] == 5:
            raise Interrupted(tmp_path, 15)

    with pytest.raises(Interrupted, match=f"--resume {out}$"):
        train(out, on_epoch=stop)
    with_folds(whole, out, "fold-2")
    begun = (out / "fold-0" / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # one thread for each of two processes, as this one has
    train(out, executor=Executor(parallel=2))
    assert begun.count(b"\n") == 5 and (out / "fold-0" / "metrics.jsonl").read_bytes().startswith(begun)
    assert files_of(out) == files_of(whole)


def test_shards_share_a_folder_and_the_last_one_makes_the_ensemble(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = with_folds(whole, tmp_path / "run", "fold-0", "fold-1")
    train(out, executor=Executor(shard=(2, 3)), progress=True)
    output = capsys.readouterr().out
    assert "2 of 3 folds are finished; missing: fold-2 (not begun)." in output and f"--resume {out}" in output
    assert not (out / "model.json").exists()
    train(out, executor=Executor(shard=(3, 3)))
    assert files_of(out) == files_of(whole)


def test_of_shards_that_end_at_once_one_makes_the_ensemble(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = with_folds(whole, tmp_path / "run", "fold-0", "fold-1", "fold-2")
    (out / LOCK).touch()
    assert train_folds(SETTINGS, out, Executor(shard=(1, 2))) is None
    assert "another shard makes the ensemble" in capsys.readouterr().out and not (out / "model.json").exists()
    scores = train_folds(SETTINGS, out)  # not a shard: the lock is of one that was killed
    assert scores is not None and scores.split.images == 84 and not (out / LOCK).exists()
    assert train_folds(SETTINGS, out, Executor(shard=(1, 2))) is None and not (out / LOCK).exists()


def test_folds_on_ray_outlive_a_lost_node(cluster: Any, whole: Path, tmp_path: Path) -> None:
    out = with_folds(whole, tmp_path / "run", "fold-2")
    console = Console(file=io.StringIO(), width=300)

    def kill_node() -> str:
        def victim() -> Any:
            lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
            for node in cluster.worker_nodes:
                own = [line.split()[2] for line in lines if f"node {node.node_id[:8]}" in line]
                history = out / own[-1] / "metrics.jsonl" if own else out
                if history.is_file() and 3 <= len(history.read_text().splitlines()) < EPOCHS - 8:
                    return node, own[-1]
            return None

        node, name = wait_for(victim)
        cluster.remove_node(node, allow_graceful=False)
        return str(name)

    with ThreadPoolExecutor(1) as thread, pytest.MonkeyPatch.context() as patch:
        patch.setattr(folds, "Console", lambda quiet: console)
        killed = thread.submit(kill_node)
        train(out, executor=Executor(ray=RayOptions(address=cluster.address)))
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert sum(f" {killed.result()} " in line and "starting on" in line for line in lines) == 2
    assert files_of(out) == files_of(whole)


def ended(monkeypatch: pytest.MonkeyPatch, summary: SweepSummary) -> None:
    """Let every sweep of folds end so, without training."""
    monkeypatch.setattr(folds, "run_on", lambda *arguments: summary)


def test_a_signal_names_the_command_that_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended(monkeypatch, SweepSummary(["fold-0", "fold-1"], signal=15))
    words = ["train", DATA, "--preset", "paper", "--folds", "3", "--backbone", "test_resnet", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*words, "--short-side", "32", "--set", "augment.crop=28", "--parallel", "2"])
    assert done.exit_code == 128 + 15
    assert f"Continue with: cclnet train --resume {tmp_path} --parallel 2" in done.output
    assert (tmp_path / "settings.toml").exists()


def test_folds_that_fail_give_their_reasons_and_leave_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = {"fold-1": "no images", "fold-0": "no images", "fold-2": "ValueError: x (see error.txt)"}
    ended(monkeypatch, SweepSummary([*failed], failed=failed))
    with pytest.raises(InputError, match=r"3 of 3 .*:\n  fold-0, fold-1: no images\n  fold-2: ValueError: x \(see"):
        train(tmp_path / "run", executor=Executor(parallel=2))
    assert not (tmp_path / "run").exists()  # the same folder can be used with other settings


def test_other_settings_are_refused(whole: Path) -> None:
    with pytest.raises(InputError, match=r"other settings \(lr was 0.1, is 0.5\).*--resume"):
        train(whole, lr=0.5)
    table = open_data(DATA)
    assert [(cell.name, cell.settings.split.fold) for cell in fold_cells(SETTINGS, table)] == [
        ("fold-0", 0),
        ("fold-1", 1),
        ("fold-2", 2),
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"folds": 0, "executor": Executor(parallel=2)}, "give folds"),
        ({"out": None, "executor": Executor(shard=(1, 2))}, "give --out"),
        ({"on_epoch": print, "executor": Executor(parallel=2)}, "on_epoch is called in this process"),
        ({"devices": 2}, "need torchrun"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        train(**{"out": tmp_path / "run", **changes})
    assert not any(tmp_path.iterdir())


def test_several_processes_of_torchrun_do_not_start_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="torchrun or srun started several processes"):
        train(tmp_path / "run", executor=Executor(parallel=2))
