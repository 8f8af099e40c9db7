"""A run folder as training leaves it, made of random numbers: what the report tests read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

CLASSES = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
SHARES = np.array([0.11, 0.60, 0.06, 0.05, 0.11, 0.03, 0.04])

MakeRun = Callable[..., Path]  # the fixture make_run: a name and settings of write_run


def write_run(
    folder: Path,
    classes: Sequence[str] = CLASSES,
    images: int = 400,
    seed: int = 0,
    method: str = "ccl",
    multilabel: bool = False,
    skill: float = 2.2,
    groups: bool = True,
    names: Sequence[str] | None = None,
    data: str = "nowhere/images",
    epochs: int = 40,
) -> Path:
    """Write settings.toml, split.csv, metrics.jsonl, model.json, soft_labels.csv and predictions.csv. Labels and
    images are the same for every seed and method, what the model says is not."""
    folder.mkdir(parents=True)
    fixed, drawn = np.random.default_rng(7), np.random.default_rng([seed, *method.encode()])
    shares = SHARES if len(classes) == len(SHARES) else np.full(len(classes), 1 / len(classes))
    labels = fixed.choice(len(classes), size=images, p=shares / shares.sum())
    hits = np.eye(len(classes))[labels]
    if multilabel:
        hits = np.maximum(hits, fixed.random(hits.shape) < 0.15)
    likeness = 0.9 * fixed.random((len(classes), len(classes)))  # how far a class lends its score to another
    logits = skill * (hits + hits @ likeness) + np.log(shares) / 3 + drawn.normal(size=hits.shape)
    raised = np.exp(1.6 * logits - (1.6 * logits).max(axis=1, keepdims=True))
    p = 1 / (1 + np.exp(-1.5 * (logits - skill))) if multilabel else raised / raised.sum(axis=1, keepdims=True)
    parts = np.array(["calibration", "val", "val", "val"])[np.arange(images) % 4]
    frame = pd.DataFrame({"image": list(names) if names else [f"ISIC_{i:07d}" for i in range(images)], "split": parts})
    if groups:
        frame["group"] = [f"HAM_{i // 2:07d}" for i in range(images)]
    frame["label"] = ["|".join(np.array(classes)[row > 0]) for row in hits]
    frame = pd.concat([frame, pd.DataFrame(p, columns=[f"p_{name}" for name in classes])], axis=1)
    frame.to_csv(folder / "predictions.csv", index=False, float_format="%.9g")
    split = frame[[c for c in ("image", "split", "group", "label") if c in frame]].copy()
    split.loc[split.index % 4 == 1, "split"] = "train"  # their partners in a group are reported: leaks to be found
    split.to_csv(folder / "split.csv", index=False)
    _write_training(folder, classes, seed, method, multilabel, data, epochs, drawn)
    return folder


def _write_training(
    folder: Path, classes: Sequence[str], seed: int, method: str, multilabel: bool, data: str, epochs: int,
    drawn: np.random.Generator,
) -> None:  # fmt: skip
    (folder / "settings.toml").write_text(
        f'data = {json.dumps(data)}\nbackbone = "resnet18"\nmethod = "{method}"\nepochs = {epochs}\nlr = 0.1\n'
        f'seed = {seed}\ndrops = [0.5, 0.75]\n\n[split]\nby = "group"\nval = 0.2\n\n[augment]\ncrop = 224\n'
    )
    k = len(classes)
    collapse = float(1 / (1 + (k - 1) * np.exp(-2)))
    if method == "ccl":
        weights = 0.5 + drawn.random((k, k)) / 2 + np.linspace(0, 1, k)[:, None] * np.linspace(0, 1, k)
        weights = (weights + weights.T) / 2
        np.fill_diagonal(weights, weights.max() * 4)
        matrix = pd.DataFrame(weights / weights.sum(axis=1, keepdims=True), columns=list(classes))
        matrix.insert(0, "class", list(classes))
        matrix.to_csv(folder / "soft_labels.csv", index=False, float_format="%.9g")
    with (folder / "metrics.jsonl").open("w") as file:
        for epoch in range(1, epochs + 1):
            ce = 0.15 + 1.6 * np.exp(-epoch / 12) + 0.03 * drawn.random()
            record: dict[str, float] = {"epoch": epoch, "loss": ce, "cross_entropy": ce}
            if method == "ccl":
                terms = {"kl": 0.3 + 0.3 * ce, "head_cross_entropy": 1.2 + 0.4 * ce, "class_correlation": 0.02 * ce}
                softness = min(collapse, 0.41 + abs(epoch - 14) * 0.003) if epoch < 25 else 0.443
                record |= terms | {"loss": ce + sum(terms.values()), "softness": softness, "frozen": float(epoch >= 25)}
            rate = 0.1 ** (1 + (epoch > epochs / 2) + (epoch > 3 * epochs / 4))
            record |= {"lr": rate, "seconds": 30.5, "images_per_second": 1234.5, "val_loss": ce + 0.3 + epoch / 200}
            if method == "ccl":
                record["lr_method"] = rate / 200
            if not multilabel:
                record["val_accuracy"] = 0.86 - 0.3 * np.exp(-epoch / 10) + 0.01 * drawn.normal()
            file.write(json.dumps(record) + "\n")
    model = {
        "format": 1, "backbone": "resnet18", "method": method, "method_settings": {}, "classes": list(classes),
        "multilabel": multilabel, "short_side": 256, "crop": [224, 224], "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225], "temperature": None, "collapse_softness": collapse,
        "class_counts": [100 * (k - i) for i in range(k)],
        "trained": {"seed": seed, "seconds": 1220.0, "device": "CPU, 2 threads", "versions": {"torch": "2.11.0"},
                    "images": 8012, "data": data},
    }  # fmt: skip
    (folder / "model.json").write_text(json.dumps(model))
