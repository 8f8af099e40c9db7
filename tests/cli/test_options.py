"""Options that several commands take."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from cclnet import InputError, __version__
from cclnet.cli import app
from cclnet.cli.options import parse_seeds


@pytest.mark.parametrize("text", ["zero", "", "0,1.5"])
def test_seeds_are_whole_numbers(text: str) -> None:
    with pytest.raises(InputError, match="seeds are whole numbers separated by commas"):
        parse_seeds(text)


def test_a_seed_stands_once() -> None:
    with pytest.raises(InputError, match="a seed given twice is the same run twice; got '0,0'"):
        parse_seeds("0,0")


def test_the_versions_that_matter_are_said() -> None:
    said = CliRunner().invoke(app, ["--version"])
    assert said.exit_code == 0
    assert f"cclnet {__version__}," in said.output
    assert f"torch {torch.__version__.split('+')[0]}" in said.output
