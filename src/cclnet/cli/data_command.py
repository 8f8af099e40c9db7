"""`cclnet data show` and `cclnet data audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cclnet.cli import SOURCES, Quiet, with_settings
from cclnet.settings import DataOptions

data_app = typer.Typer(help="Inspect a data set before training on it.", no_args_is_help=True)
Data = Annotated[str, typer.Argument(help=SOURCES)]


@data_app.command("show")
@with_settings(DataOptions)
def show(data: Data, **options: Any) -> None:
    """Show how DATA is read and what it contains: classes, groups, splits, sizes, problems."""
    from cclnet.data.audit import describe
    from cclnet.data.sources import open_data

    Console().print(describe(open_data(data, **options)), highlight=False)


@data_app.command("audit")
@with_settings(DataOptions)
def audit(
    data: Data,
    split_by: Annotated[str, typer.Option(help="The split to audit: auto, given, group or class.")] = "auto",
    split_file: Annotated[str, typer.Option(help="A split.csv to audit instead.")] = "",
    val: Annotated[float, typer.Option(help="Share of the images for validation.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for audit.csv.")] = Path(),
    cache_dir: Annotated[Path | None, typer.Option(help="Folder for decoded images.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes. Default: one per core.")] = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Find problems in DATA: broken files, duplicates, leaks, label conflicts, unusual sizes."""
    from cclnet.data.audit import audit as run_audit
    from cclnet.data.audit import audit_tables
    from cclnet.data.sources import open_data
    from cclnet.files import make_folder
    from cclnet.settings import SplitSettings

    table = open_data(data, **options)
    split = SplitSettings(by=split_by, file=split_file, val=val, seed=seed)
    make_folder(out)
    found = run_audit(table, split, cache_dir=cache_dir, workers=workers, progress=not quiet)
    found.write(out / "audit.csv")
    Console().print(audit_tables(found, str(out / "audit.csv")), highlight=False)
