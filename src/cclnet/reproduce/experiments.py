"""The experiments as independent cells: what each one trains, and the name it is known by."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from cclnet.data.split import make_split
from cclnet.data.table import ImageTable
from cclnet.errors import InputError, unknown
from cclnet.files import write_whole
from cclnet.reproduce.paper import BACKBONES, LR_CCL, METHODS, TABLE2
from cclnet.settings import Settings, SplitSettings, make_settings, read_settings
from cclnet.sweep.cells import INCIDENTAL, Job

SPLITS = ("paper", "lesion")
TUNING = {"tune": "paper", "tune-lesion": "lesion"}  # slices for open choices: of the training part of which split
NEVER = 1_000_000  # epochs of patience that no run has: the freeze rule switched off
DRIFT_RATES = (0.005, 0.05)  # of the head, for the runs without freeze rule
SMOKE_DATA = "synthetic:images=84,size=36"
SMOKE: dict[str, Any] = {
    "short_side": 36,
    "epochs": 1,
    "batch_size": 16,
    "lr": 0.01,
    "precision": "32",
    "validate_every": 1,
    "augment": {"crop": 32},
}


@dataclass(frozen=True)
class Cell:
    """One training run of the experiments.

    Attributes:
        backbone, method, seed: as in the settings.
        split: "paper", "lesion", or a slice of TUNING, on which open choices are made.
        lr_ccl: learning rate of the head.
        variant: a word for what ``changes`` do.
        changes: any other settings that differ from the recipe, nested as in TOML.
    """

    backbone: str = "resnet18"
    method: str = "ccl"
    seed: int = 0
    split: str = "paper"
    lr_ccl: float = LR_CCL
    variant: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The same cell has the same name wherever it stands in the tables.

        >>> Cell().name, Cell(lr_ccl=0.05, variant="no-freeze", seed=1).name
        ('paper-resnet18-ccl-seed0', 'paper-resnet18-ccl-lr0.05-no-freeze-seed1')
        """
        rate = f"lr{self.lr_ccl:g}" if self.lr_ccl != LR_CCL else ""
        words = (self.split, self.backbone, self.method, rate, self.variant, f"seed{self.seed}")
        return "-".join(word for word in words if word)

    @property
    def keys(self) -> dict[str, Any]:
        """What identifies the cell, as plain values."""
        return asdict(self)

    def settings(self, recipe: Mapping[str, Any], data: str, smoke: bool = False) -> Settings:
        """What to train, from the recipe of its split."""
        own = {
            "data": data,
            "backbone": self.backbone,
            "method": self.method,
            "lr_ccl": self.lr_ccl,
            "seed": self.seed,
        }
        given = {"split": {"by": "given"}} if self.split in TUNING else {}
        return make_settings(recipe, own, given, self.changes, SMOKE if smoke else {})

    def job(self, recipes: Mapping[str, Mapping[str, Any]], data: Mapping[str, str], smoke: bool = False) -> Job:
        """The cell to be run, with recipe and data of each split by its name. The images are the same whatever the
        folder they lie in is called; results of tuning lie apart."""
        settings = self.settings(recipes[self.split], data[self.split], smoke)
        shelf = self.split if self.split in TUNING else ""
        return Job(self.name, settings, self.keys, shelf, incidental=(*INCIDENTAL, "data", "image_folder"))


def read_recipes(folder: Path) -> dict[str, dict[str, Any]]:
    """The recipe of each split. Open choices start from that of the split which is reported."""
    recipes = {}
    for split in SPLITS:
        path = folder / f"{split}.toml"
        if not path.exists():
            raise InputError(f"there is no recipe {path}: give the folder of paper.toml and lesion.toml as --recipes.")
        recipes[split] = read_settings(path)
    return recipes | {name: recipes[reported] for name, reported in TUNING.items()}


def table1(
    seeds: Sequence[int] = (0,),
    backbones: Sequence[str] = tuple(BACKBONES),
    methods: Sequence[str] = tuple(METHODS),
    split: str = "paper",
) -> list[Cell]:
    """Every backbone with every method; all cells of a seed before those of the next."""
    for kind, names, known in (("backbone", backbones, BACKBONES), ("method", methods, METHODS)):
        for name in names:
            if name not in known:
                raise unknown(f"{kind} of the paper", name, known)
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    return [Cell(b, m, seed, split) for seed in seeds for b in backbones for m in methods]


def table2(seeds: Sequence[int] = (0,), split: str = "paper") -> list[Cell]:
    """The learning rates of the head; the one of .0005 is a cell of Table 1 too."""
    return [Cell(seed=seed, split=split, lr_ccl=rate) for seed in seeds for rate in TABLE2]


def figures(seeds: Sequence[int] = (0,), split: str = "paper") -> list[Cell]:
    """CCL on every backbone, at every rate of the head, and without the freeze rule."""
    off = {"method_settings": {"patience": NEVER}}
    without = [
        Cell(seed=seed, split=split, lr_ccl=rate, variant="no-freeze", changes=off)
        for seed in seeds
        for rate in DRIFT_RATES
    ]
    return [*table1(seeds, methods=("ccl",), split=split), *table2(seeds, split), *without]


def tune(seeds: Sequence[int] = (0,)) -> list[Cell]:
    """Hard labels on resnet18 with what the paper leaves open, one thing at a time away from the recipe."""
    strong = {"augment": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}}
    candidates: dict[str, dict[str, Any]] = {
        "start": {},
        "epochs-100": {"epochs": 100},
        "drops-early": {"drops": (1 / 3, 2 / 3)},
        "drops-late": {"drops": (0.875, 0.9375)},  # the paper's head still learned at its full rate at epoch 137
        "jitter-strong": strong,
        "clip-none": {"clip": 0.0},
    }
    starting_point = {
        "epochs": 160, "drops": (0.5, 0.75), "clip": 1.0,
        "augment": {"brightness": 0.1, "contrast": 0.1, "saturation": 0.1, "hue": 0.02},
    }  # fmt: skip
    return [
        Cell("resnet18", "hard", seed, "tune", variant=name, changes={**starting_point, **change})
        for seed in seeds
        for name, change in candidates.items()
    ]


def unique(cells: Sequence[Cell]) -> list[Cell]:
    """Each cell once, however many tables it stands in."""
    return list({cell.name: cell for cell in cells}.values())


# Beyond the paper: the cells that ask whether soft labels follow looks, and how they are best used.
#
# All are judged on the split by lesion. What is reported there was not looked at when settings were chosen:
# ``tune_looks`` trains and judges within the training part of that split.


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


# The slice of the data on which open choices are made: it holds nothing of what is reported later.


def tuning_slice(table: ImageTable, recipe: Mapping[str, Any]) -> tuple[ImageTable, np.ndarray[Any, np.dtype[np.str_]]]:
    """The training part of the recipe's split, and a new train and val of it, 80:20, by lesion where lesions are
    known, so that a choice that merely remembers lesions does not win."""
    parts = make_split(table, make_settings(recipe).split)
    trained = table.select(np.flatnonzero(parts == "train"))
    by = "class" if table.groups is None else "group"
    return trained, make_split(trained, SplitSettings(by=by, val=0.2, seed=0))


def write_tuning_data(table: ImageTable, recipe: Mapping[str, Any], folder: Path) -> Path:
    """A data set of the slice alone, ``images.csv`` with the images beside it; returns the path of the table.

    The images that are reported are not in it, so that no setting of a run could reach them. Files are linked where
    the file system can, else copied.
    """
    sheet = folder / "images.csv"
    if sheet.exists():
        return sheet
    trained, parts = tuning_slice(table, recipe)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    files = [f"images/{_place(trained, row, folder / 'images')}" for row in range(len(trained))]
    names = np.asarray(trained.classes, dtype=object)[trained.labels]
    columns = {"image": files, "label": names.tolist(), "split": parts.tolist()}
    if trained.groups is not None:
        columns["group"] = trained.groups.tolist()
    write_whole(sheet, pd.DataFrame(columns).to_csv(index=False, lineterminator="\n"))
    return sheet


def _place(table: ImageTable, row: int, folder: Path) -> str:
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
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, target)
    return target.name
