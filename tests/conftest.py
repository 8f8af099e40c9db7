"""Shared by all tests: one thread a process (the suite runs in parallel) and fixed seeds."""

from __future__ import annotations

import multiprocessing
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


@pytest.fixture
def forked_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of a sweep on this machine be forks of one that has imported what they need. By default each
    imports it anew, which takes seconds; test_folds.py, test_ray.py and the tutorials have such processes."""
    modules = ["timm", "cclnet.training.loop", "cclnet.sweep.run_cell", "cclnet.sweep.local", "torch.utils.tensorboard"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    monkeypatch.setattr("cclnet.sweep.local.START_METHOD", "forkserver")
