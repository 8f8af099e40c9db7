"""Start the server for a run folder: load the model, read the example images, listen, run uvicorn."""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import uvicorn
from rich.console import Console
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from cclnet.data.parallel import available_cores
from cclnet.deploy.predict import can_convert
from cclnet.deploy.predictor import Model, load
from cclnet.deploy.serve.app import create_app
from cclnet.deploy.serve.decoding import start_fork_server
from cclnet.deploy.serve.guard import MAX_HEADER_BYTES, Limits, ServeSettings, check_token
from cclnet.deploy.serve.service import PARALLEL_BATCHES
from cclnet.errors import InputError
from cclnet.evaluation.conformal import DEFAULT_LEVEL
from cclnet.files import make_folder
from cclnet.runs.folder import RunFolder

MAX_CONNECTIONS = 1024
MAX_CONNECTIONS_PER_CLIENT = 256  # a proxy in front of the server is one client
BACKLOG = 256  # connections that wait to be accepted
SHUTDOWN_SECONDS = 10  # for requests in progress when the server is stopped
EXAMPLES_PER_CLASS = 3


def serve(
    run: str | Path,
    settings: ServeSettings,
    *,
    port: int = 8000,
    examples: bool = False,
    data: str | None = None,
    device: str = "auto",
    engine: str = "auto",
    decision: str | None = None,
    cost: str | None = None,
    refuse: float | None = None,
) -> None:
    """Serve a run folder or an exported model until the process is stopped.

    A script must call it under ``if __name__ == "__main__"``, because it starts processes with multiprocessing.
    ``examples``: whether training images may be shown; ``data``: their location, if they have moved.
    ``decision`` and ``cost``: the decision rule, as for ``cclnet.load``; ``refuse``: as for ``Model.refuse``.
    """
    settings = replace(settings, token=check_token(settings.token, settings.host, settings.allowed_hosts))
    with listen(settings.host, port) as listening:
        _allow_connections()
        start_fork_server()  # it imports while the model is loaded
        model = load_to_serve(run, device, engine, decision=decision, cost=cost)
        pictures, note = read_examples(model.folder, model.classes, model.multilabel, data) if examples else ({}, "")
        kept_in = make_folder(settings.kept_in).resolve() if settings.kept_in else None
        if settings.sets is None and model.calibration.sets is not None and not model.multilabel:
            settings = replace(settings, sets=str(DEFAULT_LEVEL))
        if settings.sets is not None:
            model.sets(np.full((1, len(model.classes)), 1 / len(model.classes)), settings.sets)  # an error at the start
        if refuse is not None:
            model.refuse(refuse)
        settings = replace(settings, name=model.folder.resolve().name, kept_in=kept_in, examples=pictures)
        address, port = listening.getsockname()[:2]
        url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
        lines = [
            f"Serving {settings.name} at {url} ({model.engine} on {model.device}; API: {url}/docs). Ctrl-C stops it.",
            "All requests need the token." if settings.token else "",
            f"Uploads are kept in {kept_in}." if kept_in else "",
            note,
        ]

        def print_start() -> None:
            Console(stderr=True).print("\n".join(filter(None, lines)), highlight=False, markup=False, soft_wrap=True)

        app = create_app(model, settings, on_ready=print_start)
        with suppress(KeyboardInterrupt):  # uvicorn raises it again after the shutdown
            make_server(app, settings.limits.seconds).run(sockets=[listening])


class Connections:
    """The open connections that wait for a request, oldest first. Beyond a limit the oldest of them is closed, of the
    same client or of all, so that silent and slow connections cannot keep others out. Connections with a request in
    progress are never closed; when a client has no other, its new connection is."""

    def __init__(self, per_client: int = MAX_CONNECTIONS_PER_CLIENT, total: int = MAX_CONNECTIONS) -> None:
        self.per_client, self.total = per_client, total
        self.open: dict[str, set[TimedConnection]] = defaultdict(set)  # by address of the client
        self.waiting: dict[TimedConnection, None] = {}  # in the order in which they began to wait

    def opened(self, connection: TimedConnection) -> None:
        own = self.open[connection.address]
        own.add(connection)
        self.waiting[connection] = None
        if len(own) > self.per_client:
            self._close(next(other for other in self.waiting if other in own))
        elif sum(map(len, self.open.values())) > self.total:
            self._close(next(iter(self.waiting)))

    def _close(self, connection: TimedConnection) -> None:
        connection.transport.abort()
        self.closed(connection)  # at once, not when the event loop gets to it

    def closed(self, connection: TimedConnection) -> None:
        self.waiting.pop(connection, None)
        own = self.open[connection.address]
        own.discard(connection)
        if not own:
            del self.open[connection.address]


class TimedConnection(H11Protocol):
    """A connection that is closed unless the head of each request arrives in time.

    uvicorn limits neither the time until the first request nor that of a head that has begun to arrive.
    """

    open_connections: Connections
    seconds_to_ask: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.deadline = self.loop.call_later(self.seconds_to_ask, transport.abort)
        self.open_connections.opened(self)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:  # a request has arrived
            self.deadline.cancel()
            self.open_connections.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        self.deadline.cancel()
        self.deadline = self.loop.call_later(self.seconds_to_ask, self.transport.abort)
        self.open_connections.waiting[self] = None
        super().on_response_complete()  # may begin with the next request

    def connection_lost(self, exc: Exception | None) -> None:
        self.deadline.cancel()
        self.open_connections.closed(self)
        super().connection_lost(exc)


def make_server(
    app: ASGIApp, seconds: float = Limits.seconds, connections: Connections | None = None
) -> uvicorn.Server:
    """Return a server with limits on connections, on the size of heads (in uvicorn only h11 has one), and on the
    ``seconds`` until the head of a request has arrived."""
    members = {"open_connections": connections or Connections(), "seconds_to_ask": seconds}
    config = uvicorn.Config(
        app,
        http=type("Connection", (TimedConnection,), members),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    return uvicorn.Server(config)


def _allow_connections() -> None:
    """Raise the limit of open files, which may be lower than that of connections."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * (MAX_CONNECTIONS + BACKLOG)  # connections, and what the server itself has open
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard)
        )


def load_to_serve(run: str | Path, device: str, engine: str, **options: Any) -> Model:
    """Load the model in the faster engine: torch on a GPU, ONNX Runtime on a CPU.

    With ``engine="auto"`` a network whose heat maps only torch can compute stays in torch. Batches that run at once
    share the cores. ``options`` as for ``load``.
    """
    threads = max(1, available_cores() // PARALLEL_BATCHES)
    if engine != "auto":
        return load(run, device, engine, threads, **options)
    model = load(run, device, threads=threads, **options)
    if model.engine == "onnx" or model.device != "cpu" or not can_convert():
        return model
    converted = load(run, device, "onnx", threads, **options)
    return converted if converted.has_maps or not model.has_maps else model


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"cannot listen on {host}, port {port}: {reason}. Choose another --port (0 finds a free one) or --host."
        ) from error
    return listening


def read_examples(
    run: Path, classes: Sequence[str], multilabel: bool, data: str | None = None
) -> tuple[dict[str, list[str]], str]:
    """Return data URIs of small training images of each class, and a note about missing images.

    They are read once, when the server starts, so that no request can reach the data.
    """
    from cclnet.report.html import thumbnails

    try:
        split = RunFolder(run).read_split()
    except InputError as error:
        raise InputError(f"--examples shows images of the training split, but {error}") from error
    if split.labels is None:
        raise InputError(f"--examples: {run / 'split.csv'} has no column label.")
    chosen = choose_examples(split.to_frame(), classes, multilabel)
    names = sorted({name for images in chosen.values() for name in images})
    pictures, note = thumbnails(names, RunFolder(run).read_settings_table(), data)
    if not pictures:
        why = note or "The split has no training images."
        raise InputError(f"--examples: no images to show. {why} If the data has moved, pass its location with --data.")
    return {of: [pictures[name] for name in images if name in pictures] for of, images in chosen.items()}, note


def choose_examples(split: pd.DataFrame, classes: Sequence[str], multilabel: bool) -> dict[str, list[str]]:
    """Return ``EXAMPLES_PER_CLASS`` random training images of each class, at most one per group (lesion or patient).

    They are random, with a fixed seed, because the first rows of a table often come from one source.
    """
    train = split[split["split"] == "train"].sample(frac=1, random_state=np.random.RandomState(0))
    chosen = {}
    for name in classes:
        own = train[[name in (label.split("|") if multilabel else (label,)) for label in train["label"]]]
        if "group" in own:
            own = own[(own["group"] == "") | ~own["group"].duplicated()]
        chosen[name] = own["image"].head(EXAMPLES_PER_CLASS).tolist()
    return chosen
