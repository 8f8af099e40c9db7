"""Run the cells of a sweep, on this machine or on a Ray cluster, with one table of their progress."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from cclnet.sweep.cells import Cell, Executor, SweepContext, SweepLog, SweepOptions, SweepSummary
from cclnet.sweep.results import check_results

LINE_SECONDS = 30.0  # between two lines about one cell in training, without a terminal
COLOURS = {
    "waiting": "dim", "training": "cyan", "evaluating": "blue", "done": "green", "skipped": "dim green",
    "unfinished": "yellow", "failed": "red",
}  # fmt: skip


def run_sweep(
    cells: Sequence[Cell], options: SweepOptions, requested: Mapping[str, Any], console: Console, began: float
) -> SweepSummary:
    """Run the shard of the cells that the options name, with progress on the console and a line in the log."""
    executor = {} if options.ray is None else {"executor": "ray"}
    log = SweepLog(options.results, {**requested, **executor}, options.shard)
    own, context = options.own_shard(cells), options.context(began)
    return run_on(options, own, context, SweepProgress(console), log.write, began)


def run_on(
    executor: Executor,
    cells: Sequence[Cell],
    context: SweepContext,
    progress: SweepProgress,
    on_end: Callable[[SweepSummary], None] = lambda summary: None,
    began: float | None = None,
) -> SweepSummary:
    """Run the cells that have no result yet. ``on_end`` is called whenever a cell ended, and at the end."""
    if executor.ray is not None:
        from cclnet.sweep.ray_tasks import run_cells_on_ray

        return run_cells_on_ray(cells, context, executor.ray, progress, on_end, began)
    from cclnet.sweep.local import run_cells

    return run_cells(cells, context, executor.parallel, progress, on_end=on_end, began=began)


def begin_sweep(
    cells: Sequence[Cell], context: SweepContext, progress: SweepProgress, began: float | None
) -> tuple[SweepSummary, list[Cell]]:
    """The summary of a sweep that begins, and its cells that have no result yet."""
    finished = check_results(cells, context)
    summary = SweepSummary([cell.name for cell in cells], began=time.time() if began is None else began)
    for cell in cells:
        if cell.name in finished:
            summary.skipped.append(cell.name)
            progress.update(cell.name, "skipped", "has its result")
        else:
            progress.update(cell.name, "waiting")
    return summary, [cell for cell in cells if cell.name not in finished]


@contextmanager
def on_signals(receive: Callable[[int], None]) -> Iterator[None]:
    """While active, SIGINT and SIGTERM call ``receive`` with their number and have no other effect."""

    def handle(number: int, _: object) -> None:
        receive(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class SweepProgress(AbstractContextManager["SweepProgress"]):
    """The state of every cell: a live table on a terminal, elsewhere one line per change."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.states: dict[str, tuple[str, str]] = {}
        self.began = time.monotonic()
        self._printed: dict[str, float] = {}
        self._live: Live | None = None

    def update(self, name: str, state: str, text: str = "") -> None:
        now, before = time.monotonic(), self.states.get(name, ("", ""))[0]
        self.states[name] = (state, text)
        if self._live is not None:
            self._live.update(self.table())
        elif (state != "waiting" or text) and (state != before or now - self._printed.get(name, 0.0) > LINE_SECONDS):
            self._printed[name] = now
            line = f"{self._clock()}  {state:<10} {name}  {text}"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        return f"{minutes:3d}:{seconds:02d}"

    def table(self) -> Table:
        """The number of cells in each state, the active and failed cells, then those that ended last."""
        counts = Counter(state for state, _ in self.states.values())
        title = ", ".join(f"{counts[state]} {state}" for state in COLOURS if counts[state])
        table = Table(title=f"{self._clock()}  {title}", title_justify="left", box=None, pad_edge=False)
        for column in ("run", "state", ""):
            table.add_column(column, no_wrap=column != "")
        shown = [row for row in self.states.items() if row[1][0] in ("training", "evaluating", "failed")]
        shown += [row for row in reversed(self.states.items()) if row[1][0] in ("done", "unfinished")]
        for name, (state, text) in shown[: max(self.console.height - 6, 8)]:
            table.add_row(name, f"[{COLOURS[state]}]{state}[/]", escape(text))
        return table

    def __enter__(self) -> SweepProgress:
        if self.console.is_terminal and not self.console.quiet:
            self._live = Live(self.table(), console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
