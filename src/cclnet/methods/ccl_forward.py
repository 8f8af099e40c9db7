"""Forward CCL: similarity between classes as a model of wrong labels, not as a target."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cclnet import functional
from cclnet.errors import check_range
from cclnet.methods.base import Classes, Loss, Method, sum_by_class, sum_over_processes, to_exact_step

LEVELS = 8  # of the sums of an epoch: shares below 2^-128 count as 0
ITERATIONS = 200  # of the fixed point for the shares of the true classes
RAREST = 1e-6  # share of a class without images
FEWEST = 10.0  # images that the network is sure of, for a share of correct labels


class CCLForward(Method):
    """``L = −1/s log Σ_k w_k (q_k A_ky)^s``: the network predicts the true class, and A how a true class is labelled.

    ``s = 1`` and ``w = 1`` are ``CE(q A, y)``. The gradient is that of cross entropy with the target
    ``r_k ∝ w_k (q_k A_ky)^s``: the probability that the image is of class k given its label, raised to s. What is
    exported predicts q, so nothing has to be unsoftened.

    For ``warmup`` epochs A is the identity (hard labels), because a network learns what many labels agree on before it
    memorises single ones. The last of these epochs gives A, which then stays fixed. The rest of row i is shared out
    like the labels of images that the network predicts as class i. The diagonal, the same for all classes, is
    ``softness``, or by default the share of correct labels in the class that the network knows best: where it is sure,
    its class is almost always the true one. So labels that are right stay hard labels.

    A network that corrects labels prefers frequent classes more and more. ``w_k = (π_k / q̄_k)^align`` holds it back:
    q̄ is the mean prediction of the last epoch, and π are the shares of the true classes that explain the shares of the
    labels under A.
    """

    table: Tensor
    class_weight: Tensor
    label_sum: Tensor
    label_count: Tensor
    prediction_sum: Tensor
    epochs: Tensor
    label_shares: Tensor  # shares of the classes among the labels, [K]; equal where the counts are unknown

    def __init__(
        self,
        classes: Classes,
        softness: float = 0.0,
        warmup: int = 5,
        sharpen: float = 2.0,
        power: float = 4.0,
        align: float = 1.0,
    ) -> None:
        super().__init__(classes)
        size = classes.num_classes
        hint = "the share of correct labels in each class, above 0.5; 1 is hard labels, 0 estimates it"
        self.softness = check_range("softness", softness, "[0, 1]", hint)
        self.warmup = int(check_range("warmup", warmup, "[1, inf)", "epochs of hard labels before A is used"))
        self.sharpen = check_range("sharpen", sharpen, "(0, inf)", "1 is CE(q A, y); more trusts the network more")
        self.power = check_range("power", power, "(0, inf)", "more counts only images the network is sure of")
        self.align = check_range("align", align, "[0, 1]", "0 lets the predicted shares of the classes drift")
        self.register_buffer("table", torch.eye(size, dtype=torch.float64))
        self.register_buffer("class_weight", torch.ones(size, dtype=torch.float64))
        self.register_epoch_sum("label_sum", LEVELS, size, size)
        self.register_epoch_sum("label_count", size)
        self.register_epoch_sum("prediction_sum", size)
        self.register_buffer("epochs", torch.tensor(0))
        # A buffer, because a CUDA graph cannot copy from the host. Known from the settings, so it is not saved.
        shares = torch.full((size,), 1.0 / size, dtype=torch.float64) if classes.counts is None else classes.prior()
        self.register_buffer("label_shares", shares.clamp(min=RAREST), persistent=False)

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        self.check_labels(logits, labels)
        if self.training:
            self.accumulate(logits.detach(), labels)
        loss = forward_loss(logits, self.table, labels, self.sharpen, weight, self.class_weight)
        return Loss.of(label_likelihood=loss)

    @torch.no_grad()
    def accumulate(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch to the sums of the epoch; weights of the images are ignored."""
        one_hot = torch.eye(self.classes.num_classes, dtype=torch.float64, device=logits.device)
        self.label_sum.add_(labels_of_predicted(logits, labels, self.label_shares, self.power))
        self.label_count.add_(to_exact_step(functional.rows_of(one_hot, labels)).sum(dim=0))
        self.prediction_sum.add_(to_exact_step(torch.softmax(logits.double(), dim=1)).sum(dim=0))

    def soft_labels(self) -> Tensor:
        """A [K, K]: row k is how images of class k are labelled."""
        return self.table.clone()

    def target(self) -> None:
        """None: the network is not trained towards A, so there is nothing to unsoften."""
        return None

    @torch.no_grad()
    def end_epoch(self) -> dict[str, float]:
        """Compute A at the end of the warm-up, and from then on the weights of the classes; reset the sums."""
        self.epochs.add_(1)
        sums = {name: sum_over_processes(getattr(self, name)) for name in self.epoch_sums}
        label_sum = sums["label_sum"].sum(dim=0)
        softness = self.softness or share_of_correct_labels(label_sum)  # a setting of 0 estimates it
        self.table.copy_(torch.where(self.epochs == self.warmup, label_model(label_sum, softness), self.table))
        expected = true_shares(sums["label_count"], self.table)
        predicted = sums["prediction_sum"].clamp(min=RAREST)
        aligned = (expected / (predicted / predicted.sum())).pow(self.align)
        usable = (self.epochs >= self.warmup) & (sums["label_count"].sum() > 0)
        self.class_weight.copy_(torch.where(usable, aligned, self.class_weight))
        for own in sums.values():
            own.zero_()
        return {"softness": float(functional.softness(self.table))}


@functional.full_precision
def forward_loss(
    logits: Tensor,
    table: Tensor,
    labels: Tensor,
    sharpen: float = 1.0,
    weight: Tensor | None = None,
    class_weight: Tensor | None = None,
) -> Tensor:
    """``−1/s log Σ_k w_k (q_k A_ky)^s``, mean over the batch: [N, K], [K, K], [N] or [N, K] → scalar.

    For class weights of mixed images A_ky is the weighted mean over their labels. ``class_weight`` is w [K], by default
    one, and counts relative to that of the label: with A = 1 the loss is cross entropy for any w.

    >>> A = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    >>> forward_loss(torch.zeros(1, 2), A, torch.tensor([0])).neg().exp()  # 0.5 · 0.9 + 0.5 · 0.2
    tensor(0.5500)
    """
    columns = functional.rows_of(table.mT.to(torch.promote_types(logits.dtype, torch.float32)), labels)
    joint = sharpen * (F.log_softmax(logits, dim=1) + columns.log())
    if class_weight is not None:
        log_weight = class_weight.log().to(joint.dtype)
        joint = joint + log_weight - functional.rows_of(log_weight[:, None], labels)
    return functional.batch_mean(-torch.logsumexp(joint, dim=1) / sharpen, weight)


@functional.full_precision
def labels_of_predicted(logits: Tensor, labels: Tensor, shares: Tensor, power: float) -> Tensor:
    """Labels summed over the images that are predicted as each class: [N, K], [N] → [levels, K, K] float64, whose sum
    over the levels has row i for class i.

    An image counts for class i by ``b_i^power``, with ``b ∝ q / shares``: with the class frequencies divided out, rare
    classes are predicted too.

    >>> labels_of_predicted(torch.tensor([[99.0, 0.0], [0.0, 99.0]]), torch.tensor([1, 1]), torch.ones(2), 1.0)[0]
    tensor([[0., 1.],
            [0., 1.]], dtype=torch.float64)
    """
    one_hot = torch.eye(logits.shape[1], dtype=torch.float64, device=logits.device)
    balanced = torch.softmax(logits.double() - shares.double().log(), dim=1)
    return sum_by_class(balanced.pow(power), functional.rows_of(one_hot, labels), LEVELS).mT


def label_model(label_sum: Tensor, softness: float | Tensor) -> Tensor:
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


def share_of_correct_labels(label_sum: Tensor) -> Tensor:
    """The largest share of the own label in a row of the sums of ``labels_of_predicted``, [K, K] → scalar.

    Rows of classes that the network confuses have smaller shares even if all labels are right; the largest is that of
    the class it knows best. Rows of few images are left out; without any other, labels count as right.

    >>> share_of_correct_labels(torch.tensor([[60.0, 40.0], [10.0, 90.0]]))
    tensor(0.9000)
    """
    total = label_sum.sum(dim=1)
    enough = total >= FEWEST
    shares = label_sum.diagonal() / total.clamp(min=FEWEST)
    return torch.where(enough.any(), shares.masked_fill(~enough, 0.0).max(), 1.0)


def true_shares(label_count: Tensor, table: Tensor) -> Tensor:
    """The shares π of the true classes that make the shares of the labels most likely, ``π A ≈ labels``: [K], [K, K] →
    [K], by expectation maximisation from the labels' own.

    >>> true_shares(torch.tensor([62.0, 38.0]), torch.tensor([[0.7, 0.3], [0.3, 0.7]])).round(decimals=2)
    tensor([0.8000, 0.2000])
    """
    labels = (label_count / label_count.sum().clamp(min=1.0)).clamp(min=RAREST)
    shares = labels
    for _ in range(ITERATIONS):
        joint = shares[:, None] * table
        shares = (joint / joint.sum(dim=0, keepdim=True) * labels).sum(dim=1).clamp(min=RAREST)
    return shares / shares.sum()
