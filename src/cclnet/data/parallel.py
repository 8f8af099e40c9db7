"""One function over many rows on all cores, from any program: no ``if __name__ == "__main__"`` is needed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

Result = TypeVar("Result")
_FORKS = sys.platform == "linux"
_LARGEST_CHUNK = 32


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared_integer(value: int) -> Synchronized[int]:
    """An integer, with a lock, that all workers of :func:`spread` see and may change."""
    return multiprocessing.get_context("fork" if _FORKS else None).Value("q", value)


def spread(
    work: Callable[[list[int]], Result], rows: Sequence[int], workers: int, done: Callable[[Result], object]
) -> None:
    """Call ``work`` on chunks of ``rows`` side by side, and ``done`` here with each result as it comes.

    On Linux the workers are forked processes: Pillow holds Python's lock while it decodes WebP, and so do the steps
    between decoding, so threads would leave most cores idle. Forked workers inherit ``work`` as it is, start at
    once and do not import the main module again. They must not touch the GPU. Elsewhere, and inside a process that
    may have no children, the workers are threads.

    An exception in a worker is raised here, after the others have stopped.
    """
    size = max(1, min(_LARGEST_CHUNK, len(rows) // (4 * workers)))
    chunks = [list(rows[start : start + size]) for start in range(0, len(rows), size)]
    if chunks:
        with _workers(work, min(workers, len(chunks))) as submit:
            for future in as_completed([submit(chunk) for chunk in chunks]):
                done(future.result())


def in_order(
    work: Callable[[list[int]], Result], chunks: Iterable[list[int]], workers: int, ahead: int
) -> Iterator[Result]:
    """What ``work`` gives for each chunk, in their order, made side by side while the earlier ones are used.

    No more than ``ahead`` results are under way or wait to be taken, so that workers that are faster than whoever uses
    the results do not fill the memory. The workers are those of :func:`spread`; they stop when the iterator is closed.
    """
    with _workers(work, workers) as submit:
        waiting: deque[Future[Result]] = deque()
        for chunk in chunks:
            waiting.append(submit(chunk))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def _workers(work: Callable[[list[int]], Result], count: int) -> Iterator[Callable[[list[int]], Future[Result]]]:
    """Workers for as long as the block lasts; gives the function that hands them a chunk."""
    if count > 1 and _FORKS and not multiprocessing.current_process().daemon:
        lifeline, held_here = os.pipe()
        try:
            context = multiprocessing.get_context("fork")
            with ProcessPoolExecutor(count, context, _become_worker, (work, lifeline, held_here)) as processes:
                try:
                    yield lambda chunk: processes.submit(_work_in_process, chunk)
                finally:
                    processes.shutdown(cancel_futures=True)
        finally:
            os.close(lifeline)
            os.close(held_here)
    else:
        with ThreadPoolExecutor(count) as threads:
            try:
                yield lambda chunk: threads.submit(work, chunk)
            finally:
                threads.shutdown(cancel_futures=True)


_inherited: Callable[[list[int]], Any]


def _become_worker(work: Callable[[list[int]], Any], lifeline: int, held_by_parent: int) -> None:
    global _inherited
    _inherited = work
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # the cores are taken, and torch's own threads do not survive the fork
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then stops its workers
    os.close(held_by_parent)
    threading.Thread(target=_die_with_parent, args=(lifeline,), daemon=True).start()


def _die_with_parent(lifeline: int) -> None:
    """A parent that is killed cannot stop its workers; but then the pipe that only it holds open closes."""
    os.read(lifeline, 1)
    os._exit(1)


def _work_in_process(chunk: list[int]) -> Any:
    return _inherited(chunk)


# A progress bar that counts images.


_SECONDS_BETWEEN_DRAWINGS = 0.1


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} images/s" if task.speed else "", style="progress.data.speed")


@contextmanager
def counting_images(what: str, total: int, done: int = 0, show: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar on stderr for as long as the block lasts; gives the function that counts further images.

    It is drawn when images are counted, not by a thread: workers are forked while it stands, and a fork in the
    middle of what another thread writes would leave them waiting for it for ever.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show, auto_refresh=False) as bar:
        task = bar.add_task(what, total=total, completed=done)
        drawn_at = 0.0

        def count(images: int) -> None:
            nonlocal drawn_at
            bar.advance(task, images)
            if time.monotonic() - drawn_at > _SECONDS_BETWEEN_DRAWINGS:
                bar.refresh()
                drawn_at = time.monotonic()

        yield count
