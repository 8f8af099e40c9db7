"""Batched image operations: one parameter an image, each equal to its torchvision.transforms.v2 namesake.

Parameters are [n]. Geometry maps uint8 images [n, 3, h, w] to uint8; colour works on three planes of floats in
[0, 1], red, green and blue, [n, h, w] each. No function branches on data and every shape is known beforehand, so
that a chain of them compiles into few kernels: planes let the compiler keep a pixel in registers from the bytes
to the normalised value. Colour has no ``where`` and steps in place on its own results, because the same lines
also run uncompiled on a CPU, where that is much faster.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Planes = tuple[Tensor, Tensor, Tensor]
GREY = (0.2989, 0.587, 0.114)  # what torchvision weighs red, green and blue with


def _per_image(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def flip(images: Tensor, horizontal: Tensor, vertical: Tensor) -> Tensor:
    """uint8 images, mirrored where ``horizontal`` is 1 and turned upside down where ``vertical`` is 1.

    >>> flip(torch.tensor([[[[1, 2, 3]]]], dtype=torch.uint8), torch.ones(1), torch.zeros(1))
    tensor([[[[3, 2, 1]]]], dtype=torch.uint8)
    """
    for flag, dim in ((horizontal, -1), (vertical, -2)):
        mask = -_per_image(flag).to(torch.uint8)  # 0 or 255: picks one of the two, bit by bit
        images = images ^ ((images ^ images.flip(dim)) & mask)
    return images


def planes_of(images: Tensor) -> Planes:
    """uint8 images as three planes of floats in [0, 1], red, green and blue, [n, h, w] each."""
    red, green, blue = (images[:, i].float().div_(255.0) for i in range(3))  # unbind would be materialised
    return red, green, blue


def together(planes: Planes) -> Tensor:
    """Three planes as images [n, 3, h, w]; on a GPU channels last in memory, as the network takes them."""
    return torch.stack(planes, dim=-1).permute(0, 3, 1, 2) if planes[0].is_cuda else torch.stack(planes, dim=1)


def grey(planes: Planes) -> Tensor:
    """Brightness as the eye weighs it, [n, h, w]."""
    red, green, blue = planes
    return (red * GREY[0]).add_(green, alpha=GREY[1]).add_(blue, alpha=GREY[2])


def mean_grey(images: Tensor, factor: Tensor) -> Tensor:
    """The mean grey [n] of uint8 images whose brightness is changed by ``factor``.

    From the bytes and not from the planes, so that compiled code sums over memory in its order."""
    lines = images.permute(0, 2, 3, 1).flatten(2).float().mul_(factor[:, None, None] / 255.0).clamp_(max=1.0)
    channel = torch.arange(3, device=images.device)
    weights = torch.where(channel == 0, GREY[0], torch.where(channel == 1, GREY[1], GREY[2]))
    height, width = images.shape[-2:]
    return lines.mul_(weights.repeat(width)).sum(dim=(1, 2)) / (height * width)


def _towards(planes: Planes, factor: Tensor, other: Tensor) -> Planes:
    """``clamp(f x + (1 − f) other)``."""
    factor = factor[:, None, None]
    rest = (1.0 - factor) * other
    red, green, blue = ((plane * factor).add_(rest).clamp_(0.0, 1.0) for plane in planes)
    return red, green, blue


def brightness(planes: Planes, factor: Tensor) -> Planes:
    """``clamp(f x)``: towards black, or away from it."""
    red, green, blue = ((plane * factor[:, None, None]).clamp_(max=1.0) for plane in planes)
    return red, green, blue


def contrast(planes: Planes, factor: Tensor, mean: Tensor) -> Planes:
    """``clamp(f x + (1 − f) mean)``: towards the ``mean`` grey [n] of the image, or away from it."""
    return _towards(planes, factor, mean[:, None, None])


def saturation(planes: Planes, factor: Tensor) -> Planes:
    """``clamp(f x + (1 − f) grey(x))``: towards the grey image, or away from it."""
    return _towards(planes, factor, grey(planes))


def hue(planes: Planes, shift: Tensor) -> Tensor:
    """Turn the hue by ``shift`` (a fraction of the whole circle, in [−1/2, 1/2]); value and saturation stay.
    Gives the images in one, [n, 3, h, w].

    With v, m the largest and smallest of red, green, blue and d = v − m, the hue in sixths of the circle is
    ``H = ±(1 + (g + b − r − m)/d)`` with the sign of g − b, and back again
    ``r = m + d clamp(|H − 3| − 1)``, ``g = m + d clamp(2 − |H − 2|)``, ``b = m + d clamp(2 − |H − 4|)``.
    """
    red, green, blue = planes
    least = torch.minimum(torch.minimum(red, green), blue)
    span = torch.maximum(torch.maximum(red, green), blue).sub_(least)
    # A grey pixel has no hue: whatever is computed for it is multiplied by a span of zero.
    away = (green + blue).sub_(red).sub_(least).div_(span.clamp(min=1e-9)).add_(1.0)
    turned = torch.copysign(away, green - blue).add_(6.0 * shift[:, None, None])
    turned = turned.sub_((turned / 6.0).floor_(), alpha=6.0)
    # The three formulas as one with coefficients, so that compiled code computes one of them for each value.
    channel = torch.arange(3, device=shift.device)[:, None, None]
    is_red = channel == 0
    middle, slope, top = torch.where(is_red, 3, 2 * channel), torch.where(is_red, 1, -1), torch.where(is_red, -1, 2)
    strength = (turned[:, None] - middle).abs_().mul_(slope).add_(top).clamp_(0.0, 1.0)
    return strength.mul_(span[:, None]).add_(least[:, None])


def rotate(
    images: Tensor, degrees: Tensor, height: Tensor, width: Tensor, top: Tensor, left: Tensor, size: tuple[int, int]
) -> Tensor:
    """uint8 images turned counter-clockwise about their middle (bilinear, zero outside), of which the window
    of ``size`` at (``top``, ``left``) is given. Images are ``height`` × ``width`` in the upper left corner of
    their frame and zero in the rest of it."""
    frame_height, frame_width = images.shape[-2:]
    angle = torch.deg2rad(degrees)[:, None, None]
    cosine, sine = angle.cos(), angle.sin()
    down = torch.arange(size[0], device=images.device) + 0.5
    right = torch.arange(size[1], device=images.device) + 0.5
    y = (down[None, :] + (top - height / 2)[:, None])[:, :, None]
    x = (right[None, :] + (left - width / 2)[:, None])[:, None, :]
    from_x = cosine * x - sine * y + (width / 2)[:, None, None]
    from_y = sine * x + cosine * y + (height / 2)[:, None, None]
    grid = torch.stack((from_x * (2 / frame_width) - 1, from_y * (2 / frame_height) - 1), dim=-1)
    turned = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return turned.round_().to(torch.uint8)


def resized_crop(
    images: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor, size: tuple[int, int]
) -> Tensor:
    """uint8 images: the box ``height`` × ``width`` at (``top``, ``left``), resized to ``size`` (bilinear,
    antialiased: a triangle as wide as the step of the output pixels, and at least one input pixel).

    The filter is separable, so it is two products with matrices of weights, one an image."""
    # Pixels are exact in float16 and weights good to 2^-11, a tenth of a grey level, at tensor core speed.
    dtype = torch.float16 if images.is_cuda else torch.float32
    rows = _resize_weights(top, height, images.shape[-2], size[0]).to(dtype)
    columns = _resize_weights(left, width, images.shape[-1], size[1]).to(dtype)
    narrow = rows[:, None] @ images.to(dtype)
    return (narrow @ columns.mT[:, None]).float().round_().clamp_(0.0, 255.0).to(torch.uint8)


def _resize_weights(start: Tensor, length: Tensor, pixels: int, size: int) -> Tensor:
    """Weights [n, size, pixels] that resize the stretch [start, start + length) of a line to ``size``."""
    step = (length / size)[:, None, None]
    begin, end = start[:, None, None], (start + length)[:, None, None]
    wanted = begin + step * (torch.arange(size, device=start.device)[:, None] + 0.5)
    given = torch.arange(pixels, device=start.device) + 0.5
    weights = (1.0 - (given - wanted).abs() / step.clamp(min=1.0)).clamp(min=0.0)
    weights = weights * ((given > begin) & (given < end))
    return weights / weights.sum(dim=-1, keepdim=True)


def mixup(images: Tensor, before: Tensor, share: Tensor) -> Tensor:
    """``λ x + (1 − λ) x'`` with the image before it in the batch, λ = ``share``."""
    return torch.lerp(before, images, _per_image(share))


def cutmix(images: Tensor, before: Tensor, top: Tensor, left: Tensor, bottom: Tensor, right: Tensor) -> Tensor:
    """Rows ``top`` to ``bottom`` and columns ``left`` to ``right`` (end not included) are taken from the image
    before it in the batch."""
    y = torch.arange(images.shape[-2], device=images.device)[:, None]
    x = torch.arange(images.shape[-1], device=images.device)
    inside = (y >= _per_image(top)) & (y < _per_image(bottom)) & (x >= _per_image(left)) & (x < _per_image(right))
    return torch.where(inside, before, images)
