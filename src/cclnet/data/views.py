"""Test-time augmentation: the views of an image whose logits are averaged.

A view maps images [N, C, h, w] to images of the same shape. Every view is a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import interpolate

View = Callable[[Tensor], Tensor]
CORNER = 7 / 8


def _turned(quarter_turns: int, flipped: bool) -> View:
    """A symmetry of the square. Written with transpositions and flips, which every exporter knows."""

    def view(images: Tensor) -> Tensor:
        images = images.flip(3) if flipped else images
        for _ in range(quarter_turns % 2):
            images = images.transpose(2, 3).flip(2)
        return images.flip((2, 3)) if quarter_turns >= 2 else images

    return view


def _corner(bottom: bool, right: bool) -> View:
    """A corner with CORNER of each side, enlarged to the whole."""

    def view(images: Tensor) -> Tensor:
        height, width = images.shape[2:]
        tall, wide = round(CORNER * height), round(CORNER * width)
        top, left = (height - tall) * bottom, (width - wide) * right
        cut = images[:, :, top : top + tall, left : left + wide]
        return interpolate(cut, size=(height, width), mode="bilinear", align_corners=False)

    return view


VIEWS: dict[str, View] = {
    f"{'mirrored ' if flipped else ''}{90 * turns}": _turned(turns, flipped)
    for flipped in (False, True)
    for turns in range(4)
} | {
    f"{'bottom' if bottom else 'top'} {'right' if right else 'left'}": _corner(bottom, right)
    for bottom in (False, True)
    for right in (False, True)
}
