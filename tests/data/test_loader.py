import warnings

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as tv
from hypothesis import given, settings
from hypothesis import strategies as st

from cclnet.data.augment import Parameters, augment
from cclnet.data.cache import DecodedImages
from cclnet.data.loader import Batch, Loader, _warn_of_padding
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
            assert same(a, Batch(*(None if t is None else t.cpu() for t in b[:4]), b.rows))


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
