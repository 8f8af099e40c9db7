import threading

import pytest
import torch

from cclnet.data.loader import ahead


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_in_order_and_none_lost(workers):
    assert [made for (made,) in ahead(lambda step: (step * 10,), range(3, 20), workers)] == list(range(30, 200, 10))
    assert list(ahead(lambda step: (step,), range(0), workers)) == []


@pytest.mark.parametrize(("workers", "most"), [(0, 1), (2, 2)])
def test_only_a_few_are_made_ahead(workers, most):
    made: list[int] = []

    def make(step: int) -> tuple[int]:
        made.append(step)
        return (step,)

    for (taken,) in ahead(make, range(50), workers):
        assert len(made) <= taken + 1 + most
    assert sorted(made) == list(range(50))


def test_an_error_in_a_thread_reaches_the_one_who_waits():
    def make(step: int) -> tuple[int]:
        if step == 3:
            raise RuntimeError("the third")
        return (step,)

    batches = ahead(make, range(10), workers=2)
    assert [next(batches) for _ in range(3)] == [(0,), (1,), (2,)]
    with pytest.raises(RuntimeError, match="the third"):
        next(batches)


def test_threads_end_when_batches_are_not_taken_to_the_end():
    before = threading.active_count()
    batches = ahead(lambda step: (step,), range(1000), workers=3)
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before


def test_threads_leave_the_cores_to_the_training():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threads = [made for (made,) in ahead(lambda step: (torch.get_num_threads(),), range(4), workers=2)]
        assert threads == [1] * 4 and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
