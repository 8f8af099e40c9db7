"""`cclnet serve` as a person types it: a real run in a process of its own, and what is said when it cannot start."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from shipped_run import write_images, write_run
from typer.testing import CliRunner

import cclnet
from cclnet.cli import app
from cclnet.deploy.serve.server import load_to_serve
from cclnet.deploy.serve.words import explanation
from cclnet.errors import InputError


def refused(*arguments: str) -> str:
    """What `cclnet serve` says before it starts anything."""
    error = CliRunner().invoke(app, ["serve", *arguments], env={"CCLNET_TOKEN": ""}).exception
    assert isinstance(error, InputError), error
    return str(error)


def descendants(pid: int) -> list[int]:
    own = [int(child) for of in Path(f"/proc/{pid}/task").glob("*/children") for child in of.read_text().split()]
    return own + [below for child in own for below in descendants(child)]


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def talk_to(server: subprocess.Popen[str], run: Path, images: list[Path]) -> list[int]:
    """Ask a server what it says about images, hold it against the model in a program; gives its processes."""
    assert server.stderr is not None
    greeting = server.stderr.readline()
    found = re.search(r"Serving run at (http://127\.0\.0\.1:\d+) \(torch on cpu", greeting)
    assert found, greeting
    model = cclnet.load(run)
    with httpx.Client(base_url=found[1], timeout=120) as client:
        for path in images:
            answer = client.post("/predict?explain=1", files={"image": path.read_bytes()}).json()
            expected = model.predict(path)
            assert answer["label"] == expected.label
            assert answer["confidence"] == pytest.approx(expected.confidence, abs=1e-9)
            assert [one["name"] for one in answer["similar"]] == [name for name, _ in expected.similar]
            assert answer["words"] == explanation(expected, multilabel=False, calibrated=True, curve=model.curve)
    below = descendants(server.pid)
    assert len(below) >= 2  # a reader, and the process it was forked from
    return below


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them")
def test_a_run_is_served_until_it_is_stopped_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run, images = write_run(tmp_path / "run"), write_images(tmp_path / "images")
    command = [sys.executable, "-m", "cclnet", "serve", str(run), "--port", "0", "--engine", "torch", "--readers", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            below = talk_to(server, run, images)
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=60) == 0
            assert server.stderr is not None and server.stderr.read() == ""
        finally:
            server.kill()
    deadline = time.monotonic() + 20
    while any(map(alive, below)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, below))


def test_on_a_cpu_the_model_runs_in_onnx_unless_only_torch_has_its_maps(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="no onnxscript to convert the model with")
    pytest.importorskip("captum", reason="no captum for the maps that only torch can make")
    assert load_to_serve(write_run(tmp_path / "plain"), "cpu", "auto").engine == "onnx"
    grad_cam = write_run(tmp_path / "grad_cam", "test_convnext")
    assert load_to_serve(grad_cam, "cpu", "auto").engine == "torch"
    assert load_to_serve(grad_cam, "cpu", "onnx").engine == "onnx"


def test_others_are_not_served_without_a_token(tmp_path: Path) -> None:
    run = str(tmp_path)
    assert "a token is needed" in refused(run, "--host", "0.0.0.0")
    assert "a token is needed" in refused(run, "--allow-host", "skin.example.org")
    assert "at least 16" in refused(run, "--host", "0.0.0.0", "--token", "short")


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen at 127.0.0.1, port {port}" in refused(str(tmp_path), "--port", port)


def test_an_unknown_host_is_named(tmp_path: Path) -> None:
    told = refused(str(tmp_path), "--host", "no.such.host.invalid", "--token", "k7Jq-4uPz_0aXw9Lm2Tr")
    assert "cannot listen at no.such.host.invalid" in told


@pytest.mark.parametrize("option", ["--max-megabytes", "--max-megapixels", "--max-seconds"])
def test_limits_of_nothing_are_refused(tmp_path: Path, option: str) -> None:
    assert "limits must let something through" in refused(str(tmp_path), option, "0")


@pytest.mark.parametrize("option", ["--batch", "--readers"])
def test_batches_and_readers_of_nothing_are_refused(tmp_path: Path, option: str) -> None:
    assert "must be at least 1" in refused(str(tmp_path), option, "0", "--port", "0")


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    assert "holds no model" in refused(str(tmp_path), "--port", "0")


def test_without_the_extra_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "python_multipart", None)
    assert "pip install 'cclnet[serve,export]'" in refused(str(tmp_path))


def test_a_score_file_that_makes_no_sense_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "scores.json").write_text("{}")
    assert "scores.json is not what cclnet evaluate writes" in refused(str(run), "--port", "0", "--engine", "torch")
