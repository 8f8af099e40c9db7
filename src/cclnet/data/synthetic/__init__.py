"""Synthetic skin lesions whose classes have a known visual similarity: one class per image, or several.

Every class has a position in appearance space (``rendering.AXES``), and its lesions are distributed around it. The
distance between two positions defines the similarity of two classes, the ground truth against which learned soft
labels are checked. It is independent of the order of the classes and, with the imbalance of ISIC 2018, of class
frequency, so a method cannot recover it by counting images. The classes are letters and stand for no diagnosis.

An image of the multi-label set shows lesions of no, one or several classes. Their co-occurrence is known as well, and
has almost no rank correlation with the similarity: a method that mistakes one for the other is detected.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import spearmanr

from cclnet.data.synthetic import rendering
from cclnet.data.synthetic.rendering import AXES, LESION, SPOT, VIEW, Floats, Marks, random_row
from cclnet.data.table import ImageTable
from cclnet.errors import InputError, unknown

SOURCE = "synthetic lesions with known similarity"
MULTILABEL_SOURCE = "synthetic multi-label lesions with known similarity"
OVERLAPS = {"little": 0.08, "much": 0.20}
ISIC2018_COUNTS = (1113, 6705, 514, 327, 1099, 115, 142)
MAX_CLASSES = 100
MAX_BYTES = 2**32  # of all images, which are made in memory
SIMILARITY_WIDTH = 0.4
MAX_LABELS = 4  # more do not fit side by side
DECAY = 4.0  # factor by which co-occurrence falls with every step around the ring of classes
DRAWN_GEOMETRIES = 100  # candidates for positions drawn at random
RING_ORDERS = 300  # tried, to find one that is uncorrelated with the similarity


@dataclass(frozen=True)
class _SharedSettings:
    images: int = 2400
    classes: int = 7  # 2 to 100
    size: int = 64  # height and width in pixels, 16 to 512; the same lesions are rendered at any size
    # Standard deviation of the lesions of a class around its position, on axes from 0 to 1: "little" (0.08), "much"
    # (0.2), or a number.
    overlap: str | float = "little"
    seed: int = 0  # of the lesions; class positions and co-occurrence do not depend on it

    def _check(self, **limits: tuple[int, int]) -> None:
        """Refuse integers outside their range, all in one error, and an unknown overlap."""
        shared = {"classes": (2, MAX_CLASSES), "images": (1, None), "size": (16, 512), "seed": (0, 2**32 - 1)}
        problems = [outside(name, getattr(self, name), *between) for name, between in {**shared, **limits}.items()]
        if problem := " ".join(filter(None, problems)):
            raise InputError(f"synthetic images: {problem}")
        if (size := self.images * self.size**2 * 3) > MAX_BYTES:
            raise InputError(
                f"synthetic images: {self.images:,} images of {self.size} x {self.size} pixels take {size:,} bytes of "
                f"memory, more than the limit of {MAX_BYTES:,}. Make fewer or smaller ones."
            )
        if isinstance(self.overlap, str):
            if self.overlap not in OVERLAPS:
                raise unknown("overlap", self.overlap, OVERLAPS)
        elif not isinstance(self.overlap, Real) or isinstance(self.overlap, bool) or not 0 <= self.overlap <= 1:
            raise InputError(f"overlap must be {', '.join(OVERLAPS)} or a number from 0 to 1, got {self.overlap!r}.")

    @property
    def spread(self) -> float:
        """The overlap as a standard deviation."""
        return OVERLAPS[self.overlap] if isinstance(self.overlap, str) else float(self.overlap)


@dataclass(frozen=True)
class SyntheticSettings(_SharedSettings):
    """Settings of the synthetic set."""

    # False for equal classes, "isic2018" (or True) for the class ratios of ISIC 2018, or the share of each class.
    imbalance: bool | str | Sequence[float] = False
    images_per_group: int = 3  # maximum number of photographs of one lesion; about two thirds of the lesions have one
    geometry: int = 0  # 0: the fixed class positions; any other number draws positions of its own

    def __post_init__(self) -> None:
        self._check(images_per_group=(1, 100), geometry=(0, 2**32 - 1))
        self.class_counts()

    def class_counts(self) -> npt.NDArray[np.int64]:
        """Return the images of each class, [K]: shares rounded by largest remainder, so that they sum to ``images``.

        >>> SyntheticSettings(images=1000, imbalance="isic2018").class_counts().tolist()
        [111, 670, 51, 33, 110, 11, 14]
        """
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
        shares = shares / shares.sum() * self.images
        counts = np.floor(shares + 1e-9).astype(np.int64)
        largest_remainders = np.argsort(counts - shares, kind="stable")[: self.images - counts.sum()]
        counts[largest_remainders] += 1
        if not counts.all():
            raise InputError(
                f"{self.images} images leave class {class_names(self.classes)[int(counts.argmin())]} without any. "
                "Increase images or reduce the imbalance."
            )
        return counts


@dataclass(frozen=True)
class MultilabelSettings(_SharedSettings):
    """Settings of the synthetic multi-label set."""

    overlap: str | float = "much"
    most: int = 3  # maximum number of labels per image, 1 to 4; all numbers from 1 on are equally frequent
    empty: float = 0.1  # share of the images without any lesion and label

    def __post_init__(self) -> None:
        self._check()
        self._check(most=(1, min(MAX_LABELS, self.classes)))
        if not isinstance(self.empty, Real) or isinstance(self.empty, bool) or not 0 <= self.empty < 1:
            expected = "empty, the share of images without a label, must lie in [0, 1)"
            raise InputError(f"synthetic images: {expected}, got {self.empty!r}.")


def outside(name: str, value: Any, low: int, high: int | None) -> str | None:
    """Return what is wrong with an integer, or None."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if is_integer and value >= low and (high is None or value <= high):
        return None
    limits = f"from {low} to {high}" if high is not None else f"of {low} or more"
    return f"{name} must be an integer {limits}, got {value!r}."


def class_names(num_classes: int) -> tuple[str, ...]:
    """Return letters: A to Z, then AA, AB and so on.

    >>> class_names(28)[-3:]
    ('Z', 'AA', 'AB')
    """
    letters = [chr(ord("A") + i) for i in range(26)]
    return tuple(letters[i] if i < 26 else letters[i // 26 - 1] + letters[i % 26] for i in range(num_classes))


def class_positions(num_classes: int, geometry: int = 0) -> npt.NDArray[np.float64]:
    """Return the class positions in appearance space, [K, 6], each axis from 0.1 to 0.9: an R sequence (multiples of
    the powers of 1/g, g⁷ = g + 1) in which, from the fourth on, every other class is moved close to an earlier one.
    Another ``geometry`` than 0 draws them at random, see :func:`_drawn_positions`."""
    if geometry:
        return _drawn_positions(num_classes, geometry).copy()
    golden = 1.0
    for _ in range(64):
        golden = (1 + golden) ** (1 / (len(AXES) + 1))
    steps = golden ** -np.arange(1.0, len(AXES) + 1)
    # With a start of 0.57 the similarity of seven classes is uncorrelated with their order and with ISIC2018_COUNTS.
    positions = 0.1 + 0.8 * ((0.57 + np.outer(np.arange(1, num_classes + 1), steps)) % 1)
    return _with_close_pairs(positions)


def _with_close_pairs(positions: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    for k in range(3, len(positions), 2):
        positions[k] = positions[k // 3] + 0.35 * (positions[k] - positions[k // 3])
    return positions


@functools.cache
def _drawn_positions(num_classes: int, geometry: int) -> npt.NDArray[np.float64]:
    """Uniform positions with close pairs, in random order. Of DRAWN_GEOMETRIES candidates the one whose similarity
    correlates least with the order of the classes and, for seven classes, with the frequencies of ISIC 2018: else a
    method that learns frequency would seem to learn similarity."""
    generator, pairs = np.random.default_rng((geometry, num_classes)), np.triu_indices(num_classes, 1)
    others = [np.abs(np.subtract.outer(np.arange(num_classes), np.arange(num_classes)))[pairs]]
    if num_classes == len(ISIC2018_COUNTS):
        others.append(np.add.outer(np.log(ISIC2018_COUNTS), np.log(ISIC2018_COUNTS))[pairs])
    candidates = [
        generator.permutation(_with_close_pairs(generator.uniform(0.1, 0.9, (num_classes, len(AXES)))))
        for _ in range(DRAWN_GEOMETRIES)
    ]
    if len(pairs[0]) < 3:  # two classes are one pair: nothing to correlate
        return candidates[0]

    def largest_correlation(positions: npt.NDArray[np.float64]) -> float:
        similarity = _similarity(positions)[pairs]
        return max(abs(float(spearmanr(similarity, other).statistic)) for other in others)

    return min(candidates, key=largest_correlation)


def geometry_of(data: str) -> int:
    """The geometry in the name of a synthetic set.

    >>> geometry_of("synthetic:images=100,geometry=3"), geometry_of("synthetic")
    (3, 0)
    """
    found = re.search(r"\bgeometry=(\d+)", data)
    return int(found[1]) if found else 0


def known_similarity(num_classes: int = 7, geometry: int = 0) -> npt.NDArray[np.float64]:
    """Return the true similarity of the classes, ``exp(−|a_i − a_j|² / 2w²)`` of their positions, w = 0.4, [K, K].
    Compare by rank only.

    >>> known_similarity(3).round(2)
    array([[1.  , 0.1 , 0.22],
           [0.1 , 1.  , 0.03],
           [0.22, 0.03, 1.  ]])
    """
    if problem := outside("num_classes", num_classes, 2, MAX_CLASSES):
        raise InputError(f"known similarity: {problem}")
    return _similarity(class_positions(num_classes, geometry))


def _similarity(positions: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    squared = ((positions[:, None] - positions[None, :]) ** 2).sum(axis=2)
    return np.exp(-squared / (2 * SIMILARITY_WIDTH**2))


def _photographs(settings: SyntheticSettings) -> Iterator[tuple[str, str, int, Floats, Floats, Floats]]:
    """Yield name, group, label and the parameters of ``render`` for the images of each class in turn. Every lesion and
    view has its own generator, so an image depends only on seed, overlap, class and number."""
    names, positions = class_names(settings.classes), class_positions(settings.classes, settings.geometry)
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
                yield f"{group}_{view}", group, label, latent, own, seen
                taken += 1
            lesion += 1


def _render_all(
    function: Callable[..., rendering.Pixels], parameters: Sequence[npt.NDArray[Any]], size: int, workers: int | None
) -> rendering.Pixels:
    """Call a rendering function on batches of its parameters, [N, ...] each, in parallel threads, [N, S, S, 3]."""
    images = np.empty((len(parameters[0]), size, size, 3), np.uint8)
    batch = math.ceil(2**16 / max(size, rendering.FINEST) ** 2)  # small, so that the planes stay in the CPU cache

    def fill(start: int) -> None:
        rows = slice(start, start + batch)
        images[rows] = function(*(column[rows] for column in parameters), size)

    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        list(pool.map(fill, range(0, len(images), batch)))
    return images


def synthetic(settings: SyntheticSettings | None = None, workers: int | None = None) -> ImageTable:
    """Generate the set: images uint8 [N, S, S, 3], class by class, with lesions as groups and the appearance as extra
    columns. The bytes do not depend on the number of threads, ``workers`` (default: one per core).

    >>> synthetic(SyntheticSettings(images=14)).class_counts().tolist()
    [2, 2, 2, 2, 2, 2, 2]
    """
    settings = settings or SyntheticSettings()
    names, groups, labels, *columns = zip(*_photographs(settings), strict=True)
    parameters = [np.stack(column) for column in columns]
    images = _render_all(rendering.render, parameters, settings.size, workers)
    classes, extra = class_names(settings.classes), pd.DataFrame(parameters[0], columns=list(AXES))
    codes = np.array(labels, np.int64)
    return ImageTable(SOURCE, Path("synthetic"), list(names), images, codes, classes, np.array(groups), extra=extra)


def co_occurrence_weights(num_classes: int = 7) -> npt.NDArray[np.float64]:
    """Return the weights with which classes are sampled together, [K, K]: zero diagonal, rows sum to 1. The classes
    form a ring, and the weight falls with the steps between two classes.

    >>> co_occurrence_weights(4).max(axis=1).round(2)
    array([0.44, 0.44, 0.44, 0.44])
    """
    weights = DECAY ** -_steps(_ring(num_classes)).astype(np.float64)
    np.fill_diagonal(weights, 0.0)
    return weights / weights.sum(axis=1, keepdims=True)


@functools.cache
def _ring(num_classes: int) -> tuple[int, ...]:
    """Return the order of the classes, of many, whose ring distance has the least rank correlation with similarity."""
    similarity = known_similarity(num_classes)
    pairs = np.triu_indices(num_classes, 1)
    generator = np.random.default_rng(num_classes)
    best, least = tuple(range(num_classes)), math.inf
    if num_classes <= 3:  # all classes are neighbours
        return best
    for _ in range(RING_ORDERS):
        order = generator.permutation(num_classes)
        correlation = abs(float(spearmanr(-_steps(order)[pairs], similarity[pairs]).statistic))
        if correlation < least:
            best, least = tuple(order.tolist()), correlation
    return best


def _steps(order: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return the steps around the ring between any two classes, [K, K]."""
    position = np.argsort(np.asarray(order))
    distance = np.abs(position[:, None] - position[None, :])
    return np.minimum(distance, len(position) - distance)


def co_occurrence(labels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Return the share of the images of class i that also have class j, [N, K] → [K, K].

    >>> co_occurrence(np.array([[1, 1], [1, 0], [0, 0]], np.uint8))
    array([[1. , 0.5],
           [1. , 1. ]])
    """
    marks = labels.astype(np.float64)
    together = marks.T @ marks
    return together / np.maximum(together.diagonal(), 1.0)[:, None]


def _picture(settings: MultilabelSettings, number: int) -> tuple[list[int], Floats, Floats, Floats, Marks, Floats]:
    """Return the classes of image ``number`` and the parameters of ``render_several``. They do not depend on other
    images. Lesions that are not shown have parameters too, so that all shapes are equal."""
    generator = np.random.default_rng((settings.seed, number))
    classes = _label_set(settings, generator)
    shown = np.arange(settings.most) < len(classes)
    positions = class_positions(settings.classes)[[*classes, *[0] * (settings.most - len(classes))]]
    latents = (positions + settings.spread * generator.standard_normal(positions.shape)).clip(0, 1).astype(np.float32)
    lesions, spots = (np.stack([random_row(shapes, generator) for _ in shown]) for shapes in (LESION, SPOT))
    return classes, latents, lesions, spots, shown, random_row(VIEW, generator)


def _label_set(settings: MultilabelSettings, generator: np.random.Generator) -> list[int]:
    """Sample the classes of one image: the first uniformly, each further one by its co-occurrence with those before."""
    if generator.random() < settings.empty:
        return []
    chosen: list[int] = []
    chances, weights = np.ones(settings.classes), co_occurrence_weights(settings.classes)
    for _ in range(int(generator.integers(1, settings.most + 1))):
        new = int(np.searchsorted(np.cumsum(chances), generator.random() * chances.sum(), side="right"))
        chosen.append(min(new, settings.classes - 1))
        chances = chances * weights[chosen[-1]]
    return chosen


def synthetic_multilabel(settings: MultilabelSettings | None = None, workers: int | None = None) -> ImageTable:
    """Generate the set: images uint8 [N, S, S, 3] and labels uint8 [N, K]. The bytes do not depend on the number of
    threads, ``workers`` (default: one per core).

    >>> table = synthetic_multilabel(MultilabelSettings(images=4, size=16, empty=0.0))
    >>> table.labels.shape, bool(table.labels.any(axis=1).all())
    ((4, 7), True)
    """
    settings = settings or MultilabelSettings()
    classes, *columns = zip(*(_picture(settings, number) for number in range(settings.images)), strict=True)
    labels = np.zeros((settings.images, settings.classes), np.uint8)
    for row, shown in zip(labels, classes, strict=True):
        row[shown] = 1
    parameters = [np.stack(column) for column in columns]
    images = _render_all(rendering.render_several, parameters, settings.size, workers)
    names = [f"skin{number:06d}" for number in range(settings.images)]
    root = Path("synthetic-multilabel")
    return ImageTable(MULTILABEL_SOURCE, root, names, images, labels, class_names(settings.classes))
