"""Label relaxation (Lienen, Hüllermeier 2021): no loss once the correct class has probability 1 − α."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cclnet import functional
from cclnet.errors import InputError, check_range
from cclnet.methods.base import Classes, Loss, Method


class LabelRelaxation(Method):
    """``L = 0`` if ``q_y ≥ 1 − α``, else ``KL(r ‖ q)`` with r the nearest distribution that has ``r_y = 1 − α``."""

    def __init__(self, classes: Classes, alpha: float = 0.1) -> None:
        super().__init__(classes)
        self.alpha = check_range("alpha", alpha, "[0, 1)", "the probability left to the other classes, usually 0.1")

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        if labels.is_floating_point():
            raise InputError(
                "label relaxation needs class indices [N], got class weights: its target is a set of distributions, "
                "and a mixture of two such sets is not defined. So turn mixup and cutmix off, or choose another method."
            )
        self.check_labels(logits, labels)
        return Loss.of(label_relaxation=relaxation_loss(logits, labels, self.alpha, weight))


@functional.full_precision
def relaxation_loss(logits: Tensor, labels: Tensor, alpha: float = 0.1, weight: Tensor | None = None) -> Tensor:
    """``KL(r ‖ p)`` if ``p_y < 1 − α``, else 0, with ``r_y = 1 − α`` and ``r_k = α p_k / Σ_{j≠y} p_j``; mean over the
    batch → scalar.

    Logits [N, K]; class indices [N]; ``weight`` [N] weights the images. For k ≠ y all ratios r_k/p_k are
    ``α / (1 − p_y)``, so the sum is ``(1 − α) log((1 − α)/p_y) + α log(α/(1 − p_y))``. r minimises the divergence over
    its set, so the gradient is ``p − r`` whether r is treated as constant or not.

    >>> relaxation_loss(torch.tensor([[2.2, 0.0], [0.0, 0.0]]), torch.tensor([0, 0]), alpha=0.25)
    tensor(0.0654)
    """
    index = labels[:, None]
    log_p = torch.log_softmax(logits, dim=1).gather(1, index).squeeze(1)
    log_rest = functional.log_complement(logits).gather(1, index).squeeze(1)
    threshold = math.log1p(-alpha)
    divergence = (1.0 - alpha) * (threshold - log_p)
    if alpha > 0.0:
        divergence = divergence + alpha * (math.log(alpha) - log_rest)
    return functional.batch_mean(torch.where(log_p >= threshold, 0.0, divergence), weight)
