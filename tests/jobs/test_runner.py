"""Several jobs in processes of their own: what is skipped, what fails, what dies, what is left for next time."""

from __future__ import annotations

import json
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from cclnet import InputError
from cclnet.settings import make_settings
from cclnet.sweep.cells import Job, Work
from cclnet.sweep.local import Log, Message, Outcome, run_jobs
from cclnet.sweep.results import read_results
from made_runs import made_result, made_run


def job(method: str, **changes: Any) -> Job:
    return Job(f"{method}-seed0", make_settings({"method": method, "data": "/somewhere/isic"}, changes))


GOOD, WRONG, DEADLY, DONE, TRAINED = (job(method) for method in ("ccl", "hard", "lsr-u1", "lsr-u5", "lsr-a1"))


def work(folder: Path, **changes: Any) -> Work:
    return Work(folder / "runs", folder / "results", **changes)


def staged(connection: Connection, device: str | None, threads: int, work: Work) -> None:
    """Trains by hand: one job well, one with an error, and dies of one."""
    while (job := connection.recv()) is not None:
        if job.settings.method == "lsr-u1":
            os._exit(7)
        if job.settings.method == "hard":
            connection.send(Message("failed", "the images ran out"))
            continue
        connection.send(Message("training", "epoch 1/1"))
        made_run(work.runs, job, wrong=6)
        connection.send(Message("trained"))


def test_one_job_that_fails_or_dies_stops_no_other(tmp_path: Path) -> None:
    made_result(tmp_path, DONE, wrong=12)
    made_run(tmp_path / "runs", TRAINED, wrong=3)
    outcome = run_jobs([DEADLY, WRONG, DONE, TRAINED, GOOD], work(tmp_path), parallel=1, trainer=staged)
    assert sorted(outcome.done) == sorted([GOOD.name, TRAINED.name])
    assert outcome.skipped == [DONE.name] and not outcome.unfinished
    assert outcome.failed == {
        DEADLY.name: "its process ended with code 7",
        WRONG.name: "the images ran out",
    }
    assert {r.path.stem: r.value("accuracy") for r in read_results(tmp_path / "results")} == pytest.approx(
        {GOOD.name: 0.9, TRAINED.name: 0.95, DONE.name: 0.8}
    )


def test_the_log_stands_whenever_a_job_ended(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"of": "another command"}\n', encoding="utf-8")
    log, seen = Log(tmp_path, time.time() - 90, {"what": "both"}), []

    def note(outcome: Outcome) -> None:
        log.write(outcome)
        seen.append([json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()])

    run_jobs([GOOD, TRAINED, WRONG], work(tmp_path), parallel=1, trainer=staged, on_end=note)
    assert all(len(lines) == 2 and lines[0] == {"of": "another command"} for lines in seen)
    told = [line for _, line in seen]
    assert [line["unfinished"] for line in told] == [2, 1, 0, 0]  # after each of the three, and at the end
    assert set(told[-1]["done"]) == {TRAINED.name, GOOD.name} and told[-1]["failed"] == 1
    assert told[-1]["what"] == "both" and told[-1]["minutes"] >= 1.5


def test_after_the_deadline_nothing_is_begun(tmp_path: Path) -> None:
    outcome = run_jobs([GOOD, WRONG], work(tmp_path, deadline=time.time() - 1), trainer=staged)
    assert outcome.unfinished == [GOOD.name, WRONG.name]
    assert not outcome.done and not outcome.failed and not (tmp_path / "runs").exists()


def test_results_of_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    made_result(tmp_path, DONE, wrong=12)
    again = job("lsr-u5", epochs=90, clip=5.0)
    with pytest.raises(InputError, match=r"(?s)1 results were made of.*epochs was 160, is 90; clip was 1.0, is 5.0"):
        run_jobs([again, GOOD], work(tmp_path), trainer=staged)


def test_a_trained_run_of_other_settings_is_not_taken_for_what_is_asked(tmp_path: Path) -> None:
    made_run(tmp_path / "runs", job("lsr-a1", epochs=90), wrong=3)
    outcome = run_jobs([TRAINED], work(tmp_path), trainer=staged)
    assert "was begun with other settings (epochs was 90, is 160)" in outcome.failed[TRAINED.name]
    assert not read_results(tmp_path / "results")


def test_parallel_must_be_a_count(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="parallel must be at least 1, got 0"):
        run_jobs([GOOD], work(tmp_path), parallel=0)
