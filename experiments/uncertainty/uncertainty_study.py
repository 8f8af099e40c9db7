"""Measure decisions, prediction sets, unlike images and abstention on real data; PLAN.md says what it asks.

    cclnet probe DATA --out RUN          # for ISIC 2018, APTOS 2019 and brain MRI, with the same backbone
    python experiments/uncertainty/uncertainty_study.py --isic RUN --aptos RUN --brain RUN

Predictions are those of the runs, out-of-fold; features come from the cache of ``cclnet probe``. Writes
uncertainty.json and uncertainty.md to results/.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.model_selection import GroupShuffleSplit

from cclnet.data.augment import normalise
from cclnet.data.cache import decode
from cclnet.data.sources import open_data
from cclnet.evaluation.bootstrap import units_of
from cclnet.evaluation.conformal import KINDS, REPORTED, scores_of_labels, sets, threshold
from cclnet.evaluation.decision import score_abstention
from cclnet.evaluation.evaluate import evaluate
from cclnet.network import TimmClassifier
from cclnet.runs.decision_rule import DecisionRule
from cclnet.runs.folder import RunFolder, open_run
from cclnet.runs.model import ModelDescription
from cclnet.runs.out_of_distribution import auroc, fit_statistics
from cclnet.runs.predictions import Predictions, write_predictions
from cclnet.runs.provenance import origin, package_versions
from cclnet.settings import Settings
from cclnet.training.feature_statistics import noise_images
from cclnet.training.features import frozen_features
from cclnet.training.setup import PreparedData, make_network

ROOT = Path(__file__).parents[2]
COSTS = "MEL|BCC|AKIEC:NV|BKL|DF|VASC=10"
DRAWS = 200
METHODS = ("hard", "lsr-u5", "ccl", "ccl-balanced", "ccl-confusion", "ccl-centroid", "hard-class-weights")
AREAS = ("probability", "logit_norm", "chosen_on_other_lesions")
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Probed:
    """A run of ``cclnet probe``: its predictions, and the features of the images themselves, without other views."""

    predictions: Predictions
    features: Floats
    settings: Settings
    classifier: TimmClassifier

    @classmethod
    def of(cls, run: Path) -> Probed:
        folder = RunFolder(run)
        settings, predictions = folder.read_settings(), folder.read_predictions()
        table = open_data(settings.data, settings)
        images = decode(table, settings.short_side, cache_dir=settings.cache_folder)
        network = make_network(settings, PreparedData(table, np.full(len(table), "train"), images))
        assert isinstance(network.classifier, TimmClassifier)
        device = torch.device("cpu")
        plain = frozen_features(network.classifier, settings, table, images, ("0",), device)["0"]
        row_of = {name: row for row, name in enumerate(table.names)}
        rows = [row_of[name] for name in predictions.images.tolist()]
        return cls(predictions, plain[rows].astype(np.float64), settings, network.classifier)

    def with_groups(self) -> Predictions:
        """The predictions; without groups every image is its own."""
        own = self.predictions
        return own if own.groups is not None else replace(own, groups=own.images)

    @torch.inference_mode()
    def of_noise(self) -> Floats:
        """Features of generated noise."""
        size = self.settings.augment.crop
        mean, std = (torch.tensor(own) for own in (self.settings.input_mean, self.settings.input_std))
        noise = normalise(torch.from_numpy(noise_images(size, size, 64)), mean, std)
        return self.classifier.eval().features(noise).double().numpy()


def evaluated(probed: Probed, cost: str | None, seed: int) -> dict[str, Any]:
    """Rules, abstention and prediction sets of ``cclnet evaluate``, from a run folder with these predictions."""
    predictions, settings = probed.predictions, probed.settings
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(folder)
        write_predictions(run.predictions, predictions)
        counts = tuple(predictions.class_counts.tolist())  # of the other folds, but for a factor
        crop = settings.augment.crop
        run.write_description(
            ModelDescription(settings.backbone, predictions.classes, False, settings.short_side, (crop, crop),
                             settings.input_mean, settings.input_std, class_counts=counts)
        )  # fmt: skip
        scores = evaluate(folder, seed=seed, cost=cost, calibration="temperature").to_json()
    names = ("accuracy", "balanced_accuracy", "macro_f1", "macro_auroc")
    chosen = {name: scores["scores"][name] for name in names}
    return {"scores": chosen, **{name: scores[name] for name in ("intervals", "decisions", "abstention", "sets")}}


def coverage_over_draws(predictions: Predictions, seed: int) -> list[dict[str, Any]]:
    """Mean and spread of the coverage on half of the groups with the thresholds of the other half."""
    halves = list(GroupShuffleSplit(DRAWS, test_size=0.5, random_state=seed).split(
        predictions.probabilities, groups=predictions.groups
    ))  # fmt: skip
    rows = []
    for kind in KINDS:
        scores = scores_of_labels(predictions, kind)
        for level in REPORTED:
            found, sizes = [], []
            for held_out, new in halves:
                inside = sets(predictions.probabilities[new], kind, threshold(scores[held_out], level))
                found.append(inside[np.arange(len(new)), predictions.labels[new]].mean())
                sizes.append(inside.sum(axis=1).mean())
            rows.append({"kind": kind, "level": level, "draws": DRAWS, "coverage": float(np.mean(found)),
                         "sd": float(np.std(found, ddof=1)), "size": float(np.mean(sizes))})  # fmt: skip
    return rows


def distances(kind: str, train: Floats, labels: npt.NDArray[np.intp]) -> Any:
    """A function from features to scores. "used" is the one of cclnet, the others are for comparison."""
    if kind == "used":
        found = fit_statistics(train, labels)
        assert found is not None
        return found.score
    if kind == "full covariance":
        found = fit_statistics(train, labels, rank=train.shape[1] - 1)
        assert found is not None
        return found.score
    unit = train[:1000] / np.linalg.norm(train[:1000], axis=1, keepdims=True)

    def tenth_neighbour(features: Floats) -> Floats:
        own = features / np.linalg.norm(features, axis=1, keepdims=True)
        return np.sort(2 - 2 * own @ unit.T, axis=1)[:, 9]

    return tenth_neighbour


def unlike_images(
    isic: Floats, labels: npt.NDArray[np.intp], classes: tuple[str, ...], lesions: list[str], others: dict[str, Floats],
    seed: int,
) -> dict[str, Any]:  # fmt: skip
    """AUROC of other images against held-out lesions, and the share refused at the threshold for 1% of these."""
    ((train, rest),) = GroupShuffleSplit(1, test_size=0.4, random_state=seed).split(isic, groups=lesions)
    ((first, second),) = GroupShuffleSplit(1, test_size=0.5, random_state=seed).split(
        rest, groups=[lesions[k] for k in rest]
    )
    held_out, new = rest[first], rest[second]
    rows = []
    for kind in ("used", "full covariance", "10th nearest of 1,000"):
        score = distances(kind, isic[train], labels[train])
        limit, inside = float(np.quantile(score(isic[held_out]), 0.99)), score(isic[new])
        rows.append({"score": kind, "against": "new lesions of ISIC 2018", "auroc": None, "images": len(new),
                     "refused": float((inside > limit).mean())})  # fmt: skip
        for name, features in others.items():
            found = score(features)
            rows.append({"score": kind, "against": name, "auroc": auroc(inside, found), "images": len(found),
                         "refused": float((found > limit).mean())})  # fmt: skip
    left_out = []
    for k, name in enumerate(classes):
        known = train[labels[train] != k]
        score = distances("used", isic[known], labels[known])
        inside, outside = score(isic[new[labels[new] != k]]), score(isic[labels == k])
        left_out.append({"class": name, "images": len(outside), "auroc": auroc(inside, outside)})
    images = {"train": len(train), "held_out": len(held_out), "new": len(new)}
    return {"images": images, "rows": rows, "left_out_classes": left_out}


def abstention(seed: int) -> list[dict[str, Any]]:
    """AURC by both kinds of confidence of the kept runs that were split by lesion, mean over seeds."""
    rows = []
    for method in METHODS:
        paths = sorted((ROOT / "results" / "isic2018").glob(f"lesion-resnet18-{method}-seed?.json"))
        found = []
        for path in paths:
            run = open_run(path)
            reported = run.predictions.of_split(run.split)
            own = score_abstention(reported, None, DecisionRule(), units_of(reported), 2, seed)
            found.append([own.aurc["probability"].value, own.aurc["logit_norm"].value, own.aurc_of_choice])
        means = np.mean(np.array(found, float), axis=0).tolist()
        rows.append({"method": method, "seeds": len(found), **dict(zip(AREAS, means, strict=True))})
    return rows


def table(title: str, columns: str, rows: list[str]) -> list[str]:
    """A Markdown table under its title; the first column of ``columns`` ("a | b | c") is text."""
    return [title, "", f"| {columns} |", "|---" + "|--:" * columns.count("|") + "|", *rows, ""]


def markdown(found: dict[str, Any]) -> str:
    """The tables of uncertainty.md."""

    def number(estimate: dict[str, float]) -> str:
        return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"

    lines = table(
        "Decision rules, ISIC 2018, out-of-fold; a malignant lesion called benign costs 10, any other error 1:",
        "rule | accuracy | balanced accuracy | macro F1 | expected cost",
        [
            f"| {row['rule']} | {' | '.join(number(own) for own in row['scores'].values())} |"
            for row in found["isic2018"]["decisions"]["rules"]
        ],
    )
    lines += table(
        "Prediction sets: mean coverage over 200 divisions of the groups in halves (standard deviation), mean size:",
        "data, sets | level | coverage | size",
        [
            f"| {data}, {row['kind'].upper()} | {row['level']:.2f} | {row['coverage']:.3f} ({row['sd']:.3f}) | "
            f"{row['size']:.2f} |"
            for data in ("isic2018", "aptos")
            for row in found[data]["coverage"]
        ],
    )
    lines += table(
        "Unlike images: AUROC against new lesions of ISIC 2018, and the share refused at the threshold for 1%:",
        "score, images of | AUROC | refused",
        [
            f"| {row['score']}, {row['against']} | {'–' if row['auroc'] is None else format(row['auroc'], '.4f')} | "
            f"{row['refused']:.3f} |"
            for row in found["unlike"]["rows"]
        ],
    )
    lines += table(
        "A class of lesions that was left out, against new lesions of the others (the score that is used):",
        "class | images | AUROC",
        [f"| {row['class']} | {row['images']} | {row['auroc']:.3f} |" for row in found["unlike"]["left_out_classes"]],
    )
    lines += table(
        "Area under the risk-coverage curve, kept runs split by lesion (ResNet-18, mean of the seeds, in hundredths):",
        "method | seeds | probability | logit / norm | chosen on other lesions",
        [
            f"| {row['method']} | {row['seeds']} | {' | '.join(f'{100 * row[kind]:.2f}' for kind in AREAS)} |"
            for row in found["abstention"]
        ],
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("isic", "aptos", "brain"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="RUN")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    isic, aptos, brain = (Probed.of(own) for own in (given.isic, given.aptos, given.brain))
    settings = isic.settings
    found: dict[str, Any] = {
        "kind": "uncertainty", "seed": given.seed, "backbone": settings.backbone, "crop": settings.augment.crop,
        "folds": settings.folds, "cost": COSTS, **origin(),
    }  # fmt: skip
    found["versions"] |= package_versions(["scikit-learn", "scipy"])
    for name, own, cost in (("isic2018", isic, COSTS), ("aptos", aptos, None)):
        found[name] = {"model": "cclnet probe", "images": len(own.predictions), **evaluated(own, cost, given.seed)}
        found[name]["coverage"] = coverage_over_draws(own.with_groups(), given.seed)
        print(name, found[name]["scores"]["balanced_accuracy"], flush=True)
    others = {"APTOS 2019": aptos.features, "brain MRI": brain.features, "noise": isic.of_noise()}
    grouped = isic.with_groups()
    assert grouped.groups is not None
    found["unlike"] = unlike_images(
        isic.features, grouped.labels, grouped.classes, grouped.groups.tolist(), others, given.seed
    )
    found["abstention"] = abstention(given.seed)
    (given.out / "uncertainty.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (given.out / "uncertainty.md").write_text(markdown(found), encoding="utf-8")


if __name__ == "__main__":
    main()
