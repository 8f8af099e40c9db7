"""What a sweep keeps of a finished run: NAME.json with the files beside it.

``NAME.predictions.csv.bz2`` has the rounded probabilities; the images they belong to are in ``image_table``, a file
that all runs on the same images share. ``NAME.soft_labels.json.bz2`` has the soft labels of some epochs,
``{"epochs": [1, 2, ...], "matrices": [[[...]], ...]}``, for methods that learn them. The scores in NAME.json are those
of the rounded predictions, so that anybody can compute them again from these files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from cclnet.errors import InputError
from cclnet.files import read_json, read_json_bz2, write_json_bz2, write_whole
from cclnet.runs.model import ModelDescription, model_from_json
from cclnet.runs.predictions import Predictions, read_predictions
from cclnet.runs.provenance import Commit
from cclnet.schema import from_plain, rule, to_plain


@dataclass(frozen=True)
class KeptResult:
    """The content of NAME.json. ``old_name`` is a key before version 0.2."""

    path: Path  # of NAME.json; not in the file
    # What distinguishes the run from the others of its experiment: backbone, method, seed, ...
    keys: Mapping[str, Any] = field(metadata=rule(key="cell"))
    name: str
    settings: Mapping[str, Any]  # all of them, nested; of paths the last name only
    scores: Mapping[str, Any]  # {"value", "low", "high"} by metric
    classes: list[str]
    class_counts: list[int]  # of the training split
    split: Mapping[str, Any] = field(metadata=rule(old_name="part"))  # as in scores.json, like intervals and leak
    intervals: Mapping[str, Any] = field(default_factory=dict)
    leak: Mapping[str, Any] | None = None
    multilabel: bool = False
    temperature: float | None = None
    # [K][K], row k the soft label of class k; None for methods that learn none.
    soft_labels: list[list[float]] | None = field(default=None, metadata=rule(old_name="correlation"))
    final_softness: float | None = None
    inverse_frequency_agreement: float | None = field(default=None, metadata=rule(old_name="rarity_agreement"))
    softness: list[float] | None = None  # after each epoch
    freeze_epoch: int | None = None  # None: never
    converged_epoch: int | None = None  # the last drop of softness before freezing
    epochs: int = 0
    images: int = 0  # of the training split
    seconds: float = 0.0  # of training
    images_per_second: float = 0.0  # median over epochs
    device: str = ""
    precision: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: Commit | None = None
    settings_hash: str = ""
    fingerprint: str = ""
    image_table: str = "images.csv.bz2"  # name of the file beside NAME.json with the predicted images

    def value(self, score: str) -> float | None:
        return self.scores[score]["value"]

    def to_json(self) -> dict[str, Any]:
        """The content of NAME.json."""
        content = to_plain(self)
        del content["path"]
        return {"format": 1, **content}

    @property
    def predictions(self) -> Path:
        return predictions_path(self.path)

    def read_predictions(self) -> Predictions:
        """The predictions as they were kept, with their images."""
        image_table = self.path.with_name(Path(self.image_table).name)  # never in another folder
        if missing := [file.name for file in (self.predictions, image_table) if not file.exists()]:
            raise InputError(f"{self.path} needs {' and '.join(missing)} beside it. Copy all files of the result.")
        return _without_zeros(read_predictions(self.predictions, self.multilabel, image_table))

    @property
    def soft_label_history(self) -> dict[str, Any] | None:
        """The soft labels of some epochs; None where none were learned."""
        paths = [soft_label_history_path(self.path), self.path.with_name(f"{self.path.stem}.course.json.bz2")]
        return next((read_json_bz2(path) for path in paths if path.exists()), None)

    @property
    def model(self) -> ModelDescription:
        """The description of the model, as far as it was kept."""
        names = ("backbone", "short_side", "mean", "std", "method", "method_settings")
        content = {name: self.settings.get(name) for name in names}
        content |= {"format": 2, "classes": self.classes, "multilabel": self.multilabel}
        content |= {"class_counts": self.class_counts, "trained": {"seed": self.settings.get("seed")}}
        content["crop"] = [(self.settings.get("augment") or {}).get("crop")] * 2
        return model_from_json(content, self.path)


def predictions_path(result: Path) -> Path:
    return result.with_name(f"{result.stem}.predictions.csv.bz2")


def soft_label_history_path(result: Path) -> Path:
    return result.with_name(f"{result.stem}.soft_labels.json.bz2")


def write_soft_label_history(result: Path, history: Mapping[str, Any]) -> None:
    """Write the soft labels of some epochs beside NAME.json."""
    write_json_bz2(soft_label_history_path(result), dict(history))


def write_kept_result(result: KeptResult) -> None:
    """Write NAME.json. It is the last file to be written: where it exists, all others do."""
    write_whole(result.path, json.dumps(result.to_json(), allow_nan=False) + "\n")


def read_kept_result(path: str | Path) -> KeptResult:
    """Read a NAME.json; the keys of files written before version 0.2 are read too."""
    path = Path(path)
    try:
        return from_plain(KeptResult, read_json(path) | {"path": path})
    except InputError as error:
        raise InputError(
            f"{path} is not a kept result: {error}. Give a run folder, a predictions.csv, or a result of "
            "`cclnet compare-methods` or `cclnet reproduce`."
        ) from error


def _without_zeros(predictions: Predictions) -> Predictions:
    """Replace probabilities of 0 by 0.000025: early results were rounded to four decimals, so that 0 means anything
    below 0.00005."""
    p = np.where(predictions.probabilities == 0, 2.5e-5, predictions.probabilities)
    if predictions.multilabel:
        return replace(predictions, probabilities=np.where(p == 1, 1 - 2.5e-5, p))
    return replace(predictions, probabilities=p / p.sum(axis=1, keepdims=True))
