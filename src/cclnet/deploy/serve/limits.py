"""Settings of a server, limits on one request, the error that refuses a request, and reading a body within limits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from cclnet.errors import InputError

FORM_BYTES = 64 * 2**10  # allowed around the image in a form: boundaries, headers, other fields


@dataclass(frozen=True)
class Limits:
    """Limits on uploads."""

    upload_bytes: int = 20 * 2**20  # size of the image file
    pixels: int = 50_000_000  # size of the image according to its header, checked before decoding
    seconds: float = 30.0  # for receiving the upload, for decoding it, and for the network, each
    in_memory: int = 64  # uploads in memory at once; the bodies of further requests are not read yet
    waiting: int = 256  # requests in progress; further requests are refused

    def __post_init__(self) -> None:
        counts = ("upload_bytes", "pixels", "in_memory", "waiting")
        wrong = [f"{name} at least 1, got {getattr(self, name)}" for name in counts if getattr(self, name) < 1]
        wrong += [f"seconds above 0, got {self.seconds:g}"] if not self.seconds > 0 else []
        if wrong:
            raise InputError(f"these limits would refuse every upload. Expected {'; '.join(wrong)}.")

    @property
    def megabytes(self) -> str:
        return f"{self.upload_bytes / 2**20:.3g} MB"

    @property
    def megapixels(self) -> str:
        return f"{self.pixels / 1e6:.3g} megapixels"


@dataclass(frozen=True)
class ServeSettings:
    """How a model is served."""

    name: str = ""  # of the model, on the page
    limits: Limits = field(default_factory=Limits)
    max_batch: int = 16  # images per batch
    decoders: int | None = None  # number of decoding processes. Default: one per core, at most four
    kept_in: Path | None = None  # folder where uploads are kept
    examples: Mapping[str, list[str]] = field(default_factory=dict)  # data URIs of training images of each class
    host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()  # further host names, such as that of a proxy
    token: str | None = None  # required of all requests

    def __post_init__(self) -> None:
        if self.max_batch < 1 or (self.decoders is not None and self.decoders < 1):
            raise InputError(f"batch and decoders must be at least 1; got {self.max_batch} and {self.decoders}.")


class Refused(Exception):
    """A request that is refused: the HTTP status, and a reason for the person who sent it."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, reason)
        self.status, self.reason, self.headers = status, reason, dict(headers or {})

    def response(self) -> JSONResponse:
        return JSONResponse({"reason": self.reason}, self.status, self.headers)


def busy(reason: str) -> Refused:
    """A refusal of a request that may succeed if it is sent again."""
    return Refused(503, f"{reason} Try again in a moment.", {"Retry-After": "1"})


def too_large(limits: Limits) -> Refused:
    return Refused(413, f"The file is larger than {limits.megabytes}, the limit of this server.")


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return the body of a request; refuse one that is too large, by its declared length or as its bytes arrive.

    Starlette limits neither the size nor the time of a body.
    """
    most = limits.upload_bytes + FORM_BYTES
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refused(415, "Send the image without a Content-Encoding.")
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > most:
        raise too_large(limits)

    async def receive() -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise too_large(limits)
        return bytes(body)

    try:
        return await asyncio.wait_for(receive(), limits.seconds)
    except (TimeoutError, asyncio.TimeoutError):
        raise Refused(408, f"The image did not arrive within {limits.seconds:g} seconds.") from None
    except ClientDisconnect:
        raise Refused(400, "The connection was closed before the image had arrived.") from None
