"""Scores of subgroups: the reported images by the values of a column (sex, age, site), and by the size of their group.

A subgroup is evaluated like the whole: the same metrics (those that the registry marks for subgroups) on its images
alone, with intervals over its own groups. Its classes may be mixed differently from those of another one, which alone
changes its accuracy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from cclnet.errors import unknown
from cclnet.evaluation.bootstrap import Units, units_of
from cclnet.evaluation.metrics import compute, find, subgroup_metrics, task_of
from cclnet.runs.predictions import Predictions, counted
from cclnet.runs.scores import Subgroup, SubgroupColumn

MAX_SUBGROUPS = 20  # of one column; the rarest values beyond are pooled
FEW_UNITS = 10  # a subgroup of fewer groups (or images) is not called the best or the worst
MAX_NUMBERS = 6  # different numbers that are subgroups of their own; more are divided at the quartiles
GROUP_SIZE = "images per group"  # the column that needs no table
UNKNOWN, OTHER = "unknown", "other"
_MISSING = {"", "nan", "na", "n/a", "none", "null", "unknown", "?", "-"}

Strings = npt.NDArray[np.str_]


def score_subgroups(
    reported: Predictions, metadata: pd.DataFrame, by: Sequence[str], draws: int, seed: int
) -> tuple[SubgroupColumn, ...]:
    """The scores by each column of ``metadata`` (indexed by image) in ``by``, and by group size where groups differ in
    size."""
    if strange := [name for name in by if name not in metadata]:
        raise unknown("column", strange[0], map(str, metadata))
    columns = {name: divide(metadata[name].reindex(reported.images).fillna("").astype(str).tolist()) for name in by}
    if (sizes := group_sizes(units_of(reported))) is not None:
        columns[GROUP_SIZE] = sizes
    return tuple(_score(reported, name, *own, draws, seed) for name, own in columns.items())


def divide(values: Sequence[str]) -> tuple[Strings, list[str]]:
    """The subgroup of each value, and the subgroups in order: numbers ascending, names by their count.

    >>> divide(["m", "f", "m", ""])[0].tolist()
    ['m', 'f', 'm', 'unknown']
    >>> divide([str(age) for age in range(1, 9)])[1]
    ['below 3', '3 to below 5', '5 to below 7', '7 and above']
    """
    texts = pd.Series([value.strip() for value in values], dtype=object)
    missing = texts.str.lower().isin(_MISSING)
    numbers = pd.to_numeric(texts[~missing], errors="coerce")
    if len(numbers) and np.isfinite(numbers).all():
        named, order = _ranges(numbers.to_numpy(np.float64))
    else:
        counts = texts[~missing].value_counts()
        order = [str(name) for name in sorted(counts.index, key=lambda name: (-counts[name], name))]
        if len(order) > MAX_SUBGROUPS:
            order = [*order[: MAX_SUBGROUPS - 1], OTHER]
        named = np.array([name if name in order else OTHER for name in texts[~missing]], dtype=object)
    found = np.full(len(texts), UNKNOWN, dtype=object)
    found[~missing.to_numpy()] = named
    return found.astype(np.str_), [*order, *([UNKNOWN] if missing.any() else [])]


def _ranges(numbers: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.object_], list[str]]:
    """The range of each number: the number itself where few occur, else between the quartiles."""
    levels = np.unique(numbers)
    if len(levels) <= MAX_NUMBERS:
        names = [f"{level:g}" for level in levels]
        return np.array(names, dtype=object)[np.searchsorted(levels, numbers)], names
    ends = np.unique(np.quantile(numbers, (0.25, 0.5, 0.75), method="higher"))
    ends = ends[ends > levels[0]] if ends[-1] > levels[0] else levels[1:2]  # nothing is below the lowest
    names = [
        f"below {ends[0]:g}",
        *(f"{low:g} to below {high:g}" for low, high in itertools.pairwise(ends)),
        f"{ends[-1]:g} and above",
    ]
    return np.array(names, dtype=object)[np.searchsorted(ends, numbers, side="right")], names


def group_sizes(units: Units) -> tuple[Strings, list[str]] | None:
    """The subgroups by the number of images of the same group; None where no groups are known or all are alike."""
    sizes = np.bincount(units.index, minlength=units.count)[units.index]
    if units.kind != "groups" or len(np.unique(sizes)) < 2:
        return None
    names, ends = ["1 image", "2 images", "3 to 4 images", "5 to 9 images", "10 images and more"], [2, 3, 5, 10]
    found = np.array(names)[np.searchsorted(ends, sizes, side="right")]
    return found, [name for name in names if name in found]


def _score(
    reported: Predictions, column: str, of_image: Strings, order: Sequence[str], draws: int, seed: int
) -> SubgroupColumn:
    task, subgroups = task_of(reported), []
    for name in order:
        own = reported.select(of_image == name)
        units = units_of(own)
        (samples,) = compute([(own, subgroup_metrics(task))], units, draws, seed)
        scores = {metric: sample.estimates(own, units)[0] for metric, sample in samples.items()}
        subgroups.append(Subgroup(name, len(own), units.count, tuple(own.class_counts.tolist()), scores))
    return SubgroupColumn(column, tuple(subgroups), _in_words(subgroups, task))


def _in_words(subgroups: Sequence[Subgroup], task: str) -> str:
    """Which subgroups have the highest and the lowest value of the first metric; unknown and small ones do not
    count."""
    metric = subgroup_metrics(task)[0].name
    large = [own for own in subgroups if own.units >= FEW_UNITS and own.name != UNKNOWN]
    known = [own for own in large if own.scores[metric].value is not None]
    if len(known) < 2:
        return f"There are no two subgroups of at least {FEW_UNITS} groups or images to compare."
    value = {own.name: float(own.scores[metric].value or 0.0) for own in known}
    best, worst = (choose(known, key=lambda own: value[own.name]) for choose in (max, min))
    if math.isclose(value[best.name], value[worst.name]):
        return f"The {find(metric).short} is the same in all subgroups."
    form = "{:.1%}" if find(metric).unit == "percent" else "{:.3f}"
    ends = [f"{own.name} ({form.format(value[own.name])} of {counted(own.images, 'image')})" for own in (best, worst)]
    return f"The {find(metric).short} is highest for {ends[0]} and lowest for {ends[1]}."
