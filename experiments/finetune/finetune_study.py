"""Fine-tuning on ISIC 2018, APTOS 2019 and brain MRI: train the cells of PLAN.md, and write the tables.

    python experiments/finetune/finetune_study.py tune isic --data isic=ISIC2018 --weights WEIGHTS --parallel 4
    python experiments/finetune/finetune_study.py aptos brain --data aptos=APTOS --data brain=BRAIN --weights WEIGHTS
    python experiments/finetune/finetune_study.py isic --tta --data isic=ISIC2018 --weights WEIGHTS
    python experiments/finetune/finetune_study.py --tables-only --results results/finetune

WEIGHTS is a folder of NAME.safetensors, one per timm model; without it timm's hub is used. Cells that have a result
are skipped, so the same command continues after an interruption. ``--tta`` trains nothing: the finished runs predict
once more, with test-time augmentation. ``--before FOLDER`` shows earlier results on the same images. ``--screening
first`` (or ``second``) writes the main effects of the screening runs instead of the tables; the second also writes
adopted.json, the changes that its rule adopts, which ``--changes FILE`` applies to the runs of isic, aptos and brain.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from rich.console import Console
from safetensors.torch import load_file
from scipy import sparse
from sklearn.metrics import roc_auc_score

from cclnet.data.cache import decode
from cclnet.data.sources import open_data
from cclnet.data.split import make_split
from cclnet.errors import InputError
from cclnet.evaluation.bootstrap import Statistic, bootstrap, units_of
from cclnet.evaluation.calibration import calibrated, fit_offsets
from cclnet.evaluation.evaluate import evaluate
from cclnet.files import make_folder, read_json, write_json, write_whole
from cclnet.presets import preset_file
from cclnet.pretrained import input_settings
from cclnet.runs.folder import RunFolder
from cclnet.runs.kept_result import KeptResult, predictions_path, write_kept_predictions
from cclnet.runs.model import ModelDescription
from cclnet.runs.predictions import Predictions, read_predictions
from cclnet.runs.provenance import origin
from cclnet.settings import Settings, SplitSettings, make_settings, merge_layers, read_settings
from cclnet.sweep.cells import IGNORED_SETTINGS, Cell, SweepContext, SweepOptions, SweepSummary, parse_shard
from cclnet.sweep.executors import run_sweep
from cclnet.sweep.results import read_results
from cclnet.training.setup import make_fabric, make_network, prepare_data
from cclnet.training.validate import Tester, predictions

FOLDS = 5
VALIDATE_EVERY = 5  # epochs: validation in full precision takes a fifth of the time of an epoch
DRAWS = 1000  # of the bootstrap
# Preset best trains all folds in one run; here every fold is a cell, and single models predict without TTA.
BEST: dict[str, Any] = {"preset": "best", "changes": {"folds": 0}}
TTA_VIEWS = "flips"  # as in preset best
BEFORE = ", presets as they were"  # end of the names of rows of earlier results
# Models whose probabilities are averaged.
MEMBERS = {"isic": ("lite4-tta", "lite2-tta", "lite0-tta"), "aptos": ("lite2", "lite0")}
STUDIES = ("tune", "aptos-tune", "brain", "aptos", "isic")
# Input of the backbones: lite4's weights were trained at 300 pixels; the images have a short side of 256.
SIZES = {"tf_efficientnet_lite4": 300, "tf_efficientnet_lite2": 260}
SMOKE: dict[str, Any] = {
    "data": "synthetic:images=80,size=40", "backbone": "test_efficientnet", "weights": "", "pretrained": False,
    "short_side": 36, "epochs": 1, "batch_size": 16, "warmup_epochs": 0, "augment": {"crop": 32},
}  # fmt: skip

# Each alone, changed from the preset finetune with tf_efficientnet_lite0; the two lines of questions first.
PLAIN = {"augment": {"rotation": 0, "zoom": "none"}}
CROPS = {
    "augment": {"zoom": "none", "resized_crop": [0.4, 1.0], "brightness": 0.4, "contrast": 0.4, "saturation": 0.4},
}  # fmt: skip
# What benchmarks/timm_loop.py does apart from its crops.
TIMM_RECIPE = {"layer_decay": 1.0, "ema": 0.0, "augment": {"rotation": 0, "hue": 0.0}}
# What preset finetune was when these runs were planned: the cells keep their meaning when the preset changes.
TUNED_FROM = {"prior_bias": False, "augment": {"warp": 1.0}}
# By the rule of the fourth amendment.
ADOPTED = {"logit_adjustment": 1.0, "augment": {"warp": 0.5}}
TUNE: dict[str, dict[str, Any]] = {
    "start": {},
    "plain": PLAIN,
    "plain-rotation": merge_layers(PLAIN, {"augment": {"rotation": 180}}),
    "plain-zoom": merge_layers(PLAIN, {"augment": {"zoom": [0.8, 1.25]}}),
    "plain-resized-crop": merge_layers(PLAIN, {"augment": {"resized_crop": [0.4, 1.0]}}),
    "resized-crop-tested-at-256": {"test_short_side": 256, "augment": {**PLAIN["augment"], "resized_crop": [0.4, 1.0]}},
    "zoom-wide": {"augment": {"zoom": [0.67, 1.5]}},
    "lr-0.0005": {"lr": 0.0005},
    "lr-0.002": {"lr": 0.002},
    "layer-decay-1": {"layer_decay": 1.0},
    "layer-decay-0.85": {"layer_decay": 0.85},
    "weight-decay-0.01": {"weight_decay": 0.01},
    "decay-norms": {"decay_norms": True},
    "ema-0": {"ema": 0.0},
    "drop-path-0": {"drop_path_rate": 0.0},
    "drop-path-0.2": {"drop_path_rate": 0.2},
    "epochs-40": {"epochs": 40},
    "trivial-colour-0.5": {"augment": {"trivial_colour": 0.5}},
    "erasing-0.25": {"augment": {"erasing": 0.25}},
    "mixup-0.2": {"augment": {"mixup": 0.2}},
    "cutmix-1": {"augment": {"cutmix": 1.0}},
    "logit-adjustment-1": {"logit_adjustment": 1.0},
    "class-weights": {"class_weights": True},
    "balanced-sampling": {"balanced_sampling": True},
    "ccl": {"method": "ccl"},
    # Second amendment: fewer epochs, and the crops of the plain timm loop.
    "epochs-8": {"epochs": 8},
    "epochs-8-lr-0.0005": {"epochs": 8, "lr": 0.0005},
    "epochs-8-layer-decay-1": {"epochs": 8, "layer_decay": 1.0},
    "crops": CROPS,
    "crops-epochs-10": merge_layers(CROPS, {"epochs": 10}),
    "timm-recipe-epochs-10": merge_layers(CROPS, TIMM_RECIPE, {"epochs": 10}),
    # Third amendment: what of the recipe of the timm loop ranks better, and what protects longer training.
    "timm-recipe": merge_layers(CROPS, TIMM_RECIPE),
    "crops-layer-decay-1": merge_layers(CROPS, {"layer_decay": 1.0}),
    "crops-rotation-0": merge_layers(CROPS, {"augment": {"rotation": 0}}),
    "crops-mixup-0.2": merge_layers(CROPS, {"augment": {"mixup": 0.2}}),
    "crops-erasing-0.25": merge_layers(CROPS, {"augment": {"erasing": 0.25}}),
    # Fifth amendment: the adopted changes, and further in the direction of higher rates and longer training.
    "adopted": ADOPTED,
    "adopted-lr-0.002": merge_layers(ADOPTED, {"lr": 0.002}),
    "adopted-lr-0.004": merge_layers(ADOPTED, {"lr": 0.004}),
    "adopted-epochs-30": merge_layers(ADOPTED, {"epochs": 30}),
    "size-192": {"short_side": 219, "augment": {"crop": 192}},
    "size-288": {"short_side": 329, "augment": {"crop": 288}},
}  # fmt: skip

# Fourth amendment: a screening design. Each setting has its value of preset finetune in 8 of 16 runs and this change in
# the other 8. The first four vary fully; the others are products of them (a fraction 2^(9-5)).
SCREENED: dict[str, tuple[str, dict[str, Any]]] = {
    "orientations": ("a", {"augment": {"rotation": 0, "transpose": 0.5}}),
    "resized-crop": ("b", {"augment": {"zoom": "none", "resized_crop": [0.4, 1.0]}}),
    "lr-0.0003": ("c", {"lr": 0.0003}),
    "epochs-12": ("d", {"epochs": 12}),
    "mixup-0.2": ("abc", {"augment": {"mixup": 0.2}}),
    "logit-adjustment": ("abd", {"logit_adjustment": 1.0}),
    "colour-0.4": ("acd", {"augment": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4}}),
    "ema-0": ("bcd", {"ema": 0.0}),
    "warp-0.5": ("abcd", {"augment": {"warp": 0.5}}),
}

CROP = "crop"  # as a short side: that of the crop, so that a central crop shows the image over its whole short side
WHOLE_SIDE = {"short_side": CROP}
# Sixth amendment: changes of the presets as they are since the first screening. A fraction 2^(8-4): main effects are
# free of interactions of two.
SECOND: dict[str, tuple[str, dict[str, Any]]] = {
    "lr-0.002": ("a", {"lr": 0.002}),
    "whole-side": ("b", WHOLE_SIDE),
    "cutmix-0.5": ("c", {"augment": {"cutmix": 0.5}}),
    "dropout-0.4": ("d", {"drop_rate": 0.4, "drop_path_rate": 0.3}),
    "weight-decay-0.2": ("abc", {"weight_decay": 0.2}),
    "layer-decay-1": ("abd", {"layer_decay": 1.0}),
    "erasing-0.25": ("acd", {"augment": {"erasing": 0.25}}),
    "trivial-colour-0.5": ("bcd", {"augment": {"trivial_colour": 0.5}}),
}
# Seventh amendment: preset quick as it was, and with what the first screening adopted for finetune; 96 pixels.
QUICK_BEFORE = {"short_side": 110, "prior_bias": False, "augment": {"crop": 96, "warp": 1.0}}
QUICK: dict[str, dict[str, Any]] = {
    "quick": QUICK_BEFORE,
    "quick-warp-prior": merge_layers(QUICK_BEFORE, {"prior_bias": True, "augment": {"warp": 0.5}}),
    "quick-prior": merge_layers(QUICK_BEFORE, {"prior_bias": True}),
}  # fmt: skip
DESIGNS = {"first": ("screen", SCREENED), "second": ("second", SECOND)}
APTOS_TUNE: dict[str, dict[str, Any]] = {
    "start": {}, "whole-side": WHOLE_SIDE, "ordinal": {"method": "ordinal"},
    "whole-side-ordinal": {**WHOLE_SIDE, "method": "ordinal"},
}  # fmt: skip


def screening_runs(design: str = "first") -> Iterator[tuple[str, tuple[str, ...]]]:
    """The name of each run of a screening design, and the settings that are changed in it.

    >>> next(screening_runs())
    ('screen-0000', ())
    """
    prefix, factors = DESIGNS[design]
    for levels in product((False, True), repeat=4):
        of_letter = dict(zip("abcd", levels, strict=True))
        # The product of the signs, such that nothing is changed in the first run.
        changed = [name for name, (letters, _) in factors.items() if sum(map(of_letter.get, letters)) % 2]
        yield f"{prefix}-" + "".join(str(int(level)) for level in levels), tuple(changed)


@dataclass(frozen=True)
class Run:
    """A cell of the study: what differs from its preset."""

    study: str
    model: str  # row of the table
    preset: str = "finetune"
    backbone: str = "tf_efficientnet_lite0"
    fold: int | None = None
    seed: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        fold = "" if self.fold is None else f"-fold{self.fold}"
        return f"{self.study}-{self.model}{fold}-seed{self.seed}"

    def cell(self, data: Mapping[str, str], weights: Path | None, smoke: bool) -> Cell:
        split: dict[str, Any] = {"by": "group", "folds": FOLDS, "fold": self.fold}
        split = {"by": "given"} if self.fold is None else split
        if smoke:
            split = {"by": "class", "val": 0.2} if self.fold is None else split | {"by": "class", "folds": 2}
        from_weights = {} if self.preset == "paper" else start_settings(self.backbone, weights)
        values = merge_layers(
            read_settings(preset_file(self.preset)), from_weights,
            {"data": data.get(self.study, ""), "seed": self.seed, "split": split, "tta": "none",
             **table_options(self.study, data)},
            {} if self.study == "tune" else {"validate_every": VALIDATE_EVERY}, self.changes, SMOKE if smoke else {},
        )  # fmt: skip
        if values.get("short_side") == CROP:
            values["short_side"] = values["augment"]["crop"]
        keys = {"study": self.study, "model": self.model, "fold": self.fold, "seed": self.seed}
        ignored = (*IGNORED_SETTINGS, "data", "image_folder", "weights")
        return Cell(self.name, make_settings(values), keys, ignored_settings=ignored)


def start_settings(backbone: str, weights: Path | None) -> dict[str, Any]:
    file = None if weights is None else weights / f"{backbone}.safetensors"
    if file is not None and not file.is_file():
        raise InputError(f"there is no file {file}.")
    start = {"weights": str(file), "pretrained": False} if file else {"pretrained": True}
    return merge_layers(input_settings(backbone, SIZES.get(backbone)), {"backbone": backbone, **start})


def runs_of(study: str, folds: int = FOLDS) -> Iterator[Run]:
    """The runs of a study, in the order in which they are worth most."""
    lite4, lite2 = BEST | {"backbone": "tf_efficientnet_lite4"}, BEST | {"backbone": "tf_efficientnet_lite2"}
    if study == "tune":
        for name, changes in {**TUNE, **_screened("first")}.items():
            yield Run("tune", name, changes=merge_layers(TUNED_FROM, changes))
        for name, changes in _screened("second").items():
            yield Run("tune", name, changes=changes)
        for seed in (0, 1, 2):
            yield from (Run("tune", name, "quick", seed=seed, changes=changes) for name, changes in QUICK.items())
    elif study == "aptos-tune":
        for seed in (0, 1):
            yield from (Run("aptos-tune", name, seed=seed, changes=changes) for name, changes in APTOS_TUNE.items())
    elif study == "brain":
        yield from (Run("brain", "lite0", seed=seed) for seed in (0, 1, 2))
    elif study == "aptos":
        for seed in (0, 1):
            yield from (Run("aptos", "lite0", fold=fold, seed=seed) for fold in range(folds))
            yield from (Run("aptos", "lite2", fold=fold, seed=seed, **lite2) for fold in range(folds))
    else:
        models: dict[str, Any] = {"lite4": lite4, "lite2": lite2, "lite0": {}}
        # The first fold of every model first, so that the compiler cache is filled for the others.
        yield from (Run("isic", model, fold=0, **options) for model, options in models.items())
        for model, options in models.items():
            yield from (Run("isic", model, fold=fold, **options) for fold in range(1, folds))
        for seed in (1, 2):
            yield from (Run("isic", "lite4", fold=fold, seed=seed, **lite4) for fold in range(folds))
        yield from (Run("isic", "paper", preset="paper", fold=fold) for fold in range(folds))


def _screened(design: str) -> dict[str, dict[str, Any]]:
    """The changes of each run of a screening design."""
    factors = DESIGNS[design][1]
    return {name: merge_layers(*(factors[own][1] for own in changed)) for name, changed in screening_runs(design)}


def table_options(study: str, data: Mapping[str, str]) -> dict[str, Any]:
    """Data options of the table that ``write_study_table`` writes."""
    if f"{study}-images" not in data:
        return {}
    split = {"split_column": "split"} if study.endswith("tune") else {}
    return {"image_folder": data[f"{study}-images"], "label_column": "label", "group_column": "group", **split}


def write_study_table(study: str, data: str, path: Path) -> dict[str, str]:
    """Write the table of a study, and return the data it gives.

    Images without a group are grouped with those whose files have the same bytes, so that copies stay in one fold. The
    table for tuning has the training part of fold 0, split again by group: no image of fold 0 is in it, so no choice
    has seen them.
    """
    table = open_data(data)
    if isinstance(table.images, np.ndarray):
        raise InputError("tuning needs image files.")
    if table.groups is None:
        digests = [hashlib.blake2b(Path(image).read_bytes()).hexdigest() for image in table.images]
        table = replace(table, groups=np.unique(digests, return_inverse=True)[1].astype(str))
    split = {}
    if study.endswith("tune"):
        outer = make_split(table, SplitSettings(by="group", folds=FOLDS, fold=0))
        table = table.select(np.flatnonzero(outer == "train"))
        split = {"split": make_split(table, SplitSettings(by="group", val=0.25)).tolist()}
    assert table.groups is not None
    folder = Path(table.images[0]).parent
    if any(Path(image).parent != folder for image in table.images):
        raise InputError(f"the study needs all images in one folder; {folder} is not the only one.")
    names = [Path(image).name for image in table.images]
    columns = {"image": names, "label": table.label_names(), "group": table.groups.tolist(), **split}
    make_folder(path.parent)
    write_whole(path, pd.DataFrame(columns).to_csv(index=False, lineterminator="\n"))
    return {study: str(path), f"{study}-images": str(folder)}


def run(options: argparse.Namespace, console: Console) -> SweepSummary:
    began, data = time.time(), dict(pair.split("=", 1) for pair in options.data)
    for study, source in (("tune", "isic"), ("aptos-tune", "aptos"), ("aptos", "aptos")):
        if study in options.studies and not options.smoke:
            data |= write_study_table(study, data[source], options.out / f"{study}.csv")
    wanted = [own for study in options.studies for own in runs_of(study, 2 if options.smoke else FOLDS)]
    if options.changes:
        adopted = read_json(options.changes)["adopted"]
        wanted = [replace(own, changes=merge_layers(adopted.get(own.study, {}), own.changes)) for own in wanted]
    if options.tune_size:
        small = {"short_side": round(options.tune_size / 0.875), "augment": {"crop": options.tune_size}}
        wanted = [replace(own, changes=merge_layers(small, own.changes)) for own in wanted if own.study == "tune"]
    cells = [own.cell(data, options.weights, options.smoke) for own in wanted]
    words = [word for word in options.only.split(",") if word]
    cells = [cell for cell in cells if not words or any(word in cell.name for word in words)]
    if options.compile:
        cells = [replace(cell, settings=replace(cell.settings, compile=True)) for cell in cells]
    sweep = SweepOptions(
        out=options.out, results=options.results, max_minutes=options.max_minutes, parallel=options.parallel,
        shard=parse_shard(options.shard), accelerator=options.accelerator, cache_dir=options.cache_dir,
        stall_minutes=options.stall_minutes,
    )  # fmt: skip
    if options.tta:
        predict_again(cells, sweep.context(began), console)
        return SweepSummary()
    for settings in _distinct_inputs(cells):  # once, before several processes need the same images
        table = open_data(settings.data, settings)
        if not isinstance(table.images, np.ndarray):
            decode(table, settings.short_side, cache_dir=options.cache_dir)
    requested = {"studies": options.studies, "parallel": options.parallel}
    summary = run_sweep(cells, sweep, requested, console, began)
    console.print(summary.text(), highlight=False, markup=False)
    return summary


def predict_again(cells: Sequence[Cell], context: SweepContext, console: Console) -> None:
    """Let the finished runs of the cells predict with test-time augmentation, and keep that beside their results."""
    for cell in cells:
        result, run = context.result(cell), context.run_folder(cell)
        kept = tta_path(result)
        if not result.exists() or not run.weights.exists() or predictions_path(kept).exists():
            continue
        began = time.monotonic()
        settings = replace(run.read_settings(), cache_dir=str(context.cache_dir) if context.cache_dir else "")
        fabric = make_fabric(settings, accelerator=context.accelerator)
        data = prepare_data(settings, run, fabric, progress=False)
        network = make_network(settings, data, resumed=True)
        network.classifier.shipped.load_state_dict(load_file(run.weights))
        classifier = network.classifier.to(fabric.device, memory_format=torch.channels_last)
        mean, std = (torch.tensor(own, device=fabric.device) for own in (settings.input_mean, settings.input_std))
        rows = np.flatnonzero(data.splits != "train")
        logits = Tester(settings, data, rows, fabric, mean, std, TTA_VIEWS).logits(classifier)
        make_folder(kept.parent)
        write_kept_predictions(kept, predictions(data, rows, logits))
        console.print(f"{cell.name}: predicted with {TTA_VIEWS}, {time.monotonic() - began:.1f} s", highlight=False)


def tta_path(result: Path) -> Path:
    """Beside what the predictions with test-time augmentation of a result are kept."""
    return result.parent / "tta" / result.name


def with_tta(results: Sequence[KeptResult]) -> list[KeptResult]:
    """The results, and those of the same runs with test-time augmentation as results of a model NAME-tta."""
    augmented = [
        replace(result, path=tta_path(result.path), keys={**result.keys, "model": f"{result.keys['model']}-tta"})
        for result in results
        if predictions_path(tta_path(result.path)).exists()
    ]
    return [*results, *augmented]


def _distinct_inputs(cells: Sequence[Cell]) -> list[Settings]:
    return list({(cell.settings.data, cell.settings.short_side): cell.settings for cell in cells}.values())


def pooled(results: Sequence[KeptResult]) -> Predictions:
    """The predictions of all folds as one set, every image once; of one fold the mean over its runs (seeds or
    backbones)."""
    by_fold: dict[Any, list[Predictions]] = {}
    for result in results:
        by_fold.setdefault(result.keys["fold"], []).append(_reported(result))
    folds = []
    for members in by_fold.values():
        first = members[0]
        if any(not np.array_equal(first.images, other.images) for other in members):
            raise InputError("runs of one fold predict different images.")
        folds.append(replace(first, probabilities=np.mean([member.probabilities for member in members], axis=0)))
    return joined(folds)


def joined(folds: Sequence[Predictions]) -> Predictions:
    """The predictions of all folds as one set; an image in two folds is an error."""
    groups = None if folds[0].groups is None else np.concatenate([fold.groups for fold in folds])  # type: ignore[misc]
    whole = Predictions(
        np.concatenate([fold.images for fold in folds]), np.concatenate([fold.labels for fold in folds]),
        np.concatenate([fold.probabilities for fold in folds]), folds[0].classes, groups,
        np.concatenate([fold.splits for fold in folds]),  # type: ignore[misc]
    )  # fmt: skip
    if len(set(whole.images.tolist())) != len(whole.images):
        raise InputError("an image is in two folds.")
    return whole


def _reported(result: KeptResult) -> Predictions:
    """The predictions of the split that is reported: test where the data has one, else val."""
    found = result.read_predictions()
    splits = set() if found.splits is None else set(found.splits.tolist())
    return found.of_split("test" if "test" in splits else "val") if splits else found


@dataclass(frozen=True)
class Row:
    """A row of the table: predictions of all of its runs together, and where they come from."""

    name: str
    predictions: Predictions
    runs: Sequence[str]
    class_counts: Sequence[int]  # of the training split
    seconds: float
    device: str
    commit: Any
    versions: Mapping[str, str]
    model: ModelDescription | None = None  # of one run, for the class frequencies


def study_rows(results: Sequence[KeptResult]) -> Iterator[Row]:
    for name, own in rows_of(results).items():
        first, runs = own[0], sorted(result.name for result in own)
        seconds = sum(result.seconds for result in own)
        commit = first.to_json()["commit"]
        versions = dict(first.versions)
        yield Row(name, pooled(own), runs, first.class_counts, seconds, first.device, commit, versions, first.model)


def timm_rows(folder: Path) -> Iterator[Row]:
    """A row for each model that ``benchmarks/timm_loop.py`` has fine-tuned, one folder per fold."""
    by_model: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*/timm_loop.json")):
        by_model.setdefault(read_json(file)["model"], []).append(file)
    for model, files in by_model.items():
        facts = [read_json(file) for file in files]
        whole = joined([read_predictions(file.with_name("predictions.csv")) for file in files])
        seconds, runs = sum(fact["seconds"] for fact in facts), [file.parent.name for file in files]
        first = facts[0]
        counts, crop = first["class_counts"], (first["size"], first["size"])
        # For the balanced rule on calibrated probabilities, which takes the class frequencies from here.
        described = ModelDescription(
            model, whole.classes, False, min(crop), crop, (0.5,) * 3, (0.5,) * 3, class_counts=tuple(counts)
        )
        yield Row(f"isic {model}, plain timm loop", whole, runs, counts, seconds, first["device"], first["commit"],
                  first["versions"], described)  # fmt: skip


def on_the_images_of(row: Row, other: Row, suffix: str = ", the images of the timm loop") -> Row:
    """The part of a row that another one predicts too, for a comparison on equal terms."""
    chosen = np.flatnonzero(np.isin(row.predictions.images, other.predictions.images))
    return replace(row, name=row.name + suffix, predictions=row.predictions.select(chosen))


def rows_before(own: Sequence[Row], before: Path | None) -> list[Row]:
    """The rows of earlier results with the names of ``own`` rows, on the same images; none where these have other names
    (APTOS 2019 was read from another table)."""
    if before is None:
        return []
    earlier = {row.name: row for row in study_rows(with_tta(read_results(before)))}
    same = [on_the_images_of(earlier[row.name], row, BEFORE) for row in own if row.name in earlier]
    return [row for row in same if len(row.predictions)]


def all_networks(results: Path, before: Path | None) -> list[Row]:
    """The ensemble of all members of ISIC 2018, those of earlier results included: what more networks add."""
    folders = () if before is None else (results, before)
    kept = [own for folder in folders for own in with_tta(read_results(folder))]
    members = [own for own in kept if own.keys["study"] == "isic" and own.keys["model"] in MEMBERS["isic"]]
    if len({str(own.path.parent.parent) for own in members}) < 2:
        return []
    runs = sorted({f"{own.name} ({own.path.parent.parent.name})" for own in members})
    first = next(study_rows(members))
    row = replace(first, name="isic all networks with mirrored views, now and as they were, ensemble", runs=runs)
    return [replace(row, predictions=pooled(members), seconds=sum(own.seconds for own in members))]


def score(row: Row, scratch: Path) -> dict[str, Any]:
    """The scores of a row with 95% intervals over groups."""
    folder = RunFolder(scratch / row.name.replace(" ", "-"))
    make_folder(folder.path)
    folder.write_predictions(row.predictions)
    if row.model is not None:
        folder.write_description(row.model)
    scores = evaluate(folder.path)
    rules = () if scores.decisions is None else scores.decisions.rules
    overall = {metric: {"value": e.value, "low": e.low, "high": e.high} for metric, e in scores.overall.items()}
    p, y = row.predictions.probabilities, row.predictions.labels
    grades = np.arange(p.shape[1])
    return {
        "name": row.name, "images": len(y), "runs": list(row.runs), "overall": overall,
        "balanced_rule": balanced_rule(row),
        "calibrated_rules": {
            rule.rule: {name: {"value": e.value, "low": e.low, "high": e.high} for name, e in rule.scores.items()}
            for rule in rules
        },
        "temperature": scores.calibration.temperature.value,
        "expected_grade_kappa": quadratic_kappa(y, np.rint(p @ grades)),
        "calibrated_grade_kappa": quadratic_kappa(y, np.rint(cross_fitted(row.predictions) @ grades)),
        "minutes": round(row.seconds / 60, 2), "device": row.device, "commit": row.commit,
        "versions": dict(row.versions),
    }  # fmt: skip


def balanced_rule(row: Row) -> dict[str, dict[str, float]]:
    """Accuracy and balanced accuracy of the class with the largest probability divided by its class frequency, with
    95% intervals over groups."""
    p, y = row.predictions.probabilities, row.predictions.labels
    chosen = (p / np.maximum(np.array(row.class_counts, dtype=np.float64), 1)).argmax(axis=1)
    classes = np.unique(y)
    shown = (y[:, None] == classes).astype(np.float64)
    right = shown * (chosen == y)[:, None]

    def scores(totals: Any) -> dict[str, Any]:
        correct, count = np.split(totals, 2, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):  # a draw without a class leaves it out
            recalls = correct / count
        return {"accuracy": correct.sum(1) / count.sum(1), "balanced_accuracy": np.nanmean(recalls, axis=1)}

    features = np.hstack([right, shown])
    value = scores(features.sum(axis=0, keepdims=True))
    statistic = Statistic(sparse.csr_array(features), scores)
    draws = bootstrap([statistic], units_of(row.predictions), DRAWS, seed=0)[0]
    return {
        name: {
            "value": float(value[name][0]), "low": float(np.quantile(own, 0.025)),
            "high": float(np.quantile(own, 0.975)),
        } for name, own in draws.items()
    }  # fmt: skip


def quadratic_kappa(labels: Any, grades: Any) -> float:
    """Cohen's kappa with quadratic weights."""
    from sklearn.metrics import cohen_kappa_score

    return float(cohen_kappa_score(labels, grades.astype(int), weights="quadratic"))


def rows_of(results: Sequence[KeptResult]) -> dict[str, list[KeptResult]]:
    """The rows of the table: each model with seed 0; its seeds together; all models of a data set."""
    rows: dict[str, list[KeptResult]] = {}
    found = {(result.keys["study"], result.keys["model"]) for result in results}
    for result in results:
        study, model, seed = (result.keys[key] for key in ("study", "model", "seed"))
        if seed == 0:
            rows.setdefault(f"{study} {model}", []).append(result)
        if study != "tune":
            rows.setdefault(f"{study} {model}, ensemble of seeds", []).append(result)
        if model in MEMBERS.get(study, ()) and seed == 0:
            names = " + ".join(member for member in MEMBERS[study] if (study, member) in found)
            rows.setdefault(f"{study} {names}, ensemble", []).append(result)
    return {name: own for name, own in rows.items() if "ensemble" not in name or len(own) > _folds(own)}


def _folds(results: Sequence[KeptResult]) -> int:
    return len({result.keys["fold"] for result in results})


def write_tables(results: Path, timm_loops: Path, scratch: Path, before: Path | None = None) -> Path:
    """Write scores.json and scores.md of all results, and return the page. Rows of the same names in ``before`` are
    shown on the same images."""
    own, loops = list(study_rows(with_tta(read_results(results)))), list(timm_rows(timm_loops))
    same = [on_the_images_of(row, loop) for loop in loops for row in own if row.name == "isic lite0"]
    same = [row for row in same if len(row.predictions) < max(len(other.predictions) for other in own)]
    rows = [
        score(row, scratch) for row in (*own, *rows_before(own, before), *all_networks(results, before), *same, *loops)
    ]
    if not rows:
        raise InputError(f"{results} has no results yet.")
    write_json(results / "scores.json", {"rows": rows, **origin(rows[0]["device"])})
    lines = [
        "Out-of-fold: every image is predicted once, by a run that was not trained on its group; brain MRI: the",
        "given test split. 95% intervals over groups. The balanced rule divides the probabilities by the class",
        "frequencies of the training split, before or after temperature scaling. Minutes are those of training, all",
        "runs of the row together; several runs shared the GPU.", "",
        "| row | images | balanced accuracy, balanced rule | the same, calibrated | accuracy | macro AUROC | "
        "quadratic kappa | the same, calibrated | minutes |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for row in sorted(rows, key=_table_order):
        auc = row["overall"].get("macro_auroc") or row["overall"].get("auroc_macro")
        kappas = [row["expected_grade_kappa"], row["calibrated_grade_kappa"]]
        kappa = " | ".join(f"{own:.3f}" if row["name"].startswith("aptos") else "" for own in kappas)
        lines.append(
            f"| {title(row['name'])} | {row['images']:,} | {_interval(row['balanced_rule']['balanced_accuracy'])} | "
            f"{_interval(row['calibrated_rules'].get('balanced', {}).get('balanced_accuracy'))} | "
            f"{_interval(row['overall']['accuracy'])} | {_interval(auc)} | {kappa} | {row['minutes']:.1f} |"
        )
    page = results / "scores.md"
    write_whole(page, "\n".join(lines) + "\n")
    return page


MEASURES = {"log_loss": "log loss", "balanced_accuracy": "balanced accuracy, balanced rule", "accuracy": "accuracy",
            "macro_auroc": "macro AUROC"}  # fmt: skip


def screened_scores(result: KeptResult, adjusted: bool = False) -> dict[str, float]:
    """Scores of a screening run after calibration; ``adjusted`` if it was trained with logit adjustment."""
    own, p = cross_calibrated(result, adjusted)
    prior = np.array(result.class_counts, dtype=np.float64) / sum(result.class_counts)
    y, size = own.labels, p.shape[1]
    chosen = (p / prior).argmax(axis=1)
    return {
        "log_loss": float(-np.log(p[np.arange(len(y)), y]).mean()),
        "balanced_accuracy": float(np.mean([(chosen[y == k] == k).mean() for k in range(size)])),
        "accuracy": float((p.argmax(axis=1) == y).mean()),
        "macro_auroc": float(np.mean([roc_auc_score(y == k, p[:, k]) for k in range(size)])),
    }


def cross_calibrated(result: KeptResult, adjusted: bool = False) -> tuple[Predictions, npt.NDArray[np.float64]]:
    """The reported predictions of a run, and their probabilities after calibration by a temperature and class offsets,
    cross-fitted over five folds of the groups. The class frequencies are added to what was trained with logit
    adjustment."""
    own = _reported(result)
    if adjusted:
        prior = np.array(result.class_counts, dtype=np.float64) / sum(result.class_counts)
        weighted = own.probabilities * prior
        own = replace(own, probabilities=weighted / weighted.sum(axis=1, keepdims=True))
    return own, cross_fitted(own)


def cross_fitted(own: Predictions) -> npt.NDArray[np.float64]:
    """Probabilities calibrated on the other four folds; as predicted where no temperature can be fitted."""
    units = units_of(own)
    fold = (np.random.default_rng(0).permutation(units.count) % FOLDS)[units.index]
    p = np.zeros_like(own.probabilities)
    for k in range(FOLDS):
        fitted = fit_offsets(own.select(np.flatnonzero(fold != k)))
        held_out = own.select(np.flatnonzero(fold == k))
        p[fold == k] = (held_out if fitted is None else calibrated(held_out, fitted)).probabilities
    return p


def main_effects(kept: Mapping[str, KeptResult], design: str) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """The scores of every run of a screening design, and the main effect of every changed setting."""
    runs = dict(screening_runs(design))
    if missing := [name for name in runs if name not in kept]:
        raise InputError(f"{len(missing)} screening runs are missing, such as {missing[0]}.")
    scores = {name: screened_scores(kept[name], "logit-adjustment" in changed) for name, changed in runs.items()}
    effects = {
        setting: {
            measure: float(
                np.mean([scores[name][measure] for name, changed in runs.items() if setting in changed])
                - np.mean([scores[name][measure] for name, changed in runs.items() if setting not in changed])
            )
            for measure in MEASURES
        }
        for setting in DESIGNS[design][1]
    }
    return {name: {"changed": list(changed), **scores[name]} for name, changed in runs.items()}, effects


def write_screening(results: Path, design: str) -> Path:
    """Write screening.json and screening.md of the first design, or second_screening.* and adopted.json of the second:
    the scores of the runs, and the main effect of every changed setting."""
    kept = {result.keys["model"]: result for result in read_results(results) if result.keys["study"] == "tune"}
    runs, effects = main_effects(kept, design)
    first = kept[next(iter(runs))]
    facts = {"images": len(_reported(first).labels), "device": first.device, "versions": dict(first.versions),
             "commit": first.to_json()["commit"]}  # fmt: skip
    name = "screening" if design == "first" else f"{design}_screening"
    write_json(results / f"{name}.json", {"runs": runs, "effects": effects, **facts})
    lines = [
        "Main effects: mean of the eight runs with the change minus mean of the eight without, in points but for the",
        "log loss. All scores after calibration by a temperature and class offsets, cross-fitted over five folds.", "",
        f"| change | {' | '.join(MEASURES.values())} |", "|---" + "|--:" * len(MEASURES) + "|",
        *(
            f"| {setting} | {own['log_loss']:+.4f} | "
            + " | ".join(f"{100 * own[measure]:+.1f}" for measure in list(MEASURES)[1:]) + " |"
            for setting, own in effects.items()
        ),
    ]  # fmt: skip
    if design == "second":
        write_adopted(results, effects, facts)
    page = results / f"{name}.md"
    write_whole(page, "\n".join(lines) + "\n")
    return page


def write_adopted(results: Path, effects: Mapping[str, Mapping[str, float]], facts: Mapping[str, Any]) -> None:
    """Write adopted.json: the changes that the rule of the sixth amendment adopts, by study, for ``--changes``."""
    better = [name for name, own in effects.items() if own["log_loss"] < -0.004 and own["balanced_accuracy"] > -0.005]
    # APTOS 2019 chooses its own view of the image; all else is as for ISIC 2018.
    for_isic = merge_layers(*(SECOND[name][1] for name in better))
    for_aptos = merge_layers(*(SECOND[name][1] for name in better if name != "whole-side"))
    kappas: dict[str, list[float]] = {name: [] for name in APTOS_TUNE}
    for result in read_results(results):
        if result.keys["study"] == "aptos-tune":
            own, p = cross_calibrated(result)
            kappas[result.keys["model"]].append(quadratic_kappa(own.labels, np.rint(p @ np.arange(p.shape[1]))))
    mean = {name: float(np.mean(own)) for name, own in kappas.items() if own}
    aptos_effects: dict[str, float] = {}
    if len(mean) == len(APTOS_TUNE):
        both, view, ordinal, start = (mean[n] for n in ("whole-side-ordinal", "whole-side", "ordinal", "start"))
        aptos_effects = {"whole-side": (both + view - ordinal - start) / 2,
                         "ordinal": (both + ordinal - view - start) / 2}  # fmt: skip
        chosen = [name for name, effect in aptos_effects.items() if effect > 0.005]
        for_aptos = merge_layers(for_aptos, *(APTOS_TUNE[name] for name in chosen))
    write_json(results / "adopted.json", {
        "adopted": {"isic": for_isic, "brain": for_isic, "aptos": for_aptos}, "from_isic": better,
        "aptos_quadratic_kappa": kappas, "aptos_effects": aptos_effects, **facts,
    })  # fmt: skip


TITLES = {
    "isic": "ISIC 2018:", "aptos": "APTOS 2019:", "aptos-tune": "APTOS 2019, tuning:", "brain": "brain MRI:",
    "tune": "tuning:",
    "lite4": "Lite4 at 300 px", "lite2": "Lite2 at 260 px", "lite0": "Lite0 at 224 px",
    "lite4-tta": "Lite4 at 300 px, mirrored views", "lite2-tta": "Lite2 at 260 px, mirrored views",
    "lite0-tta": "Lite0 at 224 px, mirrored views", "paper": "ResNet-18 from scratch, preset paper",
    "tf_efficientnet_lite0": "Lite0 at 224 px",
}  # fmt: skip


def title(name: str) -> str:
    """The name of a row for people.

    >>> title("isic lite4-tta + lite0-tta, ensemble")
    'ISIC 2018: Lite4 at 300 px, mirrored views + Lite0 at 224 px, mirrored views, ensemble'
    """
    return re.sub(r"[\w-]+", lambda word: TITLES.get(word[0], word[0]), name)


def _table_order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """By data set, the rows with fewer images of a comparison last, then the best first."""
    partial = "timm loop" in row["name"]
    return -STUDIES.index(row["name"].split()[0]), partial, -row["balanced_rule"]["balanced_accuracy"]["value"]


def _interval(estimate: Mapping[str, float | None] | None) -> str:
    if estimate is None or estimate["value"] is None:
        return ""
    return f"{estimate['value']:.3f} ({estimate['low']:.3f} to {estimate['high']:.3f})"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", help=", ".join(STUDIES))
    parser.add_argument("--data", action="append", default=[], help="STUDY=PATH, several times")
    parser.add_argument("--weights", type=Path, help="folder of NAME.safetensors")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
    parser.add_argument("--results", type=Path, help="default: OUT/results")
    parser.add_argument("--timm", type=Path, default=Path("runs/timm"), help="folders of benchmarks/timm_loop.py")
    parser.add_argument("--only", default="", help="cells whose name has one of these words, separated by commas")
    parser.add_argument("--parallel", type=int, default=1, help="cells trained at once")
    parser.add_argument("--shard", default="1/1")
    parser.add_argument("--max-minutes", type=float, default=0.0)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--stall-minutes", type=float, default=10.0)
    parser.add_argument("--compile", action="store_true", help="for many runs of one backbone, also if each is short")
    parser.add_argument("--tta", action="store_true", help="predict again with test-time augmentation")
    parser.add_argument("--tune-size", type=int, default=0, help="size of the images of tune, for a CPU")
    parser.add_argument("--smoke", action="store_true", help="tiny settings on synthetic images")
    parser.add_argument("--tables-only", action="store_true")
    parser.add_argument("--before", type=Path, help="earlier results, for rows of the same images")
    parser.add_argument("--screening", choices=list(DESIGNS), help="write the main effects of the screening runs")
    parser.add_argument("--changes", type=Path, help="adopted.json of the second screening")
    parser.add_argument("--no-tables", action="store_true", help="train only")
    options = parser.parse_args(words)
    options.results = options.results or options.out / "results"
    if odd := set(options.studies) - set(STUDIES):
        parser.error(f"unknown: {', '.join(sorted(odd))}; known: {', '.join(STUDIES)}")
    return options


def main(words: Sequence[str] | None = None) -> int:
    options, console, failed = arguments(words), Console(), False
    try:
        if options.screening:
            console.print(f"effects: {write_screening(options.results, options.screening)}", highlight=False)
            return 0
        if not options.tables_only:
            failed = bool(run(options, console).failed)
        if not options.no_tables:
            page = write_tables(options.results, options.timm, options.out / "pooled", options.before)
            console.print(f"tables: {page}", highlight=False)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
