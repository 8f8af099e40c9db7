"""A few processes that read uploads. One that takes too long or dies is replaced, and the server goes on."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np

from cclnet.deploy.serve.limits import Refused, busy
from cclnet.deploy.serve.nursery import Nursery
from cclnet.deploy.serve.reading import Reader, Upload

_SECONDS_TO_START = 120.0  # a cold disk under a busy machine
_LONGEST_ANSWER = 2**28  # bytes; crops have at most 8192 pixels a side


class ReadingProcesses:
    """Reads uploads side by side, at most ``count`` at once; the others wait in line."""

    def __init__(self, reader: Reader, count: int, nursery: Nursery | None = None) -> None:
        self._nursery = nursery or Nursery()
        self._own_nursery = nursery is None  # one that was lent goes on
        self._seconds = reader.limits.seconds
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="reading")  # each waits for one process
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        self._processes = [_Process(self._nursery, reader) for _ in range(count)]
        for process in self._processes:  # they get ready side by side
            process.wait_until_ready()
            self._idle.put(process)

    async def read(self, body: bytes, content_type: str, picture: bool) -> Upload:
        """The image in a body. What stands in line longer than decoding may take is sent away."""
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._threads, self._read, body, content_type, picture)
        try:
            return await asyncio.wait_for(reading, 2 * self._seconds)
        except (TimeoutError, asyncio.TimeoutError):
            raise busy("Too many images are waiting to be read.") from None

    def _read(self, body: bytes, content_type: str, picture: bool) -> Upload:
        process = self._idle.get()
        try:
            return process.read(body, content_type, picture)
        finally:
            self._idle.put(process)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.stop()
        if self._own_nursery:
            self._nursery.close()


class _Process:
    """One process and the line to it."""

    def __init__(self, nursery: Nursery, reader: Reader) -> None:
        self.nursery, self.reader = nursery, reader
        self._start()

    def _start(self) -> None:
        self.pid, self.connection = self.nursery.start()
        self.connection.send_bytes(json.dumps(self.reader.to_json()).encode())
        self.ready = False

    def wait_until_ready(self) -> None:
        if not self.ready:
            if not self.connection.poll(_SECONDS_TO_START):
                raise RuntimeError(f"a process to read images did not start within {_SECONDS_TO_START:g} seconds")
            self.connection.recv_bytes()
            self.ready = True

    def read(self, body: bytes, content_type: str, picture: bool) -> Upload:
        seconds = self.reader.limits.seconds
        if self.ready and self.connection.poll(0):  # it speaks only when it is asked: it was ended from outside
            self._restart()
        try:
            self.wait_until_ready()
        except (EOFError, OSError):  # it was ended before it had begun, as by a machine that is short of memory
            self._restart()
            raise busy("The process that reads images is being started again.") from None
        try:
            self.connection.send_bytes(json.dumps({"content_type": content_type, "picture": picture}).encode())
            self.connection.send_bytes(body)
            if not self.connection.poll(seconds):
                self._restart()
                raise Refused(422, f"This file cannot be used: decoding it took longer than {seconds:g} seconds.")
            return self._upload(self.connection.recv_bytes(_LONGEST_ANSWER))
        except (EOFError, OSError, ValueError, LookupError, TypeError):  # it died, or does not speak sense any more
            self._restart()
            raise Refused(422, "This file cannot be used: its decoder broke down over it.") from None

    def _upload(self, message: bytes) -> Upload:
        line, _, pixels = message.partition(b"\n")
        answer = json.loads(line)
        if "reason" in answer:
            raise Refused(int(answer["status"]), str(answer["reason"]))
        left, top, width, height = map(float, answer["seen"])
        return Upload(
            np.frombuffer(pixels, np.uint8).reshape(*self.reader.crop, 3),
            (left, top, width, height),
            str(answer["sha256"]),
            str(answer["picture"]),
        )

    def _restart(self) -> None:
        self.stop()
        self._start()

    def stop(self) -> None:
        self.connection.close()
        self.nursery.end(self.pid)
