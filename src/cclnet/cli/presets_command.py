"""`cclnet presets`."""

from __future__ import annotations

from typing import Annotated

import typer

presets_app = typer.Typer(no_args_is_help=True, help="Presets: named settings of `cclnet train --preset NAME`.")


@presets_app.command("list")
def list_presets() -> None:
    """List the presets."""
    from cclnet.presets import PRESETS

    for name, description in PRESETS.items():
        typer.echo(f"{name:10}{description}")


@presets_app.command()
def show(name: Annotated[str, typer.Argument(help="paper, finetune, quick or best.")]) -> None:
    """Print the settings of a preset as TOML, for `--recipe` or to read."""
    from cclnet.presets import preset_file

    typer.echo(preset_file(name).read_text(encoding="utf-8"), nl=False)
