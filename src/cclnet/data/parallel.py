"""Run one function over many rows on all cores, with a progress bar. Programs need no ``__main__`` guard."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

Item = TypeVar("Item")
Result = TypeVar("Result")
_FORKS = sys.platform == "linux"
_LARGEST_CHUNK = 32
_SECONDS_BETWEEN_REFRESHES = 0.1


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared_integer(value: int) -> Synchronized[int]:
    """Return an integer with a lock that all workers of :func:`process_chunks` share."""
    return multiprocessing.get_context("fork" if _FORKS else None).Value("q", value)


def process_chunks(
    work: Callable[[list[int]], Result], rows: Sequence[int], workers: int, done: Callable[[Result], object]
) -> None:
    """Call ``work`` on chunks of ``rows`` in parallel, and ``done`` in this process with each result as it completes.
    An exception in a worker is raised here after the other workers have stopped.

    On Linux the workers are forked processes, because Pillow holds the GIL while it decodes WebP. They inherit ``work``
    without pickling and must not use the GPU. On other systems, and in daemon processes, the workers are threads.
    """
    size = max(1, min(_LARGEST_CHUNK, len(rows) // (4 * workers)))
    chunks = [list(rows[start : start + size]) for start in range(0, len(rows), size)]
    if chunks:
        with _worker_pool(work, min(workers, len(chunks))) as submit:
            for future in as_completed([submit(chunk) for chunk in chunks]):
                done(future.result())


def in_order(
    work: Callable[[list[int]], Result], chunks: Iterable[list[int]], workers: int, prefetch: int
) -> Iterator[Result]:
    """Yield the result of ``work`` for each chunk, in order, computed in parallel by the same kind of workers. At most
    ``prefetch`` results are computed in advance, to bound the memory. The workers stop when the iterator is closed."""
    with _worker_pool(work, workers) as submit:
        yield from in_advance(submit, chunks, prefetch)


def in_advance(submit: Callable[[Item], Future[Result]], items: Iterable[Item], count: int) -> Iterator[Result]:
    """Yield the results of the submitted items in order, with ``count`` submitted at a time."""
    waiting: deque[Future[Result]] = deque()
    for item in items:
        waiting.append(submit(item))
        if len(waiting) >= count:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@contextmanager
def _worker_pool(work: Callable[[list[int]], Result], count: int) -> Iterator[Callable[[list[int]], Future[Result]]]:
    """Start workers for the duration of the block; yield the function that submits a chunk."""
    forked = count > 1 and _FORKS and not multiprocessing.current_process().daemon
    pool: Executor
    if forked:
        pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _initialise_worker, (work,))
    else:
        pool = ThreadPoolExecutor(count)
    try:
        yield lambda chunk: pool.submit(_work_in_process if forked else work, chunk)
    finally:
        pool.shutdown(cancel_futures=True)


_inherited: Callable[[list[int]], Any]


def _initialise_worker(work: Callable[[list[int]], Any]) -> None:
    global _inherited
    _inherited = work
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # all cores are in use, and torch's thread pool does not survive the fork
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and stops its workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit when the parent ends: one that is killed cannot stop its workers."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)


def _work_in_process(chunk: list[int]) -> Any:
    return _inherited(chunk)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} images/s" if task.speed else "", style="progress.data.speed")


@contextmanager
def counting_images(what: str, total: int, done: int = 0, show: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr for the duration of the block; yield the function that counts further images. It
    refreshes the bar, not a thread: a worker forked while another thread holds the output lock would deadlock."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show, auto_refresh=False) as bar:
        task = bar.add_task(what, total=total, completed=done)
        refreshed_at = 0.0

        def count(images: int) -> None:
            nonlocal refreshed_at
            bar.advance(task, images)
            if time.monotonic() - refreshed_at > _SECONDS_BETWEEN_REFRESHES:
                bar.refresh()
                refreshed_at = time.monotonic()

        yield count
