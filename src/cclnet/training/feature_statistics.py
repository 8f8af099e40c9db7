"""Feature statistics of a finished network, by which images unlike those of the training are recognised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cclnet.data.augment import normalise
from cclnet.network import Classifier
from cclnet.runs.out_of_distribution import FeatureStatistics, auroc, fit_statistics

MAX_IMAGES = 4096  # of the training split, and of the others
NOISE_IMAGES = 32
Rows = npt.NDArray[np.integer[Any]]
Features = Callable[[Rows], npt.NDArray[np.floating[Any]]]  # of rows of the data, [n, F]


def statistics_of(
    train: Rows,
    held_out: Rows,
    labels: npt.NDArray[np.integer[Any]],
    features: Features,
    of_noise: Callable[[], npt.NDArray[np.floating[Any]]],
    seed: int = 0,
) -> FeatureStatistics | None:
    """The statistics of some rows of the training split, with the scores of some held-out rows and of noise images."""
    rng = np.random.default_rng((seed, 3))
    rows, others = (np.sort(rng.permutation(own)[:MAX_IMAGES]) for own in (train, held_out))
    found = fit_statistics(features(rows), None if labels.ndim == 2 else labels[rows])
    if found is None or not len(others):
        return None
    scores = np.sort(found.score(features(others)))
    return replace(found, held_out=scores, noise_auroc=auroc(scores, found.score(of_noise())))


@torch.no_grad()
def noise_features(classifier: Classifier, crop: int, mean: Tensor, std: Tensor) -> npt.NDArray[np.float64]:
    """The pooled features of noise images with a side of ``crop``, [n, F]."""
    noise = normalise(torch.from_numpy(noise_images(crop, crop)).to(mean.device), mean, std)
    return classifier.eval().features(noise.to(mean.dtype)).double().cpu().numpy()


def noise_images(height: int, width: int, count: int = NOISE_IMAGES) -> npt.NDArray[np.uint8]:
    """Images of nothing, uint8 [count, h, w, 3]: in turn white noise, smooth noise, one colour, and stripes."""
    rng, images = np.random.default_rng(0), np.zeros((count, height, width, 3))
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    for i, image in enumerate(images):
        colours = rng.uniform(0, 255, (2, 3))
        if i % 4 == 0:
            image[:] = rng.integers(0, 256, image.shape)
        elif i % 4 == 1:
            waves = sum(np.sin(2 * np.pi * (a * x + b * y + c)) for a, b, c in rng.uniform(-4, 4, (6, 3)))
            share = 0.5 + np.asarray(waves)[..., None] / 12
            image[:] = share * colours[0] + (1 - share) * colours[1]
        elif i % 4 == 2:
            image[:] = colours[0]
        else:
            angle, frequency = rng.uniform(0, np.pi), rng.uniform(4, 20)
            stripe = np.sin(2 * np.pi * frequency * (np.cos(angle) * x + np.sin(angle) * y)) > 0
            image[:] = np.where(stripe[..., None], *colours)
    return np.rint(images).astype(np.uint8)
