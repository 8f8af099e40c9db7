"""Synthetic skin lesions whose classes have a known visual similarity.

Every class has a position in appearance space (``rendering.AXES``), and its lesions are distributed around it. The
distance between two positions defines the similarity of two classes, the ground truth against which learned soft
labels are checked; no set of real images has one. The classes are letters and stand for no diagnosis.

There are close pairs, clusters and distant pairs. The similarity is independent of the order of the classes and, with
the imbalance of ISIC 2018, of class frequency, so a method cannot recover it by counting images.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from cclnet.data.synthetic.rendering import AXES, FINEST, LESION, VIEW, Floats, random_row, render
from cclnet.data.table import ImageTable
from cclnet.errors import InputError, unknown

SOURCE = "synthetic lesions with known similarity"
OVERLAPS = {"little": 0.08, "much": 0.20}
ISIC2018_COUNTS = (1113, 6705, 514, 327, 1099, 115, 142)
MAX_CLASSES = 100
SIMILARITY_WIDTH = 0.4


@dataclass(frozen=True)
class SyntheticSettings:
    """Settings of the synthetic set.

    Attributes:
        images: number of images.
        classes: number of classes, 2 to 100.
        size: height and width in pixels, 16 to 512. The same lesions are rendered at any size.
        overlap: "little" (0.08), "much" (0.2), or the standard deviation of the lesions of a class around its
            position, on axes from 0 to 1.
        imbalance: False for equal classes, "isic2018" (or True) for the class ratios of ISIC 2018, or one number per
            class: its share of the images.
        images_per_group: maximum number of photographs of one lesion. About two thirds of the lesions have one.
        seed: seed of the lesions; the class positions do not depend on it.
    """

    images: int = 2400
    classes: int = 7
    size: int = 64
    overlap: str | float = "little"
    imbalance: bool | str | Sequence[float] = False
    images_per_group: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "classes": (2, MAX_CLASSES),
            "images": (1, None),
            "size": (16, 512),
            "images_per_group": (1, 100),
            "seed": (0, 2**32 - 1),
        }
        problems = [outside(name, getattr(self, name), *limits) for name, limits in ranges.items()]
        if problem := " ".join(filter(None, problems)):
            raise InputError(f"synthetic images: {problem}")
        if not 0 <= self.spread <= 1:
            raise _overlap_error(self.overlap)
        self.class_counts()

    @property
    def spread(self) -> float:
        """The overlap as a standard deviation."""
        if isinstance(self.overlap, str):
            if self.overlap not in OVERLAPS:
                raise unknown("overlap", self.overlap, OVERLAPS)
            return OVERLAPS[self.overlap]
        if not isinstance(self.overlap, Real) or isinstance(self.overlap, bool):
            raise _overlap_error(self.overlap)
        return float(self.overlap)

    def class_counts(self) -> npt.NDArray[np.int64]:
        """Return the images of each class, [K]: shares rounded by largest remainder, so that they sum to ``images``.

        >>> SyntheticSettings(images=1000, imbalance="isic2018").class_counts().tolist()
        [111, 670, 51, 33, 110, 11, 14]
        """
        shares = self._shares() * self.images
        counts = np.floor(shares + 1e-9).astype(np.int64)
        largest_remainders = np.argsort(counts - shares, kind="stable")[: self.images - counts.sum()]
        counts[largest_remainders] += 1
        if not counts.all():
            raise InputError(
                f"{self.images} images leave class {class_names(self.classes)[int(counts.argmin())]} without any. "
                "Increase images or reduce the imbalance."
            )
        return counts

    def _shares(self) -> npt.NDArray[np.float64]:
        """Return the share of each class, [K], sum 1."""
        given = self.imbalance
        if isinstance(given, str) and given != "isic2018":
            raise unknown("imbalance", given, ["isic2018"])
        if given is False:
            given = [1] * self.classes
        elif given is True or isinstance(given, str):
            given = ISIC2018_COUNTS
        try:
            shares = np.asarray(given, np.float64)
            fits = shares.shape == (self.classes,) and bool(np.isfinite(shares).all() and (shares > 0).all())
        except (TypeError, ValueError):  # not numbers
            fits = False
        if not fits:
            raise InputError(
                f"imbalance must give each of the {self.classes} classes a share above 0, got {given!r}. "
                "Give one number per class, or set classes to their number."
            )
        return shares / shares.sum()


def outside(name: str, value: Any, low: int, high: int | None) -> str | None:
    """Return what is wrong with an integer, or None."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if is_integer and value >= low and (high is None or value <= high):
        return None
    limits = f"from {low} to {high}" if high is not None else f"of {low} or more"
    return f"{name} must be an integer {limits}, got {value!r}."


def _overlap_error(value: object) -> InputError:
    return InputError(f"overlap must be {', '.join(OVERLAPS)} or a number from 0 to 1, got {value!r}.")


def class_names(num_classes: int) -> tuple[str, ...]:
    """Return letters: A to Z, then AA, AB and so on.

    >>> class_names(28)[-3:]
    ('Z', 'AA', 'AB')
    """
    letters = [chr(ord("A") + i) for i in range(26)]
    return tuple(letters[i] if i < 26 else letters[i // 26 - 1] + letters[i % 26] for i in range(num_classes))


def class_positions(num_classes: int) -> npt.NDArray[np.float64]:
    """Return the class positions in appearance space, [K, 6], each axis from 0.1 to 0.9.

    The R sequence (multiples of the powers of 1/g, g⁷ = g + 1) fills the space evenly. From the fourth on, every other
    class is then moved close to an earlier one, which makes clusters. The position of a class does not depend on K. The
    start of the sequence was chosen so that for seven classes the similarity is uncorrelated with the order of the
    classes and with the class counts of ISIC 2018.
    """
    golden = 1.0
    for _ in range(64):
        golden = (1 + golden) ** (1 / (len(AXES) + 1))
    steps = golden ** -np.arange(1.0, len(AXES) + 1)
    positions = 0.1 + 0.8 * ((0.57 + np.outer(np.arange(1, num_classes + 1), steps)) % 1)
    for k in range(3, num_classes, 2):
        positions[k] = positions[k // 3] + 0.35 * (positions[k] - positions[k // 3])
    return positions


def known_similarity(num_classes: int = 7) -> npt.NDArray[np.float64]:
    """Return the true similarity of the classes, ``exp(−|a_i − a_j|² / 2w²)`` of their positions, w = 0.4, [K, K].

    It is symmetric, 1 on the diagonal and below 1 elsewhere. Compare by rank only.

    >>> known_similarity(3).round(2)
    array([[1.  , 0.1 , 0.22],
           [0.1 , 1.  , 0.03],
           [0.22, 0.03, 1.  ]])
    """
    if problem := outside("num_classes", num_classes, 2, MAX_CLASSES):
        raise InputError(f"known similarity: {problem}")
    positions = class_positions(num_classes)
    squared = ((positions[:, None] - positions[None, :]) ** 2).sum(axis=2)
    return np.exp(-squared / (2 * SIMILARITY_WIDTH**2))


class _Photograph(NamedTuple):
    """The parameters of one image."""

    name: str
    group: str
    label: int
    latent: Floats
    lesion: Floats
    view: Floats


def _photographs(settings: SyntheticSettings) -> Iterator[_Photograph]:
    """Yield the images of each class in turn. Every lesion and view has its own generator, so an image depends only on
    seed, overlap, class and number."""
    names, positions = class_names(settings.classes), class_positions(settings.classes)
    # As in the real set, each further photograph of a lesion is about a third as frequent.
    frequency = np.cumsum(3.0 ** -np.arange(settings.images_per_group))
    for label, count in enumerate(settings.class_counts().tolist()):
        lesion, taken = 0, 0
        while taken < count:
            generator = np.random.default_rng((settings.seed, label, lesion))
            latent = positions[label] + settings.spread * generator.standard_normal(len(AXES))
            latent = latent.clip(0, 1).astype(np.float32)
            own = random_row(LESION, generator)
            photographs = 1 + int(np.searchsorted(frequency, generator.random() * frequency[-1]))
            group = f"{names[label]}{lesion:05d}"
            for view in range(1, min(photographs, count - taken) + 1):
                seen = random_row(VIEW, np.random.default_rng((settings.seed, label, lesion, view)))
                yield _Photograph(f"{group}_{view}", group, label, latent, own, seen)
                taken += 1
            lesion += 1


def render_all(
    function: Callable[..., npt.NDArray[np.uint8]],
    parameters: Sequence[tuple[Any, ...]],
    size: int,
    workers: int | None,
) -> npt.NDArray[np.uint8]:
    """Call a rendering function on batches of parameter tuples, one per image, in parallel threads, [N, S, S, 3]."""
    images = np.empty((len(parameters), size, size, 3), np.uint8)
    batch = math.ceil(2**16 / max(size, FINEST) ** 2)  # small, so that the planes stay in the processor's cache

    def fill(start: int) -> None:
        columns = zip(*parameters[start : start + batch], strict=True)
        images[start : start + batch] = function(*(np.stack(column) for column in columns), size)

    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        list(pool.map(fill, range(0, len(parameters), batch)))
    return images


def synthetic(settings: SyntheticSettings | None = None, workers: int | None = None) -> ImageTable:
    """Generate the set: images uint8 [N, S, S, 3], class by class, with lesions as groups and the appearance as extra
    columns. The bytes do not depend on the number of threads, ``workers`` (default: one per core).

    >>> synthetic(SyntheticSettings(images=14)).class_counts().tolist()
    [2, 2, 2, 2, 2, 2, 2]
    """
    settings = settings or SyntheticSettings()
    shots = list(_photographs(settings))
    return ImageTable(
        source=SOURCE,
        root=Path("synthetic"),
        names=[s.name for s in shots],
        images=render_all(render, [s[3:] for s in shots], settings.size, workers),
        labels=np.array([s.label for s in shots], np.int64),
        classes=class_names(settings.classes),
        groups=np.array([s.group for s in shots]),
        extra=pd.DataFrame(np.stack([s.latent for s in shots]), columns=list(AXES)),
    )
