"""`cclnet methods`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown


def methods(name: Annotated[str, typer.Argument(help="A method, to read its card. Default: list all.")] = "") -> None:
    """List the methods with when to use which, or read the card of one."""
    from cclnet.methods import METHODS, method_card, method_settings, when_to_use

    console = Console()
    if name:
        console.print(Markdown(method_card(name)))
        return
    for known in METHODS:
        settings = ", ".join(
            f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in method_settings(known).items()
        )
        console.print(f"[bold]{known}[/bold]  {settings}", highlight=False)
    console.print(Markdown(when_to_use()))
