"""From batches to a run folder: settings, step, loop, checkpoint."""

from __future__ import annotations

from importlib.resources import files
from typing import Any


def quick_start() -> dict[str, Any]:
    """The settings of `cclnet train` without arguments."""
    from cclnet.training.settings import read_settings

    return read_settings(str(files(__name__) / "quick_start.toml"))
