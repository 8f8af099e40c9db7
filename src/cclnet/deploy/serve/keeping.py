"""Uploads that are kept, where whoever runs the server has asked for it: under the hash of their content."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

from PIL import Image

from cclnet.files import write_whole

_SUFFIXES = {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif", "JPEG2000": "jp2"}


def content_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def keep(folder: Path, content: bytes) -> Path:
    """Write an image that was found readable into ``folder``; one that is there already is left alone."""
    path = folder / f"{content_hash(content)}.{_suffix(content)}"
    if not path.exists():
        write_whole(path, content)
    return path


def _suffix(content: bytes) -> str:
    """By what the file is, not by what its sender calls it."""
    if content[128:132] == b"DICM":
        return "dcm"
    with Image.open(io.BytesIO(content)) as image:
        kind = image.format or "image"
    return _SUFFIXES.get(kind, kind.lower())
