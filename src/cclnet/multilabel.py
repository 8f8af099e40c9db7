"""The mathematics of several labels at once: pure functions, one formula each.

Shapes: N images, K classes. An image's labels are marks, a row of K numbers: 1 where the class is there, 0 where it is
not; in between where images were mixed. Each class has a logit of its own, ``q_k = sigmoid(z_k)``, and K decisions are
taken that know nothing of each other. Losses are means over the classes, so that their size does not grow with K.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cclnet.errors import InputError
from cclnet.functional import batch_mean, full_precision

__all__ = ["any_of", "binary_cross_entropy", "binary_kl", "marks_of"]


def marks_of(labels: Tensor, count: int, num_classes: int) -> Tensor:
    """Labels as floating-point marks [N, K]; what are no marks is refused. Booleans and whole numbers will do.

    As everywhere, values are looked at on the CPU only: on a GPU the look would wait for the device at every step.

    >>> marks_of(torch.tensor([[True, False]]), 1, 2)
    tensor([[1., 0.]])
    """
    if labels.shape != (count, num_classes):
        hint = " For one label an image take a method for one: 'ccl-centroid', 'hard'." if labels.dim() == 1 else ""
        raise InputError(
            f"labels of a multi-label method must be zeros and ones of shape [{count}, {num_classes}], a column a "
            f"class, got {labels.dtype} {list(labels.shape)}.{hint}"
        )
    marks = labels if labels.is_floating_point() else labels.to(torch.get_default_dtype())
    if (
        marks.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not bool(((marks >= 0) & (marks <= 1)).all())
    ):
        raise InputError(
            "labels of a multi-label method must lie from 0 (not there) to 1 (there), got "
            f"{float(marks.min()):g} to {float(marks.max()):g}. A label that is not known (-1, NaN) has to be decided "
            "first."
        )
    return marks


@full_precision
def any_of(table: Tensor, marks: Tensor) -> Tensor:
    """The soft target of marks [N, K], by a table [K, K] of label distributions (row k: that of class k) → [N, K].

    ``t_k = 1 − Π_j (1 − m_j p_jk)``: each class that is there is taken for class k with probability p_jk, and t_k is
    the chance that any of them is. One label alone gives its row, no label zeros, and no further label lowers any.

    >>> table = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]])
    >>> any_of(table, torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]))
    tensor([[0.8000, 0.1000, 0.1000],
            [0.8200, 0.8200, 0.1900]])
    """
    # By logarithms, so that a small p keeps all its digits.
    return -torch.expm1(torch.log1p(-marks.to(table.dtype)[:, :, None] * table).sum(dim=1))


@full_precision
def binary_cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """``−1/K Σ_k t_k log q_k + (1 − t_k) log(1 − q_k)`` of logits and targets [N, K], mean over the batch → scalar;
    ``weight`` [N] weighs the images.

    >>> binary_cross_entropy(torch.zeros(1, 3), torch.tensor([[1.0, 0.0, 1.0]]))
    tensor(0.6931)
    """
    losses = F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction="none")
    return batch_mean(losses.mean(dim=1), weight)


@full_precision
def binary_kl(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """``1/K Σ_k KL(t_k ‖ q_k)``, each between two coins: the binary cross entropy less what it is at best, so that
    it is 0 where the target is met. Logits and targets [N, K] → scalar; ``weight`` [N] weighs the images.

    >>> binary_kl(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.7311]])).abs() < 1e-6
    tensor(True)
    """
    target = target.to(logits.dtype)
    at_best = -torch.xlogy(target, target) - torch.xlogy(1.0 - target, 1.0 - target)
    return binary_cross_entropy(logits, target, weight) - batch_mean(at_best.mean(dim=1), weight)
