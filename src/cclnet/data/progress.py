"""A progress bar that counts images."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

_SECONDS_BETWEEN_DRAWINGS = 0.1


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} images/s" if task.speed else "", style="progress.data.speed")


@contextmanager
def counting_images(what: str, total: int, done: int = 0, show: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar on stderr for as long as the block lasts; gives the function that counts further images.

    It is drawn when images are counted, not by a thread: workers are forked while it stands, and a fork in the
    middle of what another thread writes would leave them waiting for it for ever.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show, auto_refresh=False) as bar:
        task = bar.add_task(what, total=total, completed=done)
        drawn_at = 0.0

        def count(images: int) -> None:
            nonlocal drawn_at
            bar.advance(task, images)
            if time.monotonic() - drawn_at > _SECONDS_BETWEEN_DRAWINGS:
                bar.refresh()
                drawn_at = time.monotonic()

        yield count
