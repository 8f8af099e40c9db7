"""The CCL head: an embedding and a dictionary of class embeddings that learn soft labels from features and labels.

Also here: the base class of modules with float64 buffers, and the checks of a batch that the methods share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from cclnet import functional
from cclnet.errors import InputError, NotFinite, check_range


class Float64Buffers(nn.Module):
    """A module whose float64 buffers stay float64 under ``.half()``, ``.to(torch.bfloat16)`` or "bf16-true" training.

    These buffers are sums over an epoch, or values that are compared with those of earlier epochs.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        precise = {name: b for name, b in self._buffers.items() if b is not None and b.dtype == torch.float64}
        applied = super()._apply(fn, recurse)
        for name, before in precise.items():
            now = self._buffers[name]
            assert now is not None
            if now.dtype != torch.float64:
                self._buffers[name] = now.double() if before.is_meta else before.to(now.device)
        return applied


MAX_LAYERS = 64
MAX_WEIGHTS = 2**28  # of the embedding; one gigabyte in float32


class CCLHead(Float64Buffers):
    """The class-correlation-learning block: an embedding, a dictionary with one embedding per class, and a freeze rule.

    ``head(features, labels)`` returns the loss terms of the head. Features and ``soft_labels()`` are detached, so one
    backward pass of the summed losses of network and head is exactly the alternating update of the paper.

    After the freeze, ``torch.where`` selects a stored copy of the dictionary. The live parameter still receives (zero)
    gradients, which distributed training requires.

    Args:
        in_features: width of the pooled features.
        widths: widths of the linear layers of the embedding, with batch norm and ReLU in between.
        margin: distance b beyond which the class correlation loss penalises a pair of classes (2 is a right angle).
        correlation_weight: weight of the class correlation loss.
        patience: freeze after this many consecutive epochs without a decrease of softness; None never freezes.
        dictionary_norm: expected norm of a class embedding at initialisation. Distances depend on directions only, so
            a step rotates an embedding in proportion to 1/norm²: a large norm slows the dictionary down.
        temperature: T of the soft labels ``softmax(−f_d / T)``; the paper uses 1. The prediction of the head itself,
            ``softmax(−f_d)``, has no temperature.
        sharpen: after the freeze, the soft labels are raised to this power and normalised (T is divided by it): 1
            changes nothing, more gives harder labels.

    >>> head = CCLHead(in_features=32, num_classes=7)
    >>> terms = head(torch.randn(8, 32), torch.randint(7, (8,)))
    >>> sorted(terms), head.soft_labels().shape
    (['class_correlation', 'head_cross_entropy'], torch.Size([7, 7]))
    """

    frozen_flag: Tensor
    frozen_dictionary: Tensor
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
        check_range("num_classes", num_classes, "[2, inf)", "similarity needs at least 2 classes")
        if in_features < 1 or not 1 <= len(widths) <= MAX_LAYERS or min(widths) < 1:
            got = f"{in_features} and {str(tuple(widths))[:60]}"
            raise InputError(f"in_features and 1 to {MAX_LAYERS} widths must be positive, got {got}.")
        if (weights := sum(a * b for a, b in pairwise((in_features, *widths)))) > MAX_WEIGHTS:
            raise InputError(f"widths {tuple(widths)} make {weights:,} weights; at most {MAX_WEIGHTS:,} are supported.")
        if patience is not None:
            check_range("patience", patience, "[1, inf)", "a number of epochs, or None to never freeze")
        check_range("dictionary_norm", dictionary_norm, "(0, inf)", "usually 1.41")
        self.in_features, self.num_classes, self.patience = in_features, num_classes, patience
        self.margin = check_range("margin", margin, "(0, 4]", "the range of the distance; the paper uses 2")
        self.correlation_weight = check_range("correlation_weight", correlation_weight, "[0, inf]", "the paper uses 10")
        self.temperature = check_range("temperature", temperature, "(0, inf)", "the paper uses 1")
        self.sharpen = check_range("sharpen", sharpen, "(0, inf)", "1 changes nothing")
        self.embedding = _mlp([in_features, *widths])
        live = torch.randn(num_classes, widths[-1]) * (dictionary_norm / widths[-1] ** 0.5)
        self.live_dictionary = nn.Parameter(live)
        # The state of the freeze rule is in buffers, so that a resumed run continues with the same patience.
        self.register_buffer("frozen_dictionary", torch.zeros_like(live))
        self.register_buffer("frozen_flag", torch.tensor(False))
        self.register_buffer("best_softness", torch.tensor(torch.inf, dtype=torch.float64))
        self.register_buffer("stale_epochs", torch.tensor(0))

    @property
    def dictionary(self) -> Tensor:
        """The class embeddings in use, [K, D]: the live ones, or the stored ones after the freeze."""
        return torch.where(self.frozen_flag, self.frozen_dictionary, self.live_dictionary)

    @property
    def frozen(self) -> bool:
        return bool(self.frozen_flag)

    def soft_labels(self) -> Tensor:
        """The current label distributions, [K, K], row k for class k, without gradient."""
        power = torch.where(self.frozen_flag, self.sharpen, 1.0)
        return functional.soft_labels(self.dictionary.detach(), self.temperature / power)

    @property
    def collapse_softness(self) -> float:
        """The softness when all pairs of classes are at the margin, before sharpening."""
        return functional.collapse_point(len(self.live_dictionary), self.margin / self.temperature)[1]

    def softness(self) -> Tensor:
        return functional.softness(self.soft_labels())

    def logits(self, features: Tensor) -> Tensor:
        """Negative distances between embedded features and class embeddings, [N, K]; their softmax is ``q_CCL``."""
        return -functional.squared_distance(self._embed(features.detach()), self.dictionary)

    def _embed(self, features: Tensor) -> Tensor:
        """Embed features. A batch of one image has no batch statistics, so it uses the running ones of batch norm."""
        single = self.embedding.training and len(features) == 1
        if single:
            self.embedding.eval()
        embedded: Tensor = self.embedding(features)
        if single:
            self.embedding.train()
        return embedded

    def forward(self, features: Tensor, labels: Tensor, weight: Tensor | None = None) -> dict[str, Tensor]:
        """The terms of ``L_CCL = CE(q_CCL, y) + α l_CC``, already weighted; their sum is the loss of the head.

        features [N, in_features]; labels are class indices [N] or class weights [N, K]; weight [N] per image.
        """
        check_batch(features, labels, self.in_features, self.num_classes)
        correlation = functional.class_correlation_loss(self.dictionary, self.margin)
        return {
            "head_cross_entropy": functional.cross_entropy(self.logits(features), labels, weight),
            "class_correlation": self.correlation_weight * correlation,
        }

    @torch.no_grad()
    def end_epoch(self) -> dict[str, float]:
        """Apply the freeze rule; call it once after each epoch. Returns the values to log."""
        softness = self.softness().double()
        if not self.frozen_flag and self._should_freeze(softness):
            self.frozen_dictionary.copy_(self.live_dictionary)
            self.frozen_flag.fill_(True)
        return {"softness": float(softness), "frozen": float(self.frozen_flag)}

    def _should_freeze(self, softness: Tensor) -> bool:
        """Update the freeze rule with the softness of an epoch; whether the dictionary freezes now."""
        self.stale_epochs.copy_(torch.where(softness < self.best_softness, 0, self.stale_epochs + 1))
        self.best_softness.copy_(torch.minimum(softness, self.best_softness))
        return self.patience is not None and bool(self.stale_epochs >= self.patience)


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers with batch norm and ReLU in between."""
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.BatchNorm1d(width_out), nn.ReLU()]
    return nn.Sequential(*layers[:-2])


def check_batch(features: Tensor, labels: Tensor, in_features: int, num_classes: int) -> None:
    """Raise an InputError when features or labels do not fit."""
    check_labels(labels, len(features), num_classes)
    check_features(features, in_features)


def check_features(features: Tensor, in_features: int) -> None:
    """Raise an InputError unless features are pooled [N, in_features] and finite."""
    if features.dim() != 2 or features.shape[1] != in_features:
        raise InputError(
            f"features must have shape [N, {in_features}] (pooled, one vector per image), "
            f"got {list(features.shape)}. Pool the feature map, or build the head with that width."
        )
    if _is_readable(features) and not bool(torch.isfinite(features).all()):
        bad = int((~torch.isfinite(features)).any(dim=1).sum())
        raise NotFinite(
            f"features of {bad} of {len(features)} images are NaN or infinite. The backbone has diverged or "
            "its input is broken: lower the learning rate, clip gradients, check the images."
        )


def check_labels(labels: Tensor, count: int, num_classes: int) -> None:
    """Raise an InputError unless labels are class indices [N] in 0 … K−1, or class weights [N, K] with row sum one."""
    if labels.is_floating_point():
        if labels.shape != (count, num_classes):
            raise InputError(
                f"labels given as class weights must have shape [{count}, {num_classes}], got {labels.dtype} "
                f"{list(labels.shape)}. For class indices use torch.int64 and shape [{count}]."
            )
        ones = torch.ones_like(labels[:, 0])
        if _is_readable(labels) and not torch.allclose(labels.sum(dim=1), ones, atol=1e-3):
            raise InputError(
                "labels given as class weights must sum to one in every row. For several labels per image, or none, "
                "use a multi-label method: 'ccl-multilabel', or 'bce' for hard labels."
            )
        return
    if labels.dtype != torch.int64:
        raise InputError(f"labels must be torch.int64 class indices, got {labels.dtype}. Use labels.long().")
    if labels.shape != (count,):
        hint = " Use labels.squeeze(1)." if labels.shape == (count, 1) else ""
        raise InputError(f"labels must have shape [{count}], one per image, got {list(labels.shape)}.{hint}")
    if _is_readable(labels) and count:
        low, high = (int(bound) for bound in labels.aminmax())
        if low < 0 or high >= num_classes:
            raise InputError(
                f"labels must lie in 0 … {num_classes - 1} for {num_classes} classes, got {low} … {high}. "
                "Number the classes from 0, or build with more classes."
            )


def _is_readable(tensor: Tensor) -> bool:
    """Whether values can be checked: not inside torch.compile, and not on a GPU, where that would synchronise."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
