"""Teacher-free distillation (Yuan et al. 2020): a teacher that is always right, made up and softened."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cclnet import functional
from cclnet.errors import InputError
from cclnet.head import check_labels
from cclnet.methods.base import Classes, Loss, Method


class TeacherFree(Method):
    """``L = (1 − α) CE(q, y) + α KL(t_y ‖ q)`` with t the virtual teacher at a temperature."""

    table: Tensor

    def __init__(
        self, classes: Classes, alpha: float = 0.1, temperature: float = 20.0, confidence: float = 0.99
    ) -> None:
        super().__init__(classes)
        if not 0.0 <= alpha <= 1.0:
            raise InputError(f"alpha, the teacher's share, must lie in [0, 1], got {alpha}. Usual is 0.1 to 0.95.")
        self.alpha = alpha
        table = virtual_teacher(classes.num_classes, temperature, confidence)
        self.register_buffer("table", table, persistent=False)

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        check_labels(labels, len(logits), self.classes.num_classes)
        table = self.table.to(torch.promote_types(logits.dtype, torch.float32))
        teacher = functional.rows_of(table, labels)
        return Loss.of(
            cross_entropy=(1.0 - self.alpha) * functional.cross_entropy(logits, labels, weight),
            kl=self.alpha * functional.kl_to_target(logits, teacher, weight),
        )

    @property
    def hard_share(self) -> float:
        return 1.0 - self.alpha

    def soft_labels(self) -> Tensor:
        """What the teacher says, [K, K]. (The whole target is ``(1 − α) y + α t_y``.)"""
        return self.table


def virtual_teacher(num_classes: int, temperature: float = 20.0, confidence: float = 0.99) -> Tensor:
    """``t_y = softmax(d_y / T)``, where d_y gives ``confidence`` to class y and the rest evenly: [K, K] float64.

    >>> virtual_teacher(2, temperature=0.5, confidence=1.0)
    tensor([[0.8808, 0.1192],
            [0.1192, 0.8808]], dtype=torch.float64)
    """
    if not 0.0 < temperature < math.inf:
        raise InputError(f"temperature must be a positive number, got {temperature}. Usual is 20.")
    if not 1.0 / num_classes < confidence <= 1.0:
        raise InputError(
            f"confidence must lie above 1/{num_classes} (an even guess) and not above 1, or the teacher is not "
            f"right, got {confidence}. Usual is 0.99."
        )
    own = torch.eye(num_classes, dtype=torch.float64)
    teacher = confidence * own + (1.0 - confidence) / (num_classes - 1) * (1.0 - own)
    return torch.softmax(teacher / temperature, dim=1)
