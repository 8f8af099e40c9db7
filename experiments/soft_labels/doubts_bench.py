"""How well wrong labels are found: `cclnet doubts` against plain confident learning, on frozen features.

python experiments/soft_labels/doubts_bench.py --features FOLDER --tables FOLDER --results results/soft_labels

Noise is drawn as in bench.py. Five folds that keep lesions together; each image is predicted by a head (hard labels, 10
epochs) that was not fitted on its fold. Rankings of the training labels, most doubtful first:

- self-confidence: small p_y; margin: small p_y − max_{k≠y} p_k (both as in Northcutt et al. 2021);
- doubt: the posterior of `cclnet doubts`, which knows which classes are confused.

Natural experiment: sets of identical APTOS images with different labels, of which at least one label is wrong. No noise
is drawn; found is an image of such a set.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from sklearn.metrics import average_precision_score

from bench import BACKBONES, SEEDS, STAGE_ONE, TUNING_SEEDS, fit, network, predict
from cclnet.evaluation.doubts import label_model
from cclnet.files import write_whole
from cclnet.runs.provenance import source_commit, versions
from noisy_tasks import CLASSES, Features, make_task, read_features

FOLDS, FIRST = 5, 100
Floats = npt.NDArray[np.float64]


def rankings(p: Floats, labels: npt.NDArray[np.int64]) -> dict[str, Floats]:
    """Scores by name, larger is more doubtful."""
    rows = np.arange(len(labels))
    own, others = p[rows, labels], p.copy()
    others[rows, labels] = -1.0
    joint = p * label_model(p, labels).T[labels]
    return {
        "self-confidence": -own,
        "margin": others.max(axis=1) - own,
        "doubt": 1.0 - joint[rows, labels] / joint.sum(axis=1),
    }


def out_of_fold(
    train: torch.Tensor, given: torch.Tensor, groups: npt.NDArray[np.int64], task: Any, seed: int
) -> Floats:
    """Predictions of each image by a head that was not fitted on its group."""
    fold = np.random.default_rng(seed).integers(0, FOLDS, int(groups.max()) + 1)[groups]
    p = torch.zeros(len(train), task.num_classes)
    for f in range(FOLDS):
        fitted, predicted = torch.tensor(fold != f), torch.tensor(fold == f)
        own = dataclasses.replace(task, train=train[fitted], given=given[fitted])
        p[predicted] = predict(fit(own, network(own, "hard", seed), seed, STAGE_ONE), train[predicted])
    return p.double().numpy()


def scores(found: npt.NDArray[np.bool_], ranking: Floats) -> dict[str, float]:
    first = np.argsort(-ranking, kind="stable")[:FIRST]
    return {
        "precision_at_100": float(found[first].mean()),
        "average_precision": float(average_precision_score(found, ranking)),
    }


def drawn_noise(data: Features, rate: float, seed: int, tuning: bool) -> list[dict[str, Any]]:
    task = make_task(data, rate, None, seed, tuning)
    p = out_of_fold(task.train, task.given, task.train_groups, task, seed)
    wrong = (task.given != task.true).numpy()
    cell = {"data": data.name, "noise": rate, "seed": seed, "wrong": float(wrong.mean())}
    return [cell | {"ranking": name} | scores(wrong, own) for name, own in rankings(p, task.given.numpy()).items()]


def identical_images(data: Features, seed: int) -> list[dict[str, Any]]:
    """Rankings of all images. Copies of an image are in one fold, so none of them votes on another."""
    sets = [np.unique(data.labels[data.groups == g]) for g in range(int(data.groups.max()) + 1)]
    differing = np.array([len(own) > 1 for own in sets])
    found = differing[data.groups]
    task = make_task(data, 0.0, None, seed, tuning=False)
    rows = task.project(data.features)
    p = out_of_fold(rows, torch.tensor(data.labels), data.groups, task, seed)
    cell = {"data": data.name, "noise": "identical images", "seed": seed, "wrong": float(found.mean())}
    cell["sets"] = int(differing.sum())
    return [cell | {"ranking": name} | scores(found, own) for name, own in rankings(p, data.labels).items()]


def table(cells: list[dict[str, Any]]) -> str:
    """Means over seeds, and the difference of doubt from the better of the two others with its p (t-test, paired)."""
    lines = [
        "| Data | Noise | Wrong | Ranking | Seeds | Precision in first 100 | Average precision | Doubt minus this |",
        "|---|---|--:|---|--:|--:|--:|--:|",
    ]
    for data, noise in dict.fromkeys((c["data"], c["noise"]) for c in cells):
        of_cell = [c for c in cells if (c["data"], c["noise"]) == (data, noise)]
        ours = np.array([c["average_precision"] for c in of_cell if c["ranking"] == "doubt"])
        for name in ("self-confidence", "margin", "doubt"):
            own = [c for c in of_cell if c["ranking"] == name]
            ap = np.array([c["average_precision"] for c in own])
            first = np.mean([c["precision_at_100"] for c in own])
            gain = "–"
            if name != "doubt":
                gain = f"{100 * (ours - ap).mean():+.1f} points, p {stats.ttest_1samp(ours - ap, 0).pvalue:.2g}"
            label = noise if isinstance(noise, str) else f"{noise:.0%}"
            cells_of = (data, label, f"{own[0]['wrong']:.3f}", name, len(own), f"{first:.3f}", f"{ap.mean():.3f}", gain)
            lines.append("| " + " | ".join(map(str, cells_of)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--tables", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path("results/soft_labels"))
    parser.add_argument("--tuning", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.results.mkdir(parents=True, exist_ok=True)
    cells: list[dict[str, Any]] = []
    for name in sorted(CLASSES):
        data = read_features(name, options.features / f"{name}-{BACKBONES[0]}.npz", options.tables / name)
        seeds = TUNING_SEEDS if options.tuning else SEEDS
        for rate in (0.2, 0.4):
            for seed in seeds:
                cells += drawn_noise(data, rate, seed, options.tuning)
        if name == "aptos":
            cells += [cell for seed in seeds for cell in identical_images(data, seed)]
    commit = source_commit()
    about = {"commit": None if commit is None else vars(commit), "versions": versions(), "device": "cpu"}
    write_whole(options.results / "doubts.json", json.dumps(about | {"cells": cells}, indent=1) + "\n")
    write_whole(options.results / "doubts.md", table(cells))
    print(table(cells))


if __name__ == "__main__":
    main()
