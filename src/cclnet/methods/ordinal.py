"""Label distributions for ordered classes (Gao et al. 2017; Díaz, Marathe 2019): neighbouring grades get weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cclnet.errors import InputError, check_range
from cclnet.methods.base import Classes, FixedTableMethod


class Ordinal(FixedTableMethod):
    """``L = CE(q, p_y)`` with ``p_y = softmax over k of −(x_k − x_y)² / 2σ²``; x_k is the position of class k, by
    default its index."""

    needs_order = True

    def __init__(self, classes: Classes, sigma: float = 1.0, positions: Sequence[float] | None = None) -> None:
        given = range(classes.num_classes) if positions is None else positions
        is_list = isinstance(given, Sequence) and all(isinstance(x, (int, float)) for x in given)
        if not is_list or len(given) != classes.num_classes:
            raise InputError(
                f"positions must be {classes.num_classes} numbers, the position of each class on the scale, "
                f"got {len(given) if is_list else given}. Omit it if the classes are numbered in their order."
            )
        super().__init__(classes, ordered_labels(given, sigma))


def ordered_labels(positions: Sequence[float], sigma: float = 1.0) -> Tensor:
    """``p_y(k) = softmax over k of −(x_k − x_y)² / 2σ²`` for classes at the positions x: [K, K] float64, row y for
    class y.

    >>> ordered_labels([0, 1, 2]).round(decimals=3)
    tensor([[0.5740, 0.3480, 0.0780],
            [0.2740, 0.4520, 0.2740],
            [0.0780, 0.3480, 0.5740]], dtype=torch.float64)
    """
    check_range("sigma", sigma, "(0, inf)", "the width of a label on the scale of the classes, usually 1")
    x = torch.tensor([float(position) for position in positions], dtype=torch.float64)
    if not bool(torch.isfinite(x).all()) or len(x.unique()) < len(x):
        raise InputError(
            f"positions must be finite and all different, got {list(positions)}. Two classes at the same position "
            "would have the same label."
        )
    # Divided before squaring: the square of a tiny sigma would underflow to zero.
    return torch.softmax(-0.5 * ((x - x[:, None]) / sigma).square(), dim=1)
