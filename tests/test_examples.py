"""The three examples are one training in three loops: each runs as its reader would run it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@cache
def printed_by(name: str) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_plain_loop_learns_and_freezes() -> None:
    plain = printed_by("plain")
    assert len(plain["losses"]) == 20
    assert sum(plain["losses"][-5:]) < 0.5 * sum(plain["losses"][:5])
    assert plain["frozen"] is True


@pytest.mark.parametrize("name", ["lightning", "huggingface"])
def test_the_same_losses_in_every_loop(name: str) -> None:
    if name == "huggingface" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    other, plain = printed_by(name), printed_by("plain")
    assert other["losses"] == pytest.approx(plain["losses"], abs=1e-6)
    assert other["frozen"] is plain["frozen"]
