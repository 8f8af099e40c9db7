import threading

import pytest
import torch

from cclnet.data.loader import prefetch


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_results_come_in_order_and_none_is_lost(workers):
    assert [made for (made,) in prefetch(lambda step: (step * 10,), range(3, 20), workers)] == list(range(30, 200, 10))
    assert list(prefetch(lambda step: (step,), range(0), workers)) == []


@pytest.mark.parametrize(("workers", "most"), [(0, 1), (2, 2)])
def test_only_a_few_are_prefetched(workers, most):
    made: list[int] = []

    def make(step: int) -> tuple[int]:
        made.append(step)
        return (step,)

    for (taken,) in prefetch(make, range(50), workers):
        assert len(made) <= taken + 1 + most
    assert sorted(made) == list(range(50))


def test_an_error_in_a_thread_is_raised_by_next():
    def make(step: int) -> tuple[int]:
        if step == 3:
            raise RuntimeError("the third")
        return (step,)

    batches = prefetch(make, range(10), workers=2)
    assert [next(batches) for _ in range(3)] == [(0,), (1,), (2,)]
    with pytest.raises(RuntimeError, match="the third"):
        next(batches)


def test_threads_end_when_the_iterator_is_closed_early():
    before = threading.active_count()
    batches = prefetch(lambda step: (step,), range(1000), workers=3)
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before


def test_every_thread_uses_one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threads = [made for (made,) in prefetch(lambda step: (torch.get_num_threads(),), range(4), workers=2)]
        assert threads == [1] * 4 and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
