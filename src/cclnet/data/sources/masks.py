"""Segmentation masks among the images: recognised by name and by content, so that they are not trained on as images."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import numpy as np

from cclnet.data.image_io import UnreadableImage, image_size, read_image
from cclnet.data.parallel import available_cores, limited, process_chunks
from cclnet.data.sources.folder_names import is_mask_folder
from cclnet.data.sources.source import nfc

# ruff: noqa: PTH119, PTH120, PTH122

_NAMED = re.compile(
    r"(?P<image>.+?)[ _.-]*(mask|masks|seg|segmentation|gt|ground_?truth|annotation|label|roi|contour)s?([ _.-]?\d+)?",
    re.IGNORECASE,
)
_PREFIXED = re.compile(
    r"(mask|seg|segmentation|gt|ground_?truth|annotation|label|roi|contour)s?[ _.-]+(?P<image>.+)", re.IGNORECASE
)
_SAMPLE = 48  # candidates that are decoded; all of them only where these disagree
_NEAR = 16  # grey levels that lossy compression and antialiasing leave around black and white
_OUTSIDE = 0.02  # share of pixels that may be farther away than that


def find_masks(files: Sequence[str]) -> list[str]:
    """Return the files that are masks of another of the files: named like one (``a_mask.png`` beside ``a.png``,
    ``masks/a.png`` beside ``images/a.png``, ``benign_masks/a.png`` beside ``benign/a.png``), of the same size as that
    image, and with at most two grey levels."""
    images: dict[tuple[str, str], str] = {}
    for file in files:
        folder, name = os.path.split(file)
        images[folder, nfc(os.path.splitext(name)[0])] = file
    siblings = _folders_beside(files)
    candidates = {file: image for file in files if (image := _image_of(file, images, siblings))}
    some = dict(list(candidates.items())[:: max(1, len(candidates) // _SAMPLE)])
    confirmed = _masks_among(some)
    if len(confirmed) in (0, len(some)):
        return list(candidates) if confirmed else []
    confirmed = _masks_among(candidates)
    return [file for file in candidates if file in confirmed]


def _masks_among(candidates: dict[str, str]) -> set[str]:
    """Return the files that are masks by their content, read by workers with limited memory and time."""
    pairs, found = list(candidates.items()), set[str]()

    def check(rows: list[int]) -> list[str]:
        return [pairs[row][0] for row in rows if _is_mask(row, *pairs[row])]

    def fail(row: int, reason: str) -> list[str]:
        return []

    process_chunks(check, range(len(pairs)), available_cores(), found.update, fail)
    return found


def _folders_beside(files: Sequence[str]) -> dict[str, list[str]]:
    """Return the folders with images of each folder above them, without mask folders."""
    found: dict[str, list[str]] = {}
    for folder in sorted({os.path.dirname(file) for file in files}):
        if not is_mask_folder(os.path.basename(folder)):
            found.setdefault(os.path.dirname(folder), []).append(folder)
            found.setdefault(folder, []).append(folder)
    return found


def _image_of(file: str, images: dict[tuple[str, str], str], siblings: dict[str, list[str]]) -> str:
    """Return the image that a file is the mask of by its name, "" if it is not named like a mask."""
    folder, name = os.path.split(file)
    stem = nfc(os.path.splitext(name)[0])
    named = _NAMED.fullmatch(stem)
    if named and (image := images.get((folder, named["image"]))):
        return image
    above, own = os.path.split(folder)
    if is_mask_folder(own):
        beside = siblings.get(above, [])
    elif of_class := _NAMED.fullmatch(own) or _PREFIXED.fullmatch(own):
        beside = [os.path.join(above, of_class["image"])]  # noqa: PTH118
    else:
        return ""
    stems = [stem, named["image"]] if named else [stem]
    return next((images[at, of] for at in beside for of in stems if (at, of) in images), "")


def _is_mask(row: int, file: str, image: str) -> bool:
    """Return whether a file has at most two grey levels and the size of the image. A broken file is no mask: it is
    reported when the images are decoded."""
    try:
        with limited(row):
            if image_size(file) != image_size(image):
                return False
            pixels = read_image(file)
    except UnreadableImage:
        return False
    low, high = int(pixels.min()), int(pixels.max())
    between = (pixels > low + _NEAR) & (pixels < high - _NEAR)
    return float(np.mean(between)) <= _OUTSIDE
