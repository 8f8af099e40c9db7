"""Evaluation of a classifier during and after training, and the artifacts of a finished run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from lightning.fabric import Fabric
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.optim.swa_utils import AveragedModel

from cclnet.data.augment import normalise
from cclnet.data.loader import Rows
from cclnet.data.split import split_kind
from cclnet.data.views import VIEWS
from cclnet.functional import unsoften
from cclnet.methods import Method
from cclnet.network import Classifier
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import ModelDescription, TrainedInfo
from cclnet.runs.out_of_distribution import FeatureStatistics
from cclnet.runs.predictions import Predictions
from cclnet.runs.provenance import source_commit, versions
from cclnet.settings import TTA, Settings, in_json
from cclnet.training.duration import device_name
from cclnet.training.setup import PreparedData, make_loader


class WeightAverage(AveragedModel):
    """Exponential moving average of the weights.

    After n steps the decay is min(decay, (1 + n) / (10 + n)): with a constant 0.999, a run of a thousand steps would
    keep a third of its random initial weights.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay = decay
        super().__init__(network, multi_avg_fn=self._update, use_buffers=True)

    def _update(self, averaged: Sequence[Tensor], current: Sequence[Tensor], _: Tensor | int) -> None:
        if not averaged[0].is_floating_point():  # counters
            torch._foreach_copy_(list(averaged), list(current))
            return
        steps = int(self.n_averaged)  # kept on the host; the argument is on the device, and reading it would wait
        torch._foreach_lerp_(list(averaged), list(current), 1.0 - min(self.decay, (1.0 + steps) / (10.0 + steps)))


class Tester:
    """Computes logits of central crops of some rows of the data, each image once over all ranks."""

    def __init__(
        self, settings: Settings, data: PreparedData, rows: Rows, fabric: Fabric, mean: Tensor, std: Tensor,
        tta: str = "none",
    ) -> None:  # fmt: skip
        self.fabric, self.mean, self.std = fabric, mean, std
        self.views = [VIEWS[name] for name in TTA[tta]]
        self.labels = torch.as_tensor(data.table.labels[rows])
        self.num_classes = data.table.num_classes
        self.loader = make_loader(settings, data, rows, fabric, crop=settings.augment.crop)

    @torch.no_grad()
    def logits(self, classifier: Classifier) -> Tensor:
        """Return the logits of all rows in order, [N, K] float64 on the CPU, on every rank.

        They are computed in full precision, because the error of half precision would show in the probabilities. Each
        rank fills its rows of a zero matrix, so that the sum over ranks counts each image once.
        """

        def output(images: Tensor) -> Tensor:
            logits = [classifier.logits(classifier.features(view(images))) for view in self.views]
            return torch.stack(logits).mean(dim=0) if len(logits) > 1 else logits[0]

        return self._filled(classifier, self.num_classes, output)

    @torch.no_grad()
    def features(self, classifier: Classifier) -> Tensor:
        """Return the pooled features of all rows in order, [N, F] float64 on the CPU, on every rank; see ``logits``."""
        return self._filled(classifier, classifier.feature_width, classifier.features)

    def _filled(self, classifier: Classifier, width: int, output: Callable[[Tensor], Tensor]) -> Tensor:
        classifier.eval()
        device, shape = self.fabric.device, (len(self.labels), width)
        own = torch.zeros(shape, dtype=self.mean.dtype, device=device)
        position = {int(row): index for index, row in enumerate(self.loader.rows)}
        for batch in self.loader.epoch():
            images = normalise(batch.crops, self.mean, self.std).to(own.dtype)
            at = torch.tensor([position[int(row)] for row in batch.rows], device=device)
            own[at] = output(images).to(own.dtype)
        total: Tensor = self.fabric.all_reduce(own, reduce_op="sum") if self.fabric.world_size > 1 else own
        return total.double().cpu()

    def scores(self, classifier: Classifier) -> dict[str, float]:
        """Return val_loss, and val_accuracy for single-label data."""
        logits = self.logits(classifier)
        if self.labels.dim() == 2:
            return {"val_loss": float(binary_cross_entropy_with_logits(logits, self.labels.double()))}
        right = (logits.argmax(dim=1) == self.labels).double()
        return {"val_loss": float(cross_entropy(logits, self.labels)), "val_accuracy": float(right.mean())}


def predictions(
    data: PreparedData, rows: Rows, logits: Tensor, target: Sequence[Sequence[float]] | None = None
) -> Predictions:
    """Return the predictions for ``rows``; soft labels ``target`` [K, K], where given, are removed from them."""
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


def write_artifacts(
    run: RunFolder, description: ModelDescription, classifier: Classifier, soft_labels: Tensor | None,
    statistics: FeatureStatistics | None, data: PreparedData, rows: Rows, logits: Tensor,
) -> None:  # fmt: skip
    """Write the model of a finished run, and the predictions and metadata of ``rows``."""
    weights = {name: value.contiguous().cpu() for name, value in classifier.shipped.state_dict().items()}
    run.write_model(save(weights), description)
    if soft_labels is not None:
        run.write_soft_labels(data.table.classes, soft_labels.double().cpu().numpy())
    if statistics is not None:
        run.write_feature_statistics(statistics)
    if not data.table.extra.empty:
        run.write_metadata([data.table.names[i] for i in rows.tolist()], data.table.extra.iloc[rows])
    run.write_predictions(predictions(data, rows, logits, description.target))


def describe(
    settings: Settings, data: PreparedData, fabric: Fabric, trained: TrainedInfo, method: Method
) -> ModelDescription:
    """Return the content of model.json: how to use the weights and where they come from.

    ``trained`` has the epochs, seconds and best score of the run; the rest of it is filled in here.
    """
    table = data.table
    target = method.target() if settings.unsoften else None
    mean, std = ((red, green, blue) for red, green, blue in (settings.input_mean, settings.input_std))
    return ModelDescription(
        backbone=settings.backbone,
        classes=tuple(table.classes),
        multilabel=table.multilabel,
        short_side=data.test_short_side or settings.short_side,
        crop=(settings.augment.crop, settings.augment.crop),
        mean=mean,
        std=std,
        method=settings.method,
        method_settings=in_json(settings.method_settings),
        class_counts=tuple(table.class_counts(data.rows("train")).tolist()),
        ordered=method.needs_order or None if settings.ordered is None else settings.ordered,
        collapse_softness=method.collapse_softness,
        tta=settings.test_views,
        pooling=settings.pooling,
        target=None if target is None else tuple(map(tuple, target.double().tolist())),
        trained=replace(
            trained,
            of_epochs=settings.epochs,
            seed=settings.seed,
            device=device_name(fabric.device),
            devices=fabric.world_size,
            precision=str(fabric._precision.precision),
            versions=versions(),
            commit=source_commit(),
            images=len(data.rows("train")),
            data=settings.data,
            fingerprint=table.fingerprint(),
            split=split_kind(table, settings.split),
        ),
    )
