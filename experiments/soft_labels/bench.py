"""Train heads on frozen features with every method of the study, and write its tables. PLAN.md says what it asks.

python experiments/soft_labels/bench.py run --features FOLDER --tables FOLDER --out runs/soft_labels
python experiments/soft_labels/bench.py tables --out runs/soft_labels --documents docs/*.md

The features of FOLDER are those of extract_features.py, one file DATA-BACKBONE.npz each.

A cell is one method on one seed of one task. Its test predictions are one file in --out; a cell whose file exists is
not trained again, so the command may be interrupted and repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cclnet import CCLNet
from cclnet.methods import METHODS, Classes, Method
from cclnet.methods.ccl_centroid import labels_at_softness
from cclnet.methods.class_geometry import batch_moments, class_distances, geometry_from_means
from cclnet.runs.provenance import source_commit, versions
from noisy_tasks import CLASSES, Features, Task, make_task, read_features
from rivals import (
    EarlyLearning,
    Forward,
    InstanceTargets,
    SymmetricCrossEntropy,
    Targets,
    VolMinNet,
    anchor_matrix,
    dual_matrix,
    uniform_matrix,
)

HIDDEN, EPOCHS, BATCH, LR, WEIGHT_DECAY = 512, 20, 256, 1e-3, 1e-2  # the first plan had 40 epochs
FEW, FEW_BATCH = 1000, 32  # with fewer images than FEW, smaller batches, or there would be 40 steps in all
STAGE_ONE = 10  # epochs of hard labels before anchors are read
SEEDS = {"second": range(8, 16), "third": range(16, 40)}  # by plan; the first had seeds 0 to 7
TUNING_SEEDS = (101, 102, 103)
BACKBONES = ("tf_efficientnet_lite0", "mobilenetv2_100")
REGIMES: dict[str, tuple[float, int | None]] = {
    "clean": (0.0, None), "noise20": (0.2, None), "noise40": (0.4, None), "few20": (0.0, 20), "few80": (0.0, 80),
}  # fmt: skip


def class_mean_matrix(task: Task, softness: float) -> Tensor:
    """Similarity of the class means of the features, as in ``ccl-centroid``, at a softness: [K, K]."""
    geometry = geometry_from_means(batch_moments(task.train, task.given, task.num_classes), task.num_classes)
    return labels_at_softness(class_distances(geometry), geometry.known.double(), softness)


def dictionary_matrix(task: Task, seed: int) -> Tensor:
    """The soft labels that CCL's own dictionary has learned on this task after STAGE_ONE epochs."""
    net = fit(task, network(task, "ccl", seed), seed, STAGE_ONE)
    labels = net.method.soft_labels()
    assert labels is not None
    return labels.detach().double()


def network(task: Task, method: str | Callable[[Classes], Method], seed: int, **settings: float) -> CCLNet:
    """A head with one hidden layer, trained by a method of the package (a name) or by a rival."""
    torch.manual_seed(seed)
    hidden = nn.Sequential(nn.Linear(task.train.shape[1], HIDDEN), nn.ReLU())
    named = isinstance(method, str)
    adjustment = settings.pop("logit_adjustment", 0.0)
    net = CCLNet(
        hidden, task.num_classes, method if named else "hard", feature_width=HIDDEN, class_counts=task.counts,
        method_settings=settings, logit_adjustment=adjustment,
    )  # fmt: skip
    if not named:
        net.method = method(Classes(task.num_classes, HIDDEN, tuple(task.counts)))
    return net.train()


def batch_size(count: int) -> int:
    return BATCH if count >= FEW else FEW_BATCH


def batches(count: int, generator: torch.Generator) -> Iterator[Tensor]:
    yield from torch.randperm(count, generator=generator).split(batch_size(count))


def fit(task: Task, net: CCLNet, seed: int, epochs: int = EPOCHS) -> CCLNet:
    """Train a head with AdamW and a cosine schedule."""
    optimizer = torch.optim.AdamW(net.parameters(), LR, weight_decay=WEIGHT_DECAY, fused=True)
    steps = epochs * -(-len(task.train) // batch_size(len(task.train)))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in batches(len(task.train), generator):
            net.method.rows = rows
            loss = net(task.train[rows], task.given[rows]).total
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        net.method.end_epoch()
    return net


def fit_co_teaching(task: Task, seed: int, forget: float = 0.2, ramp: int = 10) -> CCLNet:
    """Co-teaching (Han et al. 2018): each of two networks learns from the images with the smallest loss of the other.

    The share of images left out rises to ``forget`` over ``ramp`` epochs. The first network is reported.
    """
    nets = [network(task, "hard", seed), network(task, "hard", seed + 1000)]
    optimizers = [torch.optim.AdamW(net.parameters(), LR, weight_decay=WEIGHT_DECAY, fused=True) for net in nets]
    steps = EPOCHS * -(-len(task.train) // batch_size(len(task.train)))
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(own, steps) for own in optimizers]
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(EPOCHS):
        kept_share = 1.0 - forget * min(1.0, epoch / ramp)
        for rows in batches(len(task.train), generator):
            losses = [F.cross_entropy(net(task.train[rows]), task.given[rows], reduction="none") for net in nets]
            kept = [own.detach().topk(max(1, round(kept_share * len(rows))), largest=False).indices for own in losses]
            for own, chosen, optimizer, schedule in zip(losses, kept[::-1], optimizers, schedules, strict=True):
                optimizer.zero_grad()
                own[chosen].mean().backward()
                optimizer.step()
                schedule.step()
    return nets[0]


@torch.no_grad()
def predict(net: CCLNet, features: Tensor) -> Tensor:
    return torch.softmax(net.eval()(features), dim=1)


def stage_one(task: Task, seed: int) -> Tensor:
    """Predictions for the training images after a few epochs of hard labels."""
    return predict(fit(task, network(task, "hard", seed), seed, STAGE_ONE), task.train)


def trained(task: Task, method: str, seed: int) -> CCLNet:
    """The network of a cell. Names are those of the tables."""
    size = task.num_classes
    fixed: dict[str, Callable[[Classes], Method]] = {
        "soft targets 0.8": lambda c: Targets(c, class_mean_matrix(task, 0.8)),
        "soft then hard": lambda c: Targets(c, class_mean_matrix(task, 0.8), (EPOCHS // 2, 3 * EPOCHS // 4)),
        "instance targets": lambda c: InstanceTargets(c, class_mean_matrix(task, 0.8)),
        "forward uniform": lambda c: Forward(c, uniform_matrix(size, 0.6)),
        "forward class means": lambda c: Forward(c, class_mean_matrix(task, 0.6)),
        "forward dictionary": lambda c: Forward(c, dictionary_matrix(task, seed)),
        "forward true (oracle)": lambda c: Forward(c, task.noise),
        "anchors": lambda c: Forward(c, anchor_matrix(stage_one(task, seed))),
        "dual-T": lambda c: Forward(c, dual_matrix(stage_one(task, seed), task.given)),
        "VolMinNet": VolMinNet,
        "SCE": SymmetricCrossEntropy,
        "ELR": lambda c: EarlyLearning(c, len(task.train), strength=1.0),
    }
    if method == "co-teaching":
        return fit_co_teaching(task, seed)
    if method in fixed:
        return fit(task, network(task, fixed[method], seed), seed)
    method, stopped, epochs = method.partition(", ")  # "hard, 10 epochs"
    if stopped:
        return fit(task, network(task, method, seed), seed, int(epochs.removesuffix(" epochs")))
    name, _, options = method.partition(":")
    settings = {key: float(value) for key, value in (pair.split("=") for pair in options.split(",") if pair)}
    if "warmup" in settings:
        settings["warmup"] = int(settings["warmup"])
    return fit(task, network(task, name, seed, **settings), seed)


@dataclass(frozen=True)
class Cell:
    """One method on one seed of one task."""

    data: str
    regime: str
    method: str
    seed: int
    backbone: str = BACKBONES[0]

    def path(self, out: Path) -> Path:
        words = "".join(c if c.isalnum() or c in ".=" else "-" for c in self.method)
        return out / f"{self.data}-{self.backbone}-{self.regime}-{words}-seed{self.seed}.npz"


def run_cell(cell: Cell, data: Features, out: Path, tuning: bool) -> None:
    """Train one cell and write its test predictions, and the matrix of its method if it has one."""
    rate, per_class = REGIMES[cell.regime]
    task = make_task(data, rate, per_class, cell.seed, tuning)
    began = time.process_time()
    net = trained(task, cell.method, cell.seed)
    seconds = time.process_time() - began
    labels = net.method.soft_labels() if cell.method.split(":")[0] in METHODS else None
    path = cell.path(out)
    temporary = path.with_suffix(f".{os.getpid()}.tmp.npz")
    np.savez_compressed(
        temporary,
        probabilities=predict(net, task.test).numpy().astype(np.float32),
        train_mean=predict(net, task.train).mean(dim=0).numpy(),
        labels=task.test_labels,
        groups=task.test_groups,
        images=task.test_images,
        matrix=np.zeros((0, 0)) if labels is None else labels.detach().double().numpy(),
        about=json.dumps({
            "data": cell.data, "regime": cell.regime, "method": cell.method, "seed": cell.seed,
            "backbone": cell.backbone, "seconds": seconds, "commit": getattr(source_commit(), "sha", None),
            "versions": versions(), "device": "cpu",
        }),
    )  # fmt: skip
    temporary.replace(path)


BASELINES = ("hard", "hard, 10 epochs", "hard, 40 epochs")
OURS = ("ccl-forward", "ccl-forward:softness=0.7,align=0")  # the second as in the first plan
RIVALS = (
    "SCE", "ELR", "dual-T", "forward true (oracle)", "co-teaching", "VolMinNet", "anchors", "forward uniform",
    "lsr:epsilon=0.23", "soft targets 0.8",
)  # fmt: skip
ABLATION = ("ccl-forward:align=0", "ccl-forward:logit_adjustment=1")
Stages = tuple[tuple[str, str, tuple[str, ...]], ...]  # backbone, regime, methods: the most important cells first
STAGES: Stages = (
    (BACKBONES[0], "noise40", BASELINES + OURS),
    (BACKBONES[0], "clean", BASELINES + OURS),
    (BACKBONES[0], "noise40", RIVALS),
    (BACKBONES[1], "noise40", (*BASELINES[:2], *OURS, *RIVALS[:4])),
    (BACKBONES[0], "clean", ("soft then hard", "soft targets 0.8")),
    (BACKBONES[0], "noise20", BASELINES + OURS),
    (BACKBONES[0], "few20", (BASELINES[0], OURS[0], "soft targets 0.8")),
    (BACKBONES[0], "few80", (BASELINES[0], OURS[0], "soft targets 0.8")),
    (BACKBONES[0], "noise40", ABLATION),
    (BACKBONES[1], "clean", (BASELINES[0], OURS[0])),
    (BACKBONES[1], "noise40", RIVALS),
)
STRONGEST = (*BASELINES[:2], *OURS, "ELR", "dual-T", "forward true (oracle)")  # of the second plan
THIRD_STAGES: Stages = (
    (BACKBONES[0], "noise40", STRONGEST),
    (BACKBONES[1], "noise40", STRONGEST),
    (BACKBONES[0], "clean", (BASELINES[0], OURS[0])),
    (BACKBONES[1], "clean", (BASELINES[0], OURS[0])),
)
PLANS = {"second": STAGES, "third": THIRD_STAGES}


def planned(plan: str, seeds: range | tuple[int, ...]) -> list[Cell]:
    """All cells of a plan, the most important first. `ordinal` is told the order, so it is for APTOS alone."""
    cells = []
    for backbone, regime, methods in PLANS[plan]:
        for method in methods:
            cells += [Cell(data, regime, method, seed, backbone) for data in CLASSES for seed in seeds]
        if methods == BASELINES + OURS:
            cells += [Cell("aptos", regime, "ordinal", seed, backbone) for seed in seeds]
    return list(dict.fromkeys(cells))


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    seeds = TUNING_SEEDS if options.tuning else SEEDS[options.plan]
    cells = planned(options.plan, seeds)
    if options.methods:
        regimes = options.regimes or list(REGIMES)
        cells = [
            Cell(d, r, m, s, options.backbone)
            for r in regimes for d in options.data for m in options.methods for s in seeds
        ]  # fmt: skip
    index, count = options.shard
    cells = [c for c in cells if c.data in options.data and (not options.regimes or c.regime in options.regimes)]
    opened: dict[tuple[str, str], Features] = {}
    began = time.monotonic()
    for cell in cells[index::count]:
        if time.monotonic() - began > 60 * options.max_minutes:
            print("time is over; repeat the command to continue")
            return
        file, key = options.features / f"{cell.data}-{cell.backbone}.npz", (cell.data, cell.backbone)
        if cell.path(options.out).exists():
            continue
        if not file.exists():
            print(cell, f"left out: there is no {file.name} yet", flush=True)
            continue
        if key not in opened:
            opened[key] = read_features(cell.data, file, options.tables / cell.data)
        run_cell(cell, opened[key], options.out, options.tuning)
        print(cell, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "tables"))
    parser.add_argument("--features", type=Path, help="folder with DATA-BACKBONE.npz (names, features)")
    parser.add_argument("--tables", type=Path, help="folder with isic2018/ and aptos/, for their CSV files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path("results/soft_labels"))
    parser.add_argument("--documents", type=Path, nargs="*", default=[], help="pages that show the tables")
    parser.add_argument("--plan", choices=list(PLANS), default="second", help="its cells, seeds and hypotheses")
    parser.add_argument("--data", nargs="+", choices=list(CLASSES), default=list(CLASSES))
    parser.add_argument("--regimes", nargs="+", choices=list(REGIMES))
    parser.add_argument("--methods", nargs="+", help="instead of those of the plan")
    parser.add_argument("--backbone", choices=BACKBONES, default=BACKBONES[0], help="with --methods")
    parser.add_argument("--tuning", action="store_true", help="seeds and split for tuning")
    parser.add_argument("--shard", type=lambda text: tuple(map(int, text.split("/"))), default=(0, 1), help="0/2, 1/2")
    parser.add_argument("--max-minutes", type=float, default=1e9)
    options = parser.parse_args()
    if options.what == "run":
        run(options)
    else:
        from bench_tables import show_in, write_tables

        write_tables(options.out, options.results, options.plan)
        for document in options.documents:
            show_in(document, options.results, "soft labels" if options.plan == "second" else f"{options.plan} plan")
            show_in(document, options.results / "first_plan", "first plan")


if __name__ == "__main__":
    main()
