"""Segmentation masks among the images: recognised by name and by content, so that they are not trained on as images."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cclnet.data.image_io import UnreadableImage, image_size, read_image
from cclnet.data.parallel import available_cores, limited, process_chunks
from cclnet.data.sources.folder_names import is_mask_folder
from cclnet.data.sources.source import nfc

# ruff: noqa: PTH118, PTH119, PTH120, PTH122

_MASK = (
    "mask masks msk segmentation segmentations seg segs segm gt groundtruth truth annotation annotations annot anno "
    "label labels roi rois contour contours lesion lesions"
)
# Words that may stand in the name of an image or of its mask, and say nothing of which image it is.
_OTHER = (
    "image images img imgs im photo pic picture orig original input raw png jpg jpeg bmp tif tiff left right lung "
    "lungs both bin binary manual ground superpixels dermoscopic cxr"
)
_MASKS, _OTHERS = set(_MASK.split()), set(_OTHER.split())
_MAY_BE_MASK = re.compile("mask|msk|seg|gt|truth|anno|label|roi|contour|lesion", re.IGNORECASE)
_SAMPLE = 48  # candidates that are decoded; all of them only where these disagree
_MOST_BESIDE = 50  # images of one name that are compared with a mask
_NEAR = 16  # grey levels that lossy compression and antialiasing leave around black and white
_OUTSIDE = 0.02  # share of pixels that may be farther away than that


def find_masks(folder: Path, files: Sequence[str]) -> list[str]:
    """Return the files below a folder that are masks of another of them: named like one (``a_mask.png`` or
    ``mask_a.png`` beside ``a.png``, ``masks/a.png`` beside ``images/a.png``, ``benign_masks/a.png`` beside
    ``benign/a.png``), of the same size as that image, and with at most two grey levels."""
    start = len(os.path.join(folder, ""))  # the name of the data folder says nothing of its files
    named = [file for file in files if _MAY_BE_MASK.search(file, start)]
    candidates = _images_of_masks(named, files, start) if named else {}
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


def _images_of_masks(named: Sequence[str], files: Sequence[str], start: int) -> dict[str, str]:
    """Return the files that are named like masks, each with the image that it may be the mask of: that of the same name
    apart from words for masks and images, in the same folder, or else in another with the most similar path.

    >>> _images_of_masks(["a/masks/x1_mask.png"], ["a/images/x1.png", "a/masks/x1_mask.png", "b/images/x1.png"], 0)
    {'a/masks/x1_mask.png': 'a/images/x1.png'}
    """
    masks = {file: key for file in named if (key := _words(file, start)) is not None}
    images: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for file in files:
        if file not in masks:
            key = _name_words(file)[0]
            for above in _folders_above(file):
                images.setdefault((above, key), []).append(file)
    found = {}
    for file, key in masks.items():
        if beside := next((near for above in _folders_above(file) if (near := images.get((above, key)))), None):
            found[file] = max(beside[:_MOST_BESIDE], key=lambda image: _likeness(file, image))
    return found


def _folders_above(file: str) -> list[str]:
    """Return the folder of a file and the two above it."""
    folder = os.path.dirname(file)
    return [folder, above := os.path.dirname(folder), os.path.dirname(above)]


def _words(file: str, start: int) -> tuple[str, ...] | None:
    """Return what the name of a mask says of its image; None if neither the name nor a folder is that of masks."""
    words, is_mask = _name_words(file)
    folders = Path(file[start:]).parts[-3:-1]
    return words if is_mask or any(_is_mask_folder(folder) for folder in folders) else None


def _name_words(file: str) -> tuple[tuple[str, ...], bool]:
    """Return the words of the name of a file but those for masks and images, and whether one was for masks.

    >>> _name_words("a/IMG12_lesion.png"), _name_words("mask_12.png"), _name_words("b/benign (3)_mask_1.png")
    ((('12',), True), (('12',), True), (('benign', '3'), True))
    """
    words = re.findall(r"[^\W\d_]+|\d+", nfc(os.path.splitext(os.path.basename(file))[0]).lower())
    if len(words) > 2 and words[-2] in _MASKS and words[-1].isdecimal():
        words.pop()  # the second mask of an image
    return tuple(word for word in words if word not in _MASKS | _OTHERS), not _MASKS.isdisjoint(words)


def _is_mask_folder(name: str) -> bool:
    return is_mask_folder(name) or "mask" in name.lower() or not _MASKS.isdisjoint(re.split(r"[\W\d_]+", name.lower()))


def _likeness(file: str, image: str) -> int:
    """Return how many words the folders of a mask and an image share."""
    own, other = (set(re.findall(r"[^\W\d_]+|\d+", os.path.dirname(path).lower())) for path in (file, image))
    return len(own & other)


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
