"""``cclnet train --folds N``: train each fold in a run folder of its own, then make their ensemble.

A fold is a cell whose result is its evaluated run folder. Without an executor the folds are trained in this process,
one after the other: only there does training show a progress bar, call ``on_epoch``, and use several GPUs (torchrun).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from cclnet.data.sources import open_data
from cclnet.data.split import fold_settings
from cclnet.data.table import ImageTable
from cclnet.deploy.ensemble import make_ensemble
from cclnet.errors import InputError, Interrupted, resume_command
from cclnet.evaluation.evaluate import evaluate
from cclnet.report import write_report
from cclnet.runs.folder import RunFolder
from cclnet.runs.scores import Scores
from cclnet.settings import Settings
from cclnet.sweep.cells import REPORT, Cell, Executor, SweepContext
from cclnet.sweep.executors import SweepProgress, run_on
from cclnet.sweep.prepare import prepare
from cclnet.sweep.results import differs_from_run
from cclnet.sweep.run_cell import evaluate_cell
from cclnet.training import loop
from cclnet.training.setup import find_launch, is_rank_zero

LOCK = ".ensemble"  # exists while a shard makes the ensemble


def train_folds(
    settings: Settings,
    folder: str | Path,
    executor: Executor | None = None,
    *,
    devices: int | None = None,
    accelerator: str = "auto",
    cache_dir: str | Path | None = None,
    progress: bool = True,
    on_epoch: loop.EpochHook | None = None,
) -> Scores | None:
    """Train the folds that are not finished in fold-0, fold-1, ... of ``folder``, or those of the shard; when all are
    there, make and evaluate their ensemble in ``folder``.

    Returns the scores of the ensemble; None where it was there before, or folds are missing. The same call continues
    what was stopped.
    """
    executor, root, console = executor or Executor(), RunFolder(folder), Console(quiet=not progress)
    here = executor.ray is None and executor.parallel == 1
    _check_processes(here, devices, on_epoch)
    if cache_dir is not None:
        settings = replace(settings, cache_dir=str(cache_dir))
    context = SweepContext(
        runs=root.path,
        results=None,
        accelerator=accelerator,
        cache_dir=None if cache_dir is None else Path(cache_dir),
        stall_seconds=60 * executor.stall_minutes,
    )
    table = open_data(settings.data, settings)
    cells = fold_cells(settings, table)
    own = executor.own_shard(cells)
    left = [cell for cell in own if not context.result(cell).exists()]
    if left and not here:
        prepare(left[0].settings, table, len(left), accelerator, settings.cache_folder, console)
    is_new = is_rank_zero() and _begin(root, settings)
    try:
        if here:
            _train_here(left, context, devices, progress, on_epoch)
        elif left:
            _train_on(executor, own, context, console)
    except Interrupted as stopped:
        raise Interrupted(root.path, stopped.signal) from None
    except Exception:
        if is_new and executor.shard[1] == 1 and not any(root.path.glob("fold-*/settings.toml")):
            root.discard()  # there is nothing to resume
        raise
    if not is_rank_zero():
        return None
    if missing := [cell for cell in cells if not context.result(cell).exists()]:
        _print_missing(missing, len(cells), context, console)
        return None
    return _make_ensemble(cells, context, executor.shard[1] > 1, console)


def fold_cells(settings: Settings, table: ImageTable) -> list[Cell]:
    """The cell of each fold: fold f is the validation split of the f-th."""
    splits = fold_settings(table, settings.split, settings.folds)
    return [Cell(f"fold-{fold}", replace(settings, folds=0, split=split)) for fold, split in enumerate(splits)]


def _check_processes(here: bool, devices: int | None, on_epoch: loop.EpochHook | None) -> None:
    if (devices or 1) > 1:
        raise InputError("folds on several devices need torchrun: start it with --nproc-per-node, without --devices.")
    if here:
        return
    if on_epoch is not None:
        raise InputError("on_epoch is called in this process: leave it out where other processes train the folds.")
    launch = find_launch()
    if launch.devices * launch.nodes > 1:
        raise InputError(
            "torchrun or srun started several processes, which train one run together. Start one process for "
            "--parallel and --executor ray, or leave these options out."
        )


def _begin(root: RunFolder, settings: Settings) -> bool:
    """Write the settings into the folder of all folds; whether they were not there. Other settings are refused."""
    if not root.settings.exists():
        try:
            root.create(settings)
            return True
        except InputError:
            if not root.settings.exists():  # else another shard was faster
                raise
    if different := differs_from_run(Cell(root.path.name, settings, ignored_settings=()), root):
        raise InputError(
            f"{root.path} holds a run with other settings ({'; '.join(different)}). Choose another --out, or continue "
            f"it with its own settings: {resume_command(root.path)}"
        )
    return False


def _train_here(
    cells: Sequence[Cell], context: SweepContext, devices: int | None, progress: bool, on_epoch: loop.EpochHook | None
) -> None:
    for cell in cells:
        run = context.run_folder(cell)
        if not context.is_trained(cell):
            loop.train(
                None if run.settings.exists() else cell.settings,
                run.path,
                devices=devices,
                accelerator=context.accelerator,
                cache_dir=context.cache_dir,
                progress=progress,
                on_epoch=on_epoch,
            )
        if is_rank_zero():
            evaluate_cell(cell, context)


def _train_on(executor: Executor, cells: Sequence[Cell], context: SweepContext, console: Console) -> None:
    summary = run_on(executor, cells, context, SweepProgress(console))
    if summary.signal:
        raise Interrupted(context.runs, summary.signal)
    if summary.failed:
        names: dict[str, list[str]] = {}  # by the reason: errors in the settings are those of all folds
        for name, reason in sorted(summary.failed.items()):
            names.setdefault(reason, []).append(name)
        lines = "".join(f"\n  {', '.join(own)}: {reason}" for reason, own in names.items())
        raise InputError(f"{len(summary.failed)} of {len(cells)} folds failed:{lines}")
    _print(console, summary.text())


def _print_missing(missing: Sequence[Cell], folds: int, context: SweepContext, console: Console) -> None:
    begun = {cell.name: context.run_folder(cell).settings.exists() for cell in missing}
    states = ", ".join(f"{name} ({'begun' if own else 'not begun'})" for name, own in begun.items())
    _print(
        console,
        f"{folds - len(missing)} of {folds} folds are finished; missing: {states}. The shard that ends last makes the "
        f"ensemble. If no shard is running: {resume_command(context.runs)}",
    )


def _make_ensemble(cells: Sequence[Cell], context: SweepContext, is_shard: bool, console: Console) -> Scores | None:
    """Make and evaluate the ensemble. Of several shards that end at the same time, one does it."""
    root = RunFolder(context.runs)
    report, lock = root.path / REPORT, root.path / LOCK
    if report.exists():
        _print(console, f"finished before: {report}")
        return None
    try:
        lock.touch(exist_ok=not is_shard)  # one that is there may be left by a shard that was killed
    except FileExistsError:
        _print(
            console,
            "all folds are finished, and another shard makes the ensemble. If no shard is running: "
            f"{resume_command(root.path)}",
        )
        return None
    try:
        if report.exists():  # by now
            return None
        if root.find_predictions() is None:
            make_ensemble([context.run_folder(cell).path for cell in cells], root.path)
        scores = evaluate(root.path)
        write_report(root.path, scores)
        return scores
    finally:
        lock.unlink(missing_ok=True)


def _print(console: Console, text: str) -> None:
    """Print a text whose commands are to be copied: not wrapped."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
