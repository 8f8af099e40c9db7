"""Middleware that checks host, origin and token of each request, and adds security headers to each response."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Callable, Iterable
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cclnet.deploy.serve.limits import Limits, Refused, ServeSettings, read_body
from cclnet.errors import InputError

COOKIE = "cclnet_session"
MIN_TOKEN_LENGTH = 16
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


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def host_of(netloc: str) -> str:
    """Return the host of a Host header without its port, or "" if it is invalid.

    >>> host_of("Localhost:8000"), host_of("[::1]:80"), host_of("[::1")
    ('localhost', '::1', '')
    """
    try:
        return (urlsplit(f"//{netloc}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_local(host: str) -> bool:
    """Whether a host name or address can be reached from this machine only.

    >>> is_local("127.0.0.1"), is_local("localhost"), is_local("::1"), is_local("0.0.0.0")
    (True, True, True, False)
    """
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
        """Exchange the token for a cookie that scripts cannot read and other sites cannot send."""
        body = await read_body(request, Limits(upload_bytes=1))
        given = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0]
        if not _equal(given.strip(), self.token):
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
