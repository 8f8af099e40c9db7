"""One folder per class, optionally below folders for train, validation and test, or below one folder per patient."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cclnet.data.sources.folder_names import (
    containers_among,
    is_container,
    is_id,
    is_mask_folder,
    splits_among,
)
from cclnet.data.sources.masks import find_masks
from cclnet.data.sources.selection import keep
from cclnet.data.sources.source import Source, SourceNotes, below, encode, finish, image_files, nfc, subfolders
from cclnet.data.table import ImageTable, listed
from cclnet.errors import InputError
from cclnet.settings import DataOptions

_MANY_IDS = 20  # folders named by a number that contain the same folders: fewer may be grades, not patients
_MOST_INSIDE = 50  # folders inside class folders that may be classes themselves; more are patients or series


@dataclass(frozen=True)
class _Layout:
    """What the folders above an image mean, from the top."""

    splits: dict[str, str]  # the first is a split: the split of each of these folders
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
    containers = {folder.name for folder in layout.containers}
    files = image_files(path, follow_links=options.follow_links)
    if options.exclude_patterns:  # here already, because what is left out says nothing of classes and splits
        kept = keep([below(path, file).replace(os.sep, "/") for file in files], notes, options)
        files, options = [file for file, one in zip(files, kept, strict=True) if one], replace(options, exclude="")
    masks = set() if options.keep_masks else set(find_masks(path, files))
    rows: list[tuple[str, str, str, str]] = []  # name, label, split, group
    inside: dict[str, Counter[str]] = defaultdict(Counter)  # images of each folder inside a class folder, "" for none
    where: dict[str, str] = {}  # the path of each class folder, where it is first found
    unlabelled: list[str] = []
    for file in files:
        if file in masks:
            continue
        name = below(path, file).replace(os.sep, "/")
        split, group, above = "", "", name.split("/")[:-1]
        if layout.splits:
            split = layout.splits.get(above[0], "") if above else ""
            above = above[1:] if split else []
        if options.class_level:
            above = above[options.class_level - 1 :]
        elif layout.ids:
            group, above = (above[0], above[1:]) if len(above) > 1 else ("", [])
        while above and not (any_name or options.class_level) and (is_container(above[0]) or above[0] in containers):
            above = [] if is_mask_folder(above[0]) else above[1:]
        if above:
            rows.append((name, nfc(above[0]).strip(), split, group))
            where.setdefault(above[0], "/".join(name.split("/")[: -len(above)]))
            inside[above[0]][next((nfc(folder) for folder in above[1:] if not is_container(folder)), "")] += 1
        else:
            unlabelled.append(name)
    if options.class_level and not rows:
        raise InputError(
            f"{path}: no image lies in a folder of level {options.class_level} (class_level, --class-level), such as "
            f"{listed(unlabelled, 3)}. Choose a smaller level."
        )
    notes.exclude("images without a label (in no class folder)", unlabelled)
    notes.note(
        "segmentation masks, left out (keep_masks, --keep-masks keeps them)",
        [below(path, file).replace(os.sep, "/") for file in files if file in masks],
    )
    names, labels, splits, groups = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [], [])
    if not (options.source == "folders" or options.class_level):
        _refuse_two_readings(path, inside, where, bool(layout.ids))
        notes.note(
            "folders inside class folders are no classes; class_level (--class-level 2) reads them as classes",
            _classes_inside(inside),
        )
    codes, classes = encode(labels)
    empty = [inner.name for inner in subfolders(path) if not os.listdir(inner)]  # noqa: PTH208
    notes.note("folders without a file, left out", empty)
    if layout.ids:
        notes.note("the folders above the classes are read as patients", sorted(set(groups)))
    images = [path / name for name in names]
    table = ImageTable(
        SOURCE.title, path, names, images, codes, classes,
        groups=np.array(groups, dtype=np.str_) if any(groups) else None,
        splits=np.array(splits, dtype=np.str_) if layout.splits else notes.splits_of_folders(path, images),
    )  # fmt: skip
    return finish(table, notes, options)


def _refuse_two_readings(path: Path, inside: dict[str, Counter[str]], where: dict[str, str], ids: bool) -> None:
    """Refuse a class folder that contains folders named like the other classes, and class folders that all contain the
    same folders: which of them are the classes cannot be known."""
    for name, counts in inside.items():
        if len(copies := sorted(counts.keys() & (inside.keys() - {name}))) > 1:
            raise InputError(
                f"{path}: {name} contains folders with the names of the classes beside it ({listed(copies)}), so it is "
                f"no class, and may be a copy. Leave it out with exclude (--exclude '{where[name]}/*'), or give "
                f"{path / where[name]}."
            )
    if ids or len(inside) < 2:
        return
    common = sorted(name for name in set.intersection(*map(set, inside.values())) if name and not is_id(name))
    covered = sum(counts[name] for counts in inside.values() for name in common)
    if 1 < len(common) <= _MANY_IDS and covered > 0.8 * sum(counts.total() for counts in inside.values()):
        outer = sorted(inside)
        raise InputError(
            f"{path}: {listed(outer, 5)} all contain the folders {listed(common, 5)}. Choose which are the classes "
            "with class_level: the outer (--class-level 1) or the inner ones (--class-level 2)."
        )


def _classes_inside(inside: dict[str, Counter[str]]) -> list[str]:
    """Return the folders inside class folders that may be classes of their own: few, and several in one folder."""
    names = sorted({name for counts in inside.values() if len(counts) > 1 for name in counts if name})
    numbered = sum(re.search(r"\d\d", name) is not None for name in names)
    return names if len(names) <= _MOST_INSIDE and 2 * numbered <= len(names) else []


def _layout(path: Path) -> _Layout:
    splits = _split_folders(path)
    best = _Layout(splits, False, [], [])
    for folder in [path / name for name in splits] or [path]:
        classes, containers = _class_folders(folder)
        ids = _classes_below_ids(classes)
        if classes and not ids and all(is_id(inner.name) for inner in classes):
            classes, containers = [], [*containers, *classes]
        if len(ids or classes) >= len(best.classes):
            best = _Layout(splits, bool(ids), ids or classes, [*containers, *best.containers])
    return best


def _class_folders(folder: Path, depth: int = 2) -> tuple[list[Path], list[Path]]:
    """Return one folder per class name, those inside containers included, and the containers."""
    inside = [inner for inner in subfolders(folder) if _has_images(inner)]
    no_classes = containers_among(inner.name for inner in inside)
    containers = [inner for inner in inside if inner.name in no_classes]
    classes = {inner.name: inner for inner in inside if inner.name not in no_classes}
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


def _split_folders(path: Path) -> dict[str, str]:
    """Return the folders named train, val_images, Test Set or similar with their splits, if one of them contains class
    folders."""
    splits = splits_among(folder.name for folder in subfolders(path))
    return splits if any(_has_images(inner) for name in splits for inner in subfolders(path / name)) else {}


def _has_images(folder: Path) -> bool:
    return bool(image_files(folder, follow_links=True, first_only=True))


SOURCE = Source("folder per class", "melanoma/*.jpg, nevus/*.jpg, … or train/melanoma/*.jpg, val/…, test/…", find, read)
