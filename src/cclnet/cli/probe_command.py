"""`cclnet probe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cclnet.cli import SOURCES, Accelerator, Quiet, with_settings
from cclnet.settings import Settings

USED = (
    "backbone", "pretrained", "weights", "folds", "method", "pooling", "tta", "short_side", "cache_dir", "decision",
    "cost", "by", "image_column", "label_column", "group_column", "split_column", "label_separator", "image_folder",
    "source", "strict", "follow_links", "skip_unreadable", "deduplicate", "seed",
)  # fmt: skip


@with_settings(Settings, only=USED)
def probe(
    data: Annotated[str, typer.Argument(help=SOURCES)],
    out: Annotated[Path | None, typer.Option(help="The run folder to create. Default: runs/NAME.")] = None,
    accelerator: Accelerator = "auto",
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Fit a baseline in minutes: frozen features of a pretrained backbone, and a logistic regression on them.

    The run folder is that of `cclnet train`, with out-of-fold predictions of every image. Features are cached.
    """
    from cclnet import api

    api.probe(data, out, accelerator=accelerator, progress=not quiet, summary=True, **settings)
