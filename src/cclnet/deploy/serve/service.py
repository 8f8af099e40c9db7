"""From a request to its answer: read the upload, wait for a place in a batch, run the network, say it in words."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from cclnet.deploy.model import Model
from cclnet.deploy.serve.answers import Answer, make_answer
from cclnet.deploy.serve.batching import Batcher
from cclnet.deploy.serve.limits import Limits, busy
from cclnet.deploy.serve.metrics import Metrics
from cclnet.deploy.serve.nursery import Nursery
from cclnet.deploy.serve.processes import ReadingProcesses
from cclnet.deploy.serve.reading import Reader
from cclnet.deploy.serve.uploads import read_body
from cclnet.errors import InputError
from cclnet.runs.model import AbstentionCurve

Item = tuple[npt.NDArray[np.uint8], bool]  # a prepared image, and whether its heat map is wanted
Found = tuple[npt.NDArray[np.float64], npt.NDArray[np.float32] | None]  # probabilities [K], heat [h', w']
LANES = 2  # batches in the network at once
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServeSettings:
    """How a model is served.

    Attributes:
        name: what it is called on the page.
        limits: what an upload may cost.
        largest_batch: images that go through the network at once.
        readers: processes that decode uploads.
        kept_in: a folder for what is sent; None keeps nothing.
        examples: pictures of training images of each class, as data URIs; empty shows none.
    """

    name: str
    limits: Limits = field(default_factory=Limits)
    largest_batch: int = 16
    readers: int = 2
    kept_in: Path | None = None
    examples: dict[str, list[str]] = field(default_factory=dict)


class Service:
    """A model at work. To be started and closed inside a running event loop."""

    def __init__(self, model: Model, settings: ServeSettings, metrics: Metrics, nursery: Nursery | None = None) -> None:
        self.model, self.settings, self.metrics, self.nursery = model, settings, metrics, nursery
        self.heat_maps = model.has_maps
        self.curve = held_out_curve(model)

    async def start(self) -> None:
        settings = self.settings
        description = self.model.description
        reader = Reader(description.short_side, description.crop, settings.limits, settings.kept_in)
        loop = asyncio.get_running_loop()
        self.places = asyncio.Semaphore(settings.limits.in_memory)
        self.reading = await loop.run_in_executor(None, ReadingProcesses, reader, settings.readers, self.nursery)
        self.batcher: Batcher[Item, Found] = Batcher(self.run, settings.largest_batch, LANES, self.saw)
        self.batcher.start()

    async def close(self) -> None:
        await self.batcher.close()
        await asyncio.get_running_loop().run_in_executor(None, self.reading.close)

    async def predict(self, request: Request, explain: bool, picture: bool) -> Answer:
        limits = self.settings.limits
        if self.metrics.in_house > limits.waiting:
            raise busy("Too many requests are waiting.")
        async with self.places:
            body = await read_body(request, limits)
            self.metrics.bytes.add(amount=len(body))
            start = time.perf_counter()
            upload = await self.reading.read(body, request.headers.get("content-type", ""), picture)
            self.metrics.reading.observe(time.perf_counter() - start)
        wanted = explain and self.heat_maps
        probabilities, heat = await self.batcher.answer((upload.pixels, wanted), limits.seconds)
        self.metrics.predicted.add({"class": self.model.classes[int(probabilities.argmax())]})
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            None, make_answer, self.settings.name, self.model, upload, probabilities, heat, self.curve
        )

    def saw(self, size: int, seconds: float) -> None:
        self.metrics.batch.observe(size)
        self.metrics.network.observe(seconds)

    def run(self, items: Sequence[Item]) -> list[Found]:
        """A batch through the network; those whose heat is wanted apart from the others, for it may cost more."""
        found: dict[int, Found] = {}
        for explain in (False, True):
            rows = [i for i, (_, wanted) in enumerate(items) if wanted == explain]
            if rows:
                found |= dict(zip(rows, self._run(np.stack([items[i][0] for i in rows]), explain), strict=True))
        return [found[i] for i in range(len(items))]

    def _run(self, batch: npt.NDArray[np.uint8], explain: bool) -> list[Found]:
        try:
            probabilities, heat = self.model.run(batch, explain)
        except InputError as error:
            if not explain:
                raise
            log.warning("no heat map: %s", error)
            return self._run(batch, False)
        return [(row, None if heat is None else heat[i]) for i, row in enumerate(probabilities)]


def held_out_curve(model: Model) -> AbstentionCurve | None:
    """How often the model was wrong on images it had not seen, by how sure it was; None where that is not known."""
    try:
        return model.curve
    except InputError as error:
        log.info("nothing is known about held-out images: %s", error)
        return None
