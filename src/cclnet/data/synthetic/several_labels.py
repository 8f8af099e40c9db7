"""Drawn skin with several lesions at once: classes that look alike by a known amount, and keep company by another.

The classes, their places in the space of looks and so their planted similarity are those of the single-label set
(``synthetic``). A picture shows lesions of no, one or several classes side by side. Which classes come together is
planted as well, as a liking for each other's company whose rank correlation with the similarity is next to none: a
method that takes company for likeness is found out, and one that takes the reverse gains nothing by it.
"""

from __future__ import annotations

import functools
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import spearmanr

from cclnet.data.synthetic import MOST_CLASSES, SyntheticSettings, class_names, class_places, planted_similarity
from cclnet.data.synthetic.drawing import FINEST, LESION, SPOT, VIEW, Floats, Marks, chance, draw_several
from cclnet.data.table import ImageTable
from cclnet.errors import InputError

__all__ = ["SOURCE", "MultilabelSettings", "co_occurrence", "company", "synthetic_multilabel"]

SOURCE = "drawn skin with several lesions, planted similarity"
MOST_LABELS = 4  # more do not fit side by side
FADING = 4.0  # a class likes each class that many times as much as one a step further in the ring
RING_ORDERS = 300  # tried, to find one that says nothing about looks


@dataclass(frozen=True)
class MultilabelSettings:
    """What to draw.

    Attributes:
        images: how many images in all.
        classes: how many classes, 2 to 100.
        size: height and width in pixels, 16 to 512. The same lesions are drawn at any size.
        overlap: "little", "much", or the standard deviation of the lesions of a class around its place.
        most: the most labels of an image, 1 to 4. As many images have one label as have two, and so on.
        empty: share of the images that show no lesion and have no label.
        seed: another seed, other lesions; the places of the classes and their company stay.
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
        if not _whole(self.images) or self.images < 1:
            raise InputError(f"synthetic images: images must be a whole number of 1 or more, got {self.images!r}.")
        largest = min(MOST_LABELS, self.classes)
        if not _whole(self.most) or not 1 <= self.most <= largest:
            raise InputError(
                f"synthetic images: most, the labels of an image at most, must be a whole number from 1 to {largest}, "
                f"got {self.most!r}."
            )
        if not isinstance(self.empty, Real) or isinstance(self.empty, bool) or not 0 <= self.empty < 1:
            raise InputError(
                f"synthetic images: empty, the share of images without a label, must lie in [0, 1), got {self.empty!r}."
            )

    @property
    def spread(self) -> float:
        """The overlap as a standard deviation."""
        return self._as_single().spread

    def _as_single(self) -> SyntheticSettings:
        """What both sets share, as settings of the single-label one, which refuse what makes no sense."""
        return SyntheticSettings(MOST_CLASSES, self.classes, self.size, self.overlap, seed=self.seed)


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def company(num_classes: int = 7) -> npt.NDArray[np.float64]:
    """How much each class likes the company of each other, [K, K]: 0 with itself, every row the same values in
    another order, sum 1. The classes stand in a ring, and like each other the less the more steps lie between them.

    >>> company(4).max(axis=1).round(2)
    array([0.44, 0.44, 0.44, 0.44])
    """
    liking = FADING ** -_steps(_ring(num_classes)).astype(np.float64)
    np.fill_diagonal(liking, 0.0)
    return liking / liking.sum(axis=1, keepdims=True)


@functools.cache
def _ring(num_classes: int) -> tuple[int, ...]:
    """The classes in a ring, in the order of many in which nearness has the least rank correlation with looks."""
    similarity = planted_similarity(num_classes)
    pairs = np.triu_indices(num_classes, 1)
    generator = np.random.default_rng(num_classes)
    best, least = tuple(range(num_classes)), math.inf
    if num_classes <= 3:  # all of them are neighbours
        return best
    for _ in range(RING_ORDERS):
        order = generator.permutation(num_classes)
        told = abs(float(spearmanr(-_steps(order)[pairs], similarity[pairs]).statistic))
        if told < least:
            best, least = tuple(order.tolist()), told
    return best


def _steps(order: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Steps around the ring between any two classes, [K, K]."""
    place = np.argsort(np.asarray(order))
    away = np.abs(place[:, None] - place[None, :])
    return np.minimum(away, len(place) - away)


def co_occurrence(labels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """The share of the images of class i that show class j as well, [N, K] → [K, K].

    >>> co_occurrence(np.array([[1, 1], [1, 0], [0, 0]], np.uint8))
    array([[1. , 0.5],
           [1. , 1. ]])
    """
    marks = labels.astype(np.float64)
    together = marks.T @ marks
    return together / np.maximum(together.diagonal(), 1.0)[:, None]


class _Picture(NamedTuple):
    """All that decides one image. Lesions that are not shown have numbers too, so that all images have as many."""

    classes: list[int]
    latents: Floats
    lesions: Floats
    spots: Floats
    shown: Marks
    view: Floats


def _picture(settings: MultilabelSettings, number: int) -> _Picture:
    """Image ``number``, which depends on the settings but for their number of images, and on nothing else drawn."""
    generator = np.random.default_rng((settings.seed, number))
    classes = _label_set(settings, generator)
    shown = np.arange(settings.most) < len(classes)
    places = class_places(settings.classes)[[*classes, *[0] * (settings.most - len(classes))]]
    latents = (places + settings.spread * generator.standard_normal(places.shape)).clip(0, 1).astype(np.float32)
    lesions, spots = (np.stack([chance(shapes, generator) for _ in shown]) for shapes in (LESION, SPOT))
    return _Picture(classes, latents, lesions, spots, shown, chance(VIEW, generator))


def _label_set(settings: MultilabelSettings, generator: np.random.Generator) -> list[int]:
    """The classes of one image: the first is any, each further one as those before it like its company."""
    if generator.random() < settings.empty:
        return []
    chosen: list[int] = []
    chances, liking = np.ones(settings.classes), company(settings.classes)
    for _ in range(int(generator.integers(1, settings.most + 1))):
        new = int(np.searchsorted(np.cumsum(chances), generator.random() * chances.sum(), side="right"))
        chosen.append(min(new, settings.classes - 1))
        chances = chances * liking[chosen[-1]]
    return chosen


def synthetic_multilabel(settings: MultilabelSettings | None = None, workers: int | None = None) -> ImageTable:
    """Draw the set: images uint8 [N, S, S, 3] and labels uint8 [N, K]. ``workers`` threads (by default one a core)
    share the drawing; the bytes do not depend on them.

    >>> table = synthetic_multilabel(MultilabelSettings(images=4, size=16, empty=0.0))
    >>> table.labels.shape, bool(table.labels.any(axis=1).all())
    ((4, 7), True)
    """
    settings = settings or MultilabelSettings()
    pictures = [_picture(settings, number) for number in range(settings.images)]
    labels = np.zeros((settings.images, settings.classes), np.uint8)
    images = np.empty((settings.images, settings.size, settings.size, 3), np.uint8)
    # Few pictures at a time, so that their planes stay in the processor's cache.
    batch = math.ceil(2**16 / max(settings.size, FINEST) ** 2)

    def fill(start: int) -> None:
        some = pictures[start : start + batch]
        latents, lesions, spots, shown, views = (np.stack(rows) for rows in zip(*(p[1:] for p in some), strict=True))
        images[start : start + batch] = draw_several(latents, lesions, spots, shown, views, settings.size)

    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        list(pool.map(fill, range(0, settings.images, batch)))
    for row, picture in zip(labels, pictures, strict=True):
        row[picture.classes] = 1
    return ImageTable(
        source=SOURCE,
        root=Path("synthetic-multilabel"),
        names=[f"skin{number:06d}" for number in range(settings.images)],
        images=images,
        labels=labels,
        classes=class_names(settings.classes),
    )
