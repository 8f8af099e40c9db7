"""Parallel workers: results in order, bounded prefetching, and errors raised where results are used."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from cclnet.data import parallel
from cclnet.data.parallel import in_order, limited, process_chunks
from cclnet.memory import free_heap_bytes

CHUNKS = [[i, i + 100] for i in range(12)]


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order(workers: int) -> None:
    def work(chunk: list[int]) -> int:
        time.sleep(0.02 if chunk[0] % 3 == 0 else 0)
        return sum(chunk)

    assert list(in_order(work, CHUNKS, workers, prefetch=4)) == [2 * i + 100 for i in range(12)]
    assert list(in_order(work, [], workers, prefetch=4)) == []


@pytest.mark.parametrize("workers", [1, 3])
def test_prefetching_is_bounded(workers: int, tmp_path: Path) -> None:
    """Each chunk creates a file, so that the chunks computed before they are consumed can be counted."""

    def work(chunk: list[int]) -> int:
        (tmp_path / str(chunk[0])).touch()
        return chunk[0]

    for taken, result in enumerate(in_order(work, CHUNKS, workers, prefetch=3), start=1):
        assert result == taken - 1
        time.sleep(0.05)
        assert len(list(tmp_path.iterdir())) <= taken + 2
    assert len(list(tmp_path.iterdir())) == 12


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_is_raised_where_the_result_is_taken(workers: int) -> None:
    def work(chunk: list[int]) -> int:
        if chunk[0] == 2:
            raise ZeroDivisionError("in a worker")
        return chunk[0]

    results = in_order(work, CHUNKS, workers, prefetch=3)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError, match="in a worker"):
        next(results)


def test_it_can_be_left_in_the_middle() -> None:
    results = in_order(lambda chunk: chunk[0], CHUNKS, 3, prefetch=3)
    assert next(results) == 0
    results.close()


forks = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes on Linux only")


def computed(work, count: int = 40) -> tuple[list[int], dict[int, str]]:
    """Return the rows that ``work`` was completed for, each row by itself, and why others have failed."""
    done: list[int] = []
    failed: dict[int, str] = {}

    def work_on_rows(rows: list[int]) -> list[tuple[int, str]]:
        for row in rows:
            with limited(row):
                work(row)
        return [(row, "") for row in rows]

    def record(results: list[tuple[int, str]]) -> None:
        for row, reason in results:
            if reason:
                failed[row] = reason
            else:
                done.append(row)

    process_chunks(work_on_rows, range(count), 2, record, lambda row, reason: [(row, reason)])
    return sorted(done), failed


@forks
def test_a_row_that_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "SECONDS_PER_ROW", 0.2)

    def endless(row: int) -> None:
        while row in (7, 8):
            pass

    done, failed = computed(endless)
    assert done == [row for row in range(40) if row not in (7, 8)]
    assert set(failed) == {7, 8} and all("more than 0.2 seconds" in reason for reason in failed.values())


@forks
def test_waiting_takes_no_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "SECONDS_PER_ROW", 0.2)
    assert computed(lambda row: time.sleep(0.5), 2) == ([0, 1], {})


@forks
def test_a_row_that_crashes_its_worker_is_left_out() -> None:
    def crash(row: int) -> None:
        if row == 11:
            faulthandler.disable()  # pytest's would print all stacks
            os.kill(os.getpid(), signal.SIGSEGV)

    done, failed = computed(crash)
    assert done == [row for row in range(40) if row != 11]
    assert "crashed (Segmentation fault)" in failed[11]


@forks
def test_memory_of_a_worker_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "BYTES_PER_WORKER", 2**28)
    more = free_heap_bytes()  # of other tests: workers can use it without asking the system
    with pytest.raises(MemoryError):
        computed(lambda row: bytes(2**29 + more))
    assert computed(lambda row: bytes(2**24))[1] == {}


@forks
def test_a_worker_that_is_killed_from_outside_is_an_error() -> None:
    with pytest.raises(BrokenProcessPool):
        computed(lambda row: os.kill(os.getpid(), signal.SIGKILL) if row == 3 else None)


@forks
def test_no_process_is_left() -> None:
    def descendants(pid: int) -> set[int]:
        own = {int(child) for of in Path(f"/proc/{pid}/task").glob("*/children") for child in of.read_text().split()}
        return own | {below for child in own for below in descendants(child)}

    before = descendants(os.getpid())
    assert computed(lambda row: None)[1] == {}
    with pytest.raises(ZeroDivisionError):
        computed(lambda row: 1 / (row - 5))
    assert descendants(os.getpid()) <= before
