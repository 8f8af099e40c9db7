"""A signal, or the end of the time a run is given, ends it between two steps, with a checkpoint."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch
from lightning.fabric import Fabric

CHECK_EVERY = 50  # steps between two questions among ranks: asking waits for the device


class StopRequest:
    """While active, the first SIGTERM or SIGINT is only noted; a second one acts as usual.

    Ranks must stop at the same step, so several of them ask each other, every 50 steps and after an epoch.
    """

    def __init__(self, fabric: Fabric, max_minutes: float = 0.0) -> None:
        self.fabric = fabric
        self.received = 0  # the signal, if any
        self.until = time.monotonic() + 60 * max_minutes if max_minutes else float("inf")
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

    def asked(self, step: int | None = None) -> bool:
        """Whether to stop, the same answer on every rank. ``step`` is None between epochs."""
        if self.fabric.world_size > 1:
            if step is not None and step % CHECK_EVERY:
                return False
            own = torch.tensor([self.received, time.monotonic() > self.until], device=self.fabric.device)
            anyone: list[int] = self.fabric.all_reduce(own.float(), reduce_op="max").int().tolist()
            self.received = anyone[0]
            return any(anyone)
        return bool(self.received) or time.monotonic() > self.until
