"""The pages of the methods speak of every method there is, with the settings it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from cclnet.evaluation.metrics import find, unregister
from cclnet.methods import METHODS, Classes, build_method, method_settings, when_to_use

DOCS = Path(__file__).parents[2] / "docs"
PAGE, ALL_METHODS, EXTEND = (
    (DOCS / name).read_text(encoding="utf-8") for name in ("methods.md", "methods_all.md", "extend.md")
)
ROWS = {
    name: line
    for line in ALL_METHODS.splitlines()
    if line.startswith("| `") and line.count("|") == 6  # the table of all methods has five columns
    for name in line.split("|")[1].replace("`", "").split()
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_row_with_its_settings(name: str) -> None:
    assert name in ROWS, f"add a row for {name} to docs/methods_all.md"
    row = ROWS[name]
    if "as `lsr`" not in row:
        for setting in method_settings(name):
            assert f"`{setting}`" in row, f"the row of {name} in docs/methods_all.md does not name {setting}"


def test_the_page_and_the_command_give_the_same_advice() -> None:
    shown = PAGE.partition("<!-- when to use -->")[2].partition("<!-- /when to use -->")[0]
    assert shown.strip() == when_to_use().strip()
    named = set(re.findall(r"`([a-z0-9-]+)`", when_to_use())) - {"cclnet doubts"}
    assert named <= set(METHODS)


def test_no_row_is_about_a_method_that_is_not_there() -> None:
    assert set(ROWS) <= set(METHODS)


def test_the_example_of_adding_a_method_works() -> None:
    code = EXTEND.partition("## A method")[2].partition("```python\n")[2].partition("```")[0]
    try:
        exec(compile(code, "docs/extend.md", "exec"), {"__name__": "example"})
        assert method_settings("penalised") == {"penalty": 0.01}
        method = build_method("penalised", Classes(3, 4))
        loss = method(torch.zeros(2, 4), torch.ones(2, 3), torch.tensor([0, 1]))
        assert sorted(loss.terms) == ["cross_entropy", "penalty"]
    finally:
        METHODS.pop("penalised", None)


def test_the_example_of_adding_a_metric_works() -> None:
    code = EXTEND.partition("## A metric")[2].partition("```python\n")[2].partition("```")[0]
    try:
        exec(compile(code, "docs/extend.md", "exec"), {"__name__": "example"})
        assert find("error_rate").higher_is_better is False
    finally:
        unregister("error_rate")
