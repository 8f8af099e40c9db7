"""Run the cells of a sweep on this machine: one training process per slot, evaluation beside training.

A training process trains many cells, because imports and compile caches cost seconds. A cell whose process dies or
makes no progress is resumed once in a new process, then it fails. A cell that fails stops no other. On SIGTERM,
Ctrl-C or the deadline every cell in training is checkpointed, and the same sweep continues from there. The processes
ignore signals, which terminals and schedulers send to all processes at once; the sweep asks each of them to stop.

Evaluation runs in a ``ProcessPoolExecutor``. Training does not: there, one process that dies breaks the whole pool, and
a process without progress cannot be killed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from rich.console import Console

from cclnet.data.parallel import available_cores
from cclnet.errors import InputError, Interrupted, show_warnings_as_notes
from cclnet.memory import large_imports
from cclnet.sweep.cells import Cell, SweepContext, SweepSummary
from cclnet.sweep.executors import SweepProgress, begin_sweep, on_signals
from cclnet.sweep.run_cell import OutOfTime, evaluate_cell, train_cell

START_METHOD = "spawn"  # a forked process cannot use CUDA
MAX_STARTS = 2  # processes in which a cell is started
POLL_SECONDS = 0.2
STOP_SECONDS = 60.0  # for a training process to write its checkpoint when the sweep ends


def train_cells(connection: Connection, device: str | None, threads: int, context: SweepContext) -> None:
    """The main function of a training process: train the cells that arrive on the connection until None arrives.

    It sends pairs: the state "training", "trained", "stopped" or "failed", and text to show. After an unexpected error
    it ends, so that a GPU in an undefined state affects no other cell.
    """
    _begin_process()
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    with large_imports():
        import torch

    torch.set_num_threads(threads)
    while (cell := connection.recv()) is not None:
        try:
            # During training nothing is sent to this process except that it is to stop.
            train_cell(cell, context, lambda text: connection.send(("training", text)), connection.poll)
            connection.send(("trained", ""))
        except OutOfTime:
            connection.send(("stopped", "out of time, checkpointed"))
        except Interrupted:
            connection.send(("stopped", "interrupted, checkpointed"))
            return
        except InputError as error:
            connection.send(("failed", str(error)))
        except Exception as error:  # noqa: BLE001 (an error in one cell must not stop the others)
            note = context.runs / cell.name / "error.txt"
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(traceback.format_exc(), encoding="utf-8")
            connection.send(("failed", f"{type(error).__name__}: {error} (see {note})"))
            return
        gc.collect()  # network and optimizer refer to each other; the next cell needs their memory now
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _begin_process() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    show_warnings_as_notes()


def _exit_with_parent() -> None:
    """End this process when the sweep ends: one that is killed cannot stop its processes."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _start_evaluator() -> None:
    _begin_process()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs are for training


WorkerMain = Callable[[Connection, "str | None", int, SweepContext], None]


def run_cells(
    cells: Sequence[Cell],
    context: SweepContext,
    parallel: int = 1,
    progress: SweepProgress | None = None,
    worker: WorkerMain = train_cells,
    on_end: Callable[[SweepSummary], None] = lambda summary: None,
    began: float | None = None,
) -> SweepSummary:
    """Run the cells that have no result yet, ``parallel`` at a time.

    ``worker`` is the main function of a training process. ``on_end`` is called whenever a cell ended, and at the end.
    """
    progress = progress or SweepProgress(Console(quiet=True))
    summary, left = begin_sweep(cells, context, progress, began)
    if left:
        with progress, _WorkerPool(context, min(parallel, len(left)), summary, progress, worker, on_end) as pool:
            pool.run(left)
        on_end(summary)
    return summary


@dataclass
class _Worker:
    """A training process, the cell it trains, and when it last sent a message."""

    process: BaseProcess
    connection: Connection
    cell: Cell | None = None
    last_message: float = 0.0
    reported: bool = False  # whether the cell has begun to train


@dataclass
class _WorkerPool(AbstractContextManager["_WorkerPool"]):
    """Training processes in numbered slots, and evaluation processes beside them."""

    context: SweepContext
    parallel: int
    summary: SweepSummary
    progress: SweepProgress
    worker: WorkerMain
    on_end: Callable[[SweepSummary], None]

    def __post_init__(self) -> None:
        self.processes: Any = multiprocessing.get_context(START_METHOD)
        self.devices = _devices(self.context.accelerator)
        self.slots: dict[int, _Worker] = {}
        self.waiting: deque[Cell] = deque()
        self.starts: Counter[str] = Counter()
        self.evaluators = ProcessPoolExecutor(min(self.parallel, 2), self.processes, _start_evaluator)
        self.evaluating: dict[Future[str], Cell] = {}
        self.signal = 0  # number of the signal that asked to stop
        self.asked: float | None = None  # when the processes were asked to stop

    def run(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            if self.context.is_trained(cell):  # but the sweep ended before it was evaluated
                self._evaluate(cell)
            else:
                self.waiting.append(cell)
        with on_signals(self._receive_signal):
            while self.waiting or self._busy() or self.evaluating:
                if self.signal:
                    self._ask_to_stop()
                if self.signal or time.time() > self.context.deadline:
                    self._give_up_waiting()
                for slot in range(self.parallel):
                    if self.waiting and slot not in self._busy():
                        self._start(slot, self.waiting.popleft())
                self._receive()
                self._kill_stalled()
                self._collect_evaluated()
        self.summary.signal = self.signal

    def _ask_to_stop(self) -> None:
        """Ask each process to stop with a checkpoint, once. One that has not begun to train has none to write, and one
        that does not answer in time is killed: its last checkpoint stays."""
        late = self.asked is not None and time.monotonic() - self.asked > STOP_SECONDS
        for worker, _ in self._busy().values():
            if late or not worker.reported:
                worker.process.kill()
            elif self.asked is None:
                with suppress(OSError):  # the process has ended
                    worker.connection.send(None)
        self.asked = self.asked or time.monotonic()

    def _busy(self) -> dict[int, tuple[_Worker, Cell]]:
        return {slot: (worker, worker.cell) for slot, worker in self.slots.items() if worker.cell is not None}

    def _start(self, slot: int, cell: Cell) -> None:
        """Send a cell to the process of a slot, which is started if there is none."""
        if slot not in self.slots:
            ours, theirs = self.processes.Pipe()
            device = self.devices[slot % len(self.devices)] if self.devices else None
            threads = max(1, available_cores() // self.parallel)  # on a GPU too: its processes prepare batches
            arguments = (theirs, device, threads, self.context)
            process = self.processes.Process(target=self.worker, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that the connection ends with the process
            self.slots[slot] = _Worker(process, ours)
        worker = self.slots[slot]
        worker.cell, worker.last_message, worker.reported = cell, time.monotonic(), False
        self.starts[cell.name] += 1
        self.progress.update(cell.name, "training", "starting")
        try:
            worker.connection.send(cell)
        except OSError:
            self._process_lost(slot, cell)

    def _receive(self) -> None:
        busy = self._busy()
        slots = {worker.connection: slot for slot, (worker, _) in busy.items()}
        if not slots:
            time.sleep(POLL_SECONDS)
        for connection in wait(list(slots), timeout=POLL_SECONDS):
            slot = slots[connection]  # type: ignore[index]
            worker, cell = busy[slot]
            try:
                state, text = worker.connection.recv()
            except (EOFError, OSError):
                self._process_lost(slot, cell)
                continue
            worker.last_message = time.monotonic()
            if state == "training":
                worker.reported = True
                self.progress.update(cell.name, "training", text)
                continue
            worker.cell = None
            if state == "trained":
                self._evaluate(cell)
            elif state == "stopped":
                self.progress.update(cell.name, "unfinished", text)
            else:
                self._fail(cell, text)
                self._end_process(slot)  # a new process starts with a clean device

    def _kill_stalled(self) -> None:
        for slot, (worker, cell) in self._busy().items():
            if time.monotonic() - worker.last_message > self.context.stall_seconds:
                worker.process.kill()
                minutes = self.context.stall_seconds / 60
                self._process_lost(slot, cell, f"its process made no progress for {minutes:g} minutes and was killed")

    def _process_lost(self, slot: int, cell: Cell, reason: str = "") -> None:
        """Resume the cell of a process that is gone in a new one, MAX_STARTS in all."""
        worker = self.slots.pop(slot)
        worker.process.join()
        worker.connection.close()
        reason = reason or f"its process ended with code {worker.process.exitcode}"
        if self.signal:
            self.progress.update(cell.name, "unfinished", reason)
        elif self.starts[cell.name] < MAX_STARTS:
            self.progress.update(cell.name, "waiting", reason)
            self.waiting.appendleft(cell)
        else:
            self._fail(cell, f"{reason} ({MAX_STARTS} attempts)")

    def _end_process(self, slot: int) -> None:
        worker = self.slots.pop(slot)
        with suppress(OSError):  # the process has ended
            worker.connection.send(None)
        worker.process.join(STOP_SECONDS)
        if worker.process.is_alive():
            worker.process.kill()
        worker.connection.close()

    def _evaluate(self, cell: Cell) -> None:
        self.progress.update(cell.name, "evaluating")
        self.evaluating[self.evaluators.submit(evaluate_cell, cell, self.context)] = cell

    def _collect_evaluated(self) -> None:
        for future in [future for future in self.evaluating if future.done()]:
            cell = self.evaluating.pop(future)
            error = future.exception()
            if error is not None:
                self._fail(cell, f"evaluation: {type(error).__name__}: {error}")
            else:
                self.summary.done.append(cell.name)
                self.progress.update(cell.name, "done", future.result())
                self.on_end(self.summary)

    def _fail(self, cell: Cell, reason: str) -> None:
        self.summary.failed[cell.name] = reason
        self.progress.update(cell.name, "failed", reason)
        self.on_end(self.summary)

    def _give_up_waiting(self) -> None:
        """Start no more cells. Processes see the deadline themselves."""
        for cell in self.waiting:
            begun = self.context.run_folder(cell).path.exists()
            self.progress.update(cell.name, "unfinished", "" if begun else "not begun")
        self.waiting.clear()

    def _receive_signal(self, number: int) -> None:
        if self.signal:  # a second signal: no time for checkpoints
            for worker, _ in self._busy().values():
                worker.process.kill()
        self.signal = number

    def __exit__(self, *error: object) -> None:
        for slot in list(self.slots):
            self._end_process(slot)
        self.evaluators.shutdown(cancel_futures=True)


def _devices(accelerator: str) -> list[str]:
    """One name per visible GPU, for CUDA_VISIBLE_DEVICES of a process; empty on a CPU."""
    if accelerator not in ("auto", "cuda", "gpu"):
        return []
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ""
    return [name for name in given.split(",") if name] or [str(i) for i in range(torch.cuda.device_count())]
