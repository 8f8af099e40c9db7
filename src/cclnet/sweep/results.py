"""What is kept of a finished run: one small JSON, and beside it its predictions to four decimals, what is less than
that to one digit.

The scores in the JSON are those of the predictions as they are kept, so that anybody can compute them again from the
files alone: ``NAME.predictions.csv.bz2`` has the probabilities, and the images they are of stand in a file that all
runs on the same images share. ``NAME.course.json.bz2`` has the soft labels of some epochs, {"epochs": [1, 2, ...],
"matrices": [[[...]], ...]}, for methods that learn them. ``NAME.json``::

    {
      "format": 1, "name": "paper-resnet18-ccl-seed0",
      "cell": {"backbone", "method", "seed", ...},         # what tells it from the others of its experiment
      "settings": {...},                    # all of them; of paths the last name only
      "fingerprint": "0f1e2d3c4b5a6978" | "",              # of the images and labels
      "settings_hash": "8f14e45fceea167a",
      "commit": {"sha": "...", "clean": true} | null,      # of the source tree; null for an installed package
      "versions": {...}, "device": "...", "precision": "...",
      "seconds": 123.4, "images_per_second": 15500.0,      # of training; the median over epochs
      "epochs": 160, "images": 8012,        # trained on
      "freeze_epoch": 147, "converged_epoch": 137,         # null: never; the second is the last drop of softness
      "softness": [0.55, ...],              # after each epoch; null for methods that learn no soft labels
      "split": {...}, "intervals": {...}, "leak": {...},    # as in scores.json
      "scores": {"accuracy": {"value", "low", "high"}, ..., "ece": ..., "ece_calibrated": ...},   # those of its task
      "temperature": 1.1,
      "classes": [...], "class_counts": [...],             # of the training part
      "multilabel": false,
      "correlation": [[...]] | null,        # row k: the soft label of class k
      "rarity_agreement": 0.84 | null, "final_softness": 0.41 | null,
      "image_table": "images-1a2b3c4d.csv.bz2"             # the images that are predicted, beside this file
    }

``cclnet compare`` takes such a file for a run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from cclnet.errors import InputError
from cclnet.evaluation.evaluate import evaluate
from cclnet.evaluation.metrics import AFTER, headline_metrics
from cclnet.files import read_json_bz2, write_json_bz2, write_whole
from cclnet.runs.folder import RunFolder
from cclnet.runs.predictions import Floats, Predictions, read_predictions, write_predictions, write_probabilities
from cclnet.runs.provenance import settings_hash
from cclnet.runs.scores import Estimate, Scores, to_json
from cclnet.runs.soft_labels import read_soft_labels, write_soft_labels
from cclnet.settings import Settings, in_json
from cclnet.sweep.cells import Job

# The soft labels of a run in the making, epoch by epoch: how structure rises, fades and is held.
#
# ``correlations.jsonl`` in the run folder has a line for each epoch that is looked at. A run that was resumed may
# have an
# epoch twice; the later line counts.


FIRST, EVERY = 4, 4  # each of the first epochs, in which most happens, and then every fourth


def note_course(run: Path, epoch: int, matrix: Tensor | None) -> None:
    """Add the soft labels [K, K] after an epoch, where there are any and the epoch is one that is looked at."""
    if matrix is None or (epoch > FIRST and epoch % EVERY):
        return
    rows = [[round(value, 4) for value in row] for row in matrix.double().tolist()]
    path = run / "correlations.jsonl"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    write_whole(path, before + json.dumps({"epoch": epoch, "matrix": rows}) + "\n")


def read_course(run: Path) -> dict[str, Any] | None:
    """The epochs that were looked at and their matrices; None where there is nothing."""
    path = run / "correlations.jsonl"
    if not path.exists():
        return None
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    of_epoch = {line["epoch"]: line["matrix"] for line in lines}
    return {"epochs": sorted(of_epoch), "matrices": [of_epoch[epoch] for epoch in sorted(of_epoch)]}


HALF = 5e-5  # what is less is nothing to four decimals


@dataclass(frozen=True)
class Result:
    """A result file, and the predictions beside it."""

    path: Path
    content: Mapping[str, Any]

    @property
    def predictions(self) -> Path:
        return predictions_path(self.path)

    @property
    def course(self) -> dict[str, Any] | None:
        """The soft labels of some epochs; None where none were learned."""
        path = course_path(self.path)
        return read_json_bz2(path) if path.exists() else None

    def value(self, score: str) -> float | None:
        return self.content["scores"][score]["value"]


def predictions_path(result: Path) -> Path:
    return result.with_name(f"{result.stem}.predictions.csv.bz2")


def course_path(result: Path) -> Path:
    return result.with_name(f"{result.stem}.course.json.bz2")


def read_results(folder: Path) -> list[Result]:
    """Every result in a folder, in the order of their names."""
    found = []
    for path in sorted(folder.glob("*-seed*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not JSON: {error}. Remove it to run it again.") from error
        if not isinstance(content, dict) or "cell" not in content:
            raise InputError(f"{path} is no result of an experiment. Move it elsewhere.")
        if "split" not in content and "part" in content:
            content["split"] = content.pop("part")  # its name before version 0.2
        found.append(Result(path, content))
    return found


def keep_result(job: Job, run: Path, path: Path) -> Result:
    """Judge a finished run and keep what matters of it. The JSON comes last: where it is, everything is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(run)
    model = json.loads(folder.model.read_text(encoding="utf-8"))
    predictions = read_predictions(folder.predictions, multilabel=model["multilabel"])
    rounded = dataclasses.replace(predictions, probabilities=_shortened(predictions))
    image_table = write_probabilities(predictions_path(path), rounded)
    kept = read_predictions(predictions_path(path), model["multilabel"], image_table)
    matrix = read_soft_labels(folder.correlation)[1] if folder.correlation.exists() else None
    with _as_run(path.stem, kept, model, matrix, folder.split) as kept_run:
        evaluated = evaluate(kept_run)
    content = _content(job, folder.read_settings(), model, folder.read_metrics(), evaluated)
    content["image_table"] = image_table.name
    if content["correlation"] and (course := read_course(run)):
        write_json_bz2(course_path(path), course)
    text = json.dumps(content, allow_nan=False)
    write_whole(path, text + "\n")
    return Result(path, json.loads(text))


def _shortened(predictions: Predictions) -> Floats:
    """Four decimals, and of what they would make nothing of one digit: a log-likelihood must not hear of zeros."""
    p = predictions.probabilities
    shorter = np.where(p < HALF, _one_digit(p), p.round(4))
    return np.where(p > 1 - HALF, 1 - _one_digit(1 - p), shorter) if predictions.multilabel else shorter


def _one_digit(p: Floats) -> Floats:
    unit = 10.0 ** np.floor(np.log10(np.clip(p, 1e-9, 1.0)))
    return np.maximum(np.round(p / unit), 1.0) * unit


@contextmanager
def _as_run(name: str, kept: Predictions, model: Mapping[str, Any], matrix: Any, split: Path) -> Iterator[Path]:
    """A run folder around predictions as they are kept, for as long as it takes to judge it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / name
        folder.mkdir()
        write_predictions(folder / "predictions.csv", kept)
        (folder / "model.json").write_text(json.dumps(model), encoding="utf-8")
        if matrix is not None:
            write_soft_labels(folder / "correlation.csv", model["classes"], np.asarray(matrix))
        (folder / "split.csv").write_bytes(split.read_bytes())
        yield folder


def differs_from_result(job: Job, kept: Mapping[str, Any]) -> list[str]:
    """In what the result that is kept of a job differs from what is asked for now, in words."""
    found = _differing_settings(job, kept["settings"], _last_name)
    known = kept.get("fingerprint")
    if job.images and known and known != job.images:
        found.append("it was trained on other images or labels")
    return found


def differs_from_run(job: Job, run: RunFolder) -> list[str]:
    """In what a run that was begun differs from what is asked for now, in words."""
    return _differing_settings(job, _with_paths(run.read_settings(), os.path.abspath), os.path.abspath)


def _differing_settings(job: Job, kept: Mapping[str, Any], place: Callable[[str], str]) -> list[str]:
    """A setting that the kept ones do not name yet had its default then."""
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
    """Settings as plain values, paths as ``place`` writes them."""
    values = dataclasses.asdict(settings)
    for holder, name in ((values, "data"), (values, "weights"), (values, "image_folder"), (values["split"], "file")):
        if holder[name] and not holder[name].startswith("synthetic"):
            holder[name] = place(holder[name])
    values["method_settings"] = in_json(values["method_settings"])
    return values


def _last_name(path: str) -> str:
    """What may be kept: it says nothing about where files lay."""
    return Path(path).name


def _content(
    job: Job,
    settings: Settings,
    model: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    evaluated: Scores,
) -> dict[str, Any]:
    trained, leak = model["trained"], evaluated.leak
    softness = [round(r["softness"], 5) for r in records if "softness" in r]
    frozen = next((r["epoch"] for r in records if r.get("frozen")), None)
    learned = evaluated.soft_labels if softness else None
    kept_settings = _with_paths(settings, _last_name)
    return {
        "format": 1,
        "name": job.name,
        "cell": dict(job.keys),
        "settings": kept_settings,
        "settings_hash": settings_hash(kept_settings),
        "fingerprint": job.images or trained.get("fingerprint", ""),
        "commit": trained.get("commit"),
        "versions": trained["versions"],
        "device": trained["device"],
        "precision": trained["precision"],
        "seconds": round(trained["seconds"], 1),
        "images_per_second": round(statistics.median(r["images_per_second"] for r in records), 1),
        "epochs": trained["epochs"],
        "images": trained["images"],
        "freeze_epoch": frozen,
        "converged_epoch": None if frozen is None else softness[:frozen].index(min(softness[:frozen])) + 1,
        "softness": softness or None,
        "split": to_json(evaluated.split),
        "intervals": to_json(evaluated.intervals),
        "leak": leak and {"images": leak.images, "share": leak.share, "in_words": leak.in_words},
        "scores": _rounded(to_json(_headline(evaluated))),
        "temperature": _rounded(evaluated.calibration.temperature.value),
        "classes": list(evaluated.classes),
        "class_counts": model["class_counts"],
        "multilabel": model["multilabel"],
        "correlation": learned and [[_six_digits(entry) for entry in row] for row in learned.matrix],
        "final_softness": learned and _rounded(learned.softness),
        "rarity_agreement": learned and _rounded(learned.inverse_frequency_agreement),
    }


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
