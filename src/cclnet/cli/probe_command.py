"""`cclnet probe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import cclnet.presets
from cclnet.cli import SOURCES, Accelerator, Quiet, with_settings
from cclnet.settings import Settings, read_settings

USED = (
    "backbone", "pretrained", "weights", "folds", "method", "pooling", "tta", "short_side", "cache_dir", "decision",
    "cost", "by", "image_column", "label_column", "group_column", "split_column", "label_separator", "image_folder",
    "source", "strict", "follow_links", "skip_unreadable", "deduplicate", "seed",
)  # fmt: skip
PRESET = read_settings(Path(cclnet.presets.__file__).with_name("probe.preset.toml"))
DEFAULTS = {name: str(value) for name, value in PRESET.items()} | {
    "method": "hard; with several labels per image bce",
    "short_side": "that of the backbone",
    "decision": "costs if any are given, else balanced",
}


@with_settings(Settings, only=USED, defaults=DEFAULTS)
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
