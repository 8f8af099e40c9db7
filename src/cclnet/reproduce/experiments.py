"""The experiments as independent cells: what each one trains, and the name it is known by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cclnet.errors import InputError, unknown
from cclnet.jobs.job import INCIDENTAL, Job
from cclnet.reproduce.paper import BACKBONES, LR_CCL, METHODS, TABLE2
from cclnet.training.settings import Settings, make_settings, read_settings

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
