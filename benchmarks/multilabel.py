"""Soft labels for multi-label images: do they help, and do they follow visual similarity or co-occurrence?

    python benchmarks/multilabel.py            # two CPU cores; writes results/multilabel.json and .md

Binary cross entropy and ``ccl-multilabel`` are trained end to end on drawn skin with several lesions, where classes
look alike by a known amount and come together by another. Beside the mean average precision on images that were not
trained on stand the rank correlations of the learned matrix with the planted similarity and with co-occurrence in the
training images.
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

from cclnet.data.sources import open_data
from cclnet.data.split import read_split
from cclnet.data.synthetic import co_occurrence, known_similarity
from cclnet.evaluation.metrics import overall_metrics, point_estimates
from cclnet.evaluation.similarity import agreement
from cclnet.files import write_whole
from cclnet.runs.model import read_soft_labels
from cclnet.runs.predictions import read_predictions
from cclnet.runs.provenance import versions
from cclnet.settings import make_settings
from cclnet.training.loop import train

METHODS = ("bce", "ccl-multilabel")


def one_run(job: dict[str, Any]) -> dict[str, Any]:
    """Train once and score what was learned."""
    torch.set_num_threads(1)
    size = job["crop"] + 8
    data = f"synthetic-multilabel:images={job['images']},size={size},overlap={job['overlap']},seed={job['seed']}"
    settings = make_settings(
        {
            "data": data,
            "short_side": size,
            "split": {"val": job["val"], "seed": job["seed"]},
            "backbone": job["backbone"],
            "method": job["method"],
            "method_settings": job["method_settings"],
            "epochs": job["epochs"],
            "batch_size": job["batch_size"],
            "optimizer": "adamw",
            "lr": job["lr"],
            "ema": 0.99,  # two runs differ less by chance
            "warmup_epochs": 1,
            "schedule": "cosine",
            "seed": job["seed"],
            "augment": {"crop": job["crop"], **dict.fromkeys(("brightness", "contrast", "saturation", "hue"), 0.0)},
            "compile": False,
            "validate_every": job["epochs"],
        }
    )
    course: list[float] = []
    truth = known_similarity(7)

    def look(_: dict[str, Any], network: Any) -> None:
        if (matrix := network.soft_labels()) is not None:
            course.append(agreement(matrix.cpu().numpy(), truth))

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        run = train(settings, Path(scratch) / "run", accelerator="cpu", progress=False, on_epoch=look)
        seconds = time.monotonic() - began
        predictions = read_predictions(run / "predictions.csv", multilabel=True)
        table = open_data(data)
        company = co_occurrence(table.labels[read_split(run / "split.csv", table) == "train"])
        scores = point_estimates(predictions, overall_metrics("multi-label"))
        result = {**job, "seconds": seconds, "images_tested": len(predictions.images), **scores}
        result["company_with_similarity"] = agreement(company, truth)
        if course:
            matrix = read_soft_labels(run / "soft_labels.csv")[1]
            result.update(
                with_similarity=agreement(matrix, truth),
                with_co_occurrence=agreement(matrix, company),
                course=course,
                matrix=matrix.tolist(),
            )
    return result


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row a run, then the mean of each method."""
    heads = ["method", "seed", "mAP", "with known similarity", "with co-occurrence"]
    keys = ("mean_average_precision", "with_similarity", "with_co_occurrence")
    lines = [f"| {' | '.join(heads)} |", "|---|---|--:|--:|--:|"]
    for method in METHODS:
        chosen = [run for run in runs if run["method"] == method]
        rows = [(str(run["seed"]), [run.get(key) for key in keys]) for run in chosen]
        rows.append(("mean", [_mean([run.get(key) for run in chosen]) for key in keys]))
        for name, values in rows:
            cells = ["–" if value is None else f"{value:.3f}" for value in values]
            lines.append(f"| {method} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--val", type=float, default=0.5, help="share of the images that is tested on")
    parser.add_argument("--overlap", default="much")
    parser.add_argument("--crop", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--backbone", default="test_byobnet")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--method-settings", type=json.loads, default={}, help="of ccl-multilabel, as JSON")
    parser.add_argument("--at-once", type=int, default=2, help="runs at once, each on one core")
    parser.add_argument("--out", type=Path, default=Path("results/multilabel"))
    given = parser.parse_args()
    shared = {key: value for key, value in vars(given).items()
              if key not in ("seeds", "methods", "method_settings", "at_once", "out")}  # fmt: skip
    jobs = [
        {"method": method, "seed": seed, "method_settings": given.method_settings if method != "bce" else {}, **shared}
        for seed in given.seeds for method in given.methods
    ]  # fmt: skip
    began, runs = time.monotonic(), []
    with ProcessPoolExecutor(given.at_once, mp_context=multiprocessing.get_context("spawn")) as pool:
        for run in pool.map(one_run, jobs):
            runs.append(run)
            told = [f"{key} {run[key]:.3f}" for key in ("mean_average_precision", "with_similarity") if key in run]
            who = f"{run['method']} seed {run['seed']}"
            print(f"{len(runs)} of {len(jobs)}", who, *told, f"{run['seconds']:.0f} s", flush=True)
    content = {
        "settings": {**shared, "seeds": list(given.seeds), "method_settings": given.method_settings},
        "device": f"CPU, {given.at_once} runs at once, one core each",
        "versions": versions(),
        "seconds": round(time.monotonic() - began, 1),
        "similarity": known_similarity(7).round(5).tolist(),
        "runs": json.loads(json.dumps(runs), parse_float=lambda text: round(float(text), 5)),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(given.out.with_suffix(".json"), json.dumps(content) + "\n")
    write_whole(given.out.with_suffix(".md"), table(runs))
    print(table(runs))


if __name__ == "__main__":
    main()
