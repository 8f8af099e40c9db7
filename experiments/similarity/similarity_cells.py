"""The cells of the study: do soft labels follow visual similarity, how are they best used, and the open choices.

All reported cells are evaluated on the split by lesion. Choices were made within a training split (TUNING), so that
no reported image was used for them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from cclnet.data.split import make_split
from cclnet.data.table import ImageTable
from cclnet.errors import unknown
from cclnet.files import write_whole
from cclnet.reproduce.experiments import BACKBONES, COMPARED, RECIPES, PaperCell, read_recipes, unique
from cclnet.settings import SplitSettings, make_settings

TUNING = {"tune": "paper", "tune-lesion": "lesion"}  # data sets for open choices: the training split of which recipe
OURS = "ccl-centroid"
ROWS = {
    "hard": "Hard labels",
    "lsr-u5": "LSR-u5",
    "ccl": "CCL-Net",
    "ccl-balanced": "Balanced CCL",
    OURS: "CCL from centroids",
    "tuned": "CCL from centroids, tuned",
    "ccl-confusion": "CCL from confusions",
    "reference": "Hard labels, class weights",
}
CANDIDATES: dict[str, dict[str, Any]] = {
    "start": {},
    "softness-0.6": {"method_settings": {"softness": 0.6}},
    "softness-0.9": {"method_settings": {"softness": 0.9}},
    "kl-3": {"method_settings": {"kl_weight": 3.0}},
    "mixup-0.2": {"augment": {"mixup": 0.2}},
    "cutmix-1": {"augment": {"cutmix": 1.0}},
}
TUNE_EPOCHS = 60
CHOSEN = "kl-3"  # the best change in tune_similarity by balanced accuracy; a test compares it with the results
# Sharpening acts on frozen labels, and at the paper's rate nothing is frozen here: uses_synthetic.py measures it.
USES: dict[str, dict[str, Any]] = {
    "kl-0.5": {"method_settings": {"kl_weight": 0.5}},
    "kl-2": {"method_settings": {"kl_weight": 2.0}},
    "temperature-0.5": {"method_settings": {"temperature": 0.5}},
    "mixup-0.2": {"augment": {"mixup": 0.2}},
    "cutmix-1": {"augment": {"cutmix": 1.0}},
}


def row_cell(row: str, backbone: str = "resnet18", seed: int = 0) -> PaperCell:
    """The cell of a row of ROWS. The confusions of "reference", which weights all classes equally, are the reference
    confusion matrix."""
    variants: dict[str, tuple[str, str, Mapping[str, Any]]] = {
        "tuned": (OURS, "tuned", CANDIDATES[CHOSEN]),
        "reference": ("hard", "class-weights", {"class_weights": True}),
    }
    method, variant, changes = variants.get(row, (row, "", {}))
    return PaperCell(backbone, method, seed, "lesion", variant=variant, changes=changes)


def similarity(
    seeds: Sequence[int] = (0,), backbones: Sequence[str] = ("resnet18",), rows: Sequence[str] = tuple(ROWS)
) -> list[PaperCell]:
    """Every row of ROWS; all cells of a seed before those of the next."""
    for kind, names, known in (("row", rows, ROWS), ("backbone", backbones, BACKBONES)):
        for name in names:
            if name not in known:
                raise unknown(f"{kind} of the study", name, known)
    return [row_cell(row, backbone, seed) for seed in seeds for backbone in backbones for row in rows]


def everything() -> list[PaperCell]:
    """All cells that the documents report, the most important first."""
    others = [backbone for backbone in BACKBONES if backbone != "resnet18"]
    rows = (*COMPARED, OURS, "ccl-confusion", "reference")
    return unique([*similarity((0, 1, 2)), *similarity(backbones=others, rows=rows)])


def tune(seeds: Sequence[int] = (0,)) -> list[PaperCell]:
    """Hard labels on resnet18 with the settings that the paper leaves open, one change at a time."""
    candidates: dict[str, dict[str, Any]] = {
        "start": {},
        "epochs-100": {"epochs": 100},
        "drops-early": {"drops": (1 / 3, 2 / 3)},
        "drops-late": {"drops": (0.875, 0.9375)},  # the paper's head still learned at its full rate at epoch 137
        "jitter-strong": {"augment": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}},
        "clip-none": {"clip": 0.0},
    }
    start = {
        "epochs": 160, "drops": (0.5, 0.75), "clip": 1.0,
        "augment": {"brightness": 0.1, "contrast": 0.1, "saturation": 0.1, "hue": 0.02},
    }  # fmt: skip
    return [
        PaperCell("resnet18", "hard", seed, "tune", variant=name, changes={**start, **change})
        for seed in seeds
        for name, change in candidates.items()
    ]


def tune_similarity(seeds: Sequence[int] = (0,)) -> list[PaperCell]:
    """Ways to use the soft labels from centroids, one change at a time. Fewer epochs than in what is reported: the
    question is which candidate is best, not how good it is."""
    return [
        PaperCell("resnet18", OURS, seed, "tune-lesion", variant=name, changes={"epochs": TUNE_EPOCHS, **changes})
        for seed in seeds
        for name, changes in CANDIDATES.items()
    ]


def uses(seeds: Sequence[int] = (0,)) -> list[PaperCell]:
    """Unchanged CCL-Net, and each way of using its soft labels, one at a time."""
    every: dict[str, dict[str, Any]] = {"": {}, **USES}
    return [
        PaperCell("resnet18", "ccl", seed, "lesion", variant=name, changes=changes)
        for seed in seeds
        for name, changes in every.items()
    ]


def study_recipes(folder: Path = RECIPES) -> dict[str, dict[str, Any]]:
    """The recipe of each split, those for tuning included."""
    recipes = read_recipes(folder)
    return recipes | {name: recipes[split] for name, split in TUNING.items()}


def write_tuning_data(table: ImageTable, recipe: Mapping[str, Any], folder: Path) -> Path:
    """Write a data set of the training split alone, ``images.csv`` with the images beside it; returns its path.

    The images are split again into train and val, 80:20, by lesion if lesions are known, so that memorised lesions do
    not help. Reported images are not in the data set at all. Files are hard links if possible, else copies.
    """
    sheet = folder / "images.csv"
    if sheet.exists():
        return sheet
    trained = table.select(np.flatnonzero(make_split(table, make_settings(recipe).split) == "train"))
    by = "class" if table.groups is None else "group"
    splits = make_split(trained, SplitSettings(by=by, val=0.2, seed=0))
    (folder / "images").mkdir(parents=True, exist_ok=True)
    files = [f"images/{_copy_image(trained, row, folder / 'images')}" for row in range(len(trained))]
    names = np.asarray(trained.classes, dtype=object)[trained.labels]
    columns = {"image": files, "label": names.tolist(), "split": splits.tolist()}
    if trained.groups is not None:
        columns["group"] = trained.groups.tolist()
    write_whole(sheet, pd.DataFrame(columns).to_csv(index=False, lineterminator="\n"))
    return sheet


def _copy_image(table: ImageTable, row: int, folder: Path) -> str:
    """Put an image into the folder; returns its name there."""
    name = table.names[row].replace("/", "_")
    if isinstance(table.images, np.ndarray):
        target = folder / f"{name}.png"
        Image.fromarray(table.images[row]).save(target)
        return target.name
    source = Path(table.images[row]).resolve()
    target = folder / (name.removesuffix(source.suffix) + source.suffix)
    if not target.exists():
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(source, target)
    return target.name
