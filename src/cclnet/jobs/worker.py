"""What happens inside the processes: one that trains job after job, and one that judges what was trained."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cclnet.errors import InputError
from cclnet.jobs.course import note_course
from cclnet.jobs.job import Job, Work
from cclnet.jobs.results import differs_from_run, keep_result
from cclnet.training.run_folder import RunFolder


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

    from cclnet.training.loop import Interrupted

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
        note_course(run.path, record["epoch"], network.soft_labels() if "softness" in record else None)
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
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    shown = list(result.content["scores"])[:2]
    words = [f"{name.replace('_', ' ')} {result.value(name) or 0:.4f}" for name in shown]
    return f"{', '.join(words)}, {result.content['seconds']:.0f} s"


def begin_judging() -> None:
    """A judging process leaves the GPU to those that train, and Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
