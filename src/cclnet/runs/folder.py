"""What a run left behind, as far as judging it needs: predictions, model.json, correlation.csv, split.csv, settings."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from cclnet.data.split import leaks
from cclnet.errors import InputError
from cclnet.files import write_whole
from cclnet.runs.predictions import Floats, Predictions, read_predictions
from cclnet.runs.soft_labels import read_soft_labels, write_soft_labels
from cclnet.settings import Settings, make_settings, read_settings, to_toml

# A run is a folder: enough to run it again, to score it again without the model, and to ship it.


class RunFolder:
    """The files of a run, by name."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.settings = self.path / "settings.toml"
        self.split = self.path / "split.csv"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.weights = self.path / "model.safetensors"
        self.model = self.path / "model.json"
        self.correlation = self.path / "correlation.csv"
        self.predictions = self.path / "predictions.csv"
        self.tensorboard = self.path / "tensorboard"

    def create(self, settings: Settings) -> None:
        """Make the folder for a new run. One that holds a run already is left alone."""
        if self.settings.exists():
            raise InputError(
                f"{self.path} holds a run already. Go on with it: cclnet train --resume {self.path}; "
                "or choose another --out."
            )
        if left := [path.name for path in self._of_a_run() if path.exists()]:
            raise InputError(f"{self.path} has {', '.join(left)} of another run: remove them, or choose another --out.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"the run folder {self.path} cannot be made: {error.strerror}. Choose another --out."
            ) from error
        write_whole(self.settings, to_toml(settings))

    def discard(self) -> None:
        """Take a folder back in which nothing was trained that could be gone on with."""
        if any(self.checkpoints.glob("*.pt")):
            return
        for path in (self.settings, *self._of_a_run()):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def _of_a_run(self) -> tuple[Path, ...]:
        """What a run writes while it trains, beside its settings."""
        return self.split, self.metrics, self.checkpoints, self.tensorboard

    def read_settings(self) -> Settings:
        if not self.settings.exists():
            raise InputError(f"{self.path} holds no run to resume (no settings.toml): start it with --out.")
        return make_settings(read_settings(self.settings))

    def read_metrics(self) -> list[dict[str, Any]]:
        """One record for each epoch so far."""
        if not self.metrics.exists():
            return []
        return [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]

    def write_metrics(self, records: Sequence[Mapping[str, Any]]) -> None:
        write_whole(self.metrics, "".join(json.dumps(record) + "\n" for record in records))

    def write_model(self, state: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
        from safetensors.torch import save

        write_whole(self.weights, save({name: value.contiguous().cpu() for name, value in state.items()}))
        write_whole(self.model, json.dumps(description, indent=1, ensure_ascii=False) + "\n")

    def write_soft_labels(self, matrix: Tensor, classes: Sequence[str]) -> None:
        write_soft_labels(self.correlation, classes, matrix.double().cpu().numpy())


def free_name(folder: Path, settings: Settings) -> Path:
    """A folder that is not there yet, named after what is run in it."""
    stem = Path(settings.data.partition(":")[0]).stem or "data"
    name = f"{stem}-{settings.backbone}-{settings.method}-seed{settings.seed}"
    for number in range(1, 10_000):
        path = folder / (name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return path
    raise InputError(f"there are too many runs called {name} in {folder}: give --out.")


PREDICTIONS = ("predictions.csv", "predictions.csv.gz", "predictions.csv.bz2")  # in a run folder, any one of them

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Settings in which the runs of one method may differ: they say where and how, not what, was trained.
INCIDENTAL = (
    "seed", "split.seed", "out", "name", "device", "devices", "workers", "data", "image_folder", "cache_dir",
    "follow_links", "cache", "progress", "tensorboard", "resident", "compile", "max_minutes", "validate_every",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A run folder; or a predictions.csv alone (then ``folder`` is None and nothing else is known); or what
    ``cclnet.sweep`` keeps of a run, a small JSON with the predictions beside it (then ``folder`` is None as well).

    Attributes:
        name: of the folder or file.
        path: as it was given.
        predictions: of every part in the file.
        part: what is reported: "test" if there, else "val", else "all".
        model: model.json, or None.
        correlation: the [K, K] matrix of correlation.csv, or None.
    """

    name: str
    path: Path
    folder: Path | None
    predictions: Predictions
    split: str
    model: dict[str, Any] | None
    correlation: Floats | None
    kept_settings: Mapping[str, Any] = field(default_factory=dict)
    kept_leak: Mapping[str, Any] | None = None

    @property
    def seed(self) -> int | None:
        return (self.model or {}).get("trained", {}).get("seed")

    def settings(self) -> dict[str, Any]:
        """What was trained, by dotted names, without what is incidental; empty where it is not known."""
        path = None if self.folder is None else self.folder / "settings.toml"
        nested = self.kept_settings
        if path is not None and path.exists():
            try:
                nested = tomllib.loads(path.read_text(encoding="utf-8"))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise InputError(f"{path} is not valid TOML: {error}. Mend it, or remove it.") from error
        flat = dict(_flat(nested))
        # settings.toml has these only if they were given (before version 0.2: always); model.json has those used.
        model = self.model or {}
        flat |= {name: model[name] for name in ("mean", "std") if name in flat and name in model}
        return {name: value for name, value in flat.items() if name not in INCIDENTAL}

    def leak(self) -> dict[str, Any] | None:
        """How much of the reported part shows a group that was trained on, by split.csv, or as it was kept (then no
        class of its own is known); None where unknown."""
        if self.kept_leak:
            return {"per_class": [], **self.kept_leak}
        path = None if self.folder is None else self.folder / "split.csv"
        if path is None or not path.exists():
            return None
        try:
            split = pd.read_csv(path, dtype=str, keep_default_na=False)
        except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read as comma-separated text: {error}. Mend or remove it.") from error
        if "split" not in split:
            split = split.rename(columns={"part": "split"})  # the name of the column before version 0.2
        if lacking := [name for name in ("image", "split") if name not in split]:
            raise InputError(
                f"{path} has no column {' and '.join(lacking)}; found {', '.join(map(str, split))}. Mend or remove it."
            )
        if "group" not in split or not (split["group"] != "").any():
            return None
        split = split.drop_duplicates("image")
        reported = self.predictions.of_split(self.split)
        trained = split.loc[split["split"] == "train", "group"].to_numpy(dtype=np.str_)
        group_of = split.set_index("image")["group"].reindex(reported.images).fillna("").to_numpy(dtype=np.str_)
        known = int((group_of != "").sum())
        if not known:
            return None
        parts = np.repeat(["train", "val"], [len(trained), len(reported)])
        labels = np.concatenate([np.zeros((len(trained), reported.num_classes), np.uint8), reported.targets])
        found = leaks(parts, np.concatenate([trained, group_of]), labels, reported.classes).to_dict("records")
        whole, *classes = ({"images": int(row["shared"]), "share": _share(row)} for row in found)
        per_class = [{"class": name, **row} for name, row in zip(reported.classes, classes, strict=True)]
        words = (
            f"{whole['images']:,} of {len(reported):,} images ({whole['share']:.0%}) show a lesion or patient that the "
            "model was trained on."
            if whole["images"]
            else f"None of {known:,} images shows a lesion or patient that the model was trained on."
        )
        if known < len(reported):
            words += f" Of {len(reported) - known:,} others it is not known."
        return {**whole, "per_class": per_class, "in_words": words}


def _share(row: Mapping[Any, Any]) -> float | None:
    return row["shared"] / row["images"] if row["images"] else None


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in settings.items():
        pairs += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, value)]
    return pairs


def open_run(path: str | Path) -> Run:
    """Open a run folder, a predictions.csv (also compressed) without a run around it, or the .json kept of a run."""
    path = Path(path)
    if path.suffix == ".json":
        return _open_result(path)
    if not path.is_dir():
        predictions = read_predictions(path)
        name = path.name.removesuffix(".gz").removesuffix(".bz2").removesuffix(".csv")
        return Run(name, path, None, predictions, reported_split(predictions), None, None)
    files = [file for name in PREDICTIONS if (file := path / name).exists()]
    if not files:
        raise InputError(f"{path} holds no predictions.csv. Train to the end first, or give the file itself.")
    model = read_model(path / "model.json")
    predictions = read_predictions(files[0], multilabel=None if model is None else model.get("multilabel"))
    matrix = None
    if (path / "correlation.csv").exists():
        classes, matrix = read_soft_labels(path / "correlation.csv")
        if set(classes) != set(predictions.classes):
            raise InputError(
                f"{path}: correlation.csv is about the classes {', '.join(classes)}, predictions.csv about "
                f"{', '.join(predictions.classes)}. They are not of one run."
            )
        order = [classes.index(name) for name in predictions.classes]
        matrix = matrix[np.ix_(order, order)]
    return Run(path.resolve().name, path, path, predictions, reported_split(predictions), model, matrix)


def _open_result(path: Path) -> Run:
    """What is kept of a run: see ``cclnet.sweep.results``."""
    if not path.exists():
        raise InputError(f"there is no file {path}.")
    kept = read_model(path) or {}
    predictions_file = path.with_name(f"{path.stem}.predictions.csv.bz2")
    image_table = path.with_name(Path(kept.get("image_table", "images.csv.bz2")).name)  # nowhere but beside it
    missing = [file.name for file in (predictions_file, image_table) if not file.exists()]
    if missing or "settings" not in kept or "class_counts" not in kept:
        raise InputError(
            f"{path} is not what is kept of a run, or {' and '.join(missing) or 'a part of it'} is missing beside it. "
            "Give a run folder, a predictions.csv, or a result of `cclnet compare-methods` or `cclnet reproduce`."
        )
    settings = kept["settings"]
    model = {key: settings[key] for key in ("method", "method_settings", "backbone")}
    model |= {"classes": kept["classes"], "class_counts": kept["class_counts"], "trained": {"seed": settings["seed"]}}
    predictions = _without_zeros(read_predictions(predictions_file, kept.get("multilabel", False), image_table))
    matrix = None if kept["correlation"] is None else np.asarray(kept["correlation"], np.float64)
    part = reported_split(predictions)
    return Run(path.stem, path, None, predictions, part, model, matrix, settings, kept.get("leak"))


def _without_zeros(predictions: Predictions) -> Predictions:
    """Earlier results were kept to four decimals throughout: nothing there is something below .00005, and is read as
    half of that."""
    p = np.where(predictions.probabilities == 0, 2.5e-5, predictions.probabilities)
    if predictions.multilabel:
        return replace(predictions, probabilities=np.where(p == 1, 1 - 2.5e-5, p))
    return replace(predictions, probabilities=p / p.sum(axis=1, keepdims=True))


def reported_split(predictions: Predictions) -> str:
    """Test if there, else val, else everything."""
    there = set() if predictions.splits is None else set(predictions.splits.tolist())
    return next((part for part in ("test", "val") if part in there), "all")


def read_model(path: Path) -> dict[str, Any] | None:
    """model.json as it stands, None without one."""
    if not path.exists():
        return None
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not JSON: {error}. Mend it, or remove it.") from error
    if not isinstance(model, dict):
        raise InputError(f"{path}: expected an object, got {type(model).__name__}.")
    return model
