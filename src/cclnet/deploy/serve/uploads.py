"""The body of a request, read within its limits of size and time; what it holds is looked at elsewhere."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from cclnet.deploy.serve.limits import Limits, Refused

FORM_BYTES = 64 * 2**10  # what a form may put around the image: boundaries, headers, other fields


async def read_body(request: Request, limits: Limits) -> bytes:
    """All bytes of the body. More than allowed is refused by its declared length, or as soon as it has come in."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refused(415, "Send the image as it is, without a Content-Encoding.")
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limits.upload_bytes + FORM_BYTES:
        raise too_large(limits)
    try:
        return await asyncio.wait_for(_read(request, limits), limits.seconds)
    except (TimeoutError, asyncio.TimeoutError):
        raise Refused(408, f"The image did not arrive within {limits.seconds:g} seconds.") from None
    except ClientDisconnect:
        raise Refused(400, "The connection was closed before the image had arrived.") from None


async def _read(request: Request, limits: Limits) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limits.upload_bytes + FORM_BYTES:
            raise too_large(limits)
        chunks.append(chunk)
    return b"".join(chunks)


def too_large(limits: Limits) -> Refused:
    return Refused(413, f"The file is larger than {limits.megabytes}, which is the limit here.")
