"""Synthetic multi-label images with known visual similarity and known co-occurrence of the classes.

Class positions and similarity are those of the single-label set. An image shows lesions of no, one or several classes
side by side. Which classes occur together is known as well, and has almost no rank correlation with the similarity: a
method that mistakes co-occurrence for visual similarity is detected.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import spearmanr

from cclnet.data.synthetic import (
    MAX_CLASSES,
    SyntheticSettings,
    class_names,
    class_positions,
    known_similarity,
    outside,
    render_all,
)
from cclnet.data.synthetic.rendering import LESION, SPOT, VIEW, Floats, Marks, random_row, render_several
from cclnet.data.table import ImageTable
from cclnet.errors import InputError

SOURCE = "synthetic multi-label lesions with known similarity"
MAX_LABELS = 4  # more do not fit side by side
DECAY = 4.0  # factor by which co-occurrence falls with every step around the ring of classes
RING_ORDERS = 300  # tried, to find one that is uncorrelated with the similarity


@dataclass(frozen=True)
class MultilabelSettings:
    """Settings of the synthetic multi-label set.

    Attributes:
        images: number of images.
        classes: number of classes, 2 to 100.
        size: height and width in pixels, 16 to 512. The same lesions are rendered at any size.
        overlap: "little", "much", or the standard deviation of the lesions of a class around its position.
        most: maximum number of labels per image, 1 to 4. All numbers from 1 on are equally frequent.
        empty: share of the images without any lesion and label.
        seed: seed of the lesions; class positions and co-occurrence do not depend on it.
    """

    images: int = 2400
    classes: int = 7
    size: int = 64
    overlap: str | float = "much"
    most: int = 3
    empty: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        self._as_single()
        largest = min(MAX_LABELS, self.classes)
        if problem := outside("images", self.images, 1, None) or outside("most", self.most, 1, largest):
            raise InputError(f"synthetic images: {problem}")
        if not isinstance(self.empty, Real) or isinstance(self.empty, bool) or not 0 <= self.empty < 1:
            raise InputError(
                f"synthetic images: empty, the share of images without a label, must lie in [0, 1), got {self.empty!r}."
            )

    @property
    def spread(self) -> float:
        """The overlap as a standard deviation."""
        return self._as_single().spread

    def _as_single(self) -> SyntheticSettings:
        """Return what both sets share as settings of the single-label set, which validate it."""
        return SyntheticSettings(MAX_CLASSES, self.classes, self.size, self.overlap, seed=self.seed)


def co_occurrence_weights(num_classes: int = 7) -> npt.NDArray[np.float64]:
    """Return the weights with which classes are sampled together, [K, K]: zero diagonal, rows sum to 1.

    The classes form a ring, and the weight falls with the steps between two classes, so all rows have the same values
    in another order.

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


class _Picture(NamedTuple):
    """The parameters of one image. Lesions that are not shown have parameters too, so that all shapes are equal."""

    classes: list[int]
    latents: Floats
    lesions: Floats
    spots: Floats
    shown: Marks
    view: Floats


def _picture(settings: MultilabelSettings, number: int) -> _Picture:
    """Return image ``number``, which does not depend on the number of images or on other images."""
    generator = np.random.default_rng((settings.seed, number))
    classes = _label_set(settings, generator)
    shown = np.arange(settings.most) < len(classes)
    positions = class_positions(settings.classes)[[*classes, *[0] * (settings.most - len(classes))]]
    latents = (positions + settings.spread * generator.standard_normal(positions.shape)).clip(0, 1).astype(np.float32)
    lesions, spots = (np.stack([random_row(shapes, generator) for _ in shown]) for shapes in (LESION, SPOT))
    return _Picture(classes, latents, lesions, spots, shown, random_row(VIEW, generator))


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
    pictures = [_picture(settings, number) for number in range(settings.images)]
    labels = np.zeros((settings.images, settings.classes), np.uint8)
    for row, picture in zip(labels, pictures, strict=True):
        row[picture.classes] = 1
    return ImageTable(
        source=SOURCE,
        root=Path("synthetic-multilabel"),
        names=[f"skin{number:06d}" for number in range(settings.images)],
        images=render_all(render_several, [picture[1:] for picture in pictures], settings.size, workers),
        labels=labels,
        classes=class_names(settings.classes),
    )
