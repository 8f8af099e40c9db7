"""Sweeps on a Ray cluster of three simulated nodes. Ray keeps its files and ports in a folder of this test alone."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cclnet.cli import app
from cclnet.errors import InputError
from cclnet.settings import make_settings
from cclnet.sweep import ray_tasks
from cclnet.sweep.cells import Cell, RayOptions, SweepContext, SweepSummary
from cclnet.sweep.compare_methods import Entry, Request, compare_methods
from cclnet.sweep.ray_tasks import Board, Outcome, cell_task, read_files, write_files
from cclnet.sweep.results import keep_result
from made_runs import made_run
from waiting import wait_for

TIMED = {"seconds", "images_per_second"}  # of a result: the only values that depend on the machine
CELLS = {f"{method}-seed{seed}" for method in ("hard", "ccl") for seed in (0, 1)}
EPOCHS = 120  # some seconds, in which a cell can be interrupted
SETTINGS = make_settings({
    "data": "synthetic:images=84,size=32", "backbone": "test_resnet", "short_side": 32, "epochs": EPOCHS,
    "batch_size": 32, "method": "ccl", "method_settings": {"widths": [16, 8]}, "augment": {"crop": 28},
    "deterministic": True, "logger": "none",
})  # fmt: skip


def request(folder: Path, **changes: Any) -> Request:
    asked = Request(
        settings=SETTINGS, out=folder, results=folder, entries=(Entry("hard"), Entry("ccl")), seeds=(0, 1), draws=50,
        accelerator="cpu", cache_dir=folder / "cache",
    )  # fmt: skip
    return replace(asked, **changes)


def results_of(folder: Path) -> dict[str, Any]:
    """The content of every result file, without what depends on the time that training took."""
    files: dict[str, Any] = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    for name in CELLS:
        files[f"{name}.json"] = {k: v for k, v in json.loads(files[f"{name}.json"]).items() if k not in TIMED}
    del files["log.jsonl"]  # when the commands began, and how long they took
    return files


@contextmanager
def _invisible(folder: Path) -> Iterator[Path]:
    """The marker of a folder that the nodes do not see."""
    yield folder / "not-there"


def epochs_of(folder: Path) -> dict[str, list[str]]:
    """The lines of the history of each cell that is not trained to the end."""
    histories = (folder / "runs").glob("*/metrics.jsonl")
    return {
        path.parent.name: path.read_text().splitlines()
        for path in histories
        if not (path.parent / "predictions.csv").exists()
    }


def test_a_sweep_outlives_an_interruption_and_a_lost_node(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, options = tmp_path / "ray", RayOptions(address=cluster.address)
    with ThreadPoolExecutor(1) as thread:
        # Nodes without shared storage; interrupted when the first checkpoint of a cell has arrived.
        def interrupt() -> None:
            wait_for(lambda: len(list(out.glob("runs/*/checkpoints"))) >= 1)
            os.kill(os.getpid(), signal.SIGTERM)

        with monkeypatch.context() as patch:
            patch.setattr(ray_tasks, "_marked", _invisible)
            interrupted = thread.submit(interrupt)
            first = compare_methods(request(out, ray=options), Console(quiet=True))
        interrupted.result()
        assert first.exit_code == 128 + signal.SIGTERM and first.unfinished and not first.failed, first.text()
        begun = epochs_of(out)
        assert begun and all(list((out / "runs" / name / "checkpoints").glob("*.pt")) for name in begun)

        # The same command, now with shared storage; the node of a cell in training is killed.
        console = Console(file=io.StringIO(), width=300)

        def kill_node() -> tuple[str, list[str]]:
            def victim() -> Any:
                for node in cluster.worker_nodes:
                    lines = [line for line in output(console) if f"node {node.node_id[:8]}" in line]
                    name = next((name for name in CELLS if lines and name in lines[-1]), "")
                    history = epochs_of(out).get(name, [])
                    if len(begun.get(name, [])) + 2 <= len(history) < EPOCHS - 2:
                        return node, name, history[:-1]  # its last checkpoint may be on its way to the disk
                return None

            node, name, history = wait_for(victim)
            cluster.remove_node(node, allow_graceful=False)
            return name, history

        killed = thread.submit(kill_node)
        second = compare_methods(request(out, ray=options), console)
        name, history = killed.result()
    assert not second.failed and not second.unfinished and not second.signal, second.text()
    assert sorted(first.done + second.done) == sorted(CELLS)  # each once
    assert second.skipped == first.done
    ends = [line.split()[2] for line in output(console) if line.split()[1:2] == ["done"]]
    assert sorted(ends) == sorted(second.done)
    starts = [line for line in output(console) if f" {name} " in line and "starting on" in line]
    assert len(starts) == 2 and starts[0].split("node ")[1] != starts[1].split("node ")[1]
    # The epochs before were not trained again: their lines, which have the time they took, are the same.
    assert (out / "runs" / name / "metrics.jsonl").read_text().splitlines()[: len(history)] == history

    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # one thread for each of two processes, as for --cell-cpus 1
    local = compare_methods(request(tmp_path / "local", parallel=2), Console(quiet=True))
    assert sorted(local.done) == sorted(CELLS)
    assert results_of(out) == results_of(tmp_path / "local")


def output(console: Console) -> list[str]:
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


class _FakeRay(types.ModuleType):
    """Ray without a cluster: what is remote is called at once."""

    get = staticmethod(lambda value: value)

    def get_runtime_context(self) -> Any:
        return types.SimpleNamespace(get_node_id=lambda: "0123456789")


def without_shared_folder(cell: Cell, context: SweepContext, monkeypatch: pytest.MonkeyPatch) -> tuple[Outcome, Board]:
    """The task of a trained cell on a node that does not see the folder of the runs."""
    monkeypatch.chdir(context.runs.parent)
    monkeypatch.setitem(sys.modules, "ray", _FakeRay("ray"))
    made_run(context.runs, cell, wrong=6)
    board = Board(context.runs)
    board.expect(cell.name, 1)
    remote = types.SimpleNamespace(
        **{name: types.SimpleNamespace(remote=getattr(board, name)) for name in ("report", "read_run", "write_run")}
    )
    marker = context.runs / "not-there"
    return cell_task(remote, 1, cell, context, marker, str(context.runs.parent), 1), board


def test_a_node_that_does_not_see_the_folder_fetches_the_run_and_returns_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell("hard-seed0", make_settings({"method": "hard", "data": "/somewhere/isic"}))
    context = SweepContext(tmp_path / "runs", tmp_path / "results")
    outcome, board = without_shared_folder(cell, context, monkeypatch)
    assert outcome.state == "done" and not (tmp_path / "results").exists()
    write_files(tmp_path / "results", outcome.results)
    written = read_files(tmp_path / "results")
    expected = keep_result(cell, context.run_folder(cell), tmp_path / "again" / "hard-seed0.json")
    assert written == read_files(expected.path.parent) and expected.path.name in written
    assert [message[2] for message in board.take_messages()] == ["training", "evaluating"]


def test_without_a_folder_of_results_the_run_comes_back_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell("fold-0", make_settings({"method": "hard", "data": "/somewhere/isic"}))
    context = SweepContext(tmp_path / "runs", None)
    outcome, _ = without_shared_folder(cell, context, monkeypatch)
    assert (outcome.state, outcome.results) == ("done", {}) and outcome.text.startswith("accuracy 0.9000, ")
    scores = context.run_folder(cell).read_scores()
    assert scores is not None and scores.overall["accuracy"].value == pytest.approx(0.9)
    assert context.result(cell) == tmp_path / "runs" / "fold-0" / "report.html" and context.result(cell).exists()


def test_files_are_copied_as_of_one_moment_and_others_removed(tmp_path: Path) -> None:
    made = {"settings.toml": b"lr = 1", "checkpoints/epoch-1.pt": b"\0\1", "metrics.jsonl": b"{}"}
    write_files(tmp_path / "a", made)
    (tmp_path / "a" / ".metrics.jsonl.7.partial").write_bytes(b"{")
    assert read_files(tmp_path / "a") == made and read_files(tmp_path / "none") == {}
    write_files(tmp_path / "a", {"checkpoints/epoch-2.pt": b"\2"})
    assert len(read_files(tmp_path / "a")) == 4
    write_files(tmp_path / "a", made, remove_others=True)
    assert read_files(tmp_path / "a") == made


def test_an_attempt_that_was_given_up_is_asked_to_stop_and_changes_nothing(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.expect("ccl-seed0", 1)
    assert not board.report("ccl-seed0", 1, "training", "epoch 1")
    board.write_run("ccl-seed0", 1, {"metrics.jsonl": b"1"})
    board.expect("ccl-seed0", 2)
    assert board.report("ccl-seed0", 1, "training", "epoch 2") and not board.report("ccl-seed0", 2)
    board.write_run("ccl-seed0", 1, {"metrics.jsonl": b"2"})
    assert board.read_run("ccl-seed0") == {"metrics.jsonl": b"1"}
    assert board.take_messages() == [("ccl-seed0", 1, "training", "epoch 1")] and not board.take_messages()
    board.stop()
    assert board.report("ccl-seed0", 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--executor", "cloud"], "unknown executor 'cloud'"),
        (["--cell-gpus", "0.5"], "cell_gpus are options of Ray"),
        (["--executor", "ray", "--cell-cpus", "0"], "more than 0 CPUs"),
        (["--executor", "ray", "--address", "ray://head:10001"], "ray://head:10001 is an address of the Ray client"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_runs(options: list[str], words: str) -> None:
    folds = ["train", "synthetic", "--preset", "paper", "--folds", "3"]
    for command in (["compare-methods", "synthetic", "--preset", "paper"], ["reproduce", "table1", "--smoke"], folds):
        done = CliRunner().invoke(app, [*command, *options])
        assert isinstance(done.exception, InputError) and words in str(done.exception)


@pytest.mark.parametrize(("cancelled", "failed"), [("not begun", []), ("", ["hard-seed0"])])
def test_a_cell_whose_start_was_cut_off_has_not_failed(cancelled: str, failed: list[str], tmp_path: Path) -> None:
    """Ray interrupts a task that is cancelled; if it has just begun, the error is that of Ray's own code."""
    exceptions = pytest.importorskip("ray.exceptions")

    def get(reference: str) -> None:
        raise exceptions.RayTaskError("cell_task", "traceback", TypeError("'Handlers' object is not callable"))

    sweep, states = object.__new__(ray_tasks._RaySweep), []
    sweep.ray = types.SimpleNamespace(exceptions=exceptions, get=get)
    sweep.progress = types.SimpleNamespace(update=lambda name, state, text: states.append(state))  # type: ignore[assignment]
    sweep.summary, sweep.on_end, sweep.signals = SweepSummary(), lambda summary: None, [signal.SIGTERM]
    sweep.context = SweepContext(runs=tmp_path, results=None)
    sweep.running = {"task": ray_tasks._Task(Cell("hard-seed0", SETTINGS, {}), 1, cancelled=cancelled)}
    sweep._collect("task")
    assert list(sweep.summary.failed) == failed and states == (["failed"] if failed else ["unfinished"])
