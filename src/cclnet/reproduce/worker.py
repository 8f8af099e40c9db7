"""What happens inside the processes: one that trains cell after cell, and one that judges what was trained."""

from __future__ import annotations

import dataclasses
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
from cclnet.reproduce.course import note_course
from cclnet.reproduce.experiments import Cell
from cclnet.reproduce.results import differing_settings, keep_result
from cclnet.training.settings import Settings


@dataclass(frozen=True)
class Work:
    """What all cells share. It is sent to every process.

    Attributes:
        runs: the folder in which each cell has its run folder.
        results: the folder of results.
        recipes, data: settings and data of each split by its name.
        deadline: when training stops, in seconds of ``time.time()``; infinite for never.
        smoke: tiny settings instead of the recipe's.
        accelerator, cache_dir: as in ``train``.
    """

    runs: Path
    results: Path
    recipes: Mapping[str, Mapping[str, Any]]
    data: Mapping[str, str]
    deadline: float = float("inf")
    smoke: bool = False
    accelerator: str = "auto"
    cache_dir: Path | None = None

    def settings(self, cell: Cell) -> Settings:
        return cell.settings(self.recipes[cell.split], self.data[cell.split], self.smoke)

    def run_folder(self, cell: Cell) -> Path:
        return self.runs / cell.name

    def is_trained(self, cell: Cell) -> bool:
        return (self.run_folder(cell) / "predictions.csv").exists()  # the last file of a run


@dataclass(frozen=True)
class Message:
    """From a training process: state "training", "trained", "stopped" or "failed", and words to show."""

    state: str
    words: str = ""


class OutOfTime(Exception):
    """The deadline came; the run stands checkpointed."""


def serve(connection: Connection, device: str | None, threads: int, work: Work) -> None:
    """A training process: takes cells from the connection until None comes, and tells how each one goes.

    One process trains many cells, for imports and compilers' caches cost seconds. After an unforeseen error it ends,
    so that a device left in disorder harms no other cell.
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

    while (cell := connection.recv()) is not None:
        try:
            train_cell(cell, work, tell)
            connection.send(Message("trained"))
        except OutOfTime:
            connection.send(Message("stopped", "out of time, checkpointed"))
        except Interrupted:
            connection.send(Message("stopped", "interrupted, checkpointed"))
            return
        except InputError as error:
            connection.send(Message("failed", str(error)))
        except Exception as error:  # noqa: BLE001 (whatever goes wrong in one cell must not stop the others)
            note = work.run_folder(cell) / "error.txt"
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(traceback.format_exc(), encoding="utf-8")
            connection.send(Message("failed", f"{type(error).__name__}: {error} (see {note})"))
            return
        gc.collect()  # a network and its optimiser hold each other; their memory is wanted now
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def train_cell(cell: Cell, work: Work, tell: Callable[[str], None]) -> Path:
    """Train a cell, or go on with it from its last checkpoint; returns its run folder."""
    from cclnet.training.loop import train
    from cclnet.training.run_folder import RunFolder

    settings, run = work.settings(cell), RunFolder(work.run_folder(cell))
    begun = run.settings.exists()
    if begun and (different := differing_settings(settings, dataclasses.asdict(run.read_settings()))):
        raise InputError(
            f"{run.path} was begun with other settings ({'; '.join(different)}). "
            "Remove the folder to begin anew, or go back to the recipe it was begun with."
        )

    def on_epoch(record: Mapping[str, Any], network: Any) -> None:
        tell(_epoch_in_words(record, settings.epochs))
        note_course(run.path, record["epoch"], network.soft_labels() if "softness" in record else None)
        if record["epoch"] < settings.epochs and time.time() > work.deadline:
            raise OutOfTime(cell.name)

    return train(
        None if begun else settings,
        run.path,
        accelerator=work.accelerator,
        cache_dir=work.cache_dir,
        progress=False,
        on_epoch=on_epoch,
    )


def _epoch_in_words(record: Mapping[str, Any], epochs: int) -> str:
    words = f"epoch {record['epoch']}/{epochs}, {record['images_per_second']:,.0f} images/s"
    if "softness" in record:
        words += f", softness {record['softness']:.3f}{' frozen' if record.get('frozen') else ''}"
    return words


def judge_cell(cell: Cell, work: Work) -> str:
    """Judge a trained cell and keep its result; the checkpoints are not needed any more. Returns words to show."""
    run = work.run_folder(cell)
    result = keep_result(cell, run, work.results)
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    seconds = result.content["seconds"]
    return f"accuracy {result.value('accuracy'):.4f}, kappa {result.value('kappa') or 0:.4f}, {seconds:.0f} s"


def begin_judging() -> None:
    """A judging process leaves the GPU to those that train, and Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
