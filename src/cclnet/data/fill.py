"""Decode the images that a store does not hold yet, on all cores, and come through being killed or a full disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console

from cclnet.data.parallel import shared_integer, spread
from cclnet.data.pixels import UnreadableImage
from cclnet.data.progress import counting_images
from cclnet.data.store import Content, Entries, PixelStore, merge, place
from cclnet.errors import InputError

_SECONDS_BETWEEN_SAVES = 5.0  # what a run that is killed loses at most

Read = Callable[[int], npt.NDArray[np.uint8]]
Place = tuple[int, int, int]  # offset, height, width


def fill(
    store: PixelStore, entries: Entries, read: Read, broken: dict[int, str], workers: int, progress: bool
) -> Content:
    """Add the images of ``entries`` that are missing, less those known as ``broken``, and return what is held then.

    ``read`` gives the pixels of a row, in a worker. Rows for which it raises UnreadableImage are added to ``broken``.
    If the disk is full or cannot be written, the store is what it was before; if the run is stopped in any other way,
    the next one goes on from there.
    """
    console = Console(stderr=True, quiet=not progress)
    try:
        store.folder.mkdir(parents=True, exist_ok=True)
        with store.lock(lambda: console.print("Another run is decoding these images. Waiting for it.")):
            return _fill(store, store.begin_writing(), entries, read, broken, workers, progress)
    except OSError as error:
        raise InputError(
            f"cannot keep decoded images in {store.folder}: {error.strerror or error}. Nothing is half written there. "
            "Free some space, or choose another folder with --cache-dir (cache_dir)."
        ) from error


def open_rows(placed: Entries, broken: dict[int, str]) -> list[int]:
    """The rows that have no place yet and are not known as broken."""
    to_do = placed["height"] == 0
    to_do[list(broken)] = False
    return np.flatnonzero(to_do).tolist()


def _fill(
    store: PixelStore,
    before: Content,
    entries: Entries,
    read: Read,
    broken: dict[int, str],
    workers: int,
    progress: bool,
) -> Content:
    placed = place(entries, before.entries)
    rows = open_rows(placed, broken)
    saved_at = time.monotonic()

    def content() -> Content:
        return Content(before.token, merge(before.entries, placed[placed["height"] > 0]))

    def note(done: list[tuple[int, Place | str]]) -> None:
        nonlocal saved_at
        for row, outcome in done:
            if isinstance(outcome, str):
                broken[row] = outcome
            else:
                placed["offset"][row], placed["height"][row], placed["width"][row] = outcome
        count(len(done))
        if time.monotonic() - saved_at > _SECONDS_BETWEEN_SAVES:
            store.save(content(), finished=False)
            saved_at = time.monotonic()

    write = _Writer(read, store.pixels_path(before.token))
    try:
        with counting_images("Decoding", len(entries), len(entries) - len(rows), progress and bool(rows)) as count:
            spread(write, rows, workers, note)
        store.save(content(), finished=True)
    except (OSError, InputError):  # the disk: no worker raises either for an image
        store.roll_back()
        raise
    except BrokenProcessPool as error:
        store.save(content(), finished=False)
        raise InputError(
            "a process that decodes images was killed, most likely because the memory was full. Run it again "
            "with fewer workers; it goes on from where it was."
        ) from error
    except BaseException:
        store.save(content(), finished=False)
        raise
    return content()


class _Writer:
    """What every worker does: read some images, and put their pixels behind those of all the others."""

    def __init__(self, read: Read, file: Path) -> None:
        self.read = read
        self.file = file
        self.end = shared_integer(file.stat().st_size)

    def __call__(self, rows: list[int]) -> list[tuple[int, Place | str]]:
        done: list[tuple[int, Place | str]] = []
        with self.file.open("r+b", buffering=0) as file:
            for row in rows:
                try:
                    pixels = self.read(row)
                except UnreadableImage as error:
                    done.append((row, str(error)))
                else:
                    height, width, _ = pixels.shape
                    done.append((row, (self._append(file, pixels), height, width)))
        return done

    def _append(self, file: FileIO, pixels: npt.NDArray[np.uint8]) -> int:
        with self.end.get_lock():
            offset = int(self.end.value)
            self.end.value += pixels.nbytes
        file.seek(offset)
        rest = np.ascontiguousarray(pixels).reshape(-1).data
        while len(rest):
            rest = rest[file.write(rest) :]
        return offset
