"""Focal loss (Lin et al. 2017; Mukhoti et al. 2020 for calibration): confident correct predictions count less."""

from __future__ import annotations

import torch
from torch import Tensor

from cclnet import functional
from cclnet.errors import check_range
from cclnet.methods.base import Classes, Loss, Method


class Focal(Method):
    """``L = −(1 − q_y)^γ log q_y``."""

    def __init__(self, classes: Classes, gamma: float = 3.0) -> None:
        super().__init__(classes)
        self.gamma = check_range("gamma", gamma, "[0, inf)", "the focusing exponent, usually 2 or 3")

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        self.check_labels(logits, labels)
        return Loss.of(focal=focal_loss(logits, labels, self.gamma, weight))


@functional.full_precision
def focal_loss(logits: Tensor, labels: Tensor, gamma: float = 3.0, weight: Tensor | None = None) -> Tensor:
    """``−Σ_k y_k (1 − p_k)^γ log p_k``, mean over the batch → scalar.

    Logits [N, K]; labels are class indices [N] or class weights [N, K]; ``weight`` [N] weights the images. The power is
    computed from ``log(1 − p)``, which stays finite where p rounds to one, so no gradient is NaN for γ < 1.

    >>> focal_loss(torch.zeros(1, 2), torch.tensor([0]), gamma=1.0)
    tensor(0.3466)
    """
    eye = torch.eye(logits.shape[1], dtype=logits.dtype, device=logits.device)
    focus = (gamma * functional.log_complement(logits)).exp()
    losses = -(functional.rows_of(eye, labels) * focus * torch.log_softmax(logits, dim=1)).sum(dim=1)
    return functional.batch_mean(losses, weight)
