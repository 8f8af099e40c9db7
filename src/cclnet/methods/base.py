"""The protocol of a method: a module that turns features, logits and labels into loss terms.

A method declares what it needs and does by class attributes, so no other code names a method. To add one, write a
subclass of ``Method`` and its card, and add a line to ``METHODS`` or call ``cclnet.register_method``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cclnet import functional
from cclnet.errors import InputError, check_range
from cclnet.head import Float64Buffers, check_labels

# Labels, features and levels of probabilities are rounded to this step before they are summed over an epoch: products
# of two are multiples of its square, and float64 adds up 2^21 of them without rounding.
EXACT_STEP = 2.0**-16

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
        self.epoch_sums: tuple[str, ...] = ()  # names of the attributes that ``register_epoch_sum`` made

    def register_epoch_sum(self, name: str, *shape: int) -> None:
        """Add a float64 attribute of zeros for a sum over the images of an epoch. ``forward`` adds to it in place, and
        ``end_epoch`` calls ``sum_over_processes`` on it, uses it and resets it.

        Every process has its own share of the sum. It is part of the state dict, but not a buffer: distributed data
        parallel would broadcast it in every step and overwrite the shares of the other processes with that of process
        0. If what is added comes from ``sum_by_class``, or is a multiple of a fixed power of two, nothing is rounded,
        and the sum has the same bits for any number of processes and any order of the images.
        """
        setattr(self, name, torch.zeros(*shape, dtype=torch.float64))
        self.epoch_sums = (*self.epoch_sums, name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        applied = super()._apply(fn, recurse)
        for name in self.epoch_sums:
            before: Tensor = getattr(self, name)
            now = fn(before)
            setattr(self, name, now if now.dtype == torch.float64 else before.to(now.device))
        return applied

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: getattr(self, name) for name in self.epoch_sums})

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for name in self.epoch_sums:
            key, own = prefix + name, getattr(self, name)
            if key not in state_dict:
                missing_keys.append(key)
                continue
            if key in unexpected_keys:
                unexpected_keys.remove(key)
            given: Tensor = state_dict[key]
            if given.shape == own.shape[1:]:  # written when sums had one level
                own.zero_()
                own[0].copy_(given)
            elif given.shape == own.shape:
                own.copy_(given)
            else:
                error_msgs.append(f"{key} is {list(given.shape)}, expected {list(own.shape)}")

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
        """Called once after each epoch, on every process; returns values to log: ``softness`` of learned soft labels,
        ``frozen``, …"""
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


def sum_over_processes(share: Tensor) -> Tensor:
    """Add up the shares of all processes, in place. Every process must call it."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(share)
    return share


def epoch_sums(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The sums over the images of this epoch in a module, with the names that they have in its state dict. Each is the
    share of this process."""
    for path, inner in module.named_modules():
        if isinstance(inner, Method):
            yield from ((f"{path}.{name}" if path else name, getattr(inner, name)) for name in inner.epoch_sums)


def to_exact_step(values: Tensor) -> Tensor:
    """Values rounded to multiples of ``EXACT_STEP``, float64."""
    return (values.double() / EXACT_STEP).round() * EXACT_STEP


def sum_by_class(values: Tensor, shares: Tensor, levels: int) -> Tensor:
    """``Σ_i shares_ij values_ik`` over the images, as a sum of ``levels``: [N, C], [N, K] → [levels, K, C] float64.

    Values from 0 to 1 are divided into levels: level l has multiples of 2^(−16 (l + 1)) up to 2^(−16 l). Shares (one
    for the class of an image, or the shares of a mixed image) are rounded to 2^-16. So every level is summed without
    rounding, in any order, and probabilities far below the precision of their sum still count. What is smaller than
    2^(−16 levels − 1) becomes 0.

    >>> probabilities = torch.tensor([[0.5, 2.0**-40], [0.25, 0.0]])
    >>> sum_by_class(probabilities, torch.tensor([[0.0, 1.0], [0.0, 1.0]]), 3).sum(dim=0)[1].tolist()
    [0.75, 9.094947017729282e-13]
    """
    rest, found, step = values.double(), [], 1.0
    for _ in range(levels):
        step *= EXACT_STEP
        found.append((rest / step).round() * step)
        rest = rest - found[-1]
    return to_exact_step(shares).mT @ torch.stack(found)


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
