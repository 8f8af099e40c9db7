"""`cclnet verify`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cclnet.errors import InputError

ACCEPT = "Replace the checksums by those of the present files, after an intended change."
FAULTS = ("changed", "missing")
COLOURS = {"ok": "green", "changed": "bold red", "missing": "bold red", "not covered": "dim"}


def verify(
    path: Annotated[Path, typer.Argument(help="A run folder, an exported model, or a folder of decoded images.")],
    accept: Annotated[bool, typer.Option("--accept", help=ACCEPT)] = False,
) -> None:
    """Compare the files of PATH with their checksums: ok, changed, missing, or not covered. Exit code 1 on a fault."""
    from cclnet.data.cache import find_stores, verify_stores
    from cclnet.runs.checksums import accept_folder, has_checksums, verify_folder

    if not path.is_dir():
        raise InputError(f"{path} is not a folder: give a run, an exported model, or a folder of decoded images.")
    stores = find_stores(path)
    if accept and stores and not has_checksums(path):
        raise InputError(f"{path} holds decoded images: remove a damaged folder, and they are decoded again.")
    if accept:
        accept_folder(path)
    console, faults, files = Console(), 0, 0
    # Of a cache its stores alone; of a run with decoded images inside both.
    in_folder = () if stores and not has_checksums(path) else verify_folder(path)
    for name, state in itertools.chain(verify_stores(stores), in_folder):
        kind, _, detail = state.partition(": ")
        shown = f"[{COLOURS[kind]}]{kind:>11}[/]  {escape(f'{name}: {detail}' if detail else name)}"
        console.print(shown, highlight=False, soft_wrap=True)
        files, faults = files + 1, faults + (kind in FAULTS)
    if not files:
        raise InputError(f"{path} holds no file of a run, an exported model or a cache. Give the folder that does.")
    counts = {"image stores": len(stores), "files": files - len(stores)}
    checked = " and ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    console.print(f"{checked}, {faults} with a fault", highlight=False)
    if faults:
        raise typer.Exit(1)
