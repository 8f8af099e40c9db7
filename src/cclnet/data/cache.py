"""The cache of decoded images: every image is decoded once to uint8 RGB with one short side, shared by all runs.

A store is one folder with

    shard-FIRST-END-TOKEN.bin   the pixels of some of the images of a table, then an index of them with a checksum each
    lock                        an empty file, of which writers lock the bytes FIRST to END while they decode these rows

A shard is written under another name, flushed and renamed, so that it is whole or absent, and never changes. Readers
need no lock: they read the indexes of all shards, and map the pixels of those they need. Any number of processes, also
on several nodes that share the folder, write at once: each decodes the rows that no other has locked, and a killed one
loses the shard that it was writing. Where locks do not work, some images are decoded twice.

The pixels of an image are compared with their checksum when they are first read. It is a CRC-32, which detects every
change of up to 32 bits in a row and misses one of 2^32 others, and runs at over a gigabyte per second. The index of a
shard has a checksum, too.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import re
import secrets
import struct
import sys
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console

from cclnet.data.archives import ArchivedImages
from cclnet.data.duplicates import HASHED, VERSION, hash_images, perceptual_hashes, sample_rows
from cclnet.data.image_io import RGB, UnreadableImage, read_resized, resize, resized_shape
from cclnet.data.parallel import available_cores, counting_images, in_order, limited
from cclnet.data.table import ImageTable
from cclnet.errors import InputError
from cclnet.files import PARTIAL, cache_folder, write_problem

# An image file is identified by its name below the data folder, and unchanged while size and modification time are the
# same, as in make and rsync. Hashing its content would mean reading every file at every start.
ENTRY = np.dtype([("name", "<u8"),  # a hash of the name
                  ("key", "<u8"),  # a hash of name, size and modification time
                  ("offset", "<i8"), ("height", "<i4"), ("width", "<i4"), ("checksum", "<u4"),
                  *HASHED.descr])  # fmt: skip
Entries = npt.NDArray[np.void]
CHANNELS = 3
_FORMAT = 2  # increase when read_resized returns other pixels than before: older caches are then ignored
_SINGLE_FILE_FORMAT = 1  # of the caches with one pixel file and index.npz
_MAX_IN_MEMORY = 2**30  # bytes that resized images from an array may take in memory; larger sets go through the cache
SHARD_BYTES = 2**28  # of pixels, about
_FEWEST_IN_SHARD = 8  # images, so that small sets are divided between the workers
_MOST_SHARDS = 256  # of a set that is smaller than this many full shards
_TRAILER = struct.Struct("<8sQII")  # at the end of a shard: magic, bytes of the index, its checksum, entries
_MAGIC = b"cclshard"
_CHECKED = -1  # in DecodedImages.unchecked


@dataclass(frozen=True)
class DecodedImages:
    """N images of any shape in one flat buffer: image i is ``pixels[offset : offset + height * width * 3]``, RGB."""

    pixels: RGB  # uint8, one dimension, in memory or memory-mapped; the images in any order, and maybe others
    offsets: npt.NDArray[np.int64]  # [N], as heights and widths
    heights: npt.NDArray[np.int32]
    widths: npt.NDArray[np.int32]
    # Checksums that are still to be compared, [N]; -1 where it was found right.
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
        for row in rows[self.unchecked[rows] != _CHECKED].tolist():
            if (expected := int(self.unchecked[row])) == _CHECKED:
                continue  # a row that is there twice, or was checked by another thread
            if zlib.crc32(self._bytes(row).data) != expected:
                raise InputError(
                    f"the decoded pixels of image {row} in {self.folder} are damaged: their checksum differs. Remove "
                    "this folder, and check the disk: the images are then decoded again. `cclnet verify` lists the "
                    "damage."
                )
            self.unchecked[row] = _CHECKED

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
        for row, image in enumerate(table.images):
            entries["name"][row], entries["key"][row] = _hashes(image.tobytes())
    else:
        entries, missing = file_entries(table.images, table.root)
        broken = {row: unreadable(row, reason) for row, reason in missing.items()}

    def read(row: int) -> RGB:
        image = table.images[row]
        return _resize_array(image, short_side) if isinstance(image, np.ndarray) else read_resized(image, short_side)

    store = PixelStore(_store_folder(table.root, short_side, cache_dir))
    index = store.read()
    if len(_missing_rows(locate_entries(entries, index), broken)):
        console = Console(stderr=True, quiet=not progress)
        if (older := _store_folder(table.root, short_side, cache_dir, _SINGLE_FILE_FORMAT)).is_dir():
            console.print(f"The decoded images in {older} are those of an earlier version. Remove this folder.")
        try:
            store.folder.mkdir(parents=True, exist_ok=True)
            writing = _Writing(store, entries, read, short_side, workers or available_cores())
            index = writing.add_missing(index, broken, unreadable, console)
        except OSError as error:
            raise InputError(
                f"cannot write decoded images to {store.folder}: {write_problem(store.folder, error)}. What was "
                "decoded before is kept. Free some space, or choose another folder with --cache-dir (cache_dir)."
            ) from error
    images = _images_of(store, index, locate_entries(entries, index))
    _hash_older(images, workers or available_cores())
    return images, dict(sorted(broken.items()))


def _images_of(store: PixelStore, index: StoreIndex, found: npt.NDArray[np.int64]) -> DecodedImages:
    """Return the images at positions ``found`` of the index, -1 for none."""
    entries = np.zeros(len(found), ENTRY)
    entries[found >= 0] = index.entries[found[found >= 0]]
    shard = np.full(len(found), -1, np.int64)
    shard[found >= 0] = index.shard[found[found >= 0]]
    used = np.unique(shard[shard >= 0])
    pixels, starts = map_shards([index.paths[i] for i in used], [index.lengths[i] for i in used])
    offsets = entries["offset"].astype(np.int64)
    offsets[shard >= 0] += starts[np.searchsorted(used, shard[shard >= 0])]
    heights, widths = (np.ascontiguousarray(entries[field]) for field in ("height", "width"))
    checksums = np.where(shard >= 0, entries["checksum"].astype(np.int64), _CHECKED)
    return DecodedImages(pixels, offsets, heights, widths, checksums, store.folder, entries[list(HASHED.names or ())])


def _hash_older(images: DecodedImages, workers: int) -> None:
    """Hash the images that were decoded by a version with another hash."""
    assert images.hashed is not None
    rows = np.flatnonzero((images.heights > 0) & (images.hashed["version"] != VERSION))
    if len(rows):
        images.hashed[rows] = hash_images(images, rows.tolist(), workers)


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


def _store_folder(root: Path, short_side: int, cache_dir: Path | None, version: int = _FORMAT) -> Path:
    """Return the folder for one data folder and short side, with a name that a person who cleans up can read."""
    digest = hashlib.blake2b(f"{version} {root.resolve()}".encode("utf-8", "surrogateescape"), digest_size=4)
    readable = re.sub(r"[^\w.-]+", "_", root.resolve().name)[:40] or "data"
    return cache_folder(cache_dir) / "decoded" / f"{readable}-{digest.hexdigest()}-{short_side}"


def _hashes(content: bytes) -> tuple[int, int]:
    return struct.unpack("<QQ", hashlib.blake2b(content, digest_size=16).digest())


def file_entries(paths: Sequence[Path], root: Path) -> tuple[Entries, dict[int, str]]:
    """Return one entry per file with its name and key only, and the error of each missing file. An image in an archive
    has the time of the archive."""
    entries = np.zeros(len(paths), ENTRY)
    missing: dict[int, str] = {}
    base, archived = os.fspath(root), paths if isinstance(paths, ArchivedImages) else None
    times = {} if archived is None else {archive: _time_of(archive) for archive in archived.archives}
    for row in range(len(paths)):
        path = os.fspath(paths[row]) if archived is None else archived.text(row)
        try:
            if archived is None:
                status = os.stat(path)  # noqa: PTH116 (creating a Path for each of a million files takes seconds)
                size, changed = status.st_size, status.st_mtime_ns
            else:
                size = 0 if archived.size is None else int(archived.size[row])
                changed = times[archived.archives[archived.archive[row]]]
                if changed < 0:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        except OSError as error:
            missing[row] = error.strerror or str(error)
            continue
        name = path.removeprefix(base).encode("utf-8", "surrogateescape")
        entries["name"][row] = _hashes(name)[0]
        entries["key"][row] = _hashes(b"%s\0%d\0%d" % (name, size, changed))[1]
    return entries, missing


def _time_of(archive: str) -> int:
    """Return the modification time of an archive, -1 if it is gone."""
    try:
        return os.stat(archive).st_mtime_ns  # noqa: PTH116
    except OSError:
        return -1


@dataclass(frozen=True)
class StoreIndex:
    """The images in the shards of a store."""

    paths: list[Path]
    lengths: list[int]  # bytes of pixels of each shard
    entries: Entries
    shard: npt.NDArray[np.int32]  # of each entry


def locate_entries(entries: Entries, index: StoreIndex) -> npt.NDArray[np.int64]:
    """Return the position in the index of each unchanged image, -1 where there is none."""
    if len(index.entries) == 0:
        return np.full(len(entries), -1, np.int64)
    order = np.argsort(index.entries["key"], kind="stable")
    keys = index.entries["key"][order]
    at = order[np.minimum(np.searchsorted(keys, entries["key"]), len(keys) - 1)]
    same = (index.entries["key"][at] == entries["key"]) & (index.entries["name"][at] == entries["name"])
    return np.where(same, at, -1)


def _missing_rows(found: npt.NDArray[np.int64], broken: dict[int, str]) -> npt.NDArray[np.intp]:
    """Return the rows that are neither in the store nor known as broken."""
    missing = found < 0
    missing[list(broken)] = False
    return np.flatnonzero(missing)


class Shard(NamedTuple):
    """The index of one shard."""

    entries: Entries
    length: int  # bytes of pixels


def read_shard(path: Path) -> Shard | None:
    """Return the index of a shard, or None if it is damaged or gone."""
    try:
        with path.open("rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TRAILER.size))
            magic, length, checksum, count = _TRAILER.unpack(file.read(_TRAILER.size))
            pixels = size - _TRAILER.size - length
            if magic != _MAGIC or pixels < 0 or length != count * ENTRY.itemsize:
                return None
            file.seek(pixels)
            content = file.read(length)
    except (FileNotFoundError, NotADirectoryError, struct.error):
        return None
    if zlib.crc32(content) != checksum:
        return None
    entries = np.frombuffer(content, ENTRY)
    ends = entries["offset"] + _sizes(entries)
    if count and (entries["offset"].min() < 0 or _sizes(entries).min() <= 0 or ends.max() > pixels):
        return None
    return Shard(entries, pixels)


def _sizes(entries: Entries) -> npt.NDArray[np.int64]:
    """Return the bytes of each image."""
    return entries["height"].astype(np.int64) * entries["width"] * CHANNELS


def map_shards(paths: Sequence[Path], lengths: Sequence[int]) -> tuple[RGB, npt.NDArray[np.int64]]:
    """Map the pixels of shards one behind the other in one range of addresses, so that they are one array, and return
    it with the start of each. Shards begin at multiples of a page. The files may be removed afterwards.

    numpy and Python map a file wherever the system puts it; only the system call itself takes an address. Where there
    is none (Windows), the pixels are read into the memory.
    """
    page = mmap.ALLOCATIONGRANULARITY
    rounded = np.array([-(-length // page) * page for length in lengths], dtype=np.int64)
    starts, total = np.cumsum(rounded) - rounded, int(rounded.sum())
    if total == 0:
        return np.zeros(0, np.uint8), starts
    if sys.platform == "win32":
        pixels = np.zeros(total, np.uint8)
        for path, start, length in zip(paths, starts.tolist(), lengths, strict=True):
            pixels[start : start + length] = np.memmap(path, np.uint8, mode="r", shape=(length,))
        return pixels, starts
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.munmap.restype = ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    fixed = 0x10  # MAP_FIXED, the same on Linux and macOS

    def map_at(address: int | None, length: int, protection: int, flags: int, descriptor: int) -> int:
        found = libc.mmap(address, length, protection, flags, descriptor, 0)
        if found is None or found == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return int(found)

    base = map_at(None, total, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    memory = (ctypes.c_uint8 * total).from_address(base)
    weakref.finalize(memory, libc.munmap, base, total)
    for path, start, length in zip(paths, starts.tolist(), lengths, strict=True):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if length:
                map_at(base + start, length, mmap.PROT_READ, mmap.MAP_SHARED | fixed, descriptor)
        finally:
            os.close(descriptor)
    pixels = np.frombuffer(memoryview(memory), np.uint8)
    pixels.flags.writeable = False
    return pixels, starts


@dataclass(frozen=True)
class PixelStore:
    """The shards in one folder. Failures to write are raised as OSError."""

    folder: Path

    def shard_paths(self) -> list[Path]:
        return sorted(self.folder.glob("shard-*.bin"))

    def read(self) -> StoreIndex:
        """Return the images in the shards that are whole."""
        found = [(path, shard) for path in self.shard_paths() if (shard := read_shard(path)) is not None]
        counts = [len(shard.entries) for _, shard in found]
        entries = np.concatenate([np.zeros(0, ENTRY), *(shard.entries for _, shard in found)])
        of_entry = np.repeat(np.arange(len(found), dtype=np.int32), counts)
        return StoreIndex([path for path, _ in found], [shard.length for _, shard in found], entries, of_entry)

    def keys_of_rows(self, first: int, end: int, besides: frozenset[str]) -> set[int]:
        """Return the keys in the shards of rows from ``first`` to ``end`` whose names are not in ``besides``."""
        found: set[int] = set()
        for path in self.shard_paths():
            rows = path.name.split("-")[1:3]
            if path.name not in besides and int(rows[0]) < end and int(rows[1]) > first:
                shard = read_shard(path)
                found.update([] if shard is None else shard.entries["key"].tolist())
        return found

    def write(self, first: int, end: int, run: str, fill: Callable[[BinaryIO], Entries]) -> None:
        """Write a shard of rows from ``first`` to ``end`` whole: ``fill`` writes the pixels and returns the entries.
        ``run`` is part of its name until then."""
        partial_path = self.folder / f".shard-{run}-{first:09d}{PARTIAL}"
        try:
            with partial_path.open("wb", buffering=0) as file:
                entries = fill(file)
                index = entries.tobytes()
                _write_all(file, index + _TRAILER.pack(_MAGIC, len(index), zlib.crc32(index), len(entries)))
                os.fsync(file.fileno())
            if len(entries):
                partial_path.replace(self.folder / f"shard-{first:09d}-{end:09d}-{secrets.token_hex(4)}.bin")
        finally:
            partial_path.unlink(missing_ok=True)

    def remove_damaged(self, index: StoreIndex) -> None:
        """Remove the shards that are not whole, with a warning for each. This needs no lock, because nobody reads
        them."""
        whole = set(index.paths)
        for path in self.shard_paths():
            if path not in whole and read_shard(path) is None and path.exists():
                warnings.warn(
                    f"{path} is damaged and was removed: its images are decoded again. Check the disk.", stacklevel=2
                )
                path.unlink(missing_ok=True)

    def remove_outdated(self, entries: Entries, index: StoreIndex) -> StoreIndex:
        """Remove the shards of which most pixels are of images that have changed since; return the rest of the index.
        Their other images are decoded again. Readers that have mapped them keep their pixels."""
        known = np.isin(index.entries["name"], entries["name"])
        outdated = known & ~np.isin(index.entries["key"], entries["key"])
        size, count = _sizes(index.entries), len(index.paths)
        bytes_of = np.bincount(index.shard, size, count), np.bincount(index.shard, size * outdated, count)
        removed = bytes_of[1] > 0.5 * bytes_of[0]
        if not removed.any():
            return index
        for i in np.flatnonzero(removed):
            index.paths[i].unlink(missing_ok=True)
        return self.read()

    def remove_partial(self, run: str = "*") -> None:
        """Remove the unfinished shards of a run whose processes have ended, by default of all runs."""
        for path in self.folder.glob(f".shard-{run}-*{PARTIAL}"):
            path.unlink(missing_ok=True)

    @contextmanager
    def lock(self, first: int, end: int, wait: bool) -> Iterator[bool]:
        """Lock rows against other writers of the same table, and yield whether that succeeded. The lock is released
        when the process ends, however it ends."""
        if sys.platform == "win32":
            from filelock import FileLock, Timeout

            try:
                with FileLock(self.folder / "lock", timeout=-1 if wait else 0):
                    yield True
            except Timeout:
                yield False
            return
        import fcntl

        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            locked = True
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), end - first, first)
            except OSError as error:
                # A file system without locks: better twice than not at all.
                locked = error.errno not in (errno.EAGAIN, errno.EACCES)
            yield locked
        finally:
            os.close(descriptor)


def _write_all(file: BinaryIO, content: bytes | memoryview) -> None:
    rest = memoryview(content)
    while len(rest):
        rest = rest[file.write(rest) :]


class _Block(NamedTuple):
    """What a worker did with the rows of one block."""

    rows: list[int]  # that are done: stored, broken, or found in the shard of another process
    broken: dict[int, str]
    busy: list[int]  # rows that another process is decoding


class _Writing:
    """Adds the images that a store lacks, on all cores and beside other processes. A block of rows becomes a shard."""

    def __init__(
        self, store: PixelStore, entries: Entries, read: Callable[[int], RGB], short_side: int, workers: int
    ) -> None:
        self.store, self.entries, self.read, self.workers = store, entries, read, workers
        self.most = max(1, SHARD_BYTES // (CHANNELS * short_side * short_side))  # images in a shard
        self.size = 1  # rows of a block
        self.before: frozenset[str] = frozenset()  # the shards that were there
        self.run = secrets.token_hex(4)

    def add_missing(
        self, index: StoreIndex, broken: dict[int, str], unreadable: Callable[[int, str], str], console: Console
    ) -> StoreIndex:
        """Decode the missing images and return the new index. Rows for which ``read`` raises UnreadableImage, in a
        worker, are added to ``broken``, as are those that end their worker, which ``unreadable`` describes. After any
        interruption the next run decodes what is still missing."""
        self.store.remove_damaged(index)
        with self.store.lock(0, len(self.entries), wait=False) as alone:
            if alone:
                index = self.store.remove_outdated(self.entries, index)
                self.store.remove_partial()  # of runs that were killed
        self.before = frozenset(path.name for path in index.paths)
        rows = _missing_rows(locate_entries(self.entries, index), broken)
        in_shard = min(self.most, max(_FEWEST_IN_SHARD, -(-len(rows) // _MOST_SHARDS)))
        self.size = -(-in_shard * len(self.entries) // max(1, len(rows)))  # many rows where few are missing
        done = len(self.entries) - len(rows)
        with counting_images("Decoding", len(self.entries), done, not console.quiet and len(rows) > 0) as count:

            def fail(row: int, reason: str) -> _Block:
                return _Block([row], {row: unreadable(row, reason)}, [])

            def decode_blocks(rows: npt.NDArray[np.intp], wait: bool) -> list[int]:
                blocks = [b.tolist() for b in np.split(rows, np.flatnonzero(np.diff(rows // self.size)) + 1) if len(b)]
                # Processes that start together begin at different blocks.
                first = 0 if wait else int.from_bytes(os.urandom(4), "little") % max(1, len(blocks))
                work, busy = partial(self.decode_block, wait), list[int]()
                workers = min(self.workers, len(blocks))
                for result in (
                    in_order(work, blocks[first:] + blocks[:first], workers, 2 * workers, fail) if blocks else ()
                ):
                    broken.update(result.broken)
                    busy += result.busy
                    count(len(result.rows))
                return busy

            try:
                if busy := decode_blocks(rows, wait=False):
                    console.print("Another run is decoding these images. Waiting for it.")
                    decode_blocks(np.array(sorted(busy), np.intp), wait=True)
            except BrokenProcessPool as error:
                raise InputError(
                    "a process that decodes images was killed, probably because memory ran out. Run again with fewer "
                    "workers; the finished images are kept."
                ) from error
            finally:
                self.store.remove_partial(self.run)  # of workers that were stopped
        with self.store.lock(0, len(self.entries), wait=False) as alone:
            if alone:
                self.store.remove_partial()  # of runs that were killed when this one began
        return self.store.read()

    def decode_block(self, wait: bool, rows: list[int]) -> _Block:
        """Decode rows of one block in a worker and write them as a shard."""
        first = rows[0] // self.size * self.size
        end, broken = min(first + self.size, len(self.entries)), dict[int, str]()
        with self.store.lock(first, end, wait) as locked:
            if not locked:
                return _Block([], {}, rows)
            stored = self.store.keys_of_rows(first, end, self.before)  # since this run began
            left = [row for row in rows if int(self.entries["key"][row]) not in stored]
            if left:
                self.store.write(first, end, self.run, lambda file: self.write_images(file, left, broken))
        return _Block(rows, broken, [])

    def write_images(self, file: BinaryIO, rows: list[int], broken: dict[int, str]) -> Entries:
        """Write the pixels of images, and return their entries with the hashes, because the pixels are at hand here."""
        entries, samples, kept, offset = self.entries[rows], list[RGB](), list[int](), 0
        for i, row in enumerate(rows):
            try:
                with limited(row):
                    pixels = np.ascontiguousarray(self.read(row))
            except UnreadableImage as error:
                broken[row] = str(error)
                continue
            content = pixels.reshape(-1).data
            _write_all(file, content)
            for field, value in (("offset", offset), ("height", pixels.shape[0]), ("width", pixels.shape[1]),
                                 ("checksum", zlib.crc32(content))):  # fmt: skip
                entries[field][i] = value
            offset += pixels.nbytes
            samples.append(sample_rows(pixels))
            kept.append(i)
        entries, hashed = entries[kept], perceptual_hashes(samples)
        for field in HASHED.names or ():
            entries[field] = hashed[field]
        return entries


def find_stores(folder: Path) -> list[PixelStore]:
    """The stores in a cache folder, or the one that ``folder`` is itself; those of an earlier version, too."""
    found = {path.parent for depth in ("", "*/", "*/*/") for name in ("shard-*.bin", "index.npz")
             for path in folder.glob(f"{depth}{name}")}  # fmt: skip
    return [PixelStore(path) for path in sorted(found)]


def verify_stores(stores: Sequence[PixelStore]) -> Iterator[tuple[str, str]]:
    """The folder and state of each store: "ok", "not covered", or "changed: ..." with what is wrong."""
    for store in stores:
        if (store.folder / "index.npz").exists():
            yield str(store.folder), "not covered: of an earlier version and no longer used. Remove this folder"
        else:
            yield str(store.folder), _store_state(store)


def _store_state(store: PixelStore) -> str:
    images = damaged = broken_shards = 0
    for path in store.shard_paths():
        if (shard := read_shard(path)) is None:
            broken_shards += 1
            continue
        pixels = np.memmap(path, np.uint8, mode="r", shape=(shard.length,))
        images += len(shard.entries)
        for entry, size in zip(shard.entries, _sizes(shard.entries).tolist(), strict=True):
            damaged += zlib.crc32(pixels[entry["offset"] : entry["offset"] + size].data) != entry["checksum"]
    if broken_shards:
        return f"changed: the index or the length of {broken_shards:,} shards, and {damaged:,} of {images:,} images"
    return f"changed: {damaged:,} of {images:,} images" if damaged else "ok"
