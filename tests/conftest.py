"""Shared by all tests: one thread a process (the suite runs in parallel) and fixed seeds."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
