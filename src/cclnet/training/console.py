"""What the user sees and sends during training: progress bar, one line per epoch, stop signals."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from lightning.fabric import Fabric
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from cclnet.errors import resume_command
from cclnet.runs.folder import RunFolder
from cclnet.training.duration import MEASURED_STEPS, RunLength
from cclnet.training.loggers import Loggers

STOP_CHECK_STEPS = 50  # steps between two agreements of the ranks on stopping, which wait for the device
REFRESH_SECONDS = 0.5  # between two updates of the progress bar, which read the loss and wait for the device


class StopRequest:
    """While active, the first SIGTERM or SIGINT requests a stop between two steps; a second one acts as usual.

    All ranks must stop at the same step, so they exchange requests every STOP_CHECK_STEPS steps and after each epoch.
    """

    def __init__(self, fabric: Fabric, max_minutes: float = 0.0) -> None:
        self.fabric = fabric
        self.received = 0  # number of the signal
        self.deadline = time.monotonic() + 60 * max_minutes if max_minutes else float("inf")
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)

    def requested(self, step: int | None = None) -> bool:
        """Return whether to stop, the same on every rank. ``step`` is None between epochs."""
        if self.fabric.world_size > 1:
            if step is not None and step % STOP_CHECK_STEPS:
                return False
            own = torch.tensor([self.received, time.monotonic() > self.deadline], device=self.fabric.device)
            any_rank: list[int] = self.fabric.all_reduce(own.float(), reduce_op="max").int().tolist()
            self.received = any_rank[0]
            return any(any_rank)
        return bool(self.received) or time.monotonic() > self.deadline


class Display:
    """A progress bar on a terminal, plain lines elsewhere, and the loggers of the run.

    ``length``: that of the run, of which its steps that are left are still to be done.
    """

    def __init__(self, run: RunFolder, length: RunLength, *, show: bool, logger: str) -> None:
        self.run, self.length, self.loggers = run, length, Loggers(logger, run)
        self.epochs, self.steps = length.epochs, length.steps
        done = self.epochs * self.steps - length.left
        self.console = Console(quiet=not show)
        self._measured: list[float] = []  # times after the first steps
        self.live = show and self.console.is_terminal
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
            console=self.console,
            disable=not self.live,
            transient=True,
        )
        self.task = self.progress.add_task("training", total=self.epochs * self.steps, completed=done, status="")
        self._refreshed = time.monotonic()

    def __enter__(self) -> Display:
        self.loggers.__enter__()
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.progress.stop()
        self.loggers.__exit__(kind, *error)

    def step(self, epoch: int, step: int, images: int, since: float, sums: Tensor, softness: str) -> float | None:
        """Update the progress bar after a step (counted from 0). Return the mean loss so far if it was read."""
        if len(self._measured) < MEASURED_STEPS and not self.console.quiet:
            self._measure(sums)
        if not self.live or time.monotonic() - self._refreshed < REFRESH_SECONDS:
            return None
        self._refreshed = time.monotonic()
        loss = float(sums[0]) / (step + 1)
        rate = images / max(time.monotonic() - since, 1e-9)
        self.progress.update(
            self.task,
            description=f"epoch {epoch + 1}/{self.epochs}",
            completed=epoch * self.steps + step + 1,
            status=f"{rate:,.0f} images/s  loss {loss:.3f}  {softness}",
        )
        return loss

    def _measure(self, sums: Tensor) -> None:
        """Print the expected time after the first steps. The first one is left out: it compiles and fills caches."""
        float(sums[0])  # waits for the device
        self._measured.append(time.monotonic())
        if len(self._measured) == MEASURED_STEPS:
            per_step = (self._measured[-1] - self._measured[0]) / (MEASURED_STEPS - 1)
            for line in self.length.lines(per_step, f"measured on the first {MEASURED_STEPS}"):
                self.console.print(line, highlight=False, soft_wrap=True)

    def cut(self, minutes: float, epoch: int, step: int) -> None:
        """Report that ``max_minutes`` ended the run."""
        where = f"after {epoch} of {self.epochs} epochs" + (f" and {step} of {self.steps} steps" if step else "")
        self.console.print(
            f"[yellow]note:[/yellow] max_minutes = {minutes:g} ended training {where}. The model is evaluated as it "
            f"is. Continue for as long again with: {escape(resume_command(self.run.path))}",
            highlight=False,
            soft_wrap=True,
        )

    def epoch(self, record: Mapping[str, float], soft_labels: Tensor | None, softness: str) -> None:
        """Print one line after an epoch, and log its record; some twenty times per run also the soft labels."""
        epoch = int(record["epoch"])
        accuracy = f"  val accuracy {record['val_accuracy']:.4f}" if "val_accuracy" in record else ""
        self.console.print(
            f"epoch {epoch:>4}/{self.epochs}  loss {record['loss']:.4f}{accuracy}  "
            f"{record['images_per_second']:,.0f} images/s  {softness}",
            highlight=False,
        )
        shown = epoch in (1, self.epochs) or epoch % max(self.epochs // 20, 1) == 0
        self.loggers.log(record, soft_labels if shown else None)


def format_softness(record: Mapping[str, float], collapse: float | None) -> str:
    """Return the softness of an epoch's record as text, empty without one.

    >>> format_softness({"softness": 0.44, "frozen": 1.0}, 0.5519), format_softness({"softness": 0.8}, None)
    ('softness 0.440 (collapse 0.552)  frozen', 'softness 0.800')
    """
    if "softness" not in record:
        return ""
    reference = "" if collapse is None else f" (collapse {collapse:.3f})"
    frozen = "  frozen" if record.get("frozen") else ""
    return f"softness {record['softness']:.3f}{reference}{frozen}"
