"""From the body of a request to pixels. It runs in a process of its own, for what is in an upload is not to be trusted.

Between the two processes go lengths, JSON and raw bytes, never pickles: a decoder that was taken over must not be
believed either.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import sys
import warnings
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from cclnet.data.image_io import UnreadableImage, decode_image, read_resized, resize
from cclnet.deploy.engines import central
from cclnet.deploy.serve.forms import image_in
from cclnet.deploy.serve.keeping import content_hash, keep
from cclnet.deploy.serve.limits import Limits, Refused
from cclnet.deploy.serve.uploads import too_large
from cclnet.errors import InputError

Pixels = npt.NDArray[np.uint8]
SHOWN_SIDE = 720  # pixels of the longer side of the picture that is sent back
_BYTES_A_PIXEL = 64  # while decoding: 16 bits go through float64, colours of DICOM too
_BYTES_BESIDE = 2**29


@dataclass(frozen=True)
class Reader:
    """How uploads become pixels.

    Attributes:
        short_side, crop: of the model.
        limits: what an upload may cost.
        kept_in: a folder for what was sent, or None to keep nothing.
    """

    short_side: int
    crop: tuple[int, int]
    limits: Limits
    kept_in: Path | None = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kept_in": None if self.kept_in is None else str(self.kept_in.resolve())}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Reader:
        kept_in = None if told["kept_in"] is None else Path(told["kept_in"])
        return cls(told["short_side"], tuple(told["crop"]), Limits(**told["limits"]), kept_in)


@dataclass(frozen=True)
class Upload:
    """An image that was read.

    Attributes:
        pixels: what the network gets, uint8 [crop height, crop width, 3].
        seen: the part of the upright image that it gets: left, top, width, height, each as a share.
        sha256: of the file.
        picture: the whole upright image as a JPEG in text, to show it; empty where it was not asked for.
    """

    pixels: Pixels
    seen: tuple[float, float, float, float]
    sha256: str
    picture: str


def read_upload(body: bytes, content_type: str, picture: bool, reader: Reader) -> Upload:
    """The image in a body. Raises :class:`Refused` with the reason for whatever is wrong with it."""
    content = image_in(body, content_type)
    if len(content) > reader.limits.upload_bytes:
        raise too_large(reader.limits)
    try:
        resized = read_resized(content, reader.short_side, reader.limits.pixels)
        shown = _picture(content, reader.limits) if picture else ""
    except UnreadableImage as error:
        raise Refused(422, f"This file cannot be used: {error.reason}.") from None
    except InputError as error:
        raise Refused(422, f"This file cannot be used: {error}") from None
    except MemoryError:
        raise Refused(422, "This file cannot be used: decoding it takes more memory than is allowed.") from None
    if reader.kept_in is not None:
        try:
            keep(reader.kept_in, content)
        except InputError as error:
            raise Refused(507, f"Images are to be kept here, but this one could not be: {error}") from None
    return Upload(central(resized, reader.crop), _seen(resized, reader.crop), content_hash(content), shown)


def _seen(resized: Pixels, crop: tuple[int, int]) -> tuple[float, float, float, float]:
    height, width = resized.shape[:2]
    top, left = (round((have - want) / 2) for have, want in zip((height, width), crop, strict=True))
    return left / width, top / height, crop[1] / width, crop[0] / height


def _picture(content: bytes, limits: Limits) -> str:
    """The upright image, made smaller where it is large: browsers do not know every format, nor turn every image."""
    pixels = decode_image(content, "image", min_short_side=SHOWN_SIDE, max_pixels=limits.pixels)
    scale = min(1.0, SHOWN_SIDE / max(pixels.shape[:2]))
    height, width = (max(1, round(side * scale)) for side in pixels.shape[:2])
    file = io.BytesIO()
    Image.fromarray(resize(pixels, height, width)).save(file, "JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def work(connection: Connection) -> None:
    """The life of a process: learn how to read, then read what is asked for until the other side is gone."""
    reader = Reader.from_json(json.loads(connection.recv_bytes()))
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    # What is odd about a file is told to its sender; whoever runs this need not read it.
    warnings.simplefilter("ignore")
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    _limit_memory(reader.limits)
    _warm_up(reader)
    connection.send_bytes(b"ready")
    while True:
        try:
            question = json.loads(connection.recv_bytes())
            body = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        _answer(connection, body, question, reader)


def _warm_up(reader: Reader) -> None:
    """Load what decoding needs before the first person waits for it."""
    file = io.BytesIO()
    Image.new("RGB", (32, 24)).save(file, "JPEG")
    read_upload(file.getvalue(), "image/jpeg", True, replace(reader, kept_in=None))


def _answer(connection: Connection, body: bytes, question: dict[str, Any], reader: Reader) -> None:
    try:
        upload = read_upload(body, question["content_type"], question["picture"], reader)
    except Refused as refused:
        _send(connection, {"status": refused.status, "reason": refused.reason})
    except Exception as error:
        # A decoder stumbled in a way that is not foreseen. The sender gets a reason, whoever runs this the traceback.
        logging.getLogger(__name__).exception("a decoder failed on an upload")
        name = type(error).__name__
        _send(connection, {"status": 422, "reason": f"This file cannot be used: its decoder failed ({name})."})
    else:
        answer = {"seen": upload.seen, "sha256": upload.sha256, "picture": upload.picture}
        _send(connection, answer, upload.pixels.tobytes())


def _send(connection: Connection, message: dict[str, Any], pixels: bytes = b"") -> None:
    """One message: a line of JSON, then the pixels."""
    connection.send_bytes(json.dumps(message).encode() + b"\n" + pixels)


def _limit_memory(limits: Limits) -> None:
    """No more memory than the largest image allowed needs, whatever a file makes its decoder ask for. Linux only."""
    if sys.platform != "linux":
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _BYTES_BESIDE + _BYTES_A_PIXEL * limits.pixels
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
