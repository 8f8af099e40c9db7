"""One folder per class, optionally below folders for train, validation and test."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from cclnet.data.sources.source import Source, SourceNotes, below, encode, finish, image_files, nfc, subfolders
from cclnet.data.table import SPLIT_NAMES, ImageTable
from cclnet.errors import InputError
from cclnet.settings import DataOptions

# Folders of other layouts, which never contain the images of one class.
_NOT_A_CLASS = re.compile(r"^(isic.*(input|ground_?truth)|.*images_part_\d+|images?|imgs?|masks?)$", re.IGNORECASE)


def find(path: Path) -> list[Path]:
    """Return the class folders of the split that has most of them; none if there are fewer than two."""
    if not path.is_dir():
        return []
    best: list[Path] = []
    for folder in _split_folders(path) or [path]:
        classes = [inner for inner in subfolders(folder) if not _NOT_A_CLASS.match(inner.name) and _has_images(inner)]
        best = max(best, classes, key=len)
    return best if len(best) > 1 else []


def read(path: Path, options: DataOptions) -> ImageTable:
    """Return the images below each class folder, at any depth; names are paths inside the data folder."""
    if not path.is_dir():
        raise InputError(f"expected a folder of class folders, got {path}.")
    notes = SourceNotes()
    has_splits = bool(_split_folders(path))
    rows: list[tuple[str, str, str]] = []  # name, label, split
    unlabelled: list[str] = []
    for file in image_files(path, follow_links=options.follow_links):
        name = below(path, file).replace(os.sep, "/")
        split, above = "", name.split("/")[:-1]
        if has_splits:
            split = SPLIT_NAMES.get(above[0].lower(), "") if above else ""
            above = above[1:] if split else []
        if above and not _NOT_A_CLASS.match(above[0]):
            rows.append((name, nfc(above[0]), split))
        else:
            unlabelled.append(name)
    notes.exclude("images without a label (in no class folder)", unlabelled)
    codes, classes = encode([label for _, label, _ in rows])
    names = [name for name, _, _ in rows]
    splits = np.array([split for _, _, split in rows], dtype=np.str_) if has_splits else None
    table = ImageTable(SOURCE.title, path, names, [path / name for name in names], codes, classes, splits=splits)
    return finish(table, notes, options.strict)


def _split_folders(path: Path) -> list[Path]:
    """Return the folders named train, val, test or similar, if at least one of them contains class folders."""
    named = [folder for folder in subfolders(path) if folder.name.lower() in SPLIT_NAMES]
    return named if any(_has_images(inner) for folder in named for inner in subfolders(folder)) else []


def _has_images(folder: Path) -> bool:
    return bool(image_files(folder, follow_links=True, first_only=True))


SOURCE = Source("folder per class", "melanoma/*.jpg, nevus/*.jpg, … or train/melanoma/*.jpg, val/…, test/…", find, read)
