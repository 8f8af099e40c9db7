"""Windows of pixels, cut by pure copying out of the one flat buffer that holds all images.

``Resident`` keeps the pixels of a loader's rows on the device; ``Streamed`` leaves them in the memory-mapped
file and cuts on the host. Both cut with the same function, so they give the same bytes, and a resident store cuts on
the host until its pixels have arrived: they travel while the network is built and compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from cclnet.data.decode import DecodedImages

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
