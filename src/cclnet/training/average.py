"""An exponential average of the weights, which is then what is tested and shipped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


class WeightAverage(AveragedModel):
    """Keeps ``decay`` of itself at every step, less at first, ``min(decay, (1 + n) / (10 + n))``: with .999 throughout,
    a run of a thousand steps would ship a third of its random start."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay = decay
        super().__init__(network, multi_avg_fn=self._move, use_buffers=True)

    def _move(self, averaged: Sequence[Tensor], current: Sequence[Tensor], _: Tensor | int) -> None:
        if not averaged[0].is_floating_point():  # counts
            torch._foreach_copy_(list(averaged), list(current))
            return
        steps = int(self.n_averaged)  # on the host, where what is handed over would have to be waited for
        torch._foreach_lerp_(list(averaged), list(current), 1.0 - min(self.decay, (1.0 + steps) / (10.0 + steps)))
