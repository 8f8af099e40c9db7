"""What a label-softening method is: it turns features, logits and labels into loss terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cclnet.errors import InputError
from cclnet.head import KeepsDouble


@dataclass(frozen=True)
class Classes:
    """What a method may know of the task: the number of classes, the width of the pooled features, and how
    many training images each class has (where known)."""

    num_classes: int
    in_features: int
    counts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_classes < 2:
            raise InputError(f"a classifier needs at least 2 classes, got {self.num_classes}.")
        if self.counts is not None and len(self.counts) != self.num_classes:
            raise InputError(f"expected {self.num_classes} class counts, got {len(self.counts)}.")

    def prior(self) -> Tensor:
        """Class frequencies of the training images, [K] float64."""
        if self.counts is None:
            raise InputError(
                "this method needs the class frequencies of the training images: pass class_counts, one number a class."
            )
        counts = torch.tensor(self.counts, dtype=torch.float64)
        return counts / counts.sum()


class Loss(NamedTuple):
    """The loss to step on and the terms it is the sum of."""

    total: Tensor
    terms: dict[str, Tensor]

    @classmethod
    def of(cls, **terms: Tensor) -> Loss:
        return cls(torch.stack(tuple(terms.values())).sum(), terms)


class Method(KeepsDouble):
    """A method is a module, so that its parameters, buffers, device and saved state come for nothing.

    ``method(features, logits, labels, weight)`` → Loss. Features [N, F] and logits [N, K] carry gradients to
    the network; labels are class indices [N] or class weights [N, K]; weight [N] weighs the samples.
    """

    multilabel = False  # whether an image may have several labels; labels are then marks [N, K]

    def __init__(self, classes: Classes) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        raise TypeError(f"{type(self).__name__} does not say how it turns logits and labels into a loss")

    def soft_labels(self) -> Tensor | None:
        """The label distributions trained towards, [K, K], or None where there is no such table."""
        return None

    @property
    def hard_share(self) -> float:
        """How much of the target is the hard label; the rest is ``soft_labels``."""
        return 0.0

    def target(self) -> Tensor | None:
        """Row k: the distribution that the network is trained towards for an image of class k, [K, K]; None where there
        is no such table. What the network says is soft by it: ``functional.unsoften`` takes it out again."""
        labels = self.soft_labels()
        if labels is None:
            return None
        own = torch.eye(len(labels), dtype=labels.dtype, device=labels.device)
        return self.hard_share * own + (1.0 - self.hard_share) * labels.detach()

    def end_epoch(self) -> dict[str, float]:
        """Called once after each epoch; returns what is worth logging."""
        return {}

    @property
    def collapse_softness(self) -> float | None:
        """The softness of a dictionary that has pushed all classes equally far apart; None where there is none."""
        return None


def check_kl_weight(kl_weight: float) -> float:
    """The weight of ``KL(p_y ‖ q)`` beside ``CE(q, y)``: 0 leaves hard labels alone."""
    if not 0.0 <= kl_weight < float("inf"):
        raise InputError(
            f"kl_weight must be a finite number of 0 or more, got {kl_weight}. The paper has 1; 0 is hard labels."
        )
    return kl_weight
