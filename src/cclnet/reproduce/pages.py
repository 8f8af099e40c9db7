"""Tables as files: Markdown, CSV and one HTML page each, and between the markers of documents."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from cclnet.errors import InputError
from cclnet.files import write_whole
from cclnet.report.html import render
from cclnet.reproduce.experiments import TUNING
from cclnet.reproduce.seeds import Result, Seeds, read_results
from cclnet.reproduce.similarity_tables import looks_grid, looks_pairs_grid, structure_grid, tune_looks_grid, uses_grid
from cclnet.reproduce.tables import (
    Grid,
    cost_grid,
    rivals_grid,
    table1_grid,
    table1_rows,
    table2_grid,
    table2_rows,
    tune_grid,
)

PICTURES = "figures"  # the folder of figures beside the results


def markdown(grid: Grid) -> str:
    """A grid as a Markdown table, the lines of a field one below the other.

    >>> print(markdown(Grid("T", "Of tests.", ("a", "b"), ((("x",), ("1", "paper 2")),))))
    **T.** Of tests.
    <BLANKLINE>
    | a | b |
    |---|--:|
    | x | 1<br>paper 2 |
    <BLANKLINE>
    """
    last = len(grid.columns) - 1
    marks = ["---" if i < grid.names or (grid.words and i == last) else "--:" for i in range(len(grid.columns))]
    fields = [["<br>".join(line for line in field if line) for field in row] for row in grid.rows]
    lines = [f"| {' | '.join(grid.columns)} |", f"|{'|'.join(marks)}|", *(f"| {' | '.join(row)} |" for row in fields)]
    return f"**{grid.title}.** {grid.caption}\n\n" + "\n".join(lines) + "\n"


def grids(results: Path, seeds: Seeds) -> dict[str, list[Grid]]:
    """Every table there is, from the results in a folder, by the name of its file."""
    found = read_results(results)
    return {
        "table1": [table1_grid(found, seeds), table1_grid(found, seeds, "lesion")],
        "rivals": [rivals_grid(found, seeds)],
        "table2": [table2_grid(found, seeds)],
        "tune": [tune_grid(read_results(results / "tune"))],
        "cost": [cost_grid(found)],
        "looks": [structure_grid(found), looks_grid(found, seeds), looks_pairs_grid(found, seeds)],
        "tune-looks": [tune_looks_grid(read_results(results / "tune-lesion"))],
        "uses": [uses_grid(found, seeds)],
    }


def write_tables(results: Path) -> list[Path]:
    """Write the tables of the results in a folder beside them; returns the pages."""
    results.mkdir(parents=True, exist_ok=True)
    found, seeds = read_results(results), Seeds(results)
    tables = grids(results, seeds)
    lines = {
        "table1": table1_rows(found, seeds),
        "table2": table2_rows(found),
        "tune": _tune_rows(results / "tune"),
        "tune-looks": _tune_rows(results / "tune-lesion"),
    }
    seeds.write()
    for name, content in tables.items():
        write_whole(results / f"{name}.md", in_markdown(content))
    for name, rows in lines.items():
        if rows:
            write_whole(results / f"{name}.csv", pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))
    shown = {
        "table1": ("Table 1", [*tables["table1"], *tables["rivals"], *tables["cost"]], []),
        "table2": ("Table 2 and the figures", tables["table2"], _pictures(results, "paper")),
        "tune": ("Open choices", tables["tune"], []),
        "looks": ("Beyond the paper: soft labels that follow looks", _beyond(tables), _pictures(results, "looks")),
    }
    for name, (title, content, pictures) in shown.items():
        title = title if name == "looks" else f"{title} of CCL-Net, run again"
        page = render("tables.html", title=title, grids=content, runs=runs_in_words(found), pictures=pictures)
        write_whole(results / f"{name}.html", page)
    return [results / f"{name}.html" for name in shown]


def refuse_nothing(results: Path) -> None:
    """A folder mistyped must not turn every number that is written into 'not run'."""
    if not results.is_dir():
        raise InputError(f"there is no folder {results}: give the one that holds the results as --results.")
    if not any(read_results(results / shelf) for shelf in ("", *TUNING)):
        raise InputError(f"{results} holds no result to make tables of: give the folder that does as --results.")


def in_markdown(content: Sequence[Grid]) -> str:
    return "\n".join(markdown(grid) for grid in content)


def _beyond(tables: Mapping[str, Sequence[Grid]]) -> list[Grid]:
    return [grid for name in ("looks", "uses", "tune-looks") for grid in tables[name]]


def _tune_rows(folder: Path) -> list[dict[str, Any]]:
    return [
        {"candidate": r.cell.variant, "seed": r.cell.seed, **{name: r.value(name) for name in r.scores}}
        for r in read_results(folder)
    ]


def runs_in_words(results: Sequence[Result]) -> str:
    """How many runs stand behind the tables, on what, for how long."""
    if not results:
        return "No cell has been run yet."
    devices = sorted({r.device for r in results})
    seconds = sum(r.seconds for r in results)
    return f"{len(results)} runs on {', '.join(devices)}, {seconds / 60:,.0f} minutes of training together."


def _pictures(results: Path, page: str) -> list[tuple[str, str]]:
    """The figures of a page, with their names, as data that it can carry."""
    found = [p for p in sorted((results / PICTURES).glob("*.png")) if p.stem.startswith("looks") == (page == "looks")]
    return [
        (path.stem.replace("-", " "), "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode())
        for path in found
    ]


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


def documents(root: Path, results: Path) -> dict[Path, str]:
    """The documents below ``root`` that show results, as they should be with the results in a folder."""
    seeds = Seeds(results)
    found, tables = read_results(results), grids(results, seeds)
    blocks = {name: in_markdown(content) for name, content in tables.items()}
    short = table1_grid(found, seeds, scores=("accuracy", "kappa"))
    structure, *scored = tables["looks"]
    blocks["looks"], blocks["looks scores"] = in_markdown([structure]), in_markdown(scored)
    wanted = {
        "docs/similarity.md": {"looks": blocks.pop("looks")},
        "docs/using.md": {name: blocks.pop(name) for name in ("looks scores", "tune-looks", "uses")},
        "docs/reproduce.md": {**blocks, "runs": runs_in_words(found)},
        "README.md": {"table1": markdown(short)},
    }
    return {
        root / name: fill_markers((root / name).read_text(encoding="utf-8"), content, name)
        for name, content in wanted.items()
    }


def write_documents(root: Path, results: Path) -> None:
    """Put the tables into the documents of a source tree."""
    refuse_nothing(results)
    for path, text in documents(root, results).items():
        write_whole(path, text)
