"""Shared by all tests: one thread a process (the suite runs in parallel) and fixed seeds."""

from __future__ import annotations

import os

# No test asks the hub for pretrained weights or finds some in the user's cache; commands started by tests inherit it.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_CACHE=os.devnull, TORCH_HOME=os.devnull)
# One thread in the processes that tests start, too: their threads would wait for each other on the cores they share.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
