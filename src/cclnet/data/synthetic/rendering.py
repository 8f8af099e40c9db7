"""Render synthetic skin lesions, as a dermatoscope shows them, from a few appearance parameters.

A lesion has a position on the appearance ``AXES``, each from 0 to 1, and random parameters (``LESION``: positions of
notches, dots and so on). A photograph adds a random view (``VIEW``: rotation, zoom, light, hairs). Coordinates span
−1 to 1 over the image, so the same parameters give the same lesion at any size. By Beer and Lambert's law, the image is
the skin colour times ``exp(−melanin − blood)``, with one coefficient per colour channel for each, under a bluish veil.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import expit, ndtr

Floats = npt.NDArray[np.float32]
Marks = npt.NDArray[np.bool_]
Pixels = npt.NDArray[np.uint8]
Shapes = Mapping[str, tuple[int, ...]]

#: Darkness; redness and vessels; irregular, elongated border; lines of a pigment network; dark dots; bluish veil.
AXES = ("pigment", "redness", "border", "network", "globules", "veil")

# Random parameters, all standard normal, by name and shape. Blobs have a position (u, v) and a weight.
LESION: Shapes = {"skin": (2,), "radius": (), "edge": (), "honeycomb": (3,), "notches": (11, 3), "mottling": (40, 3),
                  "dots": (24, 2), "clouds": (4, 2)}  # fmt: skip
VIEW: Shapes = {"turn": (), "zoom": (), "shift": (2,), "exposure": (), "white_balance": (3,), "vignette": (),
                "flush": (10, 3), "hairiness": (), "hairs": (3, 4), "grain": (2,)}  # fmt: skip
SPOT: Shapes = {"turn": (), "zoom": (), "shift": (2,)}  # of one lesion among several in an image

SKIN = (0.92, 0.72, 0.66)  # red, green, blue
VEIL = (0.44, 0.50, 0.60)
MELANIN = (0.45, 0.85, 1.15)  # absorption of red, green and blue
BLOOD = (0.10, 0.95, 0.70)
FINEST = 64  # smaller images are rendered larger and averaged, because thin lines would alias


def random_row(shapes: Shapes, generator: np.random.Generator) -> Floats:
    """Return the random parameters of one lesion (``LESION``), view (``VIEW``) or spot (``SPOT``) in one row."""
    return generator.standard_normal(sum(map(math.prod, shapes.values())), dtype=np.float32)


def render(latents: Floats, lesions: Floats, views: Floats, size: int) -> Pixels:
    """Render images [B, size, size, 3] of lesions at ``latents`` [B, 6], with one row of random parameters each for
    lesion and view. An image does not depend on the others of the batch."""
    lesion, view = _named(LESION, lesions), _named(VIEW, views)
    turn, zoom = _between(0, 2 * math.pi, view["turn"]), _between(0.85, 1.15, view["zoom"])
    camera = _Camera(turn, zoom, 0.06 * view["shift"], size * math.ceil(FINEST / size))
    return _photograph(_lesion_layers(latents, lesion, camera), lesion["skin"], view, camera, size)


def render_several(latents: Floats, lesions: Floats, spots: Floats, shown: Marks, views: Floats, size: int) -> Pixels:
    """Render images [B, size, size, 3] with up to L smaller lesions side by side, where ``shown`` [B, L]: latents
    [B, L, 6], random rows for each lesion and its spot [B, L, n], and for the view [B, n]. Absorption is additive, so
    the layers of the lesions are summed; the skin is that of the first lesion, shown or not."""
    view, count = _named(VIEW, views), latents.shape[1]
    rotation = _between(0, 2 * math.pi, view["turn"])
    layers = []
    for number in range(count):
        spot = _named(SPOT, spots[:, number])
        around = rotation + np.float32(2 * math.pi * number / count)
        turn, zoom = _between(0, 2 * math.pi, spot["turn"]), _between(0.5, 0.65, spot["zoom"])
        shift = _on_disc(np.full_like(around, 0.5), around) + 0.03 * spot["shift"]
        camera = _Camera(turn, zoom, shift, size * math.ceil(FINEST / size))
        own = _lesion_layers(latents[:, number], _named(LESION, lesions[:, number]), camera)
        layers.append(np.stack(own) * _planes(shown[:, number].astype(np.float32)))
    melanin, blood, _ = np.sum(layers, axis=0)
    veil = 1 - np.prod([1 - own_veil for _, _, own_veil in layers], axis=0)
    return _photograph((melanin, blood, veil), _named(LESION, lesions[:, 0])["skin"], view, camera, size)


def _photograph(
    layers: tuple[Floats, Floats, Floats], skin: Floats, view: Mapping[str, Floats], camera: _Camera, size: int
) -> Pixels:
    """Compose images from melanin, blood and veil [B, S, S] on skin [B, 2], with the lighting of the view."""
    melanin, blood, veil = layers
    flush = 0.06 * camera.blobs(0.8 * view["flush"][..., :2], view["flush"][..., 2], 0.35)
    melanin = melanin + _planes(_between(0.0, 0.20, skin[:, 0]))
    blood = blood + _planes(_between(0.0, 0.25, skin[:, 1])) + flush

    image = np.empty((len(skin), 3, camera.size, camera.size), np.float32)
    for channel in range(3):
        colour = SKIN[channel] * np.exp(-MELANIN[channel] * melanin - BLOOD[channel] * blood)
        image[:, channel] = colour + veil * (VEIL[channel] - colour)
    _draw_hairs(image, view, camera.line)
    light = (1 + 0.04 * view["exposure"])[:, None] * (1 + 0.02 * view["white_balance"])
    corners = 1 - _planes(_between(0, 0.12, view["vignette"])) * (camera.line[:, None] ** 2 + camera.line**2)
    image *= light[..., None, None] * corners[:, None]
    if camera.size > size:
        step = camera.size // size
        image = image.reshape(len(skin), 3, size, step, size, step).mean(axis=(3, 5))
    _add_grain(image, view["grain"])
    return np.clip(image.transpose(0, 2, 3, 1) * 255 + 0.5, 0, 255).astype(np.uint8)


def _named(shapes: Shapes, rows: Floats) -> dict[str, Floats]:
    """Split random rows [B, n] into named arrays [B, *shape]."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1]
    columns = np.split(rows, ends, axis=1)
    return {name: c.reshape(len(rows), *shape) for (name, shape), c in zip(shapes.items(), columns, strict=True)}


def _between(low: float, high: float, normal: Floats) -> Floats:
    """Map standard normal numbers to uniform numbers from low to high."""
    return (low + (high - low) * ndtr(normal)).astype(np.float32)


def _planes(values: Floats) -> Floats:
    """Reshape [B] to [B, 1, 1]: one number for all pixels of an image."""
    return values[:, None, None]


@dataclass(frozen=True)
class _Camera:
    """Pose of the lesion in each image: rotated, scaled, then shifted."""

    turn: Floats  # [B], as all but shift [B, 2]
    zoom: Floats
    shift: Floats
    size: int

    @functools.cached_property
    def line(self) -> Floats:
        """Pixel centres along one side, [S]."""
        return ((2 * np.arange(self.size) + 1) / self.size - 1).astype(np.float32)

    @functools.cached_property
    def _turned(self) -> tuple[Floats, Floats]:
        return np.cos(self.turn)[:, None], np.sin(self.turn)[:, None]

    def lesion_plane(self) -> tuple[Floats, Floats]:
        """Return the lesion coordinates (u, v) of every pixel, [B, S, S] each."""
        cosine, sine = self._turned
        x = (self.line - self.shift[:, :1]) / self.zoom[:, None]
        y = (self.line - self.shift[:, 1:]) / self.zoom[:, None]
        u = (cosine * x)[:, None, :] + (sine * y)[:, :, None]
        v = (cosine * y)[:, :, None] - (sine * x)[:, None, :]
        return u, v

    def blobs(self, positions: Floats, weights: Floats, width: float) -> Floats:
        """Return the sum of round Gaussian blobs at positions [B, n, 2] on the lesion, [B, S, S]: one matrix product,
        because a 2D Gaussian is a product of two 1D Gaussians."""
        cosine, sine = self._turned
        u, v = positions[..., 0], positions[..., 1]
        x = self.shift[:, :1] + self.zoom[:, None] * (cosine * u - sine * v)
        y = self.shift[:, 1:] + self.zoom[:, None] * (sine * u + cosine * v)
        sharpness = 1 / (width * _planes(self.zoom))
        across = np.exp(-0.5 * ((self.line - x[..., None]) * sharpness) ** 2)
        down = np.exp(-0.5 * ((self.line - y[..., None]) * sharpness) ** 2) * weights[..., None]
        return np.matmul(down.transpose(0, 2, 1), across)


def _lesion_layers(latents: Floats, lesion: Mapping[str, Floats], camera: _Camera) -> tuple[Floats, Floats, Floats]:
    """Return melanin, blood and veil at every pixel, [B, S, S] each. The strengths are chosen so that every axis is
    about equally visible in the pixels."""
    appearance = {axis: _planes(latents[:, i]) for i, axis in enumerate(AXES)}
    u, v = camera.lesion_plane()
    radius = _planes(_between(0.50, 0.66, lesion["radius"]))
    stretch = 1 + 0.6 * appearance["border"]
    notches = camera.blobs(*_notches(lesion["notches"], radius), 0.12)
    depth = 1 - np.sqrt((u * stretch) ** 2 + (v / stretch) ** 2) / radius + 0.85 * appearance["border"] * notches
    inside = expit(depth * _planes(_between(9, 18, lesion["edge"])))

    mottling = camera.blobs(0.5 * lesion["mottling"][..., :2], lesion["mottling"][..., 2], 0.10)
    network = _honeycomb(u, v, mottling, lesion["honeycomb"])
    dots = np.minimum(camera.blobs(*_dots(appearance["globules"], lesion["dots"], radius), 0.055), 1)
    vessels = np.exp(-((mottling / 0.15) ** 2))
    clouds = camera.blobs(0.16 * lesion["clouds"], np.ones_like(lesion["clouds"][..., 0]), 0.16)

    base = 0.25 + 0.8 * appearance["pigment"]
    melanin = inside * (base * (1 + 0.15 * mottling) + 0.5 * appearance["network"] * network + 1.5 * dots)
    blood = inside * appearance["redness"] * (0.55 + 0.4 * vessels)
    veil = inside * 0.9 * (1 - np.exp(-appearance["veil"] * clouds))
    return melanin, blood, veil


def _on_disc(radius: Floats, angle: Floats) -> Floats:
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)


def _notches(notches: Floats, radius: Floats) -> tuple[Floats, Floats]:
    """Return positions and weights of border notches: all around, with zero mean and unit variance for every lesion, so
    that the border axis alone determines the irregularity."""
    around = 2 * math.pi * np.arange(notches.shape[1], dtype=np.float32) / notches.shape[1]
    positions = _on_disc(radius[:, 0] * (1 + 0.15 * notches[..., 0]), around + 0.15 * notches[..., 1])
    weights = notches[..., 2] - notches[..., 2].mean(axis=1, keepdims=True)
    return positions, weights / weights.std(axis=1, keepdims=True)


def _dots(globules: Floats, dots: Floats, radius: Floats) -> tuple[Floats, Floats]:
    """Return positions and weights of the dots: their number grows with globules, the last one fading in. The positions
    follow a low-discrepancy sequence, which fills the disc evenly for any number of dots."""
    number = np.arange(dots.shape[1], dtype=np.float32)
    shown = np.clip(globules[:, 0] * len(number) - number, 0, 1)
    away = 0.9 * radius[:, 0] * np.sqrt((0.5 + 0.7549 * number) % 1)  # the R2 sequence, on a disc
    around = 2 * math.pi * ((0.5698 * number) % 1)
    return _on_disc(away, around) + 0.05 * dots, shown


def _honeycomb(u: Floats, v: Floats, mottling: Floats, honeycomb: Floats) -> Floats:
    """Return dark lines (to 0.8) around pale holes (to −0.5), distorted by the mottling: three waves at 60 degrees."""
    pitch = 2 * math.pi / _planes(_between(0.15, 0.19, honeycomb[:, 0]))
    a = u * pitch + 3 * _planes(honeycomb[:, 1]) + 1.2 * mottling
    b = v * pitch * (math.sqrt(3) / 2) + 3 * _planes(honeycomb[:, 2]) + 1.2 * mottling
    return np.clip(0.25 - 0.6 * (np.cos(a) + np.cos(b - 0.5 * a) + np.cos(b + 0.5 * a)), -0.5, 0.8)


def _draw_hairs(image: Floats, view: Mapping[str, Floats], line: Floats) -> None:
    """Draw one to three thin dark arcs over a quarter of the images, in place."""
    x, y = line[None, :], line[:, None]
    for one, hairiness, hairs in zip(image, view["hairiness"], view["hairs"], strict=True):
        for number, (turn, position, bend, width) in enumerate(hairs):
            if hairiness < 0.7 + 0.4 * number:
                break
            cosine, sine = math.cos(3 * turn), math.sin(3 * turn)
            off = cosine * y - sine * x - 0.6 * position - 0.3 * bend * (cosine * x + sine * y) ** 2
            one *= 1 - 0.6 * np.exp(-((off / (0.012 + 0.004 * abs(width))) ** 2))


@functools.cache
def _noise() -> Floats:
    return np.random.default_rng(0).normal(0, 0.012, (1024, 1024)).astype(np.float32)


def _add_grain(image: Floats, grain: Floats) -> None:
    """Add sensor noise in place: a random crop of one large noise image."""
    noise, size = _noise(), image.shape[-1]
    for one, (top, left) in zip(image, _between(0, 1024 - size, grain).astype(int), strict=True):
        one += noise[top : top + size, left : left + size]
