"""Run one function over many rows on all cores, with a progress bar. Programs need no ``__main__`` guard.

Images are untrusted input, so the workers have limits of memory and time: see :func:`process_chunks`.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from cclnet.memory import free_heap_bytes

Item = TypeVar("Item")
Result = TypeVar("Result")
_FORKS = sys.platform == "linux"
_LARGEST_CHUNK = 32
_SECONDS_BETWEEN_REFRESHES = 0.1
SECONDS_PER_ROW = 60.0  # of processor time, to decode one image
# Memory of a worker beside that of the program: an image of MAX_PIXELS takes up to 16 bytes per pixel while decoding.
BYTES_PER_WORKER = 4 * 2**30
LEAST_ROOM = 2**26  # that a worker gets beside memory that was freed before
# Signals that decoding does not cause. Windows, where workers are threads, lacks two of them.
_FROM_OUTSIDE = tuple(getattr(signal, f"SIG{name}", None) for name in ("KILL", "TERM", "INT", "HUP"))
_NO_ROW = -1
_PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent ends
_SECONDS_TO_DIE = 5.0
_SECONDS_BEFORE_ESTIMATE = 5.0  # from which a log file gets the time that is left


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_chunks(
    work: Callable[[list[int]], Result], rows: Sequence[int], workers: int, done: Callable[[Result], object],
    failed: Callable[[int, str], Result] | None = None,
) -> None:  # fmt: skip
    """Call ``work`` on chunks of ``rows`` in parallel, and ``done`` in this process with each result as it completes.
    An exception in a worker is raised here after the other workers have stopped.

    On Linux the workers are forked processes, because Pillow holds the GIL while it decodes WebP. They inherit ``work``
    without pickling and must not use the GPU. On other systems, and in daemon processes, the workers are threads.

    A forked worker has limited memory, and limited time for each row it handles inside :func:`limited`. A row that ends
    its worker there, by the time limit or by a crash of a decoder, gives the result ``failed(row, reason)``, and the
    other rows of its chunk are computed without it. Any other death of a worker raises BrokenProcessPool.
    """
    size = max(1, min(_LARGEST_CHUNK, len(rows) // (4 * workers)))
    chunks = [list(rows[start : start + size]) for start in range(0, len(rows), size)]
    if chunks:
        with _worker_pool(work, min(workers, len(chunks)), failed) as submit:
            for future in as_completed([submit(chunk) for chunk in chunks]):
                for result in future.result():
                    done(result)


def in_order(
    work: Callable[[list[int]], Result], chunks: Iterable[list[int]], workers: int, prefetch: int,
    failed: Callable[[int, str], Result] | None = None,
) -> Iterator[Result]:  # fmt: skip
    """Yield the result of ``work`` for each chunk, in order, computed in parallel by the same kind of workers. At most
    ``prefetch`` results are computed in advance, to bound the memory. The workers stop when the iterator is closed. A
    chunk with a row that has ``failed`` gives several results."""
    with _worker_pool(work, workers, failed) as submit:
        for results in in_advance(submit, chunks, prefetch):
            yield from results


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
def _worker_pool(
    work: Callable[[list[int]], Result], count: int, failed: Callable[[int, str], Result] | None
) -> Iterator[Callable[[list[int]], Future[list[Result]]]]:
    """Start workers for the duration of the block; yield the function that submits a chunk."""
    forked = _FORKS and not multiprocessing.current_process().daemon
    workers = [_Worker(work) for _ in range(count if forked else 0)]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def compute(chunk: list[int]) -> list[Result]:
        if not forked:
            return [work(chunk)]
        worker = idle.get()
        try:
            return worker.compute(chunk, failed)
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(count)  # with processes, each thread waits for one of them
    try:
        yield lambda chunk: threads.submit(compute, chunk)
    finally:
        for worker in workers:
            worker.kill()
        threads.shutdown(cancel_futures=True)


class _Worker:
    """A forked process that computes one chunk at a time."""

    def __init__(self, work: Callable[[list[int]], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        with theirs:
            self._process = context.Process(target=_keep_computing, args=(work, theirs), daemon=True)
            self._process.start()

    def compute(self, chunk: list[int], failed: Callable[[int, str], Result] | None) -> list[Result]:
        """Return the result for the chunk, after those for rows that have failed."""
        results: list[Result] = []
        while True:
            kind, content = self._send(chunk)
            if kind == "result":
                return [*results, content]
            if kind == "error":
                error, trace = content
                raise error from RuntimeError(f"in a worker process:\n{trace}")
            row, reason = content
            if failed is None:
                raise BrokenProcessPool(f"a worker process ended at row {row}: {reason}")
            results.append(failed(row, reason))
            chunk = [other for other in chunk if other != row]
            if not chunk:
                return results

    def _send(self, chunk: list[int]) -> tuple[str, Any]:
        try:
            self._connection.send(chunk)
            wait([self._connection, self._process.sentinel])
            if self._connection.poll(0):
                return self._connection.recv()
        except (EOFError, OSError) as error:
            raise BrokenProcessPool("a worker process was killed") from error
        raise BrokenProcessPool("a worker process was killed")

    def kill(self) -> None:
        """Kill the process and wait until it and its child are gone."""
        self._process.kill()
        self._process.join()
        with suppress(EOFError, OSError):
            while self._connection.poll(_SECONDS_TO_DIE):
                self._connection.recv_bytes()
        self._connection.close()


# In the worker processes.

_row: Any = None  # the row in progress inside limited(), shared with the process that watches; None in other processes


@contextmanager
def limited(row: int) -> Iterator[None]:
    """Limit the processor time of the block to ``SECONDS_PER_ROW``, in a worker process; no limit in other processes.

    The kernel ends the process when its time is over, because a decoder cannot be interrupted in another way. Processor
    time, unlike time on the clock, does not depend on what else the machine does.
    """
    if _row is None:
        yield
        return
    _row.value = row
    signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_ROW)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _row.value = _NO_ROW


def limit_memory(allowed: int) -> None:
    """Limit the address space of this process to what it has now and ``allowed`` bytes more. Linux only.

    Memory that the process has freed and kept is part of what is allowed, because the system does not see its use.
    """
    if sys.platform != "linux":
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    allowed = max(allowed - free_heap_bytes(), LEAST_ROOM)
    limit, hard = pages * resource.getpagesize() + allowed, resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _keep_computing(work: Callable[[list[int]], Any], connection: Connection) -> None:
    """Compute chunks in a child process, and start another child when a row has ended it.

    This process has one thread and does nothing else, so that it can fork at any time.
    """
    global _row
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C and stops its workers
    parent = multiprocessing.parent_process()
    assert parent is not None
    _row = multiprocessing.get_context("fork").RawValue("q", _NO_ROW)
    while True:
        ended, held_by_child = os.pipe()
        watcher = os.getpid()
        if (child := os.fork()) == 0:
            _compute_chunks(work, connection, watcher)
        os.close(held_by_child)
        if parent.sentinel in wait([ended, parent.sentinel]):  # a caller that was killed could not stop its workers
            os._exit(1)
        os.close(ended)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code >= 0 or -code in _FROM_OUTSIDE or _row.value == _NO_ROW:
            os._exit(1)
        connection.send(("died", (_row.value, _reason(-code))))
        _row.value = _NO_ROW


def _reason(signal_number: int) -> str:
    if signal_number == signal.SIGPROF:
        return f"decoding it took more than {SECONDS_PER_ROW:g} seconds of processor time"
    return f"its decoder crashed ({signal.strsignal(signal_number)})"


def _compute_chunks(work: Callable[[list[int]], Any], connection: Connection, watcher: int) -> NoReturn:
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != watcher:  # it died before prctl, which then sends nothing
            os._exit(1)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # all cores are in use, and torch's thread pool does not survive the fork
        limit_memory(BYTES_PER_WORKER)
        while True:
            chunk = connection.recv()
            try:
                answer: tuple[str, Any] = ("result", work(chunk))
            except Exception as error:  # noqa: BLE001 (raised again in the caller)
                answer = ("error", (error, traceback.format_exc()))
            connection.send(answer)
    except BaseException:  # noqa: BLE001 (a forked process must not return into the program that it copies)
        traceback.print_exc()
    finally:
        os._exit(1)


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
        refreshed_at, began, counted = 0.0, time.monotonic(), 0
        estimated = bar.console.is_terminal or not show  # on a terminal the bar shows the time that is left

        def count(images: int) -> None:
            nonlocal refreshed_at, counted, estimated
            bar.advance(task, images)
            counted += images
            spent = time.monotonic() - began
            if not estimated and spent > _SECONDS_BEFORE_ESTIMATE:
                left, estimated = spent / counted * (total - done - counted), True
                bar.console.print(f"{what} {total - done:,} images: {left / 60:.1f} minutes left.", highlight=False)
            if time.monotonic() - refreshed_at > _SECONDS_BETWEEN_REFRESHES:
                bar.refresh()
                refreshed_at = time.monotonic()

        yield count
