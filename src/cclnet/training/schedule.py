"""The learning rate over a run, as a factor on every group's own rate."""

from __future__ import annotations

import math

from cclnet.training.settings import Settings


def drop_epochs(settings: Settings) -> list[int]:
    """After how many epochs each drop comes. However short a run is, each rate is trained at for an epoch at least, and
    drops for which there is no room are left out.

    >>> [drop_epochs(Settings(epochs=epochs, drops=(0.5, 0.75))) for epochs in (1, 2, 3, 160)]
    [[], [1], [2], [80, 120]]
    """
    starts: list[int] = []
    for drop in settings.drops:
        starts.append(max(round(drop * settings.epochs), starts[-1] + 1 if starts else 1))
    return [start for start in starts if start < settings.epochs]


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
        factor = settings.drop_factor ** sum(epoch >= start for start in drop_epochs(settings))
    elif settings.schedule == "cosine":
        factor = 0.5 * (1.0 + math.cos(math.pi * min(epoch / settings.epochs, 1.0)))
    if epoch < settings.warmup_epochs:
        # One step's worth above zero, so that the very first step already moves.
        factor *= max(epoch, 1e-3) / settings.warmup_epochs
    return factor
