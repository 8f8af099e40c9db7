"""Decoding: hostile uploads are refused with a reason, and dead decoding processes are replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

import httpx
import pytest
from hostile import Hostile, dicom_bomb, hostile_uploads
from served import LIMITS, image_bytes, serving

from cclnet.deploy.serve import decoding
from cclnet.deploy.serve.decoding import Decoder, DecoderPool, DecodingSettings
from cclnet.deploy.serve.guard import Refused
from cclnet.errors import InputError

UPLOADS = hostile_uploads()
SETTINGS = DecodingSettings(24, (16, 16), LIMITS)
RED = bytes((200, 20, 10)) * 256


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("run")) as address, httpx.Client(base_url=address, timeout=30) as opened:
        yield opened


def test_there_are_two_hundred_hostile_uploads() -> None:
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
        assert answer.text == "Invalid HTTP request received."  # headers so long that the application is not called


def test_the_server_survives_hostile_uploads(client: httpx.Client) -> None:
    assert client.post("/predict", files={"image": image_bytes()}).json()["label"] == "red"
    assert 'status="500"' not in client.get("/metrics").text


def test_a_decompression_bomb_is_refused_by_its_header() -> None:
    """The memory limit itself is tested in tests/data/test_parallel.py."""
    pytest.importorskip("pydicom", reason="no pydicom to set the bomb off")
    pool = DecoderPool(replace(SETTINGS, limits=replace(LIMITS, pixels=1000)), 1)
    with pytest.raises(Refused, match="contains no image") as refused:
        decode(pool, dicom_bomb(900 * 2**20))
    assert refused.value.status == 422
    pool.close()


def decode(pool: DecoderPool, content: bytes) -> bytes:
    return asyncio.run(pool.decode(content, "image/png", False)).pixels.tobytes()


@pytest.fixture
def pool() -> Iterator[DecoderPool]:
    made = DecoderPool(SETTINGS, 1)
    yield made
    made.close()


def pid_of(decoder: Decoder) -> int:
    assert decoder.process is not None and decoder.process.pid is not None
    return decoder.process.pid


def signal_while_decoding(pool: DecoderPool, signum: int) -> None:
    """Pause the only process, so that it does not read the request, and then send it a signal."""
    (decoder,) = pool.decoders
    os.kill(pid_of(decoder), signal.SIGSTOP)
    send = decoder.connection.send_bytes

    def send_and_signal(message: bytes) -> None:
        send(message)
        os.kill(pid_of(decoder), signum)
        os.kill(pid_of(decoder), signal.SIGCONT)

    decoder.connection.send_bytes = send_and_signal  # type: ignore[method-assign]


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_decoder_that_takes_too_long_is_killed(pool: DecoderPool) -> None:
    (decoder,) = pool.decoders
    before = pid_of(decoder)
    decoder.settings = replace(SETTINGS, limits=replace(LIMITS, seconds=1e-5))
    with pytest.raises(Refused, match="took longer than 1e-05 seconds") as refused:
        decode(pool, image_bytes(size=(1400, 1400)))
    assert refused.value.status == 422
    decoder.settings = SETTINGS
    assert decode(pool, image_bytes()) == RED
    assert pid_of(decoder) != before


def test_an_image_that_crashes_its_decoder_is_refused(pool: DecoderPool) -> None:
    signal_while_decoding(pool, signal.SIGSEGV)
    with pytest.raises(Refused, match="decoder crashed") as refused:
        decode(pool, image_bytes())
    assert refused.value.status == 422
    assert decode(pool, image_bytes()) == RED


def test_an_image_whose_decoder_is_killed_from_outside_may_be_sent_again(pool: DecoderPool) -> None:
    signal_while_decoding(pool, signal.SIGKILL)
    with pytest.raises(Refused, match="was killed") as refused:
        decode(pool, image_bytes())
    assert refused.value.status == 503 and refused.value.headers == {"Retry-After": "1"}
    assert decode(pool, image_bytes()) == RED


def test_a_decoder_that_returns_nonsense_is_replaced(pool: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    (decoder,) = pool.decoders
    before = pid_of(decoder)
    with monkeypatch.context() as patch, pytest.raises(Refused, match="invalid data"):
        patch.setattr(decoder.connection, "recv_bytes", lambda size: b"{}\n", raising=False)
        decode(pool, image_bytes())
    assert decode(pool, image_bytes()) == RED
    assert pid_of(decoder) != before


def test_a_decoder_that_dies_while_it_starts_is_replaced(pool: DecoderPool) -> None:
    (decoder,) = pool.decoders
    decoder.start()
    pid = pid_of(decoder)
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(Refused, match="is being restarted") as refused:
        decode(pool, image_bytes())
    assert refused.value.status == 503
    assert decode(pool, image_bytes()) == RED


def test_a_decoder_that_died_while_idle_is_replaced_without_an_error(pool: DecoderPool) -> None:
    (decoder,) = pool.decoders
    with decoder._lock:  # before the supervisor notices
        os.kill(pid_of(decoder), signal.SIGKILL)
        assert decoder.connection.poll(20)  # closed
    assert decode(pool, image_bytes()) == RED


@pytest.mark.parametrize("level", ["decoding process", "fork server"])
def test_the_supervisor_restarts_what_was_killed(pool: DecoderPool, level: str) -> None:
    (decoder,) = pool.decoders
    before, fork_server = pid_of(decoder), forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    os.kill(before if level == "decoding process" else fork_server, signal.SIGKILL)
    if level == "decoding process":
        wait_until(lambda: not pool.ready)
    assert pool.healthy  # it will recover
    if level == "fork server":
        assert decode(pool, image_bytes()) == RED  # by the process that has lost its fork server
    wait_until(lambda: pool.ready and decoder.process is not None and pid_of(decoder) != before)
    assert decode(pool, image_bytes()) == RED
    wait_until(lambda: not Path(f"/proc/{before}").exists() or sys.platform != "linux")


def test_a_pool_that_cannot_start_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "run_decoder", os._exit)  # fails with its arguments, in the new process
    with pytest.raises(InputError, match="decoding processes could not be started"):
        DecoderPool(SETTINGS, 2)


def test_a_pool_that_cannot_restart_is_neither_ready_nor_healthy(
    pool: DecoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (decoder,) = pool.decoders
    monkeypatch.setattr(decoding, "_SECONDS_TO_START", 0.1)

    def fail() -> None:
        raise OSError("no memory")

    monkeypatch.setattr(decoder, "start", fail)
    os.kill(pid_of(decoder), signal.SIGKILL)
    wait_until(lambda: not pool.healthy)
    assert not pool.ready
    with pytest.raises(Refused, match="is being restarted"):
        decode(pool, image_bytes())
