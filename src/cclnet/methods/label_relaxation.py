"""Label relaxation (Lienen, Hüllermeier 2021): right enough is right; no distribution is imposed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cclnet import functional
from cclnet.errors import InputError
from cclnet.head import check_labels
from cclnet.methods.base import Classes, Loss, Method


class LabelRelaxation(Method):
    """``L = 0`` where ``q_y ≥ 1 − α``, else ``KL(r ‖ q)``, with r the nearest distribution that gives y as much."""

    def __init__(self, classes: Classes, alpha: float = 0.1) -> None:
        super().__init__(classes)
        if not 0.0 <= alpha < 1.0:
            raise InputError(f"alpha, the share that is left open, must lie in [0, 1), got {alpha}. Usual is 0.1.")
        self.alpha = alpha

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        if labels.is_floating_point():
            raise InputError(
                "label relaxation takes class indices [N], got class weights. Its target is the set of all "
                "distributions that give one class at least 1 − alpha, and how to mix two such sets is not "
                "defined: turn mixup and cutmix off, or choose another method."
            )
        check_labels(labels, len(logits), self.classes.num_classes)
        return Loss.of(label_relaxation=relaxation_loss(logits, labels, self.alpha, weight))


@functional.full_precision
def relaxation_loss(logits: Tensor, labels: Tensor, alpha: float = 0.1, weight: Tensor | None = None) -> Tensor:
    """``KL(r ‖ p)`` where ``p_y < 1 − α``, else 0; ``r_y = 1 − α``, ``r_k = α p_k / Σ_{j≠y} p_j``. Mean over the
    batch: logits [N, K], class indices [N] → scalar; ``weight`` [N] weighs the samples.

    All r_k/p_k but the own are ``α / (1 − p_y)``, so the sum over classes is the divergence of two coins:
    ``(1 − α) log((1 − α)/p_y) + α log(α/(1 − p_y))``. r is the minimum over its set, so letting it move with p or
    holding it constant gives the same gradient, ``p − r``.

    >>> relaxation_loss(torch.tensor([[2.2, 0.0], [0.0, 0.0]]), torch.tensor([0, 0]), alpha=0.25)
    tensor(0.0654)
    """
    own = labels[:, None]
    log_right = torch.log_softmax(logits, dim=1).gather(1, own).squeeze(1)
    log_wrong = functional.log_complement(logits).gather(1, own).squeeze(1)
    least = math.log1p(-alpha)
    divergence = (1.0 - alpha) * (least - log_right)
    if alpha > 0.0:
        divergence = divergence + alpha * (math.log(alpha) - log_wrong)
    return functional.batch_mean(torch.where(log_right >= least, 0.0, divergence), weight)
