"""Files are written whole: a reader, or a run that was killed, never meets half a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from cclnet.errors import InputError


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


def _remove(path: Path) -> None:
    """Remove what may be there; that it cannot be removed must not hide why it could not be written."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
