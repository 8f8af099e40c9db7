"""Do labels that nobody confirmed by histopathology behave like wrong labels? The natural experiment of PLAN.md.

python experiments/soft_labels/natural_noise.py --features FOLDER --tables FOLDER --cells runs/soft_labels

--cells is the folder of bench.py run; its cells of ISIC 2018 with clean labels are scored on the test images whose
label is from histopathology. Writes natural_noise.json and natural_noise.md to --results.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from bench import BACKBONES, SEEDS, Cell
from bench_tables import read_cell
from cclnet.files import write_whole
from cclnet.runs.provenance import source_commit, versions
from doubts_bench import out_of_fold, rankings
from noisy_tasks import CLASSES, Features, make_task, read_features

DATA, CONFIRMED, FEWEST = "isic2018", "histo", 20
METHODS = ("hard", "ccl-forward")


def confirmations(tables: Path) -> dict[str, str]:
    """How the label of each image was confirmed."""
    with next(iter(sorted(tables.rglob("HAM10000_metadata*")))).open(encoding="utf-8") as file:
        return {row["image_id"]: row["dx_type"] for row in csv.DictReader(file)}


def doubt_without_histology(data: Features, unconfirmed: npt.NDArray[np.bool_], seed: int) -> dict[str, float]:
    """By class: the AUROC with which doubt ranks labels without histopathology above those with it."""
    task = make_task(data, 0.0, None, seed, tuning=False)
    p = out_of_fold(task.project(data.features), torch.tensor(data.labels), data.groups, task, seed)
    doubt = rankings(p, data.labels)["doubt"]
    found = {}
    for k, name in enumerate(data.classes):
        own = data.labels == k
        if FEWEST <= unconfirmed[own].sum() <= own.sum() - FEWEST:
            found[name] = float(roc_auc_score(unconfirmed[own], doubt[own]))
    return found


def balanced_accuracy(path: Path, types: dict[str, str]) -> tuple[float, int]:
    """Of a cell on the test images from histopathology, with the prior divided out; and their number."""
    cell = read_cell(path)
    rows = np.array([types[str(image)] == CONFIRMED for image in cell["images"]])
    chosen = (cell["probabilities"][rows] / np.maximum(cell["train_mean"], 1e-6)).argmax(axis=1)
    return float(balanced_accuracy_score(cell["labels"][rows], chosen)), int(rows.sum())


def table(result: dict[str, Any]) -> str:
    lines = ["| Class | Labels without histopathology | with | AUROC of doubt |", "|---|--:|--:|--:|"]
    for name, own in result["doubt"].items():
        values = own["auroc"]
        lines.append(
            f"| {name} | {own['without']:,} | {own['with']:,} | {np.mean(values):.3f} ± {np.std(values, ddof=1):.3f} |"
        )
    lines += [
        "",
        f"Balanced accuracy, prior divided out, on {result['test_images']:,} test images from histopathology:",
        "",
    ]
    lines += ["| Backbone | `hard` | `ccl-forward` | difference, points | p |", "|---|--:|--:|--:|--:|"]
    for backbone, own in result["balanced_accuracy"].items():
        hard, ours = (np.mean(own[method]) for method in METHODS)
        lines.append(f"| {backbone} | {hard:.3f} | {ours:.3f} | {100 * (ours - hard):+.1f} | {own['p']:.2g} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--tables", type=Path, required=True)
    parser.add_argument("--cells", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path("results/soft_labels"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    types = confirmations(options.tables / DATA)
    data = read_features(DATA, options.features / f"{DATA}-{BACKBONES[0]}.npz", options.tables / DATA)
    unconfirmed = np.array([types[image] != CONFIRMED for image in data.images.tolist()])
    by_seed = [doubt_without_histology(data, unconfirmed, seed) for seed in SEEDS]
    doubt = {
        name: {
            "without": int(unconfirmed[own].sum()), "with": int((~unconfirmed[own]).sum()),
            "auroc": [found[name] for found in by_seed],
        }
        for name in by_seed[0]
        for own in [data.labels == CLASSES[DATA].index(name)]
    }  # fmt: skip
    accuracies, images = {}, 0
    for backbone in BACKBONES:
        own: dict[str, Any] = {}
        for method in METHODS:
            found = [
                balanced_accuracy(Cell(DATA, "clean", method, s, backbone).path(options.cells), types) for s in SEEDS
            ]
            own[method], images = [value for value, _ in found], found[0][1]
        own["p"] = float(stats.ttest_rel(own["ccl-forward"], own["hard"]).pvalue)
        accuracies[backbone] = own
    commit = source_commit()
    result = {
        "commit": None if commit is None else vars(commit), "versions": versions(), "device": "cpu",
        "seeds": list(SEEDS), "doubt": doubt, "test_images": images, "balanced_accuracy": accuracies,
    }  # fmt: skip
    write_whole(options.results / "natural_noise.json", json.dumps(result, indent=1) + "\n")
    write_whole(options.results / "natural_noise.md", table(result))
    print(table(result))


if __name__ == "__main__":
    main()
