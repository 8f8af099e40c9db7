"""Prediction of many images: they are decoded on all cores while the network runs; unreadable ones are listed."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from cclnet.data.image_io import SUFFIXES, UnreadableImage
from cclnet.data.parallel import available_cores, counting_images, in_order, limited
from cclnet.data.sources import manifest, open_data
from cclnet.data.sources.source import SourceNotes, below, image_files, locate
from cclnet.deploy.engines import Pixels, prepare, torch_device
from cclnet.deploy.predictor import FILES, Model, Prediction, load, overlay
from cclnet.errors import InputError
from cclnet.files import make_folder, write_whole
from cclnet.runs.model import ModelDescription
from cclnet.runs.predictions import label_texts
from cclnet.runs.spreadsheet import mark_texts
from cclnet.settings import DataOptions

NAMED = ("medmnist", "synthetic", "synthetic-multilabel")  # data sets that open_data knows by name
# Number of images on a CPU from which ONNX Runtime saves more time than the conversion of the network takes.
WORTH_CONVERTING = 500
MAX_BATCH_PIXELS = 2**22  # 16 crops of 512 x 512: crops larger than that get smaller batches, to bound the memory
# Number of images from which the faster resizing of torch saves more time than importing it takes.
WORTH_TORCH = 300


@dataclass(frozen=True)
class Inputs:
    """N images to predict."""

    names: Sequence[str]
    images: Sequence[Path] | Pixels  # N paths, or one uint8 array [N, H, W(, 1 or 3)]
    problems: dict[int, str] = field(default_factory=dict)  # by row, for images that cannot be read
    columns: dict[str, list[str]] = field(default_factory=dict)  # further columns of the output, each of length N

    def __len__(self) -> int:
        return len(self.names)


def gather(
    places: Sequence[str | Path], image_column: str | None = None, image_folder: Path | None = None,
    follow_links: bool = False,
) -> Inputs:  # fmt: skip
    """The images in ``places``: any number of image files and folders; or one table (CSV, TSV, Parquet) with a column
    of image names, relative to ``image_folder`` or to the folder of the table; or one data set without files (.npz,
    ``medmnist:NAME``, ``synthetic``, ``synthetic-multilabel``). As in training, links that lead out of a folder are
    refused unless ``follow_links``."""
    if not places:
        raise InputError("no images: give image files, a folder of them, or a table that names them.")
    if len(places) == 1:
        place = Path(places[0]).expanduser()
        kind = str(places[0]).partition(":")[0]
        if (place.suffix.lower() == ".npz" and place.exists()) or (kind in NAMED and not place.exists()):
            table = open_data(places[0])
            columns = {"label": table.label_names()}
            columns |= {} if table.groups is None else {"group": table.groups.tolist()}
            return Inputs(table.names, table.images, columns=columns)
        if place.is_file() and place.suffix.lower() in manifest.SUFFIXES:
            return _of_table(place, image_column, image_folder or place.parent, follow_links)
        if place.is_dir():
            files = image_files(place, follow_links=follow_links)
            if not files:
                raise InputError(f"{place} holds no image files ({', '.join(sorted(SUFFIXES))}).")
            return Inputs([_printable(below(place, file)) for file in files], [Path(file) for file in files])
    return _of_files(places, follow_links)


def _of_files(places: Sequence[str | Path], follow_links: bool) -> Inputs:
    files: dict[Path, None] = {}  # in order, each once
    odd: list[str] = []
    for given in places:
        place = Path(given).expanduser()
        if place.is_dir():
            files |= dict.fromkeys(Path(file) for file in image_files(place, follow_links=follow_links))
        elif place.suffix.lower() in (*manifest.SUFFIXES, ".npz") or not (
            place.exists() or place.suffix.lower() in SUFFIXES
        ):
            odd.append(str(given))
        else:
            files[place] = None  # a missing or broken file is listed in the output
    if odd:
        raise InputError(
            f"neither an image nor a folder: {', '.join(odd[:8])}. Give a table, an .npz file or a named data set "
            "alone; files and folders must exist."
        )
    if not files:
        raise InputError(f"no image files in {', '.join(str(place) for place in places[:8])}.")
    return Inputs([_printable(str(file)) for file in files], list(files))


def _printable(name: str) -> str:
    """A name that can be written as UTF-8: names in old archives may not be valid text."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _of_table(sheet: Path, asked: str | None, folder: Path, follow_links: bool) -> Inputs:
    rows = manifest.read_sheet(sheet)
    column = manifest.image_column(sheet, rows, asked, folder)
    names: list[str] = rows[column].tolist()
    problems, images = {}, []
    for row, (name, found) in enumerate(zip(names, locate(folder, names, follow_links=follow_links), strict=True)):
        images.append(Path(found[0]) if len(found) == 1 else Path(name))
        if not name:
            problems[row] = f"row {row + 2} of {sheet.name} names no image"
        elif not found:
            problems[row] = f"no such file in {folder} or below"
        elif len(found) > 1:
            problems[row] = f"{len(found)} different files have this name: {', '.join(found[:3])}"
    if not names:
        raise InputError(f"{sheet} names no images: it has a header only.")
    return Inputs(names, images, problems, _label_columns(sheet, rows, column))


def _label_columns(sheet: Path, rows: pd.DataFrame, image: str) -> dict[str, list[str]]:
    """The labels and groups of a table, for evaluation of the predictions. They are found as in training; a table whose
    label column is ambiguous has none here, because prediction does not need labels."""
    known = [str(column) for column in rows.columns if column != image]
    group, split = manifest.find_group_and_split(sheet, rows, known, DataOptions(), SourceNotes())
    columns: dict[str, list[str]] = {}
    with contextlib.suppress(InputError):
        asked = "label" if "label" in known else None  # it wins over other candidates
        found = manifest.find_label_columns(sheet, rows, asked, {image, group, split})
        labels, classes, labelled = manifest.labels_of(sheet, rows, found)
        if labelled.any():
            texts = label_texts(labels, classes)
            columns["label"] = [text if known else "" for text, known in zip(texts, labelled, strict=True)]
    if group is not None:
        columns["group"] = rows[group].tolist()
    return columns


def can_convert() -> bool:
    """Whether the packages are installed that convert a run to ONNX and run it."""
    return all(find_spec(name) is not None for name in ("onnx", "onnxscript", "onnxruntime"))


def open_model(
    path: str | Path, images: int, device: str = "auto", engine: str = "auto", explain: bool = False,
    **options: Any,
) -> Model:  # fmt: skip
    """The model in the fastest engine: on a CPU, a run is converted to ONNX for many images, if the packages for it are
    installed and, with ``explain``, if the converted model has maps. ``options`` as for ``load``."""
    folder = Path(path).expanduser()
    worth_it = engine == "auto" and images >= WORTH_CONVERTING and (folder / FILES["torch"]).is_file()
    if worth_it and can_convert() and torch_device(device) == "cpu":
        converted = load(path, device, "onnx", **options)
        if not explain or converted.has_maps:
            return converted
    return load(path, device, engine, **options)


Chunk = tuple[list[int], Pixels, dict[int, str]]  # rows, their images [n, h, w, 3], why further rows are unreadable


def prepared(description: ModelDescription, inputs: Inputs, batch_size: int, workers: int) -> Iterator[Chunk]:
    """All images in batches, prepared by ``workers`` processes ahead of their use."""
    short_side, crop, images = description.short_side, description.crop, inputs.images

    def prepare_rows(rows: list[int]) -> Chunk:
        kept, crops, problems = [], [], {}
        for row in rows:
            try:
                with limited(row):
                    crops.append(prepare(images[row], short_side, crop))
            except UnreadableImage as error:
                problems[row] = error.reason
            else:
                kept.append(row)
        return kept, np.stack(crops) if crops else none, problems

    none = np.zeros((0, *crop, 3), np.uint8)
    if crop[0] * crop[1] > 512 * 512:
        batch_size = max(1, min(batch_size, MAX_BATCH_PIXELS // (crop[0] * crop[1])))
    to_do = [row for row in range(len(inputs)) if row not in inputs.problems]
    chunks = [to_do[start : start + batch_size] for start in range(0, len(to_do), batch_size)]
    if len(to_do) >= WORTH_TORCH:
        import torch  # noqa: F401
    try:
        yield from in_order(prepare_rows, chunks, workers, 2 * workers, lambda row, reason: ([], none, {row: reason}))
    except BrokenProcessPool as error:
        raise InputError(
            "a process that decodes images was killed, most likely because the memory was full. Try again with fewer "
            "workers (--workers)."
        ) from error


@dataclass
class Predicted:
    """The predictions of inputs: one per row, None where the image could not be read; ``problems`` says why."""

    inputs: Inputs
    predictions: list[Prediction | None]
    problems: dict[int, str]
    overlays: dict[int, str] = field(default_factory=dict)


def predict(
    model: Model,
    inputs: Inputs,
    threshold: float | None = None,
    explain: Path | None = None,
    batch_size: int = 16,
    workers: int | None = None,
    progress: bool = True,
    sets: str | None = None,
) -> Predicted:
    """Predict all inputs. Unreadable images are skipped and listed with the reason.

    ``explain`` is a folder for overlays (PNG) and heat maps of the most probable classes (.npy, [h, w] in 0..1).
    ``threshold`` and ``sets`` as for :meth:`Model.predict`.
    """
    found = Predicted(inputs, [None] * len(inputs), dict(inputs.problems))
    folder = None if explain is None else make_folder(explain)
    with counting_images("Predicting", len(inputs), len(inputs.problems), progress) as count:
        for rows, crops, problems in prepared(model.description, inputs, batch_size, workers or available_cores()):
            found.problems |= problems
            if rows:
                predictions = model.describe(*model.run_scored(crops, explain is not None), threshold, sets)
                for row, pixels, prediction in zip(rows, crops, predictions, strict=True):
                    if folder is not None:
                        found.overlays[row] = _write_heat(folder, row, inputs.names[row], pixels, prediction)
                    found.predictions[row] = prediction
            count(len(rows) + len(problems))
    return found


def _write_heat(folder: Path, row: int, name: str, pixels: Pixels, prediction: Prediction) -> str:
    """Write overlay and heat map; their names begin with the row, because names of images may repeat."""
    heat = prediction.heat
    assert heat is not None
    plain = re.sub(r"[^\w.-]+", "_", Path(name).stem)[:80]
    stem = f"{row + 1:06d}_{plain}"
    write_whole(folder / f"{stem}.png", lambda file: Image.fromarray(overlay(pixels, heat)).save(file, "PNG"))
    write_whole(folder / f"{stem}.npy", lambda file: np.save(file, heat, allow_pickle=False))
    return f"{stem}.png"


def write_csv(path: Path, model: Model, found: Predicted) -> None:
    """Write one row per image in the given order, with the columns that docs/deploy.md lists. Texts that a
    spreadsheet would run as a formula are marked."""
    predictions = found.predictions
    columns: dict[str, Any] = {"image": list(found.inputs.names), **found.inputs.columns}
    columns["prediction"] = [p.label if p else "" for p in predictions]
    columns["rule"] = [p.rule if p else "" for p in predictions]
    columns["confidence"] = [p.confidence if p else np.nan for p in predictions]
    if any(p is not None and p.abstain is not None for p in predictions):
        columns["score"] = [p.score if p else np.nan for p in predictions]
        columns["abstain"] = ["" if p is None else "yes" if p.abstain else "no" for p in predictions]
    if any(p is not None and p.ood is not None for p in predictions):
        columns["ood"] = [p.ood if p else np.nan for p in predictions]
    if any(p is not None and p.refused is not None for p in predictions):
        columns["refused"] = ["" if p is None else "yes" if p.refused else "no" for p in predictions]
    if any(p is not None and p.set is not None for p in predictions):
        columns["set"] = ["|".join(p.set or ()) if p else "" for p in predictions]
    columns["top"] = [_listed(p.top()) if p else "" for p in predictions]
    columns["similar"] = [_listed(p.similar) if p else "" for p in predictions]
    if found.overlays:
        columns["overlay"] = [found.overlays.get(row, "") for row in range(len(predictions))]
    columns["problem"] = [found.problems.get(row, "") for row in range(len(predictions))]
    unknown = np.full(len(model.classes), np.nan)
    probabilities = np.stack([p.probabilities if p else unknown for p in predictions])
    numbers = ("confidence", "score", "ood")
    columns = {name: cells if name in numbers else mark_texts(cells) for name, cells in columns.items()}
    columns |= {f"p_{name}": probabilities[:, k] for k, name in enumerate(model.classes)}
    write_whole(path, pd.DataFrame(columns).to_csv(index=False, float_format="%.9g", lineterminator="\n"))


def _listed(shares: Sequence[tuple[str, float]]) -> str:
    return "|".join(f"{name}={share:.4f}" for name, share in shares)
