"""How the jobs stand or ended: in words, and as a line in a log beside the results."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cclnet.files import write_whole


@dataclass
class Outcome:
    """The names of all jobs, and of those that ended by how they did; those that failed with the reason."""

    names: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def unfinished(self) -> list[str]:
        ended = {*self.done, *self.skipped, *self.failed}
        return [name for name in self.names if name not in ended]

    def in_words(self, seconds: float) -> str:
        had = f"{len(self.skipped)} had their result already"
        lines = [f"{len(self.done)} runs done and {had}, in {seconds / 60:.1f} minutes."]
        if self.unfinished:
            names = ", ".join(self.unfinished)
            lines.append(f"{len(self.unfinished)} unfinished, go on with the same command: {names}")
        lines += [f"failed: {name}: {reason}" for name, reason in self.failed.items()]
        return "\n".join(lines)


class Log:
    """log.jsonl beside the results: a line for each command, with what was asked for and what it took on the clock.

    The line is written again as each job ends, so that it is there even if the machine stops under the command.
    """

    def __init__(self, results: Path, began: float, asked: Mapping[str, Any]) -> None:
        self.path, self.began, self.asked = results / "log.jsonl", began, asked
        self.before: str | None = None

    @property
    def seconds(self) -> float:
        return time.time() - self.began

    def write(self, outcome: Outcome) -> None:
        if self.before is None:
            self.before = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        line = {
            "began": datetime.fromtimestamp(self.began, timezone.utc).isoformat(timespec="seconds"),
            **self.asked,
            "done": outcome.done,
            "unfinished": len(outcome.unfinished),
            "failed": len(outcome.failed),
            "minutes": round(self.seconds / 60, 2),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, self.before + json.dumps(line) + "\n")
