"""Hostile uploads get a 4xx with a reason, and the server goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from hostile import Hostile, dicom_bomb, hostile_uploads
from served import LIMITS, image_bytes, nursery, serving

from cclnet.deploy.serve.limits import Limits, Refused
from cclnet.deploy.serve.processes import ReadingProcesses
from cclnet.deploy.serve.reading import Reader

UPLOADS = hostile_uploads()
READER = Reader(24, (16, 16), LIMITS)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("run")) as address, httpx.Client(base_url=address, timeout=30) as opened:
        yield opened


def test_there_are_two_hundred_of_them() -> None:
    names = [upload.name for upload in UPLOADS]
    assert len(names) == len(set(names)) >= 200


@pytest.mark.parametrize("upload", UPLOADS, ids=lambda upload: upload.name)
def test_a_hostile_upload_gets_a_reason(client: httpx.Client, upload: Hostile) -> None:
    content: object = upload.body
    if upload.chunked:
        content = (upload.body[start : start + 50_000] for start in range(0, len(upload.body), 50_000))
    headers = {**upload.headers, "content-type": upload.content_type.encode("latin-1")}
    answer = client.post(f"/predict{upload.query}", content=content, headers=headers)  # type: ignore[arg-type]
    assert answer.status_code in upload.statuses, answer.text
    if answer.headers["content-type"] == "application/json" and answer.status_code != 200:
        assert len(answer.json()["reason"]) > 10
        assert "Traceback" not in answer.text and "/src/" not in answer.text
    elif answer.status_code != 200:
        assert answer.text == "Invalid HTTP request received."  # headers so long that no application sees them


def test_the_server_goes_on(client: httpx.Client) -> None:
    assert client.post("/predict", files={"image": image_bytes()}).json()["label"] == "red"
    assert 'status="500"' not in client.get("/metrics").text


def test_a_body_that_does_not_come_is_not_waited_for(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("run"), limits=Limits(seconds=0.4)) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as line:
            line.sendall(b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/png\r\n")
            line.sendall(b"Content-Length: 900\r\n\r\nthe beginning")
            answer = b""
            while not answer.endswith(b"}"):
                answer += line.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408 ") and b"did not arrive within 0.4 seconds" in answer


def test_a_bomb_meets_the_limit_of_memory() -> None:
    pytest.importorskip("pydicom", reason="no pydicom to set the bomb off")
    if sys.platform != "linux":
        pytest.skip("memory is limited on Linux alone")
    processes = ReadingProcesses(replace(READER, limits=replace(LIMITS, pixels=1000)), 1, nursery())
    with pytest.raises(Refused, match="Unable to allocate"):
        read(processes, dicom_bomb(900 * 2**20))
    processes.close()


def read(processes: ReadingProcesses, content: bytes) -> bytes:
    return asyncio.run(processes.read(content, "image/png", False)).pixels.tobytes()


@pytest.fixture
def processes() -> Iterator[ReadingProcesses]:
    made = ReadingProcesses(READER, 1, nursery())
    yield made
    made.close()


def test_a_decoder_that_takes_too_long_is_ended(processes: ReadingProcesses) -> None:
    (process,) = processes._processes
    before = process.pid
    process.reader = replace(READER, limits=replace(LIMITS, seconds=1e-5))
    with pytest.raises(Refused, match="took longer than 1e-05 seconds"):
        read(processes, image_bytes(size=(1400, 1400)))
    process.reader = READER
    assert read(processes, image_bytes()) == bytes((200, 20, 10)) * 256
    assert process.pid != before


def test_a_decoder_that_dies_over_an_image_is_replaced(processes: ReadingProcesses) -> None:
    (process,) = processes._processes
    os.kill(process.pid, signal.SIGSTOP)  # it will not read what is sent before it dies
    sent = process.connection.send_bytes

    def send(message: bytes) -> None:
        sent(message)
        os.kill(process.pid, signal.SIGKILL)

    process.connection.send_bytes = send  # type: ignore[method-assign]
    with pytest.raises(Refused, match="its decoder broke down over it"):
        read(processes, image_bytes())
    assert read(processes, image_bytes()) == bytes((200, 20, 10)) * 256


def test_a_decoder_that_dies_while_it_starts_is_replaced(processes: ReadingProcesses) -> None:
    (process,) = processes._processes
    process._restart()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(Refused, match="is being started again"):
        read(processes, image_bytes())
    assert read(processes, image_bytes()) == bytes((200, 20, 10)) * 256


def test_who_connects_and_says_nothing_is_let_go(tmp_path: Path) -> None:
    with serving(tmp_path, seconds_to_ask=0.5) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as silent:
            silent.sendall(b"GET / HTTP/1.1\r\n")  # and no more
            assert silent.recv(1) == b""  # closed
        assert httpx.get(f"{address}/healthz").status_code == 200


def test_a_decoder_that_died_in_between_costs_nobody_an_answer(processes: ReadingProcesses) -> None:
    (process,) = processes._processes
    os.kill(process.pid, signal.SIGKILL)
    assert process.connection.poll(20)  # the line is closed: it is dead
    assert read(processes, image_bytes()) == bytes((200, 20, 10)) * 256
