"""Batching: waiting items run together, and no item is delayed to fill a batch."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from cclnet.deploy.serve.guard import Refused
from cclnet.deploy.serve.service import Batcher, Metrics


class Network:
    """Doubles numbers while its gate is open, and records its batches."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.batches: list[list[int]] = []

    def run(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        self.entered.set()
        assert self.gate.wait(10)
        if -1 in items:
            raise RuntimeError("a broken item")
        return [2 * item for item in items]


def with_batcher(
    body: Callable[[Batcher[int, int], Network], Coroutine[Any, Any, None]], largest: int = 4, parallel: int = 1
) -> tuple[Network, list[int]]:
    sizes: list[int] = []
    network = Network()

    async def main() -> None:
        batcher = Batcher[int, int](network.run, largest, parallel, lambda size, seconds: sizes.append(size))
        batcher.start()
        try:
            await body(batcher, network)
        finally:
            network.gate.set()
            await batcher.close()

    asyncio.run(main())
    return network, sizes


async def submit_and_wait(batcher: Batcher[int, int], network: Network, item: int) -> asyncio.Task[int]:
    """Submit an item and wait until the network has it."""
    task = asyncio.create_task(batcher.submit(item, 10))
    while not network.entered.is_set():
        await asyncio.sleep(0.001)
    return task


def test_a_single_item_runs_at_once() -> None:
    async def body(batcher: Batcher[int, int], network: Network) -> None:
        network.gate.set()
        for item in range(3):
            assert await batcher.submit(item, 10) == 2 * item

    network, sizes = with_batcher(body)
    assert network.batches == [[0], [1], [2]] and sizes == [1, 1, 1]


@settings(max_examples=20, deadline=None)
@given(waiting=st.integers(0, 15), largest=st.integers(1, 6))
def test_waiting_items_form_batches_in_order(waiting: int, largest: int) -> None:
    async def body(batcher: Batcher[int, int], network: Network) -> None:
        first = await submit_and_wait(batcher, network, 100)
        others = [asyncio.create_task(batcher.submit(item, 10)) for item in range(waiting)]
        await asyncio.sleep(0)  # all are waiting now
        network.gate.set()
        assert await first == 200
        assert await asyncio.gather(*others) == [2 * item for item in range(waiting)]

    network, sizes = with_batcher(body, largest)
    expected = [list(range(waiting))[start : start + largest] for start in range(0, waiting, largest)]
    assert network.batches == [[100], *expected] and sizes == [len(batch) for batch in network.batches]


def test_two_batches_run_in_parallel() -> None:
    async def body(batcher: Batcher[int, int], network: Network) -> None:
        first = await submit_and_wait(batcher, network, 1)
        network.entered.clear()
        second = await submit_and_wait(batcher, network, 2)  # inside as well, while the gate is closed
        third = [asyncio.create_task(batcher.submit(item, 10)) for item in (3, 4)]
        await asyncio.sleep(0)
        network.gate.set()
        assert [await first, await second, *[await one for one in third]] == [2, 4, 6, 8]

    network, _ = with_batcher(body, parallel=2)
    assert network.batches == [[1], [2], [3, 4]]


def test_an_error_affects_its_batch_only() -> None:
    async def body(batcher: Batcher[int, int], network: Network) -> None:
        network.gate.set()
        with pytest.raises(RuntimeError, match="a broken item"):
            await batcher.submit(-1, 10)
        assert await batcher.submit(3, 10) == 6

    with_batcher(body)


def test_cancelled_items_are_left_out() -> None:
    async def body(batcher: Batcher[int, int], network: Network) -> None:
        first = await submit_and_wait(batcher, network, 0)
        gone = asyncio.create_task(batcher.submit(1, 10))
        stays = asyncio.create_task(batcher.submit(2, 10))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        network.gate.set()
        assert await first == 0 and await stays == 4

    network, _ = with_batcher(body)
    assert network.batches == [[0], [2]]


def test_a_slow_result_is_refused() -> None:
    async def body(batcher: Batcher[int, int], network: Network) -> None:
        with pytest.raises(Refused, match=r"no answer within 0.05 seconds") as refused:
            await batcher.submit(1, 0.05)
        assert refused.value.status == 503 and refused.value.headers == {"Retry-After": "1"}
        network.gate.set()
        assert await batcher.submit(5, 10) == 10

    with_batcher(body)


@given(st.dictionaries(st.text(), st.integers(1, 9)))
def test_any_class_name_can_be_a_label(counts: dict[str, int]) -> None:
    metrics = Metrics()
    for name, count in counts.items():
        metrics.predictions.labels(name).inc(count)
    # A line ends at a line feed only: other line separators of Unicode stay inside the label.
    lines = generate_latest(metrics.registry).decode().split("\n")
    samples = (re.fullmatch(r'cclnet_predictions_total\{class="(.*)"\} (\S+)', line, re.S) for line in lines)
    found = {unescape(one[1]): float(one[2]) for one in samples if one}
    assert found == {name: float(count) for name, count in counts.items()}


def unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), text)


@given(st.lists(st.integers(1, 100)))
def test_batches_are_counted_up_to_each_bound(sizes: list[int]) -> None:
    metrics = Metrics()
    for size in sizes:
        metrics.observe_batch(size, 0.1)
    for bound in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, math.inf):
        le = "+Inf" if math.isinf(bound) else f"{bound}"
        found = metrics.registry.get_sample_value("cclnet_batch_images_bucket", {"le": le})
        assert found == sum(size <= bound for size in sizes)
    assert metrics.registry.get_sample_value("cclnet_batch_images_sum") == sum(sizes)
    assert metrics.registry.get_sample_value("cclnet_network_seconds_count") == len(sizes)


def test_a_counter_starts_at_zero() -> None:
    assert Metrics().registry.get_sample_value("cclnet_upload_bytes_total") == 0
