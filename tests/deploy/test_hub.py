"""Upload to the Hugging Face Hub, against a stand-in on this machine that keeps what it is sent."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import timm
import torch
from shipped_run import write_run
from typer.testing import CliRunner

from cclnet import InputError
from cclnet.cli import app
from cclnet.deploy.export import export
from cclnet.deploy.hub import push

TOKEN = "hf_stand_in"


class Hub(ThreadingHTTPServer):
    """The calls of create_repo and upload_folder: repositories, small files in the commit, large ones by LFS."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.created: list[dict[str, Any]] = []
        self.objects: dict[str, bytes] = {}
        self.unknown: list[str] = []
        self.address = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body, hub = self.body(), self.server
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}"
            known = name in hub.repositories
            hub.repositories.setdefault(name, {})
            hub.created.append(given)
            self.answer(409 if known else 200, {"url": f"{hub.address}/{name}", "name": name, "id": "1"})
        elif self.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [
                {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                 "shouldIgnore": False, "oid": None}
                for one in json.loads(body)["files"]
            ]  # fmt: skip
            self.answer(200, {"files": files})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "authenticated": True, "actions": {"upload": {"href": f"{hub.address}/objects/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self.answer(200, {"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            self.commit(self.path.removeprefix("/api/models/").split("/commit/")[0], body)
        else:
            self.not_known()

    def commit(self, name: str, body: bytes) -> None:
        kept = self.server.repositories[name]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                kept[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                kept[value["path"]] = self.server.objects[value["oid"]]
        oid = "0" * 40
        url = f"{self.server.address}/{name}/commit/{oid}"
        self.answer(200, {"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def do_PUT(self) -> None:
        oid, body = self.path.rpartition("/")[2], self.body()
        self.server.objects[oid] = body
        self.answer(200 if hashlib.sha256(body).hexdigest() == oid else 400, {})

    def do_GET(self) -> None:
        self.not_known()

    def not_known(self) -> None:
        self.server.unknown.append(self.path)
        self.answer(404, {"error": "not known"})

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def answer(self, status: int, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # the stand-in speaks LFS only
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # it is on this machine
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_pushed_run_is_loaded_by_timm_with_the_same_logits(hub: Hub, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    done = CliRunner().invoke(app, ["push", str(run), "me/insects", "--endpoint", hub.address, "--licence", "MIT"])
    assert done.exit_code == 0 and f"{hub.address}/me/insects/commit/" in done.output
    assert hub.unknown == []
    (created,) = hub.created
    assert created["visibility"] == "private" if "visibility" in created else created["private"] is True
    kept = hub.repositories["me/insects"]
    assert {"README.md", "config.json", "model.safetensors", "model.json", "calibration.json"} <= kept.keys()
    assert not kept.keys() & {"predictions.csv", "split.csv", "settings.toml", "report.html"}  # names of patients
    assert kept["README.md"].startswith(b"---\nlibrary_name: timm\n") and b"\nlicense: mit\n" in kept["README.md"]
    for name, content in kept.items():
        (tmp_path / "back").mkdir(exist_ok=True)
        (tmp_path / "back" / name).write_bytes(content)
    exported = export(run, "timm", tmp_path / "own")
    images = torch.rand(3, 3, 32, 32, generator=torch.manual_seed(0))
    with torch.no_grad():
        given, expected = (
            timm.create_model(f"local-dir:{folder}", pretrained=True).eval()(images)
            for folder in (tmp_path / "back", exported)
        )
    assert torch.equal(given, expected) and expected.std() > 0.01


def test_an_export_is_pushed_as_it_is_and_again(hub: Hub, tmp_path: Path) -> None:
    exported = export(write_run(tmp_path / "run"), "timm", tmp_path / "own")
    for _ in range(2):  # the repository exists the second time
        address = push(exported, "me/insects", endpoint=hub.address)
    assert address.startswith(hub.address)
    assert hub.repositories["me/insects"]["config.json"] == (exported / "config.json").read_bytes()


def test_a_changed_file_is_not_pushed(hub: Hub, tmp_path: Path) -> None:
    exported = export(write_run(tmp_path / "run"), "timm", tmp_path / "own")
    (exported / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"config\.json"):
        push(exported, "me/insects", endpoint=hub.address)
    assert hub.repositories == {}


@pytest.mark.parametrize("kind", ["gone", "gone without checksums", "folder", "link"])
def test_nothing_else_than_a_whole_model_is_pushed(hub: Hub, tmp_path: Path, kind: str) -> None:
    exported = export(write_run(tmp_path / "run"), "timm", tmp_path / "own")
    weights, other = exported / "model.safetensors", tmp_path / "other"
    weights.rename(other)
    if kind == "folder":
        weights.mkdir()
    elif kind == "link":  # of a folder that someone else made: it could lead to any file of this machine
        weights.symlink_to(other)
    elif "without" in kind:
        (exported / "SHA256SUMS").unlink()
    with pytest.raises(InputError, match=r"is missing|holds no model|cannot be read|link out of the folder"):
        push(exported, "me/insects", endpoint=hub.address)
    assert hub.created == []


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://[::1", "no address", "file:///etc/passwd"])
def test_a_hub_that_does_not_answer_is_named(tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(InputError) as refused:
        push(write_run(tmp_path / "run"), "me/insects", endpoint=endpoint)
    assert endpoint in str(refused.value)


def test_without_the_right_token_nothing_is_written(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(InputError, match=r"me/insects .* HF_TOKEN"):
        push(write_run(tmp_path / "run"), "me/insects", endpoint=hub.address)
    assert hub.repositories == {}


@pytest.mark.parametrize("name", ["insects", "a/b/c", "../x", "me/in sects"])
def test_a_repository_is_owner_and_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="owner/name"):
        push(tmp_path, name)
