"""What any loop tells of validation batches, for one label an image or several."""

from __future__ import annotations

from torch import Tensor

from cclnet import functional
from cclnet.functional import binary_cross_entropy, marks_of
from cclnet.methods.base import Method


def plain_loss(method: Method, logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy with the labels as they are, binary where an image may have several."""
    if method.multilabel:
        return binary_cross_entropy(logits, marks_of(labels, *logits.shape))
    return functional.cross_entropy(logits, labels)


def accuracy(method: Method, logits: Tensor, labels: Tensor) -> Tensor:
    """The share of right decisions: one an image, or one a class of each image."""
    if method.multilabel:
        return ((logits > 0) == (labels > 0.5)).float().mean()
    return (logits.argmax(dim=1) == labels).float().mean()
