"""Every batched operation against its torchvision.transforms.v2 counterpart, on the same parameters.

Tolerances: flips are exact; brightness, contrast and saturation 1e-6, hue 1e-5 of values in [0, 1]; rotation and
resized crop one grey level of 255 (both round to uint8, and the last bit before rounding may differ).
"""

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as tv
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import InterpolationMode

from cclnet.data import augment as operations


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


@settings(max_examples=60, deadline=None)
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
        tv.resized_crop(image.float(), *box, list(size), antialias=True).round().to(torch.uint8)
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
def test_rotate_agrees_with_torchvision_for_images_of_different_sizes(degrees):
    sizes = [(31, 40), (40, 25), (40, 40)]
    frame = torch.zeros(3, 3, 40, 40, dtype=torch.uint8)
    images = [images_of(2, *size, seed=i)[0] for i, size in enumerate(sizes)]
    for place, image in zip(frame, images, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = image
    top, left = torch.tensor([2.0, 7, 11]), torch.tensor([9.0, 0, 11])
    heights, widths = torch.tensor(sizes, dtype=torch.float32).unbind(1)
    ours = operations.rotate(frame, torch.full((3,), degrees), heights, widths, top, left, (20, 22))
    for i, image in enumerate(images):
        turned = tv.rotate(image.float(), degrees, interpolation=InterpolationMode.BILINEAR).round()
        expected = tv.crop(turned, int(top[i]), int(left[i]), 20, 22)
        assert (ours[i].float() - expected).abs().max() <= 1


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
