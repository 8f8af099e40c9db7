"""Settings of a server and the checks of requests: size and time of the body, then host, origin and token.

The checks of host, origin and token are a middleware, which also adds security headers to each response.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import math
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cclnet.errors import InputError

FORM_BYTES = 64 * 2**10  # allowed around the image in a form: boundaries, headers, other fields
COOKIE = "cclnet_session"
MIN_TOKEN_LENGTH = 16
MAX_WRONG_TOKENS = 10  # per client and minute, on the sign-in page
MAX_HEADER_BYTES = 16 * 2**10  # all headers of a request
OPEN_PATHS = ("/healthz", "/readyz", "/sign-in", "/static/")  # without a token; they reveal nothing about the model

SECURITY_HEADERS = {
    # Nothing from other servers, no inline scripts, no frame around the page.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}


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
    sets: str | None = None  # level of prediction sets, as for Model.predict; None: none are shown

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


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def host_of(netloc: str) -> str:
    """Return the host of a Host header in lower case and without its port, or "" if it is invalid."""
    try:
        return (urlsplit(f"//{netloc}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_local(host: str) -> bool:
    """Whether a host name or address can be reached from this machine only."""
    return host.lower() == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def check_token(token: str | None, host: str, allowed_hosts: Iterable[str]) -> str | None:
    """Return the token that requests must carry, or None. A server that others can reach must have one."""
    if not token:
        if public := [name for name in (host, *allowed_hosts) if not is_local(name)]:
            raise InputError(
                f"other machines can reach {', '.join(public)}, so a token is needed: set CCLNET_TOKEN (safer) or "
                f"pass --token (visible in the list of processes). A random one: {secrets.token_urlsafe(24)}"
            )
        return None
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or " " in token:
        raise InputError(
            f"the token must have at least {MIN_TOKEN_LENGTH} ASCII characters and no space; got {len(token)} "
            f"characters. A random one: {secrets.token_urlsafe(24)}"
        )
    return token


class Guard:
    """ASGI middleware that lets through requests with a known host, the same origin and, if set, the token.

    The host is checked because another site can point a name of its own at this server and thereby become the same
    origin (DNS rebinding). IP addresses are safe from that. Starlette's TrustedHostMiddleware cannot allow addresses.
    ``sign_in_page`` renders the sign-in page with an error message or "".
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, sign_in_page: Callable[[str], str]) -> None:
        self.app, self.token, self.sign_in_page = app, settings.token, sign_in_page
        self.session = secrets.token_urlsafe(32)  # cookie of signed-in browsers; valid until the server stops
        names = ("localhost", settings.host, socket.gethostname(), *settings.allowed_hosts)
        self.hosts = {name.lower() for name in names}
        self.wrong_tokens: Counter[str] = Counter()  # by client, since self.counted_since
        self.counted_since = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        request, answer = Request(scope, receive), self.app
        try:
            self.check(request)
            if self.token and (scope["method"], scope["path"]) == ("POST", "/sign-in"):
                answer = await self.sign_in(request)
        except Refused as refused:
            answer = refused.response()
            if refused.status == 401 and scope["path"] == "/":
                answer = HTMLResponse(self.sign_in_page(""), 401)
        await answer(scope, receive, send_with_headers)

    def check(self, request: Request) -> None:
        """Raise :class:`Refused` unless the request is allowed."""
        if sum(len(name) + len(value) for name, value in request.headers.raw) > MAX_HEADER_BYTES:
            raise Refused(431, f"The headers of this request exceed {MAX_HEADER_BYTES:,} bytes.")
        host = host_of(request.headers.get("host", ""))
        if host not in self.hosts and not is_address(host):
            raise Refused(421, "Unknown host name. Use the address of this server, or start it with --allow-host.")
        if request.method not in ("GET", "HEAD") and not same_origin(request.headers):
            raise Refused(403, "This request comes from a page of another site.")
        if self.token and not request.scope["path"].startswith(OPEN_PATHS) and not self.authorized(request):
            raise Refused(401, "A token is needed: Authorization: Bearer TOKEN.", {"WWW-Authenticate": "Bearer"})

    def authorized(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return _equal(given.strip(), self.token)
        return _equal(request.cookies.get(COOKIE, ""), self.session)

    async def sign_in(self, request: Request) -> Response:
        """Exchange the token for a cookie that scripts cannot read and other sites cannot send. After several wrong
        tokens a client must wait until the minute is over."""
        client = request.client.host if request.client else ""
        if (wait := self.counted_since + 60 - time.monotonic()) <= 0:
            self.wrong_tokens.clear()
            self.counted_since = time.monotonic()
        elif self.wrong_tokens[client] >= MAX_WRONG_TOKENS:
            error = f"Too many wrong tokens. Try again in {math.ceil(wait)} seconds."
            return HTMLResponse(self.sign_in_page(error), 429, {"Retry-After": str(math.ceil(wait))})
        body = await read_body(request, Limits(upload_bytes=1))
        given = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0]
        if not _equal(given.strip(), self.token):
            self.wrong_tokens[client] += 1
            return HTMLResponse(self.sign_in_page("The token is wrong."), 401)
        response = Response(status_code=303, headers={"Location": "./"})
        # Behind a proxy with HTTPS this server sees HTTP; the origin tells what the browser uses.
        secure = "https" in (request.url.scheme, request.headers.get("origin", "").partition("://")[0])
        response.set_cookie(COOKIE, self.session, httponly=True, samesite="strict", secure=secure)
        return response


def same_origin(headers: Headers) -> bool:
    """Whether a request was sent by the server's own page, or not by a browser page at all."""
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host")


def _equal(given: str, expected: str | None) -> bool:
    return expected is not None and hmac.compare_digest(given.encode(), expected.encode())  # in constant time
