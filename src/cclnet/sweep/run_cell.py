"""Train and evaluate one cell, wherever an executor has placed it."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from cclnet.errors import InputError
from cclnet.evaluation.evaluate import evaluate
from cclnet.memory import large_imports
from cclnet.report import write_report
from cclnet.runs.folder import RunFolder
from cclnet.sweep.cells import Cell, SweepContext
from cclnet.sweep.results import differs_from_run, headline_scores, keep_result, record_soft_labels

STEP_SECONDS = 15.0  # between two messages about the steps of one epoch


class OutOfTime(Exception):
    """The deadline has passed; the run is checkpointed."""


def train_cell(
    cell: Cell,
    context: SweepContext,
    report: Callable[[str], None],
    stop: Callable[[], bool] = lambda: False,
    on_checkpoint: Callable[[], None] = lambda: None,
) -> None:
    """Train a cell, or resume it from its last checkpoint. ``report`` receives the progress as text; ``stop`` says
    after each step whether to stop, with a checkpoint; ``on_checkpoint`` is called after each epoch."""
    with large_imports():
        from cclnet.training.loop import train

    run, epochs = context.run_folder(cell), cell.settings.epochs
    begun = run.settings.exists()
    if begun:
        _check_run(cell, run)
    reported = time.monotonic()

    def on_step(epoch: int, step: int) -> None:
        nonlocal reported
        if stop():
            signal.raise_signal(signal.SIGTERM)  # handled by the training loop
        if time.monotonic() - reported > STEP_SECONDS:
            reported = time.monotonic()
            report(f"epoch {epoch}/{epochs}, step {step}")

    def on_epoch(record: Mapping[str, Any], network: Any) -> None:
        text = f"epoch {record['epoch']}/{epochs}, {record['images_per_second']:,.0f} images/s"
        if "softness" in record:
            text += f", softness {record['softness']:.3f}{' frozen' if record.get('frozen') else ''}"
            if context.results is not None:  # they become part of the kept result
                record_soft_labels(run, record["epoch"], network.soft_labels())
        report(text)
        on_checkpoint()
        if record["epoch"] < epochs and time.time() > context.deadline:
            raise OutOfTime(cell.name)

    train(
        None if begun else cell.settings,
        run.path,
        accelerator=context.accelerator,
        cache_dir=context.cache_dir,
        progress=False,
        on_epoch=on_epoch,
        on_step=on_step,
    )


def _check_run(cell: Cell, run: RunFolder) -> None:
    if different := differs_from_run(cell, run):
        raise InputError(
            f"{run.path} was begun with other settings ({'; '.join(different)}). "
            "Remove the folder to begin anew, or go back to the settings it was begun with."
        )


def evaluate_cell(cell: Cell, context: SweepContext) -> str:
    """Evaluate a trained cell; returns text to show. If results are kept, the checkpoints are removed."""
    run = context.run_folder(cell)
    _check_run(cell, run)
    if context.results is None:
        scores = evaluate(run.path)
        write_report(run.path, scores)
        values = {name: estimate.value for name, estimate in headline_scores(scores).items()}
        trained = run.read_model().trained
        seconds, note = trained.seconds or 0.0, ", ended by max_minutes" if trained.cut else ""
    else:
        result = keep_result(cell, run, context.result(cell))
        shutil.rmtree(run.checkpoints, ignore_errors=True)
        values, seconds, note = {name: result.value(name) for name in result.scores}, result.seconds, ""
    shown = [f"{name.replace('_', ' ')} {value or 0:.4f}" for name, value in list(values.items())[:2]]
    return f"{', '.join(shown)}, {seconds:.0f} s{note}"
