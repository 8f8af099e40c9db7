"""The confidence penalty (Pereyra et al. 2017): a penalty on predictions with low entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from cclnet import functional
from cclnet.errors import check_range
from cclnet.methods.base import Classes, Loss, Method


class ConfidencePenalty(Method):
    """``L = CE(q, y) − β H(q)``."""

    def __init__(self, classes: Classes, beta: float = 0.1) -> None:
        super().__init__(classes)
        self.beta = check_range("beta", beta, "[0, inf)", "the weight of the entropy, usually 0.1")

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        self.check_labels(logits, labels)
        return Loss.of(
            cross_entropy=functional.cross_entropy(logits, labels, weight),
            confidence_penalty=-self.beta * entropy(logits, weight),
        )


@functional.full_precision
def entropy(logits: Tensor, weight: Tensor | None = None) -> Tensor:
    """``H(p) = −Σ_k p_k log p_k`` with ``p = softmax(z)``, mean over the batch: [N, K] → scalar.

    >>> entropy(torch.zeros(1, 4))
    tensor(1.3863)
    """
    log_p = torch.log_softmax(logits, dim=1)
    return functional.batch_mean(-(log_p.exp() * log_p).sum(dim=1), weight)
