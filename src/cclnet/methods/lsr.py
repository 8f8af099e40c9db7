"""Label smoothing regularisation (Szegedy et al. 2016), uniform or with the class prior."""

from __future__ import annotations

import torch
from torch import Tensor

from cclnet import functional
from cclnet.head import check_labels
from cclnet.methods.base import Classes, Loss, Method


class LSR(Method):
    """``L = CE(q, (1 − ε) y + ε u)`` with u uniform, or the class frequencies where ``prior`` is true."""

    table: Tensor

    def __init__(self, classes: Classes, epsilon: float = 0.1, prior: bool = False) -> None:
        super().__init__(classes)
        distribution = classes.prior() if prior else None
        table = functional.smoothed_labels(classes.num_classes, epsilon, distribution)
        self.register_buffer("table", table.float(), persistent=False)

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        check_labels(labels, len(logits), self.classes.num_classes)
        table = self.table.to(torch.promote_types(logits.dtype, torch.float32))
        target = functional.rows_of(table, labels)
        return Loss.of(cross_entropy=functional.cross_entropy(logits, target, weight))

    def soft_labels(self) -> Tensor:
        return self.table
