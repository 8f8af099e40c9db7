import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as tv
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torchvision.transforms import InterpolationMode

from cclnet.data import augment as operations
from cclnet.data.augment import Parameters, augment, normalise, sample_parameters
from cclnet.errors import InputError
from cclnet.settings import AugmentSettings

BICUBIC = InterpolationMode.BICUBIC

MEAN, STD = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.25, 0.3])
PLAIN = {"horizontal_flip": 0.0, "vertical_flip": 0.0, "brightness": 0.0, "contrast": 0.0, "saturation": 0.0,
         "hue": 0.0}  # fmt: skip


def drawn_for(settings: AugmentSettings, count: int, height: int = 40, width: int = 50, seed: int = 0) -> Parameters:
    sizes = np.full(count, height), np.full(count, width)
    return sample_parameters(settings, np.random.default_rng(seed), count, np.arange(count), *sizes)


def table_of(drawn: Parameters) -> torch.Tensor:
    return torch.from_numpy(np.stack(drawn, axis=1).astype(np.float32))


def crops_of(count: int, height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, height, width, 3), dtype=torch.uint8, generator=generator)


def mirrored_affine(
    image: torch.Tensor, degrees: float, zoom: float, shear: float, centre: list
) -> tuple[torch.Tensor, torch.Tensor]:
    """An image under torchvision's affine map (x, y of the ``centre``), mirrored beyond its edges, and where all 16
    pixels that a value is interpolated from lie inside the image.

    torchvision has no bicubic map of tensors, so it maps the coordinates, and the kernel is applied here.
    """
    height, width = image.shape[-2:]
    x, y = 2 * width, 2 * height
    down, right = torch.meshgrid(torch.arange(5.0 * height), torch.arange(5.0 * width), indexing="ij")
    moved = tv.affine(torch.stack((down, right)).double(), -float(degrees), [0, 0], float(zoom), [float(shear), 0.0],
                      interpolation=InterpolationMode.BILINEAR, center=[centre[0] + x, centre[1] + y])  # fmt: skip
    down, right = (own[y : y + height, x : x + width].numpy() - start for own, start in zip(moved, (y, x), strict=True))
    value, inside = np.zeros((image.shape[0], height, width)), np.ones((height, width), bool)
    for i in range(-1, 3):
        for j in range(-1, 3):
            row, column = np.floor(down).astype(int) + i, np.floor(right).astype(int) + j
            weight = cubic(down - row, -0.75) * cubic(right - column, -0.75)
            inside &= (weight == 0) | ((row >= 0) & (row < height) & (column >= 0) & (column < width))
            mirrored = [np.where(at % (2 * n) < n, at % (2 * n), 2 * n - 1 - at % (2 * n))
                        for at, n in ((row, height), (column, width))]  # fmt: skip
            value += weight * image.numpy()[:, mirrored[0], mirrored[1]]
    return torch.from_numpy(value.clip(0, 255)).float(), torch.from_numpy(inside)


def cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """The kernel of Keys (1981)."""
    d = np.abs(distance)
    near, far = (a + 2) * d**3 - (a + 3) * d**2 + 1, a * (d**3 - 5 * d**2 + 8 * d - 4)
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def by_torchvision(crop: torch.Tensor, drawn: Parameters, i: int, settings: AugmentSettings) -> torch.Tensor:
    """The same image through torchvision's own functions."""
    image = crop.permute(2, 0, 1)
    box = [int(value[i]) for value in (drawn.top, drawn.left, drawn.height, drawn.width)]
    if settings.affine:
        centre = [box[1] + box[3] / 2, box[0] + box[2] / 2]
        moved, _ = mirrored_affine(image, drawn.degrees[i], drawn.zoom[i], drawn.shear[i], centre)
        image = moved.round().to(torch.uint8)
    if settings.resized_crop:
        resized = tv.resized_crop(image.float(), *box, [settings.crop] * 2, BICUBIC, antialias=True)
        image = resized.round().clamp(0, 255).to(torch.uint8)
    elif settings.affine:
        image = tv.crop(image, *box)
    image = tv.horizontal_flip(image) if drawn.horizontal[i] else image
    image = tv.vertical_flip(image) if drawn.vertical[i] else image
    image = image.mT if drawn.transpose[i] else image
    image = tv.to_dtype(image, torch.float32, scale=True)
    image = tv.adjust_brightness(image, float(drawn.brightness[i]))
    image = tv.adjust_contrast(image, float(drawn.contrast[i]))
    image = tv.adjust_saturation(image, float(drawn.saturation[i]))
    image = tv.adjust_hue(image, float(drawn.hue[i]))
    image = tv.adjust_sharpness(image, float(drawn.sharpness[i]))
    image = tv.posterize(image, int(drawn.bits[i])) if drawn.bits[i] < 8 else image
    image = tv.autocontrast(image) if drawn.autocontrast[i] else image
    image = tv.normalize(image, MEAN.tolist(), STD.tolist())
    top, left, bottom, right = (int(value[i]) for value in drawn[-5:-1])
    return tv.erase(image, top, left, bottom - top, right - left, torch.zeros(()))


@pytest.mark.parametrize("crop", [32, 37])
def test_the_whole_recipe_agrees_with_torchvision(crop):
    settings = AugmentSettings(crop=crop, transpose=0.5, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.3)
    drawn, crops = drawn_for(settings, 150), crops_of(150, crop, crop)  # more than one piece of the batch
    images = augment(crops, table_of(drawn), settings, MEAN, STD)
    assert images.shape == (150, 3, crop, crop) and images.dtype == torch.float32
    assert images.is_contiguous(memory_format=torch.channels_last)
    expected = torch.stack([by_torchvision(crops[i], drawn, i, settings) for i in range(150)])
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-4)  # 1e-5 in [0, 1], divided by std


@pytest.mark.parametrize("warp", [{"rotation": 30.0}, {"resized_crop": (0.2, 1.0)},
                                  {"rotation": 180.0}, {"zoom": (0.5, 2.0)}, {"shear": 30.0},
                                  {"rotation": 180.0, "zoom": (0.7, 1.4), "shear": 10.0},
                                  {"rotation": 90.0, "resized_crop": (0.3, 0.9)}])  # fmt: skip
def test_rotation_and_resized_crop_in_the_recipe(warp):
    settings = AugmentSettings(
        crop=24, **{**PLAIN, "vertical_flip": 0.5, "horizontal_flip": 0.5, "transpose": 0.5}, **warp
    )
    drawn = drawn_for(settings, 12)
    frames = torch.nn.functional.avg_pool2d(crops_of(12, 44, 54).permute(0, 3, 1, 2).float(), 5, stride=1)
    frames = frames.permute(0, 2, 3, 1).to(torch.uint8)  # 40 x 50, smooth: two roundings stay near each other
    images = augment(frames, table_of(drawn), settings, MEAN, STD)
    expected = torch.stack([by_torchvision(frames[i], drawn, i, settings) for i in range(12)])
    difference = ((images - expected) * STD[:, None, None]).abs() * 255
    # A level for each resampling, but for pixels interpolated from beyond the edges, where ours end at the last pixel.
    assert (difference <= 2.01).float().mean() > 0.98 and difference.max() < 30


def test_trivial_colour_and_erasing_in_the_recipe():
    settings = AugmentSettings(crop=32, trivial_colour=0.9, erasing=0.7, hue=0.3)
    drawn, crops = drawn_for(settings, 120), crops_of(120, 32, 32)
    crops = torch.nn.functional.avg_pool2d(crops.permute(0, 3, 1, 2).float(), 3, 1, 1).permute(0, 2, 3, 1).byte()
    images = augment(crops, table_of(drawn), settings, MEAN, STD)
    expected = torch.stack([by_torchvision(crops[i], drawn, i, settings) for i in range(120)])
    close = ((images - expected) * STD[:, None, None]).abs() < 1e-5
    steps = drawn.bits < 8  # a value within rounding of a step may fall on either side of it
    assert close[~steps].all() and close[steps].float().mean() > 0.999 and steps.any()


def test_trivial_colour_changes_one_thing_per_image():
    drawn = drawn_for(AugmentSettings(crop=8, trivial_colour=0.6), 7000)
    factors = np.stack([drawn.brightness, drawn.contrast, drawn.saturation, drawn.sharpness])
    changed = np.stack([*(factors != 1.0), drawn.bits < 8, drawn.autocontrast]).astype(bool)
    assert (changed.sum(axis=0) <= 1).all() and not drawn.hue.any()
    assert changed[:4].mean(axis=1) == pytest.approx([1 / 7] * 4, abs=0.02)  # all equally often
    assert factors.min() == pytest.approx(0.4, abs=0.01) and factors.max() == pytest.approx(1.6, abs=0.01)
    assert set(drawn.bits) == {4, 5, 6, 7, 8}


def test_erased_rectangles_have_the_share_and_frequency_of_torchvision():
    drawn = drawn_for(AugmentSettings(crop=100, erasing=0.4), 4000)
    height, width = drawn.erase_bottom - drawn.erase_top, drawn.erase_right - drawn.erase_left
    erased = height > 0
    assert erased.mean() == pytest.approx(0.4, abs=0.03)
    area, ratio = (height * width)[erased] / 1e4, (height / np.maximum(width, 1))[erased]
    assert area.min() > 0.018 and area.max() <= 0.335 and area.mean() == pytest.approx(0.175, abs=0.01)
    assert ratio.min() > 0.27 and ratio.max() < 3.5
    assert drawn.erase_top.min() == 0 and drawn.erase_bottom.max() == 100 == drawn.erase_right.max()


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, "aot_eager"),
        ({"mixup": 0.4, "cutmix": 1.0}, "eager"),
        ({"rotation": 20.0, "resized_crop": (0.5, 1.0), "mixup": 0.2}, "eager"),
        ({"rotation": 180.0, "zoom": (0.8, 1.2), "trivial_colour": 0.5, "erasing": 0.5}, "eager"),
        (PLAIN, "eager"),
    ],
)
def test_compiles_into_one_graph_with_the_same_result(changes, backend):
    settings = AugmentSettings(crop=20, **changes)
    side = (40, 50) if settings.warps else (20, 20)
    crops, parameters = crops_of(6, *side), table_of(drawn_for(settings, 6))
    compiled = torch.compile(augment, fullgraph=True, backend=backend)
    expected = augment(crops, parameters, settings, MEAN, STD)
    torch.testing.assert_close(compiled(crops, parameters, settings, MEAN, STD), expected, rtol=0, atol=1e-4)


def test_mixing_uses_the_image_before_and_gives_one_image_less():
    settings = AugmentSettings(crop=16, **PLAIN, mixup=1.0, cutmix=1.0)
    drawn, crops = drawn_for(settings, 9), crops_of(9, 16, 16)
    plain = normalise(crops, MEAN, STD)
    mixed = augment(crops, table_of(drawn), settings, MEAN, STD)
    assert len(mixed) == 8
    kinds = set()
    for i in range(1, 9):
        area = slice(drawn.patch_top[i], drawn.patch_bottom[i]), slice(drawn.patch_left[i], drawn.patch_right[i])
        expected = drawn.share[i] * plain[i] + (1 - drawn.share[i]) * plain[i - 1]
        expected[:, area[0], area[1]] = plain[i - 1][:, area[0], area[1]]
        torch.testing.assert_close(mixed[i - 1].double(), expected.double(), rtol=0, atol=1e-5)
        assert drawn.share[i] == 1 or area[0].start == area[0].stop  # one of the two
        kinds.add("mixup" if drawn.share[i] < 1 else "cutmix")
    assert kinds == {"mixup", "cutmix"}


def test_own_share_is_what_the_pixels_show():
    settings = AugmentSettings(crop=32, **PLAIN, cutmix=1.0)
    drawn = drawn_for(settings, 64)
    crops = torch.zeros(64, 32, 32, 3, dtype=torch.uint8)
    crops[1::2] = 255  # black and white in turn, so that the mean shows whose pixels these are
    mixed = augment(crops, table_of(drawn), settings, torch.zeros(3), torch.ones(3))
    white = mixed.mean(dim=(1, 2, 3)).numpy()
    own = np.where(np.arange(1, 64) % 2, white, 1 - white)
    np.testing.assert_allclose(drawn.own_share(32)[1:], own, atol=1e-6)
    assert own.min() < 0.3 and own.max() > 0.7


def test_draws_lie_where_the_settings_say():
    settings = AugmentSettings(crop=32, brightness=0.3, contrast=1.5, hue=0.1, horizontal_flip=0.2, rotation=15)
    drawn = drawn_for(settings, 4000)
    assert drawn.brightness.min() >= 0.7 and drawn.brightness.max() <= 1.3
    assert drawn.contrast.min() >= 0.0 and drawn.contrast.max() <= 2.5  # a negative factor would be a negative
    assert abs(drawn.hue).max() <= 0.1 and abs(drawn.degrees).max() <= 15
    assert set(drawn.top) == set(range(9)) and set(drawn.left) == set(range(19))  # every window, no other
    assert drawn.horizontal.mean() == pytest.approx(0.2, abs=0.03)
    assert drawn.vertical.mean() == pytest.approx(0.5, abs=0.04)
    for values, width in ((drawn.brightness, 0.6), (drawn.contrast, 2.5), (drawn.hue, 0.2), (drawn.degrees, 30)):
        assert values.std() == pytest.approx(width / 12**0.5, rel=0.05)  # uniform


def test_switching_one_operation_on_leaves_the_others_alone():
    few = drawn_for(AugmentSettings(crop=32), 10)
    more = drawn_for(
        AugmentSettings(crop=32, rotation=10, mixup=0.2, cutmix=0.5, brightness=0, erasing=1, zoom=(1, 2)), 10
    )
    for name in ("top", "left", "horizontal", "vertical", "contrast", "hue"):
        np.testing.assert_array_equal(getattr(few, name), getattr(more, name))


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 10**6))
@hypothesis_settings(max_examples=50, deadline=None)
def test_resized_boxes_lie_inside_any_image(height, width, seed):
    settings = AugmentSettings(crop=8, resized_crop=(0.08, 1.0))
    drawn = drawn_for(settings, 20, height, width, seed)
    assert (drawn.height >= 1).all() and (drawn.width >= 1).all()
    assert (drawn.top >= 0).all() and (drawn.left >= 0).all()
    assert (drawn.top + drawn.height <= height).all() and (drawn.left + drawn.width <= width).all()


def test_resized_boxes_have_the_asked_area_and_ratio_or_the_middle_of_a_long_image():
    drawn = drawn_for(AugmentSettings(crop=8, resized_crop=(0.25, 0.5)), 3000, 300, 400)
    area, ratio = drawn.height * drawn.width / (300 * 400), drawn.width / drawn.height
    assert 0.24 < area.min() < 0.26 and 0.49 < area.max() < 0.51
    assert 0.74 < ratio.min() < 0.77 and 1.30 < ratio.max() < 1.35
    long = drawn_for(AugmentSettings(crop=8, resized_crop=(1.0, 1.0)), 5, 30, 300)  # no such box fits
    assert set(long.height) == {30} and set(long.width) == {40} and set(long.left) == {130}
    tall = drawn_for(AugmentSettings(crop=8, resized_crop=(1.0, 1.0)), 5, 300, 30)
    assert set(tall.width) == {30} and set(tall.height) == {40} and set(tall.top) == {130}


def test_a_rank_draws_what_the_whole_batch_drew():
    settings = AugmentSettings(crop=32, mixup=0.3, cutmix=0.3, resized_crop=(0.2, 1.0))
    everything = drawn_for(settings, 12)
    some = np.array([11, 3, 4])
    sizes = np.full(3, 40), np.full(3, 50)
    mine = sample_parameters(settings, np.random.default_rng(0), 12, some, *sizes)
    for whole, part in zip(everything, mine, strict=True):
        np.testing.assert_array_equal(whole[some], part)


def test_normalise_agrees_with_torchvision():
    crops = crops_of(3, 9, 11)
    expected = tv.normalize(crops.permute(0, 3, 1, 2).float() / 255, MEAN.tolist(), STD.tolist())
    ours = normalise(crops, MEAN, STD)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crop": 0}, "augment.crop must be at least 1 and at most 2048, got 0"),
        ({"horizontal_flip": 1.5}, "horizontal_flip must be at least 0 and at most 1, got 1.5"),
        ({"hue": 0.6}, "hue must be at least 0 and at most 0.5"),
        ({"brightness": -0.1}, "brightness must be at least 0"),
        ({"brightness": float("inf")}, "brightness must be at least 0, got inf"),
        ({"resized_crop": []}, "resized_crop must be 2 numbers"),
        ({"mixup": float("nan")}, "mixup must be at least 0, got nan"),
        ({"resized_crop": (0.5, 2.0)}, r"resized_crop\[1\] must be above 0 and at most 1, got 2.0"),
        ({"resized_crop": [0.5]}, "resized_crop must be 2 numbers"),
        ({"resized_ratio": (2, 1)}, "resized_ratio must be 2 numbers, in ascending order, above 0"),
        ({"hue": 1.0, "cutmix": -1.0}, "hue must .*; setting augment.cutmix must"),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(InputError, match=message):
        AugmentSettings(**changes)


def test_lists_as_a_settings_file_gives_them():
    assert AugmentSettings(resized_crop=[0.5, 1]) == AugmentSettings(resized_crop=(0.5, 1))  # type: ignore[arg-type]


# Every batched operation against its torchvision.transforms.v2 counterpart, on the same parameters.
#
# Tolerances: flips are exact; brightness, contrast and saturation 1e-6, hue 1e-5 of values in [0, 1]; rotation and
# resized crop one grey level of 255 (both round to uint8, and the last bit before rounding may differ).


def images_of(count: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    """uint8 images with smooth parts, noise, grey, black, white and pure colours."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, height, width), generator=generator, dtype=torch.uint8)
    ramp = torch.linspace(0, 255, width).to(torch.uint8).expand(height, width)
    images[0] = torch.stack((ramp, ramp.flip(1), ramp // 2))
    pure = [(0, 0, 0), (255, 255, 255), (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255),
            (255, 0, 255), (128, 128, 128), (255, 128, 128), (128, 128, 255)]  # fmt: skip
    for column, colour in enumerate(pure):
        images[1, :, :, column] = torch.tensor(colour, dtype=torch.uint8)[:, None]
    return images


def batched(function, images, factors):
    return torch.stack([function(image, factor) for image, factor in zip(images, factors.tolist(), strict=True)])


IMAGES = images_of(8, 13, 17)
FLOATS = IMAGES.float() / 255


def on_planes(operation, images, *parameters):
    changed = operation(tuple(images.unbind(1)), *parameters)
    return changed if isinstance(changed, torch.Tensor) else operations.from_planes(changed)


def contrast(planes, factor):
    return operations.contrast(planes, factor, operations.grey(planes).mean(dim=(1, 2)))


def test_planes_are_the_bytes_over_255():
    torch.testing.assert_close(operations.from_planes(operations.to_planes(IMAGES)), FLOATS, rtol=0, atol=1e-7)


def test_mean_grey_is_that_of_the_brightened_image():
    factors = torch.linspace(0, 3, 8)
    brightened = batched(tv.adjust_brightness, FLOATS, factors)
    expected = batched(lambda image, _: tv.rgb_to_grayscale(image).mean(), brightened, factors)
    for images in (IMAGES, IMAGES.contiguous(memory_format=torch.channels_last)):
        torch.testing.assert_close(operations.mean_grey(images, factors), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (operations.brightness, tv.adjust_brightness),
        (contrast, tv.adjust_contrast),
        (operations.saturation, tv.adjust_saturation),
    ],
)
def test_colour_factors_agree_with_torchvision(ours, theirs):
    factors = torch.tensor([0.0, 0.3, 0.9, 1.0, 1.1, 1.7, 3.0, 10.0])
    before = FLOATS.clone()
    torch.testing.assert_close(on_planes(ours, FLOATS, factors), batched(theirs, FLOATS, factors), rtol=0, atol=1e-6)
    assert torch.equal(FLOATS, before)  # in-place steps stay inside


def test_hue_agrees_with_torchvision_all_around_the_circle():
    for shifts in torch.linspace(-0.5, 0.5, 64).reshape(8, 8):  # wraps around at both ends
        torch.testing.assert_close(
            on_planes(operations.hue, FLOATS, shifts), batched(tv.adjust_hue, FLOATS, shifts), rtol=0, atol=1e-5
        )


def test_hue_turns_red_to_green_and_leaves_grey_alone():
    red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
    green = on_planes(operations.hue, red, torch.tensor([1 / 3])).flatten()
    torch.testing.assert_close(green, torch.tensor([0.0, 1.0, 0.0]))
    grey = torch.full((1, 3, 2, 2), 0.37)
    assert torch.equal(on_planes(operations.hue, grey, torch.tensor([0.41])), grey)


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 255), min_size=3, max_size=3), st.floats(-0.5, 0.5, width=32))
def test_hue_of_any_colour(colour, shift):
    pixel = torch.tensor(colour, dtype=torch.float32).view(1, 3, 1, 1) / 255
    expected = tv.adjust_hue(pixel[0], shift)
    turned = on_planes(operations.hue, pixel, torch.tensor([shift]))[0]
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-5)


def test_flips_are_exact():
    images = images_of(4, 5, 11)
    flipped = operations.flip(images, torch.tensor([0.0, 1, 0, 1]), torch.tensor([0.0, 0, 1, 1]))
    expected = [images[0], tv.horizontal_flip(images[1]), tv.vertical_flip(images[2]),
                tv.vertical_flip(tv.horizontal_flip(images[3]))]  # fmt: skip
    assert torch.equal(flipped, torch.stack(expected))


@pytest.mark.parametrize("size", [(16, 16), (33, 20), (7, 60)])
def test_resized_crop_agrees_with_torchvision(size):
    images = images_of(6, 41, 64)
    boxes = torch.tensor([[0, 0, 41, 64], [3, 5, 20, 20], [10, 1, 31, 63], [40, 63, 1, 1], [0, 30, 16, 16],
                          [7, 0, 33, 20]])  # fmt: skip
    expected = [
        tv.resized_crop(image.float(), *box, list(size), BICUBIC, antialias=True).round().clamp(0, 255).to(torch.uint8)
        for image, box in zip(images, boxes.tolist(), strict=True)
    ]
    ours = operations.resized_crop(images, *boxes.float().unbind(1), size)
    difference = (ours.int() - torch.stack(expected).int()).abs()
    assert difference.max() <= 1 and difference.float().mean() < 0.01


def test_resized_crop_at_its_own_size_copies():
    images = images_of(2, 12, 14)
    box = [torch.tensor([value, value], dtype=torch.float32) for value in (2, 3, 8, 9)]
    assert torch.equal(operations.resized_crop(images, *box, (8, 9)), images[:, :, 2:10, 3:12])


@pytest.mark.parametrize("degrees", [0.0, 90.0, -37.3, 12.0, 180.0])
def test_affine_agrees_with_torchvision_for_images_of_different_sizes(degrees):
    sizes = [(31, 40), (40, 25), (40, 40)]
    frame = torch.zeros(3, 3, 40, 40, dtype=torch.uint8)
    images = [images_of(2, *size, seed=i)[0] for i, size in enumerate(sizes)]
    for place, image in zip(frame, images, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = image
    top, left = torch.tensor([2.0, 7, 11]), torch.tensor([9.0, 0, 11])
    heights, widths = torch.tensor(sizes, dtype=torch.float32).unbind(1)
    zoom, shear = torch.tensor([1.0, 1.3, 0.6]), torch.tensor([0.0, 20.0, -10.0])
    centre = top + 10, left + 11
    ours = operations.affine(
        frame, torch.full((3,), degrees), zoom, shear, heights, widths, *centre, top, left, (20, 22)
    )
    for i, image in enumerate(images):
        moved, inside = mirrored_affine(image, degrees, zoom[i], shear[i], [float(centre[1][i]), float(centre[0][i])])
        box = int(top[i]), int(left[i]), 20, 22
        difference = (ours[i].float() - tv.crop(moved.round(), *box)).abs()[:, tv.crop(inside, *box)]
        assert difference.numel() > 600 and difference.max() <= 1


def test_a_quarter_turn_of_the_crop_is_exact():
    image = images_of(2, 20, 33)[:1]
    at = [torch.tensor([value]) for value in (4.0, 7.0)]
    turned = [torch.tensor([value]) for value in (90.0, 1.0, 0.0, 20.0, 33.0, 10.0, 13.0)]
    crop = operations.affine(image, *turned, *at, (12, 12))
    assert torch.equal(crop, image[:, :, 4:16, 7:19].rot90(1, (-2, -1)))


def test_eight_orientations_are_equally_likely():
    settings = AugmentSettings(crop=4, **{**PLAIN, "vertical_flip": 0.5, "horizontal_flip": 0.5, "transpose": 0.5})
    image, zero, one = crops_of(1, 4, 4), torch.zeros(3), torch.ones(3)
    images = augment(image.expand(4000, -1, -1, -1), table_of(drawn_for(settings, 4000)), settings, zero, one)
    square = image[0].permute(2, 0, 1) / 255
    orientations = [turned.rot90(k, (-2, -1)) for turned in (square, square.mT) for k in range(4)]
    counts = [int((images - own).abs().amax(dim=(1, 2, 3)).lt(1e-6).sum()) for own in orientations]
    assert sum(counts) == 4000 and min(counts) > 420


def test_interpolation_keeps_the_contrast_of_fine_texture():
    # Bilinear interpolation keeps 0.67 of this variance, the mean over all offsets.
    angle = 2 * np.pi * np.arange(64) / 5  # five pixels a wave, in both directions
    wave = 128 + 40 * (np.sin(angle)[:, None] + np.sin(angle)[None, :])
    images = torch.from_numpy(wave.round()).to(torch.uint8).expand(40, 3, -1, -1)
    offset = torch.linspace(0, 1, 41)[:40]
    still, size = (torch.zeros(40), torch.ones(40), torch.zeros(40)), torch.full((40,), 64.0)
    moved = operations.affine(images, *still, size, size, 20 * torch.ones(40), 20 * torch.ones(40),
                              8 + offset, 8 + offset, (40, 40))  # fmt: skip
    resized = operations.resized_crop(images, 8 + offset, 8 + offset, size - 24, size - 24, (40, 40))
    for own in (moved, resized):
        assert own.float().var(dim=(2, 3)).mean() / wave.var() > 0.85


@pytest.mark.parametrize("warp", [{"rotation": 180.0, "zoom": (0.8, 1.25), "shear": 5.0}, {"resized_crop": (0.3, 0.8)}])
def test_images_that_are_not_warped_are_not_interpolated(warp):
    never = AugmentSettings(crop=24, **PLAIN, warp=0.0, **warp)
    crops, zero, one = crops_of(40, 40, 50), torch.zeros(3), torch.ones(3)
    drawn = drawn_for(never, 40)
    images = (augment(crops, table_of(drawn), never, zero, one) * 255).round().to(torch.uint8)
    for image, crop, top, left in zip(images, crops, drawn.top, drawn.left, strict=True):
        assert torch.equal(image, crop[top : top + 24, left : left + 24].permute(2, 0, 1))
    half = drawn_for(AugmentSettings(crop=24, **PLAIN, warp=0.5, **warp), 4000)
    plain = (half.degrees == 0) & (half.zoom == 1) & (half.shear == 0) & (half.height == 24) & (half.width == 24)
    assert 0.46 < plain.mean() < 0.54


def test_no_corner_is_black():
    settings = AugmentSettings(crop=24, **PLAIN, rotation=180.0, zoom=(0.5, 2.0), shear=30.0)
    frames = torch.zeros(50, 60, 60, 3, dtype=torch.uint8)  # the frame around the images is black
    frames[:, :40, :50] = 200
    images = augment(frames, table_of(drawn_for(settings, 50)), settings, torch.zeros(3), torch.ones(3))
    torch.testing.assert_close(images, torch.full_like(images, 200 / 255))


@pytest.mark.parametrize(
    ("ours", "theirs", "values"),
    [
        (operations.sharpness, tv.adjust_sharpness, torch.tensor([0.0, 0.3, 0.9, 1.0, 1.1, 1.5, 1.9, 3.0])),
        (operations.posterize, lambda x, b: tv.posterize(x, int(b)) if b < 8 else x, torch.arange(1.0, 9.0)),
        (operations.autocontrast, lambda x, on: tv.autocontrast(x) if on else x, torch.arange(8.0) % 2),
    ],
)
def test_further_colour_operations_agree_with_torchvision(ours, theirs, values):
    torch.testing.assert_close(ours(FLOATS, values), batched(theirs, FLOATS, values), rtol=0, atol=1e-6)
    flat = torch.full((1, 3, 5, 5), 0.3)
    assert torch.equal(ours(flat, torch.ones(1) * 8), flat) or ours is operations.sharpness


def test_test_images_have_the_mean_scale_of_training():
    sizes = np.full(4000, 256), np.full(4000, 341)
    assert operations.matching_short_side(AugmentSettings(rotation=180), 256, *sizes) == 256
    half = AugmentSettings(zoom=(1.5, 1.5), warp=0.5)  # the geometric mean of 1 and 1.5
    assert operations.matching_short_side(half, 256, *sizes) == round(256 * 1.5**0.5)
    assert operations.matching_short_side(AugmentSettings(zoom=(0.8, 1.25)), 256, *sizes) == 256
    assert operations.matching_short_side(AugmentSettings(zoom=(1.0, 1.44)), 256, *sizes) == round(1.2 * 256)
    square = np.full(4000, 256), np.full(4000, 256)
    quarter = AugmentSettings(crop=224, resized_crop=(0.25, 0.25))  # half of the side is enlarged to 224
    assert operations.matching_short_side(quarter, 256, *square) == pytest.approx(448, abs=2)
    whole = AugmentSettings(crop=224, resized_crop=(1.0, 1.0))
    assert operations.matching_short_side(whole, 256, *sizes) == 224  # not below the crop


def test_mixup_agrees_with_torchvision():
    lam = 0.3
    expected = FLOATS.roll(1, 0).mul(1.0 - lam).add(FLOATS.mul(lam))  # what v2.MixUp computes with this λ
    ours = operations.mixup(FLOATS, FLOATS.roll(1, 0), torch.full((8,), lam))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_cutmix_takes_exactly_the_rectangle():
    box = [torch.full((8,), float(value)) for value in (2, 3, 9, 16)]
    ours = operations.cutmix(FLOATS, FLOATS.roll(1, 0), *box)
    expected = FLOATS.clone()
    expected[:, :, 2:9, 3:16] = FLOATS.roll(1, 0)[:, :, 2:9, 3:16]
    assert torch.equal(ours, expected)
    empty = [torch.zeros(8)] * 4
    assert torch.equal(operations.cutmix(FLOATS, FLOATS.roll(1, 0), *empty), FLOATS)


def test_parameters_belong_to_their_own_image():
    factors = torch.tensor(np.linspace(0.5, 1.5, 8), dtype=torch.float32)
    for operation in (operations.brightness, contrast, operations.saturation):
        alone = torch.cat([on_planes(operation, FLOATS[i : i + 1], factors[i : i + 1]) for i in range(8)])
        torch.testing.assert_close(on_planes(operation, FLOATS, factors), alone, rtol=0, atol=1e-6)
