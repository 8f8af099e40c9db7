"""Decoded images on disk: one flat file of pixels that only grows, and a small index that says what is where.

    pixels-TOKEN.bin   the pixels, image after image
    index.npz          which images are in there; it only ever names pixels that are safely on the disk
    progress.npz       the same while images are being added, so that a killed run goes on where it was

A reader needs no lock: it sees the last index that was written whole, and the pixels it names never change. Writers
take turns. What a killed writer left behind the pixels of its last index is cut off by the next one.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cclnet.files import write_whole

# A file is known by its name below the data folder, and taken as unchanged while size and time of change are the
# same, as make and rsync do. Hashing its content would mean to read every file at every start.
ENTRY = np.dtype([("name", "S24"), ("size", "<i8"), ("changed", "<i8"),
                  ("offset", "<i8"), ("height", "<i4"), ("width", "<i4")])  # fmt: skip
Entries = npt.NDArray[np.void]
CHANNELS = 3


def entries_of(paths: Sequence[Path], root: Path) -> tuple[Entries, dict[int, str]]:
    """One entry a file, with no place in the store yet (height 0), and what is wrong with files that are not there."""
    entries = np.zeros(len(paths), ENTRY)
    base = os.fspath(root)
    missing: dict[int, str] = {}
    for row, path in enumerate(map(os.fspath, paths)):
        try:
            status = os.stat(path)  # noqa: PTH116 (a Path for each of a million files is seconds)
        except OSError as error:
            missing[row] = error.strerror or str(error)
            continue
        name = hashlib.blake2b(path.removeprefix(base).encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
        entries[row] = (name, status.st_size, status.st_mtime_ns, 0, 0, 0)
    return entries, missing


def entries_of_array(array: npt.NDArray[np.uint8]) -> Entries:
    """One entry for each image in memory, known by what it shows."""
    entries = np.zeros(len(array), ENTRY)
    for row, image in enumerate(array):
        entries[row]["name"] = hashlib.blake2b(image.tobytes(), digest_size=12).hexdigest()
    return entries


def place(entries: Entries, held: Entries) -> Entries:
    """Fill in where each entry lies, for those that ``held`` has with the same size and time of change."""
    placed = entries.copy()
    if len(held) == 0:
        return placed
    held = held[np.argsort(held["name"])]
    at = np.minimum(np.searchsorted(held["name"], entries["name"]), len(held) - 1)
    same = np.ones(len(entries), dtype=bool)
    for field in ("name", "size", "changed"):
        same &= held[field][at] == entries[field]
    for field in ("offset", "height", "width"):
        placed[field][same] = held[field][at[same]]
    return placed


def merge(held: Entries, added: Entries) -> Entries:
    """The entries of both; of a file that has changed, the newer one."""
    both = np.concatenate([added, held])
    return both[np.unique(both["name"], return_index=True)[1]]


def lengths(entries: Entries) -> npt.NDArray[np.int64]:
    """Bytes of each image."""
    return entries["height"].astype(np.int64) * entries["width"] * CHANNELS


@dataclass(frozen=True)
class Content:
    """What a store holds: the token of its pixel file, and the entries in it."""

    token: str
    entries: Entries

    @property
    def end(self) -> int:
        """Bytes of the pixel file that the entries reach to."""
        return int((self.entries["offset"] + lengths(self.entries)).max(initial=0))


class PixelStore:
    """The store in one folder. Failures to write are OSErrors, for the caller to say what to do about them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pixels_path(self, token: str) -> Path:
        return self.folder / f"pixels-{token}.bin"

    def read(self, name: str = "index.npz") -> Content | None:
        """What the index (or "progress.npz") says, or None where there is none that can be used."""
        try:
            with np.load(self.folder / name, allow_pickle=False) as archive:
                content = Content(str(archive["token"]), archive["entries"])
            if content.entries.dtype == ENTRY and self.pixels_path(content.token).stat().st_size >= content.end:
                return content
        except (FileNotFoundError, NotADirectoryError, zipfile.BadZipFile, KeyError, ValueError, EOFError):
            pass  # never written, or not by this program: all of it can be decoded again
        return None

    def map_pixels(self, content: Content) -> npt.NDArray[np.uint8]:
        """The pixels up to the last entry, mapped into memory; what a writer adds behind it is left out."""
        if content.end == 0:
            return np.zeros(0, np.uint8)
        return np.memmap(self.pixels_path(content.token), np.uint8, mode="r", shape=(content.end,))

    def begin_writing(self) -> Content:
        """What is there to add to, finished or not; what lies around it is cleared away. Only under :meth:`lock`."""
        content = self.read("progress.npz") or self.read()
        if content is None or content.end > 2 * lengths(content.entries).sum():
            # Nothing yet, or mostly images that have changed since: begin a new file of pixels.
            content = Content(secrets.token_hex(6), np.zeros(0, ENTRY))
        self._clear_away(content, self.read())
        return content

    def save(self, content: Content, finished: bool) -> None:
        """Flush the pixels, then write down that they are there."""
        with self.pixels_path(content.token).open("r+b") as file:
            os.fsync(file.fileno())
        name = "index.npz" if finished else "progress.npz"
        write_whole(
            self.folder / name,
            lambda file: np.savez(file, token=np.array(content.token), entries=content.entries),
        )
        if finished:
            (self.folder / "progress.npz").unlink(missing_ok=True)
            self._clear_away(content)

    def roll_back(self) -> None:
        """Back to the last finished state. It needs no space on the disk."""
        (self.folder / "progress.npz").unlink(missing_ok=True)
        self._clear_away(self.read())

    def _clear_away(self, *wanted: Content | None) -> None:
        """Cut each pixel file behind the last image that is wanted; remove those of which none is, and what a killed
        run had begun to write."""
        ends: dict[Path, int] = {}
        for content in wanted:
            if content is not None:
                path = self.pixels_path(content.token)
                ends[path] = max(content.end, ends.get(path, 0))
        for path in (*self.folder.glob("pixels-*.bin"), *self.folder.glob(".*.partial")):
            if path not in ends:
                path.unlink()
        for path, end in ends.items():
            with path.open("ab") as file:
                file.truncate(end)

    @contextmanager
    def lock(self, waiting: Callable[[], object]) -> Iterator[None]:
        """Hold others off while writing; calls ``waiting`` before it waits for one who does the same.

        The lock goes with the process, however it ends. Processes forked from it share it, so that it stands until
        the last of them has stopped writing.
        """
        if sys.platform == "win32":
            from filelock import FileLock

            with FileLock(self.folder / "lock"):
                yield
            return
        import fcntl

        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
