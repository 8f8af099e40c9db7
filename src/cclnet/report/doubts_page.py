"""The list of doubtful labels: doubts.csv with all images, and doubts.html with pictures of the first ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cclnet.evaluation.doubts import Doubts
from cclnet.files import make_folder, write_whole
from cclnet.report.html import render, thumbnails
from cclnet.runs.spreadsheet import mark_texts

PAIRS = 8  # pairs of classes in the table of the page


def write_doubts(out: str | Path, doubts: Doubts, settings: Mapping[str, Any], data: str | None, top: int) -> Path:
    """Write doubts.csv and doubts.html into ``out``; returns the path of the page.

    ``settings`` are those of the run (they say where the images are), ``data`` where the images are if they have moved,
    ``top`` how many images the page shows.
    """
    folder = make_folder(out)
    shown = doubts.table.head(top)
    pictures, note = thumbnails(shown["image"].tolist(), settings, data)
    texts = {
        name: mark_texts(doubts.table[name])
        for name in ("image", "label", "suggested", "group")
        if name in doubts.table
    }
    write_whole(folder / "doubts.csv", doubts.table.assign(**texts).to_csv(index=False, float_format="%.4f"))
    content = {
        "doubts": shown.to_dict("records"),
        "count": len(doubts.table),
        "left_out": doubts.left_out,
        "pairs": likely_mistakes(doubts),
        "pictures": pictures,
        "note": note,
    }
    write_whole(folder / "doubts.html", render("doubts.html", **content))
    return folder / "doubts.html"


def likely_mistakes(doubts: Doubts) -> list[tuple[str, str, float]]:
    """The largest entries of the label model off its diagonal: class, what its images are labelled as, share of the
    wrong labels of that class."""
    others = doubts.label_model.copy()
    np.fill_diagonal(others, 0.0)
    others /= np.maximum(others.sum(axis=1, keepdims=True), np.finfo(float).tiny)
    order = np.argsort(-others, axis=None, kind="stable")[:PAIRS]
    rows, columns = np.unravel_index(order, others.shape)
    names = doubts.classes
    return [(names[i], names[j], float(others[i, j])) for i, j in zip(rows, columns, strict=True) if others[i, j] > 0]
