"""Who may ask: the right host, the right origin, the right token. And what every answer tells the browser."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Iterable
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cclnet.deploy.serve.limits import Limits, Refused
from cclnet.deploy.serve.page import sign_in_page
from cclnet.deploy.serve.uploads import read_body
from cclnet.errors import InputError

COOKIE = "cclnet_session"
SHORTEST_TOKEN = 16
HEADER_BYTES = 16 * 2**10  # of a request
OPEN = ("/healthz", "/sign-in", "/static/")  # says nothing about the model

HEADERS = {
    # Nothing from elsewhere, nothing inline, no frame around it.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def host_of(netloc: str) -> str:
    """The name or address without its port; empty for what is neither.

    >>> host_of("Localhost:8000"), host_of("[::1]:80"), host_of("[::1")
    ('localhost', '::1', '')
    """
    try:
        return (urlsplit(f"//{netloc}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_local(host: str) -> bool:
    """Whether a name or address is this machine alone.

    >>> is_local("127.0.0.1"), is_local("localhost"), is_local("::1"), is_local("0.0.0.0")
    (True, True, True, False)
    """
    return host.lower() == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def check_token(token: str | None, host: str, allowed_hosts: Iterable[str]) -> str | None:
    """The token to ask for, or None where none is needed. Others than this machine never get in without one."""
    open_to = [name for name in (host, *allowed_hosts) if not is_local(name)]
    if not token:
        if open_to:
            raise InputError(
                f"{', '.join(open_to)} can be reached by others, so a token is needed: give --token, or better set "
                f"CCLNET_TOKEN, which no list of processes shows. A good one: {secrets.token_urlsafe(24)}"
            )
        return None
    if len(token) < SHORTEST_TOKEN or not token.isascii() or " " in token:
        raise InputError(
            f"a token has at least {SHORTEST_TOKEN} letters, digits and signs without a space, so that it cannot be "
            f"guessed and fits into a header; got {len(token)} characters. A good one: {secrets.token_urlsafe(24)}"
        )
    return token


class Guard:
    """Lets through what comes under a known name, from the same origin, with the token where there is one.

    A page elsewhere can make a name of its own point here and so become the same origin (DNS rebinding): an address
    in numbers cannot be taken over like that, a name must be known.
    """

    def __init__(self, app: ASGIApp, host: str, allowed_hosts: Iterable[str], token: str | None) -> None:
        self.app = app
        self.token = token
        self.session = secrets.token_urlsafe(32)  # the cookie of those who gave the token; ends with the server
        self.names = {name.lower() for name in ("localhost", host, socket.gethostname(), *allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        request = Request(scope, receive)
        answer = self.refusal(request)
        if answer is None and scope["path"] == "/sign-in" and scope["method"] == "POST" and self.token:
            answer = await self.sign_in(request)
        await (answer or self.app)(scope, receive, with_headers)

    def refusal(self, request: Request) -> Response | None:
        """Why a request goes no further, None where it may."""
        if sum(len(name) + len(value) for name, value in request.headers.raw) > HEADER_BYTES:
            return _reason(431, f"The headers of this request have more than {HEADER_BYTES:,} bytes.")
        if not self.known_host(request.headers):
            return _reason(421, "This server does not go by that name. Use its address, or start it with --allow-host.")
        if request.method not in ("GET", "HEAD") and not same_origin(request.headers):
            return _reason(403, "This request comes from a page elsewhere.")
        path = request.scope["path"]
        if self.token is None or path.startswith(OPEN) or self.has_token(request):
            return None
        if path == "/":
            return HTMLResponse(sign_in_page(), 401)
        return _reason(401, "A token is needed: Authorization: Bearer TOKEN.", {"WWW-Authenticate": "Bearer"})

    def known_host(self, headers: Headers) -> bool:
        name = host_of(headers.get("host", ""))
        return name in self.names or is_address(name)

    def has_token(self, request: Request) -> bool:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self.is_token(given.strip())
        return same(request.cookies.get(COOKIE, ""), self.session)

    def is_token(self, given: str) -> bool:
        return self.token is not None and same(given, self.token)

    async def sign_in(self, request: Request) -> Response:
        """From the token, typed once, to a cookie that scripts cannot read and other pages cannot send."""
        try:
            body = await read_body(request, Limits(upload_bytes=1))
        except Refused as refused:
            return _reason(refused.status, refused.reason)
        given = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0]
        if not self.is_token(given.strip()):
            return HTMLResponse(sign_in_page("That is not the token."), 401)
        answer = Response(status_code=303, headers={"Location": "./"})
        # Behind a proxy that speaks https this server sees http; the page it was sent from tells.
        secure = "https" in (request.url.scheme, request.headers.get("origin", "").partition("://")[0])
        answer.set_cookie(COOKIE, self.session, httponly=True, samesite="strict", secure=secure)
        return answer


def same_origin(headers: Headers) -> bool:
    """Whether a request that changes or costs something was made by our own page, or by no page at all."""
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host")


def same(given: str, right: str) -> bool:
    """Whether two texts are equal, in a time that does not tell how much of them is."""
    return hmac.compare_digest(given.encode(), right.encode())


def _reason(status: int, words: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"reason": words}, status, headers)
