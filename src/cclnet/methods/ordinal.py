"""Label distributions for ordered classes (Gao et al. 2017; Díaz, Marathe 2019): a grade is near the next."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cclnet import functional
from cclnet.errors import InputError
from cclnet.head import check_labels
from cclnet.methods.base import Classes, Loss, Method


class Ordinal(Method):
    """``L = CE(q, p_y)`` with ``p_y = softmax over k of −(x_k − x_y)² / 2σ²``; x_k is the place of class k, its
    number unless ``positions`` say otherwise."""

    table: Tensor

    def __init__(self, classes: Classes, sigma: float = 1.0, positions: Sequence[float] | None = None) -> None:
        super().__init__(classes)
        places = range(classes.num_classes) if positions is None else positions
        listed = isinstance(places, Sequence) and all(isinstance(place, (int, float)) for place in places)
        if not listed or len(places) != classes.num_classes:
            raise InputError(
                f"positions must be {classes.num_classes} numbers, the place of each class on the scale, "
                f"got {len(places) if listed else places}. Leave it out where the classes are numbered in their order."
            )
        self.register_buffer("table", ordered_labels(places, sigma), persistent=False)

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        check_labels(labels, len(logits), self.classes.num_classes)
        table = self.table.to(torch.promote_types(logits.dtype, torch.float32))
        return Loss.of(cross_entropy=functional.cross_entropy(logits, functional.rows_of(table, labels), weight))

    def soft_labels(self) -> Tensor:
        return self.table


def ordered_labels(positions: Sequence[float], sigma: float = 1.0) -> Tensor:
    """``p_y(k) = softmax over k of −(x_k − x_y)² / 2σ²`` for classes at the places x: [K, K] float64, row y for
    class y.

    >>> ordered_labels([0, 1, 2]).round(decimals=3)
    tensor([[0.5740, 0.3480, 0.0780],
            [0.2740, 0.4520, 0.2740],
            [0.0780, 0.3480, 0.5740]], dtype=torch.float64)
    """
    if not 0.0 < sigma < math.inf:
        raise InputError(
            f"sigma, the width of a label on the scale of the classes, must be a positive number, got {sigma}. "
            "Usual is 1; towards 0 the labels become hard."
        )
    places = torch.tensor([float(place) for place in positions], dtype=torch.float64)
    if not bool(torch.isfinite(places).all()) or len(places.unique()) < len(places):
        raise InputError(
            f"positions must be finite and all different, got {list(positions)}. Two classes at one place would "
            "have the same label."
        )
    # Divided before squaring: the square of a tiny width would be zero.
    return torch.softmax(-0.5 * ((places - places[:, None]) / sigma).square(), dim=1)
