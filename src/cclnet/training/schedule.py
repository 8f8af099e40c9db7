"""The learning rate over a run, as a factor on every group's own rate."""

from __future__ import annotations

import math

from cclnet.training.settings import Settings


def rate_factor(settings: Settings, epoch: float) -> float:
    """The factor at ``epoch`` (0 at the start, fractions inside an epoch).

    ``step`` multiplies by ``drop_factor`` at each drop, on a whole epoch; ``cosine`` falls to zero at the last
    epoch; a warm-up rises linearly to whatever the schedule says.

    >>> from cclnet.training.settings import Settings
    >>> [round(rate_factor(Settings(epochs=100), e), 3) for e in (0, 49.9, 50, 75)]
    [1.0, 1.0, 0.1, 0.01]
    """
    factor = 1.0
    if settings.schedule == "step":
        factor = settings.drop_factor ** sum(epoch >= round(drop * settings.epochs) for drop in settings.drops)
    elif settings.schedule == "cosine":
        factor = 0.5 * (1.0 + math.cos(math.pi * min(epoch / settings.epochs, 1.0)))
    if epoch < settings.warmup_epochs:
        # One step's worth above zero, so that the very first step already moves.
        factor *= max(epoch, 1e-3) / settings.warmup_epochs
    return factor
