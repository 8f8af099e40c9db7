"""Methods that are compared with those of the package: corrections with a given matrix, and robust losses.

Formulas as published; z logits, q = softmax(z), y the label. Every class is a ``cclnet.Method``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cclnet import functional
from cclnet.methods import Classes, Loss, Method
from cclnet.methods.ccl_forward import forward_loss


class Forward(Method):
    """``CE(q A, y)`` with a given A [K, K] (Patrini et al. 2017)."""

    def __init__(self, classes: Classes, matrix: Tensor) -> None:
        super().__init__(classes)
        self.register_buffer("matrix", matrix.double())

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        return Loss.of(forward=forward_loss(logits, self.matrix, labels, 1.0, weight))


class Targets(Method):
    """``CE(q, p_y)`` with given targets p [K, K]; ``anneal`` gives the weight of p (the rest is the hard label) in an
    epoch."""

    def __init__(self, classes: Classes, matrix: Tensor, anneal: tuple[int, int] | None = None) -> None:
        super().__init__(classes)
        self.register_buffer("matrix", matrix.float())
        self.anneal, self.epoch = anneal, 0

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        share = 1.0
        if self.anneal is not None:  # soft until the first epoch, hard from the second on, linear in between
            begin, end = self.anneal
            share = min(1.0, max(0.0, (end - self.epoch) / (end - begin)))
        target = share * self.matrix[labels] + (1.0 - share) * F.one_hot(labels, self.classes.num_classes)
        return Loss.of(cross_entropy=functional.cross_entropy(logits, target, weight))

    def end_epoch(self) -> dict[str, float]:
        self.epoch += 1
        return {}


class InstanceTargets(Method):
    """``CE(q, r)`` with ``r_k ∝ p_yk q_k^τ`` (q without gradient): soft targets that depend on the image."""

    def __init__(self, classes: Classes, matrix: Tensor, tau: float = 0.5) -> None:
        super().__init__(classes)
        self.register_buffer("matrix", matrix.float())
        self.tau = tau

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        own = self.matrix[labels].log() + self.tau * F.log_softmax(logits.detach(), dim=1)
        return Loss.of(cross_entropy=functional.cross_entropy(logits, own.softmax(dim=1), weight))


class SymmetricCrossEntropy(Method):
    """``α CE(q, y) + β (−A)(1 − q_y)`` (Wang et al. 2019), with log 0 := A = −4."""

    def __init__(self, classes: Classes, alpha: float = 0.1, beta: float = 1.0) -> None:
        super().__init__(classes)
        self.alpha, self.beta = alpha, beta

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        own = torch.softmax(logits, dim=1).gather(1, labels[:, None])[:, 0]
        return Loss.of(
            cross_entropy=self.alpha * functional.cross_entropy(logits, labels, weight),
            reverse=self.beta * 4.0 * functional.batch_mean(1.0 - own, weight),
        )


class EarlyLearning(Method):
    """ELR: ``CE(q, y) + λ log(1 − t·q)``, t the running mean of the predictions of the image (Liu et al. 2020).

    ``rows`` are the indices of the images of the batch; the bench sets them before each step.
    """

    rows: Tensor

    def __init__(self, classes: Classes, images: int, strength: float = 3.0, decay: float = 0.7) -> None:
        super().__init__(classes)
        self.strength, self.decay = strength, decay
        self.register_buffer("mean", torch.zeros(images, classes.num_classes))

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        q = torch.softmax(logits, dim=1).clamp(1e-4, 1.0 - 1e-4)
        if self.training:
            own = q.detach() / q.detach().sum(dim=1, keepdim=True)
            self.mean[self.rows] = self.decay * self.mean[self.rows] + (1.0 - self.decay) * own
        agreement = (self.mean[self.rows] * q).sum(dim=1)
        return Loss.of(
            cross_entropy=functional.cross_entropy(logits, labels, weight),
            early_learning=self.strength * functional.batch_mean((1.0 - agreement).log(), weight),
        )


class VolMinNet(Method):
    """``CE(q A, y) + λ log|det A|`` with A learned with the network (Li et al. 2021): diagonally dominant, rows sum to
    one."""

    def __init__(self, classes: Classes, volume_weight: float = 1e-4) -> None:
        super().__init__(classes)
        self.volume_weight = volume_weight
        size = classes.num_classes
        self.off_diagonal = nn.Parameter(torch.full((size, size), -2.0))

    def matrix(self) -> Tensor:
        eye = torch.eye(self.classes.num_classes)
        rows = torch.sigmoid(self.off_diagonal) * (1.0 - eye) + eye
        return rows / rows.sum(dim=1, keepdim=True)

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        matrix = self.matrix()
        return Loss.of(
            forward=forward_loss(logits, matrix, labels, 1.0, weight),
            volume=self.volume_weight * torch.linalg.slogdet(matrix)[1],
        )


def anchor_matrix(probabilities: Tensor, quantile: float = 0.97) -> Tensor:
    """A from anchor points (Patrini et al. 2017): row i is the prediction for the image at the ``quantile`` of class i.

    >>> anchor_matrix(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), 1.0)
    tensor([[0.9000, 0.1000],
            [0.3000, 0.7000]])
    """
    at_most = probabilities <= torch.quantile(probabilities, quantile, dim=0)
    anchors = torch.where(at_most, probabilities, -1.0).argmax(dim=0)
    return probabilities[anchors]


def dual_matrix(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Dual-T (Yao et al. 2020): anchors of the predicted class, times how the predicted classes are labelled."""
    size = probabilities.shape[1]
    predicted = F.one_hot(probabilities.argmax(dim=1), size).double()
    counts = predicted.mT @ F.one_hot(labels, size).double()
    share = torch.where(
        counts.sum(1, keepdim=True) > 0, counts / counts.sum(1, keepdim=True).clamp(min=1), torch.eye(size).double()
    )
    return anchor_matrix(probabilities).double() @ share


def uniform_matrix(size: int, softness: float) -> Tensor:
    """``softness`` on the diagonal, the rest evenly."""
    eye = torch.eye(size, dtype=torch.float64)
    return softness * eye + (1.0 - softness) / (size - 1) * (1.0 - eye)
