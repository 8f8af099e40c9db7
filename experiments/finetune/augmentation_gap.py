"""How far training crops are from test crops in the features of a pretrained backbone, for several augmentations.

    python experiments/finetune/augmentation_gap.py ISIC2018 --weights tf_efficientnet_lite0.safetensors

Fine-tuning lost accuracy with rotation by any angle and with resized crops. Here the backbone stays as it is: features
of augmented training crops, a logistic regression on them, and its scores on plain central crops. ``gap`` is the mean
over the features of |mean of the test crops − mean of the training crops| in standard deviations of the training crops:
what batch norm, which is fitted on training crops, sees as a shift at test. ``kept`` is the accuracy of the regression
on plain crops where the test crops are augmented, too: what a crop shows of the class. The parts of a resized crop
(area, aspect ratio) are measured by themselves, and the regressions at several scales of the test images. Images of
fold 0 (by lesion) are not used. Writes results/finetune/augmentation.json and .md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torchvision.transforms.v2.functional as tv
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torchvision.transforms import InterpolationMode

from cclnet.data.augment import augment, matching_short_side, normalise
from cclnet.data.cache import decode
from cclnet.data.loader import Loader
from cclnet.data.sources import open_data
from cclnet.data.split import make_split
from cclnet.files import make_folder, write_json, write_whole
from cclnet.runs.provenance import origin
from cclnet.settings import AugmentSettings, SplitSettings
from cclnet.training.setup import read_weights

BACKBONE = "tf_efficientnet_lite0"
CROP, SHORT_SIDE, BATCH = 112, 128, 64
MEAN = STD = torch.full((3,), 0.5)
REGULARISATION = 0.003  # C of the logistic regression
AREA = CROP**2 / (SHORT_SIDE**2 * 4 / 3)  # of a plain crop, as a share of an image of 4:3
TEST_SIDES = (112, 120, 128, 136, 144, 160)  # short sides of the test images
RESIZED = "resized_crop [0.4, 1]"
ZEROS = "rotation 180 of the image, zeros outside"
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {},
    ZEROS: {},
    "rotation 180 of the crop, mirrored": {"rotation": 180.0},
    RESIZED: {"resized_crop": (0.4, 1.0)},
    "its area alone: ratio 1": {"resized_crop": (0.4, 1.0), "resized_ratio": (1.0, 1.0)},
    "its ratio alone: area as without": {"resized_crop": (AREA, AREA)},
    "zoom [0.8, 1.25]": {"zoom": (0.8, 1.25)},
}


def rotated_with_zeros(image: np.ndarray, generator: np.random.Generator) -> Tensor:
    """A random crop of the image after a rotation of the whole image, filled with zeros: as before."""
    whole = torch.from_numpy(image.copy()).permute(2, 0, 1)
    turned = tv.rotate(whole, float(generator.uniform(-180, 180)), interpolation=InterpolationMode.BILINEAR)
    top, left = (int(generator.integers(0, side - CROP + 1)) for side in image.shape[:2])
    crop = turned[:, top : top + CROP, left : left + CROP]
    crop = crop.flip(-1) if generator.random() < 0.5 else crop
    crop = crop.flip(-2) if generator.random() < 0.5 else crop
    return tv.normalize(crop.float() / 255, MEAN.tolist(), STD.tolist())


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--train", type=int, default=1200, help="training images")
    parser.add_argument("--test", type=int, default=1500, help="test images")
    parser.add_argument("--results", type=Path, default=Path("results/finetune"))
    options = parser.parse_args(words)
    table = open_data(options.data)
    outer = make_split(table, SplitSettings(by="group", folds=5, fold=0))
    table = table.select(np.flatnonzero(outer == "train"))
    inner = make_split(table, SplitSettings(by="group", val=0.5))
    generator = np.random.default_rng(0)
    chosen = [generator.permutation(np.flatnonzero(inner == split)) for split in ("train", "val")]
    train, test = np.sort(chosen[0][: options.train]), np.sort(chosen[1][: options.test])
    table = table.select(np.concatenate((train, test)))
    train, test = np.arange(len(train)), np.arange(len(train), len(table))
    images, features = decode(table, SHORT_SIDE), backbone_features(options.weights)

    def crops(name: str, rows: np.ndarray) -> np.ndarray:
        """Features of the crops of a variant."""
        settings, found = augmentation(name), []
        for batch in Loader(images, table.labels, rows, batch_size=BATCH, augment=settings).epoch():
            order.append(batch.rows)
            if name == ZEROS:
                inputs = torch.stack([rotated_with_zeros(images.image(row), generator) for row in batch.rows])
            else:
                assert batch.parameters is not None
                inputs = augment(batch.crops, batch.parameters, settings, MEAN, STD)
            found.append(features(inputs))
        return np.concatenate(found)

    def central(side: int) -> np.ndarray:
        """Features of the central crops of the test images with a short side."""
        loader = Loader(decode(table, side), table.labels, test, batch_size=BATCH, crop=CROP)
        return np.concatenate([features(normalise(batch.crops, MEAN, STD)) for batch in loader.epoch()])

    plain = {side: central(side) for side in TEST_SIDES}
    rows, scales, first = [], {}, None
    for name in VARIANTS:
        order: list[np.ndarray] = []
        own = crops(name, train)
        fitted = Regression(own, table.labels[np.concatenate(order)])
        first, order = first or fitted, []
        shown = crops(name, test)
        side = matching_short_side(augmentation(name), SHORT_SIDE, images.heights[train], images.widths[train])
        kept = first.scores(shown, table.labels[np.concatenate(order)])["accuracy"]
        found = fitted.scores(plain[SHORT_SIDE], table.labels[test])
        rows.append({"augmentation": name, "matching_short_side": side, **found, "kept": kept})
        if name in ("none", RESIZED):
            scales[name] = {side: fitted.scores(plain[side], table.labels[test]) for side in TEST_SIDES}
        print(rows[-1], flush=True)
    write(options.results, rows, scales, options)


def augmentation(name: str) -> AugmentSettings:
    changes: dict[str, Any] = VARIANTS[name]
    return AugmentSettings(crop=CROP, brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0, **changes)


def backbone_features(weights: Path) -> Callable[[Tensor], np.ndarray]:
    model = timm.create_model(BACKBONE, num_classes=0)
    model.load_state_dict({name: value.float() for name, value in read_weights(weights).items()}, strict=False)
    model = model.eval().to(memory_format=torch.channels_last)

    @torch.no_grad()
    def features(inputs: Tensor) -> np.ndarray:
        return model(inputs).numpy()

    return features


class Regression:
    """A logistic regression on standardised features."""

    def __init__(self, features: np.ndarray, labels: np.ndarray) -> None:
        self.scaler = StandardScaler().fit(features)
        self.classifier = LogisticRegression(C=REGULARISATION, max_iter=300)
        self.classifier.fit(self.scaler.transform(features), labels)

    def scores(self, features: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        standard, classes = self.scaler.transform(features), self.classifier.classes_
        probabilities = self.classifier.predict_proba(standard)
        of_class = {int(label): column for column, label in enumerate(classes)}
        own = [probabilities[row, of_class[int(label)]] for row, label in enumerate(labels)]
        return {
            "gap": round(float(np.abs(standard.mean(axis=0)).mean()), 4),
            "accuracy": round(float((classes[probabilities.argmax(1)] == labels).mean()), 4),
            "log_loss": round(float(-np.log(own).mean()), 4),
        }


def write(folder: Path, rows: list[dict[str, Any]], scales: dict[str, Any], options: argparse.Namespace) -> None:
    make_folder(folder)
    facts = {"backbone": BACKBONE, "crop": CROP, "short_side": SHORT_SIDE, "train": options.train,
             "test": options.test, "seed": 0}  # fmt: skip
    write_json(folder / "augmentation.json", {**facts, "rows": rows, "test_short_sides": scales, **origin()})
    lines = ["| augmentation of the training crops | gap | accuracy | log loss | kept |", "|---|--:|--:|--:|--:|"]
    lines += [
        f"| {row['augmentation']} | {row['gap']:.3f} | {row['accuracy']:.3f} | {row['log_loss']:.3f} | "
        f"{row['kept']:.3f} |"
        for row in rows
    ]
    lines += ["", f"Log loss by the short side of the test images (crop {CROP}; training images {SHORT_SIDE}):", ""]
    lines += ["| augmentation | " + " | ".join(map(str, TEST_SIDES)) + " |", "|---" + "|--:" * len(TEST_SIDES) + "|"]
    lines += [
        f"| {name} | " + " | ".join(f"{own[side]['log_loss']:.3f}" for side in TEST_SIDES) + " |"
        for name, own in scales.items()
    ]
    write_whole(folder / "augmentation.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
