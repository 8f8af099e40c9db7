"""The regimes of the study with whole networks: fine-tuned from ImageNet weights, and from scratch. Needs a GPU.
`--training small` fine-tunes at 64 pixels, which a CPU can do.

python experiments/soft_labels/end_to_end.py --data-root FOLDER --weights FOLDER --out runs/soft_labels_whole
python experiments/soft_labels/bench.py tables --out runs/soft_labels_whole/cells/finetune --results results/finetune

FOLDER has isic2018/ and aptos/. Every run is a run folder of `cclnet train`: an interrupted command continues where it
was when it is repeated, and skips finished runs. The noise, the seeds and the split of ISIC 2018 are those of bench.py.
The mean prediction, by which the prior is divided out, is that of the test images (their labels are not used).
`--smoke` trains tiny networks on a few images, to see that everything works.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench import Cell
from cclnet import api
from cclnet.errors import InputError
from cclnet.files import write_whole
from cclnet.runs.folder import RunFolder
from cclnet.runs.provenance import source_commit, versions
from noisy_tasks import CLASSES, chosen_groups, noise_matrix, read_labels

RATES = {"clean": 0.0, "noise20": 0.2, "noise40": 0.4}
METHODS: dict[str, dict[str, Any]] = {
    "hard": {"method": "hard"},
    "ccl-forward": {"method": "ccl-forward"},
    "ccl-forward:logit_adjustment=1": {"method": "ccl-forward", "logit_adjustment": 1.0},
    "hard:logit_adjustment=1": {"method": "hard", "logit_adjustment": 1.0},
    "lsr:epsilon=0.23": {"method": "lsr", "method_settings": {"epsilon": 0.23}},
    "ccl-centroid": {"method": "ccl-centroid"},
    "ccl-confusion": {"method": "ccl-confusion"},
    "ccl": {"method": "ccl"},
}
SCRATCH = {"backbone": "resnet18", "pretrained": False, "epochs": 60, "drops": (0.7, 0.9), "validate_every": 10}
SMALL = {"short_side": 72, "augment": {"crop": 64}, "validate_every": 20}
SMOKE = {"backbone": "test_resnet", "pretrained": False, "epochs": 6, "short_side": 32,
         "batch_size": 16, "validate_every": 10, "augment": {"crop": 28}, "layer_decay": 1.0}  # fmt: skip


def write_manifest(path: Path, data: str, root: Path, regime: str, seed: int, per_class: int | None) -> Path:
    """A CSV of all images for `cclnet train`: noisy labels in the training split, true ones in the test split."""
    images, labels, groups = read_labels(data, root / data)
    files = {file.stem: file for file in sorted((root / data).rglob("*")) if file.suffix in (".webp", ".jpg", ".png")}
    missing = [name for name in images if name not in files]
    if missing:
        raise InputError(f"{root / data} lacks {len(missing)} images, such as {missing[0]}.")
    if data == "aptos":  # identical images are in one split
        digests = [hashlib.blake2b(files[name].read_bytes()).hexdigest() for name in images]
        groups = np.unique(digests, return_inverse=True)[1]
    test = chosen_groups(groups)[groups]
    rng, matrix = np.random.default_rng((seed, round(100 * RATES[regime]), 0)), noise_matrix(data, RATES[regime])
    given = np.array(
        [k if held_out else rng.choice(len(matrix), p=matrix[k]) for k, held_out in zip(labels, test, strict=True)]
    )
    frame = pd.DataFrame({
        "image": [str(files[name].relative_to(root / data)) for name in images],
        "label": [CLASSES[data][k] for k in given],
        "group": groups,
        "split": np.where(test, "test", "train"),
    })  # fmt: skip
    if per_class is not None:
        frame = frame.groupby(["split", "label"]).head(per_class)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, frame.to_csv(index=False))
    return path


def train_cell(cell: Cell, training: str, options: argparse.Namespace) -> None:
    """Train one network, or continue, and write its test predictions for bench.py tables."""
    folder = options.out / "runs" / f"{training}-{cell.path(Path()).stem}"
    manifest = options.out / "manifests" / f"{cell.data}-{cell.regime}-seed{cell.seed}.csv"
    if not manifest.exists():
        write_manifest(manifest, cell.data, options.data_root, cell.regime, cell.seed, 24 if options.smoke else None)
    if (folder / "settings.toml").exists():
        api.train(resume=folder, accelerator=options.accelerator, progress=False)
    else:
        settings = METHODS[cell.method] | {"seed": cell.seed, "image_folder": str(options.data_root / cell.data)}
        settings = {"scratch": SCRATCH, "small": SMALL, "finetune": {}}[training] | settings
        if training != "scratch" and options.weights is not None:
            settings |= {"weights": str(options.weights / "tf_efficientnet_lite0.safetensors")}
        if options.smoke:
            settings = {name: value for name, value in settings.items() if name != "weights"} | SMOKE
        preset = "paper" if training == "scratch" else "finetune"
        api.train(manifest, folder, preset=preset, accelerator=options.accelerator, progress=False, **settings)
    keep_predictions(cell, folder, options.out / "cells" / training)


def keep_predictions(cell: Cell, folder: Path, out: Path) -> None:
    """The test predictions of a run folder as a cell of bench.py."""
    run = RunFolder(folder)
    own = run.read_predictions().of_split("test")
    order = [own.classes.index(name) for name in CLASSES[cell.data]]
    labels = run.read_soft_labels(CLASSES[cell.data])
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        cell.path(out),
        probabilities=own.probabilities[:, order].astype(np.float32),
        train_mean=own.probabilities[:, order].mean(axis=0),
        labels=np.array([order.index(k) for k in own.labels]),
        groups=np.zeros(len(own), np.str_) if own.groups is None else own.groups,
        images=np.array([Path(name).stem for name in own.images]),
        matrix=np.zeros((0, 0)) if labels is None else labels,
        about=json.dumps({
            "data": cell.data, "regime": cell.regime, "method": cell.method, "seed": cell.seed,
            "backbone": cell.backbone, "seconds": 0.0, "commit": getattr(source_commit(), "sha", None),
            "versions": versions(), "device": getattr(run.read_model().trained, "device", None) or "unknown",
        }),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True, help="folder with isic2018/ and aptos/")
    parser.add_argument("--weights", type=Path, help="folder with tf_efficientnet_lite0.safetensors. Default: download")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", nargs="+", choices=list(CLASSES), default=list(CLASSES))
    parser.add_argument("--regimes", nargs="+", choices=list(RATES), default=["noise40", "clean", "noise20"])
    trainings = ("finetune", "scratch", "small")
    parser.add_argument("--training", nargs="+", choices=trainings, default=["finetune", "scratch"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(8)))
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    for training in options.training:
        for regime in options.regimes:
            for data in options.data:
                for seed in options.seeds:
                    for method in options.methods:
                        cell = Cell(data, regime, method, seed, training)
                        if not cell.path(options.out / "cells" / training).exists():
                            train_cell(cell, training, options)
                            print(training, cell, flush=True)


if __name__ == "__main__":
    main()
