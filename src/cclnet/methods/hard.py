"""Hard labels: the cross entropy everyone starts from."""

from __future__ import annotations

import torch
from torch import Tensor

from cclnet import functional
from cclnet.functional import binary_cross_entropy, marks_of
from cclnet.head import check_labels
from cclnet.methods.base import Loss, Method


class Hard(Method):
    """``L = CE(q, y)``."""

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        check_labels(labels, len(logits), self.classes.num_classes)
        return Loss.of(cross_entropy=functional.cross_entropy(logits, labels, weight))

    def soft_labels(self) -> Tensor:
        return torch.eye(self.classes.num_classes)


# Hard labels, several at once: binary cross entropy, the baseline of multi-label comparisons.


class BinaryCrossEntropy(Method):
    """``L = BCE(q, m)``, a mean over the classes."""

    multilabel = True

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        marks = marks_of(labels, len(logits), self.classes.num_classes)
        return Loss.of(binary_cross_entropy=binary_cross_entropy(logits, marks, weight))
