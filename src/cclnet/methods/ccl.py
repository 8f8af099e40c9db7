"""CCL-Net (Wei et al. 2020): soft labels learned end to end by a head on the features."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cclnet import functional
from cclnet.head import CCLHead
from cclnet.methods.base import Classes, Loss, Method, check_kl_weight


class DictionaryMethod(Method):
    """``L = CE(q, y) + w KL(p_y ‖ q)`` for the network, plus the loss of the head that learns p, in one sum.

    As in the algorithm of the paper, the soft labels p are those of the dictionary before the step and constant for
    the network, and the head gets detached features. Neither gradient reaches the other part.
    """

    def __init__(self, classes: Classes, head: CCLHead, kl_weight: float) -> None:
        super().__init__(classes)
        self.kl_weight = check_kl_weight(kl_weight)
        self.head = head

    def head_weight(self, labels: Tensor, weight: Tensor | None) -> Tensor | None:
        """Weights of the images in the loss of the head, [N]."""
        return weight

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        head_terms = self.head(features, labels, self.head_weight(labels, weight))  # first: it checks the batch
        target = functional.rows_of(self.head.soft_labels(), labels)
        return Loss.of(
            cross_entropy=functional.cross_entropy(logits, labels, weight),
            kl=self.kl_weight * functional.kl_to_target(logits, target, weight),
            **head_terms,
        )

    @property
    def hard_share(self) -> float:
        return 1.0 / (1.0 + self.kl_weight)

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
        head = CCLHead(
            classes.in_features,
            classes.num_classes,
            widths=widths,
            margin=margin,
            correlation_weight=correlation_weight,
            patience=patience,
            dictionary_norm=dictionary_norm,
            temperature=temperature,
            sharpen=sharpen,
        )
        super().__init__(classes, head, kl_weight)
