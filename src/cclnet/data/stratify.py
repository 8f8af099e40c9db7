"""Deal units (images, lesions, patients) out to parts so that every class keeps its ratio in each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Index = npt.NDArray[np.intp]


def stratify(counts: Counts, fractions: npt.ArrayLike, generator: np.random.Generator) -> Index:
    """The part of each unit, [U], for units that cannot be divided.

    Units with the same content are of one kind and are interchangeable: of each kind every part gets its share,
    rounded down, at random. With lesions that is a stratification by class and by number of images at once. The
    few left over, and units like no other (patients with several diagnoses), are placed one by one, the heaviest
    first, each where it lowers

        sum over parts p and classes k of (have_pk - target_pk)^2 / (target_pk * total_k),

    which is how far every class is from its ratio, weighed so that small parts and rare classes count as much.
    At last a part without any image of a class gets one unit of it, where another part can spare it.

    Args:
        counts: images of each class in each unit, [U, K].
        fractions: share of each part, [P], above zero, summing to one.

    >>> counts = np.repeat([[1, 0], [0, 2]], [80, 20], axis=0)
    >>> part = stratify(counts, [0.75, 0.25], np.random.default_rng(0))
    >>> [counts[part == p].sum(axis=0).tolist() for p in (0, 1)]
    [[60, 30], [20, 10]]
    """
    shares = np.asarray(fractions, dtype=np.float64)
    totals = counts.sum(axis=0)
    counts, totals = counts[:, totals > 0], totals[totals > 0]
    part, left_over = _deal_by_kind(counts, shares, generator)
    _place_heaviest_first(part, left_over, counts, shares[:, None] * totals, totals, generator)
    _leave_no_class_out(part, counts, len(shares))
    return part


def _deal_by_kind(
    counts: Counts, shares: npt.NDArray[np.float64], generator: np.random.Generator
) -> tuple[Index, Index]:
    part = np.full(len(counts), -1, dtype=np.intp)
    # Equal rows have equal fingerprints; sorting numbers is ten times faster than sorting rows.
    fingerprint = counts @ generator.integers(np.iinfo(np.int64).max, size=counts.shape[1])
    kind = np.unique(fingerprint, return_inverse=True)[1].reshape(-1)
    shuffled = generator.permutation(len(counts))
    by_kind = shuffled[np.argsort(kind[shuffled], kind="stable")]
    left_over = []
    for members in np.split(by_kind, np.flatnonzero(np.diff(kind[by_kind])) + 1):
        quota = np.floor(shares * len(members) + 1e-9).astype(np.intp)  # 0.3 * 10 is a hair under three
        part[members[: quota.sum()]] = np.repeat(np.arange(len(shares)), quota)
        left_over.append(members[quota.sum() :])
    return part, np.concatenate(left_over)


def _place_heaviest_first(
    part: Index,
    units: Index,
    counts: Counts,
    target: npt.NDArray[np.float64],
    totals: Counts,
    generator: np.random.Generator,
) -> None:
    units = generator.permutation(units)
    weight = (counts[units] / totals).max(axis=1, initial=0.0)
    # Heavy to within a factor of two and random inside that, so that the seed decides, not the size alone.
    octave = np.floor(np.log2(np.maximum(weight, np.finfo(float).tiny)))
    units = units[np.argsort(-octave, kind="stable")]
    have = np.stack([counts[part == p].sum(axis=0) for p in range(len(target))]).astype(np.float64)
    for unit in units:
        count = counts[unit]
        growth = (count * (count + 2 * (have - target)) / (target * totals)).sum(axis=1)
        part[unit] = growth.argmin()
        have[part[unit]] += count


def _leave_no_class_out(part: Index, counts: Counts, num_parts: int) -> None:
    """Where a part lacks a class, move it a unit that is not the last of any class where it lies; the lightest such.
    Every move fills a gap and opens none."""
    has = counts > 0
    held = np.stack([has[part == p].sum(axis=0) for p in range(num_parts)])
    for class_ in np.argsort(has.sum(axis=0), kind="stable"):
        for empty in np.flatnonzero(held[:, class_] == 0):
            units = np.flatnonzero(has[:, class_])
            spare = units[(~has[units] | (held[part[units]] > 1)).all(axis=1)]
            if len(spare):
                unit = spare[np.lexsort((counts[spare].sum(axis=1), -held[part[spare], class_]))[0]]
                held[part[unit]] -= has[unit]
                part[unit] = empty
                held[empty] += has[unit]
