import threading

import numpy as np
import pytest
import torch

from cclnet.data import loader as loader_module
from cclnet.data.cache import DecodedImages
from cclnet.data.loader import ResidentPixels, StreamedPixels, pack

SIZES = [(31, 40), (40, 25), (28, 28), (33, 61), (30, 30)]
CPU = torch.device("cpu")


@pytest.fixture
def images() -> DecodedImages:
    """Images of different sizes, the last of which ends with the buffer."""
    heights, widths = np.array(SIZES, dtype=np.int32).T
    sizes = 3 * heights.astype(np.int64) * widths
    pixels = np.random.default_rng(0).integers(0, 256, int(sizes.sum()), dtype=np.uint8)
    return DecodedImages(pixels, np.cumsum(sizes) - sizes, heights, widths)


@pytest.fixture(params=["resident", "streamed"])
def store(request, images):
    return (
        transferred(ResidentPixels(images, np.arange(5), CPU))
        if request.param == "resident"
        else StreamedPixels(images, CPU)
    )


def transferred(store: ResidentPixels) -> ResidentPixels:
    store.transfer.result(timeout=60)
    return store


def test_crops_are_the_pixels_of_the_image(images, store):
    rows, top, left = np.array([4, 0, 3, 4, 2]), np.array([2, 0, 5, 0, 0]), np.array([0, 12, 33, 2, 0])
    cut = store.crops(rows, top, left, 28)
    assert cut.shape == (5, 28, 28, 3) and cut.dtype == torch.uint8
    for got, row, y, x in zip(cut.numpy(), rows, top, left, strict=True):
        np.testing.assert_array_equal(got, images.image(row)[y : y + 28, x : x + 28])


def test_whole_images_are_zero_outside(images, store):
    frames = store.frames(np.array([4, 3, 1]), 40, 61)
    assert frames.shape == (3, 40, 61, 3)
    for got, row in zip(frames.numpy(), (4, 3, 1), strict=True):
        expected = np.zeros((40, 61, 3), dtype=np.uint8)
        height, width = SIZES[row]
        expected[:height, :width] = images.image(row)
        np.testing.assert_array_equal(got, expected)


def test_resident_keeps_only_its_rows_in_any_order_and_in_chunks(images, monkeypatch):
    monkeypatch.setattr(loader_module, "CHUNK_BYTES", 3000)  # smaller than some images: one chunk each
    rows = np.array([3, 0, 4])
    kept = transferred(ResidentPixels(images, rows, CPU))
    held = sum(3 * SIZES[row][0] * SIZES[row][1] for row in rows)
    assert held < len(kept.pixels) <= held + 3 * 33 * 61
    got = kept.crops(rows, np.zeros(3, dtype=np.int64), np.zeros(3, dtype=np.int64), 20)
    for crop, row in zip(got.numpy(), rows, strict=True):
        np.testing.assert_array_equal(crop, images.image(row)[:20, :20])


def test_crops_are_the_same_before_and_after_the_transfer(images, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(loader_module, "pack", lambda *args, **more: go.wait(60) and pack(*args, **more))
    store, rows, zero = ResidentPixels(images, np.arange(5), CPU), np.array([3, 1]), np.zeros(2, dtype=np.int64)
    assert not store.ready()
    with monkeypatch.context() as patch:
        patch.setattr(loader_module, "pack", pack)  # packing on the host does not wait
        early = store.crops(rows, zero, zero, 20), store.frames(rows, 40, 61)
    go.set()
    assert transferred(store).ready()
    for before, after in zip(early, (store.crops(rows, zero, zero, 20), store.frames(rows, 40, 61)), strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=0)


def test_an_error_of_the_transfer_is_raised(images, monkeypatch):
    def fails(*args, **more):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(loader_module, "pack", fails)
    store = ResidentPixels(images, np.arange(5), CPU)
    store.transfer.exception(timeout=60)
    with pytest.raises(RuntimeError, match="out of memory"):
        store.crops(np.array([0]), np.array([0]), np.array([0]), 20)


def test_a_crop_beyond_the_buffer_is_an_error(images):
    with pytest.raises(IndexError):
        StreamedPixels(images, CPU).crops(np.array([4]), np.array([20]), np.array([0]), 28)


def test_offsets_beyond_two_gigabytes(tmp_path):
    """A sparse file of 5 GiB with one image at its end: needs no such space on the disk."""
    size, side = 5 * 2**30, 8
    path = tmp_path / "pixels"
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(size - 3 * side * side)
        file.write(bytes(range(3 * side * side)))
    pixels = np.memmap(path, dtype=np.uint8, mode="r")
    sides = np.full(2, side, dtype=np.int32)
    far = DecodedImages(pixels, np.array([0, size - 3 * side * side]), sides, sides)
    got = StreamedPixels(far, CPU).crops(np.array([1, 0]), np.array([2, 0]), np.array([1, 0]), 6)
    np.testing.assert_array_equal(got[0].numpy(), far.image(1)[2:8, 1:7])
    assert got[0].any() and not got[1].any()


def test_a_read_only_map_gives_no_warning(tmp_path, recwarn):
    path = tmp_path / "pixels"
    path.write_bytes(bytes(48))
    pixels = np.memmap(path, dtype=np.uint8, mode="r")
    StreamedPixels(DecodedImages(pixels, np.array([0]), np.array([4], np.int32), np.array([4], np.int32)), CPU)
    assert not recwarn.list


def test_pack_leaves_room_behind(images):
    buffer, starts = pack(images, np.array([2, 0]), room=7)
    assert starts.tolist() == [0, 3 * 28 * 28] and len(buffer) == 3 * (28 * 28 + 31 * 40) + 7
    np.testing.assert_array_equal(buffer[:2352].numpy(), images.image(2).reshape(-1))
