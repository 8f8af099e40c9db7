"""CCL whose head hears every class equally, and whose dictionary is frozen before it loses its order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cclnet import functional
from cclnet.errors import InputError, unknown
from cclnet.head import CCLHead
from cclnet.methods.base import Classes
from cclnet.methods.ccl import DictionaryMethod

BALANCES = ("weights", "prior")


class CCLBalanced(DictionaryMethod):
    """As ``ccl``, with two changes to the head: its cross entropy is balanced over classes, and how unequal the
    distances between classes are, not softness, says when to freeze.

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
        hold: float = 0.5,
        dictionary_norm: float = 2.0**0.5,
        kl_weight: float = 1.0,
        temperature: float = 1.0,
        sharpen: float = 1.0,
    ) -> None:
        if balance not in BALANCES:
            raise unknown("balance", balance, BALANCES)
        prior = classes.prior()
        if not bool((prior > 0).all()):
            empty = [k for k, share in enumerate(prior.tolist()) if share == 0]
            raise InputError(f"ccl-balanced needs training images of every class; classes {empty} have none.")
        head = HoldingHead(
            classes.in_features,
            classes.num_classes,
            hold,
            widths=widths,
            margin=margin,
            correlation_weight=correlation_weight,
            patience=None,
            dictionary_norm=dictionary_norm,
            temperature=temperature,
            sharpen=sharpen,
        )
        if balance == "prior":
            head.prior_logits.copy_(prior.log())
        super().__init__(classes, head, kl_weight)
        weights = 1.0 / (classes.num_classes * prior) if balance == "weights" else torch.ones_like(prior)
        self.register_buffer("class_weights", weights.float(), persistent=False)

    def head_weight(self, labels: Tensor, weight: Tensor | None) -> Tensor:
        of_class = functional.rows_of(self.class_weights[:, None], labels)[:, 0]
        return of_class if weight is None else of_class * weight


class HoldingHead(CCLHead):
    """A CCL head that is frozen once its structure has fallen to the share ``hold`` of the most it had; 0 never freezes
    it. Structure is the standard deviation of the distances between class embeddings.

    Training ends at the collapse point, with all classes equally far apart. On the way there they part one after the
    other, those that look least alike first; waiting until all have parted loses what that order says.
    """

    prior_logits: Tensor
    most_structure: Tensor

    def __init__(self, in_features: int, num_classes: int, hold: float = 0.5, **settings: object) -> None:
        super().__init__(in_features, num_classes, **settings)  # type: ignore[arg-type]
        if not 0.0 <= hold < 1.0:
            raise InputError(
                "hold, the share of its most to which structure falls before the freeze, must lie in [0, 1), got "
                f"{hold}. Usual is 0.5; 0 never freezes."
            )
        self.hold = hold
        self.register_buffer("prior_logits", torch.zeros(num_classes), persistent=False)
        self.register_buffer("most_structure", torch.tensor(0.0))

    def logits(self, features: Tensor) -> Tensor:
        return super().logits(features) + self.prior_logits

    def structure(self) -> Tensor:
        """Standard deviation of the distances between different classes; 0 where all are equally far apart."""
        distance = functional.dictionary_distance(self.dictionary.detach())
        pairs = distance[~torch.eye(self.num_classes, dtype=torch.bool, device=distance.device)]
        return pairs.std(correction=0)

    @torch.no_grad()
    def end_epoch(self) -> dict[str, float]:
        return {**super().end_epoch(), "structure": float(self.structure())}

    def _watch(self, softness: Tensor) -> None:
        structure = self.structure()
        self.most_structure.copy_(torch.maximum(structure, self.most_structure))
        if structure < self.hold * self.most_structure:
            self.held_dictionary.copy_(self.live_dictionary)
            self.frozen_flag.fill_(True)
