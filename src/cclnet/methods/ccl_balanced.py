"""CCL whose head hears every class equally, and whose dictionary is frozen before it loses its order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cclnet import functional
from cclnet.errors import InputError, unknown
from cclnet.head import CCLHead
from cclnet.methods.base import Classes, Loss, Method, check_kl_weight

BALANCES = ("weights", "prior")
NEAR = 0.975  # of the margin: the hinge that keeps classes within it holds them about there


class CCLBalanced(Method):
    """``L = CE(q, y) + w KL(p_y ‖ q)`` and the head's own loss as in ``ccl``, with two changes to the head: its cross
    entropy is balanced over classes, and how many classes have parted, not softness, says when to freeze.

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
        parted: float | None = 0.5,
        dictionary_norm: float = 2.0**0.5,
        kl_weight: float = 1.0,
        temperature: float = 1.0,
        sharpen: float = 1.0,
    ) -> None:
        super().__init__(classes)
        if balance not in BALANCES:
            raise unknown("balance", balance, BALANCES)
        self.kl_weight = check_kl_weight(kl_weight)
        prior = classes.prior()
        if not bool((prior > 0).all()):
            empty = [k for k, share in enumerate(prior.tolist()) if share == 0]
            raise InputError(f"ccl-balanced needs training images of every class; classes {empty} have none.")
        self.head = PartingHead(
            classes.in_features,
            classes.num_classes,
            parted,
            widths=widths,
            margin=margin,
            correlation_weight=correlation_weight,
            patience=None,
            dictionary_norm=dictionary_norm,
            temperature=temperature,
            sharpen=sharpen,
        )
        if balance == "prior":
            self.head.prior_logits.copy_(prior.log())
        weights = 1.0 / (classes.num_classes * prior) if balance == "weights" else torch.ones_like(prior)
        self.register_buffer("class_weights", weights.float(), persistent=False)

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
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

    @property
    def collapse_softness(self) -> float:
        return self.head.collapse_softness


class PartingHead(CCLHead):
    """A CCL head that is frozen once the share ``parted`` of all pairs of classes has come to the margin, counted from
    when fewest were there; None never freezes it.

    Class embeddings drawn by chance are about at the margin too. Training first draws them together and ends, at the
    collapse point, with all pairs at the margin. In between they part one after the other, those that look least alike
    first. Pairs at the margin have no order among them any more, so waiting longer loses more than it finds.
    """

    prior_logits: Tensor
    fewest_parted: Tensor

    def __init__(self, in_features: int, num_classes: int, parted: float | None = 0.5, **settings: object) -> None:
        super().__init__(in_features, num_classes, **settings)  # type: ignore[arg-type]
        if parted is not None and not 0.0 < parted <= 1.0:
            raise InputError(
                "parted, the share of the pairs of classes that come to the margin before the freeze, must lie in "
                f"(0, 1], got {parted}. Usual is 0.5; none never freezes."
            )
        self.parted = parted
        self.register_buffer("prior_logits", torch.zeros(num_classes), persistent=False)
        self.register_buffer("fewest_parted", torch.tensor(1.0))

    def logits(self, features: Tensor) -> Tensor:
        return super().logits(features) + self.prior_logits

    def parted_share(self) -> Tensor:
        """The share of the pairs of different classes that are at the margin."""
        distance = functional.dictionary_distance(self.dictionary.detach())
        at_margin = distance >= NEAR * self.margin
        return at_margin.sum() / (self.num_classes * (self.num_classes - 1))

    @torch.no_grad()
    def end_epoch(self) -> dict[str, float]:
        share = float(self.parted_share())
        return {**super().end_epoch(), "parted": share}

    def _watch(self, softness: Tensor) -> None:
        share = self.parted_share()
        self.fewest_parted.copy_(torch.minimum(share, self.fewest_parted))
        if self.parted is not None and share - self.fewest_parted >= self.parted:
            self.held_dictionary.copy_(self.live_dictionary)
            self.frozen_flag.fill_(True)
