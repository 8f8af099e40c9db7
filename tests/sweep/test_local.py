"""Cells in processes of their own: skipped, failed, died, stalled, stopped and resumed."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cclnet import InputError
from cclnet.errors import Interrupted
from cclnet.evaluation.evaluate import evaluate
from cclnet.settings import make_settings
from cclnet.sweep.cells import Cell, Executor, SweepContext, SweepLog, SweepSummary
from cclnet.sweep.executors import SweepProgress
from cclnet.sweep.local import run_cells
from cclnet.sweep.results import read_results
from cclnet.sweep.run_cell import OutOfTime, evaluate_cell, train_cell
from made_runs import made_result, made_run


def cell(method: str, **changes: Any) -> Cell:
    return Cell(f"{method}-seed0", make_settings({"method": method, "data": "/somewhere/isic"}, changes))


GOOD, WRONG, DEADLY, DONE, TRAINED = (cell(method) for method in ("ccl", "hard", "lsr-u1", "lsr-u5", "lsr-a1"))


def context(folder: Path, **changes: Any) -> SweepContext:
    return SweepContext(folder / "runs", folder / "results", **changes)


def staged(connection: Connection, device: str | None, threads: int, shared: SweepContext) -> None:
    """Makes runs by hand: trains most cells, reports an error for hard, dies of lsr-u1."""
    while (cell := connection.recv()) is not None:
        if cell.settings.method == "lsr-u1":
            os._exit(7)
        if cell.settings.method == "hard":
            connection.send(("failed", "the images ran out"))
            continue
        connection.send(("training", "epoch 1/1"))
        made_run(shared.runs, cell, wrong=6)
        connection.send(("trained", ""))


@pytest.mark.usefixtures("forked_sweep")
def test_a_cell_that_fails_or_dies_stops_no_other(tmp_path: Path) -> None:
    made_result(tmp_path, DONE, wrong=12)
    made_run(tmp_path / "runs", TRAINED, wrong=3)
    summary = run_cells([DEADLY, WRONG, DONE, TRAINED, GOOD], context(tmp_path), parallel=1, worker=staged)
    assert sorted(summary.done) == sorted([GOOD.name, TRAINED.name])
    assert summary.skipped == [DONE.name] and not summary.unfinished
    assert summary.failed == {
        DEADLY.name: "its process ended with code 7 (2 attempts)",
        WRONG.name: "the images ran out",
    }
    assert {r.path.stem: r.value("accuracy") for r in read_results(tmp_path / "results")} == pytest.approx(
        {GOOD.name: 0.9, TRAINED.name: 0.95, DONE.name: 0.8}
    )


@pytest.mark.usefixtures("forked_sweep")
def test_the_log_is_written_whenever_a_cell_ends(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"of": "another command"}\n', encoding="utf-8")
    log, seen = SweepLog(tmp_path, {"what": "both"}), []

    def note(summary: SweepSummary) -> None:
        log.write(summary)
        seen.append([json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()])

    run_cells([GOOD, TRAINED, WRONG], context(tmp_path), parallel=1, worker=staged, on_end=note, began=time.time() - 90)
    assert all(len(lines) == 2 and lines[0] == {"of": "another command"} for lines in seen)
    told = [line for _, line in seen]
    assert [line["unfinished"] for line in told] == [2, 1, 0, 0]  # after each of the three, and at the end
    assert set(told[-1]["done"]) == {TRAINED.name, GOOD.name} and told[-1]["failed"] == 1
    assert told[-1]["what"] == "both" and told[-1]["minutes"] >= 1.5


def test_after_the_deadline_nothing_is_begun(tmp_path: Path) -> None:
    summary = run_cells([GOOD, WRONG], context(tmp_path, deadline=time.time() - 1), worker=staged)
    assert summary.unfinished == [GOOD.name, WRONG.name]
    assert not summary.done and not summary.failed and not (tmp_path / "runs").exists()


def test_results_of_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    made_result(tmp_path, DONE, wrong=12)
    again = cell("lsr-u5", epochs=90, clip=5.0)
    with pytest.raises(InputError, match=r"(?s)1 results do not match.*epochs was 160, is 90; clip was 1.0, is 5.0"):
        run_cells([again, GOOD], context(tmp_path), worker=staged)


@pytest.mark.usefixtures("forked_sweep")
def test_a_trained_run_of_other_settings_is_not_taken_for_what_is_asked(tmp_path: Path) -> None:
    made_run(tmp_path / "runs", cell("lsr-a1", epochs=90), wrong=3)
    summary = run_cells([TRAINED], context(tmp_path), worker=staged)
    assert "was begun with other settings (epochs was 90, is 160)" in summary.failed[TRAINED.name]
    assert not read_results(tmp_path / "results")


def test_parallel_must_be_a_count() -> None:
    with pytest.raises(InputError, match="parallel must be at least 1, got 0"):
        Executor(parallel=0)


SETTINGS: dict[str, Any] = {
    "data": "synthetic:images=84,size=32", "backbone": "test_resnet",
    "short_side": 32, "epochs": 3, "batch_size": 16, "lr": 0.02, "method_settings": {"widths": [16, 8], "patience": 2},
    "split": {"by": "class", "val": 0.25}, "augment": {"crop": 28}, "deterministic": True,
}  # fmt: skip
REAL = Cell("ccl-seed0", make_settings(SETTINGS))


def cpu_context(folder: Path) -> SweepContext:
    return context(folder, accelerator="cpu", cache_dir=folder / "cache")


def test_a_cell_out_of_time_resumes_to_the_same_result(tmp_path: Path) -> None:
    whole, stopped, told = cpu_context(tmp_path / "whole"), cpu_context(tmp_path / "stopped"), []
    train_cell(REAL, whole, told.append)
    assert len(told) == 3 and told[0].startswith("epoch 1/3, ") and "softness" in told[0]
    with pytest.raises(OutOfTime):
        train_cell(REAL, replace(stopped, deadline=0.0), told.append)
    assert len(told) == 4 and not stopped.is_trained(REAL)
    train_cell(REAL, stopped, told.append)
    assert [words.partition(",")[0] for words in told[4:]] == ["epoch 2/3", "epoch 3/3"]
    predictions = [w.run_folder(REAL).predictions.read_bytes() for w in (whole, stopped)]
    assert predictions[0] == predictions[1] and stopped.is_trained(REAL)

    words = evaluate_cell(REAL, stopped)
    result = json.loads((stopped.results / f"{REAL.name}.json").read_text())
    assert f"accuracy {result['scores']['accuracy']['value']:.4f}" in words
    assert not stopped.run_folder(REAL).checkpoints.exists()
    assert (result["epochs"], result["images"], len(result["softness"])) == (3, 63, 3)
    assert result["images_per_second"] > 0 and result["settings"]["method_settings"]["widths"] == [16, 8]
    again = evaluate(stopped.results / f"{REAL.name}.json")
    for name in ("accuracy", "kappa", "macro_f1"):
        assert again.overall[name].value == pytest.approx(result["scores"][name]["value"], abs=1e-6)


def test_a_run_begun_with_other_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    with pytest.raises(OutOfTime):
        train_cell(REAL, replace(cpu_context(tmp_path), deadline=0.0), lambda words: None)
    other = make_settings(SETTINGS, {"epochs": 4, "lr": 0.5})
    with pytest.raises(InputError, match=r"begun with other settings \(epochs was 3, is 4; lr was 0.02, is 0.5\)"):
        train_cell(replace(REAL, settings=other), cpu_context(tmp_path), lambda words: None)


def dying(connection: Connection, device: str | None, threads: int, shared: SweepContext) -> None:
    """Ends before it reads a cell."""
    connection.close()
    os._exit(3)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that start at once: importing torch takes seconds."""
    monkeypatch.setattr("cclnet.sweep.local.START_METHOD", "fork")


@pytest.mark.usefixtures("forked")
def test_processes_that_die_at_once_are_restarted_a_bounded_number_of_times(tmp_path: Path) -> None:
    summary = run_cells([GOOD, TRAINED], context(tmp_path), parallel=2, worker=dying)
    assert summary.failed == dict.fromkeys((GOOD.name, TRAINED.name), "its process ended with code 3 (2 attempts)")
    assert not summary.done and not summary.unfinished


def hanging(connection: Connection, device: str | None, threads: int, shared: SweepContext) -> None:
    """Hangs the first time it trains ccl, and whenever it trains hard; notes each start."""
    while (cell := connection.recv()) is not None:
        starts = shared.runs.parent / f"{cell.name}.starts"
        starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
        if cell.settings.method == "hard" or starts.read_text() == "x":
            time.sleep(600)
        connection.send(("stopped", "resumed"))


@pytest.mark.usefixtures("forked")
def test_a_process_without_progress_is_killed_and_its_cell_resumed_once(tmp_path: Path) -> None:
    began = time.monotonic()
    summary = run_cells([GOOD, WRONG], context(tmp_path, stall_seconds=3.0), parallel=2, worker=hanging)
    assert summary.unfinished == [GOOD.name] and not summary.done
    assert summary.failed == {WRONG.name: "its process made no progress for 0.05 minutes and was killed (2 attempts)"}
    assert [(tmp_path / f"{cell.name}.starts").read_text() for cell in (GOOD, WRONG)] == ["xx", "xx"]
    assert time.monotonic() - began < 300


def interrupting(connection: Connection, device: str | None, threads: int, shared: SweepContext) -> None:
    """Sends SIGTERM to the sweep before it has begun to train, and is killed for it."""
    connection.recv()
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)


@pytest.mark.usefixtures("forked")
def test_a_signal_leaves_every_cell_unfinished(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    summary = run_cells([GOOD, WRONG], context(tmp_path), worker=interrupting)
    assert summary.unfinished == [GOOD.name, WRONG.name] and not summary.failed
    assert summary.exit_code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def obedient(connection: Connection, device: str | None, threads: int, shared: SweepContext) -> None:
    """Sends SIGTERM to all processes of the sweep while it trains, and stops when it is asked to."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    cell = connection.recv()
    connection.send(("training", "epoch 1"))
    if cell.name == GOOD.name:  # only one of them: a second signal means that there is no time for checkpoints
        time.sleep(1.5)  # a cell whose first state the sweep has not read yet counts as starting, and is killed
        for process in (os.getppid(), os.getpid()):
            os.kill(process, signal.SIGTERM)
    assert connection.recv() is None
    (shared.runs.parent / f"{cell.name}.checkpoint").touch()
    connection.send(("stopped", "checkpointed"))


@pytest.mark.usefixtures("forked")
def test_a_cell_in_training_is_asked_to_stop_and_not_killed(tmp_path: Path) -> None:
    states = SweepProgress(Console(quiet=True))
    summary = run_cells([GOOD, WRONG], context(tmp_path), parallel=2, progress=states, worker=obedient)
    assert summary.unfinished == [GOOD.name, WRONG.name] and summary.exit_code == 128 + signal.SIGTERM
    stopped = [name for name, state in states.states.items() if state == ("unfinished", "checkpointed")]
    assert stopped and all((tmp_path / f"{name}.checkpoint").exists() for name in stopped)


def test_a_request_to_stop_ends_training_with_a_checkpoint(tmp_path: Path) -> None:
    shared = cpu_context(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted):
        train_cell(REAL, shared, lambda words: None, stop=lambda: True)
    assert list(shared.run_folder(REAL).checkpoints.glob("*.pt"))
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("done", "skipped", "expected"),
    [
        ("a", "", "1 run done in 0.0 minutes."),
        ("ab", "", "2 runs done in 0.0 minutes."),
        ("", "a", "1 run had its result already."),
        ("ab", "c", "2 runs done in 0.0 minutes; 1 run had its result already."),
        ("a", "bc", "1 run done in 0.0 minutes; 2 runs had their result already."),
        ("", "", "no run done in 0.0 minutes."),
    ],
)
def test_the_summary_counts_what_there_is(done: str, skipped: str, expected: str) -> None:
    assert SweepSummary([*done, *skipped], [*done], [*skipped]).text() == expected
