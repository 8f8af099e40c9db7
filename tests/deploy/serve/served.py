"""A model that predicts the strongest colour of an image, so that the right answer is known, and its server."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI
from PIL import Image

from cclnet.deploy.predictor import Model
from cclnet.deploy.serve.app import create_app
from cclnet.deploy.serve.guard import Limits, ServeSettings
from cclnet.deploy.serve.server import Connections, listen, make_server
from cclnet.errors import InputError
from cclnet.runs.model import Calibration, FittedTemperature, ModelDescription, TrainedInfo
from cclnet.runs.out_of_distribution import FeatureStatistics, fit_statistics

COLOURS = ("red", "green", "blue")
SOFT_LABELS = np.array([[0.6, 0.3, 0.1], [0.3, 0.6, 0.1], [0.15, 0.25, 0.6]])
DESCRIPTION = ModelDescription(
    backbone="colours",
    classes=COLOURS,
    multilabel=False,
    short_side=24,
    crop=(16, 16),
    mean=(0.0, 0.0, 0.0),
    std=(1.0, 1.0, 1.0),
    method="ccl",
    trained=TrainedInfo(images=30, data="/home/someone/secret"),
)
CALIBRATION = Calibration(FittedTemperature(1.5))
LIMITS = Limits(upload_bytes=2**20, pixels=2_000_000, seconds=20.0)


class ColourEngine:
    """Probabilities are the shares of the three channels; the map of a class is its channel on a 4 x 4 grid."""

    name, device, has_features = "torch", "cpu", True  # the features are the mean colour

    def __init__(self, multilabel: bool = False, maps: bool = True) -> None:
        self.multilabel, self.maps = multilabel, maps
        self.batches: list[int] = []

    def run(self, batch: npt.NDArray[np.uint8], maps: bool) -> tuple[npt.NDArray[np.float64], Any, Any]:
        self.batches.append(len(batch))
        if maps and not self.maps:
            raise InputError("no maps here")
        grid = batch.reshape(len(batch), 4, 4, 4, 4, 3).mean(axis=(2, 4)) + 1.0
        strength = grid.mean(axis=(1, 2))
        p = (strength - 1) / 255 if self.multilabel else strength / strength.sum(axis=1, keepdims=True)
        top = grid[np.arange(len(batch)), :, :, p.argmax(axis=1)] - 1.0
        return p, top if maps else None, strength


def colour_model(folder: Path, **changes: Any) -> Model:
    maps = changes.pop("maps", True)
    further = {name: changes.pop(name) for name in ("rule", "statistics") if name in changes}
    calibration = changes.pop("calibration", CALIBRATION)
    description = replace(DESCRIPTION, **changes)
    engine = ColourEngine(description.multilabel, maps)
    soft_labels = None if changes.get("soft") is False else SOFT_LABELS
    return Model(description, engine, folder, calibration, soft_labels, **further)


def unlike_statistics() -> FeatureStatistics:
    """Statistics of a model that was trained on dark red images."""
    rng = np.random.default_rng(0)
    found = fit_statistics(rng.normal([60, 5, 5], 3, (200, 3)), None)
    assert found is not None
    return replace(found, held_out=np.sort(found.score(rng.normal([60, 5, 5], 3, (200, 3)))))


def image_bytes(colour: Any = (200, 20, 10), size: tuple[int, int] = (40, 30), kind: str = "PNG", **how: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind, **how)
    return file.getvalue()


@contextmanager
def running(app: FastAPI, seconds_to_ask: float = 20.0, connections: Connections | None = None) -> Iterator[str]:
    """Run the application in a real server; yield its address."""
    listening = listen("127.0.0.1", 0)
    server = make_server(app, seconds_to_ask, connections)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        listening.close()
    assert not thread.is_alive(), "the server did not end"


@contextmanager
def serving(
    folder: Path, model: dict[str, Any] | None = None, token: str | None = None, **settings: Any
) -> Iterator[str]:
    """Serve the colour model; yield the address."""
    seconds = settings.pop("seconds_to_ask", 20.0)
    made = ServeSettings(**{"name": "colours", "limits": LIMITS, "decoders": 1, "token": token, **settings})
    with running(create_app(colour_model(folder, **(model or {})), made), seconds) as address:
        yield address
