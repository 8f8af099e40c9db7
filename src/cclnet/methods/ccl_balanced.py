"""CCL whose head hears every class equally, and keeps the dictionary in which classes differed most."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cclnet import functional
from cclnet.errors import InputError, unknown
from cclnet.head import CCLHead
from cclnet.methods.base import Classes, Loss, Method

BALANCES = ("weights", "prior")


class CCLBalanced(Method):
    """``L = CE(q, y) + w KL(p_y ‖ q)`` and the head's own loss as in ``ccl``, with two changes to the head: its cross
    entropy is balanced over classes, and structure, not softness, says when to freeze.

    ``balance`` "weights" weighs each image by ``N / (K n_y)``; "prior" adds ``log(n_k / N)`` to the head's logits while
    it learns, so that its distances need not carry the class frequencies.
    """

    class_weights: Tensor

    def __init__(
        self,
        classes: Classes,
        balance: str = "weights",
        widths: Sequence[int] = (1024, 1024, 512),
        margin: float = 2.0,
        correlation_weight: float = 10.0,
        patience: int | None = 10,
        dictionary_norm: float = 2.0**0.5,
        kl_weight: float = 1.0,
    ) -> None:
        super().__init__(classes)
        if balance not in BALANCES:
            raise unknown("balance", balance, BALANCES)
        if not 0.0 <= kl_weight < float("inf"):
            raise InputError(f"kl_weight must not be negative, got {kl_weight}. The paper has 1.")
        self.kl_weight = kl_weight
        prior = classes.prior()
        if not bool((prior > 0).all()):
            empty = [k for k, share in enumerate(prior.tolist()) if share == 0]
            raise InputError(f"ccl-balanced needs training images of every class; classes {empty} have none.")
        self.head = StructureHead(
            classes.in_features,
            classes.num_classes,
            widths=widths,
            margin=margin,
            correlation_weight=correlation_weight,
            patience=patience,
            dictionary_norm=dictionary_norm,
        )
        if balance == "prior":
            self.head.prior_logits.copy_(prior.log())
        weights = 1.0 / (classes.num_classes * prior) if balance == "weights" else torch.ones_like(prior)
        self.register_buffer("class_weights", weights.float(), persistent=False)

    def forward(
        self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None
    ) -> Loss:
        of_class = functional.rows_of(self.class_weights[:, None], labels)[:, 0]
        head_terms = self.head(features, labels, of_class if weight is None else of_class * weight)
        target = functional.rows_of(self.head.soft_labels(), labels)
        return Loss.of(
            cross_entropy=functional.cross_entropy(logits, labels, weight),
            kl=self.kl_weight * functional.kl_to_target(logits, target, weight),
            **head_terms,
        )

    def soft_labels(self) -> Tensor:
        return self.head.soft_labels()

    def end_epoch(self) -> dict[str, float]:
        return self.head.end_epoch()


class StructureHead(CCLHead):
    """A CCL head that is frozen by structure instead of softness.

    Structure is the standard deviation of the distances between different class embeddings, over their mean: little at
    the start, when training draws them all to one place, and none at the collapse point, when all pairs are at the
    margin. When it has not grown for ``patience`` epochs, the dictionary of its best epoch is taken for good.
    """

    prior_logits: Tensor
    best_structure: Tensor

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        widths: Sequence[int] = (1024, 1024, 512),
        margin: float = 2.0,
        correlation_weight: float = 10.0,
        patience: int | None = 10,
        dictionary_norm: float = 2.0**0.5,
    ) -> None:
        super().__init__(in_features, num_classes, widths, margin, correlation_weight, patience, dictionary_norm)
        self.register_buffer("prior_logits", torch.zeros(num_classes), persistent=False)
        self.register_buffer("best_structure", torch.tensor(0.0, dtype=torch.float64))

    def logits(self, features: Tensor) -> Tensor:
        return super().logits(features) + self.prior_logits

    def structure(self) -> Tensor:
        """Standard deviation of the distances between different classes over their mean, float64."""
        return relative_spread(functional.dictionary_distance(self.dictionary.detach().double()))

    @torch.no_grad()
    def end_epoch(self) -> dict[str, float]:
        structure = float(self.structure())
        return {**super().end_epoch(), "structure": structure}

    def _watch(self, softness: Tensor) -> None:
        structure = self.structure()
        grown = structure > self.best_structure
        self.held_dictionary.copy_(torch.where(grown, self.live_dictionary, self.held_dictionary))
        self.best_structure.copy_(torch.maximum(structure, self.best_structure))
        self.stale_epochs.copy_(torch.where(grown, 0, self.stale_epochs + 1))
        if self.patience is not None:
            self.frozen_flag.copy_(self.stale_epochs >= self.patience)


def relative_spread(distance: Tensor) -> Tensor:
    """Standard deviation of the off-diagonal of a [K, K] matrix over its mean; 0 where the mean is.

    >>> relative_spread(torch.tensor([[0.0, 1.0], [3.0, 0.0]]))
    tensor(0.5000)
    """
    size = len(distance)
    between = distance.flatten()[1:].view(size - 1, size + 1)[:, :-1]  # all but the diagonal
    mean = between.mean()
    return torch.where(mean > 0, between.std(correction=0) / mean.clamp(min=torch.finfo(mean.dtype).tiny), 0.0)
