"""Predict thousands of images: decoded on all cores while the network runs; what cannot be read is listed."""

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
import numpy.typing as npt
import pandas as pd
from PIL import Image

from cclnet.data.image_io import SUFFIXES, UnreadableImage
from cclnet.data.parallel import available_cores, counting_images, in_order
from cclnet.data.sources import manifest, open_data
from cclnet.data.sources.image_files import below, image_files, locate
from cclnet.data.table import ImageTable
from cclnet.deploy.engines import prepare, torch_device
from cclnet.deploy.explain import overlay
from cclnet.deploy.model import FILES, Model, Prediction, load
from cclnet.errors import InputError
from cclnet.files import make_folder, write_whole
from cclnet.runs.model import ModelDescription
from cclnet.settings import DataOptions

# The images to predict: files, folders, tables that name them, or any data set that comes as an array.


NAMED = ("medmnist", "synthetic", "synthetic-multilabel")  # data sets that open_data knows by name


@dataclass(frozen=True)
class Inputs:
    """N images by name.

    Attributes:
        images: a path for each, or one uint8 array [N, H, W(, 1 or 3)].
        problems: what is wrong with those that need not be tried, by row.
        along: further columns for the output, each of length N.
    """

    names: Sequence[str]
    images: Sequence[Path] | npt.NDArray[np.uint8]
    problems: dict[int, str] = field(default_factory=dict)
    along: dict[str, list[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)


def gather(places: Sequence[str | Path], image_column: str | None = None, image_folder: Path | None = None) -> Inputs:
    """What ``places`` name: image files and folders of them, in any number; or one table (CSV, TSV, Parquet) with a
    column of image names, which start from ``image_folder`` or from where the table lies; or one data set without files
    (.npz, ``medmnist:NAME``, ``synthetic``, ``synthetic-multilabel``)."""
    if not places:
        raise InputError("no images: give image files, a folder of them, or a table that names them.")
    if len(places) == 1:
        place = Path(places[0]).expanduser()
        kind = str(places[0]).partition(":")[0]
        if (place.suffix.lower() == ".npz" and place.exists()) or (kind in NAMED and not place.exists()):
            return _of_data_set(open_data(places[0]))
        if place.is_file() and place.suffix.lower() in manifest.SUFFIXES:
            return _of_table(place, image_column, image_folder or place.parent)
        if place.is_dir():
            files = image_files(place, follow_links=True)
            if not files:
                raise InputError(f"{place} holds no image files ({', '.join(sorted(SUFFIXES))}).")
            return Inputs([_written(below(place, file)) for file in files], [Path(file) for file in files])
    return _of_files(places)


def _of_files(places: Sequence[str | Path]) -> Inputs:
    files: dict[Path, None] = {}  # in order, each once
    odd: list[str] = []
    for given in places:
        place = Path(given).expanduser()
        if place.is_dir():
            files |= dict.fromkeys(Path(file) for file in image_files(place, follow_links=True))
        elif place.suffix.lower() in (*manifest.SUFFIXES, ".npz") or not (
            place.exists() or place.suffix.lower() in SUFFIXES
        ):
            odd.append(str(given))
        else:
            files[place] = None  # one that is missing or no image at all is named in the output
    if odd:
        raise InputError(
            f"neither an image nor a folder: {', '.join(odd[:8])}. A table, an .npz file or a named data set is given "
            "alone; anything else must be there."
        )
    if not files:
        raise InputError(f"no image files in {', '.join(str(place) for place in places[:8])}.")
    return Inputs([_written(str(file)) for file in files], list(files))


def _written(name: str) -> str:
    """A name as it can be written down: some old archives hold names that are no text in any encoding."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _of_table(sheet: Path, asked: str | None, folder: Path) -> Inputs:
    rows = manifest.read_sheet(sheet)
    column = manifest.image_column(sheet, rows, asked)
    names: list[str] = rows[column].tolist()
    problems, images = {}, []
    for row, (name, found) in enumerate(zip(names, locate(folder, names, follow_links=True), strict=True)):
        images.append(Path(found[0]) if len(found) == 1 else Path(name))
        if not name:
            problems[row] = f"row {row + 2} of {sheet.name} names no image"
        elif not found:
            problems[row] = f"no such file in {folder} or below"
        elif len(found) > 1:
            problems[row] = f"{len(found)} different files have this name: {', '.join(found[:3])}"
    if not names:
        raise InputError(f"{sheet} names no images: it has a header only.")
    return Inputs(names, images, problems, _along(sheet, rows, column))


def _along(sheet: Path, rows: pd.DataFrame, image: str) -> dict[str, list[str]]:
    """The labels and groups of a table, so that the predictions can be judged. They are found as training finds them;
    which column the labels are in may be open here, for nothing is learned from them."""
    known = [str(column) for column in rows.columns]
    group, part = (manifest.find_column(sheet, known, None, usual) for usual in (manifest.GROUP, manifest.SPLIT))
    along: dict[str, list[str]] = {}
    with contextlib.suppress(InputError):
        asked = "label" if "label" in known else None  # whatever else may be one
        found = manifest.find_label_columns(sheet, rows, asked, {image, group, part})
        columns = manifest.Columns(image, found, group, part)
        labels, classes, labelled = manifest.labels_of(sheet, rows, columns, DataOptions())
        if labelled.any():
            texts = _label_texts(labels, classes)
            along["label"] = [text if told else "" for text, told in zip(texts, labelled, strict=True)]
    if group is not None:
        along["group"] = rows[group].tolist()
    return along


def _of_data_set(table: ImageTable) -> Inputs:
    along = {"label": _label_texts(table.labels, table.classes)}
    if table.groups is not None:
        along["group"] = table.groups.tolist()
    return Inputs(table.names, table.images, along=along)


def _label_texts(labels: npt.NDArray[np.integer[Any]], classes: Sequence[str]) -> list[str]:
    """Labels as predictions.csv has them, several of an image with a bar between them."""
    names = np.array(classes, dtype=np.str_)
    return ["|".join(names[row == 1]) for row in labels] if labels.ndim == 2 else names[labels].tolist()


Pixels = npt.NDArray[np.uint8]


# Converting a network takes about as long as ONNX Runtime saves on this many images on a CPU.
WORTH_CONVERTING = 500
# Importing torch takes about as long as its faster resizing saves on this many images, where ONNX Runtime needs it not.
WORTH_TORCH = 300


def can_convert() -> bool:
    """Whether all is installed that turns a run into an ONNX model and runs it."""
    return all(find_spec(name) is not None for name in ("onnx", "onnxscript", "onnxruntime"))


def open_model(
    path: str | Path, images: int, device: str = "auto", engine: str = "auto", explain: bool = False
) -> Model:
    """The model in the engine that will be done first: on a CPU many images are worth converting a run to ONNX for,
    where what that takes is installed, and where the converted model can ``explain`` if that is asked for."""
    folder = Path(path).expanduser()
    worth_it = engine == "auto" and images >= WORTH_CONVERTING and (folder / FILES["torch"]).is_file()
    if worth_it and can_convert() and torch_device(device) == "cpu":
        converted = load(path, device, "onnx")
        if not explain or converted.has_maps:
            return converted
    return load(path, device, engine)


@dataclass(frozen=True)
class Chunk:
    """Prepared images of a few rows: pixels [n, h, w, 3] of those that could be read, and why the others could not."""

    rows: list[int]
    pixels: Pixels
    problems: dict[int, str]


def prepared(description: ModelDescription, inputs: Inputs, batch_size: int, workers: int) -> Iterator[Chunk]:
    """All images in batches, prepared by ``workers`` processes while the batches before them are used."""
    short_side, crop, images = description.short_side, description.crop, inputs.images

    def prepare_rows(rows: list[int]) -> Chunk:
        kept, crops, problems = [], [], {}
        for row in rows:
            try:
                crops.append(prepare(images[row], short_side, crop))
            except UnreadableImage as error:
                problems[row] = error.reason
            else:
                kept.append(row)
        pixels = np.stack(crops) if crops else np.zeros((0, *crop, 3), np.uint8)
        return Chunk(kept, pixels, problems)

    to_do = [row for row in range(len(inputs)) if row not in inputs.problems]
    chunks = [to_do[start : start + batch_size] for start in range(0, len(to_do), batch_size)]
    if len(to_do) >= WORTH_TORCH:
        import torch  # noqa: F401
    try:
        yield from in_order(prepare_rows, chunks, workers, prefetch=2 * workers)
    except BrokenProcessPool as error:
        raise InputError(
            "a process that decodes images was killed, most likely because the memory was full. Run it again with "
            "fewer workers (--workers)."
        ) from error


@dataclass
class Predicted:
    """The predictions of some inputs: one a row, None where the image could not be read, and then why."""

    inputs: Inputs
    predictions: list[Prediction | None]
    problems: dict[int, str]
    overlays: dict[int, str] = field(default_factory=dict)

    @property
    def abstained(self) -> int:
        return sum(1 for p in self.predictions if p is not None and p.abstain)


def predict(
    model: Model,
    inputs: Inputs,
    threshold: float | None = None,
    explain: Path | None = None,
    batch_size: int = 16,
    workers: int | None = None,
    progress: bool = True,
) -> Predicted:
    """Predict all inputs. Images that cannot be read are passed over and named with the reason.

    Args:
        threshold: abstain where the model is less confident than this.
        explain: a folder for an overlay (PNG) and the map of the most probable class (.npy, [h, w] in 0..1) an image.
        batch_size: images that go through the network at once.
        workers: processes that decode. Default: one for each core.
    """
    found = Predicted(inputs, [None] * len(inputs), dict(inputs.problems))
    folder = None if explain is None else make_folder(explain)
    with counting_images("Predicting", len(inputs), len(inputs.problems), progress) as count:
        for chunk in prepared(model.description, inputs, batch_size, workers or available_cores()):
            found.problems |= chunk.problems
            if len(chunk.rows):
                said = model.describe(*model.run(chunk.pixels, explain is not None), threshold)
                for row, pixels, prediction in zip(chunk.rows, chunk.pixels, said, strict=True):
                    if folder is not None:
                        found.overlays[row] = _write_heat(folder, row, inputs.names[row], pixels, prediction)
                    found.predictions[row] = prediction
            count(len(chunk.rows) + len(chunk.problems))
    return found


def _write_heat(folder: Path, row: int, name: str, pixels: Pixels, prediction: Prediction) -> str:
    """Write overlay and map; names begin with the row, so that two images of one name do not meet."""
    heat = prediction.heat
    assert heat is not None
    plain = re.sub(r"[^\w.-]+", "_", Path(name).stem)[:80]
    stem = f"{row + 1:06d}_{plain}"
    write_whole(folder / f"{stem}.png", lambda file: Image.fromarray(overlay(pixels, heat)).save(file, "PNG"))
    write_whole(folder / f"{stem}.npy", lambda file: np.save(file, heat, allow_pickle=False))
    return f"{stem}.png"


def write_csv(path: Path, model: Model, found: Predicted) -> None:
    """One row an image, in the order given: ``image``; ``label`` and ``group`` where a table told them; ``prediction``,
    ``confidence``, ``abstain`` (where asked for), ``top`` and ``similar`` (name=share, strongest first), ``overlay``
    (where asked for), ``problem`` (why it could not be read), then ``p_<class>`` for each class."""
    said = found.predictions
    columns: dict[str, Any] = {"image": list(found.inputs.names), **found.inputs.along}
    columns["prediction"] = [p.label if p else "" for p in said]
    columns["confidence"] = [p.confidence if p else np.nan for p in said]
    if any(p is not None and p.abstain is not None for p in said):
        columns["abstain"] = ["" if p is None else "yes" if p.abstain else "no" for p in said]
    columns["top"] = [_listed(p.top()) if p else "" for p in said]
    columns["similar"] = [_listed(p.similar) if p else "" for p in said]
    if found.overlays:
        columns["overlay"] = [found.overlays.get(row, "") for row in range(len(said))]
    columns["problem"] = [found.problems.get(row, "") for row in range(len(said))]
    unknown = np.full(len(model.classes), np.nan)
    probabilities = np.stack([p.probabilities if p else unknown for p in said])
    columns |= {f"p_{name}": probabilities[:, k] for k, name in enumerate(model.classes)}
    write_whole(path, pd.DataFrame(columns).to_csv(index=False, float_format="%.9g", lineterminator="\n"))


def _listed(shares: Sequence[tuple[str, float]]) -> str:
    return "|".join(f"{name}={share:.4f}" for name, share in shares)
