"""Write files atomically, so that a reader never sees half a file, and read JSON of limited size."""

from __future__ import annotations

import bz2
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from cclnet.errors import InputError

MAX_JSON = 64 * 2**20  # bytes, after decompression: 100,000 class names and an abstention curve take a few MiB


def make_folder(path: str | Path) -> Path:
    """The folder at ``path``, created with its parents if needed."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {path} cannot be made: {error.strerror or error}. Choose another.") from error
    return path


def write_whole(path: str | Path, content: bytes | str | Callable[[BinaryIO], object]) -> None:
    """Write ``content`` (bytes, text, or a function that fills an open file) under a temporary name beside
    ``path``, flush it to the disk, then rename it. On failure ``path`` is unchanged.
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
            f"cannot write {path}: {error.strerror or error}. The previous file, if any, is unchanged. "
            "Free some space or choose a writable folder."
        ) from error
    except BaseException:
        _remove(partial)
        raise


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON with rows of numbers on one line each."""
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    # A line break is never inside a string, where JSON escapes it.
    text = re.sub(r"\[\n[\s\d.,e+-]+\]", lambda numbers: " ".join(numbers[0].split()), text)
    write_whole(path, text + "\n")


def read_json(path: str | Path, purpose: str = "") -> dict[str, Any]:
    """The object in a JSON file of limited size; ``purpose`` says in the error why a missing file is needed."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no {path.name} in {path.parent}{': ' if purpose else ''}{purpose}.")
    if path.stat().st_size > MAX_JSON:
        raise InputError(f"{path} has {path.stat().st_size:,} bytes; at most {MAX_JSON:,} are read.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also undecodable bytes and numbers of thousands of digits
        raise InputError(f"{path} is not JSON: {error}. Fix it, or remove it.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected an object, got {type(content).__name__}.")
    return content


def write_json_bz2(path: str | Path, content: Any) -> None:
    """Write compressed JSON, for files that only programs read."""
    write_whole(path, bz2.compress((json.dumps(content, allow_nan=False) + "\n").encode()))


def read_json_bz2(path: str | Path) -> Any:
    """The content of compressed JSON, of which a few bytes can decompress to gigabytes: over MAX_JSON is refused."""
    try:
        with bz2.open(path) as file:
            text = file.read(MAX_JSON + 1)
        if len(text) > MAX_JSON:
            raise ValueError(f"it decompresses to more than {MAX_JSON:,} bytes")
        return json.loads(text)
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"{path} is not JSON compressed with bzip2: {error}. Remove it, or fetch it again.") from error


def _remove(path: Path) -> None:
    """Remove a file if it exists. A failure here must not hide the error that came before."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
