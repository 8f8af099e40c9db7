"""MaxSup (Zhou et al. 2025): label smoothing's pull, on the largest logit instead of the right one."""

from __future__ import annotations

import math

from torch import Tensor

from cclnet import functional
from cclnet.errors import InputError
from cclnet.head import check_labels
from cclnet.methods.base import Classes, Loss, Method


class MaxSup(Method):
    """``L = CE(q, y) + α (max_k z_k − 1/K Σ_k z_k)``."""

    def __init__(self, classes: Classes, alpha: float = 0.1) -> None:
        super().__init__(classes)
        if not 0.0 <= alpha < math.inf:
            raise InputError(f"alpha, the weight of the penalty, must not be negative, got {alpha}. Usual is 0.1.")
        self.alpha = alpha

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        check_labels(labels, len(logits), self.classes.num_classes)
        return Loss.of(
            cross_entropy=functional.cross_entropy(logits, labels, weight),
            max_suppression=self.alpha * max_suppression(logits, weight),
        )


@functional.full_precision
def max_suppression(logits: Tensor, weight: Tensor | None = None) -> Tensor:
    """``max_k z_k − 1/K Σ_k z_k``, mean over the batch: [N, K] → scalar. The maximum carries gradient.
    ``weight`` [N] weighs the samples.

    >>> import torch
    >>> max_suppression(torch.tensor([[3.0, 1.0, -1.0]]))
    tensor(2.)
    """
    return functional.batch_mean(logits.amax(dim=1) - logits.mean(dim=1), weight)
