"""Runs jobs: several training processes, each with its device, and judging beside them so that no GPU waits."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType

from cclnet.errors import InputError
from cclnet.jobs.job import Job, Work
from cclnet.jobs.outcome import Outcome
from cclnet.jobs.results import Result, differs_from_result, read_results
from cclnet.jobs.show import Show
from cclnet.jobs.worker import Message, begin_judging, judge_job, serve

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
    kept: dict[str, Result] = {result.path.stem: result for folder in folders for result in read_results(folder)}
    odd = []
    for job in jobs:
        if job.name in kept:
            different = differs_from_result(job, kept[job.name].content)
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
