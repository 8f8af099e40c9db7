"""The CCL head: learns how alike the classes look, from features and labels alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from cclnet import functional
from cclnet.errors import InputError, NotFinite

# State that must not lose digits when a whole network is cast to fewer.


class KeepsDouble(nn.Module):
    """A module whose float64 buffers stay float64 where ``.half()``, ``.to(torch.bfloat16)`` or a trainer's
    "bf16-true" would cast them down: sums over an epoch, and numbers that are compared with those of epochs before."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        precise = {name: b for name, b in self._buffers.items() if b is not None and b.dtype == torch.float64}
        applied = super()._apply(fn, recurse)
        for name, before in precise.items():
            now = self._buffers[name]
            assert now is not None
            if now.dtype != torch.float64:
                self._buffers[name] = now.double() if before.is_meta else before.to(now.device)
        return applied


class CCLHead(KeepsDouble):
    """The class-correlation-learning block: an embedding, a dictionary with one embedding a class, and the
    rule that freezes the dictionary.

    ``head(features, labels)`` gives the head's own loss terms. Features are detached, so the loss trains the
    head and nothing else; ``soft_labels()`` is detached too, so what uses it trains nothing of the head. One
    backward pass of the summed losses is therefore exactly the paper's alternating update.

    Once frozen, the dictionary is a stored copy, chosen with ``torch.where``. The live parameter goes on
    receiving (zero) gradients, as distributed training wants, and what momentum and weight decay do to it
    is never seen.

    Args:
        in_features: width of the pooled features.
        num_classes: number of classes, 2 or more.
        widths: widths of the embedding's linear layers, with batch norm and ReLU in between.
        margin: distance b up to which class embeddings may part (2 is a right angle).
        correlation_weight: weight of the class correlation loss.
        patience: freeze after so many epochs in a row without a drop of softness; None never freezes.
        dictionary_norm: expected length of a class embedding at the start. Distances see directions only, so
            a step turns an embedding in proportion to 1/length²: long ones never move, short ones move fast.
        temperature: T of the soft labels ``softmax(−f_d / T)``; the paper has 1. What the head itself learns from,
            softmax(−f_d) of an image, has none.
        sharpen: once frozen, the soft labels are raised to this power and made distributions again (T divided by
            it): 1 leaves them as they are, more makes them harder.

    >>> head = CCLHead(in_features=32, num_classes=7)
    >>> terms = head(torch.randn(8, 32), torch.randint(7, (8,)))
    >>> sorted(terms), head.soft_labels().shape
    (['class_correlation', 'head_cross_entropy'], torch.Size([7, 7]))
    """

    frozen_flag: Tensor
    held_dictionary: Tensor
    best_softness: Tensor
    stale_epochs: Tensor

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        widths: Sequence[int] = (1024, 1024, 512),
        margin: float = 2.0,
        correlation_weight: float = 10.0,
        patience: int | None = 10,
        dictionary_norm: float = 2.0**0.5,
        temperature: float = 1.0,
        sharpen: float = 1.0,
    ) -> None:
        super().__init__()
        _check_settings(in_features, num_classes, widths, margin, correlation_weight, patience, dictionary_norm)
        _check_use(temperature, sharpen)
        self.in_features = in_features
        self.num_classes = num_classes
        self.margin = margin
        self.correlation_weight = correlation_weight
        self.patience = patience
        self.temperature, self.sharpen = temperature, sharpen
        self.embedding = _embedding([in_features, *widths])
        live = torch.randn(num_classes, widths[-1]) * (dictionary_norm / widths[-1] ** 0.5)
        self.live_dictionary = nn.Parameter(live)
        # All state of the freeze rule is in buffers: a resumed run goes on in mid-patience.
        self.register_buffer("held_dictionary", torch.zeros_like(live))
        self.register_buffer("frozen_flag", torch.tensor(False))
        self.register_buffer("best_softness", torch.tensor(torch.inf, dtype=torch.float64))
        self.register_buffer("stale_epochs", torch.tensor(0))

    @property
    def dictionary(self) -> Tensor:
        """The class embeddings in use, [K, D]."""
        return torch.where(self.frozen_flag, self.held_dictionary, self.live_dictionary)

    @property
    def frozen(self) -> bool:
        return bool(self.frozen_flag)

    def soft_labels(self) -> Tensor:
        """The label distributions as they are now, [K, K], row k for class k, without gradient."""
        power = torch.where(self.frozen_flag, self.sharpen, 1.0)
        return functional.soft_labels(self.dictionary.detach(), self.temperature / power)

    @property
    def collapse_softness(self) -> float:
        """The softness where all pairs of classes have come to the margin, before any sharpening."""
        return functional.collapse_point(len(self.live_dictionary), self.margin / self.temperature)[1]

    def softness(self) -> Tensor:
        """Mean probability of the own class in ``soft_labels()``."""
        return functional.softness(self.soft_labels())

    def logits(self, features: Tensor) -> Tensor:
        """Negative distances of the embedded features from the class embeddings, [N, K]: ``q_CCL`` is their
        softmax."""
        return -functional.squared_distance(self._embedded(features.detach()), self.dictionary)

    def _embedded(self, features: Tensor) -> Tensor:
        """One image by itself, as the last batch of an epoch may be, has no spread to be normalised by: it is embedded
        with the averages so far."""
        alone = self.embedding.training and len(features) == 1
        if alone:
            self.embedding.eval()
        embedded: Tensor = self.embedding(features)
        if alone:
            self.embedding.train()
        return embedded

    def forward(self, features: Tensor, labels: Tensor, weight: Tensor | None = None) -> dict[str, Tensor]:
        """The terms of ``L_CCL = CE(q_CCL, y) + α l_CC``, already weighted: their sum is the head's loss.

        features [N, in_features]; labels [N] class indices (or [N, K] class weights); weight [N] per sample.
        """
        check_batch(features, labels, self.in_features, self.num_classes)
        correlation = functional.class_correlation_loss(self.dictionary, self.margin)
        return {
            "head_cross_entropy": functional.cross_entropy(self.logits(features), labels, weight),
            "class_correlation": self.correlation_weight * correlation,
        }

    @torch.no_grad()
    def end_epoch(self) -> dict[str, float]:
        """Apply the freeze rule; call it once after each epoch. Returns what is worth logging."""
        softness = self.softness().double()
        if not self.frozen_flag:
            self._watch(softness)
        return {"softness": float(softness), "frozen": float(self.frozen_flag)}

    def _watch(self, softness: Tensor) -> None:
        """The freeze rule, for one epoch of a dictionary that is still free."""
        dropped = softness < self.best_softness
        self.stale_epochs.copy_(torch.where(dropped, 0, self.stale_epochs + 1))
        self.best_softness.copy_(torch.minimum(softness, self.best_softness))
        if self.patience is not None and self.stale_epochs >= self.patience:
            self.held_dictionary.copy_(self.live_dictionary)
            self.frozen_flag.fill_(True)


def _embedding(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*layers[:-2])  # none of the two after the last layer


def _check_settings(
    in_features: int,
    num_classes: int,
    widths: Sequence[int],
    margin: float,
    correlation_weight: float,
    patience: int | None,
    dictionary_norm: float,
) -> None:
    if num_classes < 2:
        raise InputError(f"CCL needs at least 2 classes, got {num_classes}: one class has nothing to resemble.")
    if in_features < 1 or not widths or min(widths) < 1:
        raise InputError(f"in_features and widths must be positive, got {in_features} and {tuple(widths)}.")
    if not 0.0 < margin <= 4.0:
        raise InputError(f"margin must lie in (0, 4], the range of the distance, got {margin}. The paper has 2.")
    if correlation_weight < 0.0:
        raise InputError(f"correlation_weight must not be negative, got {correlation_weight}. The paper has 10.")
    if patience is not None and patience < 1:
        raise InputError(f"patience must be 1 or more epochs, or None to never freeze, got {patience}.")
    if not 0.0 < dictionary_norm < float("inf"):
        raise InputError(f"dictionary_norm must be a positive length, got {dictionary_norm}. Usual is 1.41.")


def _check_use(temperature: float, sharpen: float) -> None:
    for name, value in (("temperature", temperature), ("sharpen", sharpen)):
        if not 0.0 < value < float("inf"):
            raise InputError(f"{name} must be above 0, got {value}. The paper has 1.")


def check_batch(features: Tensor, labels: Tensor, in_features: int, num_classes: int) -> None:
    """Refuse a batch that does not fit, with the reason.

    Values are looked at on the CPU only, and not inside torch.compile: on a GPU the look would wait for the
    device at every step. There a wrong label ends in the device's own assertion.
    """
    check_labels(labels, len(features), num_classes)
    check_features(features, in_features)


def check_features(features: Tensor, in_features: int) -> None:
    """Features must be finite and pooled, one vector of the right width an image."""
    if features.dim() != 2 or features.shape[1] != in_features:
        raise InputError(
            f"features must have shape [N, {in_features}] (pooled, one vector an image), "
            f"got {list(features.shape)}. Pool the feature map, or build the head with that width."
        )
    if _values_can_be_read(features) and not bool(torch.isfinite(features).all()):
        bad = int((~torch.isfinite(features)).any(dim=1).sum())
        raise NotFinite(
            f"features of {bad} of {len(features)} images are NaN or infinite. The backbone has diverged or "
            "its input is broken: lower the learning rate, clip gradients, check the images."
        )


def check_labels(labels: Tensor, count: int, num_classes: int) -> None:
    """Labels must be class indices [N] in 0 … K−1, or class weights [N, K] whose rows sum to one."""
    if labels.is_floating_point():
        if labels.shape != (count, num_classes):
            raise InputError(
                f"labels given as class weights must have shape [{count}, {num_classes}], got {labels.dtype} "
                f"{list(labels.shape)}. For class indices use torch.int64 and shape [{count}]."
            )
        if _values_can_be_read(labels) and not torch.allclose(
            labels.sum(dim=1), torch.ones_like(labels[:, 0]), atol=1e-3
        ):
            raise InputError(
                "labels given as class weights must sum to one in every row. Where an image may have several labels, "
                "or none, take a method for that: 'ccl-multilabel', or 'bce' for hard labels."
            )
        return
    if labels.dtype != torch.int64:
        raise InputError(f"labels must be torch.int64 class indices, got {labels.dtype}. Use labels.long().")
    if labels.shape != (count,):
        hint = " Use labels.squeeze(1)." if labels.shape == (count, 1) else ""
        raise InputError(f"labels must have shape [{count}], one an image, got {list(labels.shape)}.{hint}")
    if _values_can_be_read(labels) and count:
        low, high = cast("tuple[int, int]", tuple(int(v) for v in labels.aminmax()))
        if low < 0 or high >= num_classes:
            raise InputError(
                f"labels must lie in 0 … {num_classes - 1} for {num_classes} classes, got {low} … {high}. "
                "Number the classes from 0, or build with more classes."
            )


def _values_can_be_read(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
