"""docs/methods.md speaks of every method there is, with the settings it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from cclnet.methods import METHODS, method_settings

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
ROWS = {
    name: line
    for line in PAGE.splitlines()
    if line.startswith("| `") and line.count("|") == 6  # the table of all methods has five columns
    for name in line.split("|")[1].replace("`", "").split()
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_row_with_its_settings(name: str) -> None:
    assert name in ROWS, f"add a row for {name} to docs/methods.md"
    row = ROWS[name]
    if "as `lsr`" not in row:
        for setting in method_settings(name):
            assert f"`{setting}`" in row, f"the row of {name} in docs/methods.md does not name {setting}"


def test_no_row_is_about_a_method_that_is_not_there() -> None:
    assert set(ROWS) <= set(METHODS)
