"""A run folder with a network that can be used: small, with random weights and predictions made of random numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from cclnet.deploy.export import check_images
from cclnet.network import TimmClassifier
from cclnet.runs.model import write_soft_labels
from cclnet.runs.predictions import Predictions, write_predictions
from made_predictions import several_labels, single_label

CLASSES = ("ant", "bee", "cat", "dog")
SETTINGS = """data = "somewhere/insects"
backbone = "{backbone}"
method = "ccl"
epochs = 3
batch_size = 64
lr = 0.1

[split]
by = "group"
seed = 0

[augment]
crop = {crop}
"""


def write_run(
    folder: Path,
    backbone: str = "test_resnet",
    crop: int = 32,
    short_side: int = 36,
    multilabel: bool = False,
    temperature: float | None = 1.5,
    backbone_settings: dict[str, Any] | None = None,
    **info: Any,
) -> Path:
    """Write what training leaves behind; further ``info`` goes into model.json."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    model = TimmClassifier(backbone, len(CLASSES), backbone_settings=backbone_settings).shipped
    _as_if_trained(model, crop)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors")
    description = {
        "format": 1, "backbone": backbone, "method": "ccl", "method_settings": {}, "classes": list(CLASSES),
        "multilabel": multilabel, "short_side": short_side, "crop": [crop, crop], "mean": [0.5, 0.4, 0.6],
        "std": [0.2, 0.25, 0.3], "temperature": temperature, "class_counts": [40, 30, 20, 10],
        "trained": {"seed": 0, "seconds": 12.0, "epochs": 3, "device": "CPU", "versions": {"torch": "2.11.0"},
                    "images": 100, "data": "somewhere/insects"},
        **info,
    }  # fmt: skip
    (folder / "model.json").write_text(json.dumps(description))
    (folder / "settings.toml").write_text(SETTINGS.format(backbone=backbone, crop=crop))
    matrix = np.array([[0.6, 0.2, 0.15, 0.05], [0.1, 0.7, 0.1, 0.1], [0.3, 0.05, 0.6, 0.05], [0.1, 0.2, 0.1, 0.6]])
    write_soft_labels(folder / "soft_labels.csv", CLASSES, matrix)
    made = several_labels(200) if multilabel else single_label(200, groups=80)
    parts = np.array(["val"] * 150 + ["test"] * 50)
    write_predictions(
        folder / "predictions.csv",
        Predictions(made.images, made.labels, made.probabilities, made.classes, made.groups, parts),
    )
    return folder


@torch.no_grad()
def _as_if_trained(model: Any, crop: int) -> None:
    """Statistics of batch norm from data, and a classifier that tells images apart: a fresh network does not. Norms
    that leave most units alive, for a deep random network is else chaotic: every rounding grows from layer to layer."""
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # the mean over all batches
        norm.weight.uniform_(0.4, 0.6)
        norm.bias.uniform_(0.5, 1)
    images = torch.from_numpy(check_images((crop, crop), 16)).permute(0, 3, 1, 2) / 128 - 1
    for half in images.split(8):
        model.train()(half)
    linear, logits = model.get_classifier(), model.eval()(images)
    linear.weight.mul_(1.5 / logits.std(dim=0)[:, None])
    linear.bias.copy_(linear.bias - model(images).mean(dim=0))


def write_images(folder: Path, count: int = 6, suffix: str = "png", values: tuple[int, int] = (0, 256)) -> list[Path]:
    """Smooth colour pictures of several shapes, each its own, with grey levels in a range."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(1)
    paths = []
    for i in range(count):
        coarse = Image.fromarray(generator.integers(*values, (5, 6, 3), dtype=np.uint8))
        path = folder / f"picture{i}.{suffix}"
        coarse.resize((48 + 7 * i, 40 + 11 * (i % 3)), Image.Resampling.BICUBIC).save(path)
        paths.append(path)
    return paths
