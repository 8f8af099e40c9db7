"""CCL-Net (Wei et al. 2020): soft labels learned end to end by a head on the features."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cclnet import functional
from cclnet.head import CCLHead
from cclnet.methods.base import Classes, Loss, SoftLabelMethod


class DictionaryMethod(SoftLabelMethod):
    """``L = CE(q, y) + w KL(p_y ‖ q)`` for the network, plus the loss of the head that learns p, in one sum.

    As in the paper, p comes from the dictionary before the step and is constant for the network, and the head gets
    detached features. Neither gradient reaches the other part.
    """

    def __init__(self, classes: Classes, head: CCLHead, kl_weight: float) -> None:
        super().__init__(classes, kl_weight)
        self.head = head

    def head_weight(self, labels: Tensor, weight: Tensor | None) -> Tensor | None:
        """Weights of the images in the loss of the head, [N]."""
        return weight

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        head_terms = self.head(features, labels, self.head_weight(labels, weight))  # first: it checks the batch
        target = functional.rows_of(self.head.soft_labels(), labels)
        return self.loss(logits, labels, target, weight, **head_terms)

    def soft_labels(self) -> Tensor:
        return self.head.soft_labels()

    def end_epoch(self) -> dict[str, float]:
        return self.head.end_epoch()

    @property
    def collapse_softness(self) -> float:
        return self.head.collapse_softness


class CCL(DictionaryMethod):
    """The method of the paper, with w = 1 and the head described there."""

    def __init__(
        self,
        classes: Classes,
        widths: Sequence[int] = (1024, 1024, 512),
        margin: float = 2.0,
        correlation_weight: float = 10.0,
        patience: int | None = 10,
        dictionary_norm: float = 2.0**0.5,
        kl_weight: float = 1.0,
        temperature: float = 1.0,
        sharpen: float = 1.0,
    ) -> None:
        size = classes.in_features, classes.num_classes
        head = CCLHead(*size, widths, margin, correlation_weight, patience, dictionary_norm, temperature, sharpen)
        super().__init__(classes, head, kl_weight)
