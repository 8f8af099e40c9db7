"""One folder per class, optionally below folders for train, validation and test, or below one folder per patient."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cclnet.data.sources.folder_names import is_container, is_id, is_mask_folder, split_of_folder
from cclnet.data.sources.masks import find_masks
from cclnet.data.sources.source import Source, SourceNotes, below, encode, finish, image_files, nfc, subfolders
from cclnet.data.table import ImageTable
from cclnet.errors import InputError
from cclnet.settings import DataOptions

_MANY_IDS = 20  # folders named by a number that contain the same folders: fewer may be grades, not patients


@dataclass(frozen=True)
class _Layout:
    """What the folders above an image mean, from the top."""

    splits: bool  # the first is a split
    ids: bool  # the next is a patient, the one below it the class
    classes: list[Path]  # class folders of the split (or patient) that has most of them
    containers: list[Path]  # folders with images that are named like no class


def find(path: Path) -> list[Path]:
    """Return the class folders of the split that has most of them; none if there are fewer than two."""
    classes = _layout(path).classes if path.is_dir() else []
    return classes if len(classes) > 1 else []


def class_names(path: Path) -> list[str]:
    """Return the names of the class folders, also of a single one."""
    return [folder.name for folder in _layout(path).classes]


def container_folders(path: Path) -> list[Path]:
    """Return the folders that would be the classes if they were not named like splits, formats or containers."""
    layout = _layout(path)
    return layout.containers if len(layout.classes) < 2 else []


def read(path: Path, options: DataOptions) -> ImageTable:
    """Return the images below each class folder, at any depth; names are paths inside the data folder."""
    if not path.is_dir():
        raise InputError(f"expected a folder of class folders, got {path}.")
    notes = SourceNotes()
    layout = _layout(path)
    # Asked for explicitly, folders named like containers are classes if there are no others.
    any_name = options.source == "folders" and len(layout.classes) < 2
    files = image_files(path, follow_links=options.follow_links)
    masks = set() if options.keep_masks else set(find_masks(files))
    rows: list[tuple[str, str, str, str]] = []  # name, label, split, group
    unlabelled: list[str] = []
    for file in files:
        if file in masks:
            continue
        name = below(path, file).replace(os.sep, "/")
        split, group, above = "", "", name.split("/")[:-1]
        if layout.splits:
            split = split_of_folder(above[0]) if above else ""
            above = above[1:] if split else []
        if layout.ids:
            group, above = (above[0], above[1:]) if len(above) > 1 else ("", [])
        while above and not any_name and is_container(above[0]):
            above = [] if is_mask_folder(above[0]) else above[1:]
        if above:
            rows.append((name, nfc(above[0]).strip(), split, group))
        else:
            unlabelled.append(name)
    notes.exclude("images without a label (in no class folder)", unlabelled)
    notes.note(
        "segmentation masks, left out (keep_masks, --keep-masks keeps them)",
        [below(path, file).replace(os.sep, "/") for file in files if file in masks],
    )
    names, labels, splits, groups = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [], [])
    codes, classes = encode(labels)
    empty = [inner.name for inner in subfolders(path) if not os.listdir(inner)]  # noqa: PTH208
    notes.note("folders without a file, left out", empty)
    if layout.ids:
        notes.note("the folders above the classes are read as patients", sorted(set(groups)))
    table = ImageTable(
        SOURCE.title, path, names, [path / name for name in names], codes, classes,
        groups=np.array(groups, dtype=np.str_) if layout.ids else None,
        splits=np.array(splits, dtype=np.str_) if layout.splits else None,
    )  # fmt: skip
    return finish(table, notes, options)


def _layout(path: Path) -> _Layout:
    splits = _split_folders(path)
    best = _Layout(False, False, [], [])
    for folder in splits or [path]:
        classes, containers = _class_folders(folder)
        ids = _classes_below_ids(classes)
        if classes and not ids and all(is_id(inner.name) for inner in classes):
            classes, containers = [], [*containers, *classes]
        if len(ids or classes) >= len(best.classes):
            best = _Layout(bool(splits), bool(ids), ids or classes, containers or best.containers)
    return best


def _class_folders(folder: Path, depth: int = 2) -> tuple[list[Path], list[Path]]:
    """Return one folder per class name, those inside containers included, and the containers."""
    inside = [inner for inner in subfolders(folder) if _has_images(inner)]
    containers = [inner for inner in inside if is_container(inner.name)]
    classes = {inner.name: inner for inner in inside if not is_container(inner.name)}
    if depth and not classes:
        for container in containers:
            if not is_mask_folder(container.name):
                classes |= {inner.name: inner for inner in _class_folders(container, depth - 1)[0]}
    return list(classes.values()), containers


def _classes_below_ids(folders: list[Path]) -> list[Path]:
    """Return one folder per class name below folders that are named by patients and contain nearly the same names."""
    named = all(is_id(folder.name) for folder in folders)
    if len(folders) < 2 or not (named or (len(folders) >= _MANY_IDS and all(f.name.isdecimal() for f in folders))):
        return []
    inside = [inner for folder in folders for inner in subfolders(folder)]
    classes = {inner.name: inner for inner in inside if not is_container(inner.name) and not is_id(inner.name)}
    common = len(inside) >= 0.4 * len(classes) * len(folders)
    return list(classes.values()) if 2 <= len(classes) <= len(folders) and common else []


def _split_folders(path: Path) -> list[Path]:
    """Return the folders named train, val_images, Test Set or similar, if one of them contains class folders."""
    named = [folder for folder in subfolders(path) if split_of_folder(folder.name)]
    return named if any(_has_images(inner) for folder in named for inner in subfolders(folder)) else []


def _has_images(folder: Path) -> bool:
    return bool(image_files(folder, follow_links=True, first_only=True))


SOURCE = Source("folder per class", "melanoma/*.jpg, nevus/*.jpg, … or train/melanoma/*.jpg, val/…, test/…", find, read)
