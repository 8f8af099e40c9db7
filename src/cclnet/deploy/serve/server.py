"""A run folder to a running server."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

import uvicorn
from rich.console import Console
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from cclnet.data.parallel import available_cores
from cclnet.deploy.model import Model, load
from cclnet.deploy.predict import can_convert
from cclnet.deploy.serve.app import create_app
from cclnet.deploy.serve.examples import read_examples
from cclnet.deploy.serve.guard import HEADER_BYTES, check_token, is_address
from cclnet.deploy.serve.limits import Limits
from cclnet.deploy.serve.nursery import Nursery
from cclnet.deploy.serve.service import LANES, ServeSettings
from cclnet.errors import InputError
from cclnet.files import make_folder

MOST_CONNECTIONS = 1024
SECONDS_TO_FINISH = 10  # for what is being answered when the server is stopped


def serve(
    run: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    allowed_hosts: tuple[str, ...] = (),
    examples: bool = False,
    data: str | None = None,
    keep: Path | None = None,
    limits: Limits | None = None,
    largest_batch: int = 16,
    readers: int | None = None,
    device: str = "auto",
    engine: str = "auto",
    console: Console | None = None,
) -> None:
    """Serve a run folder, or an exported model, until it is stopped.

    Args:
        token: asked of everyone; needed for any host but this machine itself.
        allowed_hosts: further names that the server goes by, such as that of a proxy before it.
        examples: whether training images may be shown.
        data: where the data is now, if it has moved.
        keep: a folder for what is sent. Default: nothing is kept.
        readers: processes that decode uploads. Default: one a core, at most four.
    """
    console = console or Console(stderr=True)
    if largest_batch < 1 or (readers is not None and readers < 1):
        raise InputError(f"batch and readers must be at least 1; got {largest_batch} and {readers}.")
    token = check_token(token, host, allowed_hosts)
    with listen(host, port) as listening, Nursery() as nursery:  # which imports while the model is loaded
        model = load_to_serve(run, device, engine)
        pictures, note = read_examples(model.folder, model.classes, model.multilabel, data) if examples else ({}, "")
        settings = ServeSettings(
            name=model.folder.resolve().name,
            limits=limits or Limits(),
            largest_batch=largest_batch,
            readers=readers or min(4, available_cores()),
            kept_in=None if keep is None else make_folder(keep),
            examples=pictures,
        )

        def greet() -> None:
            for line in _greeting(model, settings, _address(listening), token, note):
                console.print(line, highlight=False, markup=False, soft_wrap=True)

        app = create_app(
            model, settings, host=host, allowed_hosts=allowed_hosts, token=token, nursery=nursery, ready=greet
        )
        with suppress(KeyboardInterrupt):  # it has finished what it was answering, and is to end like that
            make_server(app, settings.limits.seconds).run(sockets=[listening])


def make_server(app: ASGIApp, seconds: float = Limits.seconds) -> uvicorn.Server:
    """A server for the application that gives nobody more than the limits: h11, for it bounds headers, and whoever
    does not ask anything within ``seconds`` of connecting is let go."""

    class Impatient(H11Protocol):
        """Connections that say nothing would take the places of those that do."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.waiting = self.loop.call_later(seconds, self.let_go)

        def handle_events(self) -> None:
            super().handle_events()
            if self.cycle is not None:  # it has asked
                self.waiting.cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            self.waiting.cancel()
            super().connection_lost(exc)

        def let_go(self) -> None:
            self.transport.close()

    config = uvicorn.Config(
        app,
        http=Impatient,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_graceful_shutdown=SECONDS_TO_FINISH,
    )
    return uvicorn.Server(config)


def load_to_serve(run: str | Path, device: str, engine: str) -> Model:
    """The model in the engine that suits the machine: torch on a GPU, ONNX Runtime on a CPU, which is faster there.

    A network whose heat maps only torch can make stays in torch, if the choice was left open. The batches that are in
    the network at once share the cores: each with all of them would only get in the way of the other.
    """
    threads = max(1, available_cores() // LANES)
    if engine != "auto":
        return load(run, device, engine, threads)
    model = load(run, device, threads=threads)
    if model.engine == "onnx" or model.device != "cpu" or not can_convert():
        return model
    faster = load(run, device, "onnx", threads)
    return faster if faster.has_maps or not model.has_maps else model


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, or an error that says why it cannot."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(512)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"cannot listen at {host}, port {port}: {reason}. Choose another --port (0 finds a free one) or --host."
        ) from error
    return listening


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if is_address(host) and ':' in host else host}:{port}"


def _greeting(model: Model, settings: ServeSettings, address: str, token: str | None, note: str) -> list[str]:
    lines = [f"Serving {settings.name} at {address} ({model.engine} on {model.device}; {address}/docs for the API). "
             "Ctrl-C stops it."]  # fmt: skip
    lines += ["Whoever asks needs the token."] if token else []
    lines += [f"What is sent is kept in {settings.kept_in}."] if settings.kept_in else []
    return lines + ([note] if note else [])
