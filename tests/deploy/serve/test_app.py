"""Responses of the API, from a real server whose model has known answers."""

from __future__ import annotations

import base64
import concurrent.futures
import hashlib
import io
import math
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from served import COLOURS, LIMITS, SOFT_LABELS, colour_model, image_bytes, serving

from cclnet.deploy.serve.decoding import DecoderPool
from cclnet.deploy.serve.guard import Limits

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("run")) as address, httpx.Client(base_url=address) as opened:
        yield opened


def predict(client: httpx.Client, content: bytes, query: str = "", **kwargs: object) -> httpx.Response:
    return client.post(f"/predict{query}", files={"image": ("photo.png", content)}, **kwargs)  # type: ignore[arg-type]


def picture_in(uri: str) -> Image.Image:
    head, _, data = uri.partition(",")
    assert re.fullmatch(r"data:image/(png|jpeg);base64", head)
    return Image.open(io.BytesIO(base64.b64decode(data)))


@pytest.mark.parametrize(("colour", "label"), [((200, 20, 10), "red"), ((9, 99, 0), "green"), ((0, 50, 60), "blue")])
def test_an_image_gets_its_class(
    client: httpx.Client, tmp_path: Path, colour: tuple[int, int, int], label: str
) -> None:
    content = image_bytes(colour)
    answer = predict(client, content).raise_for_status().json()
    assert answer["label"] == label
    found = {one["name"]: one["probability"] for one in answer["probabilities"]}
    assert sum(found.values()) == pytest.approx(1)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    expected = colour_model(tmp_path).predict(content)
    assert [found[name] for name in COLOURS] == pytest.approx(expected.probabilities.tolist(), abs=1e-12)
    assert answer["confidence"] == pytest.approx(expected.confidence)
    assert answer["sha256"] == hashlib.sha256(content).hexdigest()
    assert answer["heat"] is None and answer["picture"] is None
    assert "Not a medical device" in answer["notice"]


@pytest.mark.parametrize("kind", ["image/png", "application/octet-stream", "image/x-whatever; a=b"])
def test_the_body_may_be_the_image(client: httpx.Client, kind: str) -> None:
    answer = client.post("/predict", content=image_bytes(), headers={"content-type": kind})
    assert answer.json()["label"] == "red"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PPM"])
def test_every_format_is_read(client: httpx.Client, kind: str) -> None:
    assert predict(client, image_bytes(kind=kind)).json()["label"] == "red"


def test_similar_classes_come_from_the_soft_labels(client: httpx.Client) -> None:
    similar = predict(client, image_bytes((0, 0, 200))).json()["similar"]
    assert [(one["name"], one["weight"]) for one in similar] == [("green", 0.25), ("red", 0.15)]


def test_the_heat_map_covers_the_colour(client: httpx.Client) -> None:
    pixels = np.zeros((24, 24, 3), np.uint8)
    pixels[:12, :12, 1] = 250  # green in the upper left, black elsewhere
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    heat = predict(client, file.getvalue(), "?explain=true").json()["heat"]
    assert heat["of"] == "green" and heat["where"] == "in the upper left"
    grey = np.asarray(picture_in(heat["png"]))
    assert grey.shape == (16, 16) and grey.dtype == np.uint8
    assert grey[2, 2] == 255 and grey[13, 13] == 0


@pytest.mark.parametrize("size", [(60, 30), (30, 60), (33, 33)])
def test_the_preview_is_whole_and_the_seen_region_is_central(client: httpx.Client, size: tuple[int, int]) -> None:
    answer = predict(client, image_bytes(size=size), "?picture=true").json()
    assert picture_in(answer["picture"]).size == size
    seen, short = answer["seen"], min(size)
    # Sixteen pixels of an image whose short side was made 24, in the middle.
    assert seen["width"] == pytest.approx(16 / 24 * short / size[0])
    assert seen["height"] == pytest.approx(16 / 24 * short / size[1])
    assert seen["left"] + seen["width"] / 2 == pytest.approx(0.5)
    assert seen["top"] + seen["height"] / 2 == pytest.approx(0.5)


def test_orientation_tags_are_applied(client: httpx.Client) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = image_bytes(size=(60, 30), kind="JPEG", exif=exif)
    assert picture_in(predict(client, content, "?picture=true").json()["picture"]).size == (30, 60)


def test_a_large_preview_is_reduced(client: httpx.Client) -> None:
    answer = predict(client, image_bytes(size=(1600, 800)), "?picture=true").json()
    assert picture_in(answer["picture"]).size == (720, 360)


def test_the_model_is_described_without_its_paths(client: httpx.Client) -> None:
    answer = client.get("/model")
    card = answer.json()
    assert card["classes"] == list(COLOURS) and card["calibrated"] and card["temperature"] == 1.5
    assert card["offsets"] is None
    assert card["soft_labels"] == SOFT_LABELS.tolist() and card["heat_maps"]
    assert card["limits"] == {"bytes": LIMITS.upload_bytes, "pixels": LIMITS.pixels, "seconds": LIMITS.seconds}
    assert not card["kept"] and not card["examples"] and card["training_images"] == 30
    assert "secret" not in answer.text


def test_health(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}


def test_a_server_that_cannot_decode_is_not_ready(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecoderPool, "ready", False)
    answer = client.get("/readyz")
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1" and "restarted" in answer.json()["reason"]
    assert client.get("/healthz").status_code == 200  # it may recover
    monkeypatch.setattr(DecoderPool, "healthy", False)
    answer = client.get("/healthz")
    assert answer.status_code == 503 and "restart it" in answer.json()["reason"]


def test_the_schema_and_its_page_name_every_call(client: httpx.Client) -> None:
    schema = client.get("/openapi.json").json()
    assert set(schema["paths"]) == {"/predict", "/model", "/examples/{index}", "/healthz", "/readyz", "/metrics"}
    page = client.get("/docs").text
    assert all(path in page for path in schema["paths"])
    assert f"curl -F image=@photo.jpg &#39;{str(client.base_url).rstrip('/')}/predict" in page
    for words in (
        "list of SimilarClass",
        "HeatMap, or null",
        "list of list of number, or null",
        "boolean, default false",
    ):
        assert f"<td>{words}</td>" in page


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/static/page.js", "/static/show.js", "/static/heat.js", "/static/page.css"]
)
def test_pages_load_nothing_from_other_servers(client: httpx.Client, path: str) -> None:
    answer = client.get(path).raise_for_status()
    places = set(re.findall(r"(?:https?:)?//[\w.]+\w", re.sub(r"//[^\n]* ", "", answer.text)))
    assert places <= {"http://www.w3.org", "http://127.0.0.1"}  # the name of SVG, and this server in examples
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert "style=" not in answer.text or path.endswith(".js")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/static/../app.py", 404), ("GET", "/static/%2e%2e%2fapp.py", 404),
     ("GET", "/predict", 405), ("DELETE", "/model", 405), ("GET", "/examples/0", 404), ("GET", "/examples/-1", 422),
     ("POST", "/predict?explain=perhaps", 422), ("POST", "/sign-in", 404)],
)  # fmt: skip
def test_invalid_requests_get_a_reason(client: httpx.Client, method: str, path: str, status: int) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["reason"].endswith(".")
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_multilabel(tmp_path: Path) -> None:
    with serving(tmp_path, {"multilabel": True}) as address, httpx.Client(base_url=address) as client:
        both = predict(client, image_bytes((250, 200, 3))).json()
        assert both["label"] == "red|green"
        assert both["words"][0].startswith("2 of 3 findings")
        none = predict(client, image_bytes((9, 9, 9))).json()
        assert none["label"] == "" and none["sureness"] == "Very sure"


def test_a_network_without_heat_maps(tmp_path: Path) -> None:
    with serving(tmp_path, {"maps": False}) as address, httpx.Client(base_url=address) as client:
        answer = predict(client, image_bytes(), "?explain=true").json()
        assert answer["label"] == "red" and answer["heat"] is None
        assert client.get("/model").json()["heat_maps"] is False


def test_nothing_is_kept_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving(tmp_path) as address, httpx.Client(base_url=address) as client:
        assert predict(client, image_bytes()).status_code == 200
        assert "Uploaded images are not stored" in client.get("/").text
    assert list(tmp_path.iterdir()) == []


def test_kept_uploads_are_named_by_their_hash(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    photo = image_bytes(kind="JPEG")
    with serving(tmp_path, kept_in=kept) as address, httpx.Client(base_url=address) as client:
        for name in ("../../patient_name.png", "patient_name.png"):
            assert client.post("/predict", files={"image": (name, photo)}).status_code == 200
        assert client.post("/predict", files={"image": ("notes.txt", b"not an image")}).status_code == 422
        assert "keeps the images you upload" in client.get("/").text
        assert client.get("/model").json()["kept"]
    (path,) = kept.iterdir()
    assert path.name == f"{hashlib.sha256(photo).hexdigest()}.jpg" and path.read_bytes() == photo
    assert sorted(item.name for item in tmp_path.iterdir()) == ["kept"]


def test_an_image_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with serving(tmp_path, kept_in=tmp_path / "file" / "below") as address, httpx.Client(base_url=address) as client:
        answer = predict(client, image_bytes())
        assert answer.status_code == 507 and "could not be written" in answer.json()["reason"]


def test_too_many_requests_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path, limits=Limits(waiting=1)) as address:
        big = image_bytes(size=(1000, 1000))
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: httpx.post(f"{address}/predict", files={"image": big}), range(8)))
        refused = [answer for answer in answers if answer.status_code == 503]
        assert refused and all(answer.status_code in (200, 503) for answer in answers)
        assert all(
            answer.headers["retry-after"] == "1" and "Try again" in answer.json()["reason"] for answer in refused
        )
        assert httpx.post(f"{address}/predict", files={"image": big}).status_code == 200


def histogram_holds(samples: Samples, name: str) -> None:
    buckets = sorted(
        (float(dict(labels)["le"]), value) for (n, labels), value in samples.items() if n == f"{name}_bucket"
    )
    counts = [value for _, value in buckets]
    assert counts == sorted(counts) and buckets[-1] == (math.inf, samples[f"{name}_count", frozenset()])


def test_metrics(tmp_path: Path) -> None:
    with serving(tmp_path) as address, httpx.Client(base_url=address) as client:
        for colour in ((200, 0, 0), (200, 9, 0), (0, 0, 200)):
            assert client.post("/predict", files={"image": image_bytes(colour)}).status_code == 200
        assert client.post("/predict", files={"image": b"not an image"}).status_code == 422
        for path in ("/a", "/b", "/c"):
            client.get(path)
        client.request("BREW", "/model")
        answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(answer.text))
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value for one in families for sample in one.samples
    }
    requests = {labels: v for (name, labels), v in samples.items() if name == "cclnet_requests_total"}

    def count(route: str, method: str, status: str) -> float:
        return requests[frozenset({("route", route), ("method", method), ("status", status)})]

    assert count("/predict", "POST", "200") == 3 and count("/predict", "POST", "422") == 1
    assert count("other", "GET", "404") == 3  # all unknown paths share one label
    assert count("/model", "other", "405") == 1
    assert samples["cclnet_predictions_total", frozenset({("class", "red")})] == 2
    assert samples["cclnet_predict_seconds_count", frozenset()] == 4
    assert samples["cclnet_batch_images_sum", frozenset()] == 3
    assert samples["cclnet_requests_in_progress", frozenset()] == 1
    assert samples["cclnet_decoders_ready", frozenset()] == 1
    assert samples["process_resident_memory_bytes", frozenset()] > 1e6
    assert samples["process_start_time_seconds", frozenset()] > 1e9
    for one in families:
        if one.type == "histogram":
            histogram_holds(samples, one.name)
