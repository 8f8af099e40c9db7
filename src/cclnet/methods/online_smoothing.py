"""Online label smoothing (Zhang et al. 2021): the label of a class is what the network says of it when right."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from cclnet import functional
from cclnet.errors import InputError
from cclnet.head import check_labels
from cclnet.methods.base import Classes, Loss, Method


class OnlineSmoothing(Method):
    """``L = α CE(q, y) + (1 − α) CE(q, S_y)``; ``end_epoch()`` makes the table S of the next epoch.

    Row k of S is the mean prediction over the images of class k that were predicted right in the last epoch;
    uniform in the first. A class that was never right keeps the row it has, so no target is ever empty.

    What was seen since the last epoch's end is in a buffer, so a run that is resumed in mid-epoch goes on as if
    it had not stopped. On several processes that buffer is the same on all of them: each batch's share is
    summed at once, because distributed data parallel overwrites buffers with those of process 0 at every step,
    and because a checkpoint holds one process's state.
    """

    table: Tensor
    seen: Tensor

    def __init__(self, classes: Classes, alpha: float = 0.5) -> None:
        super().__init__(classes)
        if not 0.0 <= alpha <= 1.0:
            raise InputError(f"alpha, the share of the hard label, must lie in [0, 1], got {alpha}. Usual is 0.5.")
        self.alpha = alpha
        size = classes.num_classes
        self.register_buffer("table", torch.full((size, size), 1.0 / size, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(size, size, dtype=torch.float64))

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        check_labels(labels, len(logits), self.classes.num_classes)
        if self.training:
            self.remember(logits.detach(), labels)
        table = self.table.to(torch.promote_types(logits.dtype, torch.float32))
        target = functional.rows_of(table, labels)
        return Loss.of(
            cross_entropy=self.alpha * functional.cross_entropy(logits, labels, weight),
            online_cross_entropy=(1.0 - self.alpha) * functional.cross_entropy(logits, target, weight),
        )

    @torch.no_grad()
    def remember(self, logits: Tensor, labels: Tensor) -> None:
        """Add the predictions that were right to the rows of their classes. A mixed image counts for the class
        it was predicted as, by that class's share in it. Sample weights do not count here."""
        seen = sum_of_right_predictions(logits, labels)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(seen)
        self.seen.add_(seen)

    @property
    def hard_share(self) -> float:
        return self.alpha

    def soft_labels(self) -> Tensor:
        """The table S in use, [K, K]. (The whole target is ``α y + (1 − α) S_y``.)"""
        return self.table.clone()

    @torch.no_grad()
    def end_epoch(self) -> dict[str, float]:
        """Take what was seen as the new table and begin again."""
        total = self.seen.sum(dim=1, keepdim=True)  # of distributions: how many there were
        never_right = total == 0
        self.table.copy_(torch.where(never_right, self.table, self.seen / total.masked_fill(never_right, 1.0)))
        self.seen.zero_()
        return {"softness": float(functional.softness(self.table)), "classes_never_right": float(never_right.sum())}


@functional.full_precision
def sum_of_right_predictions(logits: Tensor, labels: Tensor) -> Tensor:
    """Row k: the sum of ``softmax(z)`` over the samples of class k whose largest logit is k. [N, K] → [K, K]
    float64 (in which no GPU rounds a matrix product to fewer digits).

    >>> sum_of_right_predictions(torch.tensor([[2.0, 1.0], [0.0, 0.0], [9.0, 9.0]]), torch.tensor([0, 0, 1]))
    tensor([[1.2311, 0.7689],
            [0.0000, 0.0000]], dtype=torch.float64)
    """
    own = torch.eye(logits.shape[1], dtype=torch.float64, device=logits.device)
    right = functional.rows_of(own, labels) * own[logits.argmax(dim=1)]
    return right.mT @ torch.softmax(logits.double(), dim=1)
