"""The tables, from result files alone: ours beside the paper's, the difference and its interval."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cclnet.report.text import NONE, signed_text
from cclnet.reproduce.experiments import Cell
from cclnet.reproduce.paper import BACKBONES, LR_CCL, METHODS, SCORES, TABLE2, table1
from cclnet.reproduce.seeds import RIVALS, Result, Seeds

NOT_RUN = "not run"
SPLIT_TITLES = {"paper": "the paper's split", "lesion": "the split by lesion"}
OURS_ALONE = ("balanced_accuracy", "ece", "ece_calibrated")  # what the paper does not report
CHOSEN_BY = ("balanced_accuracy", "accuracy", "kappa")
HEADS = {
    "accuracy": "Accuracy", "macro_f1": "F1", "kappa": "Kappa", "macro_jaccard": "Jaccard",
    "balanced_accuracy": "Balanced accuracy", "ece": "ECE", "ece_calibrated": "ECE after temperature",
}  # fmt: skip

Lines = tuple[str, ...]  # of one field: what matters, then what goes with it


@dataclass(frozen=True)
class Grid:
    """A table as a reader sees it. The first ``names`` columns name the row, the others hold numbers; with ``words``
    the last one holds sentences."""

    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Lines, ...], ...]
    names: int = 1
    words: bool = False


def table1_grid(results: Sequence[Result], seeds: Seeds, split: str = "paper", scores: Sequence[str] = ()) -> Grid:
    """Table 1: every backbone with every method. ``scores`` are what is shown, by default all."""
    shown = tuple(scores) or (*SCORES, *OURS_ALONE)
    rows = []
    for backbone, backbone_title in BACKBONES.items():
        for method, method_title in METHODS.items():
            own = seeds_of(results, Cell(backbone, method, split=split))
            if not own and split != "paper" and method not in RIVALS:
                continue  # Table 1 is on the paper's split; on another one the rivals are what is asked about
            head: tuple[Lines, ...] = ((backbone_title,), (method_title,), (_seeds_text(own),))
            mean = seeds.mean(own) if own else None
            published = table1(backbone, method)
            rows.append((*head, *(_field(mean, name, published.get(name)) for name in shown)))
    return Grid(
        f"Table 1 on {SPLIT_TITLES[split]}",
        _table1_caption(results, split),
        ("Backbone", "Method", "Seeds", *(HEADS[name] for name in shown)),
        tuple(rows),
        names=3,
    )


def _table1_caption(results: Sequence[Result], split: str) -> str:
    own = [r for r in results if r.cell.split == split]
    words = "Each field: our value, the paper's, and the difference with its 95% interval, which is that of our value "
    words += "(over seeds and lesions both; for one seed over lesions)."
    if own:
        part = own[0].split
        groups = f" of {part['groups']:,} lesions" if part["groups"] else ""
        words += f" Judged on {part['images']:,} images{groups}."
    if split == "lesion":
        words += " The paper's numbers are of its own split, on which lesions leak, and stand here for orientation."
    return words


def seeds_of(results: Sequence[Result], cell: Cell) -> list[Result]:
    """The results of a cell, whatever the seed, in the order of their seeds."""
    wanted = {key: value for key, value in cell.keys.items() if key != "seed"}
    own = [r for r in results if {key: value for key, value in r.cell.keys.items() if key != "seed"} == wanted]
    return sorted(own, key=lambda result: result.cell.seed)


def _seeds_text(own: Sequence[Result]) -> str:
    return str(len(own)) if own else NONE


def number(value: float | None, digits: int = 3) -> str:
    """
    >>> number(0.83472), number(None)
    ('0.835', '–')
    """
    return NONE if value is None else f"{value:.{digits}f}"


def plain_field(mean: Mapping[str, Any] | None, name: str) -> Lines:
    """A score of ours that nothing is held against."""
    return _field(mean, name, None)


def _field(mean: Mapping[str, Any] | None, name: str, published: float | None) -> Lines:
    paper = () if published is None else (f"paper {number(published)}",)
    if mean is None:
        return (NOT_RUN, *paper)
    own = mean[name]
    value = number(own["mean"]) + (f" ± {number(own['sd'])}" if own["sd"] is not None else "")
    if published is None:
        return (value, _interval(own["low"], own["high"]))
    ends = ["" if end is None else signed_text(end - published, 3) for end in (own["low"], own["high"])]
    interval = f" [{', '.join(ends)}]" if all(ends) else ""
    return (value, *paper, signed_text(own["mean"] - published, 3) + interval)


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"[{number(low)}, {number(high)}]"


def table2_grid(results: Sequence[Result], seeds: Seeds, split: str = "paper") -> Grid:
    """Table 2: what the learning rate of the head does, on resnet18."""
    rows = []
    for rate, published in TABLE2.items():
        own = seeds_of(results, Cell(split=split, lr_ccl=rate))
        mean = seeds.mean(own) if own else None
        never = "never" if published.converged is None else str(published.converged)
        converged = _each(own, "converged_epoch", "never", 0)
        rows.append((
            (f"{rate:g}",),
            (_seeds_text(own),),
            (converged, f"paper {never}"),
            (_each(own, "freeze_epoch", "never", 0),),
            _softness(own, published.softness),
            _field(mean, "accuracy", published.accuracy),
            _field(mean, "kappa", published.kappa),
        ))  # fmt: skip
    return Grid(
        "Table 2: the learning rate of the head",
        "ResNet-18. Converged: the epoch after which softness did not drop for ten epochs; at the end of these the "
        "dictionary is frozen. Softness: mean probability of the own class in the soft labels when the head has "
        "converged, as in the paper, or at the end where it never has; that of the labels that training ends with "
        "beside it. Fields as in Table 1.",
        ("Rate", "Seeds", "Converged at", "Frozen at", "Softness", "Accuracy", "Kappa"),
        tuple(rows),
        names=2,
    )


def _each(own: Sequence[Result], key: str, none: str, digits: int) -> str:
    """A value of each seed."""
    if not own:
        return NOT_RUN
    values = [getattr(r, key) for r in own]
    return ", ".join(none if value is None else f"{value:.{digits}f}" for value in values)


def _softness(own: Sequence[Result], published: float) -> Lines:
    paper = f"paper {published:.2f}"
    if not own:
        return (NOT_RUN, paper)
    converged = sum(map(_converged_softness, own)) / len(own)
    last = sum(r.final_softness or 0.0 for r in own) / len(own)
    return (number(converged), paper, f"{signed_text(converged - published, 3)}, at the end {number(last)}")


def _converged_softness(result: Result) -> float:
    """The softness that the paper tells: "when the CCL head converges", ten epochs before the labels are frozen."""
    if result.converged_epoch is None or result.softness is None:
        return result.final_softness or 0.0
    return result.softness[result.converged_epoch - 1]


def rivals_grid(results: Sequence[Result], seeds: Seeds) -> Grid:
    """CCL-Net against hard labels and uniform smoothing, on both splits, with the verdict in words."""
    rows: list[tuple[Lines, ...]] = []
    for split, split_title in SPLIT_TITLES.items():
        for backbone, title in BACKBONES.items():
            own = [r for r in results if (r.cell.split, r.cell.backbone) == (split, backbone) and _plain(r.cell)]
            found = seeds.rivals(own)
            for pair in found["pairs"] if found else ():
                rows.append(_pair_row(split_title, title, pair))
    if not rows:
        rows.append(((NOT_RUN,), ("",), ("",), ("",), ("",), ("",), ("",)))
    return Grid(
        "CCL-Net against its rivals, paired by seed",
        "Differences are first minus second, in points of a hundred, with 95% intervals over seeds and lesions both; p "
        "after Holm's correction over the three pairs of a row's backbone and split.",
        ("Split", "Backbone", "Pair", "Seeds", "Accuracy", "Kappa", "In words"),
        tuple(rows),
        names=3,
        words=True,
    )


def _plain(cell: Cell) -> bool:
    """A cell of Table 1."""
    return not cell.variant and not cell.changes and cell.lr_ccl == LR_CCL


def _pair_row(split: str, backbone: str, pair: Mapping[str, Any]) -> tuple[Lines, ...]:
    return ((split,), (backbone,), *pair_fields(pair, ("accuracy", "kappa")))


def pair_fields(pair: Mapping[str, Any], scores: Sequence[str]) -> tuple[Lines, ...]:
    """The two names, how many seeds, the difference in each score, and the verdict on accuracy in words."""
    fields = [_points(pair["metrics"][name]) if name in pair["metrics"] else (NONE,) for name in scores]
    words = pair["metrics"]["accuracy"]["verdict"]
    return ((f"{pair['a']} − {pair['b']}",), (str(pair["seeds"]["a"]),), *fields, (words,))


def _points(test: Mapping[str, Any]) -> Lines:
    if test["difference"] is None:
        return (NONE,)
    ends = [signed_text(100 * test[end], 1) for end in ("low", "high") if test[end] is not None]
    interval = f"[{', '.join(ends)}]" if ends else ""
    p = "" if test["p_holm"] is None else f"p {test['p_holm']:.2g}"
    return (signed_text(100 * test["difference"], 1), *filter(None, (interval, p)))


def tune_grid(results: Sequence[Result]) -> Grid:
    """The candidates of the open choices, best first."""

    def merit(result: Result) -> tuple[float, float]:
        return (-(result.value("balanced_accuracy") or 0.0), -(result.value("accuracy") or 0.0))

    rows = []
    for result in sorted(results, key=merit):
        settings = result.settings
        jitter = "/".join(f"{settings['augment'][n]:g}" for n in ("brightness", "contrast", "saturation", "hue"))
        clip = f"{settings['clip']:g}" if settings["clip"] else "none"
        drops = ", ".join(f"{drop * settings['epochs']:.0f}" for drop in settings["drops"])
        scores = [(number(result.value(n)), _interval(*(result.scores[n][e] for e in ("low", "high"))))
                  for n in CHOSEN_BY]  # fmt: skip
        names = ((result.cell.variant,), (str(result.cell.seed),))
        rows.append((*names, (str(settings["epochs"]),), (drops,), (jitter,), (clip,), *scores))
    return Grid(
        "Open choices, for hard labels on ResNet-18",
        "Trained on 80% of the training part of the paper's split and judged on the rest of it, by lesion; nothing of "
        "what the tables report was looked at. Best balanced accuracy first.",
        ("Candidate", "Seed", "Epochs", "Drops at", "Jitter", "Clip", *(HEADS[n] for n in CHOSEN_BY)),
        tuple(rows),
        names=2,
    )


def cost_grid(results: Sequence[Result]) -> Grid:
    """What the runs took."""
    rows = []
    for device in sorted({r.device for r in results}):
        for backbone, title in BACKBONES.items():
            own = [r for r in results if (r.device, r.cell.backbone) == (device, backbone)]
            if own:
                speed = statistics.median(r.images_per_second for r in own)
                minutes = statistics.mean(r.seconds for r in own) / 60
                rows.append(((device,), (title,), (str(len(own)),), (f"{speed:,.0f}",), (f"{minutes:.1f}",)))
    return Grid(
        "What it took",
        "Images a second: median over epochs and runs, with as many runs at once as were asked for. Minutes: of "
        "training, mean over runs.",
        ("Device", "Backbone", "Runs", "Images a second", "Minutes a run"),
        tuple(rows),
        names=2,
    )


def table1_rows(results: Sequence[Result], seeds: Seeds) -> list[dict[str, Any]]:
    """Every number of Table 1 on both splits in a line of its own, for a CSV."""
    rows = []
    for split in SPLIT_TITLES:
        for backbone in BACKBONES:
            for method in METHODS:
                own = seeds_of(results, Cell(backbone, method, split=split))
                mean = seeds.mean(own) if own else {}
                for name in (*SCORES, *OURS_ALONE):
                    published = table1(backbone, method).get(name)
                    rows.append(_long_row(split, backbone, method, name, len(own), mean.get(name), published))
    return rows


def _long_row(
    split: str, backbone: str, method: str, name: str, runs: int, own: Mapping[str, Any] | None, published: float | None
) -> dict[str, Any]:
    row: dict[str, Any] = {"split": split, "backbone": backbone, "method": method, "score": name, "seeds": runs}
    values = {key: own[key] if own else None for key in ("mean", "sd", "low", "high")}
    return row | values | {
        "paper": published,
        "difference": _less(values["mean"], published),
        "difference_low": _less(values["low"], published),
        "difference_high": _less(values["high"], published),
        "state": "run" if own else NOT_RUN,
    }  # fmt: skip


def _less(value: float | None, published: float | None) -> float | None:
    return None if value is None or published is None else round(value - published, 6)


def table2_rows(results: Sequence[Result], split: str = "paper") -> list[dict[str, Any]]:
    """Every run of Table 2 in a line of its own, with the paper's numbers, for a CSV."""
    rows: list[dict[str, Any]] = []
    for rate, published in TABLE2.items():
        paper = {f"paper_{key}": value for key, value in asdict(published).items()}
        own = seeds_of(results, Cell(split=split, lr_ccl=rate))
        for result in own:
            values: dict[str, Any] = {
                key: getattr(result, key) for key in ("converged_epoch", "freeze_epoch", "final_softness")
            }
            values["converged_softness"] = _converged_softness(result)
            scores = {name: result.value(name) for name in ("accuracy", "kappa")}
            rows.append({"lr_ccl": rate, "seed": result.cell.seed, **values, **scores, **paper, "state": "run"})
        if not own:
            rows.append({"lr_ccl": rate, **paper, "state": NOT_RUN})
    return rows
