"""Hard labels: the cross entropy everyone starts from."""

from __future__ import annotations

import torch
from torch import Tensor

from cclnet import functional
from cclnet.head import check_labels
from cclnet.methods.base import Loss, Method


class Hard(Method):
    """``L = CE(q, y)``."""

    def forward(
        self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None
    ) -> Loss:
        check_labels(labels, len(logits), self.classes.num_classes)
        return Loss.of(cross_entropy=functional.cross_entropy(logits, labels, weight))

    def soft_labels(self) -> Tensor:
        return torch.eye(self.classes.num_classes)
