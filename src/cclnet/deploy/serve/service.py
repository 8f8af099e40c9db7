"""From an upload to its answer, without HTTP: decode, join a batch, run the network, describe the result; metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.requests import Request

from cclnet.data.parallel import available_cores
from cclnet.deploy.engines import Floats, Maps, Pixels
from cclnet.deploy.predictor import Model
from cclnet.deploy.serve.answers import Answer, make_answer
from cclnet.deploy.serve.decoding import DecoderPool, DecodingSettings
from cclnet.deploy.serve.guard import ServeSettings, busy, read_body
from cclnet.errors import InputError
from cclnet.runs.decision_rule import decide
from cclnet.runs.model import AbstentionCurve

Item = TypeVar("Item")
Result = TypeVar("Result")
Input = tuple[Pixels, bool]  # a prepared image, and whether its heat map is wanted
Output = tuple[Floats, Maps | None, float | None]  # probabilities [K], heat map [h', w'], distance from training images
PARALLEL_BATCHES = 2  # one computes while the other is put together or answered
SECONDS_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
log = logging.getLogger(__name__)


class Batcher(Generic[Item, Result]):
    """Collects waiting items into batches and runs each batch in a thread.

    An item is never delayed to fill a batch: if a thread is free it runs at once, alone. Items that arrive while all
    threads are busy form the next batch. Start and close it inside a running event loop.

    ``run`` computes the results of a list of items, in order, in ``parallel`` threads; ``observe`` gets the size and
    the seconds of each batch.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Result]],
        max_batch: int,
        parallel: int = 1,
        observe: Callable[[int, float], object] = lambda size, seconds: None,
    ) -> None:
        self.run, self.max_batch, self.parallel, self.observe = run, max_batch, parallel, observe
        self._waiting: asyncio.Queue[tuple[Item, asyncio.Future[Result]]] = asyncio.Queue()
        self._threads = ThreadPoolExecutor(parallel, thread_name_prefix="network")
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run_batches()) for _ in range(self.parallel)]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(cancel_futures=True)

    @property
    def running(self) -> bool:
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    async def submit(self, item: Item, seconds: float) -> Result:
        """Return the result for an item; raise :class:`Refused` after ``seconds``."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((item, future))
        try:
            return await asyncio.wait_for(future, seconds)
        except (TimeoutError, asyncio.TimeoutError):
            raise busy(f"There was no answer within {seconds:g} seconds.") from None

    async def _run_batches(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self.max_batch and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            batch = [(item, future) for item, future in batch if not future.done()]  # without cancelled requests
            if not batch:
                continue
            items, futures = [item for item, _ in batch], [future for _, future in batch]
            start = loop.time()
            try:
                results = await loop.run_in_executor(self._threads, self.run, items)
                self.observe(len(batch), loop.time() - start)
                for future, result in zip(futures, results, strict=True):
                    if not future.done():
                        future.set_result(result)
            except Exception as error:  # noqa: BLE001 (raised again in each request of the batch)
                for future in futures:
                    if not future.done():
                        future.set_exception(error)


class Metrics:
    """Prometheus metrics of one server. No label value comes from the text of a request."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        seconds = partial(Histogram, registry=registry, buckets=SECONDS_BUCKETS)
        labels = ["route", "method", "status"]
        self.requests = Counter("cclnet_requests", "Answered requests.", labels, registry=registry)
        self.in_progress = Gauge("cclnet_requests_in_progress", "Requests being answered.", registry=registry)
        self.predict_seconds = seconds("cclnet_predict_seconds", "Seconds from a /predict request to its answer.")
        self.decoding_seconds = seconds("cclnet_decoding_seconds", "Seconds to decode an upload, including waiting.")
        self.network_seconds = seconds("cclnet_network_seconds", "Seconds of a batch in the network.")
        sizes = (1, 2, 4, 8, 16, 32, 64)
        self.batch_images = Histogram("cclnet_batch_images", "Images per batch.", registry=registry, buckets=sizes)
        self.predictions = Counter("cclnet_predictions", "Predictions per class.", ["class"], registry=registry)
        self.refused = Counter("cclnet_refused", "Images refused as unlike the training images.", registry=registry)
        self.upload_bytes = Counter("cclnet_upload_bytes", "Bytes of uploads.", registry=registry)
        self.decoders_ready = Gauge("cclnet_decoders_ready", "Decoding processes that are ready.", registry=registry)
        ProcessCollector(registry=registry)

    def observe_batch(self, size: int, seconds: float) -> None:
        self.batch_images.observe(size)
        self.network_seconds.observe(seconds)


class Service:
    """Predicts for requests. Start and close it inside a running event loop."""

    def __init__(self, model: Model, settings: ServeSettings) -> None:
        self.model, self.settings, self.metrics = model, settings, Metrics()
        self.requests_in_progress = 0
        self.metrics.in_progress.set_function(lambda: self.requests_in_progress)
        self.curve: AbstentionCurve | None = None  # error rate on held-out images by confidence
        try:
            self.curve = model.curve
        except InputError as error:
            log.info("no held-out predictions: %s", error)
        self.batcher: Batcher[Input, Output] = Batcher(
            self.run, settings.max_batch, PARALLEL_BATCHES, self.metrics.observe_batch
        )
        self.decoders: DecoderPool | None = None

    async def start(self) -> None:
        settings, description = self.settings, self.model.description
        decoding = DecodingSettings(description.short_side, description.crop, settings.limits, settings.kept_in)
        count = settings.decoders or min(4, available_cores())
        self.uploads_in_memory = asyncio.Semaphore(settings.limits.in_memory)
        self.decoders = pool = await asyncio.to_thread(DecoderPool, decoding, count)
        self.metrics.decoders_ready.set_function(lambda: sum(decoder.ready for decoder in pool.decoders))
        self.batcher.start()

    async def close(self) -> None:
        await self.batcher.close()
        if self.decoders is not None:
            await asyncio.to_thread(self.decoders.close)

    @property
    def healthy(self) -> bool:
        """Whether the server can recover by itself; if not, it must be restarted."""
        return self.batcher.running and self.decoders is not None and self.decoders.healthy

    @property
    def ready(self) -> bool:
        """Whether a request can be answered now."""
        return self.batcher.running and self.decoders is not None and self.decoders.ready

    async def predict(self, request: Request, explain: bool, picture: bool) -> Answer:
        limits = self.settings.limits
        if self.requests_in_progress > limits.waiting:
            raise busy("Too many requests are waiting.")
        assert self.decoders is not None, "the service was not started"
        async with self.uploads_in_memory:
            body = await read_body(request, limits)
            self.metrics.upload_bytes.inc(len(body))
            start = time.perf_counter()
            upload = await self.decoders.decode(body, request.headers.get("content-type", ""), picture)
            self.metrics.decoding_seconds.observe(time.perf_counter() - start)
        item = (upload.pixels, explain and self.model.has_maps)
        output = await self.batcher.submit(item, limits.seconds)
        chosen = decide(output[0][None], self.model.rule)[0]
        self.metrics.predictions.labels(self.model.classes[int(chosen)]).inc()
        answer = await asyncio.to_thread(make_answer, self.settings, self.model, upload, output, self.curve)
        if answer.ood is not None and answer.ood.refused:
            self.metrics.refused.inc()
        return answer

    def run(self, items: Sequence[Input]) -> list[Output]:
        """Run a batch, with and without heat maps separately because heat maps may cost more."""
        outputs: dict[int, Output] = {}
        for explain in (False, True):
            rows = [i for i, (_, wanted) in enumerate(items) if wanted == explain]
            if rows:
                outputs |= dict(zip(rows, self._run(np.stack([items[i][0] for i in rows]), explain), strict=True))
        return [outputs[i] for i in range(len(items))]

    def _run(self, batch: Pixels, explain: bool) -> list[Output]:
        try:
            probabilities, heat, ood = self.model.run_scored(batch, explain)
        except InputError as error:
            if not explain:
                raise
            log.warning("no heat map: %s", error)
            return self._run(batch, False)
        return [
            (row, None if heat is None else heat[i], None if ood is None else float(ood[i]))
            for i, row in enumerate(probabilities)
        ]
