"""Limits on requests: their validation, and bodies or connections that are too slow."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest
from served import serving

from cclnet.deploy.serve.limits import Limits
from cclnet.errors import InputError


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
            assert silent.recv(1) == b""  # closed
        assert httpx.get(f"{address}/healthz").status_code == 200


def test_limits_must_be_positive() -> None:
    with pytest.raises(InputError, match=r"upload_bytes at least 1, got 0; seconds above 0, got 0"):
        Limits(upload_bytes=0, seconds=0)
