"""The cache of decoded images: every image is decoded once to uint8 RGB with one short side, shared by all runs.

A store is one folder with

    pixels-TOKEN.bin   the pixels, image after image; the file only grows
    index.npz          the images in it, with a checksum each; it only names pixels that are flushed to disk
    progress.npz       the same while images are being added, so that a killed run can resume

Readers need no lock: they use the last complete index, and the pixels it names never change. Writers take turns.
Pixels that a killed writer appended after its last index are truncated by the next writer.

The pixels of an image are compared with their checksum when they are first read. It is a CRC-32, which detects every
change of up to 32 bits in a row and misses one of 2^32 others, and runs at over a gigabyte per second. The index is a
zip archive, which has checksums of its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from rich.console import Console

from cclnet.data.duplicates import HASHED, VERSION, hash_images, perceptual_hashes, sample_rows
from cclnet.data.image_io import RGB, UnreadableImage, read_resized, resize, resized_shape
from cclnet.data.parallel import available_cores, counting_images, limited, process_chunks, shared_integer
from cclnet.data.table import ImageTable
from cclnet.errors import InputError
from cclnet.files import write_problem, write_whole

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

# An image file is identified by its name below the data folder, and unchanged while size and modification time are the
# same, as in make and rsync. Hashing its content would mean reading every file at every start.
_LOCATION = ("offset", "height", "width", "checksum")
ENTRY = np.dtype([("name", "S24"), ("size", "<i8"), ("changed", "<i8"),
                  ("offset", "<i8"), ("height", "<i4"), ("width", "<i4"), ("checksum", "<i8"),
                  *HASHED.descr])  # fmt: skip
_NOT_COVERED = -1  # the checksum of images that were stored before there were checksums
_NOT_STORED = np.zeros((), ENTRY)  # the fields of an image that is not in the store
_NOT_STORED["checksum"] = _NOT_COVERED
Entries = npt.NDArray[np.void]
Location = tuple[int, int, int, int]  # offset, height, width, checksum
# Rows with their location or what is wrong with them, and HASHED of those that were read.
Written = tuple[list[tuple[int, Location | str]], npt.NDArray[np.void]]
CHANNELS = 3
_FORMAT = 1  # increase when read_resized returns other pixels than before: older caches are then ignored
_MAX_IN_MEMORY = 2**30  # bytes that resized images from an array may take in memory; larger sets go through the cache
_SECONDS_BETWEEN_SAVES = 5.0  # the work that a killed run loses at most


@dataclass(frozen=True)
class DecodedImages:
    """N images of any shape in one flat buffer: image i is ``pixels[offset : offset + height * width * 3]``, RGB."""

    pixels: RGB  # uint8, one dimension, in memory or memory-mapped; the images in any order, and maybe others
    offsets: npt.NDArray[np.int64]  # [N], as heights and widths
    heights: npt.NDArray[np.int32]
    widths: npt.NDArray[np.int32]
    # Checksums that are still to be compared, [N]; -1 where there is none, or where it was found right.
    unchecked: npt.NDArray[np.int64] | None = None
    folder: Path | None = None  # of the store
    hashed: npt.NDArray[np.void] | None = None  # HASHED [N], where the images come from a cache

    def __len__(self) -> int:
        return len(self.offsets)

    def image(self, index: int) -> RGB:
        """Return one image, [H, W, 3], without copying it."""
        self.check(np.array([index]))
        height, width = int(self.heights[index]), int(self.widths[index])
        return self._bytes(index).reshape(height, width, CHANNELS)

    def check(self, rows: npt.NDArray[np.integer]) -> None:
        """Compare the pixels of images with their checksums, once for each image. Whoever reads ``pixels`` calls it
        before; several threads may."""
        if self.unchecked is None:
            return
        for row in rows[self.unchecked[rows] != _NOT_COVERED].tolist():
            if (expected := int(self.unchecked[row])) == _NOT_COVERED:
                continue  # a row that is there twice, or was checked by another thread
            if zlib.crc32(self._bytes(row).data) != expected:
                raise InputError(
                    f"the decoded pixels of image {row} in {self.folder} are damaged: their checksum differs. Remove "
                    "this folder, and check the disk: the images are then decoded again. `cclnet verify` lists the "
                    "damage."
                )
            self.unchecked[row] = _NOT_COVERED

    def _bytes(self, row: int) -> RGB:
        offset = int(self.offsets[row])
        return self.pixels[offset : offset + int(self.heights[row]) * int(self.widths[row]) * CHANNELS]

    def select(self, rows: npt.NDArray[np.intp]) -> DecodedImages:
        """Return the images of the given rows, without copying pixels."""
        return replace(
            self, offsets=self.offsets[rows], heights=self.heights[rows], widths=self.widths[rows],
            unchecked=None if self.unchecked is None else self.unchecked[rows],
            hashed=None if self.hashed is None else self.hashed[rows],
        )  # fmt: skip

    @classmethod
    def from_array(cls, array: npt.NDArray[np.uint8]) -> DecodedImages:
        """Wrap images that are in memory, [N, H, W] or [N, H, W, 1 or 3]. RGB is not copied.

        >>> DecodedImages.from_array(np.zeros((5, 4, 6), np.uint8)).image(2).shape
        (4, 6, 3)
        """
        if array.dtype != np.uint8 or array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[3] not in (1, 3)):
            got = f"{array.dtype} {list(array.shape)}"
            raise InputError(f"images in an array must be uint8 [N, H, W] or [N, H, W, 1 or 3], got {got}.")
        with_channels = array if array.ndim == 4 else array[..., None]
        rgb = with_channels if with_channels.shape[3] == CHANNELS else np.repeat(with_channels, CHANNELS, axis=3)
        count, height, width, _ = rgb.shape
        offsets = np.arange(count, dtype=np.int64) * (height * width * CHANNELS)
        heights, widths = (np.full(count, side, dtype=np.int32) for side in (height, width))
        return cls(np.ascontiguousarray(rgb).reshape(-1), offsets, heights, widths)


def decode(
    table: ImageTable, short_side: int = 256, cache_dir: Path | None = None, workers: int | None = None,
    progress: bool = True,
) -> DecodedImages:  # fmt: skip
    """Return the images of a table as uint8 RGB with the given short side, decoded now or taken from the cache.

    Images keep their aspect ratio; small ones are enlarged. All broken images are named in one error. The cache is by
    default ``cclnet`` in the user's cache folder (``$XDG_CACHE_HOME``, else ``~/.cache``). Images that came as an array
    stay in memory unless resizing them takes more than a gigabyte. ``workers``: processes, by default one per core.
    """
    images, broken = decode_readable(table, short_side, cache_dir, workers, progress)
    if broken:
        raise unreadable_images(broken, len(table))
    return images


def unreadable_images(broken: dict[int, str], images: int) -> InputError:
    """An error that lists broken images."""
    some = list(broken.values())[:20] + ([f"and {len(broken) - 20} more"] if len(broken) > 20 else [])
    return InputError(
        f"{len(broken)} of {images} images cannot be used:\n  " + "\n  ".join(some) + "\n"
        "Replace these files, or leave them out with --skip-unreadable (skip_unreadable); `cclnet data audit` "
        "lists all of them. The other images are in the cache and will not be decoded again."
    )


def decode_readable(
    table: ImageTable, short_side: int = 256, cache_dir: Path | None = None, workers: int | None = None,
    progress: bool = True,
) -> tuple[DecodedImages, dict[int, str]]:  # fmt: skip
    """As :func:`decode`, but broken images have height and width 0, and the reason is returned per row."""
    if short_side < 1:
        raise InputError(f"short_side must be at least 1 pixel, got {short_side}.")
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}.")

    def unreadable(row: int, reason: str) -> str:
        named = table.names[row] if isinstance(table.images, np.ndarray) else table.images[row]
        return str(UnreadableImage(named, reason))

    if isinstance(table.images, np.ndarray):
        if (in_memory := _resize_in_memory(table.images, short_side)) is not None:
            return in_memory, {}
        entries, broken = np.zeros(len(table), ENTRY), {}
        entries["name"] = [hashlib.blake2b(image.tobytes(), digest_size=12).hexdigest() for image in table.images]
    else:
        entries, missing = file_entries(table.images, table.root)
        broken = {row: unreadable(row, reason) for row, reason in missing.items()}

    def read(row: int) -> RGB:
        image = table.images[row]
        return _resize_array(image, short_side) if isinstance(image, np.ndarray) else read_resized(image, short_side)

    store = PixelStore(_store_folder(table.root, short_side, cache_dir))
    index = store.read()
    if index is None or _missing_rows(find_entries(entries, index.entries), broken):
        console = Console(stderr=True, quiet=not progress)
        try:
            store.folder.mkdir(parents=True, exist_ok=True)
            with store.lock(lambda: console.print("Another run is decoding these images. Waiting for it.")):
                index = _add_missing(store, entries, read, broken, unreadable, workers or available_cores(), progress)
        except OSError as error:
            raise InputError(
                f"cannot write decoded images to {store.folder}: {write_problem(store.folder, error)}. The cache is "
                "unchanged. Free some space, or choose another folder with --cache-dir (cache_dir)."
            ) from error
    found = find_entries(entries, index.entries)
    offsets, heights, widths, checksums = (np.ascontiguousarray(found[field]) for field in _LOCATION)
    hashed = found[list(HASHED.names or ())]
    images = DecodedImages(store.map_pixels(index), offsets, heights, widths, checksums, store.folder, hashed)
    _hash_older(store, index, found, images, workers or available_cores())
    return images, dict(sorted(broken.items()))


def _hash_older(store: PixelStore, index: StoreIndex, found: Entries, images: DecodedImages, workers: int) -> None:
    """Hash the images that an earlier version decoded, and store the hashes where the cache can be written."""
    rows = np.flatnonzero((found["height"] > 0) & (found["version"] != VERSION))
    if len(rows) == 0 or images.hashed is None:
        return
    hashed = hash_images(images, rows.tolist(), workers)
    for field in HASHED.names or ():
        images.hashed[field][rows] = hashed[field]
    try:
        with store.lock(lambda: None):
            if (current := store.read()) is not None and current.token == index.token:
                entries = current.entries.copy()
                at = np.flatnonzero(np.isin(entries["offset"], found["offset"][rows]))
                row_of = {int(offset): i for i, offset in enumerate(found["offset"][rows])}
                order = [row_of[int(offset)] for offset in entries["offset"][at]]
                for field in HASHED.names or ():
                    entries[field][at] = hashed[field][order]
                store.save(StoreIndex(current.token, entries), finished=True)
    except (OSError, InputError):
        pass  # a cache that can only be read: they are computed again next time


def _resize_in_memory(array: npt.NDArray[np.uint8], short_side: int) -> DecodedImages | None:
    """Return images from an array, resized where needed; None where that would need too much memory."""
    if len(array) == 0:
        return DecodedImages.from_array(array)
    height, width = resized_shape(array.shape[1], array.shape[2], short_side)
    unchanged = array.shape[1:] == (height, width, CHANNELS)
    if not unchanged and len(array) * height * width * CHANNELS > _MAX_IN_MEMORY:
        return None
    if array.shape[1:3] != (height, width):
        array = np.stack([_resize_array(image, short_side) for image in array])
    return DecodedImages.from_array(array)


def _resize_array(image: npt.NDArray[np.uint8], short_side: int) -> RGB:
    rgb = DecodedImages.from_array(image[None]).image(0)
    return resize(rgb, *resized_shape(rgb.shape[0], rgb.shape[1], short_side))


def _store_folder(root: Path, short_side: int, cache_dir: Path | None) -> Path:
    """Return the folder for one data folder and short side, with a name that a person who cleans up can read."""
    if cache_dir is None:
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cclnet"
    digest = hashlib.blake2b(f"{_FORMAT} {root.resolve()}".encode("utf-8", "surrogateescape"), digest_size=4)
    readable = re.sub(r"[^\w.-]+", "_", root.resolve().name)[:40] or "data"
    return Path(cache_dir) / "decoded" / f"{readable}-{digest.hexdigest()}-{short_side}"


def file_entries(paths: Sequence[Path], root: Path) -> tuple[Entries, dict[int, str]]:
    """Return one entry per file, not located in the store yet (height 0), and the error of each missing file."""
    entries = np.zeros(len(paths), ENTRY)
    base = os.fspath(root)
    missing: dict[int, str] = {}
    for row, path in enumerate(map(os.fspath, paths)):
        try:
            status = os.stat(path)  # noqa: PTH116 (creating a Path for each of a million files takes seconds)
        except OSError as error:
            missing[row] = error.strerror or str(error)
            continue
        name = hashlib.blake2b(path.removeprefix(base).encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
        entries[row] = (name, status.st_size, status.st_mtime_ns, *_NOT_STORED.item()[3:])
    return entries, missing


def find_entries(entries: Entries, stored: Entries) -> Entries:
    """Return ``entries`` with offset, height and width filled in where ``stored`` has the same unchanged file."""
    found = entries.copy()
    if len(stored) == 0:
        return found
    stored = stored[np.argsort(stored["name"])]
    at = np.minimum(np.searchsorted(stored["name"], entries["name"]), len(stored) - 1)
    same = np.ones(len(entries), dtype=bool)
    for field in ("name", "size", "changed"):
        same &= stored[field][at] == entries[field]
    for field in (*_LOCATION, *(HASHED.names or ())):
        found[field][same] = stored[field][at[same]]
    return found


def _missing_rows(found: Entries, broken: dict[int, str]) -> list[int]:
    """Return the rows that are neither in the store nor known as broken."""
    missing = found["height"] == 0
    missing[list(broken)] = False
    return np.flatnonzero(missing).tolist()


@dataclass(frozen=True)
class StoreIndex:
    """The token of the pixel file, and the entries of the images in it."""

    token: str
    entries: Entries

    @property
    def lengths(self) -> npt.NDArray[np.int64]:  # bytes of each image
        return self.entries["height"].astype(np.int64) * self.entries["width"] * CHANNELS

    @property
    def end(self) -> int:  # bytes of the pixel file up to the end of the last entry
        return int((self.entries["offset"] + self.lengths).max(initial=0))


def _with_all_fields(entries: Entries) -> Entries:
    """Return the entries of an index; one written before there were checksums or hashes has neither."""
    names = entries.dtype.names or ()
    if entries.dtype == ENTRY or any(name not in (ENTRY.names or ()) for name in names):
        return entries
    complete = np.full(len(entries), _NOT_STORED)
    for name in names:
        complete[name] = entries[name]
    return complete


@dataclass(frozen=True)
class PixelStore:
    """The pixel file and its index in one folder. Failures to write are raised as OSError."""

    folder: Path

    def pixels_path(self, token: str) -> Path:
        return self.folder / f"pixels-{token}.bin"

    def read(self, name: str = "index.npz") -> StoreIndex | None:
        """Return the index (or that in "progress.npz"), or None where there is none that can be used."""
        try:
            with np.load(self.folder / name, allow_pickle=False) as archive:
                index = StoreIndex(str(archive["token"]), _with_all_fields(archive["entries"]))
            if index.entries.dtype == ENTRY and self.pixels_path(index.token).stat().st_size >= index.end:
                return index
        except (FileNotFoundError, NotADirectoryError, zipfile.BadZipFile, KeyError, ValueError, EOFError):
            pass  # missing or damaged: everything can be decoded again
        return None

    def map_pixels(self, index: StoreIndex) -> RGB:
        """Memory-map the pixels up to the last entry; what a writer appends after it is left out."""
        if index.end == 0:
            return np.zeros(0, np.uint8)
        return np.memmap(self.pixels_path(index.token), np.uint8, mode="r", shape=(index.end,))

    def begin_writing(self) -> StoreIndex:
        """Return the index to extend, complete or not, and remove leftovers. Only under :meth:`lock`."""
        index = self.read("progress.npz") or self.read()
        if index is None or index.end > 2 * index.lengths.sum():
            # Empty, or mostly images that have changed since: start a new pixel file.
            index = StoreIndex(secrets.token_hex(6), np.zeros(0, ENTRY))
        self._clean_up(index, self.read())
        return index

    def save(self, index: StoreIndex, finished: bool) -> None:
        """Flush the pixels, then write the index that names them."""
        with self.pixels_path(index.token).open("r+b") as file:
            os.fsync(file.fileno())
        name = "index.npz" if finished else "progress.npz"
        write_whole(self.folder / name, lambda file: np.savez(file, token=np.array(index.token), entries=index.entries))
        if finished:
            (self.folder / "progress.npz").unlink(missing_ok=True)
            self._clean_up(index)

    def roll_back(self) -> None:
        """Return to the last complete state. Needs no disk space."""
        (self.folder / "progress.npz").unlink(missing_ok=True)
        self._clean_up(self.read())

    def _clean_up(self, *kept: StoreIndex | None) -> None:
        """Truncate each pixel file after the last image of a kept index; remove other pixel and partial files."""
        ends: dict[Path, int] = {}
        for index in filter(None, kept):
            path = self.pixels_path(index.token)
            ends[path] = max(index.end, ends.get(path, 0))
        for path in (*self.folder.glob("pixels-*.bin"), *self.folder.glob(".*.partial")):
            if path not in ends:
                path.unlink()
        for path, end in ends.items():
            with path.open("ab") as file:
                file.truncate(end)

    @contextmanager
    def lock(self, waiting: Callable[[], object]) -> Iterator[None]:
        """Exclude other writers; ``waiting`` is called before waiting for one. The lock is released when the process
        ends, however it ends. Forked processes share it, so it is held until the last of them has stopped writing."""
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


def _add_missing(
    store: PixelStore, entries: Entries, read: Callable[[int], RGB], broken: dict[int, str],
    unreadable: Callable[[int, str], str], workers: int, progress: bool,
) -> StoreIndex:  # fmt: skip
    """Decode the images of ``entries`` that the store lacks, on all cores, and return the new index. Rows for which
    ``read`` raises UnreadableImage, in a worker, are added to ``broken``, as are those that end their worker, which
    ``unreadable`` describes. If the disk cannot be written, the store is rolled back; after any other interruption the
    next run resumes."""
    before = store.begin_writing()
    found = find_entries(entries, before.entries)
    rows = _missing_rows(found, broken)
    saved_at = time.monotonic()

    def index() -> StoreIndex:
        both = np.concatenate([found[found["height"] > 0], before.entries])  # for a changed file, the new entry
        return StoreIndex(before.token, both[np.unique(both["name"], return_index=True)[1]])

    def record(written: Written) -> None:
        nonlocal saved_at
        done, hashed = written
        for row, result in done:
            if isinstance(result, str):
                broken[row] = result
            else:
                for field, value in zip(_LOCATION, result, strict=True):
                    found[field][row] = value
        readable = [row for row, result in done if not isinstance(result, str)]
        for field in HASHED.names or ():
            found[field][readable] = hashed[field]
        count(len(done))
        if time.monotonic() - saved_at > _SECONDS_BETWEEN_SAVES:
            store.save(index(), finished=False)
            saved_at = time.monotonic()

    def fail(row: int, reason: str) -> Written:
        return [(row, unreadable(row, reason))], perceptual_hashes([])

    path = store.pixels_path(before.token)
    write = partial(_write, read, path, shared_integer(path.stat().st_size))
    try:
        with counting_images("Decoding", len(entries), len(entries) - len(rows), progress and bool(rows)) as count:
            process_chunks(write, rows, workers, record, fail)
        store.save(index(), finished=True)
    except (OSError, InputError):  # a disk error: unreadable images raise neither in a worker
        store.roll_back()
        raise
    except BaseException as error:
        store.save(index(), finished=False)
        if isinstance(error, BrokenProcessPool):
            raise InputError(
                "a process that decodes images was killed, probably because memory ran out. Run again with fewer "
                "workers; the finished images are kept."
            ) from error
        raise
    return index()


def _write(read: Callable[[int], RGB], path: Path, end: Synchronized[int], rows: list[int]) -> Written:
    """Read images in a worker and append their pixels to the shared pixel file, which ends at ``end``. Also returns the
    hashes of the images that could be read, because their pixels are at hand here."""
    done: list[tuple[int, Location | str]] = []
    samples: list[RGB] = []
    with path.open("r+b", buffering=0) as file:
        for row in rows:
            try:
                with limited(row):
                    pixels = read(row)
            except UnreadableImage as error:
                done.append((row, str(error)))
                continue
            with end.get_lock():
                offset = int(end.value)
                end.value += pixels.nbytes
            file.seek(offset)
            rest = np.ascontiguousarray(pixels).reshape(-1).data
            checksum = zlib.crc32(rest)
            while len(rest):
                rest = rest[file.write(rest) :]
            done.append((row, (offset, pixels.shape[0], pixels.shape[1], checksum)))
            samples.append(sample_rows(pixels))
    return done, perceptual_hashes(samples)


def find_stores(folder: Path) -> list[PixelStore]:
    """The stores in a cache folder, or the one that ``folder`` is itself."""
    return [
        PixelStore(path.parent) for depth in ("", "*/", "*/*/") for path in sorted(folder.glob(f"{depth}index.npz"))
    ]


def verify_stores(stores: Sequence[PixelStore]) -> Iterator[tuple[str, str]]:
    """The folder and state of each store: "ok", "not covered", or "changed: ..." with what is wrong."""
    for store in stores:
        index = store.read()
        damage = "the index, or the length of the pixels"
        yield str(store.folder), f"changed: {damage}" if index is None else _store_state(store, index)


def _store_state(store: PixelStore, index: StoreIndex) -> str:
    pixels, covered = store.map_pixels(index), index.entries["checksum"] != _NOT_COVERED
    located = zip(index.entries[covered], index.lengths[covered].tolist(), strict=True)
    damaged = sum(zlib.crc32(pixels[e["offset"] : e["offset"] + length].data) != e["checksum"] for e, length in located)
    if damaged:
        return f"changed: {damaged:,} of {len(index.entries):,} images"
    return "ok" if covered.all() else "not covered"
