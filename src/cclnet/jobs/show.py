"""How the jobs stand: a live table on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

COLOURS = {
    "waiting": "dim", "training": "cyan", "judging": "blue", "done": "green", "skipped": "dim green",
    "unfinished": "yellow", "failed": "red",
}  # fmt: skip
LINE_EVERY = 30.0  # seconds between two lines about one job in training, where there is no live table


class Show:
    """``with Show() as show: show.update(name, state, words)``."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(quiet=quiet)
        self.states: dict[str, tuple[str, str]] = {}
        self.began = time.monotonic()
        self._told: dict[str, float] = {}
        self._live: Live | None = None

    def update(self, name: str, state: str, words: str = "") -> None:
        before = self.states.get(name, ("", ""))[0]
        self.states[name] = (state, words)
        if self._live is not None:
            self._live.update(self.table())
        elif state != "waiting" and (state != before or self._due(name)):
            self._told[name] = time.monotonic()
            line = f"{self._clock()}  {state:<10} {name}  {words}"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _due(self, name: str) -> bool:
        return time.monotonic() - self._told.get(name, 0.0) > LINE_EVERY

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        return f"{minutes:3d}:{seconds:02d}"

    def table(self) -> Table:
        """The jobs that are under way or changed, and how many there are of each state."""
        counts = ", ".join(
            f"{count} {state}" for state in COLOURS if (count := sum(s == state for s, _ in self.states.values()))
        )
        table = Table(title=f"{self._clock()}  {counts}", title_justify="left", box=None, pad_edge=False)
        for column in ("run", "state", ""):
            table.add_column(column, no_wrap=column != "")
        room = max(self.console.height - 6, 8)
        shown = [row for row in self.states.items() if row[1][0] in ("training", "judging", "failed")]
        shown += [row for row in reversed(self.states.items()) if row[1][0] in ("done", "unfinished")]
        for name, (state, words) in shown[:room]:
            table.add_row(name, f"[{COLOURS[state]}]{state}[/]", escape(words))
        return table

    def __enter__(self) -> Show:
        if self.console.is_terminal and not self.console.quiet:
            self._live = Live(self.table(), console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
