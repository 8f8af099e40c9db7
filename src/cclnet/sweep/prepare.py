"""What a sweep on one data set does before its cells: print the expected time, and decode the images once for all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from cclnet.data.cache import decode_readable, unreadable_images
from cclnet.data.split import make_split
from cclnet.data.table import ImageTable
from cclnet.settings import Settings
from cclnet.training.duration import first_estimate


def prepare(
    settings: Settings, table: ImageTable, runs: int, accelerator: str, cache_dir: Path | None, console: Console
) -> None:
    """Print the expected time of each of ``runs`` cells, and decode the images into the cache.

    Files that cannot be read are an error here, before anything is trained.
    """
    _print_expected_time(settings, table, runs, accelerator, console)
    if isinstance(table.images, np.ndarray):
        return
    _, broken = decode_readable(table, settings.short_side, cache_dir, progress=not console.quiet)
    if broken and not settings.skip_unreadable:
        raise unreadable_images(broken, len(table))


def _print_expected_time(settings: Settings, table: ImageTable, runs: int, accelerator: str, console: Console) -> None:
    """On a CPU, where it matters most."""
    if console.quiet or (accelerator != "cpu" and torch.cuda.is_available()):
        return
    for line in first_estimate(settings, table, make_split(table, settings.split), torch.device("cpu")):
        console.print(f"each of {runs} runs, with all cores: {line}", highlight=False, markup=False, soft_wrap=True)
