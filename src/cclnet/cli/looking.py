"""`cclnet data show` and `cclnet data audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cclnet.cli.options import (
    Data,
    FollowLinks,
    GroupColumn,
    ImageColumn,
    ImageFolder,
    LabelColumn,
    LabelSeparator,
    SplitColumn,
)


def data_show(
    data: Data,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    group_column: GroupColumn = None,
    split_column: SplitColumn = None,
    label_separator: LabelSeparator = None,
    image_folder: ImageFolder = None,
    source: Annotated[str | None, typer.Option(help="The layout, where two fit.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse images without label and the reverse.")] = False,
    follow_links: FollowLinks = None,
) -> None:
    """Say how DATA is read, and what is in it: classes, groups, parts, sizes, problems."""
    from cclnet.data.audit import describe
    from cclnet.data.sources import open_data

    table = open_data(
        data,
        image_column=image_column,
        label_column=label_column,
        group_column=group_column,
        split_column=split_column,
        label_separator=label_separator,
        image_folder=image_folder,
        source=source,
        strict=strict,
        follow_links=bool(follow_links),
    )
    Console().print(describe(table), highlight=False)


def data_audit(
    data: Data,
    split_by: Annotated[str, typer.Option(help="The split to look at: auto, given, group or class.")] = "auto",
    split_file: Annotated[str, typer.Option(help="A split.csv to look at instead.")] = "",
    val: Annotated[float, typer.Option(help="Share of the images to hold out.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for audit.csv.")] = Path(),
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    group_column: GroupColumn = None,
    split_column: SplitColumn = None,
    label_separator: LabelSeparator = None,
    image_folder: ImageFolder = None,
    source: Annotated[str | None, typer.Option(help="The layout, where two fit.")] = None,
    follow_links: FollowLinks = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where decoded images are kept.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes. Default: one a core.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Look for what is wrong with DATA: broken files, duplicates, leaks, label conflicts, odd sizes."""
    from cclnet.data.audit import audit, audit_tables
    from cclnet.data.sources import open_data
    from cclnet.files import make_folder
    from cclnet.settings import SplitSettings

    table = open_data(
        data,
        image_column=image_column,
        label_column=label_column,
        group_column=group_column,
        split_column=split_column,
        label_separator=label_separator,
        image_folder=image_folder,
        source=source,
        follow_links=bool(follow_links),
    )
    split = SplitSettings(by=split_by, file=split_file, val=val, seed=seed)
    make_folder(out)
    found = audit(table, split, cache_dir=cache_dir, workers=workers, progress=not quiet)
    found.write(out / "audit.csv")
    Console().print(audit_tables(found, str(out / "audit.csv")), highlight=False)
