"""A manifest: a table of images (CSV, TSV, semicolons or Parquet) with one row per image.

Columns are found by usual names or chosen by the user. Labels are class names in one column; several in one cell with a
separator; or one column of zeros and ones per class. The reader of table files is also used by other sources.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from cclnet.data.archives import import_pyarrow, refuse_bomb
from cclnet.data.image_io import SUFFIXES as IMAGE_SUFFIXES
from cclnet.data.sources.folder_names import split_of_folder, splits_among
from cclnet.data.sources.selection import is_excluded, keep
from cclnet.data.sources.source import (
    Source,
    SourceNotes,
    below,
    encode,
    file_name,
    file_stem,
    finish,
    image_files,
    images_beside,
    locate,
    plain_files,
    subfolders,
)
from cclnet.data.table import SPLIT_NAMES, ImageTable, listed
from cclnet.errors import InputError, unknown
from cclnet.settings import DataOptions

# Labels, class names, and which rows have a label.
Labels = tuple[npt.NDArray[np.int64] | npt.NDArray[np.uint8], tuple[str, ...], npt.NDArray[np.bool_]]
TEXT_SUFFIXES = (".csv", ".tsv", ".tab", ".txt", "")
PARQUET_SUFFIXES = (".parquet", ".pq")
SUFFIXES = (".csv", ".tsv", ".tab", *PARQUET_SUFFIXES)
MAX_BYTES = 512 * 2**20  # a table of ten million images; a larger file is not a table of labels
MAX_COLUMNS = 20_000  # one per class, and some more
_NO_VALUE = {"", "nan", "<na>", "null"}

# Usual column names in lower case with underscores; the first that is present (of images: that names files) is used.
# Patient comes before lesion, because the wider group is the safe one.
_IMAGE = ("image", "image_path", "img_path", "filepath", "file_path", "path", "image_file", "filename", "file_name",
          "file", "image_name", "image_id", "image_index", "img", "img_id", "isic_id", "id_code", "imageid",
          "imagename", "imagepath", "img_name", "image_file_path", "imgpath", "images", "file_id", "fname",
          "x_ray_image_name", "dicom_id", "sopinstanceuid", "sop_instance_uid", "ddi_file", "md5hash", "slide_id",
          "tile_id", "image_filename", "filenames")  # fmt: skip
GROUP = ("group", "group_id", "patient_id", "patient", "patientid", "subject_id", "subject", "subjectid", "person_id",
         "participant_id", "participant", "pid", "mrn", "case_id", "case", "caseid", "studyinstanceuid",
         "study_instance_uid", "study_id", "lesion_id", "lesion", "lesionid")  # fmt: skip
SPLIT = ("split", "part", "partition", "subset", "set")
# A column of patients or lesions by another name: pat_id, anon_patient_id, Patient Number, SubjectKey.
_WHOSE = "patient|pat|pt|subject|subj|participant|person|individual|donor|volunteer|lesion|case|empi|mouse|animal"
_WHICH = "id|no|nr|num|number|code|key|name|hash|uid|index|idx|anon|anonymized|deid|new|identifier"
_LIKE_GROUP = re.compile(
    rf"(?:(?:{_WHICH})_?)*(?:{_WHOSE})s?(?:_?(?:{_WHICH}))+|(?:{_WHICH})_(?:{_WHOSE})|(?:{_WHICH})_(?:{_WHICH})_(?:{_WHOSE})"
)
_MAY_BE_WORDS = ("group", "case", "lesion", "subject")  # where their cells are words: a treatment, a diagnosis
_SPLIT_IF_VALUES_FIT = ("dataset_type", "usage", "phase", "train_test", "train_or_test", "train_test_split",
                        "data_split", "dataset", "fold")  # fmt: skip
_LABEL = ("label", "labels", "class", "class_name", "category", "target", "dx", "diagnosis", "finding_labels")
_LABEL_IF_NO_OTHER = ("finding", "findings", "disease", "diagnostic", "pathology", "level", "grade", "dr_grade",
                      "retinopathy_grade", "severity", "benign_malignant", "malignant", "class_label", "class_id",
                      "label_name", "tumor_type", "condition", "outcome", "boneage_class", "type")  # fmt: skip
_NOT_LABELS = re.compile("sample.?submission|submission.?(sample|example|format)", re.IGNORECASE)  # labels are invented
_SAMPLE = 200  # rows that are compared with the names of files
# Words in the names of columns that describe a patient or an image and are seldom the task.
_DESCRIPTIONS = (
    "age sex gender male female race ethnicity view viewposition position projection frontal lateral "
    "laterality side eye site localization location bodypart scanner manufacturer modality device camera year date "
    "time hospital center centre institution country height width rows columns source license split fold usage phase "
    "visit"
)
_DESCRIBES = set(_DESCRIPTIONS.split())
_MOST_CLASSES = 50  # a column with more values is not suggested as the label
_FEWEST_TEXTS = 10  # different values of a label column, if that is most of the rows
_SEPARATORS = ("|", ";")
_MARKS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}


def find(path: Path) -> list[Path]:
    """Return the table itself; in a folder, the tables that have an image column and possible label columns, by their
    names or because the cells of a column are names of the images in the folder."""
    if path.is_file():
        return [path] if path.suffix.lower() in SUFFIXES else []
    tables = [file for file in plain_files(path, SUFFIXES) if not _NOT_LABELS.search(file.stem)]
    by_name = [file for file in tables if _could_be_manifest(read_columns(file))]
    return by_name or [file for file in tables if len(read_columns(file)) > 1 and _names_images(file, path)]


def read(path: Path, options: DataOptions) -> ImageTable:
    """Return every row that has one image file and a label; the others are reported."""
    splits_of_tables = _find_manifests(path, options)
    sheet = next(iter(splits_of_tables))
    root = Path(options.image_folder).expanduser() if options.image_folder else sheet.parent
    if not root.is_dir():
        raise InputError(f"the image folder {root} does not exist.")
    if len(splits_of_tables) == 1:
        rows = read_sheet(sheet)
    else:  # a column with the name of the tables
        options = replace(options, split_column=listed([table.name for table in splits_of_tables]))
        parts = [read_sheet(table).assign(**{options.split_column: name}) for table, name in splits_of_tables.items()]
        rows = pd.concat(parts, ignore_index=True)
    image = image_column(sheet, rows, options.image_column, root)
    if os.path.splitext(image)[1].lower() in IMAGE_SUFFIXES or _is_first_of_names(image, rows[image]):  # noqa: PTH122
        raise InputError(
            f"{sheet} has no header: its first line names an image, {image}. Add a first line with the names of the "
            "columns, such as image,label."
        )
    notes = SourceNotes()
    patterns = options.exclude_patterns
    if patterns:  # here already, so that an image with two labels can be left out
        rows, options = rows[keep(rows[image].tolist(), notes, options)], replace(options, exclude="")
    known = [str(column) for column in rows.columns if column != image]
    group, split = find_group_and_split(sheet, rows, known, options, notes)
    label_columns = find_label_columns(sheet, rows, options.label_column, {image, group, split})
    used = [column for column in (image, *label_columns, group, split) if column]
    rows = rows.drop_duplicates(used)
    named = (rows[image] != "").to_numpy()
    if (repeated := rows[image].duplicated() & named).any():
        raise InputError(
            f"{sheet}: images have several rows that differ: {listed(sorted(set(rows[image][repeated])))}. "
            "Put several labels of one image in one row (A|B), or in columns of zeros and ones; or leave these images "
            "out with exclude (--exclude)."
        )
    labels, classes, labelled = labels_of(sheet, rows, label_columns, options.label_separator)
    files = locate(root, rows[image], follow_links=options.follow_links)
    if len(rows) and not any(files):
        files = _by_stem(sheet, root, image, rows[image].tolist(), notes, options.follow_links)
    count = np.array([len(several) for several in files], dtype=np.int64)
    notes.exclude("rows without the name of an image (row)", [i + 2 for i in rows.index[~named]])
    notes.exclude("images without a label", rows[image][named & ~labelled & (count > 0)].tolist())
    notes.exclude("labels without an image", rows[image][named & (count == 0)].tolist())
    notes.exclude("names that fit several files", rows[image][named & (count > 1)].tolist())
    others = images_beside(file for several in files for file in several)
    others = [name for file in others if not is_excluded(name := below(root, file), patterns)]
    notes.exclude("images without a row in the table", others)
    notes.note("folders named like a split, in which the table names no image, left out", _unused(root, files))
    if labels.ndim == 2 and len(label_columns) == 1:
        several = rows[image][labels.sum(axis=1) > 1].tolist()
        notes.note("images with several labels in a cell (label_separator, --label-separator)", several)
    kept = np.flatnonzero(named & labelled & (count == 1))
    paths = [files[i][0] for i in kept]
    if twice := sorted(file for file, times in Counter(paths).items() if times > 1):
        raise InputError(
            f"{sheet}: several rows refer to the same file: {listed(twice)}. Remove all but one, or leave them "
            "out with exclude (--exclude)."
        )
    rows = rows.iloc[kept].reset_index(drop=True)
    names = rows[image].tolist()
    groups = None if group is None else notes.fill_groups(rows[group].tolist(), names)
    splits = notes.splits_of_folders(root, paths) if split is None else splits_of(sheet, rows[split])
    images, extra = [Path(path) for path in paths], rows.drop(columns=used)
    read_as = {"image": image, "label": listed(label_columns, 5), "group": group, "split": split}
    columns = f"columns: {', '.join(f'{what} from {column}' for what, column in read_as.items() if column)}"
    table = ImageTable(
        SOURCE.title, root, names, images, labels[kept], classes, groups, splits, extra, columns=columns
    )  # fmt: skip
    return finish(table, notes, options)


def _unused(root: Path, files: Sequence[Sequence[str]]) -> list[str]:
    """Return the folders directly in ``root`` that are named like a split and contain images, but none of ``files``."""
    used = {below(root, file).partition(os.sep)[0] for several in files for file in several}
    others = [folder for folder in subfolders(root) if folder.name not in used and split_of_folder(folder.name)]
    return [folder.name for folder in others if image_files(folder, follow_links=True, first_only=True)]


def _find_manifests(path: Path, options: DataOptions) -> dict[Path, str]:
    """Return the table, or several that have the same columns and are named like one split each (train.csv, val.csv),
    with these splits."""
    if path.is_file():
        return {path: ""}
    columns = {c for c in (options.image_column, options.group_column, options.split_column) if c}
    asked = [file for file in plain_files(path, SUFFIXES) if columns <= set(read_columns(file))]
    tables = asked if columns else find(path) or asked  # the names of columns may tell nothing, as may other folders
    if len(tables) == 1:
        return {tables[0]: ""}
    splits = splits_among(table.stem for table in tables)
    alike = len({tuple(read_columns(table)) for table in tables}) == 1
    if tables and alike and len(set(splits.values())) == len(tables) and not options.split_column:
        return {table: splits[table.stem] for table in tables}
    found = f"several tables that fit: {listed([t.name for t in tables])}" if tables else "no table that fits"
    raise InputError(
        f"{path} contains {found}. Give the path of the CSV or Parquet file. Tables of the same columns are joined if "
        "each is named like another split (train.csv, val.csv, test.csv)."
    )


def _could_be_manifest(columns: list[str]) -> bool:
    """Return whether there are an image column and a label column, or two more columns that may be zeros and ones."""
    names = {_normalise(column) for column in columns}
    return bool(names & set(_IMAGE)) and (bool(names & set(_LABEL)) or len(names - {*_IMAGE, *GROUP, *SPLIT}) > 1)


def _names_images(file: Path, folder: Path) -> bool:
    return _column_of_files(_read_sample(file), folder) is not None


def _column_of_files(rows: pd.DataFrame, folder: Path) -> str | None:
    """Return the column whose cells are mostly names of image files in or below a folder, with or without suffix: of
    several, the first with a usual name, else the one with most files."""
    rows = rows.head(_SAMPLE)
    by_name = {_normalise(str(column)): str(column) for column in reversed(rows.columns)}
    for column in (by_name[name] for name in _IMAGE if name in by_name):
        cells = [cell for cell in rows[column].head(3) if cell]
        if any(os.path.isfile(folder / cell) for cell in cells):  # noqa: PTH113 (no error for odd names)
            return column  # without listing the folder
    known = {name for file in image_files(folder, follow_links=True) for name in (file_stem(file), file_name(file))}
    share = {}
    for column in map(str, rows.columns):
        cells = [cell for cell in rows[column] if cell]
        # With its suffix, if it has one: scan.tif is not in a folder of which only scan.dcm was downloaded.
        named = len({cell for cell in cells if file_name(cell) in known})
        # Labels, ages and grades are no names, even where files are numbered: few of their values are different.
        no_name = 2 * named < len(cells) or _normalise(column) in (*_LABEL, *_LABEL_IF_NO_OTHER)
        share[column] = named / len(cells) if cells and not no_name else 0.0
    usual = [by_name[name] for name in _IMAGE if name in by_name and share[by_name[name]]]
    best = max(share, key=lambda column: share[column], default="")
    return usual[0] if usual else best if best and share[best] else None


def find_group_and_split(
    sheet: Path, rows: pd.DataFrame, known: list[str], options: DataOptions, notes: SourceNotes
) -> tuple[str | None, str | None]:
    """Return the columns of groups and splits among ``known``: those asked for, else by name and content."""
    labels = _asked_columns(sheet, rows, options.label_column)
    free = [column for column in known if column not in labels]
    group = find_column(sheet, known, options.group_column, ()) or _group_column(rows, free, notes)
    split = find_column(sheet, known, options.split_column, ()) or _split_column(rows, free, notes)
    return group, split


def _split_column(rows: pd.DataFrame, known: list[str], notes: SourceNotes) -> str | None:
    """Return the column of splits: of a usual name with at least one name of a split, or of another with nothing else.
    A column "part" of other words (arm, leg) is not."""
    by_name = {_normalise(column): column for column in reversed(known)}
    fits = {column: rows[column].str.lower().isin(SPLIT_NAMES) for column in by_name.values()}
    usual = [by_name[name] for name in SPLIT if name in by_name]
    others = [by_name[name] for name in _SPLIT_IF_VALUES_FIT if name in by_name and fits[by_name[name]].all()]
    found = [c for c in usual if fits[c].any() or _normalise(c) == SPLIT[0]] + others  # "split" is no part of a body
    notes.note("columns named like splits whose values are none, not used", [c for c in usual if c not in found])
    return found[0] if found else None


def _group_column(rows: pd.DataFrame, known: list[str], notes: SourceNotes) -> str | None:
    """Return the column of patients or lesions by its name; not one of such a name whose cells are only words."""
    by_name = {_normalise(column): column for column in reversed(known)}
    named = [name for name in GROUP if name in by_name]
    named += [name for name in by_name if name not in named and _LIKE_GROUP.fullmatch(name)]
    words = [n for n in named if n in _MAY_BE_WORDS and rows[by_name[n]].str.fullmatch(r"\D{2,}|").all()]
    notes.note(
        "columns named like groups whose values are words, not used (group_column, --group-column uses one)",
        [by_name[name] for name in words if rows[by_name[name]].nunique() < len(rows) / 2],
    )
    return next((by_name[name] for name in named if name not in words), None)


def _is_first_of_names(image: str, names: pd.Series[str]) -> bool:
    """Return whether a header is a name like those below it, with the same letters and as many digits: s000, s001."""
    shapes = {re.sub(r"\d", "0", name) for name in names.head(_SAMPLE)}
    return any(c.isdigit() for c in image) and shapes == {re.sub(r"\d", "0", image)}


def _by_stem(
    sheet: Path, root: Path, column: str, names: list[str], notes: SourceNotes, follow_links: bool
) -> list[list[str]]:
    """Return the files of names of which none is a file, by their names without suffix: the images were converted."""
    files = locate(root, [name and file_stem(name) for name in names], follow_links=follow_links)
    if not any(files):
        others = image_files(root, follow_links=follow_links, first_only=True)
        there = f"contains images such as {below(root, others[0])}" if others else "contains no images"
        raise InputError(
            f"{sheet}: none of the {len(names):,} names in the column {column} ({listed(names, 3)}) is an image in "
            f"{root}, which {there}. Choose another column with image_column (--image-column), or the folder of the "
            "images with image_folder (--image-folder)."
        )
    notes.note(
        "images have another suffix than in the table",
        [name for name, found in zip(names, files, strict=True) if found],
    )
    return files


def image_column(sheet: Path, rows: pd.DataFrame, asked: str | None = None, folder: Path | None = None) -> str:
    """Return the column of image names: the one asked for; else one that names files in ``folder`` (by default that of
    the table); else one with a usual name."""
    known = [str(column) for column in rows.columns]
    image = None if asked else _column_of_files(rows, folder or sheet.parent)
    image = image or find_column(sheet, known, asked, _IMAGE)
    if image is None:
        raise InputError(
            f"{sheet}: no image column found among {listed(known, 40)}. Choose one with image_column (--image-column)."
        )
    return image


def find_column(sheet: Path, known: list[str], asked: str | None, usual: Sequence[str]) -> str | None:
    if asked:
        if asked not in known:
            raise unknown(f"column of {sheet.name}", asked, known)
        return asked
    by_name = {_normalise(column): column for column in reversed(known)}
    return next((by_name[name] for name in usual if name in by_name), None)


def _asked_columns(sheet: Path, rows: pd.DataFrame, asked: str | Sequence[str]) -> tuple[str, ...]:
    known = [str(column) for column in rows.columns]
    several = [asked] if isinstance(asked, str) else list(asked)
    if isinstance(asked, str) and asked not in known:
        several = [name.strip() for name in asked.split(",")]
    return tuple(find_column(sheet, known, name, ()) or "" for name in several if name)


def find_label_columns(
    sheet: Path, rows: pd.DataFrame, asked: str | Sequence[str] | None, taken: set[str | None]
) -> tuple[str, ...]:
    """Return the columns asked for; else the column of labels by its usual names; else the columns of zeros and ones,
    where no other column can be the label."""
    if asked:
        return _asked_columns(sheet, rows, asked)
    known = [str(column) for column in rows.columns]
    free = {column: _normalise(column) for column in known if column not in taken}
    usual = [column for column, name in free.items() if name in _LABEL]
    usual = usual or [column for column, name in free.items() if name in _LABEL_IF_NO_OTHER]
    if len(usual) > 1:
        raise InputError(
            f"{sheet}: {listed(usual)} may all be the label. Choose one with label_column (--label-column)."
        )
    if usual:
        return (usual[0],)
    values = {column: {value.lower() for value in rows[column].unique()} for column in known if column not in taken}
    likely = [column for column, found in values.items() if 2 <= len(found - {""}) <= min(_MOST_CLASSES, len(rows) / 2)]
    describes = [column for column in values if _DESCRIBES & set(_normalise(column).split("_"))]
    binary = [column for column, found in values.items() if found - {""} and found <= {*_MARKS, ""}]
    marked = [column for column in binary if column not in describes]
    other = [
        c for c in values if (c in likely or c in binary) and c not in marked and (c in binary or c not in describes)
    ]
    uncertain = [column for column in other if values[column] <= {*_MARKS, "-1", "-1.0", ""} and column not in binary]
    if uncertain and len(marked) + len(uncertain) > 1:
        raise InputError(
            f"{sheet}: the columns {listed(uncertain)} contain -1 beside 0 and 1. Replace -1 (uncertain) by 0, 1 or an "
            "empty cell, or choose columns without it with label_column (--label-column NAME,NAME,…)."
        )
    if len(marked) < 2:
        suggestion = f" Columns with few values: {listed(likely)}." if likely else ""
        raise InputError(
            f"{sheet}: neither a label column nor several columns of zeros and ones found among {listed(known, 40)}."
            f"{suggestion} Choose with label_column (--label-column NAME, or NAME,NAME,…)."
        )
    if other:
        raise InputError(
            f"{sheet}: the labels may be the columns of zeros and ones ({listed(marked)}) or {listed(other)}. Choose "
            f"with label_column (--label-column '{other[0]}', or --label-column '{','.join(marked[:20])}')."
        )
    return tuple(marked)


def labels_of(sheet: Path, rows: pd.DataFrame, columns: tuple[str, ...], separator: str | None = None) -> Labels:
    """Read one column of class names, or several of zeros and ones."""
    if len(columns) > 1:
        return _marked_labels(sheet, rows, columns)
    cells: list[str] = rows[columns[0]].tolist()
    labelled = np.array([cell != "" for cell in cells], dtype=np.bool_)
    separator = separator or next((s for s in _SEPARATORS if any(s in cell for cell in cells)), None)
    pieces = ([cell] if separator is None else cell.split(separator) for cell in cells)
    split = [[name for piece in several if (name := piece.strip())] for several in pieces]
    _, classes = encode([name for names in split for name in names])
    index = {name: i for i, name in enumerate(classes)}
    if len(classes) > max(len(cells) / 2, _FEWEST_TEXTS):
        raise InputError(
            f"{sheet}: the column {columns[0]} has {len(classes):,} different values in {len(cells):,} rows "
            f"({listed(classes, 3)}): numbers or texts, not classes. Choose the labels with label_column "
            "(--label-column)."
        )
    if separator is None:
        return np.array([index.get(cell, -1) for cell in cells], dtype=np.int64), classes, labelled
    labels = np.zeros((len(cells), len(classes)), dtype=np.uint8)
    for row, names in enumerate(split):
        labels[row, [index[name] for name in names]] = 1
    return labels, classes, labelled


def _marked_labels(sheet: Path, rows: pd.DataFrame, columns: tuple[str, ...]) -> Labels:
    """Read columns of zeros and ones: single-label if every row has exactly one 1, else multi-label."""
    marks = np.zeros((len(rows), len(columns)), dtype=np.uint8)
    labelled = np.ones(len(rows), dtype=np.bool_)
    odd: list[str] = []
    for i, column in enumerate(columns):
        cells = rows[column].str.lower()
        labelled &= (cells != "").to_numpy()
        odd += [f"{column}={value}" for value in cells.unique() if value not in _MARKS and value]
        marks[:, i] = cells.map(_MARKS).fillna(0).to_numpy(dtype=np.uint8)
    if odd:
        raise InputError(f"{sheet}: label columns must contain 0 and 1, found {listed(odd)}.")
    if (marks[labelled].sum(axis=1) == 1).all():
        return marks.argmax(axis=1).astype(np.int64), columns, labelled
    return marks, columns, labelled


def splits_of(sheet: Path, column: pd.Series[str]) -> npt.NDArray[np.str_]:
    """Read a column of splits, under any of their usual names."""
    cells = column.str.lower()
    if odd := sorted({cell or "(empty)" for cell in column[~cells.isin(SPLIT_NAMES)]}):
        raise InputError(
            f"{sheet}: splits must be among {', '.join(SPLIT_NAMES)}; found {listed(odd)} in the column {column.name}. "
            "Rename them in the table, or choose another column with split_column (--split-column)."
        )
    return np.array([SPLIT_NAMES[cell] for cell in cells], dtype=np.str_)


def _normalise(column: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", column.lower()).strip("_")


def read_sheet(path: Path) -> pd.DataFrame:
    """Return all cells of a table file as stripped text, "" where there is no value."""
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"{path} has {path.stat().st_size:,} bytes, more than the limit of {MAX_BYTES:,} for a table.")
    if path.suffix.lower() in PARQUET_SUFFIXES:
        return _read_parquet(path)
    text = _decode(path, path.read_bytes())
    header, _, _ = text.partition("\n")
    refuse_many_columns(path, header.count(_delimiter(header)) + 1)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(header))
    try:
        columns = [cell.strip() for cell in next(reader, [])]
        _refuse_repeated_columns(path, columns)
        rows, ragged = [], []
        for row in reader:
            while len(row) > len(columns) and not row[-1].strip():
                row.pop()
            if len(row) == len(columns):
                rows.append([_clean(cell) for cell in row])
            elif any(cell.strip() for cell in row):
                ragged.append(f"line {reader.line_num} has {len(row)}")
    except csv.Error as error:
        raise InputError(f"{path} cannot be read as a table: {error} (line {reader.line_num}).") from error
    if ragged:
        raise InputError(f"{path}: the header has {len(columns)} columns, but {listed(ragged)}.")
    table = pd.DataFrame(rows, columns=pd.Index(columns, dtype=object), dtype=object)
    return table.loc[:, [name for name in columns if name]]  # drops an index column without a name


def _read_sample(path: Path) -> pd.DataFrame:
    """Return the first rows of a table file, without the checks of :func:`read_sheet`; empty if it is none."""
    try:
        if path.suffix.lower() in PARQUET_SUFFIXES:
            batch = next(import_pyarrow(path).parquet.ParquetFile(path).iter_batches(_SAMPLE), None)
            cells = {} if batch is None else batch.to_pydict()
            return pd.DataFrame({name: [as_text(cell) for cell in column] for name, column in cells.items()})
        with path.open("rb") as file:
            lines = _decode(path, b"".join(file.readline(2**20) for _ in range(_SAMPLE + 1))).splitlines()
        header, *rows = csv.reader(lines, delimiter=_delimiter(lines[0] if lines else ""))
    except (OSError, ValueError, csv.Error):  # also InputError, and an empty file
        return pd.DataFrame()
    whole = [[_clean(cell) for cell in row[: len(header)]] for row in rows if len(row) >= len(header)]
    sample = pd.DataFrame(whole, columns=pd.Index([cell.strip() for cell in header], dtype=object), dtype=object)
    return sample.loc[:, [bool(name) and list(sample.columns).count(name) == 1 for name in sample.columns]]


def read_columns(path: Path) -> list[str]:
    """Return the column names; none if the file is not a table, so that any file can be checked."""
    if path.suffix.lower() in PARQUET_SUFFIXES:
        pyarrow = import_pyarrow(path)
        try:
            return list(pyarrow.parquet.read_schema(path).names)
        except (pyarrow.ArrowException, OSError):
            return []
    try:
        with path.open("rb") as file:
            header = _decode(path, file.readline(2**20))
        return [cell.strip() for cell in next(csv.reader([header], delimiter=_delimiter(header)), [])]
    except (OSError, csv.Error, InputError):
        return []


def _decode(path: Path, content: bytes) -> str:
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    if encoding == "utf-16" and len(content) % 2:
        content += b"\0"  # of first lines, which were cut in the middle of the last line end
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}). Save it as CSV in UTF-8.") from error


def _delimiter(header: str) -> str:
    return max((",", "\t", ";"), key=header.count)


def _clean(cell: str) -> str:
    cell = cell.strip()
    return "" if cell.lower() in _NO_VALUE else cell


def refuse_many_columns(path: Path, count: int) -> None:
    if count > MAX_COLUMNS:
        raise InputError(f"{path} has {count:,} columns, more than the limit of {MAX_COLUMNS:,} for a table of labels.")


def _refuse_repeated_columns(path: Path, columns: list[str]) -> None:
    repeated = sorted(name for name, times in Counter(columns).items() if name and times > 1)
    if repeated:
        raise InputError(f"{path} has columns of the same name: {listed(repeated)}. Rename or remove one of each.")


def _read_parquet(path: Path) -> pd.DataFrame:
    pyarrow = import_pyarrow(path)
    try:
        schema = pyarrow.parquet.read_schema(path)
        refuse_many_columns(path, len(schema.names))
        refuse_bomb(path, schema.names)
        table = pd.read_parquet(path, engine="pyarrow")
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read as Parquet: {error}") from error
    columns = [str(name) for name in table.columns]
    _refuse_repeated_columns(path, columns)
    cells = {name: [as_text(cell) for cell in table.iloc[:, i].convert_dtypes()] for i, name in enumerate(columns)}
    return pd.DataFrame(cells, dtype=object)


def as_text(cell: object) -> str:
    """Return a cell as text; a list of labels is joined with "|", as in CSV."""
    if isinstance(cell, list | tuple | np.ndarray):
        return "|".join(as_text(value) for value in cell)
    return "" if cell is None or cell is pd.NA else _clean(str(cell))


_LAYOUT = "a CSV, TSV or Parquet table with a column for the image and one for the label, images beside it"
SOURCE = Source("manifest", _LAYOUT, find, read)
