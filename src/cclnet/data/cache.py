"""Every image decoded once: uint8 RGB with one short side, in one flat buffer that all runs share."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console

from cclnet.data.image_io import UnreadableImage, read_resized, resize, resized_shape
from cclnet.data.parallel import available_cores, counting_images, shared_integer, spread
from cclnet.data.table import ImageTable
from cclnet.errors import InputError
from cclnet.files import write_whole

# Decoded images on disk: one flat file of pixels that only grows, and a small index that says what is where.
#
#     pixels-TOKEN.bin   the pixels, image after image
#     index.npz          which images are in there; it only ever names pixels that are safely on the disk
#     progress.npz       the same while images are being added, so that a killed run goes on where it was
#
# A reader needs no lock: it sees the last index that was written whole, and the pixels it names never change. Writers
# take turns. What a killed writer left behind the pixels of its last index is cut off by the next one.


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


# Decode the images that a store does not hold yet, on all cores, and come through being killed or a full disk.


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


# To be raised when read_resized gives other pixels than before: older caches are then left alone.
_FORMAT = 1
_MOST_IN_MEMORY = 2**30  # bytes that images from an array may take in memory; beyond, they go through the cache


@dataclass(frozen=True)
class DecodedImages:
    """N images of any shape in one flat buffer.

    Attributes:
        pixels: uint8, one dimension; in memory or mapped from a file. The images lie in it in any order, and it
            may hold others as well.
        offsets: where each image begins, int64 [N].
        heights, widths: int32 [N]. Image i is ``pixels[offset : offset + height * width * 3]`` as [H, W, 3], RGB.
    """

    pixels: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    heights: npt.NDArray[np.int32]
    widths: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.offsets)

    def image(self, index: int) -> npt.NDArray[np.uint8]:
        """One image, [H, W, 3], without copying it."""
        height, width, offset = int(self.heights[index]), int(self.widths[index]), int(self.offsets[index])
        return self.pixels[offset : offset + height * width * CHANNELS].reshape(height, width, CHANNELS)

    @classmethod
    def from_array(cls, array: npt.NDArray[np.uint8]) -> DecodedImages:
        """Images that are in memory already, [N, H, W] or [N, H, W, 1 or 3]. RGB is not copied.

        >>> DecodedImages.from_array(np.zeros((5, 4, 6), np.uint8)).image(2).shape
        (4, 6, 3)
        """
        if array.dtype != np.uint8 or array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[3] not in (1, 3)):
            raise InputError(
                f"images in an array are uint8 [N, H, W] or [N, H, W, 1 or 3]; got {array.dtype} {list(array.shape)}."
            )
        coloured = array if array.ndim == 4 else array[..., None]
        rgb = coloured if coloured.shape[3] == CHANNELS else np.repeat(coloured, CHANNELS, axis=3)
        count, height, width, _ = rgb.shape
        return cls(
            np.ascontiguousarray(rgb).reshape(-1),
            np.arange(count, dtype=np.int64) * (height * width * CHANNELS),
            np.full(count, height, dtype=np.int32),
            np.full(count, width, dtype=np.int32),
        )


def decode(
    table: ImageTable,
    short_side: int = 256,
    cache_dir: Path | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> DecodedImages:
    """The images of a table as uint8 RGB with the given short side, decoded now or taken from the cache.

    Images keep their shape and are made smaller or larger: larger too, so that every crop fits. Broken images are
    named in one error, all of them. A run that was killed goes on where it was.

    Args:
        cache_dir: where decoded images are kept. Default: ``cclnet`` in the cache folder of the user
            (``$XDG_CACHE_HOME``, else ``~/.cache``). Images that came as an array stay in memory, unless resizing them
            takes more than a gigabyte.
        workers: processes to decode with. Default: one for each core that this process may use.
    """
    images, broken = decode_readable(table, short_side, cache_dir, workers, progress)
    if broken:
        some = "".join(f"\n  {reason}" for reason in list(broken.values())[:20])
        more = f"\n  and {len(broken) - 20} more" if len(broken) > 20 else ""
        raise InputError(
            f"{len(broken)} of {len(table)} images cannot be used:{some}{more}\n"
            "Replace these files or leave them out (`cclnet data audit` writes a list of all). The other images are "
            "kept and will not be decoded again."
        )
    return images


def decode_readable(
    table: ImageTable,
    short_side: int = 256,
    cache_dir: Path | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> tuple[DecodedImages, dict[int, str]]:
    """As :func:`decode`, but broken images come back with height and width 0, and a reason for each such row."""
    if short_side < 1:
        raise InputError(f"short_side is in pixels, at least 1; got {short_side}.")
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1; got {workers}.")
    if isinstance(table.images, np.ndarray):
        if (in_memory := _kept_in_memory(table.images, short_side)) is not None:
            return in_memory, {}
        entries, broken = entries_of_array(table.images), {}
    else:
        entries, missing = entries_of(table.images, table.root)
        broken = {row: str(UnreadableImage(table.images[row], reason)) for row, reason in missing.items()}

    def read(row: int) -> npt.NDArray[np.uint8]:
        image = table.images[row]
        return _resized(image, short_side) if isinstance(image, np.ndarray) else read_resized(image, short_side)

    store = PixelStore(_store_folder(table.root, short_side, cache_dir))
    content = store.read()
    if content is None or open_rows(place(entries, content.entries), broken):
        content = fill(store, entries, read, broken, workers or available_cores(), progress)
    placed = place(entries, content.entries)
    images = DecodedImages(
        store.map_pixels(content), *(np.ascontiguousarray(placed[field]) for field in ("offset", "height", "width"))
    )
    return images, dict(sorted(broken.items()))


def _kept_in_memory(array: npt.NDArray[np.uint8], short_side: int) -> DecodedImages | None:
    """Images from an array, as they are where they fit; None where that would need much more memory."""
    if len(array) == 0:
        return DecodedImages.from_array(array)
    height, width = resized_shape(array.shape[1], array.shape[2], short_side)
    as_it_is = array.shape[1:] == (height, width, CHANNELS)
    if not as_it_is and len(array) * height * width * CHANNELS > _MOST_IN_MEMORY:
        return None
    if array.shape[1:3] == (height, width):
        return DecodedImages.from_array(array)
    return DecodedImages.from_array(np.stack([_resized(image, short_side) for image in array]))


def _resized(image: npt.NDArray[np.uint8], short_side: int) -> npt.NDArray[np.uint8]:
    rgb = DecodedImages.from_array(image[None]).image(0)
    return resize(rgb, *resized_shape(rgb.shape[0], rgb.shape[1], short_side))


def _store_folder(root: Path, short_side: int, cache_dir: Path | None) -> Path:
    """One folder for each data folder and short side, with a name that a person who cleans up can read."""
    if cache_dir is None:
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cclnet"
    where = hashlib.blake2b(f"{_FORMAT} {root.resolve()}".encode("utf-8", "surrogateescape"), digest_size=4)
    readable = re.sub(r"[^\w.-]+", "_", root.resolve().name)[:40] or "data"
    return Path(cache_dir) / "decoded" / f"{readable}-{where.hexdigest()}-{short_side}"
