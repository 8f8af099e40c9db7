"""Testing a classifier on a part of the data: every image once, whatever the number of ranks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from cclnet.data.augment import normalise
from cclnet.data.loader import Loader
from cclnet.network import Classifier
from cclnet.training.prepare import PreparedData
from cclnet.training.settings import Settings


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
