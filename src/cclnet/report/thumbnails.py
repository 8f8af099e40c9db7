"""Small pictures of images, embedded in a page."""

from __future__ import annotations

import base64
import inspect
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from cclnet.data.table import ImageTable
from cclnet.errors import InputError

SIDE = 96  # pixels of the longer side


def thumbnails(
    names: Sequence[str], settings: Mapping[str, Any], data: str | None = None
) -> tuple[dict[str, str], str]:
    """Data URIs of the named images, and a line that says why some are missing (empty when none is).

    Args:
        names: images as predictions.csv calls them.
        settings: settings.toml of the run, which says where its data is.
        data: where the data is now, if it has moved.
    """
    place = data or settings.get("data")
    if not names or not place:
        return {}, "" if not names else "The pictures are left out: the run does not say where its images are."
    from cclnet.data.sources import open_data

    told = {name: settings[name] for name in inspect.signature(open_data).parameters if settings.get(name)}
    try:
        table = open_data(place, **told)
    except InputError as error:
        first_sentence = re.split(r"(?<=\.)\s", str(error))[0]
        return {}, f"The pictures are left out, because the data cannot be opened here: {first_sentence}"
    where = {name: row for row, name in enumerate(table.names)}
    pictures, broken = {}, []
    for name in names:
        try:
            if name in where:
                pictures[name] = data_uri(pixels(table, where[name]))
        except InputError as error:
            broken.append(str(error))
    absent = len(names) - len(pictures) - len(broken)
    lines = [f"{absent} of these images are not in {place}."] if absent else []
    lines += [f"{len(broken)} of these images cannot be read: {broken[0]}."] if broken else []
    return pictures, " ".join(lines)


def pixels(table: ImageTable, row: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One image of a table, uint8 [H, W] or [H, W, 3]."""
    from cclnet.data.pixels import read_image

    image = table.images[row]
    if isinstance(image, np.ndarray):
        return image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image
    return read_image(image, min_short_side=SIDE)


def data_uri(image: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    """A JPEG of at most 96 pixels a side, as text to stand in an ``src``."""
    picture = Image.fromarray(image).convert("RGB")
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=80, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
