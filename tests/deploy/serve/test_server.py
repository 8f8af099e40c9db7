"""`cclnet serve`: a real run in a process of its own, errors at the start, and example images."""

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
import pandas as pd
import pytest
from served import serving
from shipped_run import write_images, write_run
from typer.testing import CliRunner

import cclnet
from cclnet.cli import app
from cclnet.data.sources import open_data
from cclnet.data.split import make_split, split_table
from cclnet.deploy.serve.answers import explain_confidence
from cclnet.deploy.serve.server import EXAMPLES_PER_CLASS, choose_examples, load_to_serve, read_examples
from cclnet.errors import InputError
from cclnet.runs.folder import write_split_file
from cclnet.settings import SplitSettings

DATA = "synthetic:images=70,size=16"


def refused(*arguments: str) -> str:
    """Return the error of `cclnet serve` before it starts."""
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


def compare_answers(server: subprocess.Popen[str], run: Path, images: list[Path]) -> list[int]:
    """Compare the answers of a server with the loaded model; return the descendants of its process."""
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
            assert answer["words"] == explain_confidence(expected, multilabel=False, calibrated=True, curve=model.curve)
    below = descendants(server.pid)
    assert len(below) >= 2  # a decoding process and the fork server
    return below


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them")
def test_a_run_is_served_until_it_is_stopped_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run, images = write_run(tmp_path / "run"), write_images(tmp_path / "images")
    command = [sys.executable, "-m", "cclnet", "serve", str(run), "--port", "0", "--engine", "torch", "--decoders", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            below = compare_answers(server, run, images)
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=60) == 0
            assert server.stderr is not None and server.stderr.read() == ""
        finally:
            server.kill()
    deadline = time.monotonic() + 20
    while any(map(alive, below)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, below))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_processes_are_restarted_and_all_end_with_the_server(tmp_path: Path) -> None:
    run, (image, *_) = write_run(tmp_path / "run"), write_images(tmp_path / "images", 1)
    command = [sys.executable, "-m", "cclnet", "serve", str(run), "--port", "0", "--engine", "torch", "--readers", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stderr is not None
            found = re.search(r"http://127\.0\.0\.1:\d+", server.stderr.readline())
            assert found
            with httpx.Client(base_url=found[0], timeout=120) as client:
                for level in ("decoding processes", "fork server"):
                    fork_server = next(pid for pid in descendants(server.pid) if descendants(pid))
                    decoders = descendants(fork_server)
                    assert len(decoders) == 2
                    for pid in decoders if level == "decoding processes" else [fork_server]:
                        os.kill(pid, signal.SIGKILL)
                    assert client.get("/healthz").status_code == 200
                    deadline = time.monotonic() + 60
                    while set(decoders) & set(descendants(server.pid)) or len(descendants(server.pid)) < 4:
                        assert time.monotonic() < deadline, f"the {level} were not restarted"
                        time.sleep(0.1)
                    while client.get("/readyz").status_code != 200:
                        assert time.monotonic() < deadline, "the server did not become ready"
                        time.sleep(0.1)
                    assert client.post("/predict", files={"image": image.read_bytes()}).status_code == 200
            below = descendants(server.pid)
        finally:
            server.kill()  # without a chance to end its processes
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


def test_a_public_host_needs_a_token(tmp_path: Path) -> None:
    run = str(tmp_path)
    assert "a token is needed" in refused(run, "--host", "0.0.0.0")
    assert "a token is needed" in refused(run, "--allow-host", "skin.example.org")
    assert "at least 16" in refused(run, "--host", "0.0.0.0", "--token", "short")


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1, port {port}" in refused(str(tmp_path), "--port", port)


def test_an_unknown_host_is_named(tmp_path: Path) -> None:
    told = refused(str(tmp_path), "--host", "no.such.host.invalid", "--token", "k7Jq-4uPz_0aXw9Lm2Tr")
    assert "cannot listen on no.such.host.invalid" in told


@pytest.mark.parametrize("option", ["--max-megabytes", "--max-megapixels", "--max-seconds"])
def test_limits_of_zero_are_refused(tmp_path: Path, option: str) -> None:
    assert "refuse every upload" in refused(str(tmp_path), option, "0")


@pytest.mark.parametrize("option", ["--batch", "--decoders", "--readers"])
def test_zero_batches_and_decoders_are_refused(tmp_path: Path, option: str) -> None:
    assert "must be at least 1" in refused(str(tmp_path), option, "0", "--port", "0")


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    assert "holds no model" in refused(str(tmp_path), "--port", "0")


def test_without_the_extra_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "python_multipart", None)
    assert "pip install 'cclnet[serve,export]'" in refused(str(tmp_path))


def test_an_invalid_score_file_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "scores.json").write_text("{}")
    assert "scores.json is not what cclnet evaluate writes" in refused(str(run), "--port", "0", "--engine", "torch")


def write_split_run(folder: Path, data: str = DATA) -> tuple[str, ...]:
    """Write the files of a run that examples are read from: settings and split."""
    table = open_data(DATA)
    splits = make_split(table, SplitSettings(val=0.3))
    write_split_file(folder / "split.csv", split_table(table, splits))
    (folder / "settings.toml").write_text(f'data = "{data}"\n', encoding="utf-8")
    return table.classes


def test_examples_are_training_images_one_per_lesion(tmp_path: Path) -> None:
    classes = write_split_run(tmp_path)
    split = pd.read_csv(tmp_path / "split.csv", dtype=str).set_index("image")
    chosen = choose_examples(split.reset_index(), classes, multilabel=False)
    assert set(chosen) == set(classes)
    for name, images in chosen.items():
        rows = split.loc[images]
        assert 1 <= len(rows) <= EXAMPLES_PER_CLASS
        assert (rows["split"] == "train").all() and (rows["label"] == name).all()
        assert rows["group"].is_unique


def test_multilabel_images_are_examples_of_each_label() -> None:
    split = pd.DataFrame(
        {"image": ["a", "b", "c", "d"], "split": ["train", "train", "train", "val"], "label": ["x|y", "y", "", "x|y"]}
    )
    chosen = choose_examples(split, ("x", "y", "z"), multilabel=True)
    assert chosen["x"] == ["a"] and sorted(chosen["y"]) == ["a", "b"] and chosen["z"] == []


def test_images_without_a_group_are_separate(tmp_path: Path) -> None:
    split = pd.DataFrame({"image": list("abcd"), "split": "train", "label": "x", "group": ["", "", "g", "g"]})
    assert len(choose_examples(split, ("x",), multilabel=False)["x"]) == 3


def test_examples_are_read_and_served(tmp_path: Path) -> None:
    classes = write_split_run(tmp_path)
    pictures, note = read_examples(tmp_path, classes, multilabel=False)
    assert note == "" and all(1 <= len(pictures[name]) <= EXAMPLES_PER_CLASS for name in classes)
    assert all(uri.startswith("data:image/jpeg;base64,") for found in pictures.values() for uri in found)
    with serving(tmp_path, {"classes": classes[:3]}, examples=pictures) as address:
        for index in range(3):
            answer = httpx.get(f"{address}/examples/{index}").json()
            assert answer == {"name": classes[index], "pictures": pictures[classes[index]]}
        assert httpx.get(f"{address}/examples/3").status_code == 404
        assert httpx.get(f"{address}/model").json()["examples"]


def test_examples_from_moved_data(tmp_path: Path) -> None:
    classes = write_split_run(tmp_path, data="gone")
    with pytest.raises(InputError, match=r"--examples: no images to show.*--data"):
        read_examples(tmp_path, classes, multilabel=False)
    assert read_examples(tmp_path, classes, multilabel=False, data=DATA)[0]


def test_a_run_without_its_split_has_no_examples(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--examples .*split.csv cannot be read"):
        read_examples(tmp_path, ("x",), multilabel=False)
    (tmp_path / "split.csv").write_text("image,part\na,train\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"split.csv has no column label"):
        read_examples(tmp_path, ("x",), multilabel=False)
