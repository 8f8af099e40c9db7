"""Tables and figure of the study, from kept results alone.

The reference confusion matrix is the mean confusion, on unseen lesions, of a classifier trained with hard labels and
class weights, averaged over its seeds. A network that fits its training images is hardly affected by class weights, so
a second reference needs no run of its own: the confusions of hard labels after prior correction, with the class
frequencies divided out of the probabilities.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import spearmanr

from cclnet.evaluation.similarity import (
    agreement,
    agreement_p,
    inverse_frequency,
    inverse_frequency_agreement,
    mean_confusion,
    partial_agreement,
    partial_agreement_p,
)
from cclnet.files import make_folder
from cclnet.report.text import NONE
from cclnet.reproduce.experiments import BACKBONES, COMPARED
from cclnet.reproduce.paper_figures import save_picture
from cclnet.reproduce.seeds import RANKING, PaperResult, SeedStatistics, correct_together, read_results, seeds_of
from cclnet.reproduce.tables import (
    HEADS,
    NOT_RUN,
    PAIRS_CAPTION,
    POWER_CAPTION,
    Grid,
    Grids,
    Lines,
    check_has_results,
    markdown,
    number,
    pair_fields,
    part_of,
    pooled_text,
    runs_text,
    score_field,
    write_tables,
)
from cclnet.runs.folder import open_run
from cclnet.runs.predictions import Floats
from similarity_cells import CANDIDATES, ROWS, TUNING, USES, row_cell, uses

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORED = ("accuracy", "balanced_accuracy", "macro_f1", "kappa", *RANKING, "ece", "ece_calibrated")
CHOSEN_BY = ("balanced_accuracy", "accuracy", "kappa")
UNCHANGED = "unchanged"
REFERENCE_COLOUR, FREQUENCY_COLOUR = "#31688e", "#b5523b"


@dataclass(frozen=True)
class References:
    """Reference confusion matrices on unseen lesions, [K, K]."""

    balanced: Floats  # of hard labels with class weights
    corrected: Floats | None  # of hard labels after prior correction
    seeds_agree: float | None  # agreement of the first between seeds: an upper bound for any matrix


def rows_of(results: Sequence[PaperResult], backbone: str) -> dict[str, list[PaperResult]]:
    """The results of each row of ROWS with one backbone, sorted by seed."""
    return {name: seeds_of(results, row_cell(name, backbone)) for name in ROWS}


def references(rows: Mapping[str, Sequence[PaperResult]]) -> References | None:
    """The references of one backbone; None without class-weighted runs."""
    if not rows["reference"]:
        return None
    balanced = [_confusion(result) for result in rows["reference"]]
    corrected = [_confusion(result, corrected=True) for result in rows["hard"]]
    between = [agreement(a, b) for a, b in itertools.combinations(balanced, 2)]
    return References(
        balanced=np.mean(balanced, axis=0),
        corrected=np.mean(corrected, axis=0) if corrected else None,
        seeds_agree=statistics.mean(between) if between else None,
    )


def _confusion(result: PaperResult, corrected: bool = False) -> Floats:
    predictions = open_run(result.path).predictions
    return mean_confusion(predictions.labels, predictions.probabilities, result.class_counts if corrected else None)


def structure_grid(results: Sequence[PaperResult]) -> Grid:
    """What the soft labels of each method follow. A backbone without a reference uses the first one that exists."""
    rows: list[tuple[Lines, ...]] = []
    measured = {title: references(rows_of(results, backbone)) for backbone, title in BACKBONES.items()}
    first = next((title for title, own in measured.items() if own), None)
    for backbone, title in BACKBONES.items():
        against = title if measured[title] else first
        named = (title,) if against in (title, None) else (title, f"reference of {against}")
        for name, own in rows_of(results, backbone).items():
            if any(result.soft_labels for result in own):
                rows.append((named, (ROWS[name],), *_structure_fields(own, measured[against] if against else None)))
    caption = (
        "Rank correlation of the off-diagonal with the reference confusion matrix (hard labels with class weights, on "
        "unseen lesions), with the confusions of hard labels after prior correction, and with inverse class frequency; "
        "partial correlation with the reference given inverse class frequency; correlation of the diagonal with class "
        "size. The correlation with inverse class frequency uses all digits of a matrix, the others the digits that "
        "were kept, where small entries can be equal. Mean over seeds, each seed below; p: the largest over seeds, by "
        "exact permutation of the classes (of 5,040 relabellings, those that correlate at least as strongly)."
    )
    return Grid(
        "What the soft labels follow",
        f"{caption}{_reliability(results, measured)}{_between_backbones(results)}",
        ("Backbone", "Labels", "Reference", "Prior-corrected", "Inverse frequency", "Reference given frequency",
         "Softness", "Softness and size", "Seeds agree", "Frozen at"),
        tuple(rows) or ((("–",), (NOT_RUN,), *((NONE,),) * 8),),
        names=2,
    )  # fmt: skip


def _reliability(results: Sequence[PaperResult], measured: Mapping[str, References | None]) -> str:
    """How the reference itself relates to class frequency, and how far its seeds agree."""
    text = ""
    for backbone, title in BACKBONES.items():
        if (own := measured[title]) is not None:
            counts = rows_of(results, backbone)["reference"][0].class_counts
            frequency = inverse_frequency_agreement(own.balanced, counts)
            p = agreement_p(own.balanced, inverse_frequency(counts))
            text += f" The reference and inverse class frequency: {frequency:.2f}, p {p:.2g} ({title})"
            text += "." if own.seeds_agree is None else f"; the references of two seeds: {own.seeds_agree:.2f}."
    return text


def _between_backbones(results: Sequence[PaperResult]) -> str:
    """The agreement of the matrices of two backbones, each the mean over its seeds."""
    text = ""
    for name, label in ROWS.items():
        matrices = {
            title: np.mean([result.matrix for result in own], axis=0)
            for backbone, title in BACKBONES.items()
            if (own := seeds_of(results, row_cell(name, backbone))) and own[0].soft_labels
        }
        pairs = [
            f"{first} and {second} {number(agreement(matrices[first], matrices[second]), 2)} "
            f"(p {agreement_p(matrices[first], matrices[second]):.2g})"
            for first, second in itertools.combinations(matrices, 2)
        ]
        text += f" {label}, agreement of backbones: {', '.join(pairs)}." if pairs else ""
    return text


def _structure_fields(own: Sequence[PaperResult], measured: References | None) -> list[Lines]:
    matrices = [np.asarray(result.soft_labels) for result in own]
    counts = own[0].class_counts
    balanced, corrected = (None, None) if measured is None else (measured.balanced, measured.corrected)
    sizes = [
        float(spearmanr(m.diagonal(), counts).statistic) if np.ptp(m.diagonal()) > 1e-9 else math.nan for m in matrices
    ]
    between = [agreement(a, b) for a, b in itertools.combinations(matrices, 2)]
    given = [] if balanced is None else [partial_agreement(m, balanced, inverse_frequency(counts)) for m in matrices]
    given_p: Lines = ()
    if balanced is not None:
        largest = max(partial_agreement_p(m, balanced, inverse_frequency(counts)) for m in matrices)
        given_p = (f"p {largest:.2g}",)
    return [
        _agreements(matrices, balanced),
        _agreements(matrices, corrected),
        (*_mean([result.inverse_frequency_agreement for result in own]), _p(matrices, inverse_frequency(counts))),
        (*_mean(given), *given_p),
        _mean([result.final_softness for result in own]),
        _mean(sizes),
        (number(statistics.mean(between), 2), _pairs_p(matrices)) if between else (NONE,),
        (", ".join(str(result.freeze_epoch or "never") for result in own),),
    ]


def _agreements(matrices: Sequence[Floats], other: Floats | None) -> Lines:
    return (NONE,) if other is None else (*_mean([agreement(m, other) for m in matrices]), _p(matrices, other))


def _p(matrices: Sequence[Floats], other: Floats) -> str:
    """The largest p over the seeds."""
    return f"p {max(agreement_p(matrix, other) for matrix in matrices):.2g}"


def _pairs_p(matrices: Sequence[Floats]) -> str:
    """The largest p over pairs of seeds."""
    return f"p {max(agreement_p(a, b) for a, b in itertools.combinations(matrices, 2)):.2g}"


def _mean(values: Sequence[float | None]) -> Lines:
    """The mean, and with several seeds each value: [0.5, 0.7] gives ('0.60', '0.50, 0.70')."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known:
        return (NONE,)
    each = (", ".join(number(value, 2) for value in known),) if len(known) > 1 else ()
    return (number(statistics.mean(known), 2), *each)


def scores_grid(results: Sequence[PaperResult], seeds: SeedStatistics) -> Grid:
    """The scores of each method on the split by lesion."""
    rows, cells = [], {backbone: rows_of(results, backbone) for backbone in BACKBONES}
    pooled = seeds.pooled_variance([own for found in cells.values() for own in found.values()])
    for backbone, title in BACKBONES.items():
        for name, own in cells[backbone].items():
            if own or backbone == "resnet18":
                mean = seeds.mean(own, pooled) if own else None
                scores = [score_field(mean, score) for score in SCORED]
                rows.append(((title,), (ROWS[name],), (str(len(own) or NONE),), *scores))
    return Grid(
        "Soft labels that follow visual similarity, on the split by lesion",
        "Mean over seeds ± their standard deviation, and the 95% interval over seeds and lesions."
        + pooled_text(pooled),
        ("Backbone", "Labels", "Seeds", *(HEADS[name] for name in SCORED)),
        tuple(rows),
        names=3,
    )


def scores_pairs_grid(results: Sequence[PaperResult], seeds: SeedStatistics) -> Grid:
    """Our methods against hard labels, uniform smoothing and plain CCL, paired by seed."""
    pairs = []
    for backbone, title in BACKBONES.items():
        found = rows_of(results, backbone)
        for reference in COMPARED:
            others = [name for name in ROWS if name not in ("reference", *COMPARED)]
            groups = {ROWS[name]: found[name] for name in (*others, reference)}
            compared = seeds.compare_with(groups, ROWS[reference], f"similarity, {backbone}")
            pairs += [(title, pair) for pair in compared["pairs"]] if compared else []
    return pairs_grid("Paired by seed", f"{PAIRS_CAPTION}all pairs of this table. {POWER_CAPTION}", pairs)


def pairs_grid(title: str, caption: str, pairs: Sequence[tuple[str, Mapping[str, Any]]]) -> Grid:
    names = ("accuracy", "balanced_accuracy", "macro_f1", "kappa", *RANKING, "ece_calibrated")
    corrected = correct_together([pair for _, pair in pairs])
    rows = [((backbone,), *pair_fields(pair, names)) for (backbone, _), pair in zip(pairs, corrected, strict=True)]
    columns = ("Backbone", "Pair", "Seeds", *(HEADS[name] for name in names), "In words")
    empty: tuple[Lines, ...] = ((NONE,), (NOT_RUN,), *(((NONE,),) * (len(columns) - 2)))
    return Grid(title, caption, columns, tuple(rows) or (empty,), names=2, words=True)


def uses_grid(results: Sequence[PaperResult], seeds: SeedStatistics) -> Grid:
    """The effect of each way of using CCL-Net's soft labels."""
    groups = {cell.variant or UNCHANGED: seeds_of(results, cell) for cell in uses()}
    compared = seeds.compare_with({name: own for name, own in groups.items() if own}, UNCHANGED, "uses")
    return pairs_grid(
        "Ways of using CCL-Net's soft labels, against unchanged CCL-Net",
        f"On the split by lesion, paired by seed, one change at a time: {', '.join(USES)}. Fields as above.",
        [("ResNet-18", pair) for pair in compared["pairs"]] if compared else [],
    )


def _ranking(result: PaperResult) -> tuple[float, float]:
    """Sort key of candidates, the best first."""
    return (-(result.value("balanced_accuracy") or 0.0), -(result.value("accuracy") or 0.0))


def tune_grid(results: Sequence[PaperResult]) -> Grid:
    """The candidates for the settings that the paper leaves open, best first."""
    rows = []
    for result in sorted(results, key=_ranking):
        settings = result.settings
        jitter = "/".join(f"{settings['augment'][n]:g}" for n in ("brightness", "contrast", "saturation", "hue"))
        clip = f"{settings['clip']:g}" if settings["clip"] else "none"
        drops = ", ".join(f"{drop * settings['epochs']:.0f}" for drop in settings["drops"])
        names = ((result.cell.variant,), (str(result.cell.seed),), (str(settings["epochs"]),), (drops,))
        rows.append((*names, (jitter,), (clip,), *(_one_run_field(result, name) for name in CHOSEN_BY)))
    return Grid(
        "Open choices, for hard labels on ResNet-18",
        "Trained on 80% of the training split of the paper's recipe and evaluated on the rest of it, by lesion; no "
        "reported image was used. Best balanced accuracy first.",
        ("Candidate", "Seed", "Epochs", "Drops at", "Jitter", "Clip", *(HEADS[n] for n in CHOSEN_BY)),
        tuple(rows),
        names=2,
    )


def tune_similarity_grid(results: Sequence[PaperResult]) -> Grid:
    """The candidates for using soft labels from centroids, best first."""
    scores = (*CHOSEN_BY, "ece_calibrated")
    rows = [
        ((result.cell.variant,), (str(result.cell.seed),), *(_one_run_field(result, name) for name in scores))
        for result in sorted(results, key=_ranking)
    ]
    return Grid(
        "Choices for CCL from centroids on ResNet-18",
        "Trained on 80% of the training split by lesion and evaluated on the rest of it, by lesion; no reported image "
        "was used. Best balanced accuracy first.",
        ("Candidate", "Seed", *(HEADS[name] for name in scores)),
        tuple(rows) or ((("–",), (NONE,), *((NOT_RUN,),) * 4),),
        names=2,
    )


def _one_run_field(result: PaperResult, name: str) -> Lines:
    score = result.scores[name]
    return score_field({name: {"mean": score["value"], "low": score["low"], "high": score["high"]}}, name)


def best_change(results: Sequence[PaperResult]) -> str | None:
    """The best candidate other than the defaults; None before any was run."""
    changed = [result for result in results if CANDIDATES.get(result.cell.variant)]
    return min(changed, key=_ranking).cell.variant if changed else None


def similarity_figure(results: Sequence[PaperResult], backbone: str = "resnet18") -> Figure | None:
    """What soft labels follow over epochs: one panel per method, one line per seed. None without a reference or
    without a method that learns soft labels."""
    from matplotlib.figure import Figure

    rows = rows_of(results, backbone)
    measured = references(rows)
    shown = [(name, own) for name, runs in rows.items() if (own := [r for r in runs if r.soft_label_history])]
    if measured is None or not shown:
        return None
    figure = Figure(figsize=(2.8 * len(shown) + 0.6, 3.4), layout="constrained")
    axes = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
    own_frequency = inverse_frequency_agreement(measured.balanced, shown[0][1][0].class_counts)
    for axis, (name, own) in zip(axes, shown, strict=True):
        axis.axhline(0, color="grey", linewidth=0.6)
        axis.axhline(own_frequency, color=FREQUENCY_COLOUR, linestyle=":", linewidth=1.2)
        for result in own:
            _agreement_curves(axis, result, measured.balanced)
        axis.set_title(ROWS[name], fontsize=10)
        axis.set_xlabel("epoch")
    axes[0].set_ylabel("rank correlation")
    title = "Soft labels against the reference confusion matrix (blue) and inverse class frequency (red; "
    figure.suptitle(title + "dotted: that of the reference); dot: frozen", fontsize=10)
    return figure


def _agreement_curves(axis: Any, result: PaperResult, reference: Floats) -> None:
    history, frozen = result.soft_label_history, result.freeze_epoch
    assert history is not None  # only results with a history are shown
    for colour, values in (
        (REFERENCE_COLOUR, [agreement(matrix, reference) for matrix in history["matrices"]]),
        (FREQUENCY_COLOUR, [inverse_frequency_agreement(m, result.class_counts) for m in history["matrices"]]),
    ):
        axis.plot(history["epochs"], values, color=colour, alpha=0.8, linewidth=1.3)
        if frozen is not None:
            near = min(range(len(values)), key=lambda i: abs(history["epochs"][i] - frozen))
            axis.plot(history["epochs"][near], values[near], "o", color=colour, markersize=5)


def study_grids(results: Path, seeds: SeedStatistics) -> Grids:
    """Every table of the study, by the name of its file."""
    found = read_results(results)
    return {
        "tune": [tune_grid(read_results(results / "tune"))],
        "similarity": [structure_grid(found), scores_grid(found, seeds), scores_pairs_grid(found, seeds)],
        "tune-similarity": [tune_similarity_grid(read_results(results / "tune-lesion"))],
        **(
            {"uses": [uses_grid(found, seeds)]} if any(seeds_of(found, cell) for cell in uses() if cell.variant) else {}
        ),
    }


def write_study(results: Path) -> list[Path]:
    """Write the tables and the figure of the study beside the results; returns the pages."""
    found, seeds, figures = read_results(results), SeedStatistics(results), []
    if (figure := similarity_figure(found)) is not None:
        figures.append(make_folder(results / "figures") / "similarity-over-epochs.png")
        save_picture(figure, figures[0])
    grids = study_grids(results, seeds)
    seeds.write()
    rows = {"tune": _tuning_rows(results / "tune"), "tune-similarity": _tuning_rows(results / "tune-lesion")}
    beyond = [grid for name in ("similarity", "uses", "tune-similarity") for grid in grids.get(name, ())]
    pages = {
        "tune": ("Open choices of CCL-Net's recipe", grids["tune"], []),
        "similarity": ("Soft labels that follow visual similarity", beyond, figures),
    }
    return write_tables(results, grids, rows, pages, runs_text(found))


def _tuning_rows(folder: Path) -> list[dict[str, Any]]:
    return [
        {"candidate": r.cell.variant, "seed": r.cell.seed, **{name: r.value(name) for name in r.scores}}
        for r in read_results(folder)
    ]


SHORT = ("Labels", "Seeds", "Accuracy", "Balanced accuracy", "Macro AUC", "AURC", "ECE after temperature")


def study_blocks(results: Path) -> dict[str, dict[str, str]]:
    """The generated blocks of each document, by document and marker."""
    grids = study_grids(results, SeedStatistics(results))
    structure, *scored = grids["similarity"]
    return {
        "docs/similarity.md": {"similarity": markdown(structure)},
        "docs/soft_targets.md": {"similarity scores short": markdown(part_of(scored[0], SHORT, Backbone="ResNet-18"))},
        "docs/tables_soft_labels.md": {
            "similarity scores": markdown(*scored),
            "tune-similarity": markdown(*grids["tune-similarity"]),
        },
        "docs/tables_paper.md": {"tune": markdown(*grids["tune"])},
    }


def check_has_study_results(results: Path) -> None:
    check_has_results(results, ("", *TUNING))
