"""`cclnet reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cclnet.cli.options import parse_list, parse_seeds


def reproduce(
    what: Annotated[
        list[str],
        typer.Argument(
            help="all: what the pages report, with its seeds and splits. "
            "Or some of it: table1, table2, figures, looks. Or what was chosen before: tune, tune-looks. Or uses."
        ),
    ],
    data: Annotated[str, typer.Option(help="The ISIC 2018 images, as downloaded.")] = "",
    out: Annotated[Path, typer.Option(help="Where the runs are kept.")] = Path("runs/reproduce"),
    results: Annotated[Path | None, typer.Option(help="Where results and tables go. Default: OUT/results.")] = None,
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0",
    backbones: Annotated[str, typer.Option(help="Of table1 or looks, separated by commas.")] = "",
    methods: Annotated[str, typer.Option(help="Rows of table1 or looks, separated by commas.")] = "",
    split: Annotated[str, typer.Option(help="paper, or lesion: no lesion on both sides.")] = "paper",
    max_minutes: Annotated[float, typer.Option(help="For all of it; what is unfinished goes on next time.")] = 0.0,
    parallel: Annotated[int, typer.Option(help="Cells trained at once, spread over the GPUs.")] = 1,
    only: Annotated[
        str, typer.Option(help="Cells by name, in this order: 'paper-resnet18-*,*-ccl-seed1'. Default: all.")
    ] = "",
    shard: Annotated[str, typer.Option(help="i/n: the i-th of n machines that share the cells.")] = "1/1",
    smoke: Annotated[bool, typer.Option("--smoke", help="Everything, tiny, on drawn images.")] = False,
    tables_only: Annotated[bool, typer.Option("--tables-only", help="Run nothing: tables from the results.")] = False,
    documents: Annotated[
        bool, typer.Option("--documents", help="Also put the tables into docs/ and README.md here.")
    ] = False,
    recipes: Annotated[Path | None, typer.Option(help="The folder of paper.toml and lesion.toml.")] = None,
    accelerator: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    cache_dir: Annotated[Path | None, typer.Option(help="Where decoded images are kept.")] = None,
) -> None:
    """Run the paper's experiments on ISIC 2018 and write its tables and figures beside the published numbers."""
    from cclnet.reproduce import command

    folder = results or out / "results"
    console = Console()
    failed = False
    if tables_only:
        for page in command.write_again(what, split, folder):
            console.print(str(page), highlight=False, soft_wrap=True)
    else:
        request = command.Request(
            what=tuple(what),
            data=data,
            out=out,
            results=folder,
            seeds=parse_seeds(seeds),
            backbones=parse_list(backbones),
            methods=parse_list(methods),
            split=split,
            max_minutes=max_minutes,
            parallel=parallel,
            only=parse_list(only),
            shard=command.parse_shard(shard),
            smoke=smoke,
            recipes=recipes or command.RECIPES,
            accelerator=accelerator,
            cache_dir=cache_dir,
        )
        failed = bool(command.reproduce(request, console).failed)
    if documents:
        from cclnet.reproduce.pages import write_documents

        write_documents(Path(), folder)
    if failed:
        raise typer.Exit(1)
