"""The command line: one function a command, each a few lines over the API."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from cclnet.errors import InputError

app = typer.Typer(
    help="CCL-Net: train medical image classifiers with soft labels learned from the images.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
data_app = typer.Typer(help="Look at a data set before training on it.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@app.command()
def methods(
    name: Annotated[str, typer.Argument(help="A method, to read its card; none to list them all.")] = "",
) -> None:
    """List the label-softening methods, or read the card of one."""
    from cclnet.methods import METHODS, method_card, method_settings

    console = Console()
    if name:
        console.print(Markdown(method_card(name)))
        return
    for known in METHODS:
        settings = ", ".join(f"{key}={value}" for key, value in method_settings(known).items())
        console.print(f"[bold]{known}[/bold]  {settings}", highlight=False)


def main() -> None:
    """Run a command; what the user can mend is one line on stderr and exit code 2, never a traceback."""
    try:
        app(prog_name="cclnet")
    except InputError as error:
        Console(stderr=True).print(f"[bold red]error:[/bold red] {error}", highlight=False, markup=True)
        sys.exit(2)
