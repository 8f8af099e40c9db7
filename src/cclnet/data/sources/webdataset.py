"""WebDataset: tar files with the image and the label of a sample under one name, as 17.jpg and 17.cls. Images are read
in place, without extraction.

A sample is what comes before the first dot of the last part of the name. Its label is in ``.cls`` (a class number or
name), or in ``.json``, which may also have the group and the split. Without labels, folders inside the tar files are
the classes. Class numbers get the names in ``classes.txt`` beside the tar files, one per line, if there is one.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cclnet.data.archives import MAX_IMAGE_BYTES, ArchivedImages, safe_name, tar_members
from cclnet.data.image_io import SUFFIXES
from cclnet.data.sources.folder_names import split_of_folder
from cclnet.data.sources.manifest import GROUP, SPLIT
from cclnet.data.sources.source import Source, SourceNotes, encode, finish, nfc, plain_files, subfolders
from cclnet.data.table import SPLIT_NAMES, ImageTable
from cclnet.errors import InputError
from cclnet.files import check_regular, parse_json
from cclnet.settings import DataOptions

_LABEL_KEYS = ("label", "cls", "class", "class_name", "category", "target", "diagnosis", "dx")
_LABEL_BYTES = 2**12  # of a .cls member
_JSON_BYTES = 2**20  # of a .json member
_CLASSES_BYTES = 2**22  # of classes.txt


def find(path: Path) -> list[Path]:
    """Return the tar files: the file itself, those of a folder, or those of folders in it."""
    if path.is_file():
        return [path] if path.suffix.lower() == ".tar" else []
    return plain_files(path, [".tar"]) or [
        file for folder in subfolders(path) for file in plain_files(folder, [".tar"])
    ]


def read(path: Path, options: DataOptions) -> ImageTable:
    """Return every image with a label. Names are those in the tar files, behind the name of the file where two files
    have the same."""
    tars = find(path)
    if not tars:
        raise InputError(f"expected tar files in {path}, found none.")
    root = path if path.is_dir() else path.parent
    samples = _Samples()
    for tar in tars:
        samples.read(tar)
    notes = SourceNotes()
    notes.exclude("images without a label", samples.unlabelled)
    notes.exclude("labels without an image", samples.imageless)
    notes.exclude("names that lead out of the tar file", samples.unsafe)
    notes.exclude(f"images of more than {MAX_IMAGE_BYTES:,} bytes", samples.too_large)
    names = samples.names
    if len(set(names)) < len(names):
        below = [os.path.splitext(os.path.relpath(tar, root))[0].replace(os.sep, "/") for tar in tars]  # noqa: PTH122
        names = [f"{below[tar]}/{name}" for tar, name in zip(samples.tar, names, strict=True)]
    labels, order = _with_class_names(root, samples.labels)
    codes, classes = encode(labels, order)
    groups = None
    if any(samples.groups):
        groups = notes.fill_groups(samples.groups, names)
    images = ArchivedImages(
        [os.fspath(tar) for tar in tars], np.array(samples.tar, np.int32), np.array(samples.start, np.int64),
        np.array(samples.size, np.int64), names,
    )  # fmt: skip
    table = ImageTable(SOURCE.title, root, names, images, codes, classes, groups, _splits(samples, tars, notes))
    return finish(table, notes, options)


class _Samples:
    """The images of tar files, with what their sample says."""

    def __init__(self) -> None:
        self.names, self.labels, self.groups, self.splits = list[str](), list[str](), list[str](), list[str]()
        self.tar, self.start, self.size = array("i"), array("q"), array("q")  # a million Python integers take 32 MB
        self.unlabelled, self.imageless = list[str](), list[str]()
        self.unsafe, self.too_large = list[str](), list[str]()
        self._tars = 0

    def read(self, path: Path) -> None:
        """Add the images of one tar file. The members of a sample follow one another, as WebDataset requires."""
        sample, images, facts = "", list[tuple[str, int, int]](), dict[str, str]()
        with path.open("rb") as file:
            for member in tar_members(path):
                if (name := safe_name(member.name)) is None:
                    self.unsafe.append(f"{path.name}: {member.name[:100]}")
                    continue
                folder, _, last = nfc(name).rpartition("/")
                stem, dot, suffix = last.partition(".")
                key = f"{folder}/{stem}"
                if key != sample:
                    self._add(sample, images, facts)
                    sample, images, facts = key, [], {}
                suffix = suffix.lower()
                if dot and f".{suffix.rpartition('.')[2]}" in SUFFIXES:
                    images.append((nfc(name), member.start, member.size))
                elif suffix in ("cls", "json"):
                    facts |= _read_facts(path, file, suffix, name, member.start, member.size)
            self._add(sample, images, facts)
        self._tars += 1

    def _add(self, sample: str, images: list[tuple[str, int, int]], facts: dict[str, str]) -> None:
        if not images and facts:
            self.imageless.append(sample.strip("/"))
        for name, start, size in images:
            folder = name.split("/")[0] if "/" in name else ""
            label = facts.get("label", "") or (folder if not facts else "")
            if size > MAX_IMAGE_BYTES:
                self.too_large.append(name)
            elif not label:
                self.unlabelled.append(name)
            else:
                self.names.append(name)
                self.labels.append(label)
                self.groups.append(facts.get("group", ""))
                self.splits.append(facts.get("split", ""))
                self.tar.append(self._tars)
                self.start.append(start)
                self.size.append(size)


def _read_facts(path: Path, file: BinaryIO, suffix: str, name: str, start: int, size: int) -> dict[str, str]:
    """Return label, group and split in a .cls or .json member."""
    limit = _LABEL_BYTES if suffix == "cls" else _JSON_BYTES
    if size > limit:
        raise InputError(f"{path}: {name} has {size:,} bytes, at most {limit:,} are read for a label.")
    file.seek(start)
    try:
        text = file.read(size).decode("utf-8-sig")
        content = parse_json(text) if suffix == "json" else {"label": text}
    except ValueError as error:
        raise InputError(f"{path}: {name} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise InputError(f'{path}: {name} must be an object such as {{"label": 3}}.')
    keys = {str(key).lower(): value for key, value in content.items()}
    usual = {"label": _LABEL_KEYS, "group": GROUP, "split": SPLIT}
    found = {fact: _text(next((keys[key] for key in known if key in keys), "")) for fact, known in usual.items()}
    return {fact: value for fact, value in found.items() if value}


def _text(value: Any) -> str:
    return str(value).strip() if isinstance(value, str | int) else ""


def _with_class_names(root: Path, labels: list[str]) -> tuple[list[str], list[str]]:
    """Return the labels, with numbers replaced by the names in classes.txt, and the order of the classes."""
    file = root / "classes.txt"
    if not file.exists():
        return labels, []
    check_regular(file, _CLASSES_BYTES)
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}. It has one class name per line, in UTF-8.") from error
    known = [nfc(line.strip()) for line in lines if line.strip()]
    if all(label.isdecimal() and len(label) < 8 and int(label) < len(known) for label in set(labels)):
        return [known[int(label)] for label in labels], known
    return labels, known


def _splits(samples: _Samples, tars: list[Path], notes: SourceNotes) -> Any:
    """Return the split of each image, as its sample says, or else by the name of its tar file (train-0001.tar) or of
    the folder of that; None where not all have one."""
    of_tar = [split_of_folder(tar.stem) or split_of_folder(tar.parent.name) for tar in tars]
    found = [
        SPLIT_NAMES.get(own.lower(), "") or of_tar[tar] for own, tar in zip(samples.splits, samples.tar, strict=True)
    ]
    if len(set(found)) < 2 or "" in found:
        return None
    notes.note("splits are those of the samples or of the names of the tar files", sorted(set(found)))
    return np.array(found, dtype=np.str_)


SOURCE = Source("WebDataset", "tar files, such as train-0001.tar, with 17.jpg and 17.cls or 17.json", find, read)
