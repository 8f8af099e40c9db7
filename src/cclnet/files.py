"""Files are written whole: a reader, or a run that was killed, never meets half a file. What is read has a limit."""

from __future__ import annotations

import bz2
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from cclnet.errors import InputError

MOST_JSON = 64 * 2**20  # bytes that a compressed JSON may unfold to; the largest of ours have a tenth of a million


def make_folder(path: str | Path) -> Path:
    """The folder at ``path``, made if need be with those above it."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {path} cannot be made: {error.strerror or error}. Choose another.") from error
    return path


def write_whole(path: str | Path, content: bytes | str | Callable[[BinaryIO], object]) -> None:
    """Write ``content`` (bytes, text, or a function that fills an open file) under a temporary name beside
    ``path``, flush it to the disk, then rename it. On any failure what stood at ``path`` still stands.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        _remove(partial)
        raise InputError(
            f"cannot write {path}: {error.strerror or error}. What stood there before is unchanged. "
            "Free some space or choose a folder that can be written."
        ) from error
    except BaseException:
        _remove(partial)
        raise


def write_json_bz2(path: str | Path, content: Any) -> None:
    """Write what JSON can say, compressed: for files that only programs read."""
    write_whole(path, bz2.compress((json.dumps(content, allow_nan=False) + "\n").encode()))


def read_json_bz2(path: str | Path) -> Any:
    """What ``write_json_bz2`` wrote. Some hundred bytes can unfold to gigabytes: beyond MOST_JSON they are refused."""
    try:
        with bz2.open(path) as file:
            text = file.read(MOST_JSON + 1)
        if len(text) > MOST_JSON:
            raise ValueError(f"it unfolds to more than {MOST_JSON:,} bytes")
        return json.loads(text)
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"{path} is not JSON compressed with bzip2: {error}. Remove it, or fetch it again.") from error


def _remove(path: Path) -> None:
    """Remove what may be there; that it cannot be removed must not hide why it could not be written."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
