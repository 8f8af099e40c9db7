"""The paper's tables from kept results: our value, the published one, and the difference with its interval; written as
Markdown, CSV and HTML pages, and between the markers of documents."""

from __future__ import annotations

import base64
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from cclnet.errors import InputError
from cclnet.evaluation.statistics import Spread
from cclnet.files import make_folder, write_whole
from cclnet.report.html import render
from cclnet.report.text import NONE, signed_text
from cclnet.reproduce.experiments import BACKBONES, COMPARED, METHODS, PAPER_SCORES, TABLE2, PaperCell, published
from cclnet.reproduce.paper_figures import write_figures
from cclnet.reproduce.seeds import (
    RANKING,
    PaperResult,
    SeedStatistics,
    correct_together,
    plain_results,
    read_results,
    seeds_of,
)

NOT_RUN = "not run"
SPLIT_TITLES = {"paper": "the paper's split", "lesion": "the split by lesion"}
# The paper reports the first four.
OUR_SCORES = (*PAPER_SCORES, "balanced_accuracy", *RANKING, "ece", "ece_calibrated")
HEADS = {
    "accuracy": "Accuracy", "macro_f1": "F1", "kappa": "Kappa", "macro_jaccard": "Jaccard",
    "balanced_accuracy": "Balanced accuracy", "macro_auroc": "Macro AUC", "auroc:MEL": "Melanoma AUC", "aurc": "AURC",
    "ece": "ECE", "ece_calibrated": "ECE after temperature",
}  # fmt: skip
TABLE2_CAPTION = (
    "ResNet-18. Converged: the epoch after which softness did not drop for ten epochs; at the end of these the "
    "dictionary is frozen. Softness: mean probability of the own class in the soft labels when the head has converged, "
    "as in the paper, or at the end if it never converged; then that of the final labels. Fields as in Table 1."
)
PAIRS_CAPTION = (
    "Differences are first minus second, in percentage points, with 95% intervals over seeds and lesions; p after "
    "Holm's correction over "
)

POWER_CAPTION = (
    "The last line of a field: the true difference that this design finds in 80% of repetitions at the 5% level, "
    "before Holm's correction. One seed: conditional on that seed."
)

Lines = tuple[str, ...]  # the lines of one field, the most important first


@dataclass(frozen=True)
class Grid:
    """A table as a reader sees it. The first ``names`` columns name the row, the others have numbers; with ``words``
    the last one has sentences."""

    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Lines, ...], ...]
    names: int = 1
    words: bool = False


Grids = dict[str, list[Grid]]


def part_of(grid: Grid, columns: Sequence[str], **words: str) -> Grid:
    """Some columns of a grid, and of its rows those whose field in a column begins with a word.

    >>> grid = Grid("T", "", ("Backbone", "Pair", "F1"), ((("A",), ("x − y",), ("1",)), (("B",), ("x − z",), ("2",))))
    >>> part_of(grid, ("Pair", "F1"), Backbone="B").rows
    ((('x − z',), ('2',)),)
    """
    at = {name: grid.columns.index(name) for name in (*columns, *words)}
    rows = [row for row in grid.rows if all(row[at[name]][0].startswith(word) for name, word in words.items())]
    return Grid(
        grid.title,
        grid.caption.replace("all pairs of this table", "all pairs of the whole table"),
        tuple(columns),
        tuple(tuple(row[at[name]] for name in columns) for row in rows),
        names=sum(at[name] < grid.names for name in columns),
        words=grid.words and grid.columns[-1] in columns,
    )


def table1_grid(
    results: Sequence[PaperResult],
    seeds: SeedStatistics,
    split: str = "paper",
    scores: Sequence[str] = OUR_SCORES,
    backbones: Sequence[str] = tuple(BACKBONES),
) -> Grid:
    """Table 1: every backbone with every method. Off the paper's split, COMPARED and what was run."""
    rows, pooled = [], seed_variance(results, seeds, split)
    for backbone, backbone_title in ((name, BACKBONES[name]) for name in backbones):
        for method, method_title in METHODS.items():
            own = seeds_of(results, PaperCell(backbone, method, split=split))
            if own or split == "paper" or method in COMPARED:
                mean, paper = seeds.mean(own, pooled) if own else None, published(backbone, method)
                fields = [score_field(mean, name, paper.get(name)) for name in scores]
                rows.append(((backbone_title,), (method_title,), (str(len(own) or NONE),), *fields))
    caption = (
        "Each field: our mean (± standard deviation over seeds), the paper's value, and the difference with the 95% "
        "interval of our mean over seeds and lesions." + pooled_text(pooled)
    )
    if evaluated := [r.split for r in results if r.cell.split == split]:
        images, groups = evaluated[0]["images"], evaluated[0]["groups"]
        caption += f" Evaluated on {images:,} images{f' of {groups:,} lesions' if groups else ''}."
    if split == "lesion":
        caption += " The paper's numbers are those of its own split, on which lesions leak; they are for orientation."
    columns = ("Backbone", "Method", "Seeds", *(HEADS[name] for name in scores))
    return Grid(f"Table 1 on {SPLIT_TITLES[split]}", caption, columns, tuple(rows), names=3)


def seed_variance(results: Sequence[PaperResult], seeds: SeedStatistics, split: str = "paper") -> dict[str, Spread]:
    """The variance between seeds of each score, pooled over the cells of Table 1 on a split."""
    return seeds.pooled_variance([seeds_of(results, PaperCell(b, m, split=split)) for b in BACKBONES for m in METHODS])


def pooled_text(pooled: Mapping[str, Spread]) -> str:
    if "accuracy" not in pooled:
        return " For one seed it is over lesions only, so conditional on that seed."
    sd, freedom = pooled["accuracy"].variance ** 0.5, pooled["accuracy"].freedom
    return (
        " For cells with one or two seeds the variance between seeds is that of the whole table (accuracy: standard "
        f"deviation {number(sd)}, {freedom:g} degrees of freedom)."
    )


def number(value: float | None, digits: int = 3) -> str:
    """
    >>> number(0.83472), number(None)
    ('0.835', '–')
    """
    return NONE if value is None else f"{value:.{digits}f}"


def score_field(mean: Mapping[str, Any] | None, name: str, paper: float | None = None) -> Lines:
    """Our value of a score with its interval, or with the paper's value and the difference from it."""
    paper_line = () if paper is None else (f"paper {number(paper)}",)
    if mean is None:
        return (NOT_RUN, *paper_line)
    own = mean[name]
    value = number(own["mean"]) + (f" ± {number(own['sd'])}" if own.get("sd") is not None else "")
    ends = [own["low"], own["high"]]
    if None in ends:
        interval = ""
    elif paper is None:
        interval = f"[{number(ends[0])}, {number(ends[1])}]"
    else:
        interval = f" [{', '.join(signed_text(end - paper, 3) for end in ends)}]"
    return (value, interval) if paper is None else (value, *paper_line, signed_text(own["mean"] - paper, 3) + interval)


def table2_grid(results: Sequence[PaperResult], seeds: SeedStatistics) -> Grid:
    """Table 2: the effect of the learning rate of the head, on resnet18."""
    rows: list[tuple[Lines, ...]] = []
    pooled = seed_variance(results, seeds)
    for rate, paper in TABLE2.items():
        own = seeds_of(results, PaperCell(lr_ccl=rate))
        mean = seeds.mean(own, pooled) if own else None
        converged = (_epochs([r.converged_epoch for r in own]), f"paper {paper.get('converged', 'never')}")
        fields = (_softness_field(own, paper["softness"]), score_field(mean, "accuracy", paper["accuracy"]))
        kappa = score_field(mean, "kappa", paper["kappa"])
        frozen = (_epochs([r.freeze_epoch for r in own]),)
        rows.append(((f"{rate:g}",), (str(len(own) or NONE),), converged, frozen, *fields, kappa))
    columns = ("Rate", "Seeds", "Converged at", "Frozen at", "Softness", "Accuracy", "Kappa")
    return Grid("Table 2: the learning rate of the head", TABLE2_CAPTION, columns, tuple(rows), names=2)


def _epochs(values: Sequence[int | None]) -> str:
    return ", ".join("never" if value is None else str(value) for value in values) or NOT_RUN


def _softness_field(own: Sequence[PaperResult], paper: float) -> Lines:
    paper_line = f"paper {paper:.2f}"
    if not own:
        return (NOT_RUN, paper_line)
    converged = sum(map(_converged_softness, own)) / len(own)
    last = sum(r.final_softness or 0.0 for r in own) / len(own)
    return (number(converged), paper_line, f"{signed_text(converged - paper, 3)}, at the end {number(last)}")


def _converged_softness(result: PaperResult) -> float:
    """The softness "when the CCL head converges", as the paper reports it: ten epochs before the labels are frozen."""
    if result.converged_epoch is None or result.softness is None:
        return result.final_softness or 0.0
    return result.softness[result.converged_epoch - 1]


def rivals_grid(results: Sequence[PaperResult], seeds: SeedStatistics) -> Grid:
    """CCL-Net against hard labels and uniform smoothing, on both splits, with the verdict in words."""
    named: list[tuple[Lines, Lines]] = []
    pairs: list[Mapping[str, Any]] = []
    for split, split_title in SPLIT_TITLES.items():
        for backbone, title in BACKBONES.items():
            found = seeds.compare_all(plain_results(results, split, backbone))
            pairs += found["pairs"] if found else ()
            named += [((split_title,), (title,))] * len(found["pairs"] if found else ())
    scores = ("accuracy", "kappa", *RANKING)
    rows = [(*names, *pair_fields(p, scores)) for names, p in zip(named, correct_together(pairs), strict=True)]
    columns = ("Split", "Backbone", "Pair", "Seeds", *(HEADS[name] for name in scores), "In words")
    return Grid(
        "CCL-Net against other methods, paired by seed",
        f"{PAIRS_CAPTION}all pairs of this table. {POWER_CAPTION}",
        columns,
        tuple(rows) or (((NOT_RUN,), *((("",),) * (len(columns) - 1))),),
        names=3,
        words=True,
    )


def folds_grid(results: Sequence[PaperResult], seeds: SeedStatistics) -> Grid | None:
    """The same on out-of-fold predictions of all images, by lesion on ResNet-18; None until all folds were run."""
    found = seeds.compare_folds(results)
    if found is None:
        return None
    scores = ("accuracy", "kappa", *RANKING)
    return Grid(
        "CCL-Net against other methods, five folds by lesion",
        "Every image predicted once, by a network that was not trained on its lesion; ResNet-18. "
        f"{PAIRS_CAPTION}all pairs of this table. {POWER_CAPTION}",
        ("Pair", "Seeds", *(HEADS[name] for name in scores), "In words"),
        tuple(pair_fields(pair, scores) for pair in correct_together(found["pairs"])),
        names=1,
        words=True,
    )


def pair_fields(pair: Mapping[str, Any], scores: Sequence[str]) -> tuple[Lines, ...]:
    """The two names, the number of seeds, the difference in each score, and the verdict on accuracy in words."""
    fields = [points_field(pair["metrics"][name]) if name in pair["metrics"] else (NONE,) for name in scores]
    verdict = pair["metrics"]["accuracy"]["verdict"]
    return ((f"{pair['a']} − {pair['b']}",), (str(pair["seeds"]["a"]),), *fields, (verdict,))


def points_field(test: Mapping[str, Any]) -> Lines:
    if test["difference"] is None:
        return (NONE,)
    ends = [signed_text(100 * test[end], 1) for end in ("low", "high") if test[end] is not None]
    interval = f"[{', '.join(ends)}]" if ends else ""
    p = "" if test["p_holm"] is None else f"p {test['p_holm']:.2g}"
    power = "" if test.get("detectable") is None else f"detectable {100 * test['detectable']:.1f}"
    return (signed_text(100 * test["difference"], 1), *filter(None, (interval, p, power)))


def cost_grid(results: Sequence[PaperResult]) -> Grid:
    """Speed and duration of the runs."""
    rows: list[tuple[Lines, ...]] = []
    for device in sorted({r.device for r in results}):
        for backbone, title in BACKBONES.items():
            if own := [r for r in results if (r.device, r.cell.backbone) == (device, backbone)]:
                speed = statistics.median(r.images_per_second for r in own)
                minutes = statistics.mean(r.seconds for r in own) / 60
                rows.append(((device,), (title,), (str(len(own)),), (f"{speed:,.0f}",), (f"{minutes:.1f}",)))
    return Grid(
        "Cost",
        "Images per second: median over epochs and runs, with as many runs in parallel as were requested. Minutes: of "
        "training, mean over runs.",
        ("Device", "Backbone", "Runs", "Images per second", "Minutes per run"),
        tuple(rows),
        names=2,
    )


def table1_rows(results: Sequence[PaperResult], seeds: SeedStatistics) -> list[dict[str, Any]]:
    """Table 1 on both splits for a CSV, one row per number."""
    rows = []
    for split in SPLIT_TITLES:
        pooled = seed_variance(results, seeds, split)
        for cell in (PaperCell(backbone, method, split=split) for backbone in BACKBONES for method in METHODS):
            own = seeds_of(results, cell)
            mean = seeds.mean(own, pooled) if own else {}
            for name in OUR_SCORES:
                values: dict[str, Any] = {
                    key: mean[name][key] if own else None for key in ("mean", "sd", "low", "high")
                }
                paper = published(cell.backbone, cell.method).get(name)
                row: dict[str, Any] = {"split": split, "backbone": cell.backbone, "method": cell.method, "score": name}
                row |= {"seeds": len(own), **values, "paper": paper}
                for column, key in (("difference", "mean"), ("difference_low", "low"), ("difference_high", "high")):
                    value = values[key]
                    row[column] = None if value is None or paper is None else round(value - paper, 6)
                rows.append(row | {"state": "run" if own else NOT_RUN})
    return rows


def table2_rows(results: Sequence[PaperResult]) -> list[dict[str, Any]]:
    """Table 2 for a CSV, one row per run."""
    rows: list[dict[str, Any]] = []
    for rate, published_rate in TABLE2.items():
        names = ("converged", "softness", "accuracy", "kappa")
        paper = {f"paper_{name}": published_rate.get(name) for name in names}
        own = seeds_of(results, PaperCell(lr_ccl=rate))
        for result in own:
            epochs = {"converged_epoch": result.converged_epoch, "freeze_epoch": result.freeze_epoch}
            softness = {"final_softness": result.final_softness, "converged_softness": _converged_softness(result)}
            scores = {name: result.value(name) for name in ("accuracy", "kappa")}
            seed = result.cell.seed
            rows.append({"lr_ccl": rate, "seed": seed, **epochs, **softness, **scores, **paper, "state": "run"})
        if not own:
            rows.append({"lr_ccl": rate, **paper, "state": NOT_RUN})
    return rows


def markdown(*grids: Grid) -> str:
    """Grids as Markdown tables, the lines of a field below each other.

    >>> print(markdown(Grid("T", "Of tests.", ("a", "b"), ((("x",), ("1", "paper 2")),))))
    **T.** Of tests.
    <BLANKLINE>
    | a | b |
    |---|--:|
    | x | 1<br>paper 2 |
    <BLANKLINE>
    """
    texts = []
    for grid in grids:
        last = len(grid.columns) - 1
        marks = ["---" if i < grid.names or (grid.words and i == last) else "--:" for i in range(len(grid.columns))]
        fields = [["<br>".join(line for line in field if line) for field in row] for row in grid.rows]
        lines = [f"| {' | '.join(row)} |" for row in (grid.columns, *fields)]
        lines.insert(1, f"|{'|'.join(marks)}|")
        texts.append(f"**{grid.title}.** {grid.caption}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(texts)


def paper_grids(found: Sequence[PaperResult], seeds: SeedStatistics) -> Grids:
    """Every table of the paper, by the name of its file."""
    out_of_fold = folds_grid(found, seeds)
    return {
        "table1": [table1_grid(found, seeds), table1_grid(found, seeds, "lesion")],
        "rivals": [rivals_grid(found, seeds)],
        **({"folds": [out_of_fold]} if out_of_fold else {}),
        "table2": [table2_grid(found, seeds)],
        "cost": [cost_grid(found)],
    }


def write_paper(results: Path) -> list[Path]:
    """Write the paper's tables and figures from the results in a folder, beside them; returns the pages."""
    found, seeds = read_results(results), SeedStatistics(results)
    figures = write_figures(results, found)
    grids = paper_grids(found, seeds)
    rows = {"table1": table1_rows(found, seeds), "table2": table2_rows(found)}
    seeds.write()
    pages = {
        "table1": (
            "Table 1 of CCL-Net, reproduced",
            [*grids["table1"], *grids["rivals"], *grids.get("folds", ()), *grids["cost"]],
            [],
        ),
        "table2": ("Table 2 and the figures of CCL-Net, reproduced", grids["table2"], figures),
    }
    return write_tables(results, grids, rows, pages, runs_text(found))


def write_tables(
    results: Path,
    grids: Grids,
    rows: Mapping[str, list[dict[str, Any]]],
    pages: Mapping[str, tuple[str, Sequence[Grid], Sequence[Path]]],
    runs: str,
) -> list[Path]:
    """Write grids as NAME.md, rows as NAME.csv and pages (title, grids, figures) as NAME.html; returns the pages."""
    make_folder(results)
    for name, content in grids.items():
        write_whole(results / f"{name}.md", markdown(*content))
    for name, lines in rows.items():
        if lines:
            write_whole(results / f"{name}.csv", pd.DataFrame(lines).to_csv(index=False, lineterminator="\n"))
    for name, (title, shown, figures) in pages.items():
        pictures = [
            (path.stem.replace("-", " "), "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode())
            for path in sorted(figures)
        ]
        page = render("tables.html", title=title, grids=shown, runs=runs, pictures=pictures)
        write_whole(results / f"{name}.html", page)
    return [results / f"{name}.html" for name in pages]


def check_has_results(results: Path, subfolders: Sequence[str] = ("",)) -> None:
    """Refuse a folder without results: a mistyped one must not turn every number into 'not run'."""
    if not results.is_dir():
        raise InputError(f"there is no folder {results}: give the folder of the results as --results.")
    if not any(read_results(results / subfolder) for subfolder in subfolders):
        raise InputError(f"{results} has no results: give the folder of the results as --results.")


def runs_text(results: Sequence[PaperResult]) -> str:
    """The number of runs behind the tables, their devices and minutes."""
    if not results:
        return "No cell has been run yet."
    devices = sorted({r.device for r in results})
    seconds = sum(r.seconds for r in results)
    return f"{len(results)} runs on {', '.join(devices)}, {seconds / 60:,.0f} minutes of training together."


def fill_markers(text: str, blocks: Mapping[str, str], name: str = "the document") -> str:
    """The text with each block between its markers ``<!-- name -->`` and ``<!-- /name -->``.

    >>> fill_markers("a <!-- t -->old<!-- /t --> b", {"t": "new"})
    'a <!-- t -->\\nnew\\n<!-- /t --> b'
    """
    for marker, block in blocks.items():
        pattern = re.compile(rf"(<!-- {re.escape(marker)} -->).*?(<!-- /{re.escape(marker)} -->)", re.DOTALL)
        if not pattern.search(text):
            raise InputError(f"{name} has no markers <!-- {marker} --> … <!-- /{marker} --> for a table.")
        filled = f"\n{block.strip()}\n"
        text = pattern.sub(lambda found, filled=filled: found[1] + filled + found[2], text)  # type: ignore[misc]
    return text


def write_documents(root: Path, blocks: Mapping[str, Mapping[str, str]]) -> None:
    """Put generated blocks into the documents below ``root``; nothing is written if a marker is missing."""
    filled = {
        root / name: fill_markers((root / name).read_text(encoding="utf-8"), content, name)
        for name, content in blocks.items()
    }
    for path, text in filled.items():
        write_whole(path, text)
