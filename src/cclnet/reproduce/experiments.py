"""``cclnet reproduce``: the cells of the paper's experiments, the numbers that it published, and how they are run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console

from cclnet.errors import InputError, unknown
from cclnet.settings import Settings, make_settings, read_settings
from cclnet.sweep.cells import IGNORED_SETTINGS, Cell, SweepOptions, SweepSummary
from cclnet.sweep.executors import run_sweep
from cclnet.sweep.results import check_results

EXPERIMENTS = ("all", "complete", "folds", "table1", "table2", "figures")
MOVED = ("similarity", "looks", "tune", "tune-similarity", "tune-looks", "uses")
BACKBONES = {"resnet18": "ResNet-18", "efficientnet_b0": "EfficientNet-B0", "mobilenetv2_100": "MobileNetV2"}
METHODS = {
    "hard": "Baseline", "lsr-u1": "LSR-u1", "lsr-u5": "LSR-u5", "lsr-a1": "LSR-a1", "lsr-a5": "LSR-a5",
    "ccl": "CCL-Net",
}  # fmt: skip
PAPER_SCORES = ("accuracy", "macro_f1", "kappa", "macro_jaccard")
LR_CCL = 0.0005  # learning rate of the head where it is not varied
RECIPES = Path(__file__).with_name("recipes")
SPLITS = ("paper", "lesion")
COMPARED = ("hard", "lsr-u5", "ccl")  # the methods that are run with several seeds and on both splits
RIVALS = ("ccl", "hard", "lsr-u1", "lsr-u5")  # compared with each other in pairs
FOLDS = 5
NO_FREEZE = {"method_settings": {"patience": 1_000_000}}  # the freeze rule never applies
NO_FREEZE_RATES = (0.005, 0.05)
SMOKE_DATA = "synthetic:images=84,size=36"
SMOKE: dict[str, Any] = {
    "short_side": 36, "epochs": 1, "batch_size": 16, "lr": 0.01, "precision": "32", "validate_every": 1,
    "augment": {"crop": 32},
}  # fmt: skip


_PUBLISHED = read_settings(Path(__file__).with_name("published.toml"))
TABLE2 = {row["lr_ccl"]: row for row in _PUBLISHED["table2"]}  # without "converged" the head never converged


def published(backbone: str, method: str) -> dict[str, float]:
    """The four scores of a cell of Table 1 by name.

    >>> published("resnet18", "ccl")["accuracy"]
    0.8502
    """
    return dict(zip(PAPER_SCORES, _PUBLISHED["table1"][backbone][method], strict=True))


@dataclass(frozen=True)
class PaperCell:
    """A cell by what distinguishes it from the recipe of its split. ``variant`` names what ``changes`` do.

    A split other than "paper" and "lesion" is in the data table; its results have a subfolder of their own.
    """

    backbone: str = "resnet18"
    method: str = "ccl"
    seed: int = 0
    split: str = "paper"
    lr_ccl: float = LR_CCL
    variant: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)  # of settings, nested as in TOML

    @property
    def name(self) -> str:
        """
        >>> PaperCell().name, PaperCell(lr_ccl=0.05, variant="no-freeze", seed=1).name
        ('paper-resnet18-ccl-seed0', 'paper-resnet18-ccl-lr0.05-no-freeze-seed1')
        """
        rate = f"lr{self.lr_ccl:g}" if self.lr_ccl != LR_CCL else ""
        words = (self.split, self.backbone, self.method, rate, self.variant, f"seed{self.seed}")
        return "-".join(word for word in words if word)

    def settings(self, recipe: Mapping[str, Any], data: str, smoke: bool = False) -> Settings:
        """What to train, from the recipe of its split."""
        names = ("backbone", "method", "lr_ccl", "seed")
        own = {"data": data, **{name: getattr(self, name) for name in names}}
        given = {} if self.split in SPLITS else {"split": {"by": "given"}}
        return make_settings(recipe, own, given, self.changes, SMOKE if smoke else {})

    def cell(self, recipe: Mapping[str, Any], data: str, smoke: bool = False) -> Cell:
        """The cell to run. The folder of the data may have any name."""
        subfolder = "" if self.split in SPLITS else self.split
        ignored = (*IGNORED_SETTINGS, "data", "image_folder")
        settings = self.settings(recipe, data, smoke)
        return Cell(self.name, settings, asdict(self), subfolder, ignored_settings=ignored)


def read_recipes(folder: Path = RECIPES) -> dict[str, dict[str, Any]]:
    """The recipe of each split."""
    for split in SPLITS:
        if not (path := folder / f"{split}.toml").exists():
            raise InputError(f"there is no recipe {path}: give the folder of paper.toml and lesion.toml as --recipes.")
    return {split: read_settings(folder / f"{split}.toml") for split in SPLITS}


def table1(
    seeds: Sequence[int] = (0,),
    backbones: Sequence[str] = tuple(BACKBONES),
    methods: Sequence[str] = tuple(METHODS),
    split: str = "paper",
) -> list[PaperCell]:
    """Every backbone with every method; all cells of a seed before those of the next."""
    for kind, names, known in (("backbone", backbones, BACKBONES), ("method", methods, METHODS)):
        for name in names:
            if name not in known:
                raise unknown(f"{kind} of the paper", name, known)
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    return [PaperCell(b, m, seed, split) for seed in seeds for b in backbones for m in methods]


def table2(seeds: Sequence[int] = (0,), split: str = "paper") -> list[PaperCell]:
    """The learning rates of the head on resnet18; the cells at 0.0005 are also in Table 1."""
    return [PaperCell(seed=seed, split=split, lr_ccl=rate) for seed in seeds for rate in TABLE2]


def figures(seeds: Sequence[int] = (0,), split: str = "paper") -> list[PaperCell]:
    """CCL on every backbone, at every learning rate of the head, and without the freeze rule."""
    never_frozen = [no_freeze(rate, seed, split) for seed in seeds for rate in NO_FREEZE_RATES]
    return [*table1(seeds, methods=("ccl",), split=split), *table2(seeds, split), *never_frozen]


def no_freeze(rate: float, seed: int = 0, split: str = "paper") -> PaperCell:
    return PaperCell(seed=seed, split=split, lr_ccl=rate, variant="no-freeze", changes=NO_FREEZE)


def everything() -> list[PaperCell]:
    """All cells that the tables and figures report, the most important first."""
    seeds, others = (0, 1, 2), [backbone for backbone in BACKBONES if backbone != "resnet18"]
    return unique([
        *table1(backbones=("resnet18",)),
        *table1(seeds, ("resnet18",), COMPARED, "lesion"),
        *table2(),
        *table1(backbones=others),
        *table1(seeds, ("resnet18",), COMPARED),
        *table1((1,), ("efficientnet_b0",), ("hard",)),  # seed 0 alone was far from the paper
        *table1((1,), ("resnet18",), ("lsr-a1",)),
        *figures(),
        *table1(backbones=others, methods=COMPARED, split="lesion"),
    ])  # fmt: skip


def folds(seeds: Sequence[int] = (0, 1)) -> list[PaperCell]:
    """RIVALS on resnet18 in cross-validation by lesion: with all folds of a seed every image is predicted once, by a
    network that was not trained on its lesion."""
    return [
        PaperCell(
            method=m, seed=seed, split="lesion", variant=f"fold{k}", changes={"split": {"folds": FOLDS, "fold": k}}
        )
        for seed in seeds
        for k in range(FOLDS)
        for m in RIVALS
    ]


def complete() -> list[PaperCell]:
    """All cells of a design whose every cell has several seeds, the most important first: Table 1 on resnet18 with
    eight, on the other backbones with three, LSR-a1 and LSR-a5 with two, the folds by lesion with two,
    Table 2 with three."""
    eight, others = tuple(range(8)), [backbone for backbone in BACKBONES if backbone != "resnet18"]
    return unique([
        *table1(eight, ("resnet18",), RIVALS),
        *table1((0, 1), methods=("lsr-a1", "lsr-a5")),
        *table1((0, 1, 2), others, RIVALS),
        *folds(),
        *table2((0, 1, 2)),
        *everything(),
    ])  # fmt: skip


def unique(cells: Sequence[PaperCell]) -> list[PaperCell]:
    """Each cell once, however many tables use it."""
    return list({cell.name: cell for cell in cells}.values())


def select(cells: Sequence[PaperCell], patterns: Sequence[str]) -> list[PaperCell]:
    """The cells whose names match the patterns (with * and ?), in the order of the patterns; all without patterns."""
    selected: list[PaperCell] = []
    for pattern in patterns:
        matching = [cell for cell in cells if fnmatchcase(cell.name, pattern)]
        if not matching:
            raise unknown("cell", pattern, [cell.name for cell in cells])
        selected += matching
    return unique(selected or cells)


@dataclass(frozen=True, kw_only=True)
class Request(SweepOptions):
    """The arguments of ``cclnet reproduce``."""

    what: tuple[str, ...]  # names of EXPERIMENTS
    data: str  # the ISIC 2018 images; not needed with smoke
    seeds: tuple[int, ...] = (0,)
    backbones: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    split: str = "paper"
    only: tuple[str, ...] = ()  # names of cells, with * and ?, in the order in which to run them
    smoke: bool = False
    dry_run: bool = False
    recipes: Path = RECIPES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names(self.what, self.split)
        if (self.backbones or self.methods) and self.what != ("table1",):
            raise InputError("backbones and methods select cells of table1: leave them out, or ask for table1 alone.")
        if not self.dry_run:
            check_data(self.data, self.smoke)


def check_data(data: str, smoke: bool) -> None:
    if not data and not smoke:
        raise InputError("give the folder of the ISIC 2018 images as --data, or --smoke for synthetic ones.")


def check_names(what: Sequence[str], split: str) -> None:
    for name in what:
        if name in MOVED:
            raise InputError(f"'{name}' is not in the paper: run `python experiments/similarity/run.py {name}`.")
        if name not in EXPERIMENTS:
            raise unknown("experiment", name, EXPERIMENTS)
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)


def cells_of(request: Request) -> list[PaperCell]:
    """The requested cells, each once."""
    seeds, split, chosen = request.seeds, request.split, []
    for name in request.what:
        if name == "all":  # with the seeds and splits that are reported
            chosen += everything()
        elif name == "complete":  # with its own seeds too
            chosen += complete()
        elif name == "folds":
            chosen += folds(seeds)
        elif name == "table1":
            chosen += table1(seeds, request.backbones or tuple(BACKBONES), request.methods or tuple(METHODS), split)
        else:
            chosen += {"table2": table2, "figures": figures}[name](seeds, split)
    return select(unique(chosen), request.only)


def list_cells(request: Request, console: Console) -> None:
    """Print the requested cells, and which of them have a result of the same settings; run nothing."""
    recipes = read_recipes(request.recipes)
    data = SMOKE_DATA if request.smoke else request.data
    cells = [cell.cell(recipes[cell.split], data, request.smoke) for cell in cells_of(request)]
    own = request.own_shard(cells)
    finished = check_results(own, request.context(time.time()))
    for cell in own:
        console.print(f"{'finished' if cell.name in finished else 'to run  '}  {cell.name}", highlight=False)
    console.print(f"{len(finished)} of {len(own)} runs are finished, {len(own) - len(finished)} are to run.")


def reproduce(request: Request, console: Console) -> SweepSummary:
    """Run the requested cells that have no result yet, then write tables and figures of all results."""
    from cclnet.reproduce.tables import write_paper  # imports this module

    began = time.time()
    data = SMOKE_DATA if request.smoke else request.data
    recipes = read_recipes(request.recipes)
    if not request.smoke:
        decode_once(data, recipes["paper"], request)
    requested: dict[str, Any] = {"what": request.what, "split": request.split, "seeds": request.seeds}
    requested |= {"parallel": request.parallel} | ({"only": request.only} if request.only else {})
    cells = [cell.cell(recipes[cell.split], data, request.smoke) for cell in cells_of(request)]
    summary = run_sweep(cells, request, requested, console, began)
    print_pages(write_paper(request.results), console)
    console.print(summary.text(), highlight=False, markup=False)
    return summary


def decode_once(data: str | Path, recipe: Mapping[str, Any], options: SweepOptions) -> None:
    """Decode the images into the cache before the processes that share it start."""
    from cclnet.data.cache import decode
    from cclnet.data.sources import open_data

    decode(open_data(data), recipe.get("short_side", 256), cache_dir=options.cache_dir)


def write_again(what: Sequence[str], split: str, results: Path) -> list[Path]:
    """Write the tables and figures of existing results, running nothing."""
    from cclnet.reproduce.tables import check_has_results, write_paper

    check_names(what, split)
    check_has_results(results)
    return write_paper(results)


def print_pages(pages: Sequence[Path], console: Console) -> None:
    for page in pages:
        console.print(str(page), highlight=False, soft_wrap=True)
