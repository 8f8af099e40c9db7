"""Counters and histograms in the text format of Prometheus (version 0.0.4). Changed in the event loop alone."""

from __future__ import annotations

import bisect
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

Labels = tuple[tuple[str, str], ...]


@dataclass
class Counter:
    """A number that only grows, one for each set of labels."""

    name: str
    help: str
    values: dict[Labels, float] = field(default_factory=dict)

    def add(self, labels: Mapping[str, str] | None = None, amount: float = 1.0) -> None:
        key = tuple(sorted((labels or {}).items()))
        self.values[key] = self.values.get(key, 0.0) + amount

    def lines(self) -> list[str]:
        values = self.values or {(): 0.0}
        return [*_head(self.name, self.help, "counter"), *(_line(self.name, k, v) for k, v in sorted(values.items()))]


@dataclass
class Histogram:
    """How often a value was at most each of some bounds, with the sum and count of all."""

    name: str
    help: str
    bounds: Sequence[float]
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)  # the last is for what is above all bounds

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self) -> list[str]:
        lines, total = _head(self.name, self.help, "histogram"), 0
        for bound, count in zip([*map(_number, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            lines.append(_line(f"{self.name}_bucket", (("le", bound),), total))
        return [*lines, _line(f"{self.name}_sum", (), self.sum), _line(f"{self.name}_count", (), total)]


@dataclass
class Gauge:
    """A number that is looked up when it is asked for."""

    name: str
    help: str
    value: Callable[[], float]

    def lines(self) -> list[str]:
        return [*_head(self.name, self.help, "gauge"), _line(self.name, (), self.value())]


class Metrics:
    """All that is counted. Labels take few values, none of them from a request's text."""

    def __init__(self) -> None:
        started = time.time()
        self.in_house = 0
        self.requests = Counter("cclnet_requests_total", "Requests answered, by route, method and status.")
        self.seconds = Histogram("cclnet_predict_seconds", "Seconds from a /predict request to its answer.", SECONDS)
        self.reading = Histogram("cclnet_reading_seconds", "Seconds to decode an upload, waiting included.", SECONDS)
        self.network = Histogram("cclnet_network_seconds", "Seconds of a batch in the network.", SECONDS)
        self.batch = Histogram("cclnet_batch_images", "Images in a batch.", (1, 2, 4, 8, 16, 32, 64))
        self.predicted = Counter("cclnet_predictions_total", "Images predicted, by the class that was predicted.")
        self.bytes = Counter("cclnet_upload_bytes_total", "Bytes of uploads that were read.")
        gauges = [
            Gauge("cclnet_requests_in_house", "Requests that are being answered.", lambda: self.in_house),
            Gauge("process_start_time_seconds", "Start of the process, in seconds since 1970.", lambda: started),
        ]
        if sys.platform == "linux":
            gauges.append(Gauge("process_resident_memory_bytes", "Resident memory of the server.", resident_bytes))
        self.all: list[Counter | Histogram | Gauge] = [
            self.requests, self.seconds, self.reading, self.network, self.batch, self.predicted, self.bytes, *gauges
        ]  # fmt: skip

    def text(self) -> str:
        return "".join(f"{line}\n" for metric in self.all for line in metric.lines())


class Measured:
    """Counts and times what goes through an application, by the templates of its routes."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Mapping[str, str]) -> None:
        self.app, self.metrics, self.routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.metrics.in_house += 1
        try:
            await self.app(scope, receive, watched)
        finally:
            self.metrics.in_house -= 1
            route = self.routes.get(scope["path"], "other")
            method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST") else "other"
            self.metrics.requests.add({"route": route, "method": method, "status": str(status)})
            if route == "/predict" and method == "POST":
                self.metrics.seconds.observe(time.perf_counter() - start)


def resident_bytes() -> float:
    """Memory that this process holds, Linux only."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _head(name: str, words: str, kind: str) -> list[str]:
    return [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]


def _line(name: str, labels: Labels, value: float) -> str:
    written = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{name}{{{written}}} {_number(value)}" if written else f"{name} {_number(value)}"


def _escaped(text: str) -> str:
    r"""
    >>> print(_escaped('a "b"\n'))
    a \"b\"\n
    """
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    """
    >>> _number(3.0), _number(0.25), _number(1763200000.5)
    ('3', '0.25', '1763200000.5')
    """
    return str(int(value)) if float(value).is_integer() else repr(float(value))
