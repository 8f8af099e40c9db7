"""Teacher-free knowledge distillation (Yuan et al. 2020): a virtual teacher that is always right, softened."""

from __future__ import annotations

import torch
from torch import Tensor

from cclnet import functional
from cclnet.errors import check_range
from cclnet.methods.base import Classes, FixedTableMethod, Loss, table_target


class TeacherFree(FixedTableMethod):
    """``L = (1 − α) CE(q, y) + α KL(t_y ‖ q)`` with the virtual teacher t at a temperature."""

    def __init__(
        self, classes: Classes, alpha: float = 0.1, temperature: float = 20.0, confidence: float = 0.99
    ) -> None:
        super().__init__(classes, virtual_teacher(classes.num_classes, temperature, confidence))
        self.alpha = check_range("alpha", alpha, "[0, 1]", "the weight of the teacher, usually 0.1 to 0.95")

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        self.check_labels(logits, labels)
        teacher = table_target(self.table, logits, labels)
        return Loss.of(
            cross_entropy=(1.0 - self.alpha) * functional.cross_entropy(logits, labels, weight),
            kl=self.alpha * functional.kl_to_target(logits, teacher, weight),
        )

    @property
    def hard_share(self) -> float:
        return 1.0 - self.alpha


def virtual_teacher(num_classes: int, temperature: float = 20.0, confidence: float = 0.99) -> Tensor:
    """``t_y = softmax(d_y / T)``; d_y has ``confidence`` at class y and the rest divided evenly: [K, K] float64.

    >>> virtual_teacher(2, temperature=0.5, confidence=1.0)
    tensor([[0.8808, 0.1192],
            [0.1192, 0.8808]], dtype=torch.float64)
    """
    check_range("temperature", temperature, "(0, inf)", "usually 20")
    hint = f"the probability of the correct class, from 1/{num_classes} (uniform) to 1, usually 0.99"
    check_range("confidence", confidence, f"({1.0 / num_classes}, 1]", hint)
    eye = torch.eye(num_classes, dtype=torch.float64)
    teacher = confidence * eye + (1.0 - confidence) / (num_classes - 1) * (1.0 - eye)
    return torch.softmax(teacher / temperature, dim=1)
