"""What a run leaves behind: the model with its description, the correlation matrix, the predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.fabric import Fabric
from torch import Tensor

from cclnet.functional import unsoften
from cclnet.network import CCLNet, Classifier
from cclnet.predictions import Predictions, write_predictions
from cclnet.runs.provenance import source_commit, versions
from cclnet.training.prepare import PreparedData
from cclnet.training.run_folder import RunFolder
from cclnet.training.settings import Settings, in_json


def write_outcome(
    run: RunFolder,
    data: PreparedData,
    network: CCLNet,
    classifier: Classifier,
    rows: npt.NDArray[np.intp],
    logits: Tensor,
    description: dict[str, Any],
) -> None:
    """Write model.safetensors, model.json, correlation.csv and predictions.csv (of ``rows``)."""
    run.write_model(classifier.shipped.state_dict(), description)
    matrix = network.soft_labels()
    if matrix is not None:
        run.write_correlation(matrix, data.table.classes)
    write_predictions(run.predictions, predictions(data, rows, logits, description["target"]))


def predictions(
    data: PreparedData, rows: npt.NDArray[np.intp], logits: Tensor, target: list[list[float]] | None = None
) -> Predictions:
    """What the model says of some rows; ``target`` is taken out of it where it is given."""
    table = data.table
    probabilities = torch.sigmoid(logits) if table.multilabel else torch.softmax(logits, dim=1)
    if target is not None:
        probabilities = unsoften(probabilities, torch.tensor(target, dtype=torch.float64))
    return Predictions(
        images=np.array([table.names[i] for i in rows]),
        labels=table.labels[rows],
        probabilities=probabilities.numpy(),
        classes=table.classes,
        groups=None if table.groups is None else table.groups[rows],
        parts=data.parts[rows],
    )


def describe(settings: Settings, data: PreparedData, fabric: Fabric, trained: dict[str, Any]) -> dict[str, Any]:
    """model.json: what someone needs to use the weights, and where they come from."""
    table, device = data.table, fabric.device
    cpu = f"CPU, {torch.get_num_threads()} threads"
    commit = source_commit()
    return {
        "format": 1,
        "backbone": settings.backbone,
        "method": settings.method,
        "method_settings": in_json(settings.method_settings),
        "classes": list(table.classes),
        "multilabel": table.multilabel,
        "short_side": settings.short_side,
        "crop": [settings.augment.crop, settings.augment.crop],
        "mean": list(settings.mean),
        "std": list(settings.std),
        "temperature": None,
        "class_counts": table.class_counts(data.rows("train")).tolist(),
        "trained": {
            **trained,
            "of_epochs": settings.epochs,
            "seed": settings.seed,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
            "devices": fabric.world_size,
            "precision": str(fabric._precision.precision),
            "versions": versions(),
            "commit": None if commit is None else {"sha": commit.sha, "clean": commit.clean},
            "images": len(data.rows("train")),
            "data": settings.data,
            "fingerprint": table.fingerprint(),
        },
    }
