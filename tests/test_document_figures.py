"""Every decimal in the prose of README, docs and method cards is computed from the results, or is a listed constant."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_figures_in_prose_are_those_of_the_results(figures: ModuleType) -> None:
    assert figures.problems() == [], "run: python docs/figures.py"


def test_a_decimal_without_a_source_is_found(figures: ModuleType) -> None:
    [problem] = figures.check_page("Accuracy is 0.852,\nkappa 0.71.", {"is 0.852": [0.8519]})
    assert problem.startswith("0.71 has no source") and "kappa 0.71" in problem
    assert figures.check_page("Accuracy is 0.852, kappa 0.71.", {"0.852, kappa 0.71": [0.8519, 0.7123]}) == []


@pytest.mark.parametrize(
    ("text", "value", "agrees"),
    [
        ("0.852", 0.8524, True),
        ("0.852", 0.8526, False),
        ("0.85", 0.8526, True),
        ("−2.0", -1.96, True),
        ("−2.0", 1.96, False),
        ("+3.5", 3.5, True),
        ("1,234.5", 1234.52, True),
    ],
)
def test_a_figure_is_compared_with_the_digits_it_is_printed_with(
    figures: ModuleType, text: str, value: float, agrees: bool
) -> None:
    assert (figures.check_page(f"It is {text} here.", {f"is {text}": [value]}) == []) is agrees


def test_whole_numbers_of_a_fragment_are_compared_where_they_are_given(figures: ModuleType) -> None:
    assert figures.check_page("94 of the first 100", {"94 of the first 100": [94.4, 100]}) == []
    assert len(figures.check_page("94 of the first 100", {"94 of the first 100": [93.4, 100]})) == 1
    assert "3 values" in figures.check_page("94 of 100", {"94 of 100": [94, 100, 1]})[0]


def test_a_fragment_is_no_part_of_a_longer_number(figures: ModuleType) -> None:
    assert len(figures.check_page("10.85 and 0.857", {"0.85": [0.85]})) == 2


@pytest.mark.parametrize(
    "text",
    [
        "```\nlr = 0.1\n```",
        "set `lr = 0.1`",
        "<!-- table-1 -->\n| 0.852 |\n<!-- /table-1 -->",
        "[results](runs-0.5.json)",
        "Python 3.10 and torch 2.6",
        "| `alpha` | 0.1 | weight |",
        "1.2.3 is a version, 10,015 images are a count",
    ],
)
def test_what_is_no_prose_needs_no_source(figures: ModuleType, text: str) -> None:
    assert figures.check_page(text, {}) == []


def test_only_the_default_of_a_row_of_settings_is_exempt(figures: ModuleType) -> None:
    assert len(figures.check_page("| `alpha` | 0.1 | gains 3.5 points |", {})) == 1
    assert len(figures.check_page("| resnet18 | 0.1 |", {})) == 1


def test_a_number_that_is_not_in_a_table_is_an_error(figures: ModuleType) -> None:
    with pytest.raises(LookupError, match="0 rows"):
        figures.field("planted.md", "at the end", "no such method")
