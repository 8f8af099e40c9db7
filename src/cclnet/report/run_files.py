"""What a report reads from a run folder beside its scores: settings and the record of training."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cclnet.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class RunFiles:
    """Settings and epochs of a run; empty where it has none (a bare predictions.csv)."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)


def read_run(run: str | Path) -> RunFiles:
    """The files of a run folder. Of a predictions.csv alone nothing else is known, whatever lies beside it."""
    folder = Path(run)
    if not folder.is_dir():
        return RunFiles(folder.parent)
    return RunFiles(folder, _settings(folder / "settings.toml"), _records(folder / "metrics.jsonl"))


def _settings(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} is not valid TOML: {error}. Mend it, or remove it to report without settings."
        ) from error


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number} is not JSON: {error}. Mend it, or remove the file.") from error
        if not isinstance(record, dict) or not isinstance(record.get("epoch"), (int, float)):
            raise InputError(f"{path}, line {number}: expected an object with an 'epoch', got {line[:60]!r}.")
        records.append(record)
    return records


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings line by line, tables by dotted names.

    >>> list(flat_settings({"lr": 0.1, "split": {"by": "group"}}))
    [('lr', '0.1'), ('split.by', 'group')]
    """
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat_settings(value, f"{prefix}{name}.")
        elif isinstance(value, (str, int, float)):
            yield prefix + name, str(value).lower() if isinstance(value, bool) else str(value)
        else:
            yield prefix + name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
