"""The loader: batches of crops on the device, the same ones whatever the device, the number of ranks, where the
pixels are kept and where a run was interrupted.

Nothing random is kept between batches. The order of an epoch comes from a generator that knows only (seed,
epoch), what is drawn for a batch from one that knows (seed, epoch, step), both for the whole (global) batch, of
which each rank takes its rows.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cclnet.data.augment import draw
from cclnet.data.parallel import available_cores
from cclnet.errors import InputError
from cclnet.settings import AugmentSettings

# Windows of pixels, cut by pure copying out of the one flat buffer that holds all images.
#
# ``Resident`` keeps the pixels of a loader's rows on the device; ``Streamed`` leaves them in the memory-mapped
# file and cuts on the host. Both cut with the same function, so they give the same bytes, and a resident store cuts on
# the host until its pixels have arrived: they travel while the network is built and compiled.


if TYPE_CHECKING:
    from cclnet.data.cache import DecodedImages

Rows = npt.NDArray[np.integer[Any]]
CHUNK_BYTES = 2**24  # what is staged at a time on the way to the device: so little that the same memory serves again


def cut(pixels: Tensor, starts: Tensor, strides: Tensor, height: int, width: int, out: Tensor | None = None) -> Tensor:
    """Windows [n, height, width, 3] out of a flat uint8 buffer: row y of window i begins at byte
    ``starts[i] + y * strides[i]`` (int64 [n] each, on the device of the pixels).

    >>> pixels = torch.arange(24, dtype=torch.uint8)  # one image, 2 x 4
    >>> cut(pixels, torch.tensor([6]), torch.tensor([12]), 2, 1).flatten().tolist()
    [6, 7, 8, 18, 19, 20]
    """
    line = 3 * width
    begins = starts[:, None] + strides[:, None] * torch.arange(height, device=pixels.device)
    # Every line of bytes there is in the buffer, overlapping: picking rows of this view copies line by line,
    # with one index a line instead of one a byte.
    lines = pixels.as_strided((len(pixels) - line + 1, line), (1, 1))
    shape = (len(starts), height, width, 3)
    flat = None if out is None else out.view(-1, line)
    return torch.index_select(lines, 0, begins.flatten(), out=flat).view(shape)


def whole(pixels: Tensor, starts: Tensor, heights: Tensor, widths: Tensor, height: int, width: int) -> Tensor:
    """Whole images, each in the upper left of a frame [height, width] that is zero elsewhere:
    [n, height, width, 3]. The buffer must have room for one frame behind the last image."""
    frames = cut(pixels, starts, 3 * widths, height, width)
    rows = torch.arange(height, device=pixels.device)[:, None] < heights[:, None, None]
    columns = torch.arange(width, device=pixels.device) < widths[:, None, None]
    return frames.mul_((rows & columns)[..., None])


def upload(array: npt.NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """A small array on the device, without waiting for it to arrive."""
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


def pack(images: DecodedImages, rows: Rows, room: int, pinned: bool = False) -> tuple[Tensor, npt.NDArray[np.int64]]:
    """The pixels of some rows one after the other in a new buffer with ``room`` behind them, and where each
    begins."""
    sizes = 3 * images.heights[rows].astype(np.int64) * images.widths[rows]
    ends = np.cumsum(sizes)
    starts = ends - sizes
    buffer = torch.empty(int(ends[-1]) + room, dtype=torch.uint8, pin_memory=pinned)
    target = buffer.numpy()
    for start, size, offset in zip(starts.tolist(), sizes.tolist(), images.offsets[rows].tolist(), strict=True):
        target[start : start + size] = images.pixels[offset : offset + size]
    return buffer, starts


class Resident:
    """The pixels of ``rows`` (and no others: loaders of several parts share nothing) on the device, or on their way."""

    def __init__(self, images: DecodedImages, rows: Rows, device: torch.device) -> None:
        self.device = device
        self.on_host = Streamed(images, device)
        self.heights, self.widths = images.heights.astype(np.int64), images.widths.astype(np.int64)
        sizes = 3 * self.heights[rows] * self.widths[rows]
        ends = np.cumsum(sizes)
        self.starts = np.full(len(images), -1, dtype=np.int64)
        self.starts[rows] = ends - sizes
        frame = 3 * int(self.heights[rows].max()) * int(self.widths[rows].max())
        self.pixels = torch.empty(int(ends[-1]) + frame, dtype=torch.uint8, device=device)
        chunks = np.split(rows, np.flatnonzero(np.diff(ends // CHUNK_BYTES)) + 1)
        porter = ThreadPoolExecutor(1, thread_name_prefix="pixels")
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if stream is not None:  # the memory may be that of a tensor that is still in use there
            stream.wait_stream(torch.cuda.current_stream(device))
        self.arrival = porter.submit(self._bring, images, chunks, stream)
        porter.shutdown(wait=False)

    def _bring(self, images: DecodedImages, chunks: Sequence[Rows], stream: torch.cuda.Stream | None) -> None:
        """Copy the pixels to the device; they are there when this returns."""
        with torch.cuda.stream(stream):
            for chunk in chunks:
                packed, _ = pack(images, chunk, room=0)
                begin = int(self.starts[chunk[0]])
                self.pixels[begin : begin + len(packed)].copy_(packed)
        if stream is not None:
            stream.synchronize()

    def arrived(self) -> bool:
        """Whether the pixels are on the device; what went wrong on the way is raised here."""
        if self.arrival.done():
            self.arrival.result()
        return self.arrival.done()

    def windows(self, rows: Rows, top: npt.NDArray[Any], left: npt.NDArray[Any], size: int) -> Tensor:
        if not self.arrived():
            return self.on_host.windows(rows, top, left, size)
        strides = 3 * self.widths[rows]
        indices = np.stack((self.starts[rows] + top * strides + 3 * left, strides))
        starts, steps = upload(indices, self.device)
        return cut(self.pixels, starts, steps, size, size)

    def whole(self, rows: Rows, height: int, width: int) -> Tensor:
        if not self.arrived():
            return self.on_host.whole(rows, height, width)
        indices = np.stack((self.starts[rows], self.heights[rows], self.widths[rows]))
        starts, heights, widths = upload(indices, self.device)
        return whole(self.pixels, starts, heights, widths, height, width)


class Streamed:
    """The pixels where they are, in a memory-mapped file or in memory; what is cut goes to the device."""

    def __init__(self, images: DecodedImages, device: torch.device) -> None:
        self.device = device
        self.images = images
        with warnings.catch_warnings():  # nothing here writes to the (read-only) map
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            self.pixels = torch.from_numpy(np.asarray(images.pixels))

    def windows(self, rows: Rows, top: npt.NDArray[Any], left: npt.NDArray[Any], size: int) -> Tensor:
        strides = 3 * self.images.widths[rows].astype(np.int64)
        starts = self.images.offsets[rows] + top * strides + 3 * left
        out = torch.empty((len(rows), size, size, 3), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        cut(self.pixels, torch.from_numpy(starts), torch.from_numpy(strides), size, size, out)
        return upload(out, self.device)

    def whole(self, rows: Rows, height: int, width: int) -> Tensor:
        packed, begins = pack(self.images, rows, 3 * height * width, pinned=self.device.type == "cuda")
        indices = np.stack((begins, self.images.heights[rows], self.images.widths[rows]))
        starts, heights, widths = upload(indices, self.device)
        return whole(upload(packed, self.device), starts, heights, widths, height, width)


# Batches made ahead of time, by threads and on a CUDA stream of their own, in their order.


Made = TypeVar("Made", bound="tuple[Any, ...]")


def ahead(
    make: Callable[[int], Made], steps: range, workers: int, stream: torch.cuda.Stream | None = None
) -> Iterator[Made]:
    """``make(step)`` for each step, in order, always some steps ahead of the one that is given.

    With ``workers`` threads as many steps ahead; with none one step ahead, which on a GPU is queued beside the
    work on the step before. With a ``stream`` everything is made on it; what is given can be used on the
    current stream, which (and not the host) waits for it.

    >>> list(ahead(lambda step: (step, step**2), range(2, 5), workers=2))
    [(2, 4), (3, 9), (4, 16)]
    """
    if stream is None:
        return _inline(make, steps) if workers == 0 else _by_threads(make, steps, workers)
    on_stream = partial(_on_stream, stream, make)
    made = _inline(on_stream, steps) if workers == 0 else _by_threads(on_stream, steps, workers)
    return _handed_over(made, stream.device)


def _inline(make: Callable[[int], Made], steps: range) -> Iterator[Made]:
    ready: deque[Made] = deque()
    for step in steps:
        ready.append(make(step))
        if len(ready) > 1:
            yield ready.popleft()
    yield from ready


def _by_threads(make: Callable[[int], Made], steps: range, workers: int) -> Iterator[Made]:
    waiting: deque[Future[Made]] = deque()
    # One of torch's own threads each: they make different batches, and the cores belong to the training. Leaving
    # (at the end, or where batches are not taken to the end) waits for the few that are being made.
    with ThreadPoolExecutor(workers, "ahead", initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for step in steps:
            waiting.append(pool.submit(make, step))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _on_stream(stream: torch.cuda.Stream, make: Callable[[int], Made], step: int) -> tuple[Made, torch.cuda.Event]:
    with torch.cuda.stream(stream):
        return make(step), stream.record_event()


def _handed_over(prepared: Iterator[tuple[Made, torch.cuda.Event]], device: torch.device) -> Iterator[Made]:
    for made, ready in prepared:
        current = torch.cuda.current_stream(device)
        current.wait_event(ready)
        for part in made:
            if isinstance(part, Tensor):
                part.record_stream(current)  # its memory is not given away before the work queued on it is done
        yield made


if TYPE_CHECKING:
    from cclnet.data.cache import DecodedImages

RESIDENT_SHARE = 0.6  # of the free memory of the device that pixels may take before they are streamed
ODD = 4.0  # times the area of the usual image that a frame around all of them may have before it is told


class Batch(NamedTuple):
    """One rank's share of a batch, on the device.

    Attributes:
        crops: uint8 [n, h, w, 3], input of ``augment`` (training) or ``normalise`` (evaluation). Where images
            are mixed there is one more in front, whose label and row are not in the batch.
        parameters: what was drawn for each of the crops, the table that ``augment`` takes; None in evaluation.
        labels: class indices, int64 [n]; or float32 [n, K] for several labels at once or mixed images.
        weight: weights of the samples, float32 [n], or None.
        rows: which images these are, on the host.
    """

    crops: Tensor
    parameters: Tensor | None
    labels: Tensor
    weight: Tensor | None
    rows: npt.NDArray[np.int64]


class Loader:
    """Batches of the images in ``rows``.

    With ``augment`` it is a training loader: a new order every epoch, random crops, and only whole batches, so
    that every batch has one shape (what is left over changes with the order). A set smaller than one batch is
    one batch. Without ``augment`` it is an evaluation loader: the images in the order of ``rows``, central
    crops, each image once on one rank; ranks one after the other give the order of ``rows``.

    Args:
        images: the decoded images.
        labels: labels of all images, class indices [N] or zeros and ones [N, K].
        rows: the images to load.
        batch_size: images in a batch, over all ranks together.
        augment: what training images go through, or None for evaluation.
        crop: side of the crop, where it is not that of ``augment``.
        num_classes: number of classes; needed only for mixing class indices (mixup, cutmix).
        weights: a weight for every image [N], handed on with the batches.
        balanced: draw an epoch with replacement, every class equally often (for several labels at once, an
            image as often as its rarest label asks for).
        seed: of everything random.
        device: where batches go.
        resident: keep the pixels on the device, or stream them; None keeps them where they fit into 60% of
            its free memory (on a CPU they are used where they are).
        workers: threads that cut batches ahead while streaming; None for four on a GPU and one on a CPU.
        rank, world_size: which process of how many this is.
    """

    def __init__(
        self,
        images: DecodedImages,
        labels: npt.NDArray[Any],
        rows: npt.NDArray[np.integer[Any]] | Sequence[int],
        *,
        batch_size: int,
        augment: AugmentSettings | None = None,
        crop: int | None = None,
        num_classes: int | None = None,
        weights: npt.NDArray[np.floating[Any]] | None = None,
        balanced: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
        resident: bool | None = None,
        workers: int | None = None,
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
        self.batch_size = _whole_batch(len(self.rows), batch_size, world_size) if augment else batch_size
        self._chances = _balanced_chances(self.labels[self.rows]) if balanced else None
        self._frame = int(images.heights[self.rows].max()), int(images.widths[self.rows].max())
        if augment and augment.warps and self.device.type == "cuda":
            _warn_of_odd_shapes(self._frame, images.heights[self.rows], images.widths[self.rows])
        self.resident = self._fits() if resident is None else resident
        self._pixels = Resident(images, self.rows, self.device) if self.resident else Streamed(images, self.device)
        on_gpu = self.device.type == "cuda"
        # A CPU needs its cores for the training: one thread is far ahead of it.
        self._workers = 0 if self.resident else workers or (min(4, available_cores()) if on_gpu else 1)
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None

    def __len__(self) -> int:
        """Batches in an epoch (of this rank)."""
        if self.augment:
            return len(self.rows) // self.batch_size
        return -(-len(self._share()) // (self.batch_size // self.world_size))

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, beginning with batch ``start``."""
        if epoch < 0 or not 0 <= start <= len(self):
            raise InputError(
                f"there is no batch {start} in epoch {epoch}: an epoch has {len(self)} batches, counted from 0."
            )
        make: Callable[[int], Batch]
        if self.augment:
            make = partial(self._training_batch, self.augment, self._order(epoch), epoch)
        else:
            make = partial(self._evaluation_batch, self._share())
        return ahead(make, range(start, len(self)), self._workers, self._stream)

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=key))

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The global order of a training epoch."""
        generator = self._generator(epoch)
        if self._chances is None:
            return generator.permutation(self.rows)
        drawn = np.searchsorted(self._chances, generator.random(len(self.rows)), side="right")
        return self.rows[np.minimum(drawn, len(self.rows) - 1)]

    def _share(self) -> npt.NDArray[np.int64]:
        """What this rank evaluates: a stretch of the rows."""
        count = len(self.rows)
        return self.rows[count * self.rank // self.world_size : count * (self.rank + 1) // self.world_size]

    def _training_batch(self, settings: AugmentSettings, order: npt.NDArray[np.int64], epoch: int, step: int) -> Batch:
        share = self.batch_size // self.world_size
        # An image is mixed with the one before it in the global batch, which may be another rank's.
        taken = np.arange(self.rank * share - settings.mixes, (self.rank + 1) * share) % self.batch_size
        rows = order[step * self.batch_size + taken]
        heights, widths = self.images.heights[rows].astype(np.int64), self.images.widths[rows].astype(np.int64)
        drawn = draw(settings, self._generator(epoch, step), self.batch_size, taken, heights, widths)
        if settings.warps:
            # Compiled steps want one shape; elsewhere one very wide image must not swell every batch.
            frame = self._frame if self.device.type == "cuda" else (int(heights.max()), int(widths.max()))
            crops = self._pixels.whole(rows, *frame)
        else:
            crops = self._pixels.windows(rows, drawn.top, drawn.left, self.crop)
        table = np.stack(drawn, axis=1).astype(np.float32)
        mixed = drawn.own_share(self.crop) if settings.mixes else None
        return self._batch(crops, table, rows, mixed)

    def _evaluation_batch(self, order: npt.NDArray[np.int64], step: int) -> Batch:
        share = self.batch_size // self.world_size
        rows = order[step * share : (step + 1) * share]
        top = np.rint((self.images.heights[rows] - self.crop) / 2).astype(np.int64)
        left = np.rint((self.images.widths[rows] - self.crop) / 2).astype(np.int64)
        return self._batch(self._pixels.windows(rows, top, left, self.crop), None, rows, None)

    def _batch(self, crops: Tensor, table: Any, rows: npt.NDArray[np.int64], own_share: Any) -> Batch:
        labels = self.labels[rows].astype(np.int64 if self.labels.ndim == 1 else np.float32)
        weight = None if self.weights is None else self.weights[rows]
        if own_share is not None:
            if labels.ndim == 1:
                labels = np.eye(self.num_classes or 0, dtype=np.float32)[labels]
            labels, rows = _mixed(labels, own_share[1:, None]), rows[1:]
            weight = None if weight is None else _mixed(weight, own_share[1:])
        on_device = [None if array is None else upload(array, self.device) for array in (table, labels, weight)]
        return Batch(crops, on_device[0], cast(Tensor, on_device[1]), on_device[2], rows)

    def _fits(self) -> bool:
        """Whether the pixels fit on the device beside what training needs. On a CPU the memory-mapped file
        already is in memory as far as there is room, so nothing is copied."""
        if self.device.type != "cuda":
            return False
        heights, widths = self.images.heights[self.rows].astype(np.int64), self.images.widths[self.rows]
        free, _ = torch.cuda.mem_get_info(self.device)
        return int((3 * heights * widths).sum()) <= RESIDENT_SHARE * free

    def _check(self, batch_size: int) -> None:
        count = len(self.images)
        if len(self.labels) != count:
            raise InputError(f"expected a label for each of {count} images, got {len(self.labels)} labels.")
        if self.weights is not None and self.weights.shape != (count,):
            raise InputError(f"expected weights [{count}], one an image, got {list(self.weights.shape)}.")
        if self.weights is not None and not (np.isfinite(self.weights).all() and (self.weights >= 0).all()):
            raise InputError("weights of samples must be finite and not negative.")
        if self.rows.ndim != 1 or not len(self.rows):
            raise InputError("there are no images to load: rows is empty. Look at the sizes of the parts.")
        if self.rows.min() < 0 or self.rows.max() >= count:
            raise InputError(f"rows must be from 0 to {count - 1}, got {self.rows.min()} to {self.rows.max()}.")
        if self.seed < 0:
            raise InputError(f"seed must be 0 or more, got {self.seed}.")
        if not 0 <= self.rank < self.world_size:
            raise InputError(f"rank must be from 0 to {self.world_size - 1}, got {self.rank}.")
        if batch_size < 1 or batch_size % self.world_size:
            near = max(1, round(batch_size / self.world_size)) * self.world_size
            raise InputError(
                f"the batch size counts the images of all {self.world_size} processes together and must be a "
                f"multiple of their number, got {batch_size}. Try {near}."
            )
        self._check_labels()
        self._check_sizes()

    def _check_labels(self) -> None:
        if self.labels.ndim == 2:
            return
        if not np.issubdtype(self.labels.dtype, np.integer) or self.labels.ndim != 1:
            raise InputError(
                "labels must be class indices [N] or zeros and ones [N, K], got "
                f"{self.labels.dtype} {list(self.labels.shape)}."
            )
        if not (self.augment and self.augment.mixes):
            return
        if self.num_classes is None:
            raise InputError("mixup and cutmix need num_classes to mix class indices.")
        if self.labels.min() < 0 or self.labels.max() >= self.num_classes:
            raise InputError(
                f"labels must be from 0 to {self.num_classes - 1}, got {self.labels.min()} to {self.labels.max()}."
            )

    def _check_sizes(self) -> None:
        if self.augment and self.augment.resized_crop:
            return
        sides = np.minimum(self.images.heights[self.rows], self.images.widths[self.rows])
        if (small := sides < self.crop).any():
            least = self.rows[sides.argmin()]
            raise InputError(
                f"{small.sum()} of {len(self.rows)} images are smaller than the crop of {self.crop} pixels; the "
                f"smallest is {self.images.widths[least]} x {self.images.heights[least]} (row {least}). Decode "
                f"with a short side of at least {self.crop}, or take a crop of at most {sides.min()}."
            )


def _warn_of_odd_shapes(
    frame: tuple[int, int], heights: npt.NDArray[np.integer], widths: npt.NDArray[np.integer]
) -> None:
    """On a GPU, where shapes cannot change, images that are turned or scaled are padded to the tallest and widest."""
    usual = float(np.median(heights.astype(np.int64) * widths))
    if frame[0] * frame[1] > ODD * usual:
        times = f"{frame[0] * frame[1] / usual:.0f} times the usual size"
        warnings.warn(
            f"some images are so tall or wide that all are padded to {frame[0]} x {frame[1]} pixels to be turned or "
            f"scaled, {times}: leave them out (`cclnet data audit` names them), or turn and scale none.",
            stacklevel=3,
        )


def _crop_side(augment: AugmentSettings | None, crop: int | None) -> int:
    if augment is None and crop is None:
        raise InputError("an evaluation loader needs the side of its crop: pass crop.")
    if augment is not None and crop not in (None, augment.crop):
        raise InputError(f"crop is {crop} but the augmentation's crop is {augment.crop}: set one of them.")
    side = augment.crop if augment is not None else crop
    if side is None or side < 1:
        raise InputError(f"crop must be at least 1 pixel, got {side}.")
    return side


def _whole_batch(count: int, batch_size: int, world_size: int) -> int:
    """The batch size of training: as given, or all images where they are fewer."""
    if count >= batch_size:
        return batch_size
    if count < world_size:
        raise InputError(f"{count} training images cannot be shared by {world_size} processes. Start fewer.")
    smaller = count // world_size * world_size
    warnings.warn(
        f"{count} training images are fewer than a batch of {batch_size}: every epoch is one batch of {smaller}.",
        stacklevel=3,
    )
    return smaller


def _balanced_chances(labels: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Cumulated probabilities of the images, such that every class is drawn equally often. With several labels
    an image has the chance of its rarest one; images without any count as a class."""
    if labels.ndim == 1:
        chances = 1.0 / np.bincount(labels)[labels]
    else:
        marked = np.column_stack((labels > 0, ~(labels > 0).any(axis=1)))
        chances = (marked / np.maximum(marked.sum(axis=0), 1)).max(axis=1)
    return np.cumsum(chances) / chances.sum()


def _mixed(values: npt.NDArray[Any], own_share: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return (own_share * values[1:] + (1.0 - own_share) * values[:-1]).astype(np.float32)
