"""The command line: a file for each few commands that belong together, each a few lines over the API."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cclnet.cli import cards, comparing, deploying, judging, looking, reproducing, serving, training
from cclnet.errors import InputError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
data_app = typer.Typer(help="Look at a data set before training on it.", no_args_is_help=True)

app.command()(training.train)
app.command()(training.benchmark)
app.command()(judging.evaluate)
app.command()(judging.compare)
app.command()(comparing.compare_methods)
app.command()(serving.serve)
app.command()(deploying.predict)
app.command()(deploying.export)
app.command()(reproducing.reproduce)
app.command()(cards.methods)
app.add_typer(data_app, name="data")
data_app.command("show")(looking.data_show)
data_app.command("audit")(looking.data_audit)


def _say_versions(asked: bool) -> None:
    if asked:
        from cclnet.runs.provenance import versions

        typer.echo(", ".join(f"{name} {number}" for name, number in versions().items()))
        raise typer.Exit


@app.callback()
def every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_versions, is_eager=True, help="Versions that matter, and exit.")
    ] = False,
) -> None:
    """CCL-Net: train medical image classifiers with soft labels learned from the images."""


def main() -> None:
    """Run a command; what the user can mend is one line on stderr and exit code 2, never a traceback."""
    try:
        app(prog_name="cclnet")
    except InputError as error:
        # Escaped, for names and hints such as cclnet[dicom] hold brackets that are no markup.
        Console(stderr=True).print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False)
        sys.exit(2)
