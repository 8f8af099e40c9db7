"""SHA256SUMS: the checksums of the files in a folder, so that a damaged file is noticed before it is used.

The file has the format of ``sha256sum``, whose ``--check`` reads it too: one line per covered file, with its SHA-256
and its name. A file is compared with its line whenever it is read; a file without a line is not covered and is read as
it is, as in the folders of versions that wrote no checksums. Checksums detect damage. They do not protect from a person
who can write to the folder, because that person can write checksums as well.

SHA-256 comes with Python, and reading beside the check hides most of its time (results/integrity.json). BLAKE3 is
faster, but would be a compiled dependency for files that are read once per start.

A file and its line cannot be written at once. Before a file is replaced, a comment announces its new checksum, so that
after a kill at any moment the old file or the new one is accepted.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cclnet.errors import InputError
from cclnet.files import MAX_FILE, Content, check_regular, write_whole

FILE_NAME = "SHA256SUMS"
OK, CHANGED, MISSING, NOT_COVERED = "ok", "changed", "missing", "not covered"
COVERED = (
    "model.safetensors", "model.onnx", "model.pt2", "model.json", "config.json", "calibration.json", "soft_labels.csv",
    "features.safetensors", "split.csv", "data.json", "predictions.csv", "predictions.csv.gz", "predictions.csv.bz2",
    "metadata.csv",
)  # fmt: skip
CHECKPOINT = re.compile(r"epoch-\d{6}-step-\d{8}\.pt")
_LINE = re.compile(r"(# writing )?([0-9a-f]{64}) [ *]([^/\\\x00]+)")
_MAX_BYTES = 2**20
_CHUNK = 2**20  # bytes that are hashed at a time


@dataclass
class _Sums:
    """The lines of a SHA256SUMS: checksum by file name."""

    of_file: dict[str, str] = field(default_factory=dict)
    announced: dict[str, str] = field(default_factory=dict)  # of files that are being written

    def text(self) -> str:
        lines = [f"{digest}  {name}" for name, digest in sorted(self.of_file.items())]
        lines += [f"# writing {digest}  {name}" for name, digest in sorted(self.announced.items())]
        return "".join(f"{line}\n" for line in lines)


def _read(folder: Path) -> _Sums:
    path, sums = folder / FILE_NAME, _Sums()
    if not os.path.lexists(path):
        return sums
    again = f"Check the files, then write it again: cclnet verify {folder} --accept"
    try:
        check_regular(path, _MAX_BYTES)
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}. {again}") from error
    if not lines:
        raise InputError(f"{path} is empty: its checksums are lost. {again}")
    for number, line in enumerate(lines, start=1):
        if (found := _LINE.fullmatch(line)) is None:
            raise InputError(f"{path}, line {number} is not a checksum and a file name: {line[:80]!r}. {again}")
        known = sums.announced if found[1] else sums.of_file
        if known.setdefault(found[3], found[2]) != found[2]:
            raise InputError(f"{path}, line {number} is another checksum of {found[3]!r}. {again}")
    return sums


def _write(folder: Path, sums: _Sums) -> None:
    if sums.of_file or sums.announced:
        write_whole(folder / FILE_NAME, sums.text())
    else:
        (folder / FILE_NAME).unlink(missing_ok=True)


def file_digest(path: Path, content: bytes | None = None) -> str:
    """The SHA-256 of a file, or of its ``content`` if that was read already, in hexadecimal."""
    if content is not None:
        return hashlib.sha256(content).hexdigest()
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
    return digest.hexdigest()


def write_covered(path: Path, content: Content) -> None:
    """Write a file whole, as :func:`~cclnet.files.write_whole` does, and its checksum."""

    def announce(partial: Path) -> None:
        sums = _read(path.parent)
        sums.announced[path.name] = file_digest(partial)
        _write(path.parent, sums)

    write_whole(path, content, announce)
    sums = _read(path.parent)
    sums.of_file[path.name] = sums.announced.pop(path.name)
    _write(path.parent, sums)


def remove_covered(*paths: Path) -> None:
    """Remove files of one folder, and their checksums before them."""
    uncover(*paths)
    for path in paths:
        path.unlink(missing_ok=True)


def uncover(*paths: Path) -> None:
    """Remove the checksums of files of one folder."""
    folder = paths[0].parent
    if not os.path.lexists(folder / FILE_NAME):
        return
    sums = _read(folder)
    for path in paths:
        sums.of_file.pop(path.name, None)
        sums.announced.pop(path.name, None)
    _write(folder, sums)


def check_file(path: Path, content: bytes | None = None) -> None:
    """Refuse a file that has another checksum than its line, or is gone although it has one, or is a pipe, a device or
    a folder; a file that is not covered passes. ``content`` is that of the file if it was read already: what is used is
    then what was checked."""
    if not is_there(path):
        return
    check_regular(path)
    if _state(path, _read(path.parent), content) == CHANGED:
        raise InputError(
            f"{path} is refused: it is damaged or was edited, for its SHA-256 is not the one in {FILE_NAME}. Restore "
            f"it, or, if it is meant to be as it is: cclnet verify {path.parent} --accept"
        )


def is_there(path: Path) -> bool:
    """Whether a file exists that its folder may lack. One that has a checksum and is gone is refused: without it, what
    it says, such as the temperature, would be left out silently."""
    if os.path.lexists(path):
        return True
    if path.name in _read(path.parent).of_file:
        raise InputError(
            f"{path} is missing, but {FILE_NAME} has its checksum. Restore it, or, if it was removed on purpose: "
            f"cclnet verify {path.parent} --accept"
        )
    return False


@contextmanager
def checking(path: Path, content: bytes | None = None) -> Iterator[None]:
    """:func:`check_file` in a thread beside the block that uses the file. Its error comes before one of the block,
    which it explains; that of a pipe or a device comes at once, because the block would wait for it without end."""
    if content is None:
        check_regular(path)
    with ThreadPoolExecutor(1, "checksum") as thread:
        checked = thread.submit(check_file, path, content)
        try:
            yield
        finally:
            checked.result()


def _state(path: Path, sums: _Sums, content: bytes | None = None) -> str:
    expected = {digest for known in (sums.of_file, sums.announced) if (digest := known.get(path.name))}
    if not path.is_file():
        return MISSING if path.name in sums.of_file else NOT_COVERED
    if not expected:
        return NOT_COVERED
    try:
        if path.stat().st_size > MAX_FILE:
            return CHANGED  # without reading all of it
        return OK if file_digest(path, content) in expected else CHANGED
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error


def verify_folder(folder: Path) -> Iterator[tuple[str, str]]:
    """The name and state of each file of a run or an export, also of its checkpoints, and of runs and exports in it."""
    for part in _folders(folder):
        sums = _read(part)
        present = {path.name for path in part.iterdir() if not path.is_dir() and path.name != FILE_NAME}
        for name in sorted(present | sums.of_file.keys()):
            yield (part / name).relative_to(folder).as_posix(), _state(part / name, sums)


def accept_folder(folder: Path) -> None:
    """Write the checksums of the files as they are now; those of missing files are dropped."""
    for part in _folders(folder):
        try:
            before = set(_read(part).of_file)
        except InputError:  # it is written again
            before = set()
        names = (path.name for path in part.iterdir())
        covered = [part / name for name in names if name in before | set(COVERED) or CHECKPOINT.fullmatch(name)]
        present = [path for path in covered if path.is_file()]
        for path in present:
            check_regular(path)
        _write(part, _Sums({path.name: file_digest(path) for path in present}))


def has_checksums(folder: Path) -> bool:
    """Whether a SHA256SUMS is in the folder or below it."""
    return any(os.path.lexists(path / FILE_NAME) for path in _folders(folder))


def _folders(folder: Path) -> list[Path]:
    """The folder, and those at any depth below it that have checksums or checkpoints: folds, sweeps, exports in it."""
    inside = sorted(Path(path) for path, _, _ in os.walk(folder))[1:]
    return [folder, *(path for path in inside if path.name == "checkpoints" or os.path.lexists(path / FILE_NAME))]
