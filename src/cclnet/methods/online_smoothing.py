"""Online label smoothing (Zhang et al. 2021): the soft label of a class is the mean of its correct predictions."""

from __future__ import annotations

import torch
from torch import Tensor

from cclnet import functional
from cclnet.errors import check_range
from cclnet.methods.base import Classes, Loss, Method, sum_by_class, sum_over_processes, table_target

LEVELS = 4  # of the sums of an epoch: probabilities are exact to 2^-65


class OnlineSmoothing(Method):
    """``L = α CE(q, y) + (1 − α) CE(q, S_y)``; ``end_epoch()`` computes the table S of the next epoch.

    Row k of S is the mean prediction over the images of class k that were predicted correctly in the last epoch; in the
    first epoch it is uniform. A class without correct predictions keeps its row.
    """

    table: Tensor
    seen: Tensor

    def __init__(self, classes: Classes, alpha: float = 0.5) -> None:
        super().__init__(classes)
        self.alpha = check_range("alpha", alpha, "[0, 1]", "the weight of the hard label, usually 0.5")
        size = classes.num_classes
        self.register_buffer("table", torch.full((size, size), 1.0 / size, dtype=torch.float64))
        self.register_epoch_sum("seen", LEVELS, size, size)

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        self.check_labels(logits, labels)
        if self.training:  # a mixed image counts for its predicted class, with the weight of that class in the image
            self.seen.add_(sum_correct_predictions(logits.detach(), labels.detach()))
        target = table_target(self.table, logits, labels)
        return Loss.of(
            cross_entropy=self.alpha * functional.cross_entropy(logits, labels, weight),
            online_cross_entropy=(1.0 - self.alpha) * functional.cross_entropy(logits, target, weight),
        )

    @property
    def hard_share(self) -> float:
        return self.alpha

    def soft_labels(self) -> Tensor:
        """The table S in use, [K, K]; the whole target is ``α y + (1 − α) S_y``."""
        return self.table.clone()

    @torch.no_grad()
    def end_epoch(self) -> dict[str, float]:
        """Compute the table of the next epoch and reset the sums."""
        seen = sum_over_processes(self.seen).sum(dim=0)
        count = seen.sum(dim=1, keepdim=True)  # every prediction sums to one
        empty = count == 0
        self.table.copy_(torch.where(empty, self.table, seen / count.masked_fill(empty, 1.0)))
        self.seen.zero_()
        return {"softness": float(functional.softness(self.table)), "classes_never_right": float(empty.sum())}


@functional.full_precision
def sum_correct_predictions(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of ``softmax(z)`` over the correctly predicted images of each class: [N, K] → [levels, K, K] float64.

    >>> sum_correct_predictions(torch.tensor([[2.0, 1.0], [0.0, 0.0], [9.0, 9.0]]), torch.tensor([0, 0, 1])).sum(dim=0)
    tensor([[1.2311, 0.7689],
            [0.0000, 0.0000]], dtype=torch.float64)
    """
    eye = torch.eye(logits.shape[1], dtype=torch.float64, device=logits.device)
    correct = functional.rows_of(eye, labels) * eye[logits.argmax(dim=1)]
    return sum_by_class(torch.softmax(logits.double(), dim=1), correct, LEVELS)
