"""Decode uploads in separate processes with limited memory and time, because uploads are untrusted input.

The first half of this file runs in the decoding processes. The second half runs in the server: a pool of these
processes that replaces the ones that die or take too long.

The processes are forked by the fork server of :mod:`multiprocessing`. It has imported what decoding needs, so a new
process starts within milliseconds, and it inherits no thread, lock, socket or weights of the server. A decoder that was
taken over must not be trusted: the server receives JSON and raw bytes from it, never a pickle.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from PIL import Image
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header

from cclnet.data.image_io import UnreadableImage, data_uri, read_image, read_resized, resize
from cclnet.data.parallel import limit_memory
from cclnet.deploy.engines import Pixels, central
from cclnet.deploy.serve.guard import Limits, Refused, busy, too_large
from cclnet.errors import InputError
from cclnet.files import write_whole

FORM_FIELD = "image"
MAX_FORM_FIELDS = 8
PREVIEW_SIDE = 720  # longer side, in pixels, of the preview that is sent back
_BYTES_PER_PIXEL = 64  # while decoding: 16-bit images and DICOM colours go through float64
_BYTES_BESIDE = 2**29
_SUFFIXES = {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif", "JPEG2000": "jp2", "DICOM": "dcm"}

_MAX_RESULT_BYTES = 2**28  # of a crop and a preview
_SECONDS_TO_START = 120.0  # generous: a cold disk on a busy machine
_SECONDS_BETWEEN_CHECKS = 1.0
# Exit codes that decoding does not cause. 255: the fork server died and the exit code is unknown.
_KILLED_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, 255)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodingSettings:
    """How uploads are decoded."""

    short_side: int  # short side and crop are the input size of the model
    crop: tuple[int, int]
    limits: Limits
    kept_in: Path | None = None  # folder where uploads are kept


@dataclass(frozen=True)
class Upload:
    """A decoded upload."""

    pixels: Pixels  # input of the network, uint8 [crop height, crop width, 3]
    seen: tuple[float, float, float, float]  # left, top, width, height of the crop, as fractions of the image
    sha256: str  # of the file
    picture: str  # preview of the upright image as a data URI, or ""


# In the decoding process.


def image_in(body: bytes, content_type: str) -> bytes:
    """Return the image file in a request body. The file name given by the sender is ignored."""
    kind, options = parse_options_header(content_type)
    if kind == b"multipart/form-data":
        body = _form_field(body, options.get(b"boundary", b""))
    elif not kind.startswith(b"image/") and kind not in (b"application/octet-stream", b"application/dicom"):
        form = f"Send the image in the field '{FORM_FIELD}' of a form (multipart/form-data)"
        raise Refused(415, f"{form}, or as the request body of type image/* or application/octet-stream.")
    if not body:
        raise Refused(422, "The file is empty.")
    return body


def _form_field(body: bytes, boundary: bytes) -> bytes:
    fields: list[Field | File] = []
    ended = threading.Event()

    def add(field: Field | File) -> None:
        fields.append(field)
        if len(fields) > MAX_FORM_FIELDS:
            raise Refused(400, f"The form has more than {MAX_FORM_FIELDS} fields; send only '{FORM_FIELD}'.")

    try:
        if not boundary:
            raise FormParserError("its content type names no boundary")
        # By default files above 1 MB are written to disk; uploads must not be.
        config = {"MAX_MEMORY_FILE_SIZE": float("inf")}
        FormParser("multipart/form-data", add, add, ended.set, boundary, config=config).write(body)
    except FormParserError as error:
        raise Refused(400, f"The form cannot be parsed: {error}.") from None
    if not ended.is_set():
        raise Refused(400, "The form is incomplete: its last boundary is missing.")
    images = [field for field in fields if field.field_name == FORM_FIELD.encode()]
    if len(images) != 1:
        raise Refused(422, f"Send one image in the field '{FORM_FIELD}'; got {len(images)}.")
    if isinstance(images[0], Field):
        return images[0].value or b""
    images[0].file_object.seek(0)
    return images[0].file_object.read()


def unusable(reason: str) -> Refused:
    return Refused(422, f"This file cannot be used: {reason}.")


def decode_upload(body: bytes, content_type: str, picture: bool, settings: DecodingSettings) -> Upload:
    """Decode the image in a request body; raise :class:`Refused` with the reason if that is impossible."""
    content = image_in(body, content_type)
    if len(content) > settings.limits.upload_bytes:
        raise too_large(settings.limits)
    try:
        resized = read_resized(content, settings.short_side, settings.limits.pixels)
        preview = _preview(content, settings.limits) if picture else ""
    except InputError as error:
        raise unusable(error.reason if isinstance(error, UnreadableImage) else str(error).rstrip(".")) from None
    digest = hashlib.sha256(content).hexdigest()
    if settings.kept_in is not None:
        _keep(settings.kept_in, digest, content)
    (height, width), (crop_height, crop_width) = resized.shape[:2], settings.crop
    top, left = round((height - crop_height) / 2), round((width - crop_width) / 2)
    seen = (left / width, top / height, crop_width / width, crop_height / height)
    return Upload(central(resized, settings.crop), seen, digest, preview)


def _preview(content: bytes, limits: Limits) -> str:
    """Return the upright image as a small JPEG: browsers do not read every format or every orientation tag."""
    pixels = read_image(content, min_short_side=PREVIEW_SIDE, max_pixels=limits.pixels)
    scale = min(1.0, PREVIEW_SIDE / max(pixels.shape[:2]))
    height, width = (max(1, round(side * scale)) for side in pixels.shape[:2])
    return data_uri(Image.fromarray(resize(pixels, height, width)), "JPEG", quality=88)


def _keep(folder: Path, digest: str, content: bytes) -> None:
    """Write a decodable upload to ``folder``, named after its hash and its format, unless it is there already."""
    kind = "DICOM"
    if content[128:132] != b"DICM":
        with Image.open(io.BytesIO(content)) as image:
            kind = image.format or "image"
    path = folder / f"{digest}.{_SUFFIXES.get(kind, kind.lower())}"
    if not path.exists():
        try:
            write_whole(path, content)
        except InputError as error:
            raise Refused(507, f"This server keeps uploads, but this one could not be written: {error}") from None


def run_decoder(connection: Connection, settings: DecodingSettings) -> None:
    """Answer requests until the server closes the connection: the main function of a decoding process."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the sender gets a reason; the operator needs no warning about odd files
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    limit_memory(_BYTES_BESIDE + _BYTES_PER_PIXEL * settings.limits.pixels)
    example = io.BytesIO()
    Image.new("RGB", (32, 24)).save(example, "JPEG")
    # Imports everything that decoding needs before the first request.
    decode_upload(example.getvalue(), "image/jpeg", True, replace(settings, kept_in=None))
    connection.send_bytes(b"ready")
    while True:
        try:
            request, body = json.loads(connection.recv_bytes()), connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        connection.send_bytes(_response(request, body, settings))


def _response(request: dict[str, Any], body: bytes, settings: DecodingSettings) -> bytes:
    """One line of JSON, then the pixels."""
    try:
        upload = decode_upload(body, request["content_type"], request["picture"], settings)
    except Exception as error:
        refused = error if isinstance(error, Refused) else unusable(f"decoding failed ({type(error).__name__})")
        if refused is not error:
            log.exception("decoding an upload failed unexpectedly")
        return json.dumps({"status": refused.status, "reason": refused.reason}).encode()
    head = json.dumps({"seen": upload.seen, "sha256": upload.sha256, "picture": upload.picture})
    return head.encode() + b"\n" + upload.pixels.tobytes()


def _exit_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(1)  # even in the middle of decoding


# In the server.

_processes_lock = threading.Lock()  # multiprocessing reads exit codes of all children without a lock


def start_fork_server() -> None:
    """Start the fork server unless it is running. It imports in the background."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", __name__])
    resource_tracker.ensure_running()  # first, because it resets the signal mask
    # Ctrl-C goes to all processes of the terminal, but only the server may act on it. The mask is inherited.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class DecoderPool:
    """Decodes up to ``count`` uploads at once, each in a process of its own. Further uploads wait.

    A supervisor thread restarts processes that have died, and the fork server with them.
    """

    def __init__(self, settings: DecodingSettings, count: int) -> None:
        self._seconds = settings.limits.seconds
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="decoding")  # each waits for one process
        self._idle: SimpleQueue[Decoder] = SimpleQueue()
        self.decoders = [Decoder(settings) for _ in range(count)]
        try:
            for decoder in self.decoders:
                decoder.start()
            for decoder in self.decoders:  # they warm up in parallel
                decoder.wait_until_ready()
                self._idle.put(decoder)
        except (OSError, EOFError) as error:
            for decoder in self.decoders:
                decoder.stop()
            raise InputError(
                f"the decoding processes could not be started: {error!r}. Is there enough memory? "
                'A script must call serve() under if __name__ == "__main__", as multiprocessing requires.'
            ) from error
        self._last_ready = time.monotonic()
        self._closing = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="decoder supervisor", daemon=True)
        self._supervisor.start()

    @property
    def ready(self) -> bool:
        """Whether at least one process can decode now."""
        found = any(decoder.ready for decoder in self.decoders)
        self._last_ready = time.monotonic() if found else self._last_ready
        return found

    @property
    def healthy(self) -> bool:
        """Whether the pool is ready, or may still become ready by restarting its processes."""
        recently = time.monotonic() - self._last_ready < 2 * _SECONDS_TO_START
        return self._supervisor.is_alive() and (self.ready or recently)

    async def decode(self, body: bytes, content_type: str, picture: bool) -> Upload:
        """Return the decoded upload; raise :class:`Refused` if that is impossible or takes too long."""
        loop = asyncio.get_running_loop()
        decoding = loop.run_in_executor(self._threads, self._decode, body, content_type, picture)
        try:
            return await asyncio.wait_for(decoding, 2 * self._seconds)  # waiting for a process, then decoding
        except (TimeoutError, asyncio.TimeoutError):
            raise busy("Too many images are waiting to be decoded.") from None

    def _decode(self, *upload: Any) -> Upload:
        decoder = self._idle.get()
        try:
            return decoder.decode(*upload)
        finally:
            self._idle.put(decoder)

    def _supervise(self) -> None:
        while not self._closing.wait(_SECONDS_BETWEEN_CHECKS):
            for decoder in self.decoders:
                decoder.restart_if_dead()
            for decoder in self.decoders:
                decoder.replace_if_orphaned()
            _ = self.ready  # records the time

    def close(self) -> None:
        self._closing.set()
        self._threads.shutdown(cancel_futures=True)
        self._supervisor.join()
        for decoder in self.decoders:
            decoder.stop()


class Decoder:
    """One decoding process and the connection to it."""

    def __init__(self, settings: DecodingSettings) -> None:
        self.settings = settings
        self.process: multiprocessing.process.BaseProcess | None = None
        self.connection: Connection
        self._lock = threading.Lock()  # held while decoding and while restarting
        self._answers = False  # whether the process has reported that it is ready

    @property
    def ready(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return self._answers
        try:
            return self._answers and self._alive()
        finally:
            self._lock.release()

    def start(self) -> None:
        """Start the process; a call of :meth:`wait_until_ready` must follow."""
        self.stop()
        with _processes_lock:
            start_fork_server()
            context = multiprocessing.get_context("forkserver")
            ours, theirs = context.Pipe()
            with theirs:
                process = context.Process(target=run_decoder, args=(theirs, self.settings), daemon=True)
                process.start()
            self.connection, self.process = ours, process

    def wait_until_ready(self) -> None:
        if not self._answers:
            if not self.connection.poll(_SECONDS_TO_START):
                raise TimeoutError(f"a decoding process was not ready within {_SECONDS_TO_START:g} seconds")
            self.connection.recv_bytes()
            self._answers = True

    def restart_if_dead(self) -> None:
        if not self._lock.acquire(blocking=False):  # in use: whoever uses it will notice
            return
        try:
            self._ensure_ready()
        except (OSError, EOFError) as error:
            self.stop()
            log.warning("a decoding process could not be restarted: %r", error)
        finally:
            self._lock.release()

    def replace_if_orphaned(self) -> None:
        """Replace a process whose fork server was killed. It decodes until the new one, which may take seconds to
        import everything, is ready."""
        if self.process is None or not wait([self.process.sentinel], 0):
            return
        new = Decoder(self.settings)
        try:
            new.start()
            new.wait_until_ready()
        except (OSError, EOFError) as error:
            log.warning("a decoding process could not be replaced: %r", error)
        else:
            with self._lock:
                self.process, new.process = new.process, self.process
                self.connection, new.connection = new.connection, self.connection
                self._answers = True
        new.stop()

    def decode(self, body: bytes, content_type: str, picture: bool) -> Upload:
        with self._lock:
            try:
                self._ensure_ready()
            except (OSError, EOFError):
                self.stop()
                raise busy("The decoding process is being restarted.") from None
            seconds = self.settings.limits.seconds
            try:
                self.connection.send_bytes(json.dumps({"content_type": content_type, "picture": picture}).encode())
                self.connection.send_bytes(body)
                if self.connection.poll(seconds):
                    return self._upload(self.connection.recv_bytes(_MAX_RESULT_BYTES))
                reason = f"decoding it took longer than {seconds:g} seconds"
            except (EOFError, OSError):
                if self.stop(5.0) in _KILLED_FROM_OUTSIDE:
                    raise busy("The process that was decoding this image was killed.") from None
                reason = "its decoder crashed"
            except (ValueError, LookupError, TypeError):
                reason = "its decoder returned invalid data"
            self.stop()  # restarted by the next request or by the supervisor
            raise unusable(reason)

    def _ensure_ready(self) -> None:
        if not self._alive():
            self.start()
        self.wait_until_ready()

    def _alive(self) -> bool:
        """Whether the idle process runs. It sends nothing, so a readable connection has been closed. Its sentinel would
        also be set by the end of the fork server, which it survives."""
        if self.process is None:
            return False
        return not self.connection.poll(0) if self._answers else not wait([self.process.sentinel], 0)

    def _upload(self, message: bytes) -> Upload:
        head, _, pixels = message.partition(b"\n")
        answer = json.loads(head)
        if "reason" in answer:
            raise Refused(int(answer["status"]), str(answer["reason"]))
        left, top, width, height = map(float, answer["seen"])
        crop = np.frombuffer(pixels, np.uint8).reshape(*self.settings.crop, 3)
        return Upload(crop, (left, top, width, height), str(answer["sha256"]), str(answer["picture"]))

    def stop(self, seconds: float = 0.0) -> int | None:
        """Kill the process if it has not ended within ``seconds``; return its exit code, or None without a process."""
        process, self.process, self._answers = self.process, None, False
        if process is None:
            return None
        with _processes_lock, self.connection:
            process.join(seconds)
            if process.is_alive():  # else its process id may belong to another process by now
                process.kill()
                process.join()
            elif not self._closed() and process.pid:  # its fork server has ended, not the process itself
                os.kill(process.pid, signal.SIGKILL)
            code = process.exitcode
            process.close()
        return code

    def _closed(self) -> bool:
        """Whether the process has closed its end of the connection. What it has sent before is dropped."""
        try:
            while self.connection.poll(0):
                self.connection.recv_bytes()
        except (EOFError, OSError):
            return True
        return False
