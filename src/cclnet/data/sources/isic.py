"""ISIC challenge folders of 2018 (task 3) and 2019, and HAM10000, the training images of ISIC 2018.

A challenge folder has images in ``..._Input`` and labels in ``..._GroundTruth``. The label AK of 2019 is read as AKIEC
of 2018, so that a model of one can be evaluated on the other. HAM10000, as Kaggle and the Harvard Dataverse ship it,
has a metadata file and images anywhere below it. The test images of ISIC 2018, which the Dataverse also ships, have a
file of the same columns; with both files the images have the splits train and test.
"""

from __future__ import annotations

import filecmp
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from cclnet.data.sources.manifest import TEXT_SUFFIXES, read_columns, read_sheet
from cclnet.data.sources.source import (
    ImagesByStem,
    Source,
    SourceNotes,
    below,
    encode,
    finish,
    image_files,
    nfc,
    plain_files,
    subfolders,
)
from cclnet.data.table import SPLIT_NAMES, ImageTable, listed
from cclnet.errors import InputError
from cclnet.settings import DataOptions

CLASSES = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC", "SCC", "UNK")
_TRUTH = re.compile("ground_?truth", re.IGNORECASE)
_SPLIT = re.compile("training|validation|test", re.IGNORECASE)
_INPUT = re.compile("_input$", re.IGNORECASE)
_METADATA = re.compile("lesion_?groupings|metadata", re.IGNORECASE)
_SEARCHED_FOLDERS = re.compile("isic|truth|train|valid|test|input", re.IGNORECASE)
_HAM_COLUMNS = {"lesion_id", "image_id", "dx"}


@dataclass(frozen=True)
class _Layout:
    """Ground truth files, folders that may contain tables, and the folder that contains the images."""

    root: Path
    folders: list[Path]
    truths: list[Path]
    all_splits: bool


def _find_isic(path: Path) -> list[Path]:
    return _find_layout(path).truths


def _read_isic(path: Path, options: DataOptions) -> ImageTable:
    """Return every labelled image, sorted by name, with its lesion where known."""
    layout = _find_layout(path)
    if not layout.truths:
        raise InputError(f"{path}: no ISIC ground truth (…GroundTruth.csv with columns image, MEL, NV, BCC, …) found.")
    notes = SourceNotes()
    rows = pd.concat([_read_truth(truth, notes) for truth in layout.truths], ignore_index=True)
    if repeated := sorted(set(rows["image"][rows["image"].duplicated()])):
        raise InputError(
            f"{path}: images are labelled twice in {', '.join(truth.name for truth in layout.truths)}: "
            f"{listed(repeated)}. Give the folder of one challenge or one split."
        )
    rows, files = _match_isic_files(rows.sort_values("image"), layout, options, notes)
    names = rows["image"].tolist()
    columns = {_class_column(column) for truth in layout.truths for column in read_columns(truth)}
    classes = tuple(name for name in CLASSES if name in columns)
    extra = _read_metadata(layout).reindex(names).fillna("").reset_index(drop=True)
    labels = np.array([classes.index(label) for label in rows["label"]], dtype=np.int64)
    groups = notes.fill_groups(extra["lesion_id"].tolist(), names) if "lesion_id" in extra else None
    splits = None if (rows["split"] == "").any() else rows["split"].to_numpy(dtype=np.str_)
    extra = extra.drop(columns="lesion_id", errors="ignore")
    table = ImageTable(ISIC.title, layout.root, names, files, labels, classes, groups, splits, extra)
    return finish(table, notes, options)


def _find_layout(path: Path) -> _Layout:
    """The path may be the folder of everything, one ``_Input`` or ``_GroundTruth`` folder, or the CSV itself."""
    if path.is_file():
        above = path.parent.parent if _TRUTH.search(path.parent.name) else path.parent
        return _Layout(above, _searched_folders(above), [path] if _is_truth(path) else [], all_splits=False)
    if _INPUT.search(path.name) or _TRUTH.search(path.name):
        folders = [path, *_searched_folders(path.parent)]
        stem = _without_role(path.name)
        truths = [truth for truth in _find_truths(folders) if truth.parent == path or _without_role(truth.stem) == stem]
        return _Layout(path if _INPUT.search(path.name) else path.parent, folders, truths, all_splits=False)
    folders = _searched_folders(path)
    return _Layout(path, folders, _find_truths(folders), all_splits=True)


def _searched_folders(folder: Path) -> list[Path]:
    return [folder, *(inner for inner in subfolders(folder) if _SEARCHED_FOLDERS.search(inner.name))]


def _find_truths(folders: list[Path]) -> list[Path]:
    """Return the ground truth files; a copy of one in another folder counts once."""
    found: dict[str, Path] = {}
    for file in (file for folder in folders for file in plain_files(folder, [".csv"])):
        if _TRUTH.search(file.name) and _is_truth(file):
            first = found.setdefault(file.name, file)
            if first != file and not filecmp.cmp(first, file, shallow=False):
                raise InputError(f"{first} and {file} have the same name and differ. Remove one, or give one of them.")
    return sorted(found.values())


def _is_truth(file: Path) -> bool:
    return {"image", "MEL", "NV", "BCC"} <= {_class_column(column) for column in read_columns(file)}


def _class_column(name: str) -> str:
    name = name.upper()
    return {"IMAGE": "image", "AK": "AKIEC"}.get(name, name)


def _without_role(name: str) -> str:
    """Return ``isic_2019_training`` for ``ISIC_2019_Training_Input`` and for ``ISIC_2019_Training_GroundTruth``."""
    return re.sub("_?(input|ground_?truth)$", "", name, flags=re.IGNORECASE).lower()


def _read_truth(truth: Path, notes: SourceNotes) -> pd.DataFrame:
    """Return columns image, label (empty unless exactly one class is marked), split and truth (the file)."""
    sheet = read_sheet(truth).rename(columns=_class_column)
    if repeated := sorted(set(sheet.columns[sheet.columns.duplicated()])):
        raise InputError(f"{truth} has two columns for {', '.join(repeated)} (AK and AKIEC are the same class).")
    columns = [column for column in sheet.columns if column in CLASSES]
    marks = sheet[columns].apply(pd.to_numeric, errors="coerce").to_numpy(dtype=np.float64)
    one_class = np.isin(marks, (0.0, 1.0)).all(axis=1) & (np.nansum(marks, axis=1) == 1)
    label = np.where(one_class, np.array(columns, dtype=object)[np.nan_to_num(marks).argmax(axis=1)], "")
    split = _SPLIT.search(truth.name)
    rows = pd.DataFrame({"image": sheet["image"].map(nfc), "label": label})
    notes.exclude(f"rows of {truth.name} that do not mark exactly one class", rows["image"][~one_class].tolist())
    return rows.assign(split=SPLIT_NAMES[split[0].lower()] if split else "", truth=str(truth))


def _match_isic_files(
    rows: pd.DataFrame, layout: _Layout, options: DataOptions, notes: SourceNotes
) -> tuple[pd.DataFrame, list[Path]]:
    folders = {str(truth): _image_folder(truth, layout) for truth in layout.truths}
    images = {
        folder: ImagesByStem(image_files(folder, root=layout.root, follow_links=options.follow_links))
        for folder in {*folders.values(), *_unlabelled_folders(layout)}
    }
    named = {*rows["image"], *rows["image"].map(_other_size)}
    unlabelled = sorted({file for index in images.values() for file in index.besides(named)})
    rows = rows[rows["label"] != ""]
    files = [
        images[folders[truth]].find(name) or images[folders[truth]].find(_other_size(name))
        for name, truth in zip(rows["image"], rows["truth"], strict=True)
    ]
    rows, matched = _with_one_file(rows, files, "image", notes)
    notes.exclude("images without a label", [below(layout.root, file) for file in unlabelled])
    return rows, matched


def _with_one_file(
    rows: pd.DataFrame, files: list[list[str]], column: str, notes: SourceNotes
) -> tuple[pd.DataFrame, list[Path]]:
    """Return the rows that match exactly one file, and these files."""
    count = np.array([len(several) for several in files], dtype=np.int64)
    notes.exclude("labels without an image", rows[column][count == 0].tolist())
    notes.exclude("labels for which several files fit", rows[column][count > 1].tolist())
    return rows[count == 1].reset_index(drop=True), [Path(several[0]) for several in files if len(several) == 1]


def _other_size(name: str) -> str:
    """Return the other name that the same image may have: with or without ``_downsampled``."""
    return name.removesuffix("_downsampled") if name.endswith("_downsampled") else f"{name}_downsampled"


def _image_folder(truth: Path, layout: _Layout) -> Path:
    """Return the ``_Input`` folder of a ground truth; else its own folder where that has images, else the root."""
    stem = _without_role(truth.stem)
    for folder in layout.folders:
        if _without_role(folder.name) == stem and not _TRUTH.search(folder.name):
            return folder
    if truth.parent != layout.root and image_files(truth.parent, follow_links=True, first_only=True):
        return truth.parent
    return layout.root


def _unlabelled_folders(layout: _Layout) -> list[Path]:
    """Return ``_Input`` folders of the same challenge without ground truth, as the test split often has."""
    if not layout.all_splits:
        return []
    labelled = {_without_role(truth.stem) for truth in layout.truths}
    challenges = {_SPLIT.split(stem)[0] for stem in labelled if _SPLIT.search(stem)}
    stems = {folder: _without_role(folder.name) for folder in layout.folders if _INPUT.search(folder.name)}
    return [folder for folder, stem in stems.items() if stem not in labelled and _SPLIT.split(stem)[0] in challenges]


def _read_metadata(layout: _Layout) -> pd.DataFrame:
    """Return lesion groupings and metadata (of HAM10000, with ``image_id``) indexed by image; where files disagree, the
    first value is used."""
    files = [file for folder in layout.folders for file in plain_files(folder, TEXT_SUFFIXES)]
    sheets = [
        read_sheet(file).rename(columns={"image_id": "image"})
        for file in files
        if _METADATA.search(file.name) and len({"image", "image_id"} & set(read_columns(file))) == 1
    ]
    if not sheets:
        return pd.DataFrame()
    return pd.concat(sheets).replace("", None).groupby("image", sort=False).first()


def _find_ham(path: Path) -> list[Path]:
    """Return the metadata files; none beside an ISIC ground truth, to which they only add columns."""
    return [] if path.is_dir() and _find_isic(path) else _ham_metadata(path)


def _ham_metadata(path: Path) -> list[Path]:
    files = [path] if path.is_file() else plain_files(path, TEXT_SUFFIXES)
    return [file for file in files if file.suffix.lower() in TEXT_SUFFIXES and set(read_columns(file)) >= _HAM_COLUMNS]


def _read_ham(path: Path, options: DataOptions) -> ImageTable:
    """Return every image that has a file and a diagnosis, sorted by name, grouped by lesion, with ISIC class names."""
    sheets = _ham_metadata(path)
    if not sheets:
        raise InputError(f"{path}: no HAM10000 metadata (columns lesion_id, image_id, dx, …) found.")
    root = path.parent if path.is_file() else path
    notes = SourceNotes()
    read = [read_sheet(sheet).assign(split="test" if "test" in sheet.name.lower() else "train") for sheet in sheets]
    rows = pd.concat(read, ignore_index=True).fillna("")
    rows["image_id"] = rows["image_id"].map(nfc)
    # The same metadata is often there twice, with and without suffix.
    rows = rows.drop_duplicates(["image_id", "dx", "lesion_id"])
    if repeated := sorted(set(rows["image_id"][rows["image_id"].duplicated()])):
        raise InputError(f"{', '.join(map(str, sheets))}: images have two diagnoses or lesions: {listed(repeated)}.")
    rows = rows.sort_values("image_id")
    images = ImagesByStem(image_files(root, follow_links=options.follow_links))
    notes.exclude("rows without a diagnosis", rows["image_id"][rows["dx"] == ""].tolist())
    notes.exclude("images without a label", [below(root, file) for file in images.besides(rows["image_id"])])
    rows = rows[rows["dx"] != ""]
    rows, files = _with_one_file(rows, [images.find(name) for name in rows["image_id"]], "image_id", notes)
    names = rows["image_id"].tolist()
    labels, classes = encode(rows["dx"].str.upper().tolist(), CLASSES)
    groups, splits = notes.fill_groups(rows["lesion_id"].tolist(), names), rows["split"].to_numpy(dtype=np.str_)
    if len(set(splits.tolist())) < 2 and (of_folders := notes.splits_of_folders(root, files)) is not None:
        splits = of_folders
    extra = rows.drop(columns=[*_HAM_COLUMNS, "split"])
    table = ImageTable(HAM10000.title, root, names, files, labels, classes, groups, splits, extra)
    return finish(table, notes, options)


_ISIC_LAYOUT = "ISIC2018_Task3_Training_Input/ with ISIC2018_Task3_Training_GroundTruth/*.csv, or the same of 2019"
_HAM_LAYOUT = "HAM10000_metadata(.csv, .tab) with HAM10000_images_part_1/ and HAM10000_images_part_2/"
ISIC = Source("ISIC challenge folder", _ISIC_LAYOUT, _find_isic, _read_isic)
HAM10000 = Source("HAM10000", _HAM_LAYOUT, _find_ham, _read_ham)
