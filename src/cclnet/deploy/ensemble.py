"""An ensemble: the networks of several runs in one run folder, whose probabilities are averaged.

Its predictions are honest: an image is predicted by those members that were not trained on it. Where some images are
unknown to all members, as a common test split is, only they are kept. Where there are none, as with the folds of a
cross-validation, every image is predicted by the members that did not see it (out-of-fold).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from cclnet.errors import InputError
from cclnet.evaluation.bootstrap import units_of
from cclnet.evaluation.calibration import calibrate, fitting_split
from cclnet.files import make_folder
from cclnet.runs.checksums import checking, is_there
from cclnet.runs.decision_rule import BALANCING
from cclnet.runs.folder import OpenedRun, RunFolder, SplitTable, flattened, open_run
from cclnet.runs.model import MAX_MEMBERS, Member, ModelDescription, TrainedInfo
from cclnet.runs.predictions import Predictions
from cclnet.runs.provenance import source_commit, versions

SPLITS = ("val", "test")  # whose predictions an ensemble keeps


def make_ensemble(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the run folder of an ensemble of finished, evaluated runs, and return it; it is not evaluated yet.

    The runs must have the same classes and the same class frequencies in their probabilities. Backbones, crops and
    normalisation may differ. ``out`` must not hold a model; settings.toml in it is kept.
    """
    if not 2 <= len(runs) <= MAX_MEMBERS:
        raise InputError(f"an ensemble has 2 to {MAX_MEMBERS} runs, got {len(runs)}.")
    opened = [_open(Path(run)) for run in runs]
    _check_alike(opened)
    folder = RunFolder(out)
    if folder.find_predictions() is not None:  # the last file to be written
        raise InputError(f"{folder.path} holds a run already: choose another --out.")
    members = [Member.of(_model(run), RunFolder(run.path).read_calibration().map) for run in opened]
    predictions, split = combine(opened)
    folds = None if split.folds is None else len(set(split.folds.tolist()) - {""})
    make_folder(folder.path)
    if not folder.settings.exists():
        folder.write_settings_table(_common_settings(opened))
    folder.write_split(split)
    folder.write_model(_merged_weights(runs), _describe(opened, members, folds))
    soft_labels = [run.soft_labels for run in opened if run.soft_labels is not None]
    if len(soft_labels) == len(opened):
        folder.write_soft_labels(predictions.classes, np.mean(soft_labels, axis=0))
    statistics = RunFolder(runs[0]).read_feature_statistics()  # unlike images are recognised by the first member
    if statistics is not None:
        folder.write_feature_statistics(statistics)
    metadata = pd.concat([run.metadata() for run in opened])
    metadata = metadata[~metadata.index.duplicated()].reindex(predictions.images).fillna("")
    folder.write_metadata(predictions.images.tolist(), metadata)
    folder.write_predictions(predictions)
    return folder.path


def _open(path: Path) -> OpenedRun:
    files = RunFolder(path)
    if not files.weights.is_file():
        raise InputError(f"{path} holds no model.safetensors: give the folders of finished runs.")
    if not files.calibration.is_file() and not files.read_calibration().map.is_fitted:
        raise InputError(f"{path} is not evaluated, so its probabilities are not calibrated: cclnet evaluate {path}.")
    if files.read_model().members:
        raise InputError(f"{path} is an ensemble already: give the runs that it was made of.")
    return open_run(path)


def _check_alike(opened: Sequence[OpenedRun]) -> None:
    first = opened[0]
    for run in opened[1:]:
        if run.predictions.classes != first.predictions.classes or _model(run).multilabel != _model(first).multilabel:
            raise InputError(
                f"the runs of an ensemble need the same classes in the same order: {first.name} has "
                f"{', '.join(first.predictions.classes)}; {run.name} has {', '.join(run.predictions.classes)}."
            )
        for name in (*BALANCING, "logit_adjustment"):
            own, other = (dict(flattened(given.settings_table)).get(name) or 0 for given in (first, run))
            if own != other:
                raise InputError(
                    f"{first.name} was trained with {name} = {own}, {run.name} with {other}: their probabilities "
                    "contain different class frequencies and cannot be averaged."
                )


def _model(run: OpenedRun) -> ModelDescription:
    assert run.model is not None
    return run.model


def _describe(opened: Sequence[OpenedRun], members: Sequence[Member], folds: int | None) -> ModelDescription:
    """model.json of the ensemble. The image that it takes is the largest that a member sees, at the finest scale."""
    models = [_model(run) for run in opened]
    short_side = max(own.short_side for own in members)
    scaled = [[round(side * short_side / own.short_side) for side in own.crop] for own in members]
    height, width = (max(sizes) for sizes in zip(*scaled, strict=True))
    counts = [own.class_counts for own in models if own.class_counts is not None]
    mean_counts = tuple(np.mean(counts, axis=0).round().astype(int).tolist()) if len(counts) == len(models) else None
    methods, names = ({getattr(own, key) for own in models} for key in ("method", "backbone"))
    networks = Counter(own.backbone for own in models)
    trained = [own.trained for own in models]
    same: dict[str, Any] = {}
    for name in ("data", "fingerprint", "device", "precision", "seed"):
        values = {getattr(own, name) for own in trained}
        same[name] = values.pop() if len(values) == 1 else None
    return ModelDescription(
        backbone=" + ".join(f"{count} x {name}" for name, count in networks.items()),
        classes=models[0].classes,
        multilabel=models[0].multilabel,
        short_side=short_side,
        crop=(height, width),
        mean=members[0].mean,
        std=members[0].std,
        method=methods.pop() if len(methods) == 1 else "several",
        method_settings=models[0].method_settings if len(names) == 1 else {},
        class_counts=mean_counts,
        members=tuple(members),
        trained=TrainedInfo(
            **same,
            folds=folds,
            seconds=round(sum(own.seconds or 0.0 for own in trained), 3),
            images=round(float(np.mean([own.images or 0 for own in trained]))),
            versions=versions(),
            commit=source_commit(),
        ),
    )


def _merged_weights(runs: Sequence[str | Path]) -> bytes:
    """The weights of all members in one file, each name with the number of its member in front."""
    merged: dict[str, npt.NDArray[Any]] = {}
    for index, run in enumerate(runs):
        weights = RunFolder(run).weights
        try:
            with checking(weights):
                merged |= {f"{index}.{name}": value for name, value in load_file(weights).items()}
        except (SafetensorError, OSError, KeyError) as error:
            raise InputError(f"{weights} is refused: it is not a whole .safetensors file ({error}).") from error
    return save(merged)


def _common_settings(opened: Sequence[OpenedRun]) -> dict[str, Any]:
    """The settings in which all runs agree, nested, without those of the split."""
    tables = [dict(flattened(run.settings_table)) for run in opened]
    nested: dict[str, Any] = {}
    for name, value in tables[0].items():
        if name.startswith(("split.", "method_settings.")) or any(own.get(name) != value for own in tables[1:]):
            continue
        table, _, key = name.rpartition(".")
        (nested.setdefault(table, {}) if table else nested)[key] = value
    return nested


def combine(opened: Sequence[OpenedRun]) -> tuple[Predictions, SplitTable]:
    """The mean of the calibrated predictions of each image over the members that were not trained on it, and the split
    of all images. The column fold names these members where they are not all."""
    held_out = [_calibrated(run) for run in opened]
    columns = [f"p{k}" for k in range(held_out[0].num_classes)]
    frame = pd.concat([_frame(own, index, columns) for index, own in enumerate(held_out)], ignore_index=True)
    by_image = frame.groupby("image", sort=True)
    if (by_image["label"].nunique() > 1).any() or (by_image["group"].nunique() > 1).any():
        raise InputError("the runs give an image different labels or groups: they were trained on different data.")
    known = by_image[["label", "group"]].first()
    known["split"] = by_image["split"].max()  # "val" where it is that of any member
    known["members"] = by_image["member"].agg(lambda own: "+".join(map(str, sorted(own))))
    known["all"] = by_image["member"].size() == len(opened)
    mean = by_image[columns].mean()
    for split in SPLITS:
        own = known["split"] == split
        if known.loc[own, "all"].any():
            known = known[~own | known["all"]]
    mean = mean.loc[known.index]
    probabilities = mean.to_numpy()
    if not held_out[0].multilabel:
        probabilities = probabilities / probabilities.sum(axis=1, keepdims=True)
    labels = np.stack(known["label"].map(lambda text: np.fromstring(text, sep=" ", dtype=np.int64)).tolist())
    has_groups = any(own.groups is not None for own in held_out)
    combined = Predictions(
        images=known.index.to_numpy(dtype=np.str_),
        labels=labels.astype(np.uint8) if held_out[0].multilabel else labels[:, 0],
        probabilities=probabilities,
        classes=held_out[0].classes,
        groups=known["group"].to_numpy(dtype=np.str_) if has_groups else None,
        splits=known["split"].to_numpy(dtype=np.str_),
    )
    return combined, _split_table(opened, known, has_groups)


def _calibrated(run: OpenedRun) -> Predictions:
    """The predictions of val and test, calibrated on other images: those of another split, else of the other half. The
    kind is that of calibration.json, whose map the member has."""
    found = []
    kind = "temperature" if RunFolder(run.path).read_calibration().map.offsets is None else "offsets"
    for split in SPLITS:
        own = run.predictions.of_split(split)
        if not len(own):
            continue
        fit_on = fitting_split(run.predictions, split) if split == "test" else None
        fitting = run.predictions.of_split(fit_on) if fit_on else own
        found.append(calibrate(own, fit_on, fitting, units_of(own), 0, kind)[1] or own)
    if not found:
        raise InputError(f"{run.name} has no predictions of the splits val or test.")
    if len(found) == 1:
        return found[0]
    fields = ("images", "labels", "probabilities", "groups", "splits")
    joined: Mapping[str, Any] = {
        name: None if getattr(found[0], name) is None else np.concatenate([getattr(own, name) for own in found])
        for name in fields
    }
    return replace(found[0], **joined)


def _frame(own: Predictions, member: int, columns: list[str]) -> pd.DataFrame:
    labels = own.labels if own.multilabel else own.labels[:, None]
    frame = pd.DataFrame(own.probabilities, columns=columns)
    frame["image"], frame["member"] = own.images, member
    frame["label"] = [" ".join(map(str, row)) for row in labels.tolist()]
    frame["group"] = "" if own.groups is None else own.groups
    frame["split"] = own.splits
    return frame


def _split_table(opened: Sequence[OpenedRun], known: pd.DataFrame, has_groups: bool) -> SplitTable:
    """split.csv of the ensemble: the predicted images, and all others that a member was trained on."""
    tables = [RunFolder(run.path).read_split().to_frame() for run in opened if is_there(RunFolder(run.path).split)]
    frame = pd.concat(tables, ignore_index=True).drop_duplicates("image") if tables else known.reset_index()
    frame = frame.set_index("image")
    split = known["split"].reindex(frame.index).fillna("train")
    fold = known["members"].where(~known["all"], "").reindex(frame.index).fillna("")
    texts = {name: frame[name].to_numpy(dtype=np.str_) if name in frame else None for name in ("group", "label")}
    return SplitTable(
        images=frame.index.to_numpy(dtype=np.str_),
        splits=split.to_numpy(dtype=np.str_),
        groups=texts["group"] if has_groups else None,
        labels=texts["label"] if tables else None,
        folds=fold.to_numpy(dtype=np.str_) if (fold != "").any() else None,
    )
