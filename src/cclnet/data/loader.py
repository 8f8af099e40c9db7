"""Loader: batches of uint8 crops on the device.

Batches are identical whatever the device, the number of ranks, where the pixels are stored and where a run was
interrupted, because no random state is kept between batches: the order of an epoch depends on (seed, epoch) and the
augmentation of a batch on (seed, epoch, step). Both are computed for the global batch; each rank takes its rows.

The order of an epoch is a random permutation of all images. For a set that no memory holds, that would read single
images from all over the disk. So for more than ``SHUFFLE_BYTES`` of pixels the order is random in two steps: groups of
neighbouring images, from all shards of the cache, in random order; then the images of a window of several hundred
groups, which fits into the memory, in random order. Neighbours in the table are neighbours on the disk.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cclnet.data.augment import sample_parameters
from cclnet.data.parallel import available_cores, in_advance
from cclnet.errors import InputError
from cclnet.settings import AugmentSettings

if TYPE_CHECKING:
    from cclnet.data.cache import DecodedImages

Rows = npt.NDArray[np.integer[Any]]
Item = TypeVar("Item", bound="tuple[Any, ...]")

RESIDENT_SHARE = 0.6  # of the free device memory that pixels may take before they are streamed
CHUNK_BYTES = 2**24  # copied to the device at a time; small, so that the same staging memory is reused
SHUFFLE_BYTES = 2**36  # of pixels, up to which an epoch is one permutation of all images
WINDOW_BYTES = 2**33  # of pixels that are shuffled with each other in a larger set
GROUP_BYTES = 2**24  # of pixels that are read together
PADDING_LIMIT = 4.0  # warn when the frame around all images has more than this many times the median area


class Batch(NamedTuple):
    """The rows of one rank in a batch, on the device."""

    # Input of `augment` (training) or `normalise` (evaluation), uint8 [n, h, w, 3]. With mixup or cutmix there is one
    # more in front, whose label and row are not in the batch.
    crops: Tensor
    parameters: Tensor | None  # the table that `augment` takes; None in evaluation
    labels: Tensor  # class indices, int64 [n]; or float32 [n, K] for multi-label data or mixed images
    weight: Tensor | None  # sample weights, float32 [n]
    rows: npt.NDArray[np.int64]  # indices of the images, on the host


class Loader:
    """Batches of the images in ``rows``.

    With ``augment`` it is a training loader: a new order every epoch, random crops, and only full batches, so that
    every batch has one shape. A set smaller than one batch is one batch. Without ``augment`` it is an evaluation
    loader: images in the order of ``rows``, central crops, each image once on one rank; the ranks concatenated give
    the order of ``rows``.
    """

    def __init__(
        self,
        images: DecodedImages,
        labels: npt.NDArray[Any],  # of all images: class indices [N], or zeros and ones [N, K]
        rows: Rows | Sequence[int],  # the images to load
        *,
        batch_size: int,  # over all ranks together
        augment: AugmentSettings | None = None,
        crop: int | None = None,  # side of the crop, where augment does not give it
        num_classes: int | None = None,  # needed for mixing class indices (mixup, cutmix)
        weights: npt.NDArray[np.floating[Any]] | None = None,  # of all images [N], passed on in the batches
        balanced: bool = False,  # sample an epoch with replacement, every class equally often
        seed: int = 0,  # of order and augmentation
        device: torch.device | str = "cpu",
        resident: bool | None = None,  # keep the pixels on the device; None: on a GPU, where they fit
        workers: int | None = None,  # threads that prefetch while streaming; default: four on a GPU, one on a CPU
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.images, self.augment, self.seed = images, augment, seed
        self.device = torch.device(device)
        self.rank, self.world_size = rank, world_size
        self.rows = np.asarray(rows).astype(np.int64)
        self.labels = np.asarray(labels)
        self.num_classes = self.labels.shape[1] if self.labels.ndim == 2 else num_classes
        self.weights = None if weights is None else np.asarray(weights, dtype=np.float32)
        self.crop = _crop_side(augment, crop)
        self._check(batch_size)
        self.batch_size = _training_batch_size(len(self.rows), batch_size, world_size) if augment else batch_size
        self._cumulative = _balanced_probabilities(self.labels[self.rows]) if balanced else None
        self._frame = int(images.heights[self.rows].max()), int(images.widths[self.rows].max())
        if augment and augment.warps and self.device.type == "cuda":
            _warn_of_padding(self._frame, images.heights[self.rows], images.widths[self.rows])
        self.resident = self._fits() if resident is None else resident
        self._pixels = (
            ResidentPixels(images, self.rows, self.device) if self.resident else StreamedPixels(images, self.device)
        )
        on_gpu = self.device.type == "cuda"
        # On a CPU training needs the cores, and one thread is fast enough.
        self._workers = 0 if self.resident else workers or (min(4, available_cores()) if on_gpu else 1)
        self._stream = side_stream("batches", self.device) if on_gpu else None

    def __len__(self) -> int:
        """Return the number of batches per epoch (of this rank)."""
        if self.augment:
            return len(self.rows) // self.batch_size
        return -(-len(self._rank_rows()) // (self.batch_size // self.world_size))

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of an epoch, beginning with batch ``start``."""
        if epoch < 0 or not 0 <= start <= len(self):
            raise InputError(f"expected epoch >= 0 and start from 0 to {len(self)}, got epoch {epoch}, start {start}.")
        make: Callable[[int], Batch] = partial(self._evaluation_batch, self._rank_rows())
        if self.augment:
            make = partial(self._training_batch, self.augment, self._order(epoch), epoch)
        return prefetch(make, range(start, len(self)), self._workers, self._stream)

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=key))

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the global order of a training epoch."""
        generator = self._generator(epoch)
        if self._cumulative is None:
            return shuffled(self.rows, self._pixel_bytes(), generator)
        sampled = np.searchsorted(self._cumulative, generator.random(len(self.rows)), side="right")
        return self.rows[np.minimum(sampled, len(self.rows) - 1)]

    def _rank_rows(self) -> npt.NDArray[np.int64]:
        """Return the rows that this rank evaluates."""
        count = len(self.rows)
        return self.rows[count * self.rank // self.world_size : count * (self.rank + 1) // self.world_size]

    def _training_batch(self, settings: AugmentSettings, order: npt.NDArray[np.int64], epoch: int, step: int) -> Batch:
        share = self.batch_size // self.world_size
        # An image is mixed with the previous one of the global batch, which may belong to another rank.
        taken = np.arange(self.rank * share - settings.mixes, (self.rank + 1) * share) % self.batch_size
        rows = order[step * self.batch_size + taken]
        heights, widths = self.images.heights[rows].astype(np.int64), self.images.widths[rows].astype(np.int64)
        sampled = sample_parameters(settings, self._generator(epoch, step), self.batch_size, taken, heights, widths)
        if settings.warps:
            # Compiled steps need one shape; elsewhere one very wide image must not enlarge every batch.
            frame = self._frame if self.device.type == "cuda" else (int(heights.max()), int(widths.max()))
            crops = self._pixels.frames(rows, *frame)
        else:
            crops = self._pixels.crops(rows, sampled.top, sampled.left, self.crop)
        table = np.stack(sampled, axis=1).astype(np.float32)
        return self._batch(crops, table, rows, sampled.own_share(self.crop) if settings.mixes else None)

    def _evaluation_batch(self, order: npt.NDArray[np.int64], step: int) -> Batch:
        share = self.batch_size // self.world_size
        rows = order[step * share : (step + 1) * share]
        top = np.rint((self.images.heights[rows] - self.crop) / 2).astype(np.int64)
        left = np.rint((self.images.widths[rows] - self.crop) / 2).astype(np.int64)
        return self._batch(self._pixels.crops(rows, top, left, self.crop), None, rows, None)

    def _batch(self, crops: Tensor, table: Any, rows: npt.NDArray[np.int64], own_share: Any) -> Batch:
        labels = self.labels[rows].astype(np.int64 if self.labels.ndim == 1 else np.float32)
        weight = None if self.weights is None else self.weights[rows]
        if own_share is not None:
            if labels.ndim == 1:
                labels = np.eye(self.num_classes or 0, dtype=np.float32)[labels]
            labels, rows = _mix(labels, own_share[1:, None]), rows[1:]
            weight = None if weight is None else _mix(weight, own_share[1:])
        on_device = [None if array is None else upload(array, self.device) for array in (table, labels, weight)]
        return Batch(crops, on_device[0], cast(Tensor, on_device[1]), on_device[2], rows)

    def _fits(self) -> bool:
        """Return whether the pixels fit on the device beside training. On a CPU the page cache already holds the
        memory-mapped file, so nothing is copied."""
        if self.device.type != "cuda":
            return False
        free, _ = torch.cuda.mem_get_info(self.device)
        return self._pixel_bytes() <= RESIDENT_SHARE * free

    def _pixel_bytes(self) -> int:
        heights, widths = self.images.heights[self.rows].astype(np.int64), self.images.widths[self.rows]
        return int((3 * heights * widths).sum())

    def _check(self, batch_size: int) -> None:
        count = len(self.images)
        if len(self.labels) != count:
            raise InputError(f"expected {count} labels, one per image, got {len(self.labels)}.")
        if self.weights is not None and self.weights.shape != (count,):
            raise InputError(f"expected weights [{count}], one per image, got {list(self.weights.shape)}.")
        if self.weights is not None and not (np.isfinite(self.weights).all() and (self.weights >= 0).all()):
            raise InputError("sample weights must be finite and not negative.")
        if self.rows.ndim != 1 or not len(self.rows):
            raise InputError("there are no images to load: rows is empty. Check the sizes of the splits.")
        if self.rows.min() < 0 or self.rows.max() >= count:
            raise InputError(f"rows must be from 0 to {count - 1}, got {self.rows.min()} to {self.rows.max()}.")
        if self.seed < 0:
            raise InputError(f"seed must be 0 or more, got {self.seed}.")
        if not 0 <= self.rank < self.world_size:
            raise InputError(f"rank must be from 0 to {self.world_size - 1}, got {self.rank}.")
        if batch_size < 1 or batch_size % self.world_size:
            near = max(1, round(batch_size / self.world_size)) * self.world_size
            raise InputError(
                f"batch_size counts the images of all {self.world_size} processes and must be a multiple of their "
                f"number, got {batch_size}. Try {near}."
            )
        if self.labels.ndim != 2:
            if not np.issubdtype(self.labels.dtype, np.integer) or self.labels.ndim != 1:
                got = f"{self.labels.dtype} {list(self.labels.shape)}"
                raise InputError(f"labels must be class indices [N] or zeros and ones [N, K], got {got}.")
            if self.augment and self.augment.mixes:
                if self.num_classes is None:
                    raise InputError("mixup and cutmix need num_classes to mix class indices.")
                least, largest = self.labels.min(), self.labels.max()
                if least < 0 or largest >= self.num_classes:
                    raise InputError(f"labels must be from 0 to {self.num_classes - 1}, got {least} to {largest}.")
        sides = np.minimum(self.images.heights[self.rows], self.images.widths[self.rows])
        if (small := sides < self.crop).any() and not (self.augment and self.augment.resized_crop):
            row = self.rows[sides.argmin()]
            raise InputError(
                f"{small.sum()} of {len(self.rows)} images are smaller than the crop of {self.crop} pixels; the "
                f"smallest is {self.images.widths[row]} x {self.images.heights[row]} (row {row}). Decode "
                f"with short_side of at least {self.crop}, or set crop to at most {sides.min()}."
            )


def shuffled(rows: npt.NDArray[np.int64], size: int, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return ``rows``, which have ``size`` bytes of pixels, in the order of an epoch."""
    if size <= SHUFFLE_BYTES:
        return generator.permutation(rows)
    in_group, groups_in_window = -(-len(rows) * GROUP_BYTES // size), WINDOW_BYTES // GROUP_BYTES
    groups = -(-len(rows) // in_group)
    position_of_group = generator.permutation(groups)
    window = position_of_group[np.arange(len(rows)) // in_group] // groups_in_window
    # Sorted by window and, within it, by a random number.
    return rows[np.lexsort((generator.random(len(rows)), window))]


def _crop_side(augment: AugmentSettings | None, crop: int | None) -> int:
    if augment is not None:
        if crop not in (None, augment.crop):
            raise InputError(f"crop is {crop} but the crop of augment is {augment.crop}: set one of them.")
        return augment.crop
    if crop is None:
        raise InputError("an evaluation loader needs the side of its crop: pass crop.")
    if crop < 1:
        raise InputError(f"crop must be at least 1 pixel, got {crop}.")
    return crop


def _training_batch_size(count: int, batch_size: int, world_size: int) -> int:
    """Return ``batch_size``, or all images where they are fewer."""
    if count >= batch_size:
        return batch_size
    if count < world_size:
        raise InputError(f"{count} training images cannot be divided between {world_size} processes. Start fewer.")
    smaller = count // world_size * world_size
    warnings.warn(
        f"{count} training images are fewer than batch_size = {batch_size}: every epoch is one batch of {smaller}.",
        stacklevel=3,
    )
    return smaller


def _warn_of_padding(frame: tuple[int, int], heights: npt.NDArray[np.integer], widths: npt.NDArray[np.integer]) -> None:
    """Warn of large padding: on a GPU, images that are warped are padded to the tallest and widest image."""
    usual = float(np.median(heights.astype(np.int64) * widths))
    if frame[0] * frame[1] > PADDING_LIMIT * usual:
        warnings.warn(
            f"rotation, zoom, shear and resized_crop pad all images to {frame[0]} x {frame[1]} pixels, "
            f"{frame[0] * frame[1] / usual:.0f} times the median size, because some are very tall or wide. Remove "
            "those (`cclnet data audit` names them), or switch them off.",
            stacklevel=3,
        )


def _balanced_probabilities(labels: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return cumulative probabilities of the images such that every class is sampled equally often. A multi-label image
    has the probability of its rarest label; images without any count as a class."""
    if labels.ndim == 1:
        weights = 1.0 / np.bincount(labels)[labels]
    else:
        marked = np.column_stack((labels > 0, ~(labels > 0).any(axis=1)))
        weights = (marked / np.maximum(marked.sum(axis=0), 1)).max(axis=1)
    return np.cumsum(weights) / weights.sum()


def _mix(values: npt.NDArray[Any], own_share: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return (own_share * values[1:] + (1.0 - own_share) * values[:-1]).astype(np.float32)


class StreamedPixels:
    """Pixels in a memory-mapped file or in host memory; crops are copied to the device."""

    def __init__(self, images: DecodedImages, device: torch.device) -> None:
        self.device, self.images = device, images
        self.heights, self.widths = images.heights.astype(np.int64), images.widths.astype(np.int64)
        with warnings.catch_warnings():  # the read-only map is never written to
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            self.pixels = torch.from_numpy(np.asarray(images.pixels))

    def crops(self, rows: Rows, top: npt.NDArray[Any], left: npt.NDArray[Any], size: int) -> Tensor:
        """Return square crops [n, size, size, 3] at (``top``, ``left``) of the images in ``rows``."""
        self.images.check(rows)
        strides = 3 * self.widths[rows]
        starts = self.images.offsets[rows] + top * strides + 3 * left
        out = torch.empty((len(rows), size, size, 3), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        gather_crops(self.pixels, torch.from_numpy(starts), torch.from_numpy(strides), size, size, out)
        return upload(out, self.device)

    def frames(self, rows: Rows, height: int, width: int) -> Tensor:
        """Return whole images zero-padded to [n, height, width, 3]."""
        packed, begins = pack(self.images, rows, 3 * height * width, pinned=self.device.type == "cuda")
        indices = np.stack((begins, self.heights[rows], self.widths[rows]))
        return gather_frames(upload(packed, self.device), upload(indices, self.device), height, width)


class ResidentPixels(StreamedPixels):
    """The pixels of ``rows`` on the device. They are copied by a background thread; until then crops are made on the
    host, so that the copy overlaps with building and compiling the network. Both return the same bytes."""

    def __init__(self, images: DecodedImages, rows: Rows, device: torch.device) -> None:
        super().__init__(images, device)
        sizes = 3 * self.heights[rows] * self.widths[rows]
        ends = np.cumsum(sizes)
        self.starts = np.full(len(images), -1, dtype=np.int64)
        self.starts[rows] = ends - sizes
        frame = 3 * int(self.heights[rows].max()) * int(self.widths[rows].max())
        self.resident = torch.empty(int(ends[-1]) + frame, dtype=torch.uint8, device=device)
        chunks = np.split(rows, np.flatnonzero(np.diff(ends // CHUNK_BYTES)) + 1)
        copier = ThreadPoolExecutor(1, thread_name_prefix="pixels")
        stream = side_stream("pixels", device) if device.type == "cuda" else None
        if stream is not None:  # the allocated memory may belong to a tensor that is still in use on this stream
            stream.wait_stream(torch.cuda.current_stream(device))
        self.transfer = copier.submit(self._copy, images, chunks, stream)
        copier.shutdown(wait=False)

    def _copy(self, images: DecodedImages, chunks: Sequence[Rows], stream: torch.cuda.Stream | None) -> None:
        with torch.cuda.stream(stream):
            for chunk in chunks:
                packed, _ = pack(images, chunk, room=0)
                begin = int(self.starts[chunk[0]])
                self.resident[begin : begin + len(packed)].copy_(packed)
        if stream is not None:
            stream.synchronize()

    def ready(self) -> bool:
        """Return whether the pixels are on the device; an error of the transfer is raised here."""
        if self.transfer.done():
            self.transfer.result()
        return self.transfer.done()

    def crops(self, rows: Rows, top: npt.NDArray[Any], left: npt.NDArray[Any], size: int) -> Tensor:
        if not self.ready():
            return super().crops(rows, top, left, size)
        strides = 3 * self.widths[rows]
        starts, steps = upload(np.stack((self.starts[rows] + top * strides + 3 * left, strides)), self.device)
        return gather_crops(self.resident, starts, steps, size, size)

    def frames(self, rows: Rows, height: int, width: int) -> Tensor:
        if not self.ready():
            return super().frames(rows, height, width)
        indices = np.stack((self.starts[rows], self.heights[rows], self.widths[rows]))
        return gather_frames(self.resident, upload(indices, self.device), height, width)


def gather_crops(
    pixels: Tensor, starts: Tensor, strides: Tensor, height: int, width: int, out: Tensor | None = None
) -> Tensor:
    """Copy crops [n, height, width, 3] out of a flat uint8 buffer: row y of crop i begins at byte
    ``starts[i] + y * strides[i]`` (int64 [n] each, on the device of the pixels).

    >>> pixels = torch.arange(24, dtype=torch.uint8)  # one image, 2 x 4
    >>> gather_crops(pixels, torch.tensor([6]), torch.tensor([12]), 2, 1).flatten().tolist()
    [6, 7, 8, 18, 19, 20]
    """
    line = 3 * width
    begins = starts[:, None] + strides[:, None] * torch.arange(height, device=pixels.device)
    # A view of all overlapping lines of the buffer: selecting its rows needs one index per line, not per byte.
    lines = pixels.as_strided((len(pixels) - line + 1, line), (1, 1))
    shape = (len(starts), height, width, 3)
    flat = None if out is None else out.view(-1, line)
    return torch.index_select(lines, 0, begins.flatten(), out=flat).view(shape)


def gather_frames(pixels: Tensor, located: Tensor, height: int, width: int) -> Tensor:
    """Copy whole images into the upper left of zero frames [n, height, width, 3]. ``located`` [3, n] has start, height
    and width of each. The buffer must have room for one frame after the last image."""
    starts, heights, widths = located
    frames = gather_crops(pixels, starts, 3 * widths, height, width)
    rows = torch.arange(height, device=pixels.device)[:, None] < heights[:, None, None]
    columns = torch.arange(width, device=pixels.device) < widths[:, None, None]
    return frames.mul_((rows & columns)[..., None])


def pack(images: DecodedImages, rows: Rows, room: int, pinned: bool = False) -> tuple[Tensor, npt.NDArray[np.int64]]:
    """Copy the pixels of ``rows`` into a new buffer with ``room`` bytes after them; return it and the image starts."""
    images.check(rows)
    sizes = 3 * images.heights[rows].astype(np.int64) * images.widths[rows]
    ends = np.cumsum(sizes)
    starts = ends - sizes
    buffer = torch.empty(int(ends[-1]) + room, dtype=torch.uint8, pin_memory=pinned)
    target = buffer.numpy()
    for start, size, offset in zip(starts.tolist(), sizes.tolist(), images.offsets[rows].tolist(), strict=True):
        target[start : start + size] = images.pixels[offset : offset + size]
    return buffer, starts


def upload(array: npt.NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """Copy a small array to the device without waiting for the copy."""
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


@cache
def side_stream(purpose: str, device: torch.device) -> torch.cuda.Stream:
    """Return a CUDA stream beside the default one: always the same for a purpose.

    torch hands out 32 streams in turn. A process that trains many runs and takes a new one each time would sooner or
    later copy pixels on the stream on which another thread captures a CUDA graph, which is an error.
    """
    return torch.cuda.Stream(device)


def prefetch(
    make: Callable[[int], Item], steps: range, workers: int, stream: torch.cuda.Stream | None = None
) -> Iterator[Item]:
    """Yield ``make(step)`` for each step, in order: computed as many steps in advance as there are ``workers`` threads;
    without threads one step, which on a GPU is queued beside the work on the previous step. With a ``stream`` all is
    made on it, and the current stream (not the host) waits for it.

    >>> list(prefetch(lambda step: (step, step**2), range(2, 5), workers=2))
    [(2, 4), (3, 9), (4, 16)]
    """
    if stream is None:
        yield from _in_advance(make, steps, workers)
        return

    def make_on_stream(step: int) -> tuple[Item, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            return make(step), stream.record_event()

    for made, ready in _in_advance(make_on_stream, steps, workers):
        current = torch.cuda.current_stream(stream.device)
        current.wait_event(ready)
        for value in made:
            if isinstance(value, Tensor):
                value.record_stream(current)  # keeps its memory until the work queued on it is done
        yield made


def _in_advance(make: Callable[[int], Item], steps: range, workers: int) -> Iterator[Item]:
    if workers == 0:
        made: list[Item] = []
        for step in steps:
            made.append(make(step))
            if len(made) > 1:
                yield made.pop(0)
        yield from made
        return
    # One torch thread per worker: workers make different batches, and training needs the cores. Leaving the block (at
    # the end, or when the iterator is closed early) waits for the few batches in progress.
    with ThreadPoolExecutor(workers, "prefetch", initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from in_advance(lambda step: pool.submit(make, step), steps, workers + 1)
