"""Do networks of different build learn the same soft labels from the same images?

    python benchmarks/backbones.py ISIC2018 --out results/backbones

trains ccl-centroid with each of the paper's backbones on the training part of the split by lesion, at 64 px and for few
epochs, so that it can be had without a GPU. How far their labels agree with each other, with the yardstick (the
confusions of the kept ResNet-18 runs with weighed classes, on unseen lesions), with class rarity and with what
ResNet-18 learned in the full runs goes into --out.json and .md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from cclnet.correlation_file import read_correlation
from cclnet.evaluation.correlation import agreement, agreement_beside, rarity
from cclnet.files import write_whole
from cclnet.predictions import Floats
from cclnet.reproduce.command import RECIPES
from cclnet.reproduce.experiments import read_recipes
from cclnet.reproduce.looks import rows_of_looks, yardsticks
from cclnet.reproduce.looks_cells import OURS, looks_cell
from cclnet.reproduce.pages import fill_markers
from cclnet.reproduce.paper import BACKBONES
from cclnet.reproduce.results import read_results
from cclnet.training.loop import train
from cclnet.training.run_folder import RunFolder, versions
from cclnet.training.settings import make_settings

SMALL = {"short_side": 72, "augment": {"crop": 64}}


def learned(backbone: str, given: argparse.Namespace, scratch: Path) -> tuple[Floats, float]:
    """The soft labels [K, K] that a backbone ends with, and its accuracy on unseen lesions."""
    recipe = read_recipes(RECIPES)["lesion"]
    cell = looks_cell(OURS, backbone, given.seed)
    brief = {"epochs": given.epochs, "validate_every": given.epochs, "precision": "32"}
    settings = make_settings(recipe, {"data": given.data, "backbone": backbone, "method": cell.method}, SMALL, brief,
                             {"seed": given.seed})  # fmt: skip
    run = RunFolder(train(settings, scratch / backbone, accelerator=given.accelerator, cache_dir=given.cache_dir))
    return read_correlation(run.correlation)[1], run.read_metrics()[-1]["val_accuracy"]


def measure(matrices: dict[str, Floats], kept: Path) -> dict[str, Any]:
    """What the matrices follow, and how far they agree."""
    rows = rows_of_looks(read_results(kept), "resnet18")
    known = yardsticks(rows)
    if known is None:
        raise SystemExit(f"{kept} has no runs with weighed classes, so there is no yardstick.")
    rare = rarity(rows[OURS][0].content["class_counts"])
    full = [result.content["correlation"] for result in rows[OURS]]
    return {
        "follows": {
            backbone: {
                "yardstick": agreement(matrix, known.balanced),
                "rarity": agreement(matrix, rare),
                "yardstick_beyond_rarity": agreement_beside(matrix, known.balanced, rare),
                "full_runs": statistics.mean(agreement(matrix, other) for other in full),
            }
            for backbone, matrix in matrices.items()
        },
        "agree": {f"{a} {b}": agreement(matrices[a], matrices[b]) for a, b in itertools.combinations(matrices, 2)},
    }


def table(measured: dict[str, Any]) -> str:
    """Markdown: a row a backbone."""
    names = list(measured["follows"])
    heads = ["backbone", "yardstick", "rarity", "yardstick beyond rarity", "ResNet-18's full runs", *names]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "--:|" * (len(heads) - 1)]
    for name, follows in measured["follows"].items():
        pairs = [measured["agree"].get(f"{name} {other}", measured["agree"].get(f"{other} {name}")) for other in names]
        values = [f"{value:.2f}" for value in follows.values()]
        values += ["–" if value is None else f"{value:.2f}" for value in pairs]
        lines.append(f"| {' | '.join([name, *values])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kept", type=Path, default=Path("results/isic2018"), help="the results of the full runs")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/backbones"))
    parser.add_argument("--document", type=Path, help="also put the table between the markers of this page")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        ended = {backbone: learned(backbone, given, Path(scratch)) for backbone in BACKBONES}
    matrices = {backbone: matrix for backbone, (matrix, _) in ended.items()}
    measured = {
        "epochs": given.epochs,
        "seed": given.seed,
        "crop": SMALL["augment"]["crop"],  # type: ignore[index]
        "device": "CPU" if given.accelerator == "cpu" else torch.cuda.get_device_name(),
        "versions": versions(),
        "accuracy": {backbone: accuracy for backbone, (_, accuracy) in ended.items()},
        "matrices": {backbone: matrix.round(4).tolist() for backbone, matrix in matrices.items()},
        **measure(matrices, given.kept),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(given.out.with_suffix(".json"), json.dumps(measured) + "\n")
    write_whole(given.out.with_suffix(".md"), table(measured))
    if given.document:
        page = given.document.read_text(encoding="utf-8")
        write_whole(given.document, fill_markers(page, {"backbones": table(measured)}, given.document.name))
    print(table(measured))


if __name__ == "__main__":
    main()
