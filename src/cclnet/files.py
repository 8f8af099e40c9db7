"""Write files atomically, so that a reader never sees half a file, and read JSON of limited size."""

from __future__ import annotations

import bz2
import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from cclnet.errors import InputError

PARTIAL = ".partial"  # how the temporary names of unfinished files end
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MAX_JSON = 64 * 2**20  # bytes, after decompression: 100,000 class names and an abstention curve take a few MiB
MAX_LINES = 2**30  # bytes of a text with one record per line
MAX_FILE = 2**36  # bytes of any file: a sparse one takes no room on the disk, but endless time to read


Content = bytes | str | Callable[[BinaryIO], object]  # the last fills an open file
Writer = Callable[[Path, Content], None]  # write_whole, or cclnet.runs.checksums.write_covered


def make_folder(path: str | Path) -> Path:
    """The folder at ``path``, created with its parents if needed."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {path} cannot be made: {write_problem(path, error)}. Choose another.") from error
    return path


def cache_folder(chosen: Path | None) -> Path:
    """The folder of decoded images and features: ``chosen``, by default ``cclnet`` in the user's cache folder."""
    return chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cclnet"


def write_whole(
    path: str | Path,
    content: Content,
    before_rename: Callable[[Path], object] | None = None,
) -> None:
    """Write ``content`` (bytes, text, or a function that fills an open file) under a temporary name beside
    ``path``, flush it to the disk, then rename it. On failure ``path`` is unchanged.

    ``before_rename`` is called with the temporary file once it is on the disk.
    """
    path = Path(path)
    # Not the process number: on shared storage, processes of two machines may have the same.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        if before_rename is not None:
            before_rename(partial)
        partial.replace(path)
    except BaseException as error:
        _remove(partial)
        refused = _caused_by_disk(error)
        if refused is None:
            raise
        raise InputError(
            f"cannot write {path}: {write_problem(path, refused)}. The previous file, if any, is unchanged. "
            "Free some space or choose a writable folder."
        ) from error


def _caused_by_disk(error: BaseException | None) -> OSError | None:
    """The error of the disk behind a RuntimeError, as which torch reports a failed write."""
    while isinstance(error, RuntimeError):
        error = error.__cause__ or error.__context__
    return error if isinstance(error, OSError) else None


def write_problem(path: str | Path, error: OSError) -> str:
    """Why ``path`` could not be written; where its disk is full, which disk that is."""
    reason = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return reason
    place = Path(path).absolute()
    while not place.is_mount():  # "/" is one
        place = place.parent
    usage = shutil.disk_usage(place)
    return f"{reason}: the disk mounted at {place} has {usage.free / 1e9:.2f} of {usage.total / 1e9:.2f} GB free"


def remove_partial(folder: Path) -> None:
    """Remove the temporary files that a killed :func:`write_whole` left in a folder to which nobody is writing."""
    for path in folder.glob(f".*{PARTIAL}"):
        if path.is_file():
            _remove(path)


def check_regular(path: str | Path, limit: int = MAX_FILE) -> None:
    """Refuse a path that is no file, or one of more than ``limit`` bytes: a pipe would be waited for without end, and a
    device such as /dev/zero has none."""
    try:
        status = Path(path).stat()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path} cannot be read: it is a folder, a pipe or a device, where a file is expected.")
    if status.st_size > limit:
        raise InputError(f"{path} has {status.st_size:,} bytes; at most {limit:,} are read.")


def write_json(path: Path, content: Mapping[str, Any], write: Writer = write_whole) -> None:
    """Write indented JSON with rows of numbers on one line each."""
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    # A line break is never inside a string, where JSON escapes it.
    text = re.sub(r"\[\n[\s\d.,e+-]+\]", lambda numbers: " ".join(numbers[0].split()), text)
    write(path, text + "\n")


def read_json(path: str | Path, purpose: str = "") -> dict[str, Any]:
    """The object in a JSON file of limited size; ``purpose`` says in the error why a missing file is needed."""
    path = Path(path)
    if not os.path.lexists(path):
        raise InputError(f"there is no {path.name} in {path.parent}{': ' if purpose else ''}{purpose}.")
    check_regular(path, MAX_JSON)
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # also undecodable bytes
        raise InputError(f"{path} is not JSON: {error}. Fix it, or remove it.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected an object, got {type(content).__name__}.")
    return content


def parse_json(text: str) -> Any:
    """The value in a JSON text. What JSON allows and this program cannot use is a ValueError too: numbers of thousands
    of digits, nesting without end, and halves of surrogate pairs, which no UTF-8 file can have.

    >>> parse_json('["\\\\ud800"]')
    Traceback (most recent call last):
    ValueError: it has half a surrogate pair, which is no text
    """
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if _SURROGATE.search(text):
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("it has half a surrogate pair, which is no text") from error
    return content


def write_json_bz2(path: str | Path, content: Any) -> None:
    """Write compressed JSON, for files that only programs read."""
    write_whole(path, bz2.compress((json.dumps(content, allow_nan=False) + "\n").encode()))


def read_json_bz2(path: str | Path) -> Any:
    """The content of compressed JSON, of which a few bytes can decompress to gigabytes: over MAX_JSON is refused."""
    check_regular(path, MAX_JSON)
    try:
        with bz2.open(path) as file:
            text = file.read(MAX_JSON + 1)
        if len(text) > MAX_JSON:
            raise ValueError(f"it decompresses to more than {MAX_JSON:,} bytes")
        return parse_json(text.decode())
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"{path} is not JSON compressed with bzip2: {error}. Remove it, or fetch it again.") from error


def _remove(path: Path) -> None:
    """Remove a file if it exists. A failure here must not hide the error that came before."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
