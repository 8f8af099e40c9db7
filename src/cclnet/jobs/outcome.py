"""How the jobs ended: in words, and as a line in a log beside the results."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cclnet.files import write_whole


@dataclass
class Outcome:
    """The names of the jobs by how they ended; those that failed with the reason."""

    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def in_words(self, seconds: float) -> str:
        had = f"{len(self.skipped)} had their result already"
        lines = [f"{len(self.done)} runs done and {had}, in {seconds / 60:.1f} minutes."]
        if self.unfinished:
            names = ", ".join(self.unfinished)
            lines.append(f"{len(self.unfinished)} unfinished, go on with the same command: {names}")
        lines += [f"failed: {name}: {reason}" for name, reason in self.failed.items()]
        return "\n".join(lines)

    def log(self, results: Path, seconds: float, **asked: Any) -> None:
        """Add a line to log.jsonl beside the results: what was asked for, and what it took on the clock."""
        if not (self.done or self.unfinished or self.failed):
            return
        line = {
            **asked,
            "done": self.done,
            "unfinished": len(self.unfinished),
            "failed": len(self.failed),
            "minutes": round(seconds / 60, 2),
        }
        path = results / "log.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        write_whole(path, before + json.dumps(line) + "\n")
