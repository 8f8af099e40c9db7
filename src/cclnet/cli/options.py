"""Options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

# What can be said about the data, the same for every command that reads it.
Data = Annotated[str, typer.Argument(help="Folder, CSV, Parquet, .npz, medmnist:NAME or synthetic.")]
ImageColumn = Annotated[str | None, typer.Option(help="Column of a manifest that names the images.")]
LabelColumn = Annotated[str | None, typer.Option(help="Column of class names; or columns of 0 and 1: A,B,C.")]
GroupColumn = Annotated[str | None, typer.Option(help="Column of what must stay together: patient, lesion.")]
PartColumn = Annotated[str | None, typer.Option(help="Column of train, val and test.")]
