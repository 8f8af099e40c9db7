"""A folder for each class, with or without folders for train, validation and test above them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from cclnet.data.sources.image_files import below, image_files, same_spelling, subfolders
from cclnet.data.sources.source import SPLIT_NAMES, Findings, Source, encode, finish
from cclnet.data.table import ImageTable
from cclnet.errors import InputError
from cclnet.settings import DataOptions

# Folders that hold the images of other layouts, and never the images of one class.
_NOT_A_CLASS = re.compile(r"^(isic.*(input|ground_?truth)|.*images_part_\d+|images?|imgs?|masks?)$", re.IGNORECASE)


def find(path: Path) -> list[Path]:
    """The class folders by which the layout is known: two at least, in one part at least."""
    if not path.is_dir():
        return []
    best: list[Path] = []
    for folder in _split_folders(path) or [path]:
        classes = [inner for inner in subfolders(folder) if not _NOT_A_CLASS.match(inner.name) and _has_images(inner)]
        best = max(best, classes, key=len)
    return best if len(best) > 1 else []


def read(path: Path, options: DataOptions) -> ImageTable:
    """The images below each class folder, at any depth; names are paths inside the data folder."""
    if not path.is_dir():
        raise InputError(f"{path} is not a folder of class folders.")
    findings = Findings()
    parted = bool(_split_folders(path))
    rows: list[tuple[str, str, str]] = []  # name, label, part
    unlabelled: list[str] = []
    for file in image_files(path, follow_links=options.follow_links):
        name = below(path, file).replace(os.sep, "/")
        part, label = _place(name.split("/")[:-1], parted)
        if label:
            rows.append((name, label, part))
        else:
            unlabelled.append(name)
    findings.leave_out("images without a label (in no class folder)", unlabelled)
    codes, classes = encode([label for _, label, _ in rows])
    table = ImageTable(
        source=SOURCE.words,
        root=path,
        names=[name for name, _, _ in rows],
        images=[path / name for name, _, _ in rows],
        labels=codes,
        classes=classes,
        splits=np.array([part for _, _, part in rows], dtype=np.str_) if parted else None,
    )
    return finish(table, findings, options.strict)


def _place(above: list[str], parted: bool) -> tuple[str, str]:
    """Part and class from the folders above an image; no class where it lies beside the class folders."""
    part = ""
    if parted:
        part = SPLIT_NAMES.get(above[0].lower(), "") if above else ""
        above = above[1:] if part else []
    label = above[0] if above and not _NOT_A_CLASS.match(above[0]) else ""
    return part, same_spelling(label)


def _split_folders(path: Path) -> list[Path]:
    """Folders called train, val, test and the like, where at least one of them holds class folders."""
    named = [folder for folder in subfolders(path) if folder.name.lower() in SPLIT_NAMES]
    return named if any(_has_images(inner) for folder in named for inner in subfolders(folder)) else []


def _has_images(folder: Path) -> bool:
    return bool(image_files(folder, follow_links=True, first_only=True))


SOURCE = Source(
    words="folder per class",
    layout="melanoma/*.jpg, nevus/*.jpg, … or train/melanoma/*.jpg, val/…, test/…",
    find=find,
    read=read,
)
