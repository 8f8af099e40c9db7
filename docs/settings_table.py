"""Rewrite the table of all settings in docs/training.md from cclnet/settings.py: ``python docs/settings_table.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cclnet.errors import InputError
from cclnet.schema import rules
from cclnet.settings import DataOptions, Settings, default_text

PAGE = Path(__file__).with_name("training.md")
MARKERS = "<!-- settings -->", "<!-- /settings -->"


def settings_table() -> str:
    """The Markdown table of all settings, for docs/training.md."""
    return "\n".join(["| setting | default | values | |", "|---|---|---|---|", *_table_rows(Settings, "")])


def _table_rows(kind: Any, path: str) -> Iterator[str]:
    nested = {}
    for field in sorted(dataclasses.fields(kind), key=lambda field: field.name in rules(DataOptions)):
        if dataclasses.is_dataclass(field.default):
            nested[field.name] = type(field.default)
            continue
        own = rules(kind)[field.name]
        values = ", ".join(own.choices) or own.expected()
        cells = (f"`{path}{field.name}`", default_text(field), values, own.help.replace("|", r"\|"))
        yield f"| {' | '.join(cells)} |"
    for name, inner in nested.items():
        yield from _table_rows(inner, f"{path}{name}.")


def with_settings_table(page: str) -> str:
    """The page with the current table between its markers."""
    start, end = MARKERS
    before, opened, rest = page.partition(start)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise InputError(f"the page has no markers {start} and {end} for the table of settings.")
    return f"{before}{start}\n{settings_table()}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_settings_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
