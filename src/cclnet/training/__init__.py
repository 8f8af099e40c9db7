"""Training: from batches to a run folder. Start reading in ``loop``."""

from __future__ import annotations

from importlib.resources import files
from typing import Any


def quick_start() -> dict[str, Any]:
    """Return the settings of ``cclnet train`` without arguments."""
    from cclnet.settings import read_settings

    return read_settings(str(files(__name__) / "quick_start.toml"))
