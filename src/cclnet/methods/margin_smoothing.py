"""Margin-based label smoothing (Liu et al. 2022): a penalty on logit differences above a margin."""

from __future__ import annotations

import torch
from torch import Tensor

from cclnet import functional
from cclnet.errors import check_range
from cclnet.methods.base import Classes, Loss, Method


class MarginSmoothing(Method):
    """``L = CE(q, y) + α · 1/K Σ_k relu(max_j z_j − z_k − m)``."""

    def __init__(self, classes: Classes, alpha: float = 0.1, margin: float = 10.0) -> None:
        super().__init__(classes)
        self.alpha = check_range("alpha", alpha, "[0, inf)", "the weight of the penalty, usually 0.1")
        self.margin = check_range("margin", margin, "[0, inf]", "a difference of logits, usually 10")

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        self.check_labels(logits, labels)
        return Loss.of(
            cross_entropy=functional.cross_entropy(logits, labels, weight),
            margin=self.alpha * margin_penalty(logits, self.margin, weight),
        )


@functional.full_precision
def margin_penalty(logits: Tensor, margin: float = 10.0, weight: Tensor | None = None) -> Tensor:
    """``1/K Σ_k relu(max_j z_j − z_k − m)``, mean over the batch: [N, K] → scalar. The maximum carries gradient.

    >>> margin_penalty(torch.tensor([[14.0, 2.0]]))
    tensor(1.)
    """
    gaps = logits.amax(dim=1, keepdim=True) - logits
    return functional.batch_mean(torch.relu(gaps - margin).mean(dim=1), weight)
