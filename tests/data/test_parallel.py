"""Parallel workers: results in order, bounded prefetching, and errors raised where results are used."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cclnet.data.parallel import in_order

CHUNKS = [[i, i + 100] for i in range(12)]


@pytest.mark.parametrize("workers", [1, 3])  # threads, processes
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
