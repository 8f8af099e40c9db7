"""SIGTERM and SIGINT end a run between two steps, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
from lightning.fabric import Fabric

CHECK_EVERY = 50  # steps between two questions among ranks: asking waits for the device


class StopRequest:
    """While active, the first SIGTERM or SIGINT is only noted; a second one acts as usual.

    Ranks must stop at the same step, so several of them ask each other, every 50 steps and after an epoch.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.received: int = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def asked(self, step: int | None = None) -> int:
        """The signal that was received by any rank, or 0. ``step`` is None between epochs."""
        if self.fabric.world_size == 1:
            return self.received
        if step is not None and step % CHECK_EVERY:
            return 0
        anyone = self.fabric.all_reduce(torch.tensor(float(self.received), device=self.fabric.device), reduce_op="max")
        return int(anyone)
