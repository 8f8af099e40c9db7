"""How far the features of an image are from those of the training images: features.safetensors.

The score is the Mahalanobis distance of the L2-normalised features x to the nearest class mean, with one covariance for
all classes (Mueller and Hein, Mahalanobis++, 2025; without the normalisation, images of nothing, such as one colour,
are near the mean). Of the covariance only the RANK directions V with the largest variances v are kept; all others get
the mean ρ of theirs:

``d²(x) = min_k Σ_j (V_jᵀ (x − μ_k))² / v_j + (|x − μ_k|² − |Vᵀ (x − μ_k)|²) / ρ``

So the file is small (400 kB for 1,280 features), and a few hundred images suffice. It also has the scores of held-out
images of the same data, from which the threshold to refuse images comes.

It is written here because pytorch-ood computes such scores in torch only, and an exported model runs without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cclnet.errors import InputError
from cclnet.files import Writer, write_whole
from cclnet.runs.checksums import check_file

Floats = npt.NDArray[np.floating[Any]]
RANK = 64
LEAST_IMAGES = 8  # to estimate a covariance from
MAX_BYTES = 2**30
REFUSED = 0.01  # share of held-out images that is refused by default


@dataclass(frozen=True)
class FeatureStatistics:
    """Statistics of the features [F] of a network on its training images, and scores of held-out images."""

    means: Floats  # [M, F], of the classes; with several labels one mean of all images
    basis: Floats  # [F, r], orthonormal columns
    variances: Floats  # [r]
    rest: float  # mean variance in the other directions
    held_out: Floats  # scores of held-out images, rising, [n]
    noise_auroc: float | None = None  # how well the score separates generated noise from held-out images

    def score(self, features: Floats) -> npt.NDArray[np.float64]:
        """The score of each image, [N] from [N, F]."""
        nearest, normalised = np.full(len(features), np.inf), normalise(features)
        for mean in self.means.astype(np.float64):
            centred = normalised - mean
            inside = centred @ self.basis.astype(np.float64)
            outside = np.maximum((centred**2).sum(axis=1) - (inside**2).sum(axis=1), 0.0)
            nearest = np.minimum(nearest, (inside**2 / self.variances).sum(axis=1) + outside / self.rest)
        return np.sqrt(nearest)

    def threshold(self, share: float = REFUSED) -> float:
        """The score above which an image is refused, so that of images like the held-out ones at most ``share`` are;
        infinite where there are too few of them."""
        if not 0 < share < 1:
            raise InputError(f"the share of images to refuse is above 0 and below 1, got {share:g}.")
        rank = math.ceil((len(self.held_out) + 1) * (1 - share) - 1e-9)
        return math.inf if rank > len(self.held_out) else float(self.held_out[rank - 1])


def normalise(features: Floats) -> npt.NDArray[np.float64]:
    """Features [N, F] divided by their L2 norm."""
    values = features.astype(np.float64)
    return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)


def fit_statistics(
    features: Floats, labels: npt.NDArray[np.integer[Any]] | None, rank: int = RANK
) -> FeatureStatistics | None:
    """The statistics of training features [N, F] with class indices [N] (None: one mean), without held-out scores; None
    where there are too few images or they are all equal.

    >>> points = np.random.default_rng(0).normal(size=(500, 3)) + [9.0, 0, 0]
    >>> found = fit_statistics(points, None, rank=2)
    >>> near, far = found.score(np.array([[9.0, 0, 0], [0, 9.0, 0]]))
    >>> bool(far > 5 * near)
    True
    """
    values = normalise(features)
    if len(values) < LEAST_IMAGES:
        return None
    index = np.zeros(len(values), np.intp) if labels is None else np.unique(labels, return_inverse=True)[1]
    means = np.stack([values[index == k].mean(axis=0) for k in range(index.max() + 1)])
    centred = values - means[index]
    variances, directions = np.linalg.eigh(centred.T @ centred / len(centred))
    variances, directions = variances[::-1], directions[:, ::-1]
    total = float(variances.sum())
    if not total > 0:
        return None
    rank = min(rank, values.shape[1] - 1, len(values) // 4)
    # No direction counts as without any variance: a rounding error there would be an infinite distance.
    least = 1e-6 * total / len(variances)
    rest = max(float(variances[rank:].mean()), least)
    kept = np.maximum(variances[:rank], least)
    means, basis, kept = (array.astype(np.float32) for array in (means, directions[:, :rank], kept))
    return FeatureStatistics(means, basis, kept, rest, np.empty(0, np.float32))


def auroc(inside: Floats, outside: Floats) -> float:
    """The probability that a score of ``outside`` is above one of ``inside``, ties counting half.

    >>> auroc(np.array([1.0, 2.0]), np.array([2.0, 3.0]))
    0.875
    """
    ordered = np.sort(inside)
    below, upto = (np.searchsorted(ordered, outside, side=side) for side in ("left", "right"))
    return float((below + upto).mean() / (2 * len(ordered)))


def write_statistics(path: Path, found: FeatureStatistics, write: Writer = write_whole) -> None:
    from safetensors.numpy import save

    arrays = {name: np.ascontiguousarray(getattr(found, name), np.float32) for name in _ARRAYS}
    arrays["rest"] = np.array([found.rest], np.float32)
    arrays["noise_auroc"] = np.array([math.nan if found.noise_auroc is None else found.noise_auroc], np.float32)
    write(path, save(arrays))


_ARRAYS = {"means": 2, "basis": 2, "variances": 1, "held_out": 1}  # number of dimensions


def read_statistics(path: Path) -> FeatureStatistics:
    """Read and check a features.safetensors; it holds numbers only."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    check_file(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path} is refused: it is larger than {MAX_BYTES >> 20} MiB.")
        found = load(path.read_bytes())
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is refused: it is not a whole .safetensors file ({error}).") from error
    wrong = [name for name, dimensions in _ARRAYS.items() if name not in found or found[name].ndim != dimensions]
    wrong += [name for name in ("rest", "noise_auroc") if name not in found or found[name].shape != (1,)]
    if not wrong:
        width, rank = found["basis"].shape
        shapes = found["means"].shape[1:] == (width,) and found["variances"].shape == (rank,) and len(found["means"])
        numbers = all(np.isfinite(found[name]).all() for name in (*_ARRAYS, "rest"))
        positive = (found["variances"] > 0).all() and found["rest"][0] > 0 and (np.diff(found["held_out"]) >= 0).all()
        wrong = [] if shapes and numbers and positive else ["its numbers"]
    if wrong:
        raise InputError(f"{path} is refused: {', '.join(wrong)} are not those of feature statistics.")
    noise = float(found["noise_auroc"][0])
    means, basis, variances = (found[name] for name in ("means", "basis", "variances"))
    rest, known = float(found["rest"][0]), None if math.isnan(noise) else noise
    return FeatureStatistics(means, basis, variances, rest, found["held_out"], known)
