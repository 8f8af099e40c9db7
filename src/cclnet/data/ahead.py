"""Batches made ahead of time, by threads and on a CUDA stream of their own, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made", bound="tuple[Any, ...]")


def ahead(
    make: Callable[[int], Made], steps: range, workers: int, stream: torch.cuda.Stream | None = None
) -> Iterator[Made]:
    """``make(step)`` for each step, in order, always some steps ahead of the one that is given.

    With ``workers`` threads as many steps ahead; with none one step ahead, which on a GPU is queued beside the
    work on the step before. With a ``stream`` everything is made on it; what is given can be used on the
    current stream, which (and not the host) waits for it.

    >>> list(ahead(lambda step: (step, step**2), range(2, 5), workers=2))
    [(2, 4), (3, 9), (4, 16)]
    """
    if stream is None:
        return _inline(make, steps) if workers == 0 else _by_threads(make, steps, workers)
    on_stream = partial(_on_stream, stream, make)
    made = _inline(on_stream, steps) if workers == 0 else _by_threads(on_stream, steps, workers)
    return _handed_over(made, stream.device)


def _inline(make: Callable[[int], Made], steps: range) -> Iterator[Made]:
    ready: deque[Made] = deque()
    for step in steps:
        ready.append(make(step))
        if len(ready) > 1:
            yield ready.popleft()
    yield from ready


def _by_threads(make: Callable[[int], Made], steps: range, workers: int) -> Iterator[Made]:
    waiting: deque[Future[Made]] = deque()
    # One of torch's own threads each: they make different batches, and the cores belong to the training. Leaving
    # (at the end, or where batches are not taken to the end) waits for the few that are being made.
    with ThreadPoolExecutor(workers, "ahead", initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for step in steps:
            waiting.append(pool.submit(make, step))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _on_stream(
    stream: torch.cuda.Stream, make: Callable[[int], Made], step: int
) -> tuple[Made, torch.cuda.Event]:
    with torch.cuda.stream(stream):
        return make(step), stream.record_event()


def _handed_over(prepared: Iterator[tuple[Made, torch.cuda.Event]], device: torch.device) -> Iterator[Made]:
    for made, ready in prepared:
        current = torch.cuda.current_stream(device)
        current.wait_event(ready)
        for part in made:
            if isinstance(part, Tensor):
                part.record_stream(current)  # its memory is not given away before the work queued on it is done
        yield made
