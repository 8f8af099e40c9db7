"""CCL with a class-balanced head, whose dictionary is frozen before it collapses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cclnet import functional
from cclnet.errors import InputError, check_range, unknown
from cclnet.head import CCLHead
from cclnet.methods.base import Classes
from cclnet.methods.ccl import DictionaryMethod
from cclnet.methods.class_geometry import FREEZE_RATIO

BALANCES = ("weights", "prior")


class CCLBalanced(DictionaryMethod):
    """``ccl`` with two changes to the head: its cross entropy is class-balanced, and it is a ``BalancedHead``.

    ``balance`` "weights" weights each image by ``N / (K n_y)``; "prior" adds ``log(n_k / N)`` to the logits of the head
    during training, so that its distances need not encode the class frequencies.
    """

    balances_classes = True
    class_weights: Tensor

    def __init__(
        self,
        classes: Classes,
        balance: str = "weights",
        widths: Sequence[int] = (1024, 1024, 512),
        margin: float = 2.0,
        correlation_weight: float = 10.0,
        freeze_ratio: float = 0.5,
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
        size = classes.in_features, classes.num_classes
        head = BalancedHead(
            freeze_ratio, *size, widths, margin, correlation_weight, None, dictionary_norm, temperature, sharpen
        )
        if balance == "prior":
            head.prior_logits.copy_(prior.log())
        super().__init__(classes, head, kl_weight)
        weights = 1.0 / (classes.num_classes * prior) if balance == "weights" else torch.ones_like(prior)
        self.register_buffer("class_weights", weights.float(), persistent=False)

    def head_weight(self, labels: Tensor, weight: Tensor | None) -> Tensor:
        class_weight = functional.rows_of(self.class_weights[:, None], labels)[:, 0]
        return class_weight if weight is None else class_weight * weight


class BalancedHead(CCLHead):
    """A ``CCLHead(*args, **settings)`` that freezes when its structure falls below ``freeze_ratio`` times its maximum.

    Structure is the standard deviation of the distances between class embeddings. Training ends at the collapse point,
    with all classes equally far apart, where the order in which they separated is lost.
    """

    prior_logits: Tensor
    max_structure: Tensor

    def __init__(self, freeze_ratio: float, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.freeze_ratio = check_range("freeze_ratio", freeze_ratio, "[0, 1)", FREEZE_RATIO)
        self.register_buffer("prior_logits", torch.zeros(self.num_classes), persistent=False)
        self.register_buffer("max_structure", torch.tensor(0.0))

    def logits(self, features: Tensor) -> Tensor:
        return super().logits(features) + self.prior_logits

    def structure(self) -> Tensor:
        distance = functional.dictionary_distance(self.dictionary.detach())
        pairs = distance[~torch.eye(self.num_classes, dtype=torch.bool, device=distance.device)]
        return pairs.std(correction=0)

    @torch.no_grad()
    def end_epoch(self) -> dict[str, float]:
        return {**super().end_epoch(), "structure": float(self.structure())}

    def _should_freeze(self, softness: Tensor) -> bool:
        structure = self.structure()
        self.max_structure.copy_(torch.maximum(structure, self.max_structure))
        return bool(structure < self.freeze_ratio * self.max_structure)
