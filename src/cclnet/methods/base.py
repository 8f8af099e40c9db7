"""The protocol of a method: a module that turns features, logits and labels into loss terms.

A method declares what it needs and does by class attributes, so that training, the comparison of methods and the report
never name one. To add a method, write a subclass of ``Method`` and its card, and add one line to ``METHODS``, or call
``cclnet.register_method`` from another package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cclnet import functional
from cclnet.errors import InputError
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
        if self.num_classes < 2:
            raise InputError(f"a classifier needs at least 2 classes, got {self.num_classes}.")
        if self.counts is not None and len(self.counts) != self.num_classes:
            raise InputError(f"expected {self.num_classes} class counts, got {len(self.counts)}.")

    def prior(self) -> Tensor:
        """Class frequencies of the training images, [K] float64."""
        if self.counts is None:
            raise InputError(
                "this method needs the class frequencies of the training images: pass class_counts, one per class."
            )
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

    Class attributes:
        multilabel: an image may have several labels, or none.
        needs_order: the classes must be ordered, so a comparison of all methods leaves this one out.
        balances_classes: compensates class frequencies itself, so class_weights and balanced_sampling are an error.
        baseline: hard labels; a comparison of methods uses it as the reference.
        single_label_counterpart: for a multi-label method, the name of the method to use for one label per image.
        card: the card in Markdown, or the name of a .md file beside the module; by default the file is named after the
            module. A method without either shows its docstring.
    """

    multilabel: ClassVar[bool] = False
    needs_order: ClassVar[bool] = False
    balances_classes: ClassVar[bool] = False
    baseline: ClassVar[bool] = False
    single_label_counterpart: ClassVar[str] = "hard"
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
        """The label distributions in use, [K, K], or None if the method has no such table."""
        return None

    @property
    def hard_share(self) -> float:
        """Weight of the hard label in the target; the rest is ``soft_labels``."""
        return 0.0

    def target(self) -> Tensor | None:
        """The distribution that the network is trained towards for each class, [K, K], or None if there is none.

        ``functional.unsoften`` removes its effect from predictions.
        """
        labels = self.soft_labels()
        if labels is None:
            return None
        hard = torch.eye(len(labels), dtype=labels.dtype, device=labels.device)
        return self.hard_share * hard + (1.0 - self.hard_share) * labels.detach()

    def end_epoch(self) -> dict[str, float]:
        """Called once after each epoch; returns diagnostics to log. A method that learns its soft labels returns their
        ``softness``, and ``frozen`` if it can freeze them."""
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


def table_target(table: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """The soft target of each image, [N, K], in the precision of the loss: float32, or float64 for float64 logits."""
    return functional.rows_of(table.to(torch.promote_types(logits.dtype, torch.float32)), labels)


def sum_over_processes(batch_sum: Tensor) -> Tensor:
    """``batch_sum`` added up over all processes, in place.

    Methods call it in every step because distributed data parallel overwrites buffers with those of process 0 at every
    step, and because a checkpoint stores the state of one process.
    """
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(batch_sum)
    return batch_sum


def check_weight(name: str, value: float, meaning: str, usual: str) -> float:
    """``value`` if it is finite and not negative, else an InputError."""
    if not 0.0 <= value < math.inf:
        raise InputError(f"{name}, {meaning}, must be finite and not negative, got {value}. {usual}")
    return value


def check_kl_weight(kl_weight: float) -> float:
    return check_weight("kl_weight", kl_weight, "the weight of KL(p_y ‖ q)", "The paper uses 1; 0 is hard labels.")


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
