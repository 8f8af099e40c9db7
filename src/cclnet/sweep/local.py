"""Runs jobs: several training processes, each with its device, and judging beside them so that no GPU waits."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from cclnet.errors import InputError
from cclnet.files import write_whole
from cclnet.runs.folder import RunFolder
from cclnet.runs.kept_result import KeptResult
from cclnet.sweep.cells import Job, Work
from cclnet.sweep.results import differs_from_result, differs_from_run, keep_result, read_results, record_soft_labels

# How the jobs stand or ended: in words, and as a line in a log beside the results.


@dataclass
class Outcome:
    """The names of all jobs, and of those that ended by how they did; those that failed with the reason."""

    names: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def unfinished(self) -> list[str]:
        ended = {*self.done, *self.skipped, *self.failed}
        return [name for name in self.names if name not in ended]

    def in_words(self, seconds: float) -> str:
        had = f"{len(self.skipped)} had their result already"
        lines = [f"{len(self.done)} runs done and {had}, in {seconds / 60:.1f} minutes."]
        if self.unfinished:
            names = ", ".join(self.unfinished)
            lines.append(f"{len(self.unfinished)} unfinished, go on with the same command: {names}")
        lines += [f"failed: {name}: {reason}" for name, reason in self.failed.items()]
        return "\n".join(lines)


class Log:
    """log.jsonl beside the results: a line for each command, with what was asked for and what it took on the clock.

    The line is written again as each job ends, so that it is there even if the machine stops under the command.
    """

    def __init__(self, results: Path, began: float, asked: Mapping[str, Any]) -> None:
        self.path, self.began, self.asked = results / "log.jsonl", began, asked
        self.before: str | None = None

    @property
    def seconds(self) -> float:
        return time.time() - self.began

    def write(self, outcome: Outcome) -> None:
        if self.before is None:
            self.before = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        line = {
            "began": datetime.fromtimestamp(self.began, timezone.utc).isoformat(timespec="seconds"),
            **self.asked,
            "done": outcome.done,
            "unfinished": len(outcome.unfinished),
            "failed": len(outcome.failed),
            "minutes": round(self.seconds / 60, 2),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, self.before + json.dumps(line) + "\n")


# How the jobs stand: a live table on a terminal, a line for each change elsewhere.


COLOURS = {
    "waiting": "dim", "training": "cyan", "judging": "blue", "done": "green", "skipped": "dim green",
    "unfinished": "yellow", "failed": "red",
}  # fmt: skip
LINE_EVERY = 30.0  # seconds between two lines about one job in training, where there is no live table


class Show:
    """``with Show() as show: show.update(name, state, words)``."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(quiet=quiet)
        self.states: dict[str, tuple[str, str]] = {}
        self.began = time.monotonic()
        self._told: dict[str, float] = {}
        self._live: Live | None = None

    def update(self, name: str, state: str, words: str = "") -> None:
        before = self.states.get(name, ("", ""))[0]
        self.states[name] = (state, words)
        if self._live is not None:
            self._live.update(self.table())
        elif state != "waiting" and (state != before or self._due(name)):
            self._told[name] = time.monotonic()
            line = f"{self._clock()}  {state:<10} {name}  {words}"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _due(self, name: str) -> bool:
        return time.monotonic() - self._told.get(name, 0.0) > LINE_EVERY

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        return f"{minutes:3d}:{seconds:02d}"

    def table(self) -> Table:
        """The jobs that are under way or changed, and how many there are of each state."""
        counts = ", ".join(
            f"{count} {state}" for state in COLOURS if (count := sum(s == state for s, _ in self.states.values()))
        )
        table = Table(title=f"{self._clock()}  {counts}", title_justify="left", box=None, pad_edge=False)
        for column in ("run", "state", ""):
            table.add_column(column, no_wrap=column != "")
        room = max(self.console.height - 6, 8)
        shown = [row for row in self.states.items() if row[1][0] in ("training", "judging", "failed")]
        shown += [row for row in reversed(self.states.items()) if row[1][0] in ("done", "unfinished")]
        for name, (state, words) in shown[:room]:
            table.add_row(name, f"[{COLOURS[state]}]{state}[/]", escape(words))
        return table

    def __enter__(self) -> Show:
        if self.console.is_terminal and not self.console.quiet:
            self._live = Live(self.table(), console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


# What happens inside the processes: one that trains job after job, and one that judges what was trained.


@dataclass(frozen=True)
class Message:
    """From a training process: state "training", "trained", "stopped" or "failed", and words to show."""

    state: str
    words: str = ""


class OutOfTime(Exception):
    """The deadline came; the run stands checkpointed."""


def serve(connection: Connection, device: str | None, threads: int, work: Work) -> None:
    """A training process: takes jobs from the connection until None comes, and tells how each one goes.

    One process trains many jobs, for imports and compilers' caches cost seconds. After an unforeseen error it ends,
    so that a device left in disorder harms no other job.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which asks to stop
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    import torch

    from cclnet.errors import Interrupted

    if threads:
        torch.set_num_threads(threads)

    def tell(words: str) -> None:
        connection.send(Message("training", words))

    while (job := connection.recv()) is not None:
        try:
            train_job(job, work, tell)
            connection.send(Message("trained"))
        except OutOfTime:
            connection.send(Message("stopped", "out of time, checkpointed"))
        except Interrupted:
            connection.send(Message("stopped", "interrupted, checkpointed"))
            return
        except InputError as error:
            connection.send(Message("failed", str(error)))
        except Exception as error:  # noqa: BLE001 (whatever goes wrong in one job must not stop the others)
            note = work.run_folder(job) / "error.txt"
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(traceback.format_exc(), encoding="utf-8")
            connection.send(Message("failed", f"{type(error).__name__}: {error} (see {note})"))
            return
        gc.collect()  # a network and its optimiser hold each other; their memory is wanted now
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def train_job(job: Job, work: Work, tell: Callable[[str], None]) -> Path:
    """Train a job, or go on with it from its last checkpoint; returns its run folder."""
    from cclnet.training.loop import train

    settings, run = job.settings, RunFolder(work.run_folder(job))
    begun = run.settings.exists()
    if begun:
        _must_be_of(job, run)

    def on_epoch(record: Mapping[str, Any], network: Any) -> None:
        tell(_epoch_in_words(record, settings.epochs))
        record_soft_labels(run, record["epoch"], network.soft_labels() if "softness" in record else None)
        if record["epoch"] < settings.epochs and time.time() > work.deadline:
            raise OutOfTime(job.name)

    return train(
        None if begun else settings,
        run.path,
        accelerator=work.accelerator,
        cache_dir=work.cache_dir,
        progress=False,
        on_epoch=on_epoch,
    )


def _must_be_of(job: Job, run: RunFolder) -> None:
    if different := differs_from_run(job, run):
        raise InputError(
            f"{run.path} was begun with other settings ({'; '.join(different)}). "
            "Remove the folder to begin anew, or go back to the settings it was begun with."
        )


def _epoch_in_words(record: Mapping[str, Any], epochs: int) -> str:
    words = f"epoch {record['epoch']}/{epochs}, {record['images_per_second']:,.0f} images/s"
    if "softness" in record:
        words += f", softness {record['softness']:.3f}{' frozen' if record.get('frozen') else ''}"
    return words


def judge_job(job: Job, work: Work) -> str:
    """Judge a trained job and keep its result; the checkpoints are not needed any more. Returns words to show."""
    run = work.run_folder(job)
    _must_be_of(job, RunFolder(run))
    result = keep_result(job, run, work.result(job))
    shutil.rmtree(RunFolder(run).checkpoints, ignore_errors=True)
    shown = list(result.scores)[:2]
    words = [f"{name.replace('_', ' ')} {result.value(name) or 0:.4f}" for name in shown]
    return f"{', '.join(words)}, {result.seconds:.0f} s"


def begin_judging() -> None:
    """A judging process leaves the GPU to those that train, and Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


PACE = 0.2  # seconds between two looks at those who judge
GRACE = 60.0  # seconds that a training process gets to write its checkpoint when all is stopped


@dataclass
class Trainer:
    """A training process and the job it works on."""

    process: BaseProcess
    connection: Connection
    job: Job | None = None


def run_jobs(
    jobs: Sequence[Job],
    work: Work,
    parallel: int = 1,
    show: Show | None = None,
    trainer: Callable[[Connection, str | None, int, Work], None] = serve,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Run the jobs that have no result yet, ``parallel`` at a time.

    A job that was begun goes on from its checkpoint. One that fails is named in the outcome and stops no other.
    When the deadline of ``work`` comes, what is in training is checkpointed and stays to be gone on with.
    ``trainer`` is what a training process runs; ``on_end`` is told how all stands when a job ended, and at the end.
    """
    if parallel < 1:
        raise InputError(f"parallel must be at least 1, got {parallel}.")
    finished = _finished(jobs, work)
    names = [job.name for job in jobs]
    outcome = Outcome(names, skipped=[name for name in names if name in finished])
    left = [job for job in jobs if job.name not in finished]
    show = show or Show(quiet=True)
    for name in outcome.skipped:
        show.update(name, "skipped", "has its result")
    for job in left:
        show.update(job.name, "waiting")
    if left:
        with show, _Crew(work, min(parallel, len(left)), outcome, show, trainer, on_end) as crew:
            crew.run(left)
        on_end(outcome)
    return outcome


def _finished(jobs: Sequence[Job], work: Work) -> set[str]:
    """Jobs with a result. Results of other settings or images are not mixed in: they are named, all."""
    folders = {work.result(job).parent for job in jobs}
    kept: dict[str, KeptResult] = {result.path.stem: result for folder in folders for result in read_results(folder)}
    odd = []
    for job in jobs:
        if job.name in kept:
            different = differs_from_result(job, kept[job.name])
            odd += [f"\n  {kept[job.name].path}: {'; '.join(different)}"] if different else []
    if odd:
        raise InputError(
            f"{len(odd)} results were made of something else than is asked for now:{''.join(odd)}\n"
            "Choose another --out, or remove them and their run folders to run them again."
        )
    return {job.name for job in jobs if job.name in kept}


class _Crew:
    """The processes at work. Read it from ``run`` downwards."""

    def __init__(
        self,
        work: Work,
        parallel: int,
        outcome: Outcome,
        show: Show,
        trainer: Callable[[Connection, str | None, int, Work], None],
        on_end: Callable[[Outcome], None],
    ) -> None:
        self.work, self.parallel, self.outcome, self.show = work, parallel, outcome, show
        self.trainer, self.on_end = trainer, on_end
        self.context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        self.trainers: list[Trainer | None] = [None] * parallel
        self.judging: dict[Future[str], Job] = {}
        self.judges = ProcessPoolExecutor(min(parallel, 2), mp_context=self.context, initializer=begin_judging)
        self.devices = _devices(work.accelerator)
        self.stopping = False

    def run(self, jobs: Sequence[Job]) -> None:
        waiting = []
        for job in jobs:
            if self.work.is_trained(job):  # but was not judged any more
                self._judge(job)
            else:
                waiting.append(job)
        with self._stop_on_signals():
            while waiting or self._busy() or self.judging:
                if self.stopping or time.time() > self.work.deadline:
                    self._give_up(waiting)
                for place in range(self.parallel):
                    if waiting and (self.trainers[place] is None or self._at(place).job is None):
                        self._hand_out(place, waiting.pop(0))
                self._listen()
                self._collect_judged()

    # ---- training ----------------------------------------------------------------------------------------------

    def _at(self, place: int) -> Trainer:
        trainer = self.trainers[place]
        assert trainer is not None
        return trainer

    def _busy(self) -> list[int]:
        return [i for i, trainer in enumerate(self.trainers) if trainer is not None and trainer.job is not None]

    def _hand_out(self, place: int, job: Job) -> None:
        if self.trainers[place] is None:
            ours, theirs = self.context.Pipe()
            device = self.devices[place % len(self.devices)] if self.devices else None
            threads = 0 if self.devices else max(1, (os.cpu_count() or 1) // self.parallel)
            process = self.context.Process(target=self.trainer, args=(theirs, device, threads, self.work), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the connection
            self.trainers[place] = Trainer(process, ours)
        trainer = self._at(place)
        trainer.job = job
        self.show.update(job.name, "training", "starting")
        try:
            trainer.connection.send(job)
        except OSError:  # it ended after its last job, in a way that was not foreseen: another takes its place
            trainer.process.join()
            self.trainers[place] = None
            self._hand_out(place, job)

    def _listen(self) -> None:
        busy = {self._at(place).connection: place for place in self._busy()}
        for connection in wait(list(busy), timeout=PACE) if busy else ():
            place = busy[connection]  # type: ignore[index]
            trainer = self._at(place)
            assert trainer.job is not None
            try:
                message = trainer.connection.recv()
            except (EOFError, OSError):
                trainer.process.join()
                self.trainers[place] = None
                code = trainer.process.exitcode
                state = "stopped" if self.stopping else "failed"
                message = Message(state, f"its process ended with code {code}")
            self._note(place, trainer, trainer.job, message)
        if not busy:
            time.sleep(PACE)

    def _note(self, place: int, trainer: Trainer, job: Job, message: Message) -> None:
        if message.state == "training":
            self.show.update(job.name, "training", message.words)
            return
        trainer.job = None
        if message.state == "trained":
            self._judge(job)
        elif message.state == "stopped":
            self.show.update(job.name, "unfinished", message.words)
        else:
            self._failed(job, message.words)
        trainer.process.join(0.0)
        if message.state == "failed" and self.trainers[place] is trainer:
            self._dismiss(place)  # a new process begins with a clean device

    def _dismiss(self, place: int) -> None:
        trainer = self._at(place)
        self.trainers[place] = None
        with suppress(OSError):  # gone already
            trainer.connection.send(None)
        trainer.process.join(GRACE)
        if trainer.process.is_alive():
            trainer.process.kill()
        trainer.connection.close()

    # ---- judging -----------------------------------------------------------------------------------------------

    def _judge(self, job: Job) -> None:
        self.show.update(job.name, "judging")
        self.judging[self.judges.submit(judge_job, job, self.work)] = job

    def _collect_judged(self) -> None:
        for future in [future for future in self.judging if future.done()]:
            job = self.judging.pop(future)
            error = future.exception()
            if error is not None:
                self._failed(job, f"judging: {type(error).__name__}: {error}")
            else:
                self.outcome.done.append(job.name)
                self.show.update(job.name, "done", future.result())
                self.on_end(self.outcome)

    def _failed(self, job: Job, words: str) -> None:
        self.outcome.failed[job.name] = words
        self.show.update(job.name, "failed", words)
        self.on_end(self.outcome)

    # ---- stopping ----------------------------------------------------------------------------------------------

    def _give_up(self, waiting: list[Job]) -> None:
        """Begin nothing more. Trainers see the deadline themselves; a signal is passed on to them."""
        for job in waiting:
            self.show.update(job.name, "unfinished", "not begun" if not self.work.run_folder(job).exists() else "")
        waiting.clear()

    @contextmanager
    def _stop_on_signals(self) -> Iterator[None]:
        def stop(number: int, frame: FrameType | None) -> None:
            self.stopping = True
            for place in self._busy():
                self._at(place).process.terminate()  # noted between two steps, with a checkpoint

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *problem: object) -> None:
        for place, trainer in enumerate(self.trainers):
            if trainer is not None:
                self._dismiss(place)
        self.judges.shutdown(cancel_futures=True)


def _devices(accelerator: str) -> list[str]:
    """The names by which a process sees one GPU each; none for the CPU."""
    if accelerator not in ("auto", "cuda", "gpu"):
        return []
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name for name in given.split(",") if name] if given is not None else []
    return names or [str(i) for i in range(torch.cuda.device_count())]
