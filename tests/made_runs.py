"""Finished runs made by hand: folders with the files that training leaves behind, and chosen predictions in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from cclnet.data.split import split_table
from cclnet.data.table import ImageTable
from cclnet.runs.folder import RunFolder, write_split_file
from cclnet.runs.kept_result import KeptResult
from cclnet.runs.predictions import Predictions, write_predictions
from cclnet.settings import Settings, in_json
from cclnet.sweep.cells import Cell
from cclnet.sweep.results import keep_result

CLASSES = ("MEL", "NV", "BCC")
VAL, TRAIN = 60, 60


def made_run(folder: Path, cell: Cell, wrong: int, softness: list[float] | None = None, frozen: int = 0) -> Path:
    """A run whose first ``wrong`` of 60 reported images are misclassified; ``frozen`` is an epoch."""
    settings = cell.settings
    run = RunFolder(folder / cell.name)
    run.create(settings)
    rng = np.random.default_rng(settings.seed)
    names = [f"ISIC_{i:04d}" for i in range(VAL + TRAIN)]
    labels = np.arange(VAL + TRAIN) % len(CLASSES)
    groups = np.array([f"L{i // 2}" for i in range(VAL + TRAIN)])
    table = ImageTable("made", folder, names, np.zeros((len(names), 2, 2), np.uint8), labels, CLASSES, groups)
    parts = np.array(["val"] * VAL + ["train"] * TRAIN)
    write_split_file(run.split, split_table(table, parts))
    predicted = np.where(np.arange(VAL) < wrong, (labels[:VAL] + 1) % len(CLASSES), labels[:VAL])
    sure = rng.uniform(0.5, 0.9, VAL)
    p = np.tile(((1 - sure) / 2)[:, None], len(CLASSES))
    p[np.arange(VAL), predicted] = sure
    write_predictions(
        run.predictions,
        Predictions(np.array(names[:VAL]), labels[:VAL], p, CLASSES, groups[:VAL], parts[:VAL]),
    )
    softness = softness if softness is not None else ([0.5, 0.45, 0.46] if settings.method == "ccl" else None)
    run.write_history(_records(softness, frozen))
    _describe(run, settings)
    if softness:
        import torch

        off = (1 - softness[-1]) / 2
        tilt = 0.1 * off * torch.tensor([[0.0, 1, -1], [-1, 0, 1], [1, -1, 0]])
        matrix = torch.full((3, 3), off) + tilt
        matrix.fill_diagonal_(softness[-1])
        run.write_soft_labels(CLASSES, matrix.double().numpy())
    return run.path


def _records(softness: list[float] | None, frozen: int) -> list[dict[str, Any]]:
    count = len(softness) if softness else 3
    records: list[dict[str, Any]] = [
        {"epoch": i + 1, "loss": 1.0, "images_per_second": 100.0 * (i + 1)} for i in range(count)
    ]
    for record, value in zip(records, softness or [], strict=False):
        record |= {"softness": value, "frozen": float(bool(frozen) and record["epoch"] >= frozen)}
    return records


def _describe(run: RunFolder, settings: Settings) -> None:
    description = {
        "format": 1, "backbone": settings.backbone, "method": settings.method, "classes": list(CLASSES),
        "method_settings": in_json(settings.method_settings),
        "short_side": 256, "crop": [224, 224], "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225],
        "multilabel": False, "temperature": None, "collapse_softness": 0.5, "class_counts": [10, 40, 10],
        "trained": {"seed": settings.seed, "epochs": settings.epochs, "of_epochs": settings.epochs, "seconds": 61.23,
                    "device": "a made GPU",
                    "precision": "32-true", "versions": {"torch": "2"}, "images": TRAIN, "data": "/somewhere/isic"},
    }  # fmt: skip
    run.model.write_text(json.dumps(description))


def kept(folder: Path, cell: Cell) -> KeptResult:
    """The result of a run in ``folder / "runs"``, in ``folder / "results"``."""
    return keep_result(
        cell, RunFolder(folder / "runs" / cell.name), folder / "results" / cell.subfolder / f"{cell.name}.json"
    )


def made_result(folder: Path, cell: Cell, wrong: int, **more: Any) -> KeptResult:
    """Such a run and its result."""
    made_run(folder / "runs", cell, wrong, **more)
    return kept(folder, cell)
