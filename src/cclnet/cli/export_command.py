"""`cclnet export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cclnet.cli import with_settings
from cclnet.settings import Settings


@with_settings(
    Settings, only=("decision", "cost", "tta"), defaults={"decision": "that of the run", "tta": "that of the run"}
)
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    format: Annotated[str, typer.Option(help="onnx, torch (a .pt2 program), safetensors or timm.")] = "onnx",
    out: Annotated[Path | None, typer.Option(help="A new folder. Default: export-FORMAT in the run folder.")] = None,
    licence: Annotated[str, typer.Option(help="Licence of the weights, for the model card.")] = "",
    **rule: str,
) -> None:
    """Export the model of RUN with its description and a model card, after checking it against PyTorch."""
    from cclnet.deploy.export import FORMATS, TIMM_CONFIG
    from cclnet.deploy.export import export as write_export
    from cclnet.runs.folder import RunFolder

    console = Console(stderr=True)
    with console.status(f"Exporting to {FORMATS.get(format, format)} and checking it against PyTorch"):
        folder = write_export(run, format, out, licence, **rule)
    if not RunFolder(run).scores.is_file():
        console.print("[yellow]note:[/yellow] the run has not been evaluated: its card has no scores, and there may be "
                      "no temperature. Run `cclnet evaluate`, then export again.", highlight=False)  # fmt: skip
    config = f"{TIMM_CONFIG}, " if format == "timm" else ""
    files = f"{FORMATS[format]}, {config}model.json, calibration.json, README.md"
    console.print(f"{escape(str(folder))}: {files}", highlight=False, soft_wrap=True)
