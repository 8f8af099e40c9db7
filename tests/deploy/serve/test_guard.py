"""Checks of requests: limits, host, origin and token."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from served import LIMITS, colour_model, image_bytes, running, serving

from cclnet.deploy.serve.app import create_app
from cclnet.deploy.serve.guard import COOKIE, Limits, ServeSettings, check_token, host_of, is_local
from cclnet.deploy.serve.server import Connections
from cclnet.errors import InputError

TOKEN = "k7Jq-4uPz_0aXw9Lm2Tr"
IMAGE = {"image": image_bytes()}


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("run"), allowed_hosts=("skin.example.org",)) as address:
        yield address


@pytest.fixture(scope="module")
def closed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("run"), token=TOKEN) as address:
        yield address


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:80", "192.168.1.7", "skin.example.org"]
)
def test_known_hosts_are_allowed(open_server: str, host: str) -> None:
    assert httpx.get(f"{open_server}/model", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "[::1",
        "",
        "a@b@evil.org",
    ],
)
def test_unknown_hosts_are_refused(open_server: str, host: str) -> None:
    answer = httpx.get(f"{open_server}/model", headers={"host": host})
    assert answer.status_code == 421 and "--allow-host" in answer.json()["reason"]


@pytest.mark.parametrize(
    "headers",
    [{"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://127.0.0.1:1"},
     {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}],
)  # fmt: skip
def test_other_origins_are_refused(open_server: str, headers: dict[str, str]) -> None:
    answer = httpx.post(f"{open_server}/predict", files=IMAGE, headers=headers)
    assert answer.status_code == 403 and "another site" in answer.json()["reason"]


def test_the_same_origin_is_allowed(open_server: str) -> None:
    headers = {"origin": open_server, "sec-fetch-site": "same-origin"}
    assert httpx.post(f"{open_server}/predict", files=IMAGE, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/model", "/metrics", "/openapi.json", "/docs", "/examples/0", "/nowhere"])
def test_a_missing_token_is_refused(closed_server: str, path: str) -> None:
    answer = httpx.get(closed_server + path)
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert "token" in answer.json()["reason"]


@pytest.mark.parametrize(
    "given", ["", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer \xe4"]
)
def test_a_wrong_token_is_refused(closed_server: str, given: str) -> None:
    headers = {"authorization": given.encode("latin-1")}
    assert httpx.post(f"{closed_server}/predict", files=IMAGE, headers=headers).status_code == 401


def test_the_right_token_is_accepted(closed_server: str) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert httpx.post(f"{closed_server}/predict", files=IMAGE, headers=headers).json()["label"] == "red"
    assert httpx.get(f"{closed_server}/model", headers=headers).status_code == 200
    schema = httpx.get(f"{closed_server}/openapi.json", headers=headers).json()
    assert "HTTPBearer" in schema["components"]["securitySchemes"]
    assert "Authorization: Bearer TOKEN" in httpx.get(f"{closed_server}/docs", headers=headers).text


def test_health_and_style_need_no_token(closed_server: str) -> None:
    assert httpx.get(f"{closed_server}/healthz").status_code == 200
    assert httpx.get(f"{closed_server}/readyz").status_code == 200
    assert httpx.get(f"{closed_server}/static/page.css").status_code == 200


def test_a_person_signs_in_on_the_page(closed_server: str) -> None:
    with httpx.Client(base_url=closed_server) as person:
        first = person.get("/")
        assert first.status_code == 401 and 'type="password"' in first.text and "blue" not in first.text
        wrong = person.post("/sign-in", data={"token": "open sesame"})
        assert wrong.status_code == 401 and "The token is wrong." in wrong.text and not person.cookies
        right = person.post("/sign-in", data={"token": TOKEN})
        assert right.status_code == 303 and right.headers["location"] == "./"
        cookie = right.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie and TOKEN.lower() not in cookie
        assert "Drop an image here" in person.get("/").text
        assert person.post("/predict", files=IMAGE).status_code == 200


def test_behind_an_https_proxy_cookie_and_urls_are_secure(tmp_path: Path) -> None:
    with serving(tmp_path, token=TOKEN, allowed_hosts=("skin.example.org",)) as address:
        seen = {"Host": "skin.example.org", "Origin": "https://skin.example.org"}
        behind = httpx.post(f"{address}/sign-in", data={"token": TOKEN}, headers=seen)
        assert "; secure" in behind.headers["set-cookie"].lower()
        plain = httpx.post(f"{address}/sign-in", data={"token": TOKEN})
        assert "; secure" not in plain.headers["set-cookie"].lower()
        asked = {"Authorization": f"Bearer {TOKEN}"}
        docs = httpx.get(f"{address}/docs", headers={**asked, "Host": "skin.example.org"}).text
        assert "https://skin.example.org/predict" in docs and "http://skin.example.org" not in docs
        assert f"{address}/predict" in httpx.get(f"{address}/docs", headers=asked).text


def test_a_forged_cookie_is_refused(closed_server: str) -> None:
    assert httpx.get(f"{closed_server}/model", cookies={COOKIE: TOKEN}).status_code == 401


def test_a_long_sign_in_body_is_refused(closed_server: str) -> None:
    answer = httpx.post(f"{closed_server}/sign-in", content=b"token=" + b"x" * 200_000)
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("host", "allowed"), [("0.0.0.0", ()), ("192.168.1.7", ()), ("127.0.0.1", ("skin.example.org",))]
)
def test_public_hosts_need_a_token(host: str, allowed: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=r"so a token is needed.*CCLNET_TOKEN"):
        check_token(None, host, allowed)
    with pytest.raises(InputError, match="so a token is needed"):
        check_token("", host, allowed)
    assert check_token(TOKEN, host, allowed) == TOKEN


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_local_hosts_need_no_token(host: str) -> None:
    assert check_token(None, host, ()) is None


@pytest.mark.parametrize("token", ["secret", "with spaces in the middle of it", "öööööööööööööööööööö"])
def test_a_weak_token_is_refused(token: str) -> None:
    with pytest.raises(InputError, match="at least 16"):
        check_token(token, "127.0.0.1", ())


def test_a_body_that_does_not_arrive_times_out(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("run"), limits=Limits(seconds=0.4)) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as line:
            line.sendall(b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/png\r\n")
            line.sendall(b"Content-Length: 900\r\n\r\nthe beginning")
            answer = b""
            while not answer.endswith(b"}"):
                answer += line.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408 ") and b"did not arrive within 0.4 seconds" in answer


def test_a_silent_connection_is_closed(tmp_path: Path) -> None:
    with serving(tmp_path, seconds_to_ask=0.5) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as silent:
            silent.sendall(b"GET / HTTP/1.1\r\n")  # and no more
            assert closed(silent)
        assert httpx.get(f"{address}/healthz").status_code == 200


def opened(address: str, send: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    line = socket.create_connection((host, int(port)), timeout=20, source_address=(source, 0))
    line.sendall(send)
    return line


GET = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def test_half_a_head_on_a_kept_connection_is_closed(tmp_path: Path) -> None:
    with serving(tmp_path, seconds_to_ask=0.5) as address, opened(address, GET + b"\r\n") as line:
        assert line.recv(4096).startswith(b"HTTP/1.1 200")
        line.sendall(GET)  # and no end
        assert closed(line)


def test_pipelined_requests_are_answered(tmp_path: Path) -> None:
    with serving(tmp_path, seconds_to_ask=0.5) as address, opened(address, (GET + b"\r\n") * 3) as line:
        answers = b""
        while answers.count(b"HTTP/1.1 200") < 3:
            answers += line.recv(4096) or b"HTTP/1.1 200 closed" * 9
        assert b"closed" not in answers
        assert closed(line)


def test_a_slow_body_is_not_a_slow_head(tmp_path: Path) -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/png\r\nContent-Length: "
    body = image_bytes()
    with serving(tmp_path, seconds_to_ask=0.5) as address, opened(address, head + b"%d\r\n\r\n" % len(body)) as line:
        time.sleep(1.0)
        line.sendall(body)
        assert line.recv(4096).startswith(b"HTTP/1.1 200")


def closed(line: socket.socket) -> bool:
    try:
        while line.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="needs several addresses of this machine")
def test_many_connections_of_one_client_keep_nobody_out(tmp_path: Path) -> None:
    """The oldest that wait are closed, of the same client; a request in progress goes on."""
    settings = ServeSettings(name="colours", limits=LIMITS, decoders=1)
    limit = Connections(per_client=20, total=40)
    with running(create_app(colour_model(tmp_path), settings), 20.0, limit) as address, ExitStack() as stack:
        other = stack.enter_context(opened(address, GET, "127.0.0.2"))
        half = [stack.enter_context(opened(address, GET)) for _ in range(50)]
        assert httpx.get(f"{address}/healthz").status_code == 200
        assert all(closed(line) for line in half[:30])
        for line in (other, half[-1]):
            line.sendall(b"\r\n")
            assert line.recv(4096).startswith(b"HTTP/1.1 200")
        for i in range(3, 8):
            stack.enter_context(opened(address, GET, f"127.0.0.{i}"))
        assert sum(map(len, limit.open.values())) <= 40 and max(map(len, limit.open.values())) <= 20


def test_sign_in_attempts_are_limited(tmp_path: Path) -> None:
    with serving(tmp_path, token=TOKEN) as address:
        statuses = [httpx.post(f"{address}/sign-in", data={"token": f"guess {i}"}).status_code for i in range(12)]
        assert statuses == [401] * 10 + [429] * 2
        right = httpx.post(f"{address}/sign-in", data={"token": TOKEN})
        assert right.status_code == 429 and 1 <= int(right.headers["retry-after"]) <= 60
        assert httpx.get(f"{address}/model", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_limits_must_be_positive() -> None:
    with pytest.raises(InputError, match=r"upload_bytes at least 1, got 0; seconds above 0, got 0"):
        Limits(upload_bytes=0, seconds=0)


def test_names_of_hosts() -> None:
    assert [host_of(name) for name in ("Localhost:8000", "[::1]:80", "[::1")] == ["localhost", "::1", ""]
    assert is_local("127.0.0.1") and is_local("localhost") and is_local("::1") and not is_local("0.0.0.0")
