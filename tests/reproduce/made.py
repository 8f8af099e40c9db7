"""Finished runs made by hand: folders with the files that training leaves behind, and chosen predictions in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from cclnet.data.split import write_split
from cclnet.data.table import ImageTable
from cclnet.predictions import Predictions, write_predictions
from cclnet.reproduce.experiments import Cell, read_recipes
from cclnet.reproduce.results import Result, keep_result
from cclnet.training.run_folder import RunFolder

CLASSES = ("MEL", "NV", "BCC")
RECIPES = Path(__file__).parents[2] / "recipes" / "isic2018"
VAL, TRAIN = 60, 60


def made_run(folder: Path, cell: Cell, wrong: int, softness: list[float] | None = None, frozen: int = 0) -> Path:
    """A run whose first ``wrong`` of 60 reported images are taken for another class; ``frozen`` is an epoch."""
    settings = cell.settings(read_recipes(RECIPES)[cell.split], "/somewhere/isic")
    run = RunFolder(folder / cell.name)
    run.create(settings)
    rng = np.random.default_rng(cell.seed)
    names = [f"ISIC_{i:04d}" for i in range(VAL + TRAIN)]
    labels = np.arange(VAL + TRAIN) % len(CLASSES)
    groups = np.array([f"L{i // 2}" for i in range(VAL + TRAIN)])
    table = ImageTable("made", folder, names, np.zeros((len(names), 2, 2), np.uint8), labels, CLASSES, groups)
    parts = np.array(["val"] * VAL + ["train"] * TRAIN)
    write_split(run.split, table, parts)
    predicted = np.where(np.arange(VAL) < wrong, (labels[:VAL] + 1) % len(CLASSES), labels[:VAL])
    sure = rng.uniform(0.5, 0.9, VAL)
    p = np.tile(((1 - sure) / 2)[:, None], len(CLASSES))
    p[np.arange(VAL), predicted] = sure
    write_predictions(
        run.predictions,
        Predictions(np.array(names[:VAL]), labels[:VAL], p, CLASSES, groups[:VAL], parts[:VAL]),
    )
    softness = softness if softness is not None else ([0.5, 0.45, 0.46] if cell.method == "ccl" else None)
    run.write_metrics(_records(softness, frozen))
    _describe(run, cell, settings.epochs)
    if softness:
        import torch

        off = (1 - softness[-1]) / 2
        tilt = 0.1 * off * torch.tensor([[0.0, 1, -1], [-1, 0, 1], [1, -1, 0]])
        matrix = torch.full((3, 3), off) + tilt
        matrix.fill_diagonal_(softness[-1])
        run.write_correlation(matrix, CLASSES)
    return run.path


def _records(softness: list[float] | None, frozen: int) -> list[dict[str, Any]]:
    count = len(softness) if softness else 3
    records: list[dict[str, Any]] = [
        {"epoch": i + 1, "loss": 1.0, "images_per_second": 100.0 * (i + 1)} for i in range(count)
    ]
    for record, value in zip(records, softness or [], strict=False):
        record |= {"softness": value, "frozen": float(bool(frozen) and record["epoch"] >= frozen)}
    return records


def _describe(run: RunFolder, cell: Cell, epochs: int) -> None:
    description = {
        "format": 1, "backbone": cell.backbone, "method": cell.method, "method_settings": {}, "classes": list(CLASSES),
        "multilabel": False, "temperature": None, "collapse_softness": 0.5, "class_counts": [10, 40, 10],
        "trained": {"seed": cell.seed, "epochs": epochs, "of_epochs": epochs, "seconds": 61.23, "device": "a made GPU",
                    "precision": "32-true", "versions": {"torch": "2"}, "images": TRAIN, "data": "/somewhere/isic"},
    }  # fmt: skip
    run.model.write_text(json.dumps(description))


def made_result(folder: Path, cell: Cell, wrong: int, **more: Any) -> Result:
    """The result of such a run, in ``folder / "results"``."""
    return keep_result(cell, made_run(folder / "runs", cell, wrong, **more), folder / "results")
