"""Options that several commands take."""

from __future__ import annotations

import pytest

from cclnet import InputError
from cclnet.cli.options import parse_seeds


@pytest.mark.parametrize("text", ["zero", "", "0,1.5"])
def test_seeds_are_whole_numbers(text: str) -> None:
    with pytest.raises(InputError, match="seeds are whole numbers separated by commas"):
        parse_seeds(text)


def test_a_seed_stands_once() -> None:
    with pytest.raises(InputError, match="a seed given twice is the same run twice; got '0,0'"):
        parse_seeds("0,0")
