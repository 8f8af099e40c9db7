"""ISIC challenge folders of 2018 (task 3) and 2019: images in ``..._Input``, labels in ``..._GroundTruth``.

The two label the same lesions with small differences: 2019 says AK where 2018 says AKIEC (here always AKIEC, so that
a model of one can be judged on the other), adds SCC and UNK, and has file names that end in ``_downsampled``.
"""

from __future__ import annotations

import filecmp
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from cclnet.data.sources.image_files import ByStem, below, image_files, plain_files, same_spelling, subfolders
from cclnet.data.sources.source import SPLIT_NAMES, Findings, Source, finish, groups_or_alone, listed
from cclnet.data.sources.table_file import TEXT_SUFFIXES, read_columns, read_sheet
from cclnet.data.table import ImageTable
from cclnet.errors import InputError
from cclnet.settings import DataOptions

CLASSES = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC", "SCC", "UNK")
_TRUTH = re.compile("ground_?truth", re.IGNORECASE)
_PART = re.compile("training|validation|test", re.IGNORECASE)
_INPUT = re.compile("_input$", re.IGNORECASE)
_ABOUT = re.compile("lesion_?groupings|metadata", re.IGNORECASE)
_WORTH_OPENING = re.compile("isic|truth|train|valid|test|input", re.IGNORECASE)


@dataclass(frozen=True)
class _Place:
    """Ground truth files, the folders in which tables may lie, and the folder in and below which images lie."""

    root: Path
    folders: list[Path]
    truths: list[Path]
    all_parts: bool


def find(path: Path) -> list[Path]:
    """The ground truth files by which the layout is known."""
    return _look(path).truths


def read(path: Path, options: DataOptions) -> ImageTable:
    """Every labelled image of the parts that are there, by name, with its lesion where that is known."""
    place = _look(path)
    if not place.truths:
        raise InputError(f"{path}: no ISIC ground truth (…GroundTruth.csv with columns image, MEL, NV, BCC, …) found.")
    findings = Findings()
    rows = pd.concat([_read_truth(truth, findings) for truth in place.truths], ignore_index=True)
    if doubled := sorted(set(rows["image"][rows["image"].duplicated()])):
        raise InputError(
            f"{path}: images are labelled twice in {', '.join(truth.name for truth in place.truths)}: "
            f"{listed(doubled)}. Give the folder of one challenge or one part."
        )
    rows = _with_files(rows.sort_values("image"), place, options, findings)
    names = rows["image"].tolist()
    classes = _classes(place.truths)
    about = _read_about(place).reindex(names).fillna("").reset_index(drop=True)
    table = ImageTable(
        source=SOURCE.words,
        root=place.root,
        names=names,
        images=[Path(file) for file in rows["file"]],
        labels=np.array([classes.index(label) for label in rows["label"]], dtype=np.int64),
        classes=classes,
        groups=groups_or_alone(about["lesion_id"].tolist(), names, findings) if "lesion_id" in about else None,
        splits=None if (rows["split"] == "").any() else rows["split"].to_numpy(dtype=np.str_),
        extra=about.drop(columns="lesion_id", errors="ignore"),
    )
    return finish(table, findings, options.strict)


def _look(path: Path) -> _Place:
    """The path may be the folder of everything, one ``_Input`` or ``_GroundTruth`` folder, or the CSV itself."""
    if path.is_file():
        above = path.parent.parent if _TRUTH.search(path.parent.name) else path.parent
        return _Place(above, _folders(above), [path] if _is_truth(path) else [], all_parts=False)
    if _INPUT.search(path.name) or _TRUTH.search(path.name):
        folders = [path, *_folders(path.parent)]
        stem = _without_role(path.name)
        truths = [truth for truth in _truths(folders) if truth.parent == path or _without_role(truth.stem) == stem]
        return _Place(path if _INPUT.search(path.name) else path.parent, folders, truths, all_parts=False)
    folders = _folders(path)
    return _Place(path, folders, _truths(folders), all_parts=True)


def _folders(folder: Path) -> list[Path]:
    return [folder, *(inner for inner in subfolders(folder) if _WORTH_OPENING.search(inner.name))]


def _truths(folders: list[Path]) -> list[Path]:
    """Ground truth files; a copy of the same file in another folder counts once."""
    found: dict[str, Path] = {}
    for file in (file for folder in folders for file in plain_files(folder, [".csv"])):
        if _TRUTH.search(file.name) and _is_truth(file):
            first = found.setdefault(file.name, file)
            if first != file and not filecmp.cmp(first, file, shallow=False):
                raise InputError(f"{first} and {file} have the same name and differ. Remove one, or give one of them.")
    return sorted(found.values())


def _is_truth(file: Path) -> bool:
    return {"image", "MEL", "NV", "BCC"} <= {_column(column) for column in read_columns(file)}


def _column(name: str) -> str:
    name = name.upper()
    return {"IMAGE": "image", "AK": "AKIEC"}.get(name, name)


def _classes(truths: list[Path]) -> tuple[str, ...]:
    columns = {_column(column) for truth in truths for column in read_columns(truth)}
    return tuple(name for name in CLASSES if name in columns)


def _without_role(name: str) -> str:
    """``isic_2019_training`` of ``ISIC_2019_Training_Input`` and of ``ISIC_2019_Training_GroundTruth``."""
    return re.sub("_?(input|ground_?truth)$", "", name, flags=re.IGNORECASE).lower()


def _read_truth(truth: Path, findings: Findings) -> pd.DataFrame:
    """Columns image, label (empty where not exactly one class is marked), part and truth (its file)."""
    sheet = read_sheet(truth).rename(columns=_column)
    if doubled := sorted(set(sheet.columns[sheet.columns.duplicated()])):
        raise InputError(f"{truth} has two columns for {', '.join(doubled)} (AK and AKIEC are the same class).")
    columns = [column for column in sheet.columns if column in CLASSES]
    marks = sheet[columns].apply(pd.to_numeric, errors="coerce").to_numpy(dtype=np.float64)
    one_class = np.isin(marks, (0.0, 1.0)).all(axis=1) & (np.nansum(marks, axis=1) == 1)
    label = np.where(one_class, np.array(columns, dtype=object)[np.nan_to_num(marks).argmax(axis=1)], "")
    part = _PART.search(truth.name)
    rows = pd.DataFrame({"image": sheet["image"].map(same_spelling), "label": label})
    findings.leave_out(f"rows of {truth.name} that do not mark exactly one class", rows["image"][~one_class].tolist())
    return rows.assign(split=SPLIT_NAMES[part[0].lower()] if part else "", truth=str(truth))


def _with_files(rows: pd.DataFrame, place: _Place, options: DataOptions, findings: Findings) -> pd.DataFrame:
    """The rows that have both a label and a file, with the column ``file``; the others are counted and named."""
    folders = {str(truth): _image_folder(truth, place) for truth in place.truths}
    images = {
        folder: ByStem(image_files(folder, root=place.root, follow_links=options.follow_links))
        for folder in {*folders.values(), *_unlabelled_folders(place)}
    }
    named = {*rows["image"], *rows["image"].map(_other_size)}
    unlabelled = sorted({file for index in images.values() for file in index.besides(named)})
    rows = rows[rows["label"] != ""]
    files = [
        images[folders[truth]].find(name) or images[folders[truth]].find(_other_size(name))
        for name, truth in zip(rows["image"], rows["truth"], strict=True)
    ]
    count = np.array([len(several) for several in files], dtype=np.int64)
    findings.leave_out("labels without an image", rows["image"][count == 0].tolist())
    findings.leave_out("labels for which several files fit", rows["image"][count > 1].tolist())
    findings.leave_out("images without a label", [below(place.root, file) for file in unlabelled])
    return rows[count == 1].assign(file=[several[0] for several in files if len(several) == 1])


def _other_size(name: str) -> str:
    """The name that the same image may have elsewhere: with or without ``_downsampled``."""
    return name.removesuffix("_downsampled") if name.endswith("_downsampled") else f"{name}_downsampled"


def _image_folder(truth: Path, place: _Place) -> Path:
    """The ``_Input`` folder of the same name; else the folder that the truth lies in, or all of the place."""
    stem = _without_role(truth.stem)
    for folder in place.folders:
        if _without_role(folder.name) == stem and not _TRUTH.search(folder.name):
            return folder
    if truth.parent != place.root and image_files(truth.parent, follow_links=True, first_only=True):
        return truth.parent
    return place.root


def _unlabelled_folders(place: _Place) -> list[Path]:
    """``_Input`` folders of the same challenge whose ground truth is not there, as that of the test part often is."""
    if not place.all_parts:
        return []
    labelled = {_without_role(truth.stem) for truth in place.truths}
    challenges = {_PART.split(stem)[0] for stem in labelled if _PART.search(stem)}
    stems = {folder: _without_role(folder.name) for folder in place.folders if _INPUT.search(folder.name)}
    return [folder for folder, stem in stems.items() if stem not in labelled and _PART.split(stem)[0] in challenges]


def _read_about(place: _Place) -> pd.DataFrame:
    """What groupings and metadata say of each image, indexed by image; the first word on a matter holds.

    The metadata of HAM10000, often kept beside the images of 2018, calls the image ``image_id``.
    """
    files = [
        file for folder in place.folders for file in plain_files(folder, TEXT_SUFFIXES) if _ABOUT.search(file.name)
    ]
    sheets = [read_sheet(file).rename(columns={"image_id": "image"}) for file in files if _names_images(file)]
    if not sheets:
        return pd.DataFrame()
    return pd.concat(sheets).replace("", None).groupby("image", sort=False).first()


def _names_images(file: Path) -> bool:
    return len({"image", "image_id"} & set(read_columns(file))) == 1


SOURCE = Source(
    words="ISIC challenge folder",
    layout="ISIC2018_Task3_Training_Input/ with ISIC2018_Task3_Training_GroundTruth/*.csv, and the like of 2019",
    find=find,
    read=read,
)
