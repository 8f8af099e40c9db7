"""Hard labels, several at once: binary cross entropy, the baseline of multi-label comparisons."""

from __future__ import annotations

from torch import Tensor

from cclnet.methods.base import Loss, Method
from cclnet.multilabel import binary_cross_entropy, marks_of


class BinaryCrossEntropy(Method):
    """``L = BCE(q, m)``, a mean over the classes."""

    multilabel = True

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        marks = marks_of(labels, len(logits), self.classes.num_classes)
        return Loss.of(binary_cross_entropy=binary_cross_entropy(logits, marks, weight))
