"""Does a method learn looks or class frequency? Trained end to end on drawn lesions whose similarity is known.

    python benchmarks/planted.py --jobs 2            # writes results/planted.json, .md and .png

For balanced classes and the imbalance of ISIC 2018, with little and with much overlap between classes, and several
seeds: after every epoch the rank correlation of the learned matrix with the planted similarity and with class
rarity, the softness, and when the dictionary was frozen.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cclnet.data.synthetic import SyntheticSettings, planted_similarity
from cclnet.errors import InputError
from cclnet.evaluation.correlation import agreement, rarity_agreement
from cclnet.training.loop import train
from cclnet.training.run_folder import versions
from cclnet.training.settings import make_settings

SETS = [(balance, overlap) for balance in ("balanced", "isic2018") for overlap in ("little", "much")]


def one_run(job: dict[str, Any]) -> dict[str, Any]:
    """Train once; returns the course of softness and of both rank correlations over the epochs."""
    torch.set_num_threads(job["threads"])
    imbalance = "" if job["balance"] == "balanced" else ",imbalance=isic2018"
    settings = make_settings(
        {
            "data": f"synthetic:images={job['images']},overlap={job['overlap']},seed={job['seed']}{imbalance}",
            "short_side": 72,
            "backbone": job["backbone"],
            "method": job["method"],
            "epochs": job["epochs"],
            "batch_size": 64,
            "lr": 0.05,
            "lr_ccl": job["lr_ccl"],
            "warmup_epochs": 1,
            "seed": job["seed"],
            "augment": {"crop": 64},
            "compile": False,
        }
    )
    truth = planted_similarity(7)
    course: list[dict[str, float]] = []
    counts: list[int] = []

    def look(record: dict[str, Any], network: Any) -> None:
        matrix = network.soft_labels().double().cpu().numpy()
        if not counts:
            counts.extend(network.method.classes.counts)
        rarity = rarity_agreement(matrix, counts) if len(set(counts)) > 1 else None
        course.append(
            {
                "truth": agreement(matrix, truth),
                "rarity": rarity,
                **{k: record[k] for k in ("softness", "frozen", "val_accuracy", "loss")},
            }
        )

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        train(settings, Path(scratch) / "run", progress=False, on_epoch=look)
        matrix = np.loadtxt(Path(scratch) / "run" / "correlation.csv", delimiter=",", skiprows=1, usecols=range(1, 8))
    frozen = [epoch for epoch, record in enumerate(course, start=1) if record["frozen"]]
    return {
        **job,
        "seconds": time.monotonic() - began,
        "freeze_epoch": frozen[0] if frozen else None,
        "course": course,
        "matrix": matrix.tolist(),
    }


def moments(run: dict[str, Any]) -> dict[str, float | None]:
    """The rank correlations at the moments people ask about."""
    course = run["course"]
    softest = min(range(len(course)), key=lambda i: course[i]["softness"])
    best = max(range(len(course)), key=lambda i: course[i]["truth"])
    freeze = run["freeze_epoch"]
    return {
        "softest": course[softest]["truth"],
        "freeze": course[freeze - 1]["truth"] if freeze else None,
        "best": course[best]["truth"],
        "best_epoch": best + 1,
        "last": course[-1]["truth"],
        "last_rarity": course[-1]["rarity"],
        "accuracy": course[-1]["val_accuracy"],
        "softness": course[-1]["softness"],
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown: one row a method and set, mean over seeds and the range in brackets."""
    lines = [
        "| method | classes | overlap | softest | freeze | best | last | rarity | accuracy | softness | froze at |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for method in dict.fromkeys(run["method"] for run in runs):
        for balance, overlap in SETS:
            chosen = [r for r in runs if (r["method"], r["balance"], r["overlap"]) == (method, balance, overlap)]
            if not chosen:
                continue
            seen = [moments(run) for run in chosen]
            cells = [
                _spread([m[key] for m in seen])
                for key in ("softest", "freeze", "best", "last", "last_rarity", "accuracy", "softness")
            ]
            froze = ", ".join(str(run["freeze_epoch"] or "never") for run in chosen)
            lines.append(f"| {method} | {balance} | {overlap} | {' | '.join(cells)} | {froze} |")
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return f"{np.mean(known):.2f} [{min(known):.2f}, {max(known):.2f}]"


def figure(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Epoch by epoch, a column a set: rank correlations above, softness below, the freeze as a dot."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    method = runs[0]["method"]
    figure, axes = plt.subplots(2, len(SETS), figsize=(14, 6), sharex=True, sharey="row")
    for column, (balance, overlap) in enumerate(SETS):
        for run in (r for r in runs if (r["method"], r["balance"], r["overlap"]) == (method, balance, overlap)):
            epochs = range(1, len(run["course"]) + 1)
            lines = [(0, "truth", "#31688e"), (1, "softness", "#2a7f62")]
            if balance != "balanced":
                lines.insert(1, (0, "rarity", "#b5523b"))
            for row, key, colour in lines:
                values = [record[key] for record in run["course"]]
                axes[row, column].plot(epochs, values, color=colour, alpha=0.8, linewidth=1.3)
                if freeze := run["freeze_epoch"]:
                    axes[row, column].plot(freeze, values[freeze - 1], "o", color=colour, markersize=5)
        axes[0, column].set_title(f"{balance}, {overlap} overlap")
        axes[0, column].axhline(0, color="grey", linewidth=0.6)
        axes[1, column].axhline(0.5519, color="grey", linewidth=0.8, linestyle="--")
        axes[1, column].set_xlabel("epoch")
    axes[0, 0].set_ylabel("rank correlation with\nplanted truth (blue), rarity (red)")
    axes[1, 0].set_ylabel("softness (dashed: collapse point)")
    figure.suptitle(f"What the matrix of '{method}' follows, three seeds each; dots mark the freeze")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["ccl"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--images", type=int, default=2400)
    parser.add_argument("--backbone", default="resnet10t")
    parser.add_argument("--lr-ccl", type=float, default=0.005)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--threads", type=int, default=1, help="threads of a run")
    parser.add_argument("--out", type=Path, default=Path("results/planted"))
    given = parser.parse_args()
    if given.seeds < 1:
        raise InputError("--seeds must be 1 or more.")
    jobs = [
        {"method": method, "balance": balance, "overlap": overlap, "seed": seed, "epochs": given.epochs,
         "images": given.images, "backbone": given.backbone, "lr_ccl": given.lr_ccl, "threads": given.threads}
        for method in given.methods for balance, overlap in SETS for seed in range(given.seeds)
    ]  # fmt: skip
    began = time.monotonic()
    with ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = []
        for run in pool.map(one_run, jobs):
            runs.append(run)
            what = [run[key] for key in ("method", "balance", "overlap", "seed")]
            print(len(runs), "of", len(jobs), *what, moments(run), flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    given.out.parent.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(json.dumps(runs), parse_float=lambda text: round(float(text), 5))
    content = {
        "settings": {name: value for name, value in vars(given).items() if name != "out"},
        "device": device,
        "versions": versions(),
        "seconds": round(time.monotonic() - began, 1),
        "similarity": planted_similarity(7).round(5).tolist(),
        "imbalance": SyntheticSettings(images=given.images, imbalance="isic2018").class_counts().tolist(),
        "runs": rounded,
    }
    given.out.with_suffix(".json").write_text(json.dumps(content) + "\n")
    given.out.with_suffix(".md").write_text(table(runs))
    figure(runs, given.out.with_suffix(".png"))
    print(table(runs))


if __name__ == "__main__":
    main()
