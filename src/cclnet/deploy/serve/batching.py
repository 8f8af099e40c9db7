"""Requests that wait together go through the network together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from cclnet.deploy.serve.limits import busy

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Batcher(Generic[Item, Answer]):
    """Gathers what is waiting, up to ``largest``, and hands it to ``run`` in a thread, ``lanes`` batches at a time.

    Nothing waits for company: an item that comes while a lane is free goes at once, alone. What comes while all are
    busy goes together as soon as one is free. To be started and closed inside a running event loop.

    Args:
        run: from a list of items to their answers, in order; called by ``lanes`` threads at once.
        largest: items in a batch.
        lanes: batches in the network at once. With two, one computes while the other is put together or handed on.
        seen: called with the size of each batch and the seconds it took.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Answer]],
        largest: int,
        lanes: int = 1,
        seen: Callable[[int, float], object] = lambda size, seconds: None,
    ) -> None:
        self.run, self.largest, self.seen = run, largest, seen
        self._waiting: asyncio.Queue[tuple[Item, asyncio.Future[Answer]]] = asyncio.Queue()
        self._threads = ThreadPoolExecutor(lanes, thread_name_prefix="network")
        self._lanes: list[asyncio.Task[None]] = []
        self._count = lanes

    def start(self) -> None:
        self._lanes = [asyncio.create_task(self._go_on()) for _ in range(self._count)]

    async def close(self) -> None:
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        self._threads.shutdown(cancel_futures=True)

    async def answer(self, item: Item, seconds: float) -> Answer:
        """The answer to an item, or :class:`Refused` when it has not come within ``seconds``."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((item, future))
        try:
            return await asyncio.wait_for(future, seconds)
        except (TimeoutError, asyncio.TimeoutError):
            raise busy(f"There was no answer within {seconds:g} seconds.") from None

    async def _go_on(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self.largest and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            batch = [(item, future) for item, future in batch if not future.done()]  # some have given up
            if not batch:
                continue
            start = loop.time()
            try:
                answers = await loop.run_in_executor(self._threads, self.run, [item for item, _ in batch])
            except Exception as error:  # noqa: BLE001 (raised again by each of these requests; the next ones go on)
                _settle(batch, [error] * len(batch))
            else:
                _settle(batch, list(answers))
                self.seen(len(batch), loop.time() - start)


def _settle(batch: Sequence[tuple[Item, asyncio.Future[Answer]]], answers: Sequence[Answer | Exception]) -> None:
    for (_, future), answer in zip(batch, answers, strict=True):
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
