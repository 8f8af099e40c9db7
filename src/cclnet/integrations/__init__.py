"""A CCLNet in the training loops of other frameworks. Each module needs the framework that it is named after."""

from __future__ import annotations

from torch import Tensor

from cclnet import functional
from cclnet.methods import Method


def validation_loss(method: Method, logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy with the hard labels; binary cross entropy for a multi-label method."""
    if method.multilabel:
        return functional.binary_cross_entropy(logits, functional.multi_hot_targets(labels, *logits.shape))
    return functional.cross_entropy(logits, labels)


def accuracy(method: Method, logits: Tensor, labels: Tensor) -> Tensor:
    """Fraction of correct decisions: one per image, or one per image and class for a multi-label method."""
    if method.multilabel:
        return ((logits > 0) == (labels > 0.5)).float().mean()
    return (logits.argmax(dim=1) == labels).float().mean()
