"""Evaluate finished runs and keep their results: the files described in ``cclnet.runs.kept_result``."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from cclnet.evaluation.evaluate import evaluate
from cclnet.evaluation.metrics import AFTER, headline_metrics
from cclnet.methods import rename_settings
from cclnet.runs.folder import RunFolder
from cclnet.runs.kept_result import (
    KeptResult,
    predictions_path,
    read_kept_result,
    write_kept_result,
    write_soft_label_history,
)
from cclnet.runs.model import ModelDescription, write_model_file
from cclnet.runs.predictions import Floats, Predictions, read_predictions, write_probabilities
from cclnet.runs.provenance import settings_hash
from cclnet.runs.scores import Estimate, Scores
from cclnet.schema import to_plain
from cclnet.settings import Settings, in_json
from cclnet.sweep.cells import Job

FIRST, EVERY = 4, 4  # soft labels are recorded in each of the first epochs, in which most happens, then every fourth


def record_soft_labels(run: RunFolder, epoch: int, matrix: Tensor | None) -> None:
    """Record the soft labels [K, K] after an epoch, where there are any and the epoch is one to record."""
    if matrix is None or (epoch > FIRST and epoch % EVERY):
        return
    run.add_to_soft_label_history(epoch, [[round(value, 4) for value in row] for row in matrix.double().tolist()])


HALF = 5e-5  # what is less is nothing to four decimals


def read_results(folder: Path) -> list[KeptResult]:
    """Every result in a folder, in the order of their names."""
    return [read_kept_result(path) for path in sorted(folder.glob("*-seed*.json"))]


def keep_result(job: Job, run: Path, path: Path) -> KeptResult:
    """Evaluate a finished run and keep its result at ``path``, with the files beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(run)
    model = folder.read_model()
    predictions = folder.read_predictions(model.multilabel)
    rounded = dataclasses.replace(predictions, probabilities=_shortened(predictions))
    kept_predictions = predictions_path(path)
    image_table = write_probabilities(kept_predictions, rounded)
    kept = read_predictions(kept_predictions, model.multilabel, image_table)
    with _as_run(path.stem, kept, folder, model) as kept_run:
        evaluated = evaluate(kept_run)
    result = _kept_result(job, path, folder.read_settings(), model, folder.read_history(), evaluated, image_table.name)
    if result.soft_labels and (history := folder.read_soft_label_history()):
        write_soft_label_history(path, history)
    write_kept_result(result)
    return read_kept_result(path)


def _shortened(predictions: Predictions) -> Floats:
    """Four decimals, and of what they would make nothing of one digit: a log-likelihood must not hear of zeros."""
    p = predictions.probabilities
    shorter = np.where(p < HALF, _one_digit(p), p.round(4))
    return np.where(p > 1 - HALF, 1 - _one_digit(1 - p), shorter) if predictions.multilabel else shorter


def _one_digit(p: Floats) -> Floats:
    unit = 10.0 ** np.floor(np.log10(np.clip(p, 1e-9, 1.0)))
    return np.maximum(np.round(p / unit), 1.0) * unit


@contextmanager
def _as_run(name: str, kept: Predictions, run: RunFolder, model: ModelDescription) -> Iterator[Path]:
    """A temporary run folder around predictions as they are kept."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch) / name)
        folder.path.mkdir()
        folder.write_predictions(kept)
        write_model_file(folder.model, model)
        soft_labels = run.read_soft_labels(model.classes)
        if soft_labels is not None:
            folder.write_soft_labels(model.classes, soft_labels)
        folder.write_split(run.read_split())
        yield folder.path


def differs_from_result(job: Job, kept: KeptResult) -> list[str]:
    """In what the result that is kept of a job differs from what is asked for now, in words."""
    found = _differing_settings(job, kept.settings, _last_name)
    if job.images and kept.fingerprint and kept.fingerprint != job.images:
        found.append("it was trained on other images or labels")
    return found


def differs_from_run(job: Job, run: RunFolder) -> list[str]:
    """In what a run that was begun differs from what is asked for now, in words."""
    return _differing_settings(job, _with_paths(run.read_settings(), os.path.abspath), os.path.abspath)


def _differing_settings(job: Job, kept: Mapping[str, Any], place: Callable[[str], str]) -> list[str]:
    """A setting that the kept ones do not name yet had its default then."""
    kept = {**kept, "method_settings": rename_settings(kept.get("method_settings", {}))}
    now, then = _flat(_with_paths(job.settings, place)), _flat(_with_paths(Settings(), place)) | _flat(kept)
    names = [name for name in now if name.rpartition(".")[2] not in job.incidental]
    names += [name for name in then if name.startswith("method_settings.") and name not in now]
    return [
        f"{name} was {then.get(name)}, is {now.get(name)}"
        for name in names
        if json.dumps(now.get(name)) != json.dumps(then.get(name))  # a list is as good as a tuple
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _with_paths(settings: Settings, place: Callable[[str], str]) -> dict[str, Any]:
    """Settings as plain values, paths as ``place`` writes them, without the folder of decoded images."""
    values = dataclasses.asdict(settings) | {"mean": settings.input_mean, "std": settings.input_std}
    del values["cache_dir"]
    for holder, name in ((values, "data"), (values, "weights"), (values, "image_folder"), (values["split"], "file")):
        if holder[name] and not holder[name].startswith("synthetic"):
            holder[name] = place(holder[name])
    values["method_settings"] = in_json(rename_settings(values["method_settings"]))
    return values


def _last_name(path: str) -> str:
    """What may be kept: it says nothing about where files lay."""
    return Path(path).name


def _kept_result(
    job: Job,
    path: Path,
    settings: Settings,
    model: ModelDescription,
    records: Sequence[Mapping[str, Any]],
    evaluated: Scores,
    image_table: str,
) -> KeptResult:
    trained, leak = model.trained, evaluated.leak
    softness = [round(r["softness"], 5) for r in records if "softness" in r]
    frozen = next((r["epoch"] for r in records if r.get("frozen")), None)
    learned = evaluated.soft_labels if softness else None
    kept_settings = _with_paths(settings, _last_name)
    return KeptResult(
        path=path,
        name=job.name,
        keys=dict(job.keys),
        settings=kept_settings,
        settings_hash=settings_hash(kept_settings),
        fingerprint=job.images or trained.fingerprint or "",
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
        split=to_plain(evaluated.split),
        intervals=to_plain(evaluated.intervals),
        leak=None if leak is None else {"images": leak.images, "share": leak.share, "in_words": leak.in_words},
        scores=_rounded(to_plain(_headline(evaluated))),
        temperature=_rounded(evaluated.calibration.temperature.value),
        classes=list(evaluated.classes),
        class_counts=list(model.class_counts or ()),
        multilabel=model.multilabel,
        soft_labels=None if learned is None else [[_six_digits(entry) for entry in row] for row in learned.matrix],
        final_softness=None if learned is None else _rounded(learned.softness),
        inverse_frequency_agreement=None if learned is None else _rounded(learned.inverse_frequency_agreement),
        image_table=image_table,
    )


def _headline(evaluated: Scores) -> dict[str, Estimate]:
    """The headline metrics, those of calibration before and after temperature."""
    calibration, undefined = evaluated.calibration, Estimate(None, None, None)
    found = evaluated.overall | calibration.before.scores
    scores = {}
    for metric in headline_metrics(evaluated.task):
        scores[metric.name] = found[metric.name]
        if metric.calibration:
            after = calibration.after.scores if calibration.after else {}
            scores[metric.name + AFTER] = after.get(metric.name, undefined)
    return scores


def _six_digits(entry: float) -> float:
    """Of whatever size: matrices are compared by the ranks of their entries, small ones included.

    >>> _six_digits(0.123456789), _six_digits(1.23456789e-9)
    (0.123457, 1.23457e-09)
    """
    return float(f"{entry:.6g}")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
