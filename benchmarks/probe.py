"""What `cclnet probe` reaches on a data set, from an empty cache: results/probe_NAME.json and probe.md.

    python benchmarks/probe.py isic2018=ISIC2018 --weights tf_efficientnet_lite4.safetensors --out runs/probe_isic2018 \
        --cost "MEL|BCC|AKIEC:NV|BKL|DF|VASC=10"

The scores are out-of-fold, or of the test split that came with the data. ``--tuned-without 0``: defaults of the probe
were chosen without the images of this fold, so its scores are given by themselves, too. Decoded images and features are
cached in OUT-cache, which must not exist.

    python benchmarks/probe.py isic2018=ISIC2018 --features 224 256 --weights FILE FILE --out CACHE

measures the extraction of features alone, for each file of weights at its crop: results/probe_features.json.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from sklearn.metrics import balanced_accuracy_score, cohen_kappa_score

import cclnet
from cclnet.data.cache import decode
from cclnet.data.sources import open_data
from cclnet.errors import InputError
from cclnet.files import read_json, write_json, write_whole
from cclnet.network import TimmClassifier
from cclnet.presets import probe_settings
from cclnet.report.html import evaluated_on
from cclnet.runs.folder import RunFolder
from cclnet.runs.provenance import origin
from cclnet.schema import to_plain
from cclnet.settings import POOLINGS, TTA, make_settings
from cclnet.training.features import frozen_features
from cclnet.training.setup import PreparedData, make_network

RESULTS = Path(__file__).parents[1] / "results"
SCORES = ("accuracy", "balanced_accuracy", "macro_auroc", "kappa", "quadratic_weighted_kappa", "macro_f1", "ece")


def measure(data: str, options: argparse.Namespace) -> dict[str, Any]:
    """Fit a probe and return what is kept of its run."""
    cache = options.cache or options.out.with_name(f"{options.out.name}-cache")
    if cache.exists() and not options.cache:
        raise InputError(
            f"{cache} exists: the time is measured from an empty cache. Remove it or choose another --out."
        )
    given = {"cost": options.cost, "decision": "balanced"} if options.cost else {}
    if options.copies_together:
        given["image_folder"] = data
        data = str(copies_together(data, options.out.with_name(f"{options.out.name}-groups.csv")))
    began = time.perf_counter()
    run = cclnet.probe(data, options.out, weights=str(options.weights[0]), cache_dir=str(cache), **given)
    seconds = time.perf_counter() - began
    result = kept(RunFolder(run), options.tuned_without)
    return result | {
        "without_copies": without_copies(RunFolder(run), data),
        # Where features were in the cache, the minutes that they took are added.
        "minutes": round(seconds / 60 + (minutes_of_features(result) if options.cache else 0), 2),
        "minutes_with_cached_features": round(seconds / 60, 2) if options.cache else None,
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[1], 1),  # above the number of threads: of a busy machine
    }


def kept(run: RunFolder, fold: int | None = None) -> dict[str, Any]:
    """What is kept of a run."""
    scores, model = run.read_scores(), run.read_model()
    assert scores is not None and scores.decisions is not None
    trained, fitted = to_plain(model.trained), dict(model.extra["probe"])
    return {
        **{name: trained[name] for name in ("commit", "versions", "device", "seed", "fingerprint")},
        "backbone": model.backbone,
        "short_side": model.short_side,
        "crop": list(model.crop),
        "tta": model.tta,
        "views": run.read_settings().tta,
        "pooling": model.pooling,
        "evaluated_on": evaluated_on(scores),
        "images": scores.split.images,
        "folds": model.trained.folds,
        "cpu_seconds": fitted.pop("cpu_seconds"),
        "seconds_without_report": fitted.pop("seconds"),
        "choice": fitted,
        "overall": {name: to_plain(scores.overall[name]) for name in SCORES if name in scores.overall},
        "rules": [
            {**to_plain(own), "quadratic_kappa": quadratic_kappa(np.array(own.confusion))}
            for own in scores.decisions.rules
        ],
        "expected_grade_kappa": expected_grade_kappa(run),
        "untuned_fold": None if fold is None else balanced_accuracy_of(run, fold),
        "leak": None if scores.leak is None else scores.leak.in_words,
        "copies": None if scores.copies is None else to_plain(scores.copies),
    }


def minutes_of_features(result: dict[str, Any]) -> float:
    """The minutes that ``--features`` measured for the features of a run."""
    passes = result["images"] * len(TTA[result["views"]])
    for row in read_json(RESULTS / "probe_features.json")["features"]:
        if (row["backbone"], row["crop"], row["passes"]) == (result["backbone"], result["crop"][0], passes):
            return float(row["minutes"])
    raise InputError("measure the extraction of these features first: --features")


def fingerprints(data: str) -> dict[str, str]:
    """The hash of the file of each image."""
    table = open_data(data, make_settings({"data": data, "short_side": 256}))
    root = Path(table.root or "")
    files = [root / str(path) for path in table.images]
    return {name: hashlib.md5(file.read_bytes()).hexdigest() for name, file in zip(table.names, files, strict=True)}


def copies_together(data: str, path: Path) -> Path:
    """Write a table of the images whose groups are identical files, so that no fold divides them."""
    table = open_data(data, make_settings({"data": data, "short_side": 256}))
    groups = fingerprints(data)
    root = Path(table.root or "")
    files = [str((root / str(path)).relative_to(data)) for path in table.images]
    labels = [table.classes[label] for label in table.labels]
    content = {"image": files, "label": labels, "group": [groups[name] for name in table.names]}
    pd.DataFrame(content).to_csv(path, index=False)
    return path


def without_copies(run: RunFolder, data: str) -> dict[str, Any] | None:
    """Of a given test split: how many files are also in the training split, and the scores without them."""
    split = evaluated_split(run)
    if split != "test":
        return None
    predictions, hashes = run.read_predictions(), fingerprints(data)
    own = predictions.splits == split
    training = {hashes[name] for name in predictions.images[~own].tolist()}
    new = own & np.array([hashes[name] not in training for name in predictions.images.tolist()])
    counts = np.array(run.read_model().class_counts)

    def scores(rows: npt.NDArray[np.bool_]) -> dict[str, Any]:
        labels, chosen = predictions.labels[rows], (predictions.probabilities[rows] / counts).argmax(axis=1)
        plain = predictions.probabilities[rows].argmax(axis=1)
        return {
            "images": int(rows.sum()),
            "accuracy": float((plain == labels).mean()),
            "balanced_accuracy": float(balanced_accuracy_score(labels, chosen)),
        }

    return {"copies": int((own & ~new).sum()), "all": scores(own), "new": scores(new)}


def extraction(data: str, options: argparse.Namespace) -> dict[str, Any]:
    """How fast the features of each backbone are computed, from decoded images; they stay in the cache ``out``."""
    rows = []
    for weights, crop in zip(options.weights, options.features, strict=True):
        given = {"data": data, "weights": str(weights), "cache_dir": str(options.out), "augment": {"crop": crop}}
        given |= {"short_side": max(crop, 256), "pooling": options.pooling}
        settings = make_settings(probe_settings(given).settings, given)
        table = open_data(data, settings)
        images = decode(table, settings.short_side, cache_dir=settings.cache_folder)
        everything = np.full(len(table), "train")
        classifier = make_network(settings, PreparedData(table, everything, images)).classifier
        assert isinstance(classifier, TimmClassifier)
        began, cpu = time.perf_counter(), time.process_time()
        frozen_features(classifier, settings, table, images, TTA[options.tta], torch.device("cpu"))
        seconds = time.perf_counter() - began
        passes = len(table) * len(TTA[options.tta])
        rows.append({
            "backbone": settings.backbone, "crop": crop, "pooling": settings.pooling, "images": len(table),
            "passes": passes, "minutes": round(seconds / 60, 2), "passes_per_second": round(passes / seconds, 1),
            "cpu_minutes": round((time.process_time() - cpu) / 60, 2), "load_average": round(os.getloadavg()[1], 1),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return {"threads": torch.get_num_threads(), "features": rows, **origin()}


def quadratic_kappa(confusion: npt.NDArray[np.int64]) -> float:
    """Cohen's kappa with quadratic weights, for ordered classes, from a confusion matrix."""
    true, chosen = np.indices(confusion.shape)
    return float(cohen_kappa_score(true.ravel(), chosen.ravel(), weights="quadratic", sample_weight=confusion.ravel()))


def expected_grade_kappa(run: RunFolder) -> float:
    """Quadratic kappa of the rounded expected class index; it means something where classes are ordered."""
    reported = run.read_predictions().of_split(evaluated_split(run))
    grade = reported.probabilities @ np.arange(len(reported.classes))
    return float(cohen_kappa_score(reported.labels, np.rint(grade).astype(int), weights="quadratic"))


def balanced_accuracy_of(run: RunFolder, fold: int) -> dict[str, Any]:
    """The balanced accuracy of one fold with the balanced rule."""
    predictions, split = run.read_predictions(), run.read_split()
    counts = run.read_model().class_counts
    assert split.folds is not None and counts is not None
    own = np.isin(predictions.images, split.images[split.folds == str(fold)])
    chosen = (predictions.probabilities[own] / np.array(counts)).argmax(axis=1)
    value = balanced_accuracy_score(predictions.labels[own], chosen)
    return {"fold": fold, "images": int(own.sum()), "balanced_accuracy": float(value)}


def evaluated_split(run: RunFolder) -> str:
    scores = run.read_scores()
    assert scores is not None
    return scores.split.name


def table() -> str:
    """The page of all results."""
    lines = [
        "# Linear probes",
        "",
        "Logistic regression on the frozen features of an ImageNet backbone (`cclnet probe`), written by",
        "`benchmarks/probe.py` from the JSON files beside this page. Penalty and class weights are chosen inside",
        "the training folds. Minutes are of everything, from an empty cache: decoding, features, regression,",
        "report. Expected cost: a malignant lesion called benign costs 10, any other error 1. Kappa is quadratic, for",
        "the ordered grades of APTOS; in brackets that of the rounded expected grade.",
        "",
        "| data | evaluated on | rule | accuracy | balanced accuracy | macro AUROC | kappa | expected cost | minutes |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    notes = []
    for path in sorted(RESULTS.glob("probe_*.json")):
        if path.stem == "probe_features":
            continue
        name, own = path.stem.removeprefix("probe_"), read_json(path)
        ordered = "quadratic_weighted_kappa" in own["overall"]
        for rule in own["rules"]:
            cost = rule["scores"].get("expected_cost")
            cells = [f"{rule['scores'][score]['value']:.3f}" for score in ("accuracy", "balanced_accuracy")]
            cells += [f"{own['overall']['macro_auroc']['value']:.3f}"]
            cells += [f"{rule['quadratic_kappa']:.3f} ({own['expected_grade_kappa']:.3f})" if ordered else "–"]
            cells += [f"{cost['value']:.3f}" if cost else "–", f"{own['minutes']:.1f}"]
            lines.append(f"| {name} | {own['evaluated_on']} | {rule['rule']} | {' | '.join(cells)} |")
        copies = (own["copies"] or {}).get("in_words") or "no copies of training images"
        notes.append(f"- {name}: {own['backbone']}, {own['crop'][0]} pixels, {own['threads']} threads; {copies}")
        if (rest := own["minutes_with_cached_features"]) is not None:
            notes[-1] += (
                f" Minutes: sum of two runs, features {own['minutes'] - rest:.1f}, the rest {rest:.1f}; the machine "
                f"was busy with other work (load average {own['load_average']:.0f})."
            )
        if without := own["without_copies"]:
            notes[-1] += (
                f" {without['copies']} test images are identical files of training images. Accuracy with them "
                f"{without['all']['accuracy']:.3f}, without them {without['new']['accuracy']:.3f} "
                f"({without['new']['images']} images)."
            )
        if own["untuned_fold"]:
            fold = own["untuned_fold"]
            notes[-1] += (
                f" Fold {fold['fold']} alone ({fold['images']:,} images), without which the defaults were chosen: "
                f"balanced accuracy {fold['balanced_accuracy']:.3f}."
            )
    return "\n".join([*lines, "", *notes]) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="NAME=DATA", nargs="?", default="")
    parser.add_argument("--tables", action="store_true", help="write probe.md alone")
    parser.add_argument("--weights", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="the run folder; with --features the cache")
    parser.add_argument("--features", type=int, nargs="+", metavar="CROP", help="measure the extraction alone")
    parser.add_argument("--cache", type=Path, help="with features that --features has measured")
    parser.add_argument("--copies-together", action="store_true", help="identical files are in one fold")
    parser.add_argument("--tta", default="none", choices=tuple(TTA), help="views whose extraction is measured")
    parser.add_argument("--pooling", default="stages", choices=POOLINGS, help="of the features that are measured")
    parser.add_argument("--cost", default="")
    parser.add_argument("--tuned-without", type=int, metavar="FOLD")
    options = parser.parse_args(words)
    if not options.tables and not (options.data and options.weights and options.out):
        parser.error("NAME=DATA, --weights and --out are needed to measure.")
    if options.tables:
        write_whole(RESULTS / "probe.md", table())
        return
    name, _, data = options.data.partition("=")
    if options.features:
        write_json(RESULTS / "probe_features.json", extraction(data, options))
        return
    write_json(RESULTS / f"probe_{name}.json", measure(data, options))
    write_whole(RESULTS / "probe.md", table())


if __name__ == "__main__":
    main()
