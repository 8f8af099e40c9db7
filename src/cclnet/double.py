"""State that must not lose digits when a whole network is cast to fewer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


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
