"""What a run leaves behind: the model with its description, the correlation matrix, the predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.optim.swa_utils import AveragedModel

from cclnet.data.augment import normalise
from cclnet.data.loader import Loader
from cclnet.functional import unsoften
from cclnet.network import CCLNet, Classifier
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import ModelDescription, TrainedInfo
from cclnet.runs.predictions import Predictions
from cclnet.runs.provenance import source_commit, versions
from cclnet.settings import Settings, in_json
from cclnet.training.setup import PreparedData

# An exponential average of the weights, which is then what is tested and shipped.


class WeightAverage(AveragedModel):
    """Keeps ``decay`` of itself at every step, less at first, ``min(decay, (1 + n) / (10 + n))``: with .999 throughout,
    a run of a thousand steps would ship a third of its random start."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay = decay
        super().__init__(network, multi_avg_fn=self._move, use_buffers=True)

    def _move(self, averaged: Sequence[Tensor], current: Sequence[Tensor], _: Tensor | int) -> None:
        if not averaged[0].is_floating_point():  # counts
            torch._foreach_copy_(list(averaged), list(current))
            return
        steps = int(self.n_averaged)  # on the host, where what is handed over would have to be waited for
        torch._foreach_lerp_(list(averaged), list(current), 1.0 - min(self.decay, (1.0 + steps) / (10.0 + steps)))


# Testing a classifier on a part of the data: every image once, whatever the number of ranks.


class Tester:
    """Central crops of some rows of the data, kept ready for testing again and again."""

    def __init__(
        self,
        settings: Settings,
        data: PreparedData,
        rows: npt.NDArray[np.intp],
        fabric: Fabric,
        mean: Tensor,
        std: Tensor,
    ) -> None:
        self.fabric, self.mean, self.std = fabric, mean, std
        self.labels = torch.as_tensor(data.table.labels[rows])
        self.num_classes = data.table.num_classes
        self.loader = Loader(
            data.images,
            data.table.labels,
            rows,
            batch_size=settings.batch_size,
            crop=settings.augment.crop,
            seed=settings.seed,
            device=fabric.device,
            resident=settings.resident,
            rank=fabric.global_rank,
            world_size=fabric.world_size,
        )

    @torch.no_grad()
    def logits(self, classifier: Classifier) -> Tensor:
        """Logits of all rows in their order, [N, K] float64 on the CPU, on every rank.

        In full precision: half precision is for speed in training, and would show in the probabilities. Each rank
        fills its share of a table of zeros, so that the sum over ranks counts each image once.
        """
        classifier.eval()
        device, shape = self.fabric.device, (len(self.labels), self.num_classes)
        own = torch.zeros(shape, dtype=self.mean.dtype, device=device)
        place = {int(row): position for position, row in enumerate(self.loader.rows)}
        for batch in self.loader.epoch():
            images = normalise(batch.crops, self.mean, self.std).to(own.dtype)
            at = torch.tensor([place[int(row)] for row in batch.rows], device=device)
            own[at] = classifier.logits(classifier.features(images)).to(own.dtype)
        total: Tensor = self.fabric.all_reduce(own, reduce_op="sum") if self.fabric.world_size > 1 else own
        return total.double().cpu()

    def validate(self, classifier: Classifier) -> dict[str, float]:
        logits = self.logits(classifier)
        if self.labels.dim() == 2:
            return {"val_loss": float(binary_cross_entropy_with_logits(logits, self.labels.double()))}
        right = (logits.argmax(dim=1) == self.labels).double()
        return {"val_loss": float(cross_entropy(logits, self.labels)), "val_accuracy": float(right.mean())}


def write_outcome(
    run: RunFolder,
    data: PreparedData,
    network: CCLNet,
    classifier: Classifier,
    rows: npt.NDArray[np.intp],
    logits: Tensor,
    description: ModelDescription,
) -> None:
    """Write model.safetensors, model.json, soft_labels.csv and predictions.csv (of ``rows``)."""
    from safetensors.torch import save

    weights = {name: value.contiguous().cpu() for name, value in classifier.shipped.state_dict().items()}
    run.write_model(save(weights), description)
    matrix = network.soft_labels()
    if matrix is not None:
        run.write_soft_labels(data.table.classes, matrix.double().cpu().numpy())
    run.write_predictions(predictions(data, rows, logits, description.target))


def predictions(
    data: PreparedData, rows: npt.NDArray[np.intp], logits: Tensor, target: Sequence[Sequence[float]] | None = None
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
        splits=data.splits[rows],
    )


def describe(
    settings: Settings,
    data: PreparedData,
    fabric: Fabric,
    trained: TrainedInfo,
    collapse_softness: float | None = None,
    target: Tensor | None = None,
) -> ModelDescription:
    """The content of model.json: how to use the weights, and where they come from. ``trained`` has the duration."""
    table, device = data.table, fabric.device
    cpu = f"CPU, {torch.get_num_threads()} threads"
    mean, std = ((red, green, blue) for red, green, blue in (settings.input_mean, settings.input_std))
    return ModelDescription(
        backbone=settings.backbone,
        classes=tuple(table.classes),
        multilabel=table.multilabel,
        short_side=settings.short_side,
        crop=(settings.augment.crop, settings.augment.crop),
        mean=mean,
        std=std,
        method=settings.method,
        method_settings=in_json(settings.method_settings),
        class_counts=tuple(table.class_counts(data.rows("train")).tolist()),
        collapse_softness=collapse_softness,
        target=None if target is None else tuple(map(tuple, target.double().tolist())),
        trained=replace(
            trained,
            of_epochs=settings.epochs,
            seed=settings.seed,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
            devices=fabric.world_size,
            precision=str(fabric._precision.precision),
            versions=versions(),
            commit=source_commit(),
            images=len(data.rows("train")),
            data=settings.data,
            fingerprint=table.fingerprint(),
        ),
    )
