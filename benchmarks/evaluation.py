"""Coverage, false positives, power and speed of the statistics, on simulated predictions with known truth.

    python benchmarks/evaluation.py                     # writes results/statistics.json and .png
    python benchmarks/evaluation.py --draws 100 --comparisons 20      # a quick check

- coverage: how often the 95% interval of each score contains the truth, for images and for groups of similar images;
- coverage of calibration errors, whose truth is known for models of a known sharpness, and their false alarms: five
  seeds each of two methods that are both perfectly calibrated, one of them sharper;
- false alarms: five seeds each of two methods that are the same, how often a difference is claimed;
- power: the same with a true gap of two points of accuracy;
- speed: evaluating 100,000 predictions of 10 classes with 1,000 bootstrap draws, from the file to the dict.

Not called statistics.py: a script of that name hides Python's own module from the scripts beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.progress import track
from scipy import optimize, special, stats

from cclnet.evaluation.bootstrap import Statistic, Units, bootstrap, interval, units_of
from cclnet.evaluation.calibration import calibration_statistic, calibration_values
from cclnet.evaluation.classification import confusion_scores, decision_statistic
from cclnet.evaluation.compare import difference_test
from cclnet.evaluation.evaluate import PACKAGES, evaluate
from cclnet.evaluation.metrics import calibration_metrics
from cclnet.files import write_whole
from cclnet.reproduce.paper_figures import save_picture
from cclnet.runs.predictions import Predictions, write_predictions
from cclnet.runs.provenance import package_versions

SCORES = ("accuracy", "balanced_accuracy", "macro_f1", "kappa", "macro_jaccard")
BIASED = tuple(metric.name for metric in calibration_metrics("single-label") if metric.biased)
CLASSES = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
SHARES = np.array([1113, 6705, 514, 327, 1099, 115, 142]) / 10015  # of ISIC 2018
EVEN = np.full(7, 1 / 7)

# name: units, mean images a unit, how alike a unit is (0: not at all; else lower is more alike), class shares, recall
COVERAGE: dict[str, tuple[int, float, float, Any, float]] = {
    "200 images": (200, 1, 0, EVEN, 0.85),
    "2,000 images": (2000, 1, 0, EVEN, 0.85),
    "1,000 images, 97% right": (1000, 1, 0, EVEN, 0.97),
    "2,000 images, ISIC shares": (2000, 1, 0, SHARES, 0.8),
    "100 groups of 5, alike": (100, 5, 1, EVEN, 0.85),
    "400 groups of 3, very alike": (400, 3, 0.5, EVEN, 0.85),
    "1,500 groups of 1.34, ISIC shares": (1500, 1.34, 1, SHARES, 0.8),
}

# name: true gap in accuracy, standard deviation of accuracy between seeds, seeds, share of variance method x image
FALSE_ALARMS = {
    "seeds move by .5 points": (0.0, 0.005, 5, 0.0),
    "seeds move by .75 points": (0.0, 0.0075, 5, 0.0),
    "seeds move by 1 point": (0.0, 0.01, 5, 0.0),
    "three seeds, .75 points": (0.0, 0.0075, 3, 0.0),
}
POWER = {
    "seeds move by .5 points": (0.02, 0.005, 5, 0.0),
    "seeds move by .75 points": (0.02, 0.0075, 5, 0.0),
    "seeds move by 1 point": (0.02, 0.01, 5, 0.0),
    "images take sides, .75 points": (0.02, 0.0075, 5, 0.05),
}


def covered(scenario: str, draw: int) -> list[bool]:
    """Whether the intervals of one simulated run contain the truth, for each of SCORES."""
    count, size, alike, shares, recall = COVERAGE[scenario]
    rng = np.random.default_rng((1, list(COVERAGE).index(scenario), draw))
    chances = np.full((7, 7), (1 - recall) / 6)
    np.fill_diagonal(chances, recall)
    images = 1 + rng.poisson(size - 1, count)
    group = np.repeat(np.arange(count), images)
    label = rng.choice(7, count, p=shares)
    own = chances[label] if not alike else np.array([rng.dirichlet(alike * chances[y]) for y in label])
    predicted = (own[group].cumsum(axis=1) < rng.random((len(group), 1))).sum(axis=1).clip(0, 6)
    made = predictions_of(label[group], predicted, group)
    truth = confusion_scores((shares[:, None] * chances)[None])
    statistic, units = decision_statistic(made), units_of(made)
    values = of_the_whole(statistic)
    (drawn,) = bootstrap([statistic], units, 1000, seed=draw)
    ends = [
        interval(values[m], drawn[m], units.count, (-1.0, 1.0) if m == "kappa" else (0.0, 1.0), units.count)
        for m in SCORES
    ]
    return [bool(low <= truth[m][0] <= high) for m, (low, high) in zip(SCORES, ends, strict=True)]


def of_the_whole(statistic: Statistic) -> dict[str, float]:
    """The scores of all images, as they are."""
    found = statistic.scores(np.asarray(statistic.features.sum(axis=0))[None])
    return {name: float(value[0]) for name, value in found.items() if value.ndim == 1}


def predictions_of(labels: Any, predicted: Any, group: Any) -> Predictions:
    """Predictions of the given classes; their confidence does not matter here."""
    p = np.where(predicted[:, None] == np.arange(7), 0.94, 0.01)
    return Predictions(np.arange(len(labels)).astype(str), labels, p, CLASSES, group.astype(str))


def method_margin(accuracy: float, ease: Any) -> float:
    """The mean margin at which a share ``accuracy`` of images comes out right, margins being normal around it."""
    return float(optimize.brentq(lambda m: float(SHARES @ stats.norm.cdf(m + ease)) - accuracy, -5, 5))


def claims_difference(settings: tuple[float, float, int, float], draw: int) -> list[bool]:
    """Whether one simulated comparison claims a difference, for each of SCORES.

    An image is right when its margin is above zero: the method's mean, an easier or harder class, the seed's own shift,
    how hard the group and the image are for every model (80% of the variance), what this method finds hard, and noise
    of the single model. About 11% of images are right in one of two models only, as between real networks.
    """
    gap, seed_sd, seeds, sides = settings
    rng = np.random.default_rng((2, round(1e4 * gap), round(1e5 * seed_sd), seeds, round(100 * sides), draw))
    images = 1 + (rng.random(1500) < 0.25) + (rng.random(1500) < 0.09)
    group = np.repeat(np.arange(1500), images)
    size = len(group)
    label = rng.choice(7, 1500, p=SHARES)[group]
    confused_with = (label + rng.integers(1, 7, size)) % 7  # the predicted class when an image is misclassified
    ease = np.where(np.arange(7) == 1, 0.35, -0.55)
    common = np.sqrt(0.48) * rng.normal(size=1500)[group] + np.sqrt(0.32) * rng.normal(size=size) + ease[label]
    units = Units(group, 1500, "groups")
    statistics_of = []
    for mean in (method_margin(0.85 + gap, ease), method_margin(0.85, ease)):
        slope = float(SHARES @ stats.norm.pdf(mean + ease))
        taste = np.sqrt(sides) * rng.normal(size=size)
        for _ in range(seeds):
            shift = seed_sd / slope * rng.normal()
            margin = mean + shift + common + taste + np.sqrt(0.2 - sides) * rng.normal(size=size)
            made = predictions_of(label, np.where(margin > 0, label, confused_with), group)
            statistics_of.append(decision_statistic(made))
    drawn = bootstrap(statistics_of, units, 500, seed=draw)
    values, claims = [of_the_whole(statistic) for statistic in statistics_of], []
    for metric in SCORES:
        own, draws = np.array([v[metric] for v in values]), np.stack([d[metric] for d in drawn])
        found = difference_test((own[:seeds], draws[:seeds]), (own[seeds:], draws[seeds:]), True, units, draw)
        claims.append(found.p is not None and found.p < 0.05)
    return claims


def sharpened(sharpness: float, images: int, rng: np.random.Generator) -> Predictions:
    """A classifier that knows the classes as well as can be known and states it too sharply: calibrated at 1."""
    labels = rng.choice(7, images, p=SHARES)
    seen = rng.normal(size=(images, 7)) + 2 * np.eye(7)[labels]
    p = special.softmax(sharpness * (2 * seen + np.log(SHARES)), axis=1)
    return Predictions(np.arange(images).astype(str), labels, p, CLASSES)


def covered_calibration(sharpness: float, images: int, truth: dict[str, float], draw: int) -> list[bool]:
    """Whether the intervals of the calibration errors of one simulated run hold the truth, for each of BIASED."""
    made = sharpened(sharpness, images, np.random.default_rng((3, images, draw)))
    units, values = units_of(made), calibration_values(made)
    (drawn,) = bootstrap([calibration_statistic(made)], units, 500, seed=draw)
    ends = {name: interval(values[name], drawn[name], units.count, biased=True) for name in BIASED}
    return [bool(low <= truth[name] <= high) for name, (low, high) in ends.items()]


def claims_calibration_difference(images: int, seeds: int, draw: int) -> list[bool]:
    """Whether the ECE of two methods is called different, both calibrated, one nearly always sure or quite unsure."""
    rng = np.random.default_rng((4, images, seeds, draw))
    units, statistics_of = Units(np.arange(images), images, "images"), []
    for way in (lambda: np.where(rng.random(images) < 0.72, 0.985, 0.5), lambda: rng.uniform(0.7, 0.99, images)):
        for _ in range(seeds):
            sure = way()
            p = np.tile(((1 - sure) / 6)[:, None], 7)
            p[:, 0] = sure
            labels = np.where(rng.random(images) < sure, 0, 1)
            made = Predictions(np.arange(images).astype(str), labels, p, CLASSES)
            statistics_of.append(calibration_statistic(made))
    drawn = np.stack([one["ece"] for one in bootstrap(statistics_of, units, 300, seed=draw)])
    values = np.array([of_the_whole(statistic)["ece"] for statistic in statistics_of])
    a, b = (values[:seeds], drawn[:seeds]), (values[seeds:], drawn[seeds:])
    found = difference_test(a, b, True, units, draw, True)
    return [found.p is not None and found.p < 0.05]


def calibration_errors(draws: int, comparisons: int, pool: ProcessPoolExecutor) -> dict[str, Any]:
    """Coverage and false alarms of the calibration errors."""
    results: dict[str, Any] = {"calibration_coverage": {}, "calibration_false_alarms": {}}
    for sharpness, images in itertools.product((1.0, 1.15, 1.5), (200, 1000, 2000)):
        truth = calibration_values(sharpened(sharpness, 1_000_000, np.random.default_rng(9)))
        one = partial(covered_calibration, sharpness, images, truth)
        name = f"sharpness {sharpness:g}, {images:,} images"
        results["calibration_coverage"][name] = shares(name, one, draws, pool, names=BIASED) | {"truth": truth["ece"]}
    for images, seeds in itertools.product((200, 2000), (3, 5)):
        name = f"{images:,} images, {seeds} seeds"
        one_pair = partial(claims_calibration_difference, images, seeds)
        results["calibration_false_alarms"][name] = shares(name, one_pair, comparisons, pool, names=("ece",))
    return results


def shares(
    words: str,
    one: Callable[[int], list[bool]],
    count: int,
    pool: ProcessPoolExecutor,
    any_of: bool = False,
    names: Sequence[str] = SCORES,
) -> dict[str, float]:
    """How often each score came out true over ``count`` draws."""
    found = np.array(list(track(pool.map(one, range(count), chunksize=5), description=words, total=count)))
    result = {name: float(value) for name, value in zip(names, found.mean(axis=0), strict=True)}
    return result | ({"any of them": float(found.any(axis=1).mean())} if any_of else {})


def speed() -> dict[str, dict[str, float]]:
    """Seconds to evaluate 100,000 predictions of 10 classes, reading included: images alone, and in groups. Seconds of
    the processor beside those of the clock tell a slow machine from a busy one."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 100_000)
    logits = 2 * rng.normal(size=(100_000, 10)) + 4 * np.eye(10)[labels]
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    names = np.array([f"image_{i:06d}" for i in range(100_000)])
    groups = np.array([f"lesion_{i // 3}" for i in range(100_000)])
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for words, of in (("images", None), ("groups", groups)):
            path = Path(folder) / f"{words}.csv"
            write_predictions(path, Predictions(names, labels, p, tuple("abcdefghij"), of))
            start, busy = time.perf_counter(), time.process_time()
            evaluate(path)
            seconds[words] = {"clock": time.perf_counter() - start, "processor": time.process_time() - busy}
    return seconds


def figure(results: dict[str, Any]) -> Figure:
    """Coverage of every score and scenario with the band that 1,000 draws allow; claims of a difference beside it."""
    drawing = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = drawing.subplots(1, 2, width_ratios=[3, 2])
    names = list(results["coverage"])
    for offset, metric in enumerate(SCORES):
        heights = [len(names) - 1 - i + 0.12 * (2 - offset) for i in range(len(names))]
        values = [100 * results["coverage"][name][metric] for name in names]
        left.plot(values, heights, "o", label=metric.replace("_", " "), markersize=6 if offset == 0 else 4)
    left.axvspan(93, 97, color="0.9", zorder=0)
    left.axvline(95, color="0.6", linewidth=1)
    left.set_yticks(range(len(names)), names[::-1])
    left.set_xlabel("intervals that contain the truth, %")
    left.set_title("Coverage of 95% intervals")
    left.set_xlim(min(90, left.get_xlim()[0]), 100)
    left.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.4, -0.14), ncols=5, frameon=False)
    rows = [("equal: " + n, r) for n, r in results["false_alarms"].items()]
    rows += [("2 points: " + n, r) for n, r in results["power"].items()]
    right.barh(range(len(rows)), [100 * r["accuracy"] for _, r in rows][::-1], color="C0")
    right.set_yticks(range(len(rows)), [name for name, _ in rows][::-1])
    right.axvline(5, color="0.4", linewidth=1, linestyle="--")
    right.set_xlim(0, 100)
    right.set_xlabel("claims of a difference in accuracy, %")
    right.set_title("False alarms and power")
    return drawing


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=1000, help="simulated runs for the coverage")
    parser.add_argument("--comparisons", type=int, default=200, help="simulated comparisons of each kind")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    start = time.perf_counter()
    results: dict[str, Any] = {"speed_seconds": speed()}
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        results["coverage"] = {n: shares(n, partial(covered, n), options.draws, pool) for n in COVERAGE}
        for kind, settings in (("false_alarms", FALSE_ALARMS), ("power", POWER)):
            results[kind] = {
                name: shares(f"{kind}: {name}", partial(claims_difference, own), options.comparisons, pool, any_of=True)
                for name, own in settings.items()
            }
        results |= calibration_errors(options.draws, options.comparisons, pool)
    results["settings"] = {"draws": options.draws, "comparisons": options.comparisons, "bootstrap_draws": [1000, 500]}
    results |= {
        "seed": "of each draw its number",
        "device": f"CPU, {os.cpu_count()} cores",
        "versions": package_versions(PACKAGES),
    }
    results["seconds"] = time.perf_counter() - start
    options.out.mkdir(parents=True, exist_ok=True)
    write_whole(options.out / "statistics.json", json.dumps(results, indent=1) + "\n")
    save_picture(figure(results), options.out / "statistics.png", dots=130)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
