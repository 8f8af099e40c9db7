"""Limits on one request, the error that refuses a request, and reading a request body within the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from cclnet.errors import InputError

FORM_BYTES = 64 * 2**10  # allowed around the image in a form: boundaries, headers, other fields


@dataclass(frozen=True)
class Limits:
    """Limits on uploads.

    Attributes:
        upload_bytes: size of the image file.
        pixels: size of the image according to its header, checked before decoding.
        seconds: for receiving the upload, for decoding it, and for the network, each.
        in_memory: uploads in memory at once; the bodies of further requests are not read yet.
        waiting: requests in progress; further requests are refused.
    """

    upload_bytes: int = 20 * 2**20
    pixels: int = 50_000_000
    seconds: float = 30.0
    in_memory: int = 64
    waiting: int = 256

    def __post_init__(self) -> None:
        counts = ("upload_bytes", "pixels", "in_memory", "waiting")
        wrong = [f"{name} at least 1, got {getattr(self, name)}" for name in counts if getattr(self, name) < 1]
        wrong += [f"seconds above 0, got {self.seconds:g}"] if not self.seconds > 0 else []
        if wrong:
            raise InputError(f"these limits would refuse every upload. Expected {'; '.join(wrong)}.")

    @property
    def megabytes(self) -> str:
        """
        >>> Limits().megabytes
        '20 MB'
        """
        return f"{self.upload_bytes / 2**20:.3g} MB"

    @property
    def megapixels(self) -> str:
        return f"{self.pixels / 1e6:.3g} megapixels"


class Refused(Exception):
    """A request that is refused: the HTTP status, and a reason for the person who sent it."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, reason)
        self.status, self.reason, self.headers = status, reason, dict(headers or {})


def busy(reason: str) -> Refused:
    """A refusal of a request that may succeed if it is sent again."""
    return Refused(503, f"{reason} Try again in a moment.", {"Retry-After": "1"})


def too_large(limits: Limits) -> Refused:
    return Refused(413, f"The file is larger than {limits.megabytes}, the limit of this server.")


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return the body of a request.

    Starlette limits neither the size nor the time of a body. Here a body that is too large is refused by its declared
    length, or as soon as too many bytes have arrived.
    """
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refused(415, "Send the image without a Content-Encoding.")
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limits.upload_bytes + FORM_BYTES:
        raise too_large(limits)
    try:
        return await asyncio.wait_for(_receive(request, limits), limits.seconds)
    except (TimeoutError, asyncio.TimeoutError):
        raise Refused(408, f"The image did not arrive within {limits.seconds:g} seconds.") from None
    except ClientDisconnect:
        raise Refused(400, "The connection was closed before the image had arrived.") from None


async def _receive(request: Request, limits: Limits) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limits.upload_bytes + FORM_BYTES:
            raise too_large(limits)
    return bytes(body)
