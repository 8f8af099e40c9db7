"""What all data sources share: the description of a layout, notes on excluded images, the final checks of a table, and
the image files of a data folder: each file once, none outside the folder.

File paths are strings here, because these loops see every file of a data set and Path objects are slow.
"""

from __future__ import annotations

import filecmp
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cclnet.data.image_io import SUFFIXES
from cclnet.data.sources.folder_names import split_of_folder
from cclnet.data.table import ImageTable, listed
from cclnet.errors import InputError
from cclnet.schema import is_utf8
from cclnet.settings import DataOptions

# ruff: noqa: PTH100, PTH112, PTH113, PTH114, PTH118, PTH119, PTH120, PTH122, PTH123


@dataclass(frozen=True)
class Source:
    """One data layout. ``find`` returns the files or folders that identify it, none if the path has another layout."""

    title: str
    layout: str
    find: Callable[[Path], list[Path]]
    read: Callable[[Path, DataOptions], ImageTable]


@dataclass
class SourceNotes:
    """What to report about a source: ``excluded`` (refused by strict) and ``notes`` (no fault)."""

    excluded: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def exclude(self, what: str, names: Sequence[object]) -> None:
        """Report that these were left out, with their number and the first names; nothing if there are none."""
        self.excluded += [f"{what}: {len(names):,} ({listed(names)})"] if names else []

    def note(self, what: str, names: Sequence[object]) -> None:
        self.notes += [f"{what}: {len(names):,} ({listed(names)})"] if names else []

    def fill_groups(self, groups: Sequence[str], names: Sequence[str]) -> npt.NDArray[np.str_]:
        """Return the groups; an image without a group gets a group of its own, which is noted."""
        pairs = list(zip(names, groups, strict=True))
        self.note("images without a group, each taken alone", [name for name, group in pairs if not group])
        return np.array([group or f"alone: {name}" for name, group in pairs], dtype=np.str_)

    def splits_of_folders(self, root: Path, files: Sequence[str | Path]) -> npt.NDArray[np.str_] | None:
        """Return the split that a folder above each file is named after (train_images/1.png), which is noted; None
        where not all files have one, or all the same."""
        folders = [os.path.dirname(file) for file in files]
        split_of = {folder: _split_of_path(below(root, os.path.join(folder, ""))) for folder in set(folders)}
        found = [split_of[folder] for folder in folders]
        names = sorted(set(found) - {""})
        if len(names) < 2:
            return None
        if "" in found:
            self.note(f"folders named {' and '.join(names)} are no splits, because images are outside of them", names)
            return None
        self.note("splits are those of the folders", names)
        return np.array(found, dtype=np.str_)


def _split_of_path(path: str) -> str:
    return next((split for part in Path(path).parts if (split := split_of_folder(part))), "")


def encode(labels: Sequence[str], order: Sequence[str] = ()) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Return class indices and classes: those of ``order`` first, then the others in natural order.

    >>> encode(["grade 10", "grade 9", "nv"], order=["nv"])
    (array([2, 1, 0]), ('nv', 'grade 9', 'grade 10'))
    """
    present = set(labels)
    ordered = [name for name in order if name in present]
    classes = (*ordered, *sorted(present.difference(ordered), key=lambda name: (_natural(name), name)))
    index = {name: i for i, name in enumerate(classes)}
    return np.array([index[label] for label in labels], dtype=np.int64), classes


def finish(table: ImageTable, notes: SourceNotes, options: DataOptions) -> ImageTable:
    """Apply the options, drop classes without images, refuse a table that cannot be trained on, and add the notes as
    ``problems``. A single split is not a split of the data: ``splits`` becomes None."""
    from cclnet.data.sources.selection import select  # which needs the notes and encode of this module

    if options.strict and notes.excluded:
        faults = "".join(f"\n  - {fault}" for fault in notes.excluded)
        raise InputError(f"{table.source} at {table.root}, strict:{faults}\nFix this, or read it without strict.")
    counts = table.class_counts()
    notes.note("classes without an image, left out", [c for c, n in zip(table.classes, counts, strict=True) if not n])
    table = select(_without_empty_classes(table), notes, options)
    if odd := [name for name in (*table.classes, *table.names) if not is_utf8(name)]:
        raise InputError(
            f"{table.source} at {table.root}: {len(odd):,} names are not UTF-8: {', '.join(map(repr, odd[:3]))}. "
            "Rename these files or folders, for example with convmv, because run files and reports are UTF-8; or leave "
            "the files out with exclude (--exclude), where ? stands for any character."
        )
    if len(table) == 0:
        faults = "; ".join((*notes.excluded, *notes.notes)) or "the table is empty"
        raise InputError(f"{table.source} at {table.root}: no image is left that has a file and a label ({faults}).")
    table = _without_empty_classes(table)
    if table.num_classes < 2:
        raise InputError(
            f"{table.source} at {table.root}: one class only ({', '.join(table.classes)}, {len(table):,} images). "
            "A classifier needs at least two; check the folder or the label column."
        )
    splits = set() if table.splits is None else set(table.splits.tolist())
    if len(splits) > 1 and "train" not in splits:
        notes.notes.append(
            f"there is no training split, only {' and '.join(sorted(splits))}: the set can evaluate a trained model "
            "(cclnet predict). To train on it, split it anew (--set split.by=class)"
        )
    return replace(table, splits=table.splits if len(splits) > 1 else None, problems=(*notes.excluded, *notes.notes))


def _without_empty_classes(table: ImageTable) -> ImageTable:
    kept = np.flatnonzero(table.class_counts())
    labels = table.labels[:, kept] if table.multilabel else np.searchsorted(kept, table.labels)
    return replace(table, labels=labels, classes=tuple(table.classes[i] for i in kept))


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key in natural order: 9 before 10, also inside a name."""
    pieces = re.split(r"(\d+)", name.casefold())
    # Python refuses integers of more than 4,300 digits.
    return tuple((0, int(piece[:4000]), "") if piece.isdecimal() else (1, 0, piece) for piece in pieces)


def image_files(
    folder: Path, *, root: Path | None = None, follow_links: bool = False, first_only: bool = False
) -> list[str]:
    """Return all image files in and below a folder, sorted by path; ``first_only`` stops at the first one. Hidden files
    and ``__MACOSX`` are skipped. A link that leads out of ``root`` (default: the folder) is refused unless
    ``follow_links``. No folder is entered twice, so circular links end, and folders are entered by their own name
    before any link to them."""
    root = root or folder
    inside = os.path.realpath(root)
    found, leaving, linked = list[str](), list[str](), list[str]()
    folders, entered = [os.fspath(folder)], set[str]()
    if not follow_links and not _within(os.path.realpath(folder), inside):
        raise _leads_out(root, [folder])
    while folders or linked:
        current = folders.pop() if folders else linked.pop()
        real = os.path.realpath(current)
        if real in entered:
            continue
        entered.add(real)
        for entry in _entries(current):
            link = entry.is_symlink()
            if os.path.isdir(entry.path) if link else entry.is_dir():
                into = linked if link else folders
            elif (os.path.isfile(entry.path) if link else entry.is_file()) and _is_image(entry):
                into = found
            else:
                continue
            if link and not follow_links and not _within(os.path.realpath(entry.path), inside):
                into = leaving
            into.append(entry.path)
        if first_only and found:
            break
    if leaving:
        raise _leads_out(root, sorted(leaving))
    return sorted(found)


def subfolders(folder: Path) -> list[Path]:
    """Return the visible folders directly inside a folder, sorted by name."""
    return sorted(Path(entry.path) for entry in _entries(folder) if os.path.isdir(entry.path))


def plain_files(folder: Path, suffixes: Iterable[str]) -> list[Path]:
    """Return the files directly inside a folder that have one of these suffixes, sorted by name."""
    wanted = set(suffixes)
    entries = (entry for entry in _entries(folder) if os.path.splitext(entry.name)[1].lower() in wanted)
    return [Path(path) for path in sorted(entry.path for entry in entries if os.path.isfile(entry.path))]


def images_beside(files: Iterable[str]) -> list[str]:
    """Return the other image files in the folders of these files."""
    known = set(files)
    folders = sorted({os.path.dirname(file) for file in known})
    entries = (entry for folder in folders for entry in _entries(folder))
    return sorted({entry.path for entry in entries if entry.is_file() and _is_image(entry)} - known)


def below(folder: Path, file: str) -> str:
    """Return the path of a file relative to the folder it was found in."""
    start = os.path.join(folder, "")
    return file[len(start) :] if file.startswith(start) else os.path.relpath(file, folder)


def locate(folder: Path, names: Iterable[str], *, follow_links: bool = False) -> list[list[str]]:
    """Return the files that each name from a table may refer to: none, one, or several that differ. A name is a path
    inside ``folder``, or else of a file of the same name, with or without suffix, in any folder below. All names
    outside ``folder`` are refused in one error."""
    root = os.path.abspath(folder)
    relative, outside = [], []
    for name in names:
        path = os.path.normpath(os.path.join(root, name.replace("\\", "/")))
        if _within(path, root) and "\0" not in name:
            relative.append(path[len(root) :].strip(os.sep))
        else:
            outside.append(name)
    if outside:
        raise InputError(
            f"images outside the data folder {folder}: {listed(outside)}. Names are relative to the folder of the "
            "table; give the folder of the images with image_folder (--image-folder)."
        )
    found = [[path] if os.path.isfile(path := os.path.join(folder, name)) else [] for name in relative]
    files = [] if follow_links else [paths[0] for paths in found if paths]
    # Only the targets of links are resolved: a file leaves if it or its folder is a link out of the data folder.
    inside = os.path.realpath(folder)
    stays = {parent: _within(os.path.realpath(parent), inside) for parent in {os.path.dirname(file) for file in files}}
    if leaving := [
        file
        for file in files
        if not stays[os.path.dirname(file)] or (os.path.islink(file) and not _within(os.path.realpath(file), inside))
    ]:
        raise _leads_out(folder, leaving)
    if all(found):
        return found
    elsewhere = ImagesByStem(image_files(folder, follow_links=follow_links))
    return [paths or elsewhere.find_named(name) for paths, name in zip(found, relative, strict=True)]


def _leads_out(folder: Path, links: Sequence[object]) -> InputError:
    return InputError(
        f"links in {folder} lead out of it: {listed(links)}. Copy the files, give the folder of their targets, or "
        "allow links with follow_links (--follow-links)."
    )


def nfc(text: str) -> str:
    """Return text in NFC: macOS writes accented letters to disk in another form than most tables."""
    return unicodedata.normalize("NFC", text)


def file_name(name: str) -> str:
    """Return the name of a file without folders, whichever system wrote it."""
    return nfc(name.replace("\\", "/").rpartition("/")[2])


def file_stem(name: str) -> str:
    """Return the name of an image file without folders and suffix.

    >>> file_stem("a/b.c/scan.1.PNG"), file_stem("1.2.840.113")
    ('scan.1', '1.2.840.113')
    """
    last = file_name(name)
    stem, suffix = os.path.splitext(last)
    return stem if suffix.lower() in SUFFIXES else last


class ImagesByStem:
    """Look up images by file name without suffix, in any folder. Segmentation masks are ignored. Copies of one file
    (same name and bytes, as Kaggle's HAM10000 has of every image) count once."""

    def __init__(self, files: Iterable[str]) -> None:
        self._files: dict[str, list[str]] = defaultdict(list)
        for file in files:
            stem = nfc(os.path.splitext(os.path.basename(file))[0])
            if not stem.endswith(("_segmentation", "_superpixels")) and "_attribute_" not in stem:
                self._files[stem].append(file)

    def find(self, stem: str) -> list[str]:
        """Return the files of a stem without copies: none, one, or several that differ."""
        return _without_copies(self._files.get(stem, []))

    def find_named(self, name: str) -> list[str]:
        """As :meth:`find`, for a path of which only the file name is used, with or without suffix."""
        last = nfc(os.path.basename(name))
        stem, suffix = os.path.splitext(last)
        if suffix.lower() not in SUFFIXES:
            return self.find(last)
        files = self._files.get(stem, [])
        return _without_copies([file for file in files if nfc(os.path.basename(file)) == last])

    def besides(self, used: Iterable[str]) -> list[str]:
        """Return the first file of every other stem."""
        rest = self._files.keys() - set(used)
        return [self._files[stem][0] for stem in sorted(rest)]


def _without_copies(files: list[str]) -> list[str]:
    """Return one of the files if all have the same content (not only the same size), else all of them."""
    alike = all(filecmp.cmp(files[0], file, shallow=False) for file in files[1:])
    return files[:1] if alike else files


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".") and entry.name != "__MACOSX"]
    except OSError as error:
        raise InputError(f"cannot list the folder {folder}: {error.strerror or error}.") from error


def _is_image(entry: os.DirEntry[str]) -> bool:
    """Recognise an image by its suffix; DICOM files without suffix, or named by a UID, by their header."""
    suffix = os.path.splitext(entry.name)[1].lower()
    if suffix in SUFFIXES:
        return True
    if suffix and not suffix[1:].isdigit():
        return False
    try:
        with open(entry.path, "rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError as error:
        raise InputError(f"cannot read {entry.path}: {error.strerror or error}.") from error


def _within(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)
