"""Write tables as Markdown, CSV and HTML pages, and between the markers of documents."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from cclnet.errors import InputError
from cclnet.files import make_folder, write_whole
from cclnet.report.html import render
from cclnet.reproduce.paper_figures import write_figures
from cclnet.reproduce.seeds import PaperResult, SeedStatistics, read_results
from cclnet.reproduce.tables import (
    Grid,
    cost_grid,
    rivals_grid,
    table1_grid,
    table1_rows,
    table2_grid,
    table2_rows,
)

Grids = dict[str, list[Grid]]


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
        rows = [grid.columns, *fields]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        lines.insert(1, f"|{'|'.join(marks)}|")
        texts.append(f"**{grid.title}.** {grid.caption}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(texts)


def paper_grids(found: Sequence[PaperResult], seeds: SeedStatistics) -> Grids:
    """Every table of the paper, by the name of its file."""
    return {
        "table1": [table1_grid(found, seeds), table1_grid(found, seeds, "lesion")],
        "rivals": [rivals_grid(found, seeds)],
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
        "table1": ("Table 1 of CCL-Net, reproduced", [*grids["table1"], *grids["rivals"], *grids["cost"]], []),
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


def paper_blocks(results: Path) -> dict[str, dict[str, str]]:
    """The generated blocks of each document, by document and marker."""
    found, seeds = read_results(results), SeedStatistics(results)
    blocks = {name: markdown(*content) for name, content in paper_grids(found, seeds).items()}
    short = table1_grid(found, seeds, scores=("accuracy", "kappa"))
    return {"docs/reproduce.md": {**blocks, "runs": runs_text(found)}, "README.md": {"table1": markdown(short)}}


def write_documents(root: Path, blocks: Mapping[str, Mapping[str, str]]) -> None:
    """Put generated blocks into the documents below ``root``; nothing is written if a marker is missing."""
    filled = {
        root / name: fill_markers((root / name).read_text(encoding="utf-8"), content, name)
        for name, content in blocks.items()
    }
    for path, text in filled.items():
        write_whole(path, text)
