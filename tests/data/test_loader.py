import threading
import warnings

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as tv
from hypothesis import given, settings
from hypothesis import strategies as st

from cclnet.data import loader as loader_module
from cclnet.data.augment import Parameters, augment
from cclnet.data.cache import DecodedImages
from cclnet.data.loader import (
    Batch,
    Loader,
    ResidentPixels,
    StreamedPixels,
    _warn_of_padding,
    pack,
    prefetch,
    shuffled,
    side_stream,
)
from cclnet.errors import InputError
from cclnet.functional import rows_of
from cclnet.settings import AugmentSettings

COUNT, CROP = 53, 20
AUGMENT = AugmentSettings(crop=CROP)
LABELS = (np.arange(COUNT) % 5).astype(np.int64)
ROWS = np.random.default_rng(1).permutation(COUNT)[:43]


def decoded(path=None) -> DecodedImages:
    """Images of different and odd sizes; with a path, memory-mapped from a file as the cache is."""
    generator = np.random.default_rng(0)
    heights, widths = generator.integers(CROP, 45, (2, COUNT)).astype(np.int32)
    sizes = 3 * heights.astype(np.int64) * widths
    pixels = generator.integers(0, 256, int(sizes.sum()), dtype=np.uint8)
    if path is not None:
        path.write_bytes(pixels.tobytes())
        pixels = np.memmap(path, dtype=np.uint8, mode="r")
    return DecodedImages(pixels, np.cumsum(sizes) - sizes, heights, widths)


IMAGES = decoded()


def loader(**changes) -> Loader:
    options = {"batch_size": 12, "augment": AUGMENT, "seed": 3, **changes}
    return Loader(options.pop("images", IMAGES), options.pop("labels", LABELS), options.pop("rows", ROWS), **options)


def same(a: Batch, b: Batch) -> bool:
    tensors = zip(a[:4], b[:4], strict=True)
    return np.array_equal(a.rows, b.rows) and all(x is y or torch.equal(x, y) for x, y in tensors)


RECIPES = {
    "paper": AUGMENT,
    "mixing": AugmentSettings(crop=CROP, mixup=0.4, cutmix=1.0),
    "warping": AugmentSettings(crop=CROP, resized_crop=(0.3, 1.0), rotation=20.0, mixup=0.2),
    "evaluation": None,
}


@pytest.fixture(params=RECIPES)
def recipe(request) -> dict:
    chosen = RECIPES[request.param]
    return {"augment": chosen, "crop": CROP, "num_classes": 5}


def test_resident_and_streamed_are_the_same_bit_for_bit(recipe, tmp_path):
    mapped = decoded(tmp_path / "pixels")
    resident = loader(images=mapped, resident=True, **recipe)
    streamed = loader(images=mapped, resident=False, workers=3, **recipe)
    assert resident.resident and not streamed.resident and len(resident) == len(streamed) >= 3
    for epoch in (0, 7):
        pairs = list(zip(resident.epoch(epoch), streamed.epoch(epoch), strict=True))
        assert len(pairs) == len(resident) and all(same(a, b) for a, b in pairs)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("recipe", [name for name, chosen in RECIPES.items() if chosen], indirect=True)
def test_any_number_of_ranks_gives_the_same_global_batches(recipe, world_size):
    alone = list(loader(**recipe).epoch(2))
    ranks = [list(loader(**recipe, rank=rank, world_size=world_size).epoch(2)) for rank in range(world_size)]
    mean, std = torch.zeros(3), torch.ones(3)
    for whole, *shares in zip(alone, *ranks, strict=True):
        np.testing.assert_array_equal(whole.rows, np.concatenate([share.rows for share in shares]))
        assert torch.equal(whole.labels, torch.cat([share.labels for share in shares]))
        views = [augment(batch.crops, batch.parameters, recipe["augment"], mean, std) for batch in (whole, *shares)]
        # Bit for bit, but for where a product of matrices sums in another order for another batch size.
        tolerance = 1.5 / 255 if recipe["augment"].warps else 0
        torch.testing.assert_close(views[0], torch.cat(views[1:]), rtol=0, atol=tolerance)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**40), epoch=st.integers(0, 1000), start=st.integers(0, 3))
def test_an_epoch_depends_on_seed_and_epoch_alone_and_resumes_anywhere(seed, epoch, start):
    whole = list(loader(seed=seed).epoch(epoch))
    resumed = list(loader(seed=seed).epoch(epoch, start))
    assert len(whole) == 3 and len(resumed) == 3 - start
    assert all(same(a, b) for a, b in zip(whole[start:], resumed, strict=True))


def test_nothing_is_seen_twice_and_every_epoch_has_another_order():
    train = loader()
    orders = [np.concatenate([batch.rows for batch in train.epoch(epoch)]) for epoch in range(30)]
    for order in orders:
        assert len(order) == len(set(order)) == 36 and set(order) <= set(ROWS)
    assert len({tuple(order) for order in orders}) == 30
    assert set(np.concatenate(orders)) == set(ROWS)  # what is left over changes
    assert not np.array_equal(orders[0], np.concatenate([batch.rows for batch in loader(seed=4).epoch(0)]))


def test_a_set_that_no_memory_holds_is_shuffled_in_windows_of_groups(monkeypatch):
    monkeypatch.setattr(loader_module, "SHUFFLE_BYTES", 1000)
    monkeypatch.setattr(loader_module, "GROUP_BYTES", 100)
    monkeypatch.setattr(loader_module, "WINDOW_BYTES", 2000)
    rows = np.arange(5, 10_005)  # of ten bytes each: groups of ten images, windows of twenty groups
    orders = [shuffled(rows, 100_000, np.random.default_rng(seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(orders[0], orders[1])
    assert (orders[0] != orders[2]).mean() > 0.9
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), rows)
        windows = order.reshape(50, 200) - 5
        assert all(len(np.unique(window // 10)) == 20 for window in windows)  # whole groups
        assert min(np.ptp(window) for window in windows) > 3000  # from all over the set
        assert max(np.bincount(window[:20] // 10).max() for window in windows) < 10  # mixed with each other


def test_windows_resume_anywhere_and_are_the_same_for_any_number_of_ranks(monkeypatch):
    plain = [batch.rows for batch in loader().epoch(3)]
    monkeypatch.setattr(loader_module, "SHUFFLE_BYTES", 0)
    monkeypatch.setattr(loader_module, "GROUP_BYTES", 10_000)
    monkeypatch.setattr(loader_module, "WINDOW_BYTES", 40_000)
    whole = list(loader().epoch(3))
    assert not np.array_equal(np.concatenate(plain), np.concatenate([batch.rows for batch in whole]))
    assert all(same(a, b) for a, b in zip(whole[1:], loader().epoch(3, start=1), strict=True))
    ranks = [loader(rank=rank, world_size=2).epoch(3) for rank in range(2)]
    for batch, *shares in zip(whole, *ranks, strict=True):
        np.testing.assert_array_equal(batch.rows, np.concatenate([share.rows for share in shares]))


def test_parameters_differ_between_batches_epochs_and_seeds():
    tables = [batch.parameters for train in (loader(), loader(seed=4)) for e in range(2) for batch in train.epoch(e)]
    hues = {float(value) for table in tables for value in Parameters(*table.unbind(1)).hue}
    assert len(hues) == 2 * 2 * 3 * 12


def test_batches_carry_what_belongs_together():
    weights = np.linspace(0.5, 1.5, COUNT)
    for batch in loader(weights=weights).epoch(5):
        drawn = Parameters(*batch.parameters.long().unbind(1))
        assert batch.crops.shape == (12, CROP, CROP, 3) and batch.crops.dtype == torch.uint8
        assert batch.labels.tolist() == LABELS[batch.rows].tolist() and batch.labels.dtype == torch.int64
        np.testing.assert_array_equal(batch.weight, weights[batch.rows].astype(np.float32))
        for crop, row, top, left in zip(batch.crops, batch.rows, drawn.top, drawn.left, strict=True):
            np.testing.assert_array_equal(crop, IMAGES.image(row)[top : top + CROP, left : left + CROP])


def test_evaluation_is_the_central_crop_in_the_order_of_the_rows():
    batches = list(loader(augment=None, crop=CROP).epoch())
    assert [len(batch.rows) for batch in batches] == [12, 12, 12, 7]
    np.testing.assert_array_equal(np.concatenate([batch.rows for batch in batches]), ROWS)
    for batch in batches:
        assert batch.parameters is None and batch.labels.tolist() == LABELS[batch.rows].tolist()
        for crop, row in zip(batch.crops, batch.rows, strict=True):
            image = torch.from_numpy(IMAGES.image(row).copy()).permute(2, 0, 1)
            assert torch.equal(crop.permute(2, 0, 1), tv.center_crop(image, [CROP, CROP]))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("count", [1, 5, 24, 43])
def test_evaluation_counts_every_image_once_over_the_ranks(world_size, count):
    seen = []
    for rank in range(world_size):
        part = loader(augment=None, crop=CROP, rows=ROWS[:count], rank=rank, world_size=world_size)
        batches = list(part.epoch())
        assert len(batches) == len(part) and all(0 < len(batch.rows) <= 12 // world_size for batch in batches)
        seen += [row for batch in batches for row in batch.rows]
    assert seen == ROWS[:count].tolist()


def test_balanced_sampling_draws_every_class_equally_often():
    labels = np.repeat([0, 1, 2, 3], [800, 150, 40, 10]).astype(np.int64)
    images = DecodedImages.from_array(np.zeros((1000, 4, 4, 3), dtype=np.uint8))
    train = Loader(images, labels, np.arange(1000), batch_size=100, augment=AugmentSettings(crop=4), balanced=True)
    assert len(train) == 10
    drawn = np.concatenate([batch.rows for epoch in range(10) for batch in train.epoch(epoch)])
    shares = np.bincount(labels[drawn]) / len(drawn)
    np.testing.assert_allclose(shares, 0.25, atol=0.03)
    assert set(labels[drawn[:1000]]) == {0, 1, 2, 3} and len(set(drawn[drawn >= 990])) == 10
    again = np.concatenate([batch.rows for batch in train.epoch(3)])
    np.testing.assert_array_equal(again, drawn[3000:4000])


def test_balanced_sampling_of_several_labels_goes_by_the_rarest():
    labels = np.zeros((400, 2), dtype=np.uint8)
    labels[:300, 0] = 1
    labels[290:310, 1] = 1  # 10 images with both, 90 with none
    images = DecodedImages.from_array(np.zeros((400, 4, 4, 3), dtype=np.uint8))
    train = Loader(images, labels, np.arange(400), batch_size=400, augment=AugmentSettings(crop=4), balanced=True)
    drawn = np.concatenate([batch.rows for epoch in range(20) for batch in train.epoch(epoch)])
    chance = np.select([labels[:, 1] == 1, labels[:, 0] == 1], [1 / 20, 1 / 300], 1 / 90)
    counts = np.bincount(drawn, minlength=400)
    for rows in (slice(0, 290), slice(290, 310), slice(310, 400)):
        assert counts[rows].sum() / len(drawn) == pytest.approx(chance[rows].sum() / chance.sum(), abs=0.02)


def test_mixed_labels_are_shares_of_the_two_classes():
    recipe = AugmentSettings(crop=CROP, mixup=0.4, cutmix=1.0)
    weights = np.linspace(0.5, 1.5, COUNT)
    train = loader(augment=recipe, num_classes=6, weights=weights)
    for batch in train.epoch(0):
        own = Parameters(*batch.parameters.double().unbind(1)).own_share(CROP)[1:]
        assert len(batch.crops) == len(batch.parameters) == 13 and batch.labels.shape == (12, 6)
        torch.testing.assert_close(batch.labels.sum(dim=1), torch.ones(12))
        before = np.roll(batch.rows, 1)  # on one rank the first is mixed with the last
        expected = np.zeros((12, 6))
        np.add.at(expected, (np.arange(12), LABELS[batch.rows]), own.numpy())
        np.add.at(expected, (np.arange(12), LABELS[before]), 1 - own.numpy())
        np.testing.assert_allclose(batch.labels, expected, atol=1e-6)
        np.testing.assert_allclose(batch.weight, own * weights[batch.rows] + (1 - own) * weights[before], rtol=1e-6)
        table = torch.softmax(torch.randn(6, 6), dim=1)
        torch.testing.assert_close(rows_of(table, batch.labels).sum(dim=1), torch.ones(12))


def test_several_labels_at_once_are_floats():
    labels = np.random.default_rng(0).integers(0, 2, (COUNT, 3)).astype(np.uint8)
    batch = next(loader(labels=labels).epoch())
    assert batch.labels.dtype == torch.float32
    np.testing.assert_array_equal(batch.labels, labels[batch.rows])
    mixed = next(loader(labels=labels, augment=AugmentSettings(crop=CROP, mixup=1.0)).epoch())
    assert mixed.labels.shape == (12, 3) and ((mixed.labels > 0) & (mixed.labels < 1)).any()


def test_a_set_smaller_than_a_batch_is_one_batch_with_a_warning():
    with pytest.warns(UserWarning, match="43 training images .* 128: .* one batch of 43"):
        train = loader(batch_size=128)
    (batch,) = train.epoch()
    assert len(train) == 1 and sorted(batch.rows) == sorted(ROWS)
    with pytest.warns(UserWarning, match="one batch of 40"):
        assert loader(batch_size=128, world_size=4).batch_size == 40


def test_an_epoch_left_early_can_be_begun_again():
    train = loader(workers=2)
    batches = train.epoch(0)
    first = next(batches)
    batches.close()
    assert same(first, next(train.epoch(0)))


def test_images_smaller_than_the_crop_are_fine_for_a_resized_crop():
    train = loader(augment=AugmentSettings(crop=64, resized_crop=(0.5, 1.0)))
    batch = next(train.epoch())
    images = augment(batch.crops, batch.parameters, train.augment, torch.zeros(3), torch.ones(3))
    assert images.shape == (12, 3, 64, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"augment": AugmentSettings(crop=40)}, r"\d+ of 43 images are smaller than the crop of 40 .* \(row \d+\)"),
        ({"augment": AugmentSettings(crop=40, rotation=9)}, "images are smaller than the crop of 40"),
        ({"augment": None, "crop": 41}, "short_side of at least 41, or set crop to at most 20"),
        ({"augment": None}, "needs the side of its crop: pass crop"),
        ({"augment": None, "crop": 0}, "crop must be at least 1 pixel, got 0"),
        ({"crop": 19}, "crop is 19 but .* 20"),
        ({"rows": np.array([], dtype=np.int64)}, "no images to load: rows is empty"),
        ({"rows": np.array([3, COUNT])}, "rows must be from 0 to 52, got 3 to 53"),
        ({"labels": LABELS[:-1]}, "expected 53 labels.* got 52"),
        ({"labels": LABELS.astype(float)}, r"class indices \[N\] or zeros and ones \[N, K\], got float64"),
        ({"weights": np.ones(5)}, r"weights \[53\].* got \[5\]"),
        ({"weights": np.full(COUNT, np.nan)}, "weights must be finite"),
        ({"batch_size": 13, "world_size": 4}, "multiple of their number, got 13. Try 12"),
        ({"batch_size": 0}, "got 0. Try 1"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to 1, got 2"),
        ({"seed": -1}, "seed must be 0 or more, got -1"),
        ({"augment": AugmentSettings(crop=CROP, mixup=1)}, "mixup and cutmix need num_classes"),
        ({"augment": AugmentSettings(crop=CROP, mixup=1), "num_classes": 4}, "labels must be from 0 to 3, got 0 to 4"),
        ({"rows": ROWS[:3], "world_size": 4}, "3 training images .* 4 processes"),
    ],
)
def test_invalid_arguments_are_named(changes, message):
    with pytest.raises(InputError, match=message):
        loader(**changes)


def test_a_start_beyond_the_epoch_is_refused():
    with pytest.raises(InputError, match="start from 0 to 3, got epoch 0, start 4"):
        loader().epoch(0, start=4)
    assert list(loader().epoch(0, start=3)) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_gets_what_the_cpu_gets(recipe, tmp_path):
    mapped = decoded(tmp_path / "pixels")
    expected = list(loader(images=mapped, **recipe).epoch(1))
    for resident in (True, False):
        got = list(loader(images=mapped, device="cuda", resident=resident, **recipe).epoch(1))
        for a, b in zip(expected, got, strict=True):
            assert all(x is None or y.is_cuda for x, y in zip(a[:4], b[:4], strict=True))
            # A GPU gets frames of one size in all batches: there is more padding below and to the right.
            padded = torch.zeros(b.crops.shape, dtype=torch.uint8)
            padded[:, : a.crops.shape[1], : a.crops.shape[2]] = a.crops
            on_host = Batch(*(None if t is None else t.cpu() for t in b[:4]), b.rows)
            assert same(a._replace(crops=padded), on_host)


def test_there_is_one_stream_for_each_purpose(monkeypatch):
    """torch has 32 streams and hands them out in turn: a new one for each loader met that of a CUDA graph's capture."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    side_stream.cache_clear()
    device = torch.device("cuda", 0)
    found = {side_stream(purpose, device) for _ in range(40) for purpose in ("batches", "pixels")}
    side_stream.cache_clear()
    assert len(found) == 2


def test_one_very_wide_and_one_very_tall_image_swell_their_own_batch_alone():
    heights, widths = np.array([12] * 31 + [400], np.int32), np.array([12] * 30 + [400, 12], np.int32)
    sizes = heights.astype(np.int64) * widths * 3
    pixels = np.arange(sizes.sum(), dtype=np.int64).astype(np.uint8)
    images = DecodedImages(pixels, np.cumsum(sizes) - sizes, heights, widths)
    settings = AugmentSettings(crop=8, rotation=20.0)
    labels = np.arange(32) % 2
    loader = Loader(images, labels, np.arange(32), batch_size=4, augment=settings, num_classes=2)
    shapes = [tuple(batch.crops.shape[1:3]) for batch in loader.epoch()]
    assert shapes.count((12, 12)) >= 6 and max(shapes) > (12, 12)
    with pytest.warns(UserWarning, match=r"400 x 400 pixels, 1111 times the median"):
        _warn_of_padding((400, 400), heights, widths)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _warn_of_padding((20, 20), heights, widths)


# Crops and frames.

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
    assert held < len(kept.resident) <= held + 3 * 33 * 61
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


# Prefetching.


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_results_come_in_order_and_none_is_lost(workers):
    assert [made for (made,) in prefetch(lambda step: (step * 10,), range(3, 20), workers)] == list(range(30, 200, 10))
    assert list(prefetch(lambda step: (step,), range(0), workers)) == []


@pytest.mark.parametrize(("workers", "most"), [(0, 1), (2, 2)])
def test_only_a_few_are_prefetched(workers, most):
    made: list[int] = []

    def make(step: int) -> tuple[int]:
        made.append(step)
        return (step,)

    for (taken,) in prefetch(make, range(50), workers):
        assert len(made) <= taken + 1 + most
    assert sorted(made) == list(range(50))


def test_an_error_in_a_thread_is_raised_by_next():
    def make(step: int) -> tuple[int]:
        if step == 3:
            raise RuntimeError("the third")
        return (step,)

    batches = prefetch(make, range(10), workers=2)
    assert [next(batches) for _ in range(3)] == [(0,), (1,), (2,)]
    with pytest.raises(RuntimeError, match="the third"):
        next(batches)


def test_threads_end_when_the_iterator_is_closed_early():
    before = threading.active_count()
    batches = prefetch(lambda step: (step,), range(1000), workers=3)
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before


def test_every_thread_uses_one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threads = [made for (made,) in prefetch(lambda step: (torch.get_num_threads(),), range(4), workers=2)]
        assert threads == [1] * 4 and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
