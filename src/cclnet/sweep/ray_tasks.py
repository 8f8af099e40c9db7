"""Run the cells of a sweep on Ray: each cell is a task that trains and evaluates it on some node of the cluster.

A cell whose process or node is lost continues from its checkpoint in a new task, until three tasks in a row completed
no epoch. Nodes that see the folder of the runs work in it. Others work in a temporary folder: they fetch the files of
the run from the sweep and send them back, with the result, through Ray's object store. On SIGTERM, Ctrl-C or the
deadline every cell in training is checkpointed, and the same sweep continues from there.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from cclnet.errors import InputError, Interrupted, first_line
from cclnet.files import PARTIAL, make_folder, write_whole
from cclnet.memory import large_imports
from cclnet.runs.checksums import FILE_NAME as CHECKSUMS
from cclnet.sweep.cells import REPORT, Cell, RayOptions, SweepContext, SweepSummary
from cclnet.sweep.executors import SweepProgress, begin_sweep, on_signals
from cclnet.sweep.run_cell import OutOfTime, evaluate_cell, train_cell

MAX_STARTS = 3  # tasks in a row that complete no epoch of a cell
POLL_SECONDS = 0.5
STOP_SECONDS = 60.0  # for a task to write its checkpoint when the sweep ends
ASK_SECONDS = 1.0  # between two questions of a task whether it is to stop
SEND_SECONDS = 30.0  # between two copies of the files of a run from a node that does not see their folder
Files = dict[str, bytes]  # content by path in a folder


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """The module ``ray``, connected to a cluster, or to one that is started on this machine and ends with the block."""
    try:
        import ray
    except ImportError as error:
        raise InputError("this needs Ray: pip install 'cclnet[ray]'") from error
    if ray.is_initialized():  # by the program that uses cclnet
        yield ray
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to the makers of Ray
    own: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
    except Exception as error:  # of many kinds, also the plain one
        ray.shutdown()  # what has been started until then
        raise InputError(
            f"Ray cannot be reached at '{address}': {first_line(error)}. Start it with `ray start --head`, or leave "
            "out --address to use this machine alone."
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def cell_gpus(ray: Any, options: RayOptions, accelerator: str) -> float:
    """The GPUs of each cell: as given, else one if the cluster has any and they may be used."""
    if options.cell_gpus is not None:
        return options.cell_gpus
    return float(accelerator != "cpu" and ray.cluster_resources().get("GPU", 0) > 0)


def run_cells_on_ray(
    cells: Sequence[Cell],
    context: SweepContext,
    options: RayOptions,
    progress: SweepProgress,
    on_end: Callable[[SweepSummary], None] = lambda summary: None,
    began: float | None = None,
) -> SweepSummary:
    """Run the cells that have no result yet. ``on_end`` is called whenever a cell ended, and at the end."""
    # Absolute, because the tasks may run in another folder.
    results, cache_dir = (None if path is None else path.absolute() for path in (context.results, context.cache_dir))
    context = replace(context, runs=context.runs.absolute(), results=results, cache_dir=cache_dir)
    summary, left = begin_sweep(cells, context, progress, began)
    if left:
        with connected(options.address) as ray, progress, _marked(make_folder(context.runs)) as marker:
            _RaySweep(ray, context, options, marker, summary, progress, on_end).run(left)
        on_end(summary)
    return summary


@contextmanager
def _marked(folder: Path) -> Iterator[Path]:
    """A file by which a task finds out whether its node sees the folder."""
    marker = folder / f".sweep-{secrets.token_hex(8)}"
    marker.touch()
    try:
        yield marker
    finally:
        marker.unlink(missing_ok=True)


class Board:
    """An actor on the node of the sweep, through which its tasks report, are asked to stop, and exchange files."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.messages: list[tuple[str, int, str, str]] = []
        self.attempts: dict[str, int] = {}
        self.stopping = False

    def expect(self, name: str, attempt: int) -> None:
        """From now on this attempt at a cell counts, and no earlier one."""
        self.attempts[name] = attempt

    def report(self, name: str, attempt: int, state: str = "", text: str = "") -> bool:
        """Pass a state on to the sweep; whether the task is to stop: an earlier attempt whose node was only cut off
        must not go on beside the current one."""
        if self.attempts.get(name) != attempt:
            return True
        if state:
            self.messages.append((name, attempt, state, text))
        return self.stopping

    def take_messages(self) -> list[tuple[str, int, str, str]]:
        messages, self.messages = self.messages, []
        return messages

    def stop(self) -> None:
        self.stopping = True

    def read_run(self, name: str) -> Files:
        return read_files(self.runs / name)

    def write_run(self, name: str, attempt: int, files: Files) -> None:
        if self.attempts.get(name) == attempt:
            write_files(self.runs / name, files, remove_others=True)


@dataclass(frozen=True)
class Outcome:
    """How a task ended: "done", "stopped" (as asked), "interrupted" (by its node), "failed"."""

    state: str
    text: str
    traceback: str = ""
    results: Files = field(default_factory=dict)  # of a node that does not see the folder of results


def cell_task(
    board: Any, attempt: int, cell: Cell, context: SweepContext, marker: Path, folder: str, threads: int
) -> Outcome:
    """The task of a cell. ``folder`` is the working directory of the sweep."""
    import ray

    stand_alone(threads, folder)
    if marker.exists():
        return _run_cell(cell, context, _Report(ray, board, cell.name, attempt))
    with tempfile.TemporaryDirectory(prefix="cclnet-") as scratch:
        results = None if context.results is None else Path(scratch, "results")
        context = replace(context, runs=Path(scratch, "runs"), results=results)
        run = context.runs / cell.name
        write_files(run, ray.get(board.read_run.remote(cell.name)))
        report = _Report(ray, board, cell.name, attempt, run)
        outcome = _run_cell(cell, context, report)
        report.send_files()
        return outcome if results is None else replace(outcome, results=read_files(results))


def stand_alone(threads: int, folder: str) -> None:
    """Make this process of Ray train alone, with so many threads (0: as it is), whatever started its node; and work in
    the folder that paths in settings may refer to, where it exists."""
    with large_imports():
        import torch

    if Path(folder).is_dir():
        os.chdir(folder)
    for variable in ("TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS"):  # by which torchrun and srun are recognised
        os.environ.pop(variable, None)
    if threads:
        torch.set_num_threads(threads)


@dataclass
class _Report:
    """The connection of a task to the board. ``run`` is the folder whose files are sent to it, if any."""

    ray: Any
    board: Any
    name: str
    attempt: int
    run: Path | None = None
    asked: float = 0.0  # when
    sent: float = 0.0
    stopping: bool = False

    def state(self, state: str, text: str = "") -> None:
        self.asked = time.monotonic()
        self.stopping |= self.ray.get(self.board.report.remote(self.name, self.attempt, state, text))

    def where(self) -> str:
        return f"{socket.gethostname()}, node {self.ray.get_runtime_context().get_node_id()[:8]}"

    def stop(self) -> bool:
        if time.monotonic() - self.asked > ASK_SECONDS:
            self.state("")
        # Not in on_checkpoint: the checkpoint of an epoch is written in a thread, and not on the disk by then.
        due = self.run is not None and time.monotonic() - self.sent > SEND_SECONDS
        if due and any(Path(self.run or "", "checkpoints").glob("*.pt")):
            self.send_files()
        return self.stopping

    def on_checkpoint(self) -> None:
        self.state("checkpointed")

    def send_files(self) -> None:
        assert self.run is not None
        self.ray.get(self.board.write_run.remote(self.name, self.attempt, read_files(self.run)))
        self.sent = time.monotonic()


def _run_cell(cell: Cell, context: SweepContext, report: _Report) -> Outcome:
    report.state("training", f"starting on {report.where()}")
    try:
        if not context.is_trained(cell):
            train_cell(cell, context, partial(report.state, "training"), report.stop, report.on_checkpoint)
        report.state("evaluating")
        return Outcome("done", evaluate_cell(cell, context))
    except OutOfTime:
        return Outcome("stopped", "out of time, checkpointed")
    except Interrupted:
        if report.stopping:
            return Outcome("stopped", "interrupted, checkpointed")
        return Outcome("interrupted", "its process was asked to end")  # its node is being taken away
    except InputError as error:
        return Outcome("failed", str(error))
    except Exception as error:  # noqa: BLE001 (an error in one cell must not stop the others)
        return Outcome("failed", f"{type(error).__name__}: {error}", traceback.format_exc())


def read_files(folder: Path) -> Files:
    """The files in a folder, all of the same moment: they are read again if one of them changes meanwhile."""
    while True:
        before = _listing(folder)
        try:
            files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in before}
        except FileNotFoundError:
            continue
        if _listing(folder) == before:
            return files


def _listing(folder: Path) -> dict[Path, tuple[int, int]]:
    listing = {}
    for path in sorted(folder.rglob("*")):
        try:
            if path.is_file() and not path.name.endswith(PARTIAL):
                listing[path] = (path.stat().st_mtime_ns, path.stat().st_size)
        except FileNotFoundError:  # it was replaced or removed: the next listing differs
            listing[path] = (0, 0)
    return listing


def write_files(folder: Path, files: Mapping[str, bytes], remove_others: bool = False) -> None:
    """Write files into a folder. Files that say that others exist come last: checkpoints after the history, checksums
    after what they cover, NAME.json after the predictions; of a run that has ended, the predictions and the report."""

    def order(name: str) -> tuple[bool, bool, bool, bool]:
        ended = name in ("predictions.csv", REPORT)
        return ended, name.startswith("checkpoints/"), name.endswith(".json"), name.endswith(CHECKSUMS)

    for name in sorted(files, key=order):
        path = folder / name
        make_folder(path.parent)
        write_whole(path, files[name])
    for path in _listing(folder) if remove_others else ():
        if path.relative_to(folder).as_posix() not in files:
            path.unlink()


@dataclass
class _Task:
    """A task, and what its sweep knows about it."""

    cell: Cell
    attempt: int
    last_message: float | None = None  # None: it has not begun
    cancelled: str = ""  # why


class _RaySweep:
    """The tasks of a sweep, seen from the process that started it."""

    def __init__(
        self, ray: Any, context: SweepContext, options: RayOptions, marker: Path, summary: SweepSummary,
        progress: SweepProgress, on_end: Callable[[SweepSummary], None],
    ) -> None:  # fmt: skip
        self.ray, self.marker, self.summary, self.progress, self.on_end = ray, marker, summary, progress, on_end
        gpus = cell_gpus(ray, options, context.accelerator)
        self.context = context if gpus else replace(context, accelerator="cpu")
        self.threads = 0 if gpus else max(1, int(options.cell_cpus))
        resources = {"num_cpus": options.cell_cpus, "num_gpus": gpus, "memory": int(options.cell_memory * 1e9) or None}
        self._note_missing_resources({"CPU": options.cell_cpus, "GPU": gpus, "memory": options.cell_memory * 1e9})
        self.task = ray.remote(max_retries=0, **resources)(cell_task)  # the sweep itself counts and resumes
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        self.board = ray.remote(num_cpus=0, scheduling_strategy=here)(Board).remote(context.runs)
        self.running: dict[Any, _Task] = {}
        self.fruitless: Counter[str] = Counter()  # tasks of a cell since its last completed epoch
        self.signals: list[int] = []
        self.asked: float | None = None  # when the tasks were asked to stop

    def _note_missing_resources(self, needed: Mapping[str, float]) -> None:
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if not any(all(node.get(name, 0) >= amount for name, amount in needed.items()) for node in nodes):
            asked = ", ".join(f"{amount:g} {name}" for name, amount in needed.items() if amount)
            text = f"note: no node of the cluster has {asked} for a cell; the sweep waits for one that has."
            self.progress.console.print(text, style="yellow", highlight=False)

    def run(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            self._submit(cell, attempt=1)
        with on_signals(self.signals.append):
            while self.running:
                ended, _ = self.ray.wait(list(self.running), timeout=POLL_SECONDS)
                self._show_messages()
                for reference in ended:
                    self._collect(reference)
                self._stop_if_asked()
                self._cancel_stalled()
        self.summary.signal = self.signals[0] if self.signals else 0

    @property
    def ending(self) -> bool:
        return bool(self.signals) or time.time() > self.context.deadline

    def _submit(self, cell: Cell, attempt: int) -> None:
        self.ray.get(self.board.expect.remote(cell.name, attempt))
        self.fruitless[cell.name] += 1
        # The arguments of cell_task.
        reference = self.task.options(name=cell.name).remote(
            self.board, attempt, cell, self.context, self.marker, str(Path.cwd()), self.threads
        )
        self.running[reference] = _Task(cell, attempt)

    def _show_messages(self) -> None:
        tasks = {(task.cell.name, task.attempt): task for task in self.running.values()}
        for name, attempt, state, text in self.ray.get(self.board.take_messages.remote()):
            if (name, attempt) not in tasks:  # it was lost in the meantime
                continue
            tasks[name, attempt].last_message = time.monotonic()
            if state == "checkpointed":
                self.fruitless[name] = 0
            else:
                self.progress.update(name, state, text)

    def _collect(self, reference: Any) -> None:
        """Handle a task that has ended."""
        task = self.running.pop(reference)
        cell, errors = task.cell, self.ray.exceptions
        try:
            outcome: Outcome = self.ray.get(reference)
        except errors.TaskCancelledError:
            self._lost(task, task.cancelled)
        except errors.RayTaskError as error:
            if task.cancelled:  # the signal of the cancellation arrived while the task began
                self._lost(task, task.cancelled)
            else:  # before the task could begin: cclnet is missing or of another version
                self._fail(cell, Outcome("failed", f"its node cannot run it: {first_line(error.cause)}", str(error)))
        except errors.RayError as error:  # node or process lost, or killed for its memory
            self._lost(task, task.cancelled or f"{type(error).__name__}: {first_line(error)}")
        else:
            if outcome.state == "done":
                if self.context.results is not None:
                    write_files(self.context.results, outcome.results)
                self.summary.done.append(cell.name)
                self.progress.update(cell.name, "done", outcome.text)
                self.on_end(self.summary)
            elif outcome.state == "stopped":
                self.progress.update(cell.name, "unfinished", outcome.text)
            elif outcome.state == "interrupted":
                self._lost(task, outcome.text)
            else:
                self._fail(cell, outcome)

    def _lost(self, task: _Task, reason: str) -> None:
        """Resume a cell in a new task."""
        name = task.cell.name
        if self.ending:
            self.progress.update(name, "unfinished", reason)
        elif self.fruitless[name] < MAX_STARTS:
            self.progress.update(name, "waiting", reason)
            self._submit(task.cell, task.attempt + 1)
        else:
            self._fail(task.cell, Outcome("failed", f"{reason} ({MAX_STARTS} attempts without a completed epoch)"))

    def _fail(self, cell: Cell, outcome: Outcome) -> None:
        text = outcome.text
        if outcome.traceback:
            note = make_folder(self.context.runs / cell.name) / "error.txt"
            write_whole(note, outcome.traceback)
            text += f" (see {note})"
        self.summary.failed[cell.name] = text
        self.progress.update(cell.name, "failed", text)
        self.on_end(self.summary)

    def _stop_if_asked(self) -> None:
        """Cancel what has not begun, and ask the others to stop with a checkpoint. Those that do not in time, and all
        after a second signal, are killed: their last checkpoint stays."""
        if not self.ending:
            return
        if self.signals and self.asked is None:  # at the deadline the tasks stop by themselves
            self.asked = time.monotonic()
            self.ray.get(self.board.stop.remote())
        kill = len(self.signals) > 1 or (self.asked is not None and time.monotonic() - self.asked > STOP_SECONDS)
        for reference, task in self.running.items():
            if kill:
                self._cancel(reference, "killed, its last checkpoint stays", force=True)
            elif task.last_message is None:
                self._cancel(reference, "not begun")

    def _cancel_stalled(self) -> None:
        for reference, task in self.running.items():
            began, limit = task.last_message, self.context.stall_seconds
            if began is not None and time.monotonic() - began > limit:
                self._cancel(reference, f"it made no progress for {limit / 60:g} minutes and was killed", force=True)

    def _cancel(self, reference: Any, reason: str, force: bool = False) -> None:
        task = self.running[reference]
        if task.cancelled != reason:
            task.cancelled = reason
            self.ray.cancel(reference, force=force)
