"""A set of drawn skin lesions whose classes resemble each other by a known amount.

Every class has a place in the space of looks (``drawing.AXES``); its lesions lie around that place, and the
distance between two places is how much two classes differ. That similarity is planted: it is the truth against
which a learned class correlation can be checked, which no set of real images offers. The classes are letters and
stand for no diagnosis.

The places have close pairs, families and far pairs, and follow neither the order of the classes nor, with the
imbalance of ISIC 2018, their rarity: a method that finds the truth here has not found it by counting images.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from cclnet.data.synthetic.drawing import AXES, FINEST, LESION, VIEW, Floats, chance, draw
from cclnet.data.table import ImageTable
from cclnet.errors import InputError, unknown

__all__ = ["ISIC2018_COUNTS", "OVERLAPS", "SOURCE", "SyntheticSettings", "planted_similarity", "synthetic"]

SOURCE = "drawn lesions with planted similarity"
OVERLAPS = {"little": 0.08, "much": 0.20}
ISIC2018_COUNTS = (1113, 6705, 514, 327, 1099, 115, 142)
MOST_CLASSES = 100
SIMILARITY_WIDTH = 0.4


@dataclass(frozen=True)
class SyntheticSettings:
    """What to draw.

    Attributes:
        images: how many images in all.
        classes: how many classes, 2 to 100.
        size: height and width in pixels, 16 to 512. The same lesions are drawn at any size.
        overlap: "little", "much", or the standard deviation of the lesions of a class around its place, on axes
            that go from 0 to 1 (0.08 and 0.2 are the named ones).
        imbalance: False for equal classes, "isic2018" (or True) for the class ratios of ISIC 2018, or a number
            for each class: its share of the images.
        images_per_group: the most photographs of one lesion. About two lesions in three have one.
        seed: another seed, other lesions; the places of the classes stay.
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
            "classes": (2, MOST_CLASSES),
            "images": (1, None),
            "size": (16, 512),
            "images_per_group": (1, 100),
            "seed": (0, 2**32 - 1),
        }
        problems = [_outside(name, getattr(self, name), *limits) for name, limits in ranges.items()]
        if told := " ".join(filter(None, problems)):
            raise InputError(f"synthetic images: {told}")
        if not 0 <= self.spread <= 1:
            raise _no_overlap(self.overlap)
        self.class_counts()

    @property
    def spread(self) -> float:
        """The overlap as a standard deviation."""
        if isinstance(self.overlap, str):
            if self.overlap not in OVERLAPS:
                raise unknown("overlap", self.overlap, OVERLAPS)
            return OVERLAPS[self.overlap]
        if not isinstance(self.overlap, Real) or isinstance(self.overlap, bool):
            raise _no_overlap(self.overlap)
        return float(self.overlap)

    def class_counts(self) -> npt.NDArray[np.int64]:
        """Images of each class, [K]: the shares by largest remainder, so that they add up to ``images``.

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
                "Ask for more images or for less imbalance."
            )
        return counts

    def _shares(self) -> npt.NDArray[np.float64]:
        """The share of each class in the images, [K], sum 1."""
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
                "Give one number a class, or set classes to how many there are."
            )
        return shares / shares.sum()


def _outside(name: str, value: Any, low: int, high: int | None) -> str | None:
    """What is wrong with a whole number, or None."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if whole and value >= low and (high is None or value <= high):
        return None
    limits = f"from {low} to {high}" if high is not None else f"of {low} or more"
    return f"{name} must be a whole number {limits}, got {value!r}."


def _no_overlap(value: object) -> InputError:
    return InputError(f"overlap must be {', '.join(OVERLAPS)} or a number from 0 to 1, got {value!r}.")


def class_names(num_classes: int) -> tuple[str, ...]:
    """Letters: A to Z, then AA, AB and on.

    >>> class_names(28)[-3:]
    ('Z', 'AA', 'AB')
    """
    letters = [chr(ord("A") + i) for i in range(26)]
    return tuple(letters[i] if i < 26 else letters[i // 26 - 1] + letters[i % 26] for i in range(num_classes))


def class_places(num_classes: int) -> npt.NDArray[np.float64]:
    """Where the classes lie in the space of looks, [K, 6], each axis from 0.1 to 0.9.

    The R sequence (multiples of the powers of 1/g, g⁷ = g + 1) fills the space evenly. From the fourth on, every
    other class then moves close to an earlier one, which makes families. A class keeps its place whatever K is.
    The start of the sequence was chosen so that the seven places of the default follow neither the order of the
    classes nor the class counts of ISIC 2018.
    """
    golden = 1.0
    for _ in range(64):
        golden = (1 + golden) ** (1 / (len(AXES) + 1))
    steps = golden ** -np.arange(1.0, len(AXES) + 1)
    places = 0.1 + 0.8 * ((0.57 + np.outer(np.arange(1, num_classes + 1), steps)) % 1)
    for k in range(3, num_classes, 2):
        places[k] = places[k // 3] + 0.35 * (places[k] - places[k // 3])
    return places


def planted_similarity(num_classes: int = 7) -> npt.NDArray[np.float64]:
    """How alike the classes are, the truth, [K, K]: ``exp(−|a_i − a_j|² / 2w²)`` of their places, w = 0.4.

    Symmetric, 1 on the diagonal and below 1 elsewhere. Only the order of its values is meant to be compared.

    >>> planted_similarity(3).round(2)
    array([[1.  , 0.1 , 0.22],
           [0.1 , 1.  , 0.03],
           [0.22, 0.03, 1.  ]])
    """
    if told := _outside("num_classes", num_classes, 2, MOST_CLASSES):
        raise InputError(f"planted similarity: {told}")
    places = class_places(num_classes)
    squared = ((places[:, None] - places[None, :]) ** 2).sum(axis=2)
    return np.exp(-squared / (2 * SIMILARITY_WIDTH**2))


class _Photograph(NamedTuple):
    """All that decides one image."""

    name: str
    group: str
    label: int
    latent: Floats
    lesion: Floats
    view: Floats


def _photographs(settings: SyntheticSettings) -> Iterator[_Photograph]:
    """The images of each class in turn. Every lesion and every view has its own generator, so an image depends on
    the seed, the overlap, its class and its number, and on nothing else that is drawn."""
    names, places = class_names(settings.classes), class_places(settings.classes)
    # As in the real set, each further photograph of a lesion is about a third as frequent.
    frequency = np.cumsum(3.0 ** -np.arange(settings.images_per_group))
    for label, count in enumerate(settings.class_counts().tolist()):
        lesion, taken = 0, 0
        while taken < count:
            generator = np.random.default_rng((settings.seed, label, lesion))
            latent = places[label] + settings.spread * generator.standard_normal(len(AXES))
            latent = latent.clip(0, 1).astype(np.float32)
            own = chance(LESION, generator)
            photographs = 1 + int(np.searchsorted(frequency, generator.random() * frequency[-1]))
            group = f"{names[label]}{lesion:05d}"
            for view in range(1, min(photographs, count - taken) + 1):
                seen = chance(VIEW, np.random.default_rng((settings.seed, label, lesion, view)))
                yield _Photograph(f"{group}_{view}", group, label, latent, own, seen)
                taken += 1
            lesion += 1


def synthetic(settings: SyntheticSettings | None = None, workers: int | None = None) -> ImageTable:
    """Draw the set: images uint8 [N, S, S, 3], class by class, with lesions as groups and the looks as extra
    columns. ``workers`` threads (by default one a core) share the drawing; the bytes do not depend on them.

    >>> synthetic(SyntheticSettings(images=14)).class_counts().tolist()
    [2, 2, 2, 2, 2, 2, 2]
    """
    settings = settings or SyntheticSettings()
    shots = list(_photographs(settings))
    images = np.empty((len(shots), settings.size, settings.size, 3), np.uint8)
    # Few pictures at a time, so that their planes stay in the processor's cache.
    batch = math.ceil(2**16 / max(settings.size, FINEST) ** 2)

    def fill(start: int) -> None:
        some = shots[start : start + batch]
        latents, lesions, views = (np.stack(rows) for rows in zip(*(s[3:] for s in some), strict=True))
        images[start : start + batch] = draw(latents, lesions, views, settings.size)

    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        list(pool.map(fill, range(0, len(shots), batch)))
    return ImageTable(
        source=SOURCE,
        root=Path("synthetic"),
        names=[s.name for s in shots],
        images=images,
        labels=np.array([s.label for s in shots], np.int64),
        classes=class_names(settings.classes),
        groups=np.array([s.group for s in shots]),
        extra=pd.DataFrame(np.stack([s.latent for s in shots]), columns=list(AXES)),
    )
