"""Forward CCL: similarity between classes as a model of wrong labels, not as a target."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cclnet import functional
from cclnet.errors import check_range
from cclnet.methods.base import Classes, Loss, Method, sum_over_processes


class CCLForward(Method):
    """``L = −1/s log Σ_k (q_k A_ky)^s``: the network predicts the true class, and A how a true class is labelled.

    ``s = 1`` is ``CE(q A, y)``. The gradient is that of cross entropy with the target ``r_k ∝ (q_k A_ky)^s``: the
    probability that the image is of class k given its label, raised to s. What is exported predicts q, so nothing has
    to be unsoftened.

    For ``warmup`` epochs A is the identity (hard labels), because a network learns what many labels agree on before it
    memorises single ones. The last of these epochs gives A, which then stays fixed: the diagonal is ``softness``, and
    the rest of row i is shared out like the labels of images that the network predicts as class i.
    """

    table: Tensor
    label_sum: Tensor
    epochs: Tensor

    def __init__(
        self, classes: Classes, softness: float = 0.7, warmup: int = 5, sharpen: float = 2.0, power: float = 4.0
    ) -> None:
        super().__init__(classes)
        size = classes.num_classes
        hint = "the assumed share of correct labels in each class, above 0.5; 1 is hard labels"
        self.softness = check_range("softness", softness, "(0, 1]", hint)
        self.warmup = int(check_range("warmup", warmup, "[1, inf)", "epochs of hard labels before A is used"))
        self.sharpen = check_range("sharpen", sharpen, "(0, inf)", "1 is CE(q A, y); more trusts the network more")
        self.power = check_range("power", power, "(0, inf)", "more counts only images the network is sure of")
        self.register_buffer("table", torch.eye(size, dtype=torch.float64))
        self.register_buffer("label_sum", torch.zeros(size, size, dtype=torch.float64))
        self.register_buffer("epochs", torch.tensor(0))

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        self.check_labels(logits, labels)
        if self.training:
            with torch.no_grad():
                sums = labels_of_predicted(logits.detach(), labels, self.label_shares(logits), self.power)
                self.label_sum.add_(sum_over_processes(sums))
        return Loss.of(label_likelihood=forward_loss(logits, self.table, labels, self.sharpen, weight))

    def label_shares(self, logits: Tensor) -> Tensor:
        """Shares of the classes among the labels, [K]; equal where the counts are unknown."""
        if self.classes.counts is None:
            return torch.full_like(logits[0], 1.0 / self.classes.num_classes, dtype=torch.float64)
        return self.classes.prior().to(logits.device).clamp(min=1e-6)  # a class without images

    def soft_labels(self) -> Tensor:
        """A [K, K]: row k is how images of class k are labelled."""
        return self.table.clone()

    def target(self) -> None:
        """None: the network is not trained towards A, so there is nothing to unsoften."""
        return None

    @torch.no_grad()
    def end_epoch(self) -> dict[str, float]:
        """Compute A at the end of the warm-up; reset the sums."""
        self.epochs.add_(1)
        estimate = label_model(self.label_sum, self.softness)
        self.table.copy_(torch.where(self.epochs == self.warmup, estimate, self.table))
        self.label_sum.zero_()
        return {"softness": float(functional.softness(self.table))}


@functional.full_precision
def forward_loss(
    logits: Tensor, table: Tensor, labels: Tensor, sharpen: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """``−1/s log Σ_k (q_k A_ky)^s``, mean over the batch: [N, K], [K, K], [N] or [N, K] → scalar.

    For class weights of mixed images A_ky is the weighted mean over their labels.

    >>> A = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    >>> forward_loss(torch.zeros(1, 2), A, torch.tensor([0])).neg().exp()  # 0.5 · 0.9 + 0.5 · 0.2
    tensor(0.5500)
    """
    columns = functional.rows_of(table.mT.to(torch.promote_types(logits.dtype, torch.float32)), labels)
    joint = F.log_softmax(logits, dim=1) + columns.log()
    return functional.batch_mean(-torch.logsumexp(sharpen * joint, dim=1) / sharpen, weight)


@functional.full_precision
def labels_of_predicted(logits: Tensor, labels: Tensor, shares: Tensor, power: float) -> Tensor:
    """Labels summed over the images that are predicted as each class: [N, K], [N] → [K, K] float64, row i for class i.

    An image counts for class i by ``b_i^power``, with ``b ∝ q / shares``: with the class frequencies divided out, rare
    classes are predicted too.

    >>> labels_of_predicted(torch.tensor([[99.0, 0.0], [0.0, 99.0]]), torch.tensor([1, 1]), torch.ones(2), 1.0)
    tensor([[0., 1.],
            [0., 1.]], dtype=torch.float64)
    """
    one_hot = torch.eye(logits.shape[1], dtype=torch.float64, device=logits.device)
    balanced = torch.softmax(logits.double() - shares.double().log(), dim=1)
    return balanced.pow(power).mT @ functional.rows_of(one_hot, labels)


def label_model(label_sum: Tensor, softness: float) -> Tensor:
    """``softness`` on the diagonal and the off-diagonal sums of each row, scaled to the rest: [K, K] → [K, K].

    A row without any is shared out evenly.

    >>> label_model(torch.tensor([[9.0, 3.0, 1.0], [0.0, 5.0, 0.0], [2.0, 2.0, 0.0]]), 0.6)
    tensor([[0.6000, 0.3000, 0.1000],
            [0.2000, 0.6000, 0.2000],
            [0.2000, 0.2000, 0.6000]])
    """
    hard = torch.eye(len(label_sum), dtype=label_sum.dtype, device=label_sum.device)
    others = label_sum * (1.0 - hard)
    total = others.sum(dim=1, keepdim=True)
    shared = torch.where(total > 0, others / total.masked_fill(total == 0, 1.0), (1.0 - hard) / (len(hard) - 1))
    return softness * hard + (1.0 - softness) * shared
