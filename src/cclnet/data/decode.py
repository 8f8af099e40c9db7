"""Every image decoded once: uint8 RGB with one short side, in one flat buffer that all runs share."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cclnet.data.fill import fill, open_rows
from cclnet.data.parallel import available_cores
from cclnet.data.pixels import UnreadableImage
from cclnet.data.resize import read_resized, resize, resized_shape
from cclnet.data.store import CHANNELS, PixelStore, entries_of, entries_of_array, place
from cclnet.data.table import ImageTable
from cclnet.errors import InputError

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
