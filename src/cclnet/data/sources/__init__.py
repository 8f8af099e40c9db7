"""Data sources: each layout in ``SOURCES`` is read to an :class:`~cclnet.data.table.ImageTable`."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cclnet.data.sources import folders, isic, manifest, medmnist, parquet_images, webdataset
from cclnet.data.sources.selection import check_options
from cclnet.data.sources.source import Source, SourceNotes, below, finish, image_files, plain_files, subfolders
from cclnet.data.table import ImageTable, listed
from cclnet.errors import InputError, unknown
from cclnet.settings import DataOptions, build_settings

if TYPE_CHECKING:
    from cclnet.data.synthetic import MultilabelSettings, SyntheticSettings

__all__ = ["SOURCES", "Source", "open_data"]

# To add a layout, write a module with a Source and name it here.
SOURCES: dict[str, Source] = {
    "isic": isic.ISIC,
    "ham10000": isic.HAM10000,
    "medmnist": medmnist.SOURCE,
    "webdataset": webdataset.SOURCE,
    "parquet-images": parquet_images.SOURCE,
    "folders": folders.SOURCE,
    "manifest": manifest.SOURCE,
}
# Layouts that many folders resemble: used only where no specific layout fits.
_GENERAL = ("folders", "manifest")
# What to say about a folder that has no known layout.
_DEEPEST, _WIDEST = 4, 20  # levels of folders, and folders of a level, that are searched for a data set
_PACKED = (".zip", ".gz", ".tgz", ".7z", ".rar")
_OTHER_TABLES = (".xlsx", ".xls", ".ods", ".json", ".jsonl", ".xml", ".txt", ".mat")
_VOLUMES = (".nii", ".nii.gz", ".mhd", ".mha", ".nrrd", ".npy", ".mat", ".svs", ".h5", ".hdf5")
_MASKS = re.compile("mask|segment|ground.?truth|annot|contour", re.IGNORECASE)


def open_data(path: str | Path, options: DataOptions | None = None, **named: Any) -> ImageTable:
    """Read the data set at ``path``, whichever of the known layouts it has.

    ``path`` is a folder, a table, a tar, Parquet or .npz file; ``medmnist:NAME`` to download one; or ``synthetic`` and
    ``synthetic-multilabel``, also with settings (``synthetic:overlap=much,seed=3``). The layout is detected;
    ``source`` (a name in :data:`SOURCES`) decides if several fit. Options are those of
    :class:`~cclnet.settings.DataOptions`, as an object or by name. Images without a label and labels without an image
    are excluded and reported in the table's ``problems``; ``strict`` refuses them.

    >>> len(open_data("synthetic:images=20,size=16"))
    20
    """
    if options is None:
        options = build_settings(DataOptions, {name: value for name, value in named.items() if value is not None})
    elif named:
        raise TypeError("open_data takes options as one object or by name, not both")
    kind, _, rest = str(path).partition(":")
    path = Path(path).expanduser()
    if not os.path.exists(path):  # noqa: PTH110 (Path.exists raises an error for names that are too long)
        if kind in ("synthetic", "synthetic-multilabel"):
            made = _synthetic(_synthetic_settings(kind, rest))
            return finish(made, SourceNotes(), options) if options.selects else made
        if kind == "medmnist":
            path = medmnist.download(rest)
    return _choose(path, options).read(path, options)


def check_data(data: str | Path, options: DataOptions) -> None:
    """Refuse what needs no look at the images, before others load what they need: data that does not exist, settings
    of a synthetic set, a table with too many columns, and options that name nothing."""
    path, (kind, _, rest) = Path(data).expanduser(), str(data).partition(":")
    if os.path.exists(path):  # noqa: PTH110
        is_table = path.suffix.lower() in manifest.SUFFIXES and path.is_file()
        if is_table and len(manifest.read_columns(path)) > manifest.MAX_COLUMNS:
            manifest.read_sheet(path)  # which refuses it, with the number
    elif kind in ("synthetic", "synthetic-multilabel"):
        _synthetic_settings(kind, rest)
    elif kind != "medmnist":
        raise _does_not_exist(path)
    if options.source and options.source not in SOURCES:
        raise unknown("source", options.source, SOURCES)
    check_options(options)


def _does_not_exist(path: Path) -> InputError:
    return InputError(f"{str(path)[:200]} does not exist. {_supported()}")


def _choose(path: Path, options: DataOptions) -> Source:
    if not os.path.exists(path):  # noqa: PTH110
        raise _does_not_exist(path)
    if options.source:
        if options.source not in SOURCES:
            raise unknown("source", options.source, SOURCES)
        return SOURCES[options.source]
    if options.class_level:
        return SOURCES["folders"]
    if options.describes_manifest:
        return SOURCES["parquet-images" if parquet_images.find(path) else "manifest"]
    found = {name: evidence for name, known in SOURCES.items() if (evidence := known.find(path))}
    fitting = {name: evidence for name, evidence in found.items() if name not in _GENERAL} or found
    if len(fitting) > 1:
        ways = "; ".join(
            f"{SOURCES[name].title} ({listed([e.name for e in evidence], 3)}): source={name}"
            for name, evidence in fitting.items()
        )
        raise InputError(
            f"{path} can be read in {len(fitting)} ways: {ways}. Choose one with source (--source), or give the file "
            "or folder of one of them."
        )
    if not fitting:
        raise InputError(_nothing_fits(path))
    return SOURCES[next(iter(fitting))]


def _nothing_fits(path: Path) -> str:
    """Return why a path was not recognised, and what to do."""
    if path.is_file():
        if path.suffix.lower() in _PACKED:
            return f"{path} is not a supported table or .npz file, but an archive: unpack it, and give the folder."
        return f"{path} is not a supported table or .npz file. {_supported()}"
    if not any(path.iterdir()):
        return f"{path} is an empty folder. {_supported()}"
    if inner := _data_set_inside(path):
        folder, fitting = inner
        if fitting == [manifest.SOURCE]:
            table = manifest.find(folder)[0]
            return (
                f"{path} has its table in another folder. Give the table {table}, and the folder of the images with "
                f"image_folder (--image-folder {path})."
            )
        titles = " or ".join(known.title for known in fitting)
        return f"{path} is not a data set, but {folder} looks like one ({titles}): give that path."
    others = plain_files(path, _OTHER_TABLES)
    unread = f" {listed([file.name for file in others], 4)}: save tables as CSV to use them." if others else ""
    containers = folders.container_folders(path)
    names = f"{listed([folder.name for folder in containers], 6)} are names of splits, formats, containers or patients"
    if len(containers) > 1:
        return (
            f"{path}: {names}, not of classes, and no table beside them names the images. If a table does, choose its "
            "columns (--image-column, --label-column); if these folders are the classes, choose --source folders."
            f"{unread}"
        )
    tables = plain_files(path, manifest.SUFFIXES)
    if broken := [table.name for table in tables if not manifest.read_columns(table)]:
        return f"{path}: {listed(broken)} cannot be read as a table: empty, or not UTF-8. Save it as CSV in UTF-8."
    if tables:
        columns = "; ".join(f"{table.name}: {listed(manifest.read_columns(table))}" for table in tables[:3])
        return (
            f"{path}: no column of a table is recognised as the names of the images ({columns}). Choose the columns "
            "(--image-column, --label-column), and --image-folder if the images are elsewhere."
        )
    if classes := folders.class_names(path):
        beside = f" ({names}; if they are classes, choose --source folders)" if containers else ""
        return (
            f"{path} has one class folder only ({', '.join(classes)}). A classifier needs at least two classes: "
            f"folders beside it{beside}, or a table (image,label) of the images.{unread}"
        )
    if files := image_files(path, follow_links=True, first_only=True):
        return (
            f"{path} contains images (such as {below(path, files[0])}) but no labels: no class folders, and no CSV, "
            f"TSV or Parquet table that names them.{unread}"
        )
    if volumes := next((name for _, _, files in os.walk(path) for name in files if name.endswith(_VOLUMES)), ""):
        return f"{path} contains {volumes}, and cclnet reads 2D images: save the slices as PNG or DICOM."
    if packed := plain_files(path, _PACKED):
        return (
            f"{path} contains no images, but archives ({listed([file.name for file in packed], 4)}): unpack them first."
        )
    return f"{path} contains neither images nor a table of images. {_supported()}"


def _data_set_inside(path: Path) -> tuple[Path, list[Source]] | None:
    """Return a folder below a path, as high as possible, that has a known layout, with the sources that fit."""
    level = [path]
    for _ in range(_DEEPEST):
        level = [inner for folder in level for inner in subfolders(folder) if not _MASKS.search(inner.name)][:_WIDEST]
        for folder in level:
            if fitting := [known for known in SOURCES.values() if known.find(folder)]:
                return folder, fitting
    return None


def _supported() -> str:
    layouts = [f"{source.title}: {source.layout}" for source in SOURCES.values()]
    layouts.append("synthetic, synthetic-multilabel: small generated sets that need no files")
    return "\n  - ".join(["Supported layouts:", *layouts])


def _synthetic_settings(kind: str, settings: str) -> SyntheticSettings | MultilabelSettings:
    """Return the settings of a synthetic set from text such as ``overlap=much,seed=3``."""
    from cclnet.data.synthetic import MultilabelSettings, SyntheticSettings

    multilabel = kind == "synthetic-multilabel"
    known = {field.name: field.default for field in fields(MultilabelSettings if multilabel else SyntheticSettings)}
    chosen: dict[str, Any] = {}
    for assignment in filter(None, settings.split(",")):
        name, _, text = assignment.partition("=")
        if name not in known:
            raise unknown("setting of the synthetic set", name, known)
        chosen[name] = _value(text)
        if type(known[name]) is int and type(chosen[name]) is not int:
            raise InputError(f"{kind}:{assignment}: {name} must be an integer, such as {name}={known[name]}.")
    return MultilabelSettings(**chosen) if multilabel else SyntheticSettings(**chosen)


def _synthetic(settings: SyntheticSettings | MultilabelSettings) -> ImageTable:
    from cclnet.data.synthetic import SyntheticSettings, synthetic, synthetic_multilabel

    return synthetic(settings) if isinstance(settings, SyntheticSettings) else synthetic_multilabel(settings)


def _value(text: str) -> bool | int | float | str:
    """Parse a value as bool, int, float or str.

    >>> [_value(text) for text in ("3", "0.1", "true", "much")]
    [3, 0.1, True, 'much']
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
