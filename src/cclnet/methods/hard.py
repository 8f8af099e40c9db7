"""Hard labels: cross entropy, and binary cross entropy for several labels per image. The baselines."""

from __future__ import annotations

import torch
from torch import Tensor

from cclnet import functional
from cclnet.methods.base import Loss, Method


class Hard(Method):
    """``L = CE(q, y)``."""

    baseline = True

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        self.check_labels(logits, labels)
        return Loss.of(cross_entropy=functional.cross_entropy(logits, labels, weight))

    def soft_labels(self) -> Tensor:
        return torch.eye(self.classes.num_classes)


class BinaryCrossEntropy(Method):
    """``L = BCE(q, m)`` for multi-hot targets m, mean over the classes."""

    multilabel = True
    baseline = True
    card = "bce.md"

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        targets = functional.multi_hot_targets(labels, len(logits), self.classes.num_classes)
        return Loss.of(binary_cross_entropy=functional.binary_cross_entropy(logits, targets, weight))
