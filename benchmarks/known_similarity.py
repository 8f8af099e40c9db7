"""Does a method learn visual similarity or class frequency? Measured on synthetic lesions with known similarity.

    python benchmarks/known_similarity.py --document docs/tables_soft_labels.md

writes results/planted.json.bz2, .md and .png, on two CPU cores in under half an hour, and the table into the page.

For balanced classes and the imbalance of ISIC 2018, with little and with much overlap between classes, and three seeds:
after every epoch the rank correlation of the learned matrix with the known similarity and with inverse class frequency,
the softness, and when the soft labels were frozen; at the end that of the confusions on unseen images.
``--geometry-per-seed`` draws other class positions, and so another known similarity, for each seed. Finished runs are
kept in ``--runs``, so that the command continues where it was stopped; a run with other settings is repeated.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cclnet.data.synthetic import SyntheticSettings, known_similarity
from cclnet.evaluation.similarity import agreement, agreement_p, inverse_frequency_agreement, mean_confusion
from cclnet.files import write_json_bz2, write_whole
from cclnet.reproduce.paper_figures import save_picture
from cclnet.reproduce.tables import write_documents
from cclnet.runs.folder import open_run
from cclnet.runs.provenance import origin
from cclnet.settings import make_settings
from cclnet.training.loop import train

METHODS = ("ccl", "ccl-balanced", "ccl-centroid", "ccl-confusion")
SETS = [(balance, overlap) for balance in ("balanced", "isic2018") for overlap in ("little", "much")]
TITLES = {
    "softest": "at the softest epoch", "held": "when frozen", "best": "at its best epoch", "last": "at the end",
    "p": "largest exact p at the end", "rarity": "with inverse class frequency",
    "confused": "confusions on unseen images", "accuracy": "accuracy", "softness": "softness",
}  # fmt: skip


def one_run(job: dict[str, Any]) -> dict[str, Any]:
    """Train once; returns softness and both rank correlations over the epochs."""
    torch.set_num_threads(1)
    imbalance = "" if job["balance"] == "balanced" else ",imbalance=isic2018"
    size = job["crop"] + 8
    settings = make_settings(
        {
            "data": f"synthetic:images={job['images']},size={size},overlap={job['overlap']},"
            f"seed={job['seed']},geometry={job.get('geometry', 0)}{imbalance}",
            "short_side": size,
            "backbone": job["backbone"],
            "method": job["method"],
            "epochs": job["epochs"],
            "batch_size": job["batch_size"],
            "lr": job["lr"],
            "lr_ccl": job["lr_ccl"],
            "warmup_epochs": 1,
            "seed": job["seed"],
            "schedule": "cosine",
            # Colour is part of the known similarity: no colour jitter.
            "augment": {"crop": job["crop"], "brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0},
            "compile": False,
            "validate_every": job["epochs"],
        },
        job.get("changes", {}),
    )
    truth = known_similarity(7, job.get("geometry", 0))
    counts: list[int] = []
    course: list[dict[str, Any]] = []

    def look(record: dict[str, Any], network: Any) -> None:
        matrix = network.soft_labels().double().cpu().numpy()
        counts[:] = network.method.classes.counts
        rarity = inverse_frequency_agreement(matrix, counts) if job["balance"] != "balanced" else None
        kept = {name: record[name] for name in ("softness", "frozen", "structure", "val_accuracy") if name in record}
        course.append({"truth": agreement(matrix, truth), "rarity": rarity, **kept})

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        train(settings, Path(scratch) / "run", accelerator=job["accelerator"], progress=False, on_epoch=look)
        predictions = open_run(Path(scratch) / "run").predictions
        matrix = np.loadtxt(Path(scratch) / "run" / "soft_labels.csv", delimiter=",", skiprows=1, usecols=range(1, 8))
    held = [epoch for epoch, record in enumerate(course, start=1) if record["frozen"]]
    return {
        "job": job,
        "seconds": time.monotonic() - began,
        "held_epoch": held[0] if held else None,
        "course": course,
        "matrix": matrix.tolist(),
        # For comparison: what the network itself confuses, class frequencies taken out.
        "confused": agreement(mean_confusion(predictions.labels, predictions.probabilities, counts), truth),
    }


def name_of(job: dict[str, Any]) -> str:
    return "_".join(str(job[key]) for key in ("method", "balance", "overlap", "seed"))


def kept_run(job: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """The run of this very job, if it was finished before."""
    path = folder / f"{name_of(job)}.json"
    run = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return run if run.get("job") == job else None


def all_runs(jobs: Sequence[dict[str, Any]], folder: Path, at_once: int) -> list[dict[str, Any]]:
    """The runs of all jobs, in their order; those that are missing are made, several at once, and kept."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [job for job in jobs if kept_run(job, folder) is None]
    print(f"{len(jobs) - len(missing)} of {len(jobs)} runs are there", flush=True)
    with ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("spawn")) as pool:
        for number, done in enumerate(as_completed([pool.submit(one_run, job) for job in missing]), start=1):
            run = json.loads(json.dumps(done.result()), parse_float=lambda text: round(float(text), 5))
            write_whole(folder / f"{name_of(run['job'])}.json", json.dumps(run) + "\n")
            at_end = {key: value for key, value in moments(run).items() if key in ("held", "last", "rarity")}
            print(f"{number} of {len(missing)}", name_of(run["job"]), f"{run['seconds']:.0f} s", at_end, flush=True)
    return [run for job in jobs if (run := kept_run(job, folder)) is not None]


def moments(run: dict[str, Any]) -> dict[str, float | None]:
    """The rank correlation with the truth at the moments people ask about, and what else the table shows."""
    course, held = run["course"], run["held_epoch"]
    softness = [float(record["softness"]) for record in course]
    softest = course[softness.index(min(softness))] if max(softness) - min(softness) > 1e-3 else None
    return {
        "softest": softest and softest["truth"],
        "held": course[held - 1]["truth"] if held else None,
        "best": max(record["truth"] for record in course),
        "last": course[-1]["truth"],
        "p": agreement_p(run["matrix"], known_similarity(7, run["job"].get("geometry", 0))),
        "rarity": course[-1]["rarity"],
        "confused": run["confused"],
        "accuracy": course[-1]["val_accuracy"],
        "softness": course[-1]["softness"],
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown: one row a method and set, mean over seeds and the range in brackets."""
    heads = ["method", "classes", "overlap", *TITLES.values(), "frozen at epoch"]
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|" + "--:|" * (len(heads) - 3)]
    for method in dict.fromkeys(run["job"]["method"] for run in runs):
        for balance, overlap in SETS:
            chosen = of(runs, method, balance, overlap)
            if chosen:
                values = {key: [moments(run)[key] for run in chosen] for key in TITLES}
                cells = [_largest(own) if key == "p" else _spread(own) for key, own in values.items()]
                held = ", ".join(str(run["held_epoch"] or "never") for run in chosen)
                lines.append(f"| {method} | {balance} | {overlap} | {' | '.join(cells)} | {held} |")
    return "\n".join(lines) + "\n"


def whole(run: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run: its matrix, and its course to the digits that a figure shows."""
    course = json.loads(json.dumps(columns(run["course"])), parse_float=lambda text: round(float(text), 3))
    return {"matrix": run["matrix"], "confused": run["confused"], "course": course}


def columns(course: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The course as one list a quantity, which is what a reader plots and a third of the bytes.

    >>> columns([{"truth": 0.5, "frozen": 0.0}, {"truth": 0.6, "frozen": 0.0, "val_accuracy": 0.9}])
    {'truth': [0.5, 0.6], 'frozen': [0.0, 0.0], 'val_accuracy': [None, 0.9]}
    """
    names = dict.fromkeys(name for record in course for name in record)
    return {name: [record.get(name) for record in course] for name in names}


def of(runs: Sequence[dict[str, Any]], *which: str) -> list[dict[str, Any]]:
    return [run for run in runs if tuple(run["job"][key] for key in ("method", "balance", "overlap")) == which]


def _spread(values: Sequence[float | None]) -> str:
    """
    >>> _spread([0.5, None, 0.75]), _spread([None])
    ('0.62 [0.50, 0.75]', '–')
    """
    known = [value for value in values if value is not None]
    return f"{np.mean(known):.2f} [{min(known):.2f}, {max(known):.2f}]" if known else "–"


def _largest(values: Sequence[float | None]) -> str:
    return f"{max(value for value in values if value is not None):.2g}"


def figure(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """What the matrix follows over epochs, one row per method, one column per set; a dot where it was held."""
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(run["job"]["method"] for run in runs))
    drawing = Figure(figsize=(13, 1.2 + 2.5 * len(methods)), layout="constrained")
    axes = drawing.subplots(len(methods), len(SETS), sharex=True, sharey=True, squeeze=False)
    for row, method in enumerate(methods):
        for column, (balance, overlap) in enumerate(SETS):
            axis = axes[row, column]
            axis.axhline(0, color="grey", linewidth=0.6)
            for run in of(runs, method, balance, overlap):
                _curve(axis, run, "truth", "#31688e")
                if balance != "balanced":
                    _curve(axis, run, "rarity", "#b5523b")
            if row == 0:
                axis.set_title(f"{balance}, {overlap} overlap", fontsize=10)
            if row == len(methods) - 1:
                axis.set_xlabel("epoch")
        axes[row, 0].set_ylabel(f"{method}\nrank correlation")
    axes[0, 0].set_ylim(-0.5, 1.0)
    drawing.suptitle("What the matrix follows: visual similarity (blue) or inverse class frequency (red); dot: frozen")
    save_picture(drawing, path, dots=75)


def _curve(axis: Any, run: dict[str, Any], key: str, colour: str) -> None:
    values, held = [record[key] for record in run["course"]], run["held_epoch"]
    axis.plot(range(1, len(values) + 1), values, color=colour, alpha=0.8, linewidth=1.3)
    if held:
        axis.plot(held, values[held - 1], "o", color=colour, markersize=5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--images", type=int, default=2400)
    parser.add_argument("--crop", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--lr-ccl", type=float, default=0.005)
    parser.add_argument("--backbone", default="test_byobnet")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--at-once", type=int, default=2, help="runs at once, each on one core")
    parser.add_argument("--runs", type=Path, default=Path("runs/planted"), help="where finished runs are kept")
    parser.add_argument("--out", type=Path, default=Path("results/planted"))
    parser.add_argument(
        "--brief", action="store_true", help="keep the numbers of the table only, not those of every epoch"
    )
    parser.add_argument("--geometry-per-seed", action="store_true", help="draw the known similarity anew for each seed")
    parser.add_argument("--overlaps", nargs="+", default=("little", "much"))
    parser.add_argument("--document", type=Path, help="also update the table in this page")
    given = parser.parse_args()
    shared = {key: value for key, value in vars(given).items()
              if key not in ("methods", "seeds", "at_once", "runs", "out", "brief", "document", "overlaps",
                             "geometry_per_seed")}  # fmt: skip
    jobs = [
        {"method": method, "balance": balance, "overlap": overlap, "seed": seed, **shared}
        | ({"geometry": seed + 1} if given.geometry_per_seed else {})
        for seed in given.seeds for balance, overlap in SETS for method in given.methods if overlap in given.overlaps
    ]  # fmt: skip
    runs = all_runs(jobs, given.runs, given.at_once)
    runs.sort(key=lambda run: given.methods.index(run["job"]["method"]))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "settings": {**shared, "methods": list(given.methods), "seeds": list(given.seeds), "at_once": given.at_once},
        **origin(torch.cuda.get_device_name() if given.accelerator == "cuda" else "CPU, one core a run"),
        "seconds_of_runs": round(sum(run["seconds"] for run in runs), 1),
        "similarity": [
            known_similarity(7, geometry).round(5).tolist()
            for geometry in dict.fromkeys(job.get("geometry", 0) for job in jobs)
        ],
        "imbalance": SyntheticSettings(images=given.images, imbalance="isic2018").class_counts().tolist(),
        "runs": [
            {**{key: run["job"].get(key, 0) for key in ("method", "balance", "overlap", "seed", "geometry")},
             "seconds": run["seconds"], "held_epoch": run["held_epoch"],
             **(moments(run) if given.brief else whole(run))}
            for run in runs
        ],
    }  # fmt: skip
    write_json_bz2(given.out.with_suffix(".json.bz2"), content)
    write_whole(given.out.with_suffix(".md"), table(runs))
    figure(runs, given.out.with_suffix(".png"))
    if given.document:
        write_documents(Path(), {str(given.document): {"planted": table(runs)}})
    print(table(runs))


if __name__ == "__main__":
    main()
