"""What a person sees of a run while it trains: a live bar, a line an epoch, TensorBoard."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from cclnet.runs.folder import RunFolder

# A signal, or the end of the time a run is given, ends it between two steps, with a checkpoint.


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


PACE = 0.5  # seconds between two looks at the running loss, each of which waits for the device


class Display:
    """Live progress on a terminal, plain lines elsewhere; silent on all ranks but the first."""

    def __init__(self, run: RunFolder, epochs: int, steps: int, done: int, shown: bool, written: bool) -> None:
        self.epochs = epochs
        self.steps = steps
        self.written = written
        self.console = Console(quiet=not shown)
        self.live = shown and self.console.is_terminal
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[words]}"),
            console=self.console,
            disable=not self.live,
            transient=True,
        )
        self.task = self.progress.add_task("training", total=epochs * steps, completed=done, words="")
        self.run = run
        self.writer: Any = None
        self._looked = time.monotonic()

    def __enter__(self) -> Display:
        if self.written:
            from torch.utils.tensorboard import SummaryWriter

            done = len(self.run.read_history())
            self.writer = SummaryWriter(str(self.run.tensorboard), purge_step=done + 1 if done else None)
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
        if self.writer is not None:
            self.writer.close()

    def step(self, epoch: int, step: int, images: int, since: float, sums: Tensor, words: str) -> float | None:
        """After step number ``step`` of an epoch (0 the first): move the bar, at its own pace. Returns the mean loss
        so far where it was looked at."""
        if not self.live or time.monotonic() - self._looked < PACE:
            return None
        self._looked = time.monotonic()
        loss = float(sums[0]) / (step + 1)
        rate = images / max(time.monotonic() - since, 1e-9)
        self.progress.update(
            self.task,
            description=f"epoch {epoch + 1}/{self.epochs}",
            completed=epoch * self.steps + step + 1,
            words=f"{rate:,.0f} images/s  loss {loss:.3f}  {words}",
        )
        return loss

    def epoch(self, record: Mapping[str, float], matrix: Tensor | None, classes: Sequence[str], words: str) -> None:
        """After an epoch: one line, and TensorBoard's scalars and matrix."""
        epoch = int(record["epoch"])
        accuracy = f"  val accuracy {record['val_accuracy']:.4f}" if "val_accuracy" in record else ""
        self.console.print(
            f"epoch {epoch:>4}/{self.epochs}  loss {record['loss']:.4f}{accuracy}  "
            f"{record['images_per_second']:,.0f} images/s  {words}",
            highlight=False,
        )
        if self.writer is None:
            return
        for name, value in record.items():
            if name != "epoch":
                self.writer.add_scalar(name, value, epoch)
        if matrix is not None and (epoch == 1 or epoch % max(self.epochs // 20, 1) == 0 or epoch == self.epochs):
            self.writer.add_image("soft labels", matrix_image(matrix), epoch, dataformats="HWC")
        self.writer.flush()


def matrix_image(matrix: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A [K, K] matrix as a picture, each cell at least 16 pixels wide, [H, W, 3]."""
    from matplotlib import colormaps

    values = matrix.float().cpu().numpy()
    cell = max(16, 224 // len(values))
    colours = colormaps["viridis"](values / max(float(values.max()), 1e-12))[..., :3]
    return (colours * 255).astype(np.uint8).repeat(cell, axis=0).repeat(cell, axis=1)


def softness_in_words(logged: Mapping[str, float], collapse: float | None) -> str:
    """
    >>> softness_in_words({"softness": 0.44, "frozen": 1.0}, 0.5519), softness_in_words({"softness": 0.8}, None)
    ('softness 0.440 (collapse 0.552)  frozen', 'softness 0.800')
    """
    if "softness" not in logged:
        return ""
    against = "" if collapse is None else f" (collapse {collapse:.3f})"
    frozen = "  frozen" if logged.get("frozen") else ""
    return f"softness {logged['softness']:.3f}{against}{frozen}"
