"""Predictions made of random numbers, ordinary and degenerate, for the tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from cclnet.evaluation.calibration import calibrated
from cclnet.runs.calibration_map import CalibrationMap
from cclnet.runs.model import write_soft_labels
from cclnet.runs.predictions import Predictions, write_predictions

NAMES = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu")


def single_label(
    images: int = 60, classes: int = 4, seed: int = 0, skill: float = 1.0, groups: int = 0, decimals: int | None = None
) -> Predictions:
    """Softmax of noise plus ``skill`` on the true class; ``decimals`` rounds it coarsely, so that there are ties."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, images)
    logits = rng.normal(size=(images, classes)) + skill * np.eye(classes)[labels]
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    if decimals is not None:
        p = np.round(p, decimals) + 1e-3
        p /= p.sum(axis=1, keepdims=True)
    names = np.array([f"image{i:05d}" for i in range(images)])
    of = np.array([f"g{i}" for i in rng.integers(0, groups, images)]) if groups else None
    return Predictions(names, labels, p, NAMES[:classes], of)


def with_temperature(predictions: Predictions, temperature: float) -> Predictions:
    return calibrated(predictions, CalibrationMap(temperature))


def given(labels: list[int], probabilities: list[list[float]]) -> Predictions:
    p = np.array(probabilities)
    return Predictions(np.arange(len(labels)).astype(str), np.array(labels), p, NAMES[: p.shape[1]])


def several_labels(images: int = 60, classes: int = 4, seed: int = 0, skill: float = 1.5) -> Predictions:
    rng = np.random.default_rng(seed)
    labels = (rng.random((images, classes)) < 0.3).astype(np.uint8)
    p = 1 / (1 + np.exp(-(rng.normal(size=labels.shape) + skill * (labels - 0.5))))
    return Predictions(np.arange(images).astype(str), labels, p, NAMES[:classes])


def _missing_class() -> Predictions:
    made = single_label(80, 4, seed=3)
    return made.select(made.labels != 2)


def _one_class_predicted() -> Predictions:
    made = single_label(50, 4, seed=4)
    p = np.full_like(made.probabilities, 0.1)
    p[:, 1] = 0.7
    return Predictions(made.images, made.labels, p, made.classes)


SINGLE_LABEL = {
    "random": single_label(),
    "ties": single_label(decimals=1, seed=1),
    "all equal": given([0, 1, 2, 1], [[1 / 3] * 3] * 4),
    "missing class": _missing_class(),
    "one class predicted": _one_class_predicted(),
    "single image": given([1], [[0.2, 0.5, 0.3]]),
    "single image, wrong": given([0], [[0.2, 0.5, 0.3]]),
    "one class throughout": given([1, 1, 1], [[0.1, 0.9], [0.2, 0.8], [0.4, 0.6]]),
    "perfect": single_label(skill=60.0, seed=5),
    "two classes": single_label(40, 2, seed=6),
    "impossible": given([0, 1, 1], [[0.0, 1.0], [0.5, 0.5], [0.0, 1.0]]),
}

SEVERAL_LABELS = {
    "random": several_labels(),
    "missing class": Predictions(
        np.arange(3).astype(str),
        np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0]], np.uint8),
        np.array([[0.9, 0.2, 0.6], [0.4, 0.7, 0.1], [0.5, 0.5, 0.5]]),
        NAMES[:3],
    ),
    "no label at all": Predictions(
        np.arange(2).astype(str), np.zeros((2, 2), np.uint8), np.array([[0.1, 0.2], [0.3, 0.4]]), NAMES[:2]
    ),
    "single image": Predictions(np.array(["a"]), np.array([[1, 1]], np.uint8), np.array([[0.8, 0.3]]), NAMES[:2]),
}


def write_run(
    folder: Path,
    predictions: Predictions,
    method: str = "ccl",
    seed: int = 0,
    settings: str = "lr = 0.1\n",
    split: str | None = None,
    matrix: object = None,
    **model: object,
) -> Path:
    """A run folder as far as judging reads it."""
    folder.mkdir(parents=True)
    write_predictions(folder / "predictions.csv", predictions)
    known = {
        "format": 1, "backbone": "resnet18", "method": method, "method_settings": {}, "temperature": None,
        "short_side": 256, "crop": [224, 224], "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225],
        "classes": list(predictions.classes), "multilabel": predictions.multilabel,
        "class_counts": [10 * (k + 1) for k in range(predictions.num_classes)], "trained": {"seed": seed},
    }  # fmt: skip
    (folder / "model.json").write_text(json.dumps(known | model))
    (folder / "settings.toml").write_text(f"seed = {seed}\n{settings}")
    if split is not None:
        (folder / "split.csv").write_text(split)
    if matrix is not None:
        write_soft_labels(folder / "soft_labels.csv", predictions.classes, matrix)
    return folder
