"""`cclnet serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from cclnet.cli import Accelerator, MovedData, Refuse, with_settings
from cclnet.errors import InputError
from cclnet.settings import Settings


@with_settings(Settings, only=("decision", "cost"), defaults={"decision": "that of the run"})
def serve(
    run: Annotated[Path, typer.Argument(help="A run folder, or an exported model.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on. An address that other machines can reach needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8000,
    token: Annotated[str | None, typer.Option(envvar="CCLNET_TOKEN", help="Secret that requests must send.")] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another host name of the server, such as that of a proxy.")
    ] = None,
    examples: Annotated[bool, typer.Option("--examples", help="Show images of the training set.")] = False,
    data: MovedData = None,
    keep: Annotated[Path | None, typer.Option(help="Store uploads in this folder. Default: nothing is stored.")] = None,
    max_megabytes: Annotated[float, typer.Option(help="Largest image file, in megabytes.")] = 20.0,
    max_megapixels: Annotated[
        float, typer.Option(help="Largest image, in megapixels, as stated by its header.")
    ] = 50.0,
    max_seconds: Annotated[
        float, typer.Option(help="Time limit in seconds for each of upload, decoding and prediction.")
    ] = 30.0,
    batch: Annotated[int, typer.Option(help="Largest number of images in one forward pass.")] = 16,
    decoders: Annotated[int | None, typer.Option(help="Decoding processes. Default: one per core, up to 4.")] = None,
    readers: Annotated[int | None, typer.Option(hidden=True, help="Old name of --decoders.")] = None,
    sets: Annotated[str | None, typer.Option(help="Level of prediction sets: 0.9, raps:0.9. Default: 0.9.")] = None,
    refuse: Refuse = None,
    device: Accelerator = "auto",
    engine: Annotated[str, typer.Option(help="auto, onnx or torch. auto: onnx on a CPU, torch on a GPU.")] = "auto",
    **rule: str,
) -> None:
    """Serve RUN as a web page to drop images on and as an API; only on this machine unless --host is given."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InputError(f"serving needs {error.name}: pip install 'cclnet[serve,export]'") from error
    if not hasattr(os, "fork"):
        raise InputError("cclnet serve needs Linux or macOS: on Windows use WSL, or cclnet predict.")
    from cclnet.deploy.serve.guard import Limits, ServeSettings
    from cclnet.deploy.serve.server import serve as run_server

    limits = Limits(upload_bytes=round(max_megabytes * 2**20), pixels=round(max_megapixels * 1e6), seconds=max_seconds)
    count = decoders if decoders is not None else readers
    hosts = tuple(allow_host or ())
    settings = ServeSettings("", limits, batch, count, keep, host=host, allowed_hosts=hosts, token=token, sets=sets)
    run_server(
        run, settings, port=port, examples=examples, data=data, device=device, engine=engine, refuse=refuse, **rule
    )
