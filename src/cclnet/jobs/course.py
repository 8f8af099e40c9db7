"""The soft labels of a run in the making, epoch by epoch: how structure rises, fades and is held.

``correlations.jsonl`` in the run folder has a line for each epoch that is looked at. A run that was resumed may have an
epoch twice; the later line counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from cclnet.files import write_whole

FIRST, EVERY = 4, 4  # each of the first epochs, in which most happens, and then every fourth


def note_course(run: Path, epoch: int, matrix: Tensor | None) -> None:
    """Add the soft labels [K, K] after an epoch, where there are any and the epoch is one that is looked at."""
    if matrix is None or (epoch > FIRST and epoch % EVERY):
        return
    rows = [[round(value, 4) for value in row] for row in matrix.double().tolist()]
    path = run / "correlations.jsonl"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    write_whole(path, before + json.dumps({"epoch": epoch, "matrix": rows}) + "\n")


def read_course(run: Path) -> dict[str, Any] | None:
    """The epochs that were looked at and their matrices; None where there is nothing."""
    path = run / "correlations.jsonl"
    if not path.exists():
        return None
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    of_epoch = {line["epoch"]: line["matrix"] for line in lines}
    return {"epochs": sorted(of_epoch), "matrices": [of_epoch[epoch] for epoch in sorted(of_epoch)]}
