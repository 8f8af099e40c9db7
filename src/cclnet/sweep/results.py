"""Evaluate finished runs and keep their results: the files described in ``cclnet.runs.kept_result``."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from cclnet.errors import InputError
from cclnet.evaluation.evaluate import evaluate_opened
from cclnet.evaluation.metrics import AFTER, headline_metrics
from cclnet.files import make_folder
from cclnet.methods import rename_settings
from cclnet.runs.folder import RunFolder, flattened, open_run
from cclnet.runs.kept_result import (
    KeptResult,
    read_kept_predictions,
    read_kept_result,
    write_kept_predictions,
    write_kept_result,
    write_soft_label_history,
)
from cclnet.runs.model import ModelDescription
from cclnet.runs.provenance import settings_hash
from cclnet.runs.scores import Estimate, Scores
from cclnet.schema import to_plain
from cclnet.settings import Settings, in_json
from cclnet.sweep.cells import Cell, SweepContext

FIRST, EVERY = 4, 4  # soft labels are recorded after each of the first 4 epochs, then after every fourth


def record_soft_labels(run: RunFolder, epoch: int, matrix: Tensor | None) -> None:
    """Record the soft labels [K, K] after an epoch, if there are any and the epoch is one to record."""
    if matrix is not None and (epoch <= FIRST or epoch % EVERY == 0):
        run.add_to_soft_label_history(epoch, [[round(value, 4) for value in row] for row in matrix.double().tolist()])


def read_results(folder: Path) -> list[KeptResult]:
    """Every result in a folder, sorted by name."""
    return [read_kept_result(path) for path in sorted(folder.glob("*-seed*.json"))]


def check_results(cells: Sequence[Cell], context: SweepContext) -> set[str]:
    """The names of the cells that have a result. Kept results of other settings or images are refused, all by name."""
    if context.results is None:
        return {cell.name for cell in cells if context.result(cell).exists()}
    folders = {context.result(cell).parent for cell in cells}
    kept = {result.path.stem: result for folder in folders for result in read_results(folder)}
    finished = [cell for cell in cells if cell.name in kept]
    problems = [
        f"\n  {kept[cell.name].path}: {'; '.join(different)}"
        for cell in finished
        if (different := differs_from_result(cell, kept[cell.name]))
    ]
    if problems:
        raise InputError(
            f"{len(problems)} results do not match what is requested:{''.join(problems)}\n"
            "Choose another --out, or remove them and their run folders to run them again."
        )
    return {cell.name for cell in finished}


def keep_result(cell: Cell, run: RunFolder, path: Path) -> KeptResult:
    """Evaluate a finished run and keep its result at ``path``, with the files beside it.

    The rounded predictions are evaluated, so that the scores can be computed again from what is kept. They are
    calibrated by a temperature alone, as all kept results are, so that methods remain comparable.
    """
    make_folder(path.parent)
    model, opened = run.read_model(), open_run(run.path)
    image_table = write_kept_predictions(path, opened.predictions)
    kept = read_kept_predictions(path, image_table, opened.predictions.classes, model.multilabel)
    kept = dataclasses.replace(kept, ordered=opened.predictions.ordered)
    scores, _ = evaluate_opened(dataclasses.replace(opened, predictions=kept), calibration="temperature")
    result = _kept_result(cell, path, run, model, scores, image_table.name)
    if result.soft_labels and (history := run.read_soft_label_history()):
        write_soft_label_history(path, history)
    write_kept_result(result)
    return read_kept_result(path)


def differs_from_result(cell: Cell, kept: KeptResult) -> list[str]:
    """How the kept result of a cell differs from the cell; one sentence per difference."""
    found = _differing_settings(cell, kept.settings, _last_name)
    if cell.fingerprint and kept.fingerprint and kept.fingerprint != cell.fingerprint:
        found.append("it was trained on other images or labels")
    return found


def differs_from_run(cell: Cell, run: RunFolder) -> list[str]:
    """How the settings of a run that was begun differ from those of the cell; one sentence per difference."""
    return _differing_settings(cell, _plain_settings(run.read_settings(), os.path.abspath), os.path.abspath)


def _differing_settings(cell: Cell, kept: Mapping[str, Any], write_path: Callable[[str], str]) -> list[str]:
    """Settings that the kept ones lack were added later: the run had their defaults."""
    kept = {**kept, "method_settings": rename_settings(kept.get("method_settings", {}))}
    now = dict(flattened(_plain_settings(cell.settings, write_path)))
    then = dict(flattened(_plain_settings(Settings(), write_path))) | dict(flattened(kept))
    names = [name for name in now if name.rpartition(".")[2] not in cell.ignored_settings]
    names += [name for name in then if name.startswith("method_settings.") and name not in now]
    return [
        f"{name} was {then.get(name)}, is {now.get(name)}"
        for name in names
        if json.dumps(now.get(name)) != json.dumps(then.get(name))  # lists equal tuples
    ]


def _plain_settings(settings: Settings, write_path: Callable[[str], str]) -> dict[str, Any]:
    """Settings as plain values, paths as ``write_path`` returns them, without cache_dir."""
    values = dataclasses.asdict(settings) | {"mean": settings.input_mean, "std": settings.input_std}
    del values["cache_dir"]
    for table, name in ((values, "data"), (values, "weights"), (values, "image_folder"), (values["split"], "file")):
        if table[name] and not table[name].startswith("synthetic"):
            table[name] = write_path(table[name])
    values["method_settings"] = in_json(rename_settings(values["method_settings"]))
    return values


def _last_name(path: str) -> str:
    """The part of a path that may be kept: it does not tell where files were on a machine."""
    return Path(path).name


def _kept_result(
    cell: Cell, path: Path, run: RunFolder, model: ModelDescription, scores: Scores, image_table: str
) -> KeptResult:
    records, trained, leak = run.read_history(), model.trained, scores.leak
    softness = [round(r["softness"], 5) for r in records if "softness" in r]
    frozen = next((r["epoch"] for r in records if r.get("frozen")), None)
    learned = scores.soft_labels if softness else None
    settings = _plain_settings(run.read_settings(), _last_name)
    return KeptResult(
        path=path,
        name=cell.name,
        keys=dict(cell.keys),
        settings=settings,
        settings_hash=settings_hash(settings),
        fingerprint=cell.fingerprint or trained.fingerprint or "",
        commit=trained.commit,
        versions=trained.versions or {},
        device=trained.device or "",
        precision=trained.precision or "",
        seconds=round(trained.seconds or 0.0, 1),
        images_per_second=round(statistics.median(r["images_per_second"] for r in records), 1),
        epochs=trained.epochs or 0,
        images=trained.images or 0,
        freeze_epoch=frozen,
        converged_epoch=None if frozen is None else softness[:frozen].index(min(softness[:frozen])) + 1,
        softness=softness or None,
        split=to_plain(scores.split),
        intervals=to_plain(scores.intervals),
        leak=None if leak is None else {"images": leak.images, "share": leak.share, "in_words": leak.in_words},
        scores=rounded(to_plain(headline_scores(scores))),
        temperature=rounded(scores.calibration.temperature.value),
        classes=list(scores.classes),
        class_counts=list(model.class_counts or ()),
        multilabel=model.multilabel,
        soft_labels=None if learned is None else [[_six_digits(entry) for entry in row] for row in learned.matrix],
        final_softness=None if learned is None else rounded(learned.softness),
        inverse_frequency_agreement=None if learned is None else rounded(learned.inverse_frequency_agreement),
        image_table=image_table,
    )


def headline_scores(scores: Scores) -> dict[str, Estimate]:
    """The headline metrics; those of calibration as trained and calibrated."""
    calibration, undefined = scores.calibration, Estimate(None, None, None)
    before = scores.overall | calibration.before.scores
    after = calibration.after.scores if calibration.after else {}
    found = {}
    for metric in headline_metrics(scores.task):
        if metric.name not in before:  # it needs classes in order, and these have none
            continue
        found[metric.name] = before[metric.name]
        if metric.calibration:
            found[metric.name + AFTER] = after.get(metric.name, undefined)
    return found


def _six_digits(entry: float) -> float:
    """Six significant digits: matrices are compared by the ranks of their entries, small ones included.

    >>> _six_digits(0.123456789), _six_digits(1.23456789e-9)
    (0.123457, 1.23457e-09)
    """
    return float(f"{entry:.6g}")


def rounded(value: Any) -> Any:
    """The floats in nested lists and mappings to six decimals.

    >>> rounded({"a": [0.12345678, None]})
    {'a': [0.123457, None]}
    """
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value
