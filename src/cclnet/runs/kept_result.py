"""What a sweep keeps of a finished run: NAME.json with the files beside it.

``NAME.predictions.csv.bz2`` has the rounded probabilities; the images they belong to are in ``image_table``, a file
that all runs on the same images share. ``NAME.soft_labels.json.bz2`` has the soft labels of some epochs,
``{"epochs": [1, 2, ...], "matrices": [[[...]], ...]}``, for methods that learn them. The scores in NAME.json are those
of the rounded predictions, so that anybody can compute them again from these files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cclnet.errors import InputError
from cclnet.files import read_json_bz2, write_json_bz2, write_whole
from cclnet.runs.model import ModelDescription, model_from_json, read_json
from cclnet.runs.predictions import Predictions, read_predictions
from cclnet.runs.provenance import Commit

OLD_NAMES = {"part": "split", "correlation": "soft_labels"}  # keys before version 0.2
NEEDED = {
    "name": str, "cell": dict, "settings": dict, "scores": dict, "classes": list, "class_counts": list, "split": dict,
}  # fmt: skip


@dataclass(frozen=True)
class KeptResult:
    """The content of NAME.json.

    Attributes:
        path: of NAME.json.
        keys: what distinguishes the run from the others of its experiment (backbone, method, seed, ...). The file
            calls it "cell".
        settings: all of them, nested; of paths the last name only.
        seconds, images_per_second: of training; the second is the median over epochs.
        epochs, images: trained epochs and training images.
        freeze_epoch, converged_epoch: None for never; the second is the last drop of softness before freezing.
        softness: after each epoch; None for methods that learn no soft labels.
        split, intervals, leak: as in scores.json.
        scores: numbers with interval ({"value", "low", "high"}).
        class_counts: of the training split.
        soft_labels: [K][K], row k the soft label of class k; None for methods that learn none.
        image_table: name of the file beside NAME.json with the predicted images.
    """

    path: Path
    name: str
    keys: Mapping[str, Any]
    settings: Mapping[str, Any]
    scores: Mapping[str, Any]
    classes: list[str]
    class_counts: list[int]
    split: Mapping[str, Any]
    intervals: Mapping[str, Any] = field(default_factory=dict)
    leak: Mapping[str, Any] | None = None
    multilabel: bool = False
    temperature: float | None = None
    soft_labels: list[list[float]] | None = None
    final_softness: float | None = None
    rarity_agreement: float | None = None
    softness: list[float] | None = None
    freeze_epoch: int | None = None
    converged_epoch: int | None = None
    epochs: int = 0
    images: int = 0
    seconds: float = 0.0
    images_per_second: float = 0.0
    device: str = ""
    precision: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: Commit | None = None
    settings_hash: str = ""
    fingerprint: str = ""
    image_table: str = "images.csv.bz2"

    def value(self, score: str) -> float | None:
        return self.scores[score]["value"]

    def to_json(self) -> dict[str, Any]:
        """The content of NAME.json."""
        content = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("path", "keys")}
        commit = None if self.commit is None else dataclasses.asdict(self.commit)
        return {"format": 1, "cell": dict(self.keys)} | content | {"commit": commit}

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
    content = {OLD_NAMES.get(key, key): value for key, value in read_json(path).items()}
    if missing := [key for key, kind in NEEDED.items() if not isinstance(content.get(key), kind)]:
        raise InputError(
            f"{path} is not a kept result ({', '.join(missing)} missing or of another type). Give a run folder, a "
            "predictions.csv, or a result of `cclnet compare-methods` or `cclnet reproduce`."
        )
    known = {f.name for f in dataclasses.fields(KeptResult)} - {"path"}
    values = {key: value for key, value in content.items() if key in known} | {"keys": content["cell"]}
    if values.get("commit") is not None:
        values["commit"] = Commit(**values["commit"])
    return KeptResult(path=path, **values)


def _without_zeros(predictions: Predictions) -> Predictions:
    """Replace probabilities of 0 by 0.000025: early results were rounded to four decimals, so that 0 means anything
    below 0.00005."""
    p = np.where(predictions.probabilities == 0, 2.5e-5, predictions.probabilities)
    if predictions.multilabel:
        return dataclasses.replace(predictions, probabilities=np.where(p == 1, 1 - 2.5e-5, p))
    return dataclasses.replace(predictions, probabilities=p / p.sum(axis=1, keepdims=True))
