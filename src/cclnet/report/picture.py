"""Figures as small PNG files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from cclnet.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = 128  # a palette: lines and maps look the same in a quarter of the bytes


def save_picture(figure: Figure, path: Path, dots: int = 110) -> None:
    """Write a figure, ``dots`` an inch. The same figure gives the same file, whatever wrote it."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dots, format="png", metadata={"Software": None})
    picture = Image.open(drawn).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    write_whole(path, lambda file: picture.save(file, format="PNG", optimize=True))
