"""The run folder, and runs as evaluation opens them.

A run is a folder with ``settings.toml split.csv data.json metrics.jsonl checkpoints/ model.safetensors model.json
features.safetensors soft_labels.csv predictions.csv metadata.csv calibration.json scores.json report.html
SHA256SUMS``. Each file has one reader and one writer, both in ``cclnet.runs``, and no stage changes the file of an
earlier one. The folder suffices to resume the run, to evaluate it again without the model, and to deploy the model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from cclnet.errors import InputError, resume_command
from cclnet.files import (
    MAX_LINES,
    Writer,
    check_regular,
    make_folder,
    parse_json,
    remove_partial,
    write_json,
    write_whole,
)
from cclnet.runs import checksums
from cclnet.runs import model as model_files
from cclnet.runs.data_summary import DataSummary, read_data_summary
from cclnet.runs.kept_result import read_kept_result
from cclnet.runs.model import Calibration, ModelDescription
from cclnet.runs.out_of_distribution import FeatureStatistics, read_statistics, write_statistics
from cclnet.runs.predictions import (
    SPLITS,
    Floats,
    Predictions,
    Strings,
    read_further_columns,
    read_predictions,
    text_column,
    write_predictions,
)
from cclnet.runs.scores import ClassLeak, Leak, Scores, read_scores, write_scores
from cclnet.runs.spreadsheet import mark_texts, unmark_texts
from cclnet.schema import from_plain
from cclnet.settings import Settings, current_names, make_settings, read_settings, table_to_toml, to_toml

MAX_VALUES, MAX_VALUE = 100, 100  # different values of a text column in metadata.csv, and characters of each
PREDICTIONS = ("predictions.csv", "predictions.csv.gz", "predictions.csv.bz2")  # any one of them


@dataclass(frozen=True)
class SplitTable:
    """The content of split.csv, one column per field, [N] each; None where the file has no such column."""

    images: Strings
    splits: Strings  # train, calibration, val or test
    groups: Strings | None = None  # lesion or patient, empty where unknown
    labels: Strings | None = None  # several labels of one image are joined by |
    # Of cross-validation: the model that predicted an image was trained on the other folds. Empty: on all folds.
    folds: Strings | None = None

    def to_frame(self) -> pd.DataFrame:
        """The table with the columns image, split and, where known, group, label and fold."""
        columns = {"image": self.images, "split": self.splits, "group": self.groups, "label": self.labels,
                   "fold": self.folds}  # fmt: skip
        return pd.DataFrame({name: column.tolist() for name, column in columns.items() if column is not None})


def write_split_file(path: str | Path, table: SplitTable, write: Writer = write_whole) -> None:
    """Write a split.csv; texts that a spreadsheet would run as a formula are marked."""
    cells = {name: mark_texts(column) for name, column in table.to_frame().items()}
    write(Path(path), pd.DataFrame(cells).to_csv(index=False, lineterminator="\n"))


def read_split_file(path: str | Path) -> SplitTable:
    """Read a split.csv. The column ``part`` of files written before version 0.2 is read as ``split``."""
    checksums.check_file(Path(path))
    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8-sig", compression=None)
    except (OSError, ValueError) as error:  # pandas' parser errors and undecodable bytes are ValueErrors
        raise InputError(f"{path} cannot be read as comma-separated text: {error}. Fix or remove it.") from error
    if "split" not in frame:
        frame = frame.rename(columns={"part": "split"})
    if missing := [name for name in ("image", "split") if name not in frame]:
        raise InputError(
            f"{path} has no column {' and '.join(missing)}; found {', '.join(map(str, frame))}. Fix or remove it."
        )
    frame = pd.DataFrame({name: unmark_texts(column) for name, column in frame.items()}, dtype=str)
    image, split = (text_column(Path(path), frame[name]) for name in ("image", "split"))
    further = (text_column(Path(path), frame[name]) if name in frame else None for name in ("group", "label", "fold"))
    return SplitTable(image, split, *further)


def leaks(
    splits: Strings, groups: Strings, labels: npt.NDArray[np.integer] | None = None, classes: Sequence[str] = ()
) -> pd.DataFrame:
    """For each split but train: how many of its images belong to a group that also has images in train.

    Returns the columns split, class, images, shared, share; one row per split (class "") and, with ``labels`` ([N]
    indices or [N, K] of zeros and ones), one row per split and class. An empty group is unknown and never shared.

    >>> splits, groups = np.array(["train", "train", "val", "val"]), np.array(["a", "b", "b", "c"])
    >>> leaks(splits, groups).to_dict("records")
    [{'split': 'val', 'class': '', 'images': 2, 'shared': 1, 'share': 0.5}]
    """
    shared = np.isin(groups, groups[splits == "train"]) & (groups != "")
    of_class = {"": np.full(len(splits), True)}
    if labels is not None:
        for index, name in enumerate(classes):
            of_class[name] = labels[:, index] > 0 if labels.ndim == 2 else labels == index
    rows = []
    for split in (name for name in SPLITS[1:] if name in splits):
        for name, members in of_class.items():
            inside = members & (splits == split)
            images, hit = int(inside.sum()), int((inside & shared).sum())
            rows.append((split, name, images, hit, hit / images if images else float("nan")))
    return pd.DataFrame(rows, columns=["split", "class", "images", "shared", "share"])


class RunFolder:
    """The files of a run: their paths, and for each a method that reads and one that writes it.

    ``cclnet export`` writes folders with some of the same files (model.json, calibration.json, soft_labels.csv), which
    are read in the same way.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.settings = self.path / "settings.toml"
        self.split = self.path / "split.csv"
        self.data = self.path / "data.json"
        self.history = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.weights = self.path / "model.safetensors"
        self.feature_statistics = self.path / "features.safetensors"
        self.model = self.path / "model.json"
        self.soft_labels = self.path / "soft_labels.csv"
        self.soft_label_history = self.path / "soft_labels.jsonl"
        self.predictions = self.path / "predictions.csv"
        self.metadata = self.path / "metadata.csv"
        self.calibration = self.path / "calibration.json"
        self.scores = self.path / "scores.json"
        self.tensorboard = self.path / "tensorboard"
        self.checksums = self.path / checksums.FILE_NAME
        self._written_in_training = (
            self.split, self.data, self.history, self.checkpoints, self.tensorboard, self.path / "csv", self.checksums
        )  # fmt: skip

    def create(self, settings: Settings) -> None:
        """Make the folder of a new run and write its settings. A folder with files of a run is refused."""
        if self.settings.exists():
            raise InputError(f"{self.path} holds a run already: choose --out, or {resume_command(self.path)}")
        if left := [path.name for path in self._written_in_training if path.exists()]:
            raise InputError(f"{self.path} has {', '.join(left)} of another run: remove them, or choose another --out.")
        make_folder(self.path)
        write_whole(self.settings, to_toml(settings))

    def discard(self) -> None:
        """Remove the files of a run that has no checkpoint to resume from."""
        if any(self.checkpoints.glob("*.pt")):
            return
        for path in (self.settings, *self._written_in_training):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def remove_partial(self) -> None:
        """Remove the unfinished files of a run that was killed."""
        for folder in (self.path, self.checkpoints):
            remove_partial(folder)

    def read_settings(self) -> Settings:
        """The settings of a run to resume; one that this version does not know is an error."""
        if not self.settings.exists():
            raise InputError(f"{self.path} holds no run to resume (no settings.toml): start it with --out.")
        return make_settings(self.read_settings_table())

    def read_settings_table(self) -> dict[str, Any]:
        """The settings as nested values, just as the file has them; {} without a file."""
        return current_names(read_settings(self.settings)) if self.settings.exists() else {}

    def write_settings_table(self, values: Mapping[str, Any]) -> None:
        """Write settings that are not those of one training, such as what the runs of an ensemble have in common."""
        write_whole(self.settings, table_to_toml(values))

    def read_split(self) -> SplitTable:
        return read_split_file(self.split)

    def write_split(self, table: SplitTable) -> None:
        write_split_file(self.split, table, checksums.write_covered)

    def read_data_summary(self) -> DataSummary:
        """What training found out about the data; nothing in runs of older versions."""
        return read_data_summary(self.data) if checksums.is_there(self.data) else DataSummary()

    def write_data_summary(self, summary: DataSummary) -> None:
        write_json(self.data, summary.to_json(), checksums.write_covered)

    def read_history(self) -> list[dict[str, Any]]:
        """One record per epoch so far: its number, losses, learning rates, speed, validation scores."""
        records = list(_records(self.history)) if self.history.exists() else []
        for number, record in enumerate(records, start=1):
            if odd := [name for name, value in record.items() if value is not None and not _is_number(value)]:
                raise InputError(
                    f"{self.history}, line {number}: expected numbers, but {', '.join(odd[:8])} is none. Fix it, or "
                    "remove the file."
                )
        return records

    def write_history(self, records: Sequence[Mapping[str, Any]]) -> None:
        write_whole(self.history, "".join(json.dumps(record) + "\n" for record in records))

    def read_model(self) -> ModelDescription:
        return model_files.read_model_file(self.model)

    def write_model(self, weights: bytes, description: ModelDescription) -> None:
        """Write model.safetensors (its content) and model.json. What was fitted and evaluated on previous weights is
        removed first."""
        checksums.remove_covered(self.calibration, self.scores, self.feature_statistics)
        checksums.write_covered(self.weights, weights)
        self.write_description(description)

    def write_description(self, description: ModelDescription) -> None:
        """Write model.json alone."""
        model_files.write_model_file(self.model, description, checksums.write_covered)

    def read_calibration(self) -> Calibration:
        """What was fitted after training; empty where nothing was. Offsets of other classes than those of model.json
        are refused."""
        found = model_files.read_calibration_file(self.calibration)
        if found.map.offsets is not None and self.model.is_file():
            model = self.read_model()
            try:
                found.map.check(len(model.classes), model.multilabel)
            except InputError as error:
                again = "Remove it and run cclnet evaluate, or export again"
                raise InputError(f"{self.calibration} is refused: {error}. {again}.") from error
        return found

    def write_calibration(self, calibration: Calibration) -> None:
        write_json(self.calibration, calibration.to_json(), checksums.write_covered)

    def read_feature_statistics(self) -> FeatureStatistics | None:
        """The statistics by which unlike images are recognised; None where the run or export has none."""
        return read_statistics(self.feature_statistics) if checksums.is_there(self.feature_statistics) else None

    def write_feature_statistics(self, found: FeatureStatistics) -> None:
        write_statistics(self.feature_statistics, found, checksums.write_covered)

    def read_soft_labels(self, classes: Sequence[str]) -> Floats | None:
        """The [K, K] soft labels in the order of ``classes``, row k that of class k; None where there are none."""
        old = self.path / "correlation.csv"  # the name of the file before version 0.2
        path = next((path for path in (self.soft_labels, old) if checksums.is_there(path)), None)
        if path is None:
            return None
        names, matrix = model_files.read_soft_labels(path)
        if set(names) != set(classes):
            raise InputError(
                f"{path} has the classes {', '.join(names)}, the other files have {', '.join(classes)}. They do not "
                "belong to one run."
            )
        order = [names.index(name) for name in classes]
        return matrix[np.ix_(order, order)]

    def write_soft_labels(self, classes: Sequence[str], matrix: npt.ArrayLike) -> None:
        model_files.write_soft_labels(self.soft_labels, classes, matrix, checksums.write_covered)

    def read_soft_label_history(self) -> dict[str, Any] | None:
        """The epochs for which soft labels were recorded, and their matrices; None where there are none."""
        if not self.soft_label_history.exists():
            return None
        path = self.soft_label_history
        of_epoch = {record["epoch"]: _matrix_of(record, path) for record in _records(path)}
        return {"epochs": sorted(of_epoch), "matrices": [of_epoch[epoch] for epoch in sorted(of_epoch)]}

    def add_to_soft_label_history(self, epoch: int, matrix: Sequence[Sequence[float]]) -> None:
        """Record the soft labels after an epoch. A resumed run may record an epoch twice; the later one counts."""
        path = self.soft_label_history
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        write_whole(path, before + json.dumps({"epoch": epoch, "matrix": matrix}) + "\n")

    def find_predictions(self) -> Path | None:
        """predictions.csv, or a compressed one; None without."""
        return next((path for name in PREDICTIONS if (path := self.path / name).is_file()), None)

    def read_predictions(self, multilabel: bool | None = None) -> Predictions:
        path = self.find_predictions()
        if path is None:
            raise InputError(f"{self.path} holds no predictions.csv. Train to the end first, or give the file itself.")
        return read_predictions(path, multilabel)

    def write_predictions(self, predictions: Predictions) -> None:
        write_predictions(self.predictions, predictions, checksums.write_covered)

    def read_metadata(self) -> pd.DataFrame:
        """Further columns of the predicted images (sex, age, site), as text, indexed by image; empty without any."""
        if not checksums.is_there(self.metadata):
            return pd.DataFrame()
        try:
            checksums.check_file(self.metadata)
            frame = pd.read_csv(self.metadata, dtype=str, keep_default_na=False, encoding="utf-8-sig").apply(
                unmark_texts
            )
        except (OSError, ValueError) as error:
            raise InputError(f"{self.metadata} cannot be read: {error}.") from error
        if "image" not in frame.columns:
            raise InputError(f"{self.metadata} needs a column 'image', and has {', '.join(map(str, frame.columns))}.")
        return frame.drop_duplicates("image").set_index("image")

    def write_metadata(self, images: Sequence[str], columns: pd.DataFrame) -> None:
        """Write the columns from which subgroups can be formed: numbers, and text of few different short values.
        Nothing is written without any; names and notes of single images are left out."""
        kept = {str(name): columns[name].astype(str) for name in columns if _groups_images(columns[name])}
        checksums.remove_covered(self.metadata)
        if kept:
            cells = {"image": mark_texts(images), **{name: mark_texts(own) for name, own in kept.items()}}
            checksums.write_covered(self.metadata, pd.DataFrame(cells).to_csv(index=False, lineterminator="\n"))

    def read_scores(self) -> Scores | None:
        """The content of scores.json; None where the run has not been evaluated."""
        return read_scores(self.scores) if self.scores.exists() else None

    def write_scores(self, scores: Scores) -> None:
        write_scores(self.scores, scores)


def _groups_images(column: pd.Series[Any]) -> bool:
    """Whether a column divides images into subgroups."""
    texts = column.fillna("").astype(str).str.strip()
    known = texts[texts != ""]
    numbers = bool(pd.to_numeric(known, errors="coerce").notna().all())
    return len(known) > 0 and (numbers or (known.nunique() <= MAX_VALUES and int(known.str.len().max()) <= MAX_VALUE))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file with one per epoch and line."""
    check_regular(path, MAX_LINES)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}. Fix it, or remove the file.") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_json(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number} is not JSON: {error}. Fix it, or remove the file.") from error
        if not isinstance(record, dict) or not _is_number(record.get("epoch")):
            raise InputError(f"{path}, line {number}: expected an object with an 'epoch', got {line[:60]!r}.")
        yield record


def _matrix_of(record: Mapping[str, Any], path: Path) -> list[list[float]]:
    """The soft labels in a record, [K][K]."""
    rows = record.get("matrix")
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) == len(rows) and all(map(_is_number, row)) for row in rows
    ):
        raise InputError(f"{path}: epoch {record['epoch']} has no 'matrix' of one row of numbers per class.")
    return rows


def _is_number(value: object) -> bool:
    """Whether a value is a number of ordinary size, or NaN; whole numbers in JSON may be larger than any float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not abs(value) > 1e300


def free_name(folder: Path, settings: Settings, kind: str = "") -> Path:
    """A folder that does not exist yet, named after data, backbone, method and seed, or ``kind`` for both."""
    stem = Path(settings.data.partition(":")[0]).stem or "data"
    name = f"{stem}-{settings.backbone}-{kind or f'{settings.method}-seed{settings.seed}'}"
    for number in range(1, 10_000):
        path = folder / (name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return path
    raise InputError(f"there are too many runs called {name} in {folder}: give --out.")


# Settings in which the runs of one method may differ: they say where and how it was trained or is used, not what.
INCIDENTAL = (
    "seed", "split.seed", "out", "name", "device", "devices", "workers", "data", "image_folder", "cache_dir",
    "follow_links", "cache", "progress", "tensorboard", "resident", "compile", "max_minutes", "validate_every",
    "decision", "cost", "by", "ordered", "logger",
)  # fmt: skip


@dataclass(frozen=True)
class OpenedRun:
    """What evaluation needs of a run: opened from a run folder, from a predictions.csv alone, or from a kept result."""

    name: str  # of the folder or file
    path: Path  # as given
    folder: RunFolder | None  # None for a file
    predictions: Predictions  # of every split in the file
    split: str  # the reported one: "test" if there, else "val", else "all"
    model: ModelDescription | None = None  # None for a predictions.csv alone
    soft_labels: Floats | None = None  # [K, K], row k the soft label of class k
    settings_table: Mapping[str, Any] = field(default_factory=dict)  # nested values; {} where unknown
    kept_leak: Mapping[str, Any] | None = None
    data: DataSummary = field(default_factory=DataSummary)

    @property
    def seed(self) -> int | None:
        return None if self.model is None else self.model.trained.seed

    def settings(self) -> dict[str, Any]:
        """What was trained: settings by dotted name, without INCIDENTAL; {} where unknown."""
        flat = dict(flattened(self.settings_table))
        if self.model is not None:
            # settings.toml has these only if they were given (before version 0.2: always); model.json has those used.
            flat |= {name: list(getattr(self.model, name)) for name in ("mean", "std") if name in flat}
        return {name: value for name, value in flat.items() if name not in INCIDENTAL}

    def metadata(self) -> pd.DataFrame:
        """Further columns of the images, as text, indexed by image: metadata.csv, or columns of the predictions."""
        if self.folder is not None and checksums.is_there(self.folder.metadata):
            return self.folder.read_metadata()
        path = self.path if self.folder is None else self.folder.find_predictions()
        return pd.DataFrame() if path is None or path.suffix == ".json" else read_further_columns(path)

    def leak(self) -> Leak | None:
        """How many reported images belong to a group that was trained on, by split.csv or as kept (then without
        classes); None where unknown."""
        if self.kept_leak:
            return from_plain(Leak, {"per_class": [], **self.kept_leak})
        if self.folder is None or not checksums.is_there(self.folder.split):
            return None
        table = self.folder.read_split()
        if table.groups is None:
            return None
        split = table.to_frame().drop_duplicates("image")
        reported = self.predictions.of_split(self.split)
        groups = split.set_index("image")["group"].reindex(reported.images).fillna("").to_numpy(dtype=np.str_)
        known = int((groups != "").sum())
        if not known:
            return None
        shared = _trained_on(split, reported.images, groups) & (groups != "")
        members = [np.full(len(reported), True), *(reported.targets.T > 0)]
        counts = [(int((own & shared).sum()), int(own.sum())) for own in members]
        (hits, share), *classes = ((hits, hits / images if images else None) for hits, images in counts)
        per_class = tuple(ClassLeak(name, *row) for name, row in zip(reported.classes, classes, strict=True))
        who = f"{hits:,} of {len(reported):,} images ({share:.0%}) show" if hits else f"None of {known:,} images shows"
        words = f"{who} a lesion or patient that the model was trained on."
        if known < len(reported):
            words += f" Of {len(reported) - known:,} others it is not known."
        return Leak(hits, share, per_class, words)


def _trained_on(split: pd.DataFrame, images: Strings, groups: Strings) -> npt.NDArray[np.bool_]:
    """Whether each image belongs to a group that its model was trained on: the images of the split train, and with
    cross-validation those of the other folds."""
    if "fold" not in split:
        return np.isin(groups, split.loc[split["split"] == "train", "group"].to_numpy(dtype=np.str_))
    own = split.set_index("image")["fold"].reindex(images).fillna("").to_numpy(dtype=np.str_)
    shared = np.zeros(len(images), dtype=bool)
    for fold in np.unique(own):
        trained = (split["split"] == "train") | ((split["fold"] != "") & (split["fold"] != fold))
        rows = own == fold
        shared[rows] = np.isin(groups[rows], split.loc[trained, "group"].to_numpy(dtype=np.str_))
    return shared


def flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted name (split.by)."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def open_run(path: str | Path) -> OpenedRun:
    """Open a run folder, a predictions.csv (also compressed) alone, or the NAME.json of a kept result."""
    path = Path(path)
    if path.suffix == ".json":
        kept = read_kept_result(path)
        predictions = _in_order(kept.read_predictions(), kept.model)
        matrix = None if kept.soft_labels is None else np.asarray(kept.soft_labels, np.float64)
        split = reported_split(predictions)
        return OpenedRun(path.stem, path, None, predictions, split, kept.model, matrix, kept.settings, kept.leak)
    if not path.is_dir():
        predictions = read_predictions(path)
        name = path.name.removesuffix(".gz").removesuffix(".bz2").removesuffix(".csv")
        return OpenedRun(name, path, None, predictions, reported_split(predictions))
    folder = RunFolder(path)
    model = folder.read_model() if folder.model.exists() else None
    predictions = _in_order(folder.read_predictions(None if model is None else model.multilabel), model)
    split, soft_labels = reported_split(predictions), folder.read_soft_labels(predictions.classes)
    name, settings = path.resolve().name, folder.read_settings_table()
    data = folder.read_data_summary()
    return OpenedRun(name, path, folder, predictions, split, model, soft_labels, settings, data=data)


def _in_order(predictions: Predictions, model: ModelDescription | None) -> Predictions:
    """The predictions with what model.json says about the order of the classes."""
    ordered = None if model is None else model.ordered
    return predictions if ordered is None else replace(predictions, ordered=ordered)


def reported_split(predictions: Predictions) -> str:
    """The split to report: "test" if there, else "val", else "all"."""
    there = set() if predictions.splits is None else set(predictions.splits.tolist())
    return next((split for split in ("test", "val") if split in there), "all")
