"""The tasks of the study: frozen features, splits that keep lesions together, and label noise that is stated here.

Look-alike noise on ISIC 2018: a share r of the training labels of every class moves to the classes that LOOK_ALIKES
names for it. The pairs are the usual differential diagnoses of dermatoscopy (melanoma, nevus and benign keratosis;
actinic keratosis, basal cell carcinoma and benign keratosis; dermatofibroma and nevus); the weights are round numbers.
They were written down before any matrix was computed from the images, and no method is told them.

Noise on APTOS 2019: to an adjacent grade, both with the same probability.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CLASSES = {
    "isic2018": ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC"),
    "aptos": ("0", "1", "2", "3", "4"),
}
LOOK_ALIKES: dict[str, dict[str, dict[str, float]]] = {
    "isic2018": {
        "MEL": {"NV": 0.7, "BKL": 0.3},
        "NV": {"MEL": 0.6, "BKL": 0.3, "DF": 0.1},
        "BCC": {"AKIEC": 0.5, "BKL": 0.3, "DF": 0.2},
        "AKIEC": {"BCC": 0.4, "BKL": 0.6},
        "BKL": {"MEL": 0.4, "NV": 0.3, "AKIEC": 0.3},
        "DF": {"NV": 0.6, "BCC": 0.2, "MEL": 0.2},
        "VASC": {"MEL": 0.4, "NV": 0.3, "BCC": 0.3},
    },
    "aptos": {
        "0": {"1": 1.0},
        "1": {"0": 0.5, "2": 0.5},
        "2": {"1": 0.5, "3": 0.5},
        "3": {"2": 0.5, "4": 0.5},
        "4": {"3": 1.0},
    },
}
TEST_SHARE, TEST_SEED = 0.25, 12345  # the reported test split: a quarter of the groups, the same for every seed
COMPONENTS = 128  # principal components of the features that the heads see
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Features:
    """Frozen features of all images of a data set."""

    name: str
    images: npt.NDArray[np.str_]  # [N]
    features: Floats  # [N, F]
    labels: Integers  # [N]
    groups: Integers  # lesion, or set of identical images, [N]

    @property
    def classes(self) -> tuple[str, ...]:
        return CLASSES[self.name]


@dataclass(frozen=True)
class Task:
    """Training images with their (noisy) labels, and test images with true labels."""

    train: Tensor  # [N, COMPONENTS]
    given: Tensor  # labels as given, [N]
    true: Tensor  # labels before noise, [N]
    train_groups: Integers
    test: Tensor
    test_labels: Integers
    test_groups: Integers
    test_images: npt.NDArray[np.str_]
    noise: Tensor  # the matrix the labels were drawn from, [K, K]: known to the oracle alone
    project: Callable[[Floats], Tensor]  # features to the components that the heads see

    @property
    def num_classes(self) -> int:
        return len(self.noise)

    @property
    def counts(self) -> list[int]:
        return torch.bincount(self.given, minlength=self.num_classes).tolist()


def read_features(name: str, features: Path, tables: Path) -> Features:
    """Features from an .npz (names, features) and labels from the CSV files of the data set."""
    with np.load(features, allow_pickle=False) as file:
        rows = {str(image): row for row, image in enumerate(file["names"])}
        values = file["features"].astype(np.float32)
    images, labels, groups = read_labels(name, tables)
    values = values[[rows[image] for image in images]]
    if name == "aptos":  # patients are unknown; identical images have identical features
        groups = np.unique(values, axis=0, return_inverse=True)[1].ravel().astype(np.int64)
    return Features(name, images, values, labels, groups)


def read_labels(name: str, tables: Path) -> tuple[npt.NDArray[np.str_], Integers, Integers]:
    """Names of the images in order, labels, and lesions (APTOS: one group per image)."""
    if name == "isic2018":
        lesions = _rows(tables, "ISIC2018_Task3_Training_LesionGroupings.csv")
        lesion = {row["image"]: row["lesion_id"] for row in lesions}
        truth = sorted(_rows(tables, "ISIC2018_Task3_Training_GroundTruth.csv"), key=lambda row: row["image"])
        labels = [next(k for k, c in enumerate(CLASSES[name]) if float(row[c])) for row in truth]
        groups = np.unique([lesion[row["image"]] for row in truth], return_inverse=True)[1]
        return np.array([row["image"] for row in truth]), np.array(labels, np.int64), groups.astype(np.int64)
    graded = sorted(_rows(tables, "train.csv"), key=lambda row: row["id_code"])
    labels = [int(row["diagnosis"]) for row in graded]
    return np.array([row["id_code"] for row in graded]), np.array(labels, np.int64), np.arange(len(graded))


def _rows(folder: Path, name: str) -> list[dict[str, str]]:
    with next(iter(sorted(folder.rglob(name)))).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def noise_matrix(name: str, rate: float) -> npt.NDArray[np.float64]:
    """[K, K], row k the probabilities of the labels that an image of class k gets.

    >>> noise_matrix("aptos", 0.4)[1].tolist()
    [0.2, 0.6, 0.2, 0.0, 0.0]
    """
    classes = CLASSES[name]
    matrix = np.eye(len(classes)) * (1.0 - rate)
    for k, own in enumerate(classes):
        for other, share in LOOK_ALIKES[name][own].items():
            matrix[k, classes.index(other)] += rate * share
    return matrix


def make_task(data: Features, rate: float, per_class: int | None, seed: int, tuning: bool) -> Task:
    """The task of a seed. Tuning never sees an image of the reported test split: it divides the training groups
    again."""
    held_out = chosen_groups(data.groups)[data.groups]
    train, test = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    if tuning:
        inner = chosen_groups(data.groups, seed)[data.groups[train]]
        train, test = train[~inner], train[inner]
    rng = np.random.default_rng((seed, round(100 * rate), per_class or 0))
    if per_class is not None:
        of_class = [rng.permutation(train[data.labels[train] == k])[:per_class] for k in range(len(data.classes))]
        train = np.concatenate(of_class)
    matrix = noise_matrix(data.name, rate)
    given = [rng.choice(len(matrix), p=matrix[k]) for k in data.labels[train]]
    project = _principal_components(data, train)
    return Task(
        project(data.features[train]),
        torch.tensor(np.array(given, np.int64)),
        torch.tensor(data.labels[train]),
        data.groups[train],
        project(data.features[test]),
        data.labels[test],
        data.groups[test],
        data.images[test],
        torch.tensor(matrix),
        project,
    )


def chosen_groups(groups: Integers, seed: int = TEST_SEED) -> npt.NDArray[np.bool_]:
    """Which groups are held out, by number."""
    count = int(groups.max()) + 1
    return np.random.default_rng(seed).permutation(count) < round(TEST_SHARE * count)


_PROJECTIONS: dict[tuple[bytes, bytes], Callable[[Floats], Tensor]] = {}  # by first features and training rows


def _principal_components(data: Features, train: Integers) -> Callable[[Floats], Tensor]:
    """Projection on the leading components of the training features, scaled to a mean variance of one."""
    key = data.features[0].tobytes(), train.tobytes()
    if key not in _PROJECTIONS:
        features = data.features[train]
        mean = features.mean(axis=0)
        variances, axes = np.linalg.eigh(np.cov(features - mean, rowvar=False))
        leading, scale = axes[:, ::-1][:, :COMPONENTS], np.sqrt(variances[-COMPONENTS:].mean())
        _PROJECTIONS[key] = lambda own: torch.tensor((own - mean) @ leading / scale, dtype=torch.float32)
    return _PROJECTIONS[key]
