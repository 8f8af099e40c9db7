"""Options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

from cclnet.errors import InputError

# What can be said about the data, the same for every command that reads it.
Data = Annotated[str, typer.Argument(help="Folder, CSV, Parquet, .npz, medmnist:NAME or synthetic.")]
ImageColumn = Annotated[str | None, typer.Option(help="Column of a manifest that names the images.")]
LabelColumn = Annotated[str | None, typer.Option(help="Column of class names; or columns of 0 and 1: A,B,C.")]
GroupColumn = Annotated[str | None, typer.Option(help="Column of what must stay together: patient, lesion.")]
SplitColumn = Annotated[str | None, typer.Option(help="Column of train, val and test.")]
LabelSeparator = Annotated[str | None, typer.Option(help="What stands between several labels in a cell.")]
ImageFolder = Annotated[str | None, typer.Option(help="Where the names in a manifest start from.")]
FollowLinks = Annotated[bool | None, typer.Option("--follow-links", help="Allow links out of the folder.")]


def parse_list(text: str) -> tuple[str, ...]:
    """
    >>> parse_list("a, b,")
    ('a', 'b')
    """
    return tuple(word.strip() for word in text.split(",") if word.strip())


def parse_seeds(text: str) -> tuple[int, ...]:
    """
    >>> parse_seeds("0,1,2")
    (0, 1, 2)
    """
    try:
        seeds = tuple(int(word) for word in parse_list(text))
    except ValueError:
        seeds = ()
    if not seeds:
        raise InputError(f"seeds are whole numbers separated by commas, such as 0,1,2; got '{text}'.")
    if len(set(seeds)) < len(seeds):
        raise InputError(f"a seed given twice is the same run twice; got '{text}'.")
    return seeds
