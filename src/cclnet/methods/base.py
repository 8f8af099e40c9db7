"""The protocol of a method: a module that turns features, logits and labels into loss terms.

A method declares what it needs and does by class attributes, so no other code names a method. To add one, write a
subclass of ``Method`` and its card, and add a line to ``METHODS`` or call ``cclnet.register_method``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cclnet import functional
from cclnet.errors import InputError, check_range
from cclnet.head import Float64Buffers, check_labels

# Former names of settings, which stay accepted: old settings files and results use them.
SETTING_ALIASES = {"hold": "freeze_ratio", "memory": "ema_decay", "confusions": "confusion_weight"}


@dataclass(frozen=True)
class Classes:
    """The task as a method sees it: number of classes, width of the pooled features, and training images per class
    (None if unknown)."""

    num_classes: int
    in_features: int
    counts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_range("num_classes", self.num_classes, "[2, inf)", "a classifier needs at least 2 classes")
        if self.counts is not None and len(self.counts) != self.num_classes:
            raise InputError(f"expected {self.num_classes} class counts, got {len(self.counts)}.")

    def prior(self) -> Tensor:
        """Class frequencies of the training images, [K] float64."""
        if self.counts is None:
            raise InputError("this method needs the number of training images per class: pass class_counts.")
        counts = torch.tensor(self.counts, dtype=torch.float64)
        return counts / counts.sum()


class Loss(NamedTuple):
    """The total loss and the terms it is the sum of."""

    total: Tensor
    terms: dict[str, Tensor]

    @classmethod
    def of(cls, **terms: Tensor) -> Loss:
        return cls(torch.stack(tuple(terms.values())).sum(), terms)


class Method(Float64Buffers):
    """``method(features, logits, labels, weight)`` → Loss.

    Features [N, F] and logits [N, K] carry gradients to the network. Labels are class indices [N], class weights [N, K]
    of mixed images, or multi-hot targets [N, K] where ``multilabel`` is true. ``weight`` [N] weights the images.

    The keyword arguments of ``__init__`` after ``classes`` are the settings of the method; each needs a default.
    """

    multilabel: ClassVar[bool] = False  # an image may have several labels, or none
    needs_order: ClassVar[bool] = False  # classes must be ordered, so a comparison of all methods leaves this one out
    balances_classes: ClassVar[bool] = False  # itself, so class_weights and balanced_sampling are an error
    baseline: ClassVar[bool] = False  # hard labels: the reference in a comparison of methods
    single_label_counterpart: ClassVar[str] = "hard"  # of a multi-label method
    # Markdown, or the name of a .md file beside the module. Default: the file named after the module, or the docstring.
    card: ClassVar[str] = ""

    def __init__(self, classes: Classes) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        raise TypeError(f"{type(self).__name__} must define forward(features, logits, labels, weight) → Loss")

    def check_labels(self, logits: Tensor, labels: Tensor) -> None:
        """Raise an InputError when the labels do not fit the logits."""
        check_labels(labels, len(logits), self.classes.num_classes)

    def soft_labels(self) -> Tensor | None:
        """The label distributions in use, [K, K], row k for class k, or None if the method has no such table."""
        return None

    @property
    def hard_share(self) -> float:
        """Weight of the hard label in the target; the rest is ``soft_labels``."""
        return 0.0

    def target(self) -> Tensor | None:
        """The distribution that the network is trained towards for each class, [K, K], or None if there is none."""
        labels = self.soft_labels()
        if labels is None:
            return None
        hard = torch.eye(len(labels), dtype=labels.dtype, device=labels.device)
        return self.hard_share * hard + (1.0 - self.hard_share) * labels.detach()

    def end_epoch(self) -> dict[str, float]:
        """Called once after each epoch; returns values to log: ``softness`` of learned soft labels, ``frozen``, …"""
        return {}

    @property
    def collapse_softness(self) -> float | None:
        """The softness of a dictionary with all classes at equal distance; None for methods without a dictionary."""
        return None


class FixedTableMethod(Method):
    """A method with a constant table of label distributions, [K, K]: row y is the target of class y."""

    table: Tensor

    def __init__(self, classes: Classes, table: Tensor) -> None:
        super().__init__(classes)
        self.register_buffer("table", table, persistent=False)

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        """``L = CE(q, p_y)``."""
        self.check_labels(logits, labels)
        return Loss.of(cross_entropy=functional.cross_entropy(logits, table_target(self.table, logits, labels), weight))

    def soft_labels(self) -> Tensor:
        return self.table


class SoftLabelMethod(Method):
    """``L = CE(q, y) + w KL(p_y ‖ q)`` with learned soft labels p."""

    def __init__(self, classes: Classes, kl_weight: float) -> None:
        super().__init__(classes)
        hint = "the weight of KL(p_y ‖ q); the paper uses 1, and 0 is hard labels"
        self.kl_weight = check_range("kl_weight", kl_weight, "[0, inf)", hint)

    def loss(self, logits: Tensor, labels: Tensor, target: Tensor, weight: Tensor | None, **terms: Tensor) -> Loss:
        """The loss for the soft targets [N, K] of the images, plus further terms."""
        cross_entropy = functional.cross_entropy(logits, labels, weight)
        kl = self.kl_weight * functional.kl_to_target(logits, target, weight)
        return Loss.of(cross_entropy=cross_entropy, kl=kl, **terms)

    @property
    def hard_share(self) -> float:
        return 1.0 / (1.0 + self.kl_weight)


def table_target(table: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """The soft target of each image, [N, K], in the precision of the loss: float32, or float64 for float64 logits."""
    return functional.rows_of(table.to(torch.promote_types(logits.dtype, torch.float32)), labels)


def sum_over_processes(batch_sum: Tensor) -> Tensor:
    """``batch_sum`` added up over all processes, in place.

    Methods call it in every step, because distributed data parallel overwrites buffers with those of process 0, and
    because a checkpoint stores the state of one process: equal buffers make a resumed run exact.
    """
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(batch_sum)
    return batch_sum


def rename_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a method under their current names.

    >>> rename_settings({"hold": 0.3, "softness": 0.8})
    {'freeze_ratio': 0.3, 'softness': 0.8}
    """
    renamed: dict[str, Any] = {}
    for name, value in settings.items():
        current = SETTING_ALIASES.get(name, name)
        if current in renamed:
            raise InputError(f"setting {current} is given twice: '{name}' is another name of it. Remove one.")
        renamed[current] = value
    return renamed
