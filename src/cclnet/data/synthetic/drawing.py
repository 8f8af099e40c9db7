"""Draws skin lesions as a dermatoscope shows them, from a few numbers that say how they look.

A lesion is a point on the ``AXES``, each from 0 (none of it) to 1, and its own chance (``LESION``: where the
notches and dots lie). A photograph of it adds a view (``VIEW``: turn, zoom, light, hairs). Everything is laid out
in a plane that spans −1 to 1 over the picture, so the same numbers give the same lesion at any size.

Light through skin fades with what it meets (Beer and Lambert): a picture is the skin's colour times
``exp(−melanin − blood)``, each absorbing red, green and blue by its own share, seen through a bluish veil.
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

#: How dark it is; how red, with vessels; how notched and long; lines of a pigment network; dark dots; bluish veil.
AXES = ("pigment", "redness", "border", "network", "globules", "veil")

# What chance decides: standard normal numbers, by name and shape. Blobs are a place (u, v) and a weight.
LESION: Shapes = {
    "skin": (2,),
    "radius": (),
    "edge": (),
    "honeycomb": (3,),
    "notches": (11, 3),
    "mottling": (40, 3),
    "dots": (24, 2),
    "clouds": (4, 2),
}
VIEW: Shapes = {
    "turn": (),
    "zoom": (),
    "shift": (2,),
    "exposure": (),
    "white_balance": (3,),
    "vignette": (),
    "flush": (10, 3),
    "hairiness": (),
    "hairs": (3, 4),
    "grain": (2,),
}
SPOT: Shapes = {"turn": (), "zoom": (), "shift": (2,)}  # of one lesion among several in a picture

SKIN = (0.92, 0.72, 0.66)  # red, green, blue
VEIL = (0.44, 0.50, 0.60)
MELANIN = (0.45, 0.85, 1.15)  # the share of red, green and blue light that it absorbs
BLOOD = (0.10, 0.95, 0.70)
FINEST = 64  # smaller pictures are drawn larger and averaged: thin lines would turn into false patterns


def chance(shapes: Shapes, generator: np.random.Generator) -> Floats:
    """The numbers that chance decides for one lesion (``LESION``) or one view (``VIEW``), in one row."""
    return generator.standard_normal(sum(map(math.prod, shapes.values())), dtype=np.float32)


def draw(latents: Floats, lesions: Floats, views: Floats, size: int) -> Pixels:
    """Pictures [B, size, size, 3] of lesions at ``latents`` [B, 6], each with its rows of ``chance`` for the
    lesion and for the view. A picture depends on its own rows alone, not on the others of the batch."""
    lesion, view = _named(LESION, lesions), _named(VIEW, views)
    camera = _Camera(
        turn=_between(0, 2 * math.pi, view["turn"]),
        zoom=_between(0.85, 1.15, view["zoom"]),
        shift=0.06 * view["shift"],
        size=size * math.ceil(FINEST / size),
    )
    return _photograph(_lesion_layers(_looks(latents), lesion, camera), lesion["skin"], view, camera, size)


def draw_several(latents: Floats, lesions: Floats, spots: Floats, shown: Marks, views: Floats, size: int) -> Pixels:
    """Pictures [B, size, size, 3] of skin with up to L smaller lesions side by side, where ``shown`` [B, L]: latents
    [B, L, 6], rows of ``chance`` for each lesion and its spot [B, L, n], and for the view [B, n]. What absorbs light
    adds up, so the lesions' layers do; the skin is that of the first lesion, shown or not."""
    view, count = _named(VIEW, views), latents.shape[1]
    turned = _between(0, 2 * math.pi, view["turn"])
    layers = []
    for number in range(count):
        spot = _named(SPOT, spots[:, number])
        around = turned + np.float32(2 * math.pi * number / count)
        camera = _Camera(
            turn=_between(0, 2 * math.pi, spot["turn"]),
            zoom=_between(0.5, 0.65, spot["zoom"]),
            shift=_on_disc(np.full_like(around, 0.5), around) + 0.03 * spot["shift"],
            size=size * math.ceil(FINEST / size),
        )
        own = _lesion_layers(_looks(latents[:, number]), _named(LESION, lesions[:, number]), camera)
        layers.append(np.stack(own) * _planes(shown[:, number].astype(np.float32)))
    melanin, blood, _ = np.sum(layers, axis=0)
    veil = 1 - np.prod([1 - own_veil for _, _, own_veil in layers], axis=0)
    return _photograph((melanin, blood, veil), _named(LESION, lesions[:, 0])["skin"], view, camera, size)


def _photograph(
    layers: tuple[Floats, Floats, Floats], skin: Floats, view: Mapping[str, Floats], camera: _Camera, size: int
) -> Pixels:
    """Pictures of melanin, blood and veil [B, S, S] on skin [B, 2], in the light of the view."""
    melanin, blood, veil = layers
    flush = 0.06 * camera.blobs(0.8 * view["flush"][..., :2], view["flush"][..., 2], 0.35)
    melanin = melanin + _planes(_between(0.0, 0.20, skin[:, 0]))
    blood = blood + _planes(_between(0.0, 0.25, skin[:, 1])) + flush

    picture = np.empty((len(skin), 3, camera.size, camera.size), np.float32)
    for channel in range(3):
        colour = SKIN[channel] * np.exp(-MELANIN[channel] * melanin - BLOOD[channel] * blood)
        picture[:, channel] = colour + veil * (VEIL[channel] - colour)
    _draw_hairs(picture, view, camera.line)
    _light(picture, view, camera.line)
    if camera.size > size:
        step = camera.size // size
        picture = picture.reshape(len(skin), 3, size, step, size, step).mean(axis=(3, 5))
    _add_grain(picture, view["grain"])
    return np.clip(picture.transpose(0, 2, 3, 1) * 255 + 0.5, 0, 255).astype(np.uint8)


def _looks(latents: Floats) -> dict[str, Floats]:
    return {axis: _planes(latents[:, i]) for i, axis in enumerate(AXES)}


def _named(shapes: Shapes, rows: Floats) -> dict[str, Floats]:
    """Rows of ``chance``, [B, n], as named arrays [B, *shape]."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1]
    columns = np.split(rows, ends, axis=1)
    return {name: c.reshape(len(rows), *shape) for (name, shape), c in zip(shapes.items(), columns, strict=True)}


def _between(low: float, high: float, normal: Floats) -> Floats:
    """Standard normal numbers, spread evenly from low to high."""
    return (low + (high - low) * ndtr(normal)).astype(np.float32)


def _planes(values: Floats) -> Floats:
    """[B] as [B, 1, 1]: one number for all pixels of a picture."""
    return values[:, None, None]


@dataclass(frozen=True)
class _Camera:
    """Where the lesion lies in each picture: turned, scaled, then shifted."""

    turn: Floats  # [B], as all but shift [B, 2]
    zoom: Floats
    shift: Floats
    size: int

    @functools.cached_property
    def line(self) -> Floats:
        """Centres of the pixels along one side, [S]."""
        return ((2 * np.arange(self.size) + 1) / self.size - 1).astype(np.float32)

    @functools.cached_property
    def _turned(self) -> tuple[Floats, Floats]:
        return np.cos(self.turn)[:, None], np.sin(self.turn)[:, None]

    def lesion_plane(self) -> tuple[Floats, Floats]:
        """The place (u, v) on the lesion that every pixel shows, [B, S, S] each."""
        cosine, sine = self._turned
        x = (self.line - self.shift[:, :1]) / self.zoom[:, None]
        y = (self.line - self.shift[:, 1:]) / self.zoom[:, None]
        u = (cosine * x)[:, None, :] + (sine * y)[:, :, None]
        v = (cosine * y)[:, :, None] - (sine * x)[:, None, :]
        return u, v

    def blobs(self, places: Floats, weights: Floats, width: float) -> Floats:
        """The sum of round Gaussian blobs at places [B, n, 2] on the lesion, [B, S, S].

        A Gaussian is the product of one across and one down, so their sum is one small matrix product.
        """
        cosine, sine = self._turned
        u, v = places[..., 0], places[..., 1]
        x = self.shift[:, :1] + self.zoom[:, None] * (cosine * u - sine * v)
        y = self.shift[:, 1:] + self.zoom[:, None] * (sine * u + cosine * v)
        sharpness = 1 / (width * _planes(self.zoom))
        across = np.exp(-0.5 * ((self.line - x[..., None]) * sharpness) ** 2)
        down = np.exp(-0.5 * ((self.line - y[..., None]) * sharpness) ** 2) * weights[..., None]
        return np.matmul(down.transpose(0, 2, 1), across)


def _lesion_layers(
    look: Mapping[str, Floats], lesion: Mapping[str, Floats], camera: _Camera
) -> tuple[Floats, Floats, Floats]:
    """Melanin, blood and veil at every pixel, [B, S, S] each. ``look`` has [B, 1, 1] an axis.

    The strengths are set so that every axis can be read off the pixels about equally well.
    """
    u, v = camera.lesion_plane()
    radius = _planes(_between(0.50, 0.66, lesion["radius"]))
    stretch = 1 + 0.6 * look["border"]
    notches = camera.blobs(*_notches(lesion["notches"], radius), 0.12)
    depth = 1 - np.sqrt((u * stretch) ** 2 + (v / stretch) ** 2) / radius + 0.85 * look["border"] * notches
    inside = expit(depth * _planes(_between(9, 18, lesion["edge"])))

    mottling = camera.blobs(0.5 * lesion["mottling"][..., :2], lesion["mottling"][..., 2], 0.10)
    network = _honeycomb(u, v, mottling, lesion["honeycomb"])
    dots = np.minimum(camera.blobs(*_dots(look["globules"], lesion["dots"], radius), 0.055), 1)
    vessels = np.exp(-((mottling / 0.15) ** 2))
    clouds = camera.blobs(0.16 * lesion["clouds"], np.ones_like(lesion["clouds"][..., 0]), 0.16)

    base = 0.25 + 0.8 * look["pigment"]
    melanin = inside * (base * (1 + 0.15 * mottling) + 0.5 * look["network"] * network + 1.5 * dots)
    blood = inside * look["redness"] * (0.55 + 0.4 * vessels)
    veil = inside * 0.9 * (1 - np.exp(-look["veil"] * clouds))
    return melanin, blood, veil


def _on_disc(radius: Floats, angle: Floats) -> Floats:
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)


def _notches(notches: Floats, radius: Floats) -> tuple[Floats, Floats]:
    """Places and weights of what the edge gains and loses: all around it, as much gained as lost, and the same
    amount in all for every lesion, so that the border axis alone decides how ragged it is."""
    around = 2 * math.pi * np.arange(notches.shape[1], dtype=np.float32) / notches.shape[1]
    places = _on_disc(radius[:, 0] * (1 + 0.15 * notches[..., 0]), around + 0.15 * notches[..., 1])
    weights = notches[..., 2] - notches[..., 2].mean(axis=1, keepdims=True)
    return places, weights / weights.std(axis=1, keepdims=True)


def _dots(globules: Floats, dots: Floats, radius: Floats) -> tuple[Floats, Floats]:
    """Places and weights of the dots: the more globules, the more of them are there, the last one fading in.
    They follow a sequence that fills the disc evenly whatever their number, so that few hide behind others."""
    number = np.arange(dots.shape[1], dtype=np.float32)
    shown = np.clip(globules[:, 0] * len(number) - number, 0, 1)
    away = 0.9 * radius[:, 0] * np.sqrt((0.5 + 0.7549 * number) % 1)  # the R2 sequence, on a disc
    around = 2 * math.pi * ((0.5698 * number) % 1)
    return _on_disc(away, around) + 0.05 * dots, shown


def _honeycomb(u: Floats, v: Floats, mottling: Floats, honeycomb: Floats) -> Floats:
    """Dark lines (to 0.8) around pale holes (to −0.5), bent by the mottling: three waves at 60 degrees."""
    pitch = 2 * math.pi / _planes(_between(0.15, 0.19, honeycomb[:, 0]))
    a = u * pitch + 3 * _planes(honeycomb[:, 1]) + 1.2 * mottling
    b = v * pitch * (math.sqrt(3) / 2) + 3 * _planes(honeycomb[:, 2]) + 1.2 * mottling
    return np.clip(0.25 - 0.6 * (np.cos(a) + np.cos(b - 0.5 * a) + np.cos(b + 0.5 * a)), -0.5, 0.8)


def _draw_hairs(picture: Floats, view: Mapping[str, Floats], line: Floats) -> None:
    """One to three thin dark arcs over one picture in four."""
    x, y = line[None, :], line[:, None]
    for one, hairiness, hairs in zip(picture, view["hairiness"], view["hairs"], strict=True):
        for number, (turn, place, bend, width) in enumerate(hairs):
            if hairiness < 0.7 + 0.4 * number:
                break
            cosine, sine = math.cos(3 * turn), math.sin(3 * turn)
            off = cosine * y - sine * x - 0.6 * place - 0.3 * bend * (cosine * x + sine * y) ** 2
            one *= 1 - 0.6 * np.exp(-((off / (0.012 + 0.004 * abs(width))) ** 2))


def _light(picture: Floats, view: Mapping[str, Floats], line: Floats) -> None:
    """Exposure, white balance, and darker corners."""
    light = (1 + 0.04 * view["exposure"])[:, None] * (1 + 0.02 * view["white_balance"])
    corners = 1 - _planes(_between(0, 0.12, view["vignette"])) * (line[:, None] ** 2 + line**2)
    picture *= light[..., None, None] * corners[:, None]


@functools.cache
def _grain_sheet() -> Floats:
    return np.random.default_rng(0).normal(0, 0.012, (1024, 1024)).astype(np.float32)


def _add_grain(picture: Floats, grain: Floats) -> None:
    """The sensor's noise: a piece of one large sheet, anywhere on it."""
    sheet, size = _grain_sheet(), picture.shape[-1]
    for one, (top, left) in zip(picture, _between(0, 1024 - size, grain).astype(int), strict=True):
        one += sheet[top : top + size, left : left + size]
