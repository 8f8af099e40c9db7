"""Is an exported model the model? Held against PyTorch on images of every kind, one at a time and many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cclnet.deploy.shipped import Shipped
from cclnet.errors import InputError

Pixels = npt.NDArray[np.uint8]
Run = Callable[[Pixels], Sequence[npt.NDArray[Any]]]

LARGEST = 1e-4  # difference in probability that is allowed
LARGEST_OF_MAP = 1e-3  # of the largest value of a map


@dataclass(frozen=True)
class Agreement:
    """The largest difference in probability, and in maps relative to their largest value, over so many images."""

    images: int
    batches: tuple[int, ...]
    probability: float
    map: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_images(crop: tuple[int, int], count: int = 8) -> Pixels:
    """Images unlike each other: black, white, noise, blobs of several colours and contrasts, [count, h, w, 3]."""
    generator = np.random.default_rng(0)
    height, width = crop
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    images = np.zeros((count, height, width, 3))
    images[1] = 255
    images[2] = generator.integers(0, 256, (height, width, 3))
    for image in images[3:]:
        at, size = generator.uniform(0.2, 0.8, 2), generator.uniform(0.05, 0.3)
        blob = np.exp(-((y - at[0]) ** 2 + (x - at[1]) ** 2) / size**2)[..., None]
        image[:] = generator.uniform(0, 255, 3) * (1 - blob) + generator.uniform(0, 255, 3) * blob
    return np.rint(images).astype(np.uint8)


def check(shipped: Shipped, images: Pixels, run: Run, what: str) -> Agreement:
    """Hold the outputs of ``run`` (probabilities, and maps where there are any) against the network in PyTorch; refuse
    a difference."""
    batches = (images[:1], images)
    worst, worst_map = 0.0, 0.0
    for batch in batches:
        with torch.no_grad():
            expected = [output.numpy() for output in shipped(torch.from_numpy(batch))]
        given = run(batch)
        if len(given) != len(expected):
            raise InputError(f"{what} has {len(given)} outputs instead of {len(expected)}. It was not kept.")
        worst = max(worst, _largest(given[0], expected[0]))
        if shipped.maps:
            scale = max(float(np.abs(expected[1]).max()), 1e-12)
            worst_map = max(worst_map, _largest(given[1], expected[1]) / scale)
    if not worst <= LARGEST or not worst_map <= LARGEST_OF_MAP:
        raise InputError(
            f"{what} differs from PyTorch by {worst:.2g} in probability (at most {LARGEST:g} is allowed) and by "
            f"{worst_map:.2g} of the largest value in its maps (at most {LARGEST_OF_MAP:g}). It was not kept."
        )
    return Agreement(len(images), tuple(map(len, batches)), worst, worst_map if shipped.maps else None)


def _largest(given: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """The largest difference; infinite where shapes differ or something is not finite."""
    if given.shape != expected.shape or not np.isfinite(given).all():
        return float("inf")
    return float(np.abs(given.astype(np.float64) - expected).max())
