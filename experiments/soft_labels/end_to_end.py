"""The regimes of the study with whole networks: fine-tuned from ImageNet weights at 224 pixels (finetune) or at 128
pixels (small), and from scratch (scratch, scratch-small). Needs a GPU.

python experiments/soft_labels/end_to_end.py --training small --data-root FOLDER --weights FOLDER --parallel 8
python experiments/soft_labels/end_to_end.py --tables-only --out runs/soft_labels_whole

FOLDER of --data-root has isic2018/ and aptos/, each with its images and CSV files. Several networks are trained at
once. Cells that have a result are skipped, so the same command continues after an interruption. The folder --results
has all that the tables need. They are written to --tables; OUT/cells/TRAINING has the same predictions as cells for
`bench.py tables`.

The noise, the seeds and the split of ISIC 2018 are those of bench.py. The mean prediction, by which the prior is
divided out, is that of the test images (their labels are not used). A method may be followed by settings of it or of
the run, as in `ccl-forward:sharpen=1:epochs=8`. `--tuning` divides the training images again, and leaves out those of
the test. `--smoke` trains tiny networks on a few images, to see that everything works.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from rich.console import Console

import bench
from bench_tables import BALANCED, COLUMNS, DATA_TITLES, OURS, TITLES, study
from cclnet.data.cache import decode
from cclnet.data.sources import open_data
from cclnet.data.split import make_split
from cclnet.errors import InputError
from cclnet.files import make_folder, write_json, write_whole
from cclnet.presets import preset_file
from cclnet.pretrained import input_settings, pretrained_config
from cclnet.runs.kept_result import KeptResult
from cclnet.runs.provenance import origin
from cclnet.settings import Settings, make_settings, merge_layers, read_settings
from cclnet.sweep.cells import IGNORED_SETTINGS, Cell, SweepOptions, SweepSummary
from cclnet.sweep.executors import run_sweep
from cclnet.sweep.results import read_results
from cclnet.training import setup
from noisy_tasks import CLASSES, Integers, chosen_groups, noise_matrix, read_labels

RATES = {"noise40": 0.4, "clean": 0.0, "noise20": 0.2}
METHODS = (
    "hard", "hard:epochs=7", "ccl-forward", "lsr:epsilon=0.23", "ols", "ccl-confusion", "ccl", "ccl-centroid",
    "ccl-forward:logit_adjustment=1", "hard:logit_adjustment=1",
)  # fmt: skip
TUNING_SEED = 101  # of the split for tuning, the same for all seeds
TRAININGS = {
    "finetune": "fine-tuned at 224 pixels", "small": "fine-tuned at 128 pixels", "scratch": "from scratch",
    "scratch-small": "from scratch at 128 pixels",
}  # fmt: skip
BACKBONE, SMALL_CROP = "tf_efficientnet_lite0", 128
SCRATCH = {"backbone": "resnet18", "pretrained": False, "epochs": 60, "drops": (0.7, 0.9), "validate_every": 10}
SCRATCH_WARMUP = 15  # epochs of ccl-forward: a quarter of all, as in the plans for frozen features
SMOKE = {"backbone": "test_resnet", "pretrained": False, "weights": "", "mean": (), "std": (), "epochs": 6,
         "short_side": 32, "batch_size": 16, "validate_every": 10, "augment": {"crop": 28},
         "layer_decay": 1.0}  # fmt: skip
SMOKE_IMAGES = 24  # per class and split
COMPILE = {"auto": None, "true": True, "false": False}
SHOWN = (BALANCED, "macro_auroc", "accuracy", "quadratic_weighted_kappa")


@cache
def read_images(data: str, folder: Path) -> tuple[list[Path], Integers, Integers]:
    """The image files of a data set, their true labels and groups; identical images of APTOS are one group."""
    images, labels, groups = read_labels(data, folder)
    files = {file.stem: file for file in sorted(folder.rglob("*")) if file.suffix in (".webp", ".jpg", ".png")}
    missing = [name for name in images if name not in files]
    if missing:
        raise InputError(f"{folder} lacks {len(missing)} images, such as {missing[0]}.")
    if data == "aptos":  # identical images are in one split
        digests = [hashlib.blake2b(files[name].read_bytes()).hexdigest() for name in images]
        groups = np.unique(digests, return_inverse=True)[1]
    return [files[name] for name in images], labels, groups


def method_settings(name: str) -> dict[str, Any]:
    """The settings that ``METHOD:key=value`` stands for. A key is a setting of the run, or else one of the method.

    >>> method_settings("lsr:epsilon=0.23:epochs=8")
    {'method': 'lsr', 'method_settings': {'epsilon': 0.23}, 'epochs': 8}
    """
    method, *pairs = name.split(":")
    values = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in pairs)}
    of_run = {field.name for field in fields(Settings)}
    own = {key: value for key, value in values.items() if key not in of_run}
    changes = {key: value for key, value in values.items() if key in of_run}
    return {"method": method, **({"method_settings": own} if own else {}), **changes}


def write_manifest(
    path: Path, data: str, root: Path, regime: str, seed: int, per_class: int | None = None, tuning: bool = False
) -> Path:
    """A CSV of the images for `cclnet train`: noisy labels in the training split, true ones in the test split. For
    tuning, the test split is another one, and the images of the reported one are not in the table."""
    files, labels, groups = read_images(data, root / data)
    reported = chosen_groups(groups)[groups]
    test = chosen_groups(groups, TUNING_SEED)[groups] if tuning else reported
    rng, matrix = np.random.default_rng((seed, round(100 * RATES[regime]), 0)), noise_matrix(data, RATES[regime])
    given = np.array(
        [k if held_out else rng.choice(len(matrix), p=matrix[k]) for k, held_out in zip(labels, test, strict=True)]
    )
    frame = pd.DataFrame({
        "image": [str(file.relative_to(root / data)) for file in files],
        "label": [CLASSES[data][k] for k in given],
        "group": groups,
        "split": np.where(test, "test", "train"),
    })  # fmt: skip
    if tuning:
        frame = frame[~reported]
    if per_class is not None:
        frame = frame.groupby(["split", "label"]).head(per_class)
    make_folder(path.parent)
    write_whole(path, frame.to_csv(index=False))
    return path


def start_settings(training: str, weights: Path | None, crop: int = SMALL_CROP) -> dict[str, Any]:
    """The preset of a training, with the input size and the normalisation of the weights it starts from. ``crop`` is
    the size of the small trainings."""
    if training.startswith("scratch"):
        size = {"short_side": round(crop / 0.875), "augment": {"crop": crop}} if training == "scratch-small" else {}
        return merge_layers(read_settings(preset_file("paper")), SCRATCH, size)
    file = None if weights is None else weights / f"{BACKBONE}.safetensors"
    if file is not None and not file.is_file():
        raise InputError(f"there is no file {file}.")
    config = pretrained_config(BACKBONE)
    start = {"weights": str(file), "pretrained": False} if file else {"pretrained": True}
    start |= {"backbone": BACKBONE, "mean": config.mean, "std": config.std}
    size = input_settings(BACKBONE, crop if training == "small" else None)
    return merge_layers(read_settings(preset_file("finetune")), size, start)


def cell_of(training: str, data: str, regime: str, method: str, seed: int, options: argparse.Namespace) -> Cell:
    """A cell of the sweep. Its data is OUT/manifests/DATA-REGIME-seedN.csv."""
    values = merge_layers(
        start_settings(training, options.weights, options.crop),
        {
            "data": str(options.out / "manifests" / f"{data}-{regime}-seed{seed}.csv"), "seed": seed,
            "image_folder": str(options.data_root / data), "compile": COMPILE[options.compile], "logger": "none",
            "tta": "none",  # what the plan compares
        },
        method_settings(method), SMOKE if options.smoke else {},
    )  # fmt: skip
    if training.startswith("scratch") and values["method"] == "ccl-forward" and not options.smoke:
        values["method_settings"] = {"warmup": SCRATCH_WARMUP} | values.get("method_settings", {})
    if training.endswith("small"):  # only the last epoch is validated
        values["validate_every"] = values["epochs"]
    keys = {"training": training, "data": data, "regime": regime, "method": method, "seed": seed}
    name = bench.Cell(data, regime, method, seed, training).path(Path()).stem
    ignored = (*IGNORED_SETTINGS, "data", "image_folder", "weights", "logger")
    return Cell(name, make_settings(values), keys, ignored_settings=ignored)


def wanted_cells(options: argparse.Namespace) -> list[Cell]:
    """All methods of a seed before the next seed, so that a sweep that runs out of time has whole seeds."""
    cells = [
        cell_of(training, data, regime, method, seed, options)
        for training in options.training for regime in options.regimes for seed in options.seeds
        for data in options.data for method in options.methods
    ]  # fmt: skip
    words = [word for word in options.only.split(",") if word]
    return [cell for cell in cells if not words or any(word in cell.name for word in words)]


def decode_inputs(cells: Sequence[Cell], cache_dir: Path | None) -> None:
    """Decode all images once, before several processes need them: for training, and for the test where that has another
    size. The cache is kept per image folder and file, so the tables of all seeds and regimes share it."""
    settings_of = [cell.settings for cell in cells]
    distinct = {(own.image_folder, own.short_side, repr(own.augment)): own for own in settings_of}
    for settings in distinct.values():
        table = open_data(settings.data, settings)
        images = decode(table, settings.short_side, cache_dir=cache_dir)
        side = setup.test_short_side(settings, setup.PreparedData(table, make_split(table, settings.split), images))
        if side != settings.short_side:
            decode(table, side, cache_dir=cache_dir)


def run(options: argparse.Namespace, console: Console) -> SweepSummary:
    began, cells = time.time(), wanted_cells(options)
    for cell in cells:
        manifest = Path(cell.settings.data)
        if not manifest.exists():
            keys, per_class = cell.keys, SMOKE_IMAGES if options.smoke else None
            write_manifest(
                manifest, keys["data"], options.data_root, keys["regime"], keys["seed"], per_class, options.tuning
            )
    decode_inputs(cells, options.cache_dir)
    sweep = SweepOptions(
        out=options.out, results=options.results, max_minutes=options.max_minutes, parallel=options.parallel,
        stall_minutes=options.stall_minutes, accelerator=options.accelerator, cache_dir=options.cache_dir,
    )  # fmt: skip
    names = ("training", "data", "regimes", "methods", "seeds", "parallel", "compile")
    summary = run_sweep(cells, sweep, {name: getattr(options, name) for name in names}, console, began)
    console.print(summary.text(), highlight=False, markup=False)
    return summary


def write_cell(result: KeptResult, folder: Path) -> Path:
    """Write the test predictions of a kept result as a cell of bench.py."""
    keys = result.keys
    cell = bench.Cell(keys["data"], keys["regime"], keys["method"], keys["seed"], keys["training"])
    own = result.read_predictions().of_split("test")
    order = [own.classes.index(name) for name in CLASSES[cell.data]]
    probabilities = own.probabilities[:, order] / own.probabilities.sum(axis=1, keepdims=True)
    make_folder(folder)
    path = cell.path(folder)
    np.savez_compressed(
        path,
        probabilities=probabilities.astype(np.float32),
        train_mean=probabilities.mean(axis=0),
        labels=np.array([order.index(k) for k in own.labels]),
        groups=np.zeros(len(own), np.str_) if own.groups is None else own.groups,
        images=np.array([Path(name).stem for name in own.images]),
        matrix=_matrix(result, order),
        about=json.dumps({
            "data": cell.data, "regime": cell.regime, "method": cell.method, "seed": cell.seed,
            "backbone": cell.backbone, "seconds": 0.0, "commit": getattr(result.commit, "sha", None),
            "versions": dict(result.versions), "device": result.device or "unknown",
        }),
    )  # fmt: skip
    return path


def _matrix(result: KeptResult, order: Sequence[int]) -> npt.NDArray[np.float64]:
    """The soft labels with the classes in the given order; empty where none were learned."""
    return np.zeros((0, 0)) if result.soft_labels is None else np.array(result.soft_labels)[np.ix_(order, order)]


def write_tables(results: Path, cells: Path, tables: Path) -> Path:
    """Write the cells of all kept results, then whole_networks.json and whole_networks.md; returns the page."""
    by_training: dict[str, list[KeptResult]] = {}
    for result in read_results(results):
        by_training.setdefault(result.keys["training"], []).append(result)
    if not by_training:
        raise InputError(f"{results} has no results yet.")
    found: list[dict[str, Any]] = []
    for training, kept in by_training.items():
        for path in (cells / training).glob("*.npz"):  # of results that may be gone
            path.unlink()
        for result in kept:
            write_cell(result, cells / training)
        found += study(cells / training)
    for task in found:
        for method in task["methods"].values():
            del method["cpu_seconds"]  # not measured here
    all_kept = [result for kept in by_training.values() for result in kept]
    make_folder(tables)
    minutes = {name: round(sum(result.seconds for result in kept) / 60, 1) for name, kept in by_training.items()}
    about = {"training_minutes": minutes, **origin(all_kept[0].device)}
    write_json(tables / "whole_networks.json", {"results": found, **about})
    lines = [
        "Mean ± standard deviation over seeds, best first. Differences are paired by seed, in points, with their 95%",
        "interval and p after Holm's correction over the methods of the table. The prior is the mean prediction over",
        f"the test images. Device: {all_kept[0].device or 'unknown'}.", "",
    ]  # fmt: skip
    page = tables / "whole_networks.md"
    write_whole(page, "\n".join([*lines, *(table_text(task) for task in found)]))
    return page


def table_text(task: Mapping[str, Any]) -> str:
    """The table of one data set and regime."""
    columns = {metric: title for metric, title in COLUMNS[task["data"]].items() if metric in SHOWN}
    columns[BALANCED] = "Balanced accuracy, prior divided out"
    columns = {metric: columns[metric] for metric in SHOWN if metric in columns}
    training = TRAININGS.get(task["backbone"], task["backbone"])
    header = ["Method", "Seeds", *columns.values(), "Balanced accuracy against `hard`", "Macro AUC against `hard`",
              f"Balanced accuracy of `{OURS}` against this"]  # fmt: skip
    lines = [
        f"**{DATA_TITLES[task['data']]}, {training}: {TITLES[task['regime']]}.**", "",
        "| " + " | ".join(header) + " |", "|---|" + "--:|" * (len(header) - 1),
    ]  # fmt: skip
    methods, tests = task["methods"], task["tests"]
    for method in sorted(methods, key=lambda name: -np.mean(methods[name]["values"][BALANCED])):
        values = methods[method]["values"]
        against = tests.get("hard", {}).get(method, {})
        ours = tests.get(OURS, {}).get(method, {})
        fields = [f"`{method}`", str(len(methods[method]["seeds"])), *(_mean(values[metric]) for metric in columns)]
        fields += [_difference(against.get(BALANCED)), _difference(against.get("macro_auroc"))]
        fields.append(_difference(ours.get(BALANCED), -1.0))
        lines.append("| " + " | ".join(fields) + " |")
    return "\n".join(lines) + "\n"


def _mean(values: Sequence[float]) -> str:
    spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{spread}"


def _difference(test: Mapping[str, float | None] | None, sign: float = 1.0) -> str:
    """A difference in points with its interval and p; with a sign of −1 that of the two methods exchanged.

    >>> test = {"difference": 0.031, "low": 0.02, "high": 0.042, "p_holm": 0.0041}
    >>> _difference(test), _difference(test, -1.0), _difference(None)
    ('+3.1 [+2.0, +4.2], p 0.0041', '-3.1 [-4.2, -2.0], p 0.0041', '–')
    """
    if test is None or test["difference"] is None:
        return "–"
    low, high, p = (test[name] for name in ("low", "high", "p_holm"))
    shown = f"{100 * sign * test['difference'] + 0.0:+.1f}"  # + 0.0: no "-0.0"
    if low is None or high is None:  # every seed has the same difference
        return f"{shown}, equal for every seed"
    first, last = sorted((100 * sign * low, 100 * sign * high))
    return f"{shown} [{first:+.1f}, {last:+.1f}], p {'–' if p is None else '< 0.0001' if p < 1e-4 else f'{p:.2g}'}"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="folder with isic2018/ and aptos/")
    parser.add_argument("--weights", type=Path, help=f"folder with {BACKBONE}.safetensors. Default: download")
    parser.add_argument("--out", type=Path, default=Path("runs/soft_labels_whole"))
    parser.add_argument("--results", type=Path, help="folder of kept results. Default: OUT/results")
    parser.add_argument("--tables", type=Path, help="for the tables. Default: results/soft_labels; for tuning OUT")
    parser.add_argument("--training", nargs="+", choices=list(TRAININGS), default=["finetune", "scratch"])
    parser.add_argument("--data", nargs="+", choices=list(CLASSES), default=list(CLASSES))
    parser.add_argument("--regimes", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="NAME or NAME:setting=value")
    parser.add_argument("--tuning", action="store_true", help="seeds and split for tuning; needs its own --out")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 0 to 7; for tuning 101, 102")
    parser.add_argument("--only", default="", help="cells whose name has one of these words, separated by commas")
    parser.add_argument("--parallel", type=int, default=1, help="cells trained at once")
    parser.add_argument("--max-minutes", type=float, default=0.0, help="then cells stop with a checkpoint. 0: no limit")
    parser.add_argument("--stall-minutes", type=float, default=10.0, help="a process without progress is then killed")
    parser.add_argument("--crop", type=int, default=SMALL_CROP, help="pixels of the small trainings; less on a CPU")
    parser.add_argument("--compile", choices=list(COMPILE), default="auto")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--cache-dir", type=Path, help="folder for decoded images")
    parser.add_argument("--smoke", action="store_true", help="tiny networks on a few images")
    parser.add_argument("--tables-only", action="store_true")
    options = parser.parse_args(words)
    options.results = options.results or options.out / "results"
    options.tables = options.tables or (options.out if options.tuning else Path("results/soft_labels"))
    options.seeds = options.seeds or ((101, 102) if options.tuning else range(8))
    if options.data_root is None and not options.tables_only:
        parser.error("--data-root is needed to train")
    return options


def main(words: Sequence[str] | None = None) -> int:
    options, console, code = arguments(words), Console(), 0
    try:
        if not options.tables_only:
            code = run(options, console).exit_code
        page = write_tables(options.results, options.out / "cells", options.tables)
        console.print(f"tables: {page}", highlight=False, markup=False)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
