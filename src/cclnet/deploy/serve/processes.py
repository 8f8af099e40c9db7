"""A few processes that read uploads. One that takes too long or dies is replaced, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np

from cclnet.deploy.serve.limits import Refused, busy
from cclnet.deploy.serve.reading import Reader, Upload, work

_SECONDS_TO_START = 120.0  # a cold disk under a busy machine
_LONGEST_ANSWER = 2**28  # bytes; crops have at most 8192 pixels a side


class ReadingProcesses:
    """Reads uploads side by side, at most ``count`` at once; the others wait in line."""

    def __init__(self, reader: Reader, count: int) -> None:
        self._seconds = reader.limits.seconds
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="reading")  # each waits for one process
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        processes = [_Process(reader) for _ in range(count)]
        for process in processes:  # they start side by side
            process.wait_until_ready()
            self._idle.put(process)
        self._processes = processes

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


class _Process:
    """One process and the line to it."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._start()

    def _start(self) -> None:
        context = _context()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, self.reader), daemon=True)
        self.process.start()
        theirs.close()
        self.ready = False

    def wait_until_ready(self) -> None:
        if not self.ready:
            if not self.connection.poll(_SECONDS_TO_START):
                raise RuntimeError(f"a process to read images did not start within {_SECONDS_TO_START:g} seconds")
            self.connection.recv_bytes()
            self.ready = True

    def read(self, body: bytes, content_type: str, picture: bool) -> Upload:
        seconds = self.reader.limits.seconds
        if not self.process.is_alive():  # ended from outside while it was idle: not the fault of this image
            self._restart()
        self.wait_until_ready()
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
        self.process.kill()
        self.process.join()


def _context() -> Any:
    """Processes forked from one that has imported all they need, and nothing else: they start at once and share
    memory. Where that is not to be had, each starts afresh."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "cclnet.deploy.serve.reading"])
    return context


def get_ready_to_start() -> None:
    """Begin to import what the processes need, without waiting for it."""
    if _context().get_start_method() == "forkserver":
        from multiprocessing import forkserver

        forkserver.ensure_running()
