"""Beyond the paper: the cells that ask whether soft labels follow looks, and how they are best used.

All are judged on the split by lesion. What is reported there was not looked at when settings were chosen:
``tune_looks`` trains and judges within the training part of that split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cclnet.errors import unknown
from cclnet.reproduce.experiments import Cell

OURS = "ccl-centroid"
LOOKS = {
    "hard": "Hard labels",
    "lsr-u5": "LSR-u5",
    "ccl": "CCL-Net",
    "ccl-balanced": "Balanced CCL",
    OURS: "CCL from centroids",
    "tuned": "CCL from centroids, tuned",
    "ccl-confusion": "CCL from confusions",
    "yardstick": "Hard labels, classes weighed",
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
CHOSEN = "kl-3"  # the best change in tune_looks, by balanced accuracy: a test holds it against the results
# Sharpening acts on frozen labels, and at the paper's rate nothing is frozen here: it is measured on the drawn set.
USES: dict[str, dict[str, Any]] = {
    "kl-0.5": {"method_settings": {"kl_weight": 0.5}},
    "kl-2": {"method_settings": {"kl_weight": 2.0}},
    "temperature-0.5": {"method_settings": {"temperature": 0.5}},
    "mixup-0.2": {"augment": {"mixup": 0.2}},
    "cutmix-1": {"augment": {"cutmix": 1.0}},
}


def looks_cell(name: str, backbone: str = "resnet18", seed: int = 0) -> Cell:
    """The cell of a row of LOOKS. The yardstick is what a classifier confuses to which every class matters equally."""
    variants: dict[str, tuple[str, str, Mapping[str, Any]]] = {
        "tuned": (OURS, "tuned", CANDIDATES[CHOSEN]),
        "yardstick": ("hard", "class-weights", {"class_weights": True}),
    }
    method, variant, changes = variants.get(name, (name, "", {}))
    return Cell(backbone, method, seed, "lesion", variant=variant, changes=changes)


def looks(
    seeds: Sequence[int] = (0,), backbones: Sequence[str] = ("resnet18",), rows: Sequence[str] = tuple(LOOKS)
) -> list[Cell]:
    """Every row of LOOKS; all cells of a seed before those of the next."""
    for name in rows:
        if name not in LOOKS:
            raise unknown("row of looks", name, LOOKS)
    return [looks_cell(name, backbone, seed) for seed in seeds for backbone in backbones for name in rows]


def tune_looks(seeds: Sequence[int] = (0,)) -> list[Cell]:
    """How to use the soft labels from centroids, one thing at a time away from the defaults. Fewer epochs than what is
    reported: asked for is which candidate is best, not how good it is."""
    return [
        Cell("resnet18", OURS, seed, "tune-lesion", variant=name, changes={"epochs": TUNE_EPOCHS, **changes})
        for seed in seeds
        for name, changes in CANDIDATES.items()
    ]


def uses(seeds: Sequence[int] = (0,)) -> list[Cell]:
    """CCL-Net as it is, and each way of using its soft labels, one at a time."""
    every: dict[str, dict[str, Any]] = {"": {}, **USES}
    return [
        Cell("resnet18", "ccl", seed, "lesion", variant=name, changes=changes)
        for seed in seeds
        for name, changes in every.items()
    ]
