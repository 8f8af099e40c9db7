"""From batches to a run folder: settings, step, loop, checkpoint."""

from __future__ import annotations

import os
from importlib.resources import files
from typing import Any

# The compiler does algebra on shapes with sympy, whose cache of a thousand expressions is too small for a network:
# without a limit compiling takes a twentieth less. It is read when sympy is first imported, which the modules below do.
os.environ.setdefault("SYMPY_CACHE_SIZE", "None")


def quick_start() -> dict[str, Any]:
    """The settings of `cclnet train` without arguments."""
    from cclnet.settings import read_settings

    return read_settings(str(files(__name__) / "quick_start.toml"))
