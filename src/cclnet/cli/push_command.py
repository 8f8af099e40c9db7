"""`cclnet push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape


def push(
    folder: Annotated[Path, typer.Argument(help="A folder that cclnet export wrote, or a finished run.")],
    repository: Annotated[str, typer.Argument(help="owner/name on the Hugging Face Hub; created if it is new.")],
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public. Default: private.")] = False,
    licence: Annotated[str, typer.Option(help="Licence of the weights, for the model card of a run.")] = "",
    endpoint: Annotated[str | None, typer.Option(help="Address of another hub. Default: huggingface.co.")] = None,
) -> None:
    """Upload a model with its card to the Hugging Face Hub. The token is that of `hf auth login` or HF_TOKEN."""
    from cclnet.deploy.hub import push as upload

    console = Console(stderr=True)
    with console.status(f"Uploading {escape(str(folder))}"):
        address = upload(folder, repository, not public, licence, endpoint)
    console.print(f"pushed: {escape(address)}", highlight=False, soft_wrap=True)
