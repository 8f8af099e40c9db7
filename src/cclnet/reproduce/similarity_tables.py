"""The tables of what soft labels follow on real images, from result files alone.

The yardstick is what a classifier confuses, on lesions it has not seen, to which every class matters equally: hard
labels with weighed classes, the mean over its seeds. A network that fits its training images hardly feels such weights
any more, so a second yardstick stands beside it, which costs no run of its own: the confusions of hard labels with
the class frequencies taken out of the probabilities.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from cclnet.evaluation.similarity import (
    agreement,
    inverse_frequency,
    inverse_frequency_agreement,
    mean_confusion,
    partial_agreement,
)
from cclnet.report.text import NONE
from cclnet.reproduce.experiments import CANDIDATES, LOOKS, USES, looks_cell
from cclnet.reproduce.paper import BACKBONES
from cclnet.reproduce.seeds import Result, Seeds
from cclnet.reproduce.tables import CHOSEN_BY, HEADS, NOT_RUN, Grid, Lines, number, pair_fields, plain_field, seeds_of
from cclnet.runs.folder import open_run
from cclnet.runs.predictions import Floats

SCORED = ("accuracy", "balanced_accuracy", "macro_f1", "kappa", "ece", "ece_calibrated")
REFERENCES = ("hard", "lsr-u5", "ccl")  # each of the others is held against these


@dataclass(frozen=True)
class Yardsticks:
    """Confusions on unseen lesions, [K, K], and how far two of them agree: no matrix can be asked for more."""

    balanced: Floats
    reweighed: Floats | None
    seeds_agree: float | None


def yardsticks(rows: Mapping[str, Sequence[Result]]) -> Yardsticks | None:
    """Of one backbone; None before its class-weighted runs are there."""
    if not rows["yardstick"]:
        return None
    balanced = [_confusion(result) for result in rows["yardstick"]]
    plain = [_confusion(result, reweigh=True) for result in rows["hard"]]
    between = [agreement(a, b) for a, b in itertools.combinations(balanced, 2)]
    return Yardsticks(
        balanced=np.mean(balanced, axis=0),
        reweighed=np.mean(plain, axis=0) if plain else None,
        seeds_agree=statistics.mean(between) if between else None,
    )


def _confusion(result: Result, reweigh: bool = False) -> Floats:
    said = open_run(result.path).predictions
    return mean_confusion(said.labels, said.probabilities, result.class_counts if reweigh else None)


def rows_of_looks(results: Sequence[Result], backbone: str) -> dict[str, list[Result]]:
    return {name: seeds_of(results, looks_cell(name, backbone)) for name in LOOKS}


def structure_grid(results: Sequence[Result]) -> Grid:
    """What the soft labels of each method follow. A backbone without a yardstick is held against the first one's that
    has."""
    rows: list[tuple[Lines, ...]] = []
    measured = {title: yardsticks(rows_of_looks(results, backbone)) for backbone, title in BACKBONES.items()}
    lender = next((title for title, own in measured.items() if own), None)
    for backbone, title in BACKBONES.items():
        against = title if measured[title] else lender
        named = (title,) if against in (title, None) else (title, f"yardstick of {against}")
        for name, own in rows_of_looks(results, backbone).items():
            if any(result.soft_labels for result in own):
                rows.append((named, (LOOKS[name],), *_structure(own, measured[against] if against else None)))
    return Grid(
        "What the soft labels follow",
        "Rank correlation of the off-diagonal with the yardstick (what hard labels with weighed classes confuse on "
        "unseen lesions), with the confusions of hard labels whose class frequencies are taken out, and with class "
        "rarity; with the yardstick beyond what both share with rarity (partial); of the diagonal with class size. "
        "Rarity is from all digits of a matrix, the others are from the digits that were kept, where small entries can "
        f"be equal. Mean over seeds, each seed below.{_reliability(results)}{_between_backbones(results)}",
        ("Backbone", "Labels", "Yardstick", "Reweighed", "Rarity", "Yardstick beyond rarity", "Softness",
         "Softness and size", "Seeds agree", "Held at"),
        tuple(rows) or ((("–",), (NOT_RUN,), *((NONE,),) * 8),),
        names=2,
    )  # fmt: skip


def _reliability(results: Sequence[Result]) -> str:
    """What is to be known of the yardstick itself."""
    words = ""
    for backbone, title in BACKBONES.items():
        found = rows_of_looks(results, backbone)
        measured = yardsticks(found)
        if measured is None:
            continue
        counts = found["yardstick"][0].class_counts
        own = inverse_frequency_agreement(measured.balanced, counts)
        words += f" The yardstick itself and rarity: {own:.2f} ({title})"
        words += "." if measured.seeds_agree is None else f"; two seeds' yardsticks: {measured.seeds_agree:.2f}."
    return words


def _between_backbones(results: Sequence[Result]) -> str:
    """How far the matrices of two backbones agree, each the mean over its seeds."""
    words = ""
    for name, label in LOOKS.items():
        matrices = {
            title: np.mean([result.matrix for result in own], axis=0)
            for backbone, title in BACKBONES.items()
            if (own := seeds_of(results, looks_cell(name, backbone))) and own[0].soft_labels
        }
        pairs = [
            f"{first} and {second} {number(agreement(matrices[first], matrices[second]), 2)}"
            for first, second in itertools.combinations(matrices, 2)
        ]
        words += f" {label}, agreement of backbones: {', '.join(pairs)}." if pairs else ""
    return words


def _structure(own: Sequence[Result], measured: Yardsticks | None) -> list[Lines]:
    matrices = [np.asarray(result.soft_labels) for result in own]
    counts = own[0].class_counts
    balanced, reweighed = (None, None) if measured is None else (measured.balanced, measured.reweighed)
    sizes = [float(spearmanr(m.diagonal(), counts).statistic) if np.ptp(m.diagonal()) > 1e-9 else math.nan
             for m in matrices]  # fmt: skip
    between = [agreement(a, b) for a, b in itertools.combinations(matrices, 2)]
    return [
        _mean([agreement(m, balanced) for m in matrices] if balanced is not None else []),
        _mean([agreement(m, reweighed) for m in matrices] if reweighed is not None else []),
        _mean([result.inverse_frequency_agreement for result in own]),
        _mean(
            [partial_agreement(m, balanced, inverse_frequency(counts)) for m in matrices]
            if balanced is not None
            else []
        ),
        _mean([result.final_softness for result in own]),
        _mean(sizes),
        (number(statistics.mean(between), 2) if between else NONE,),
        (", ".join(str(result.freeze_epoch or "never") for result in own),),
    ]


def _mean(values: Sequence[float | None]) -> Lines:
    """
    >>> _mean([0.5, 0.7]), _mean([None])
    (('0.60', '0.50, 0.70'), ('–',))
    """
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known:
        return (NONE,)
    each = (", ".join(number(value, 2) for value in known),) if len(known) > 1 else ()
    return (number(statistics.mean(known), 2), *each)


def looks_grid(results: Sequence[Result], seeds: Seeds) -> Grid:
    """The scores of each method on the split by lesion."""
    rows = []
    for backbone, title in BACKBONES.items():
        for name, own in rows_of_looks(results, backbone).items():
            if own or backbone == "resnet18":
                mean = seeds.mean(own) if own else None
                scores = [plain_field(mean, score) for score in SCORED]
                rows.append(((title,), (LOOKS[name],), (str(len(own)) if own else NONE,), *scores))
    return Grid(
        "Soft labels that follow looks, on the split by lesion",
        "Mean over seeds ± their standard deviation, and the 95% interval over seeds and lesions.",
        ("Backbone", "Labels", "Seeds", *(HEADS[name] for name in SCORED)),
        tuple(rows),
        names=3,
    )


def looks_pairs_grid(results: Sequence[Result], seeds: Seeds) -> Grid:
    """Ours against hard labels, uniform smoothing and plain CCL, paired by seed."""
    pairs = []
    for backbone, title in BACKBONES.items():
        found = rows_of_looks(results, backbone)
        for reference in REFERENCES:
            others = [name for name in LOOKS if name not in ("yardstick", *REFERENCES)]
            groups = {LOOKS[name]: found[name] for name in (*others, reference)}
            compared = seeds.against(groups, LOOKS[reference], f"looks, {backbone}")
            pairs += [(title, pair) for pair in compared["pairs"]] if compared else []
    return pairs_grid(
        "Paired by seed",
        "Differences are first minus second, in points of a hundred, with 95% intervals over seeds and lesions both; p "
        "after Holm's correction over the pairs with the same second.",
        pairs,
    )


def pairs_grid(title: str, caption: str, pairs: Sequence[tuple[str, Mapping[str, object]]]) -> Grid:
    names = ("accuracy", "balanced_accuracy", "macro_f1", "kappa", "ece_calibrated")
    rows = [((backbone,), *pair_fields(pair, names)) for backbone, pair in pairs]
    columns = ("Backbone", "Pair", "Seeds", *(HEADS[name] for name in names), "In words")
    empty: tuple[Lines, ...] = ((NONE,), (NOT_RUN,), *(((NONE,),) * (len(columns) - 2)))
    return Grid(title, caption, columns, tuple(rows) or (empty,), names=2, words=True)


def uses_grid(results: Sequence[Result], seeds: Seeds) -> Grid:
    """What each way of using CCL-Net's soft labels changes."""
    from cclnet.reproduce.experiments import uses

    groups = {cell.variant or "as it is": seeds_of(results, cell) for cell in uses()}
    compared = seeds.against({name: own for name, own in groups.items() if own}, "as it is", "uses")
    pairs = [("ResNet-18", pair) for pair in compared["pairs"]] if compared else []
    settings = ", ".join(USES)
    return pairs_grid(
        "Ways of using CCL-Net's soft labels, against CCL-Net as it is",
        f"On the split by lesion, paired by seed, one thing at a time: {settings}. Fields as above.",
        pairs,
    )


def tune_looks_grid(results: Sequence[Result]) -> Grid:
    """The candidates for using soft labels from centroids, best first."""
    rows = [
        ((result.cell.variant,), (str(result.cell.seed),),
         *(plain_field(_one(result), name) for name in (*CHOSEN_BY, "ece_calibrated")))
        for result in sorted(results, key=merit)
    ]  # fmt: skip
    return Grid(
        "Choices for CCL from centroids on ResNet-18",
        "Trained on 80% of the training part of the split by lesion and judged on the rest of it, by lesion; nothing "
        "of what the tables report was looked at. Best balanced accuracy first.",
        ("Candidate", "Seed", *(HEADS[name] for name in (*CHOSEN_BY, "ece_calibrated"))),
        tuple(rows) or ((("–",), (NONE,), *((NOT_RUN,),) * 4),),
        names=2,
    )


def merit(result: Result) -> tuple[float, float]:
    """What candidates are sorted by."""
    return (-(result.value("balanced_accuracy") or 0.0), -(result.value("accuracy") or 0.0))


def best_change(results: Sequence[Result]) -> str | None:
    """The candidate other than the defaults that came out best; None before any was run."""
    changed = [result for result in results if CANDIDATES.get(result.cell.variant)]
    return min(changed, key=merit).cell.variant if changed else None


def _one(result: Result) -> dict[str, dict[str, float | None]]:
    scores = result.scores
    return {n: {"mean": s["value"], "sd": None, "low": s["low"], "high": s["high"]} for n, s in scores.items()}
