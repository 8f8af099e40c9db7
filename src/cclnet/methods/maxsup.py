"""MaxSup (Zhou et al. 2025): the penalty of label smoothing, on the largest logit instead of the correct one."""

from __future__ import annotations

from torch import Tensor

from cclnet import functional
from cclnet.errors import check_range
from cclnet.methods.base import Classes, Loss, Method


class MaxSup(Method):
    """``L = CE(q, y) + α (max_k z_k − 1/K Σ_k z_k)``."""

    def __init__(self, classes: Classes, alpha: float = 0.1) -> None:
        super().__init__(classes)
        self.alpha = check_range("alpha", alpha, "[0, inf)", "the weight of the penalty, usually 0.1")

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        self.check_labels(logits, labels)
        return Loss.of(
            cross_entropy=functional.cross_entropy(logits, labels, weight),
            max_suppression=self.alpha * max_suppression(logits, weight),
        )


@functional.full_precision
def max_suppression(logits: Tensor, weight: Tensor | None = None) -> Tensor:
    """``max_k z_k − 1/K Σ_k z_k``, mean over the batch: [N, K] → scalar. The maximum carries gradient.

    >>> import torch
    >>> max_suppression(torch.tensor([[3.0, 1.0, -1.0]]))
    tensor(2.)
    """
    return functional.batch_mean(logits.amax(dim=1) - logits.mean(dim=1), weight)
