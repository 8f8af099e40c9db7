"""Pictures: small, and the same whenever they are drawn again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from cclnet.reproduce.paper_figures import save_picture


def drawn() -> Figure:
    figure = Figure(figsize=(4, 3))
    axis = figure.subplots()
    axis.plot(np.sin(np.arange(200) / 20), color="red")
    return figure


def test_a_picture_is_small_and_looks_like_the_figure(tmp_path: Path) -> None:
    save_picture(drawn(), tmp_path / "small.png", dots=100)
    drawn().savefig(tmp_path / "full.png", dpi=100)
    assert (tmp_path / "small.png").stat().st_size < 0.6 * (tmp_path / "full.png").stat().st_size
    small, full = (np.asarray(Image.open(tmp_path / f"{name}.png").convert("RGB"), float) for name in ("small", "full"))
    assert small.shape == (300, 400, 3) and np.abs(small - full).max() < 48 and np.abs(small - full).mean() < 0.5


def test_the_same_figure_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_picture(drawn(), tmp_path / f"{name}.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
