"""Label smoothing regularisation (Szegedy et al. 2016), uniform or with the class prior."""

from __future__ import annotations

from cclnet import functional
from cclnet.methods.base import Classes, FixedTableMethod


class LSR(FixedTableMethod):
    """``L = CE(q, (1 − ε) y + ε u)`` with u uniform, or the class frequencies if ``prior`` is true."""

    def __init__(self, classes: Classes, epsilon: float = 0.1, prior: bool = False) -> None:
        distribution = classes.prior() if prior else None
        super().__init__(classes, functional.smoothed_labels(classes.num_classes, epsilon, distribution).float())
