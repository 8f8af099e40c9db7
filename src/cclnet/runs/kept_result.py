"""What a sweep keeps of a finished run: NAME.json with the files beside it.

``NAME.predictions.npy.xz`` has the probabilities as 16-bit codes (see :func:`encode`), uint16 [K, N], class after
class; the images they belong to are in ``image_table``, a file that all runs on the same images share. Older results
have the same numbers as text, in ``NAME.predictions.csv.bz2``. ``NAME.soft_labels.json.bz2`` has the soft labels of
some epochs, ``{"epochs": [1, 2, ...], "matrices": [[[...]], ...]}``, for methods that learn them. The scores in
NAME.json are those of the kept predictions, so that anybody can compute them again from these files.
"""

from __future__ import annotations

import io
import json
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cclnet.errors import InputError
from cclnet.files import read_json, read_json_bz2, write_json_bz2, write_whole
from cclnet.runs.model import ModelDescription, model_from_json
from cclnet.runs.predictions import Floats, Predictions, join_images, read_predictions, write_image_table
from cclnet.runs.provenance import Commit
from cclnet.schema import from_plain, rule, to_plain

Codes = npt.NDArray[np.uint16]
STEPS = 10_000  # probabilities are kept to four decimals
HALF_STEP = 0.5 / STEPS  # smaller ones are kept to one significant digit: the log-likelihood of 0 is infinite
DIGITS = np.array([digit / 10**place for place in range(5, 10) for digit in range(1, 10)])  # 1e-5 ... 9e-9
LEVELS: Floats = np.concatenate([np.arange(STEPS + 1) / STEPS, DIGITS, 1 - DIGITS])  # the probability of each code
MAX_VALUES = 2**27  # images times classes that are read
# Half of the bytes are high bytes of little variety: the position in the pair predicts them.
COMPRESSION = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 2, "lp": 1, "pb": 0}]


@dataclass(frozen=True)
class KeptResult:
    """The content of NAME.json. ``old_name`` is a key before version 0.2."""

    path: Path  # of NAME.json; not in the file
    # What distinguishes the run from the others of its experiment: backbone, method, seed, ...
    keys: Mapping[str, Any] = field(metadata=rule(key="cell"))
    name: str
    settings: Mapping[str, Any]  # all of them, nested; of paths the last name only
    scores: Mapping[str, Any]  # {"value", "low", "high"} by metric
    classes: list[str]
    class_counts: list[int]  # of the training split
    split: Mapping[str, Any] = field(metadata=rule(old_name="part"))  # as in scores.json, like intervals and leak
    intervals: Mapping[str, Any] = field(default_factory=dict)
    leak: Mapping[str, Any] | None = None
    multilabel: bool = False
    temperature: float | None = None
    # [K][K], row k the soft label of class k; None for methods that learn none.
    soft_labels: list[list[float]] | None = field(default=None, metadata=rule(old_name="correlation"))
    final_softness: float | None = None
    inverse_frequency_agreement: float | None = field(default=None, metadata=rule(old_name="rarity_agreement"))
    softness: list[float] | None = None  # after each epoch
    freeze_epoch: int | None = None  # None: never
    converged_epoch: int | None = None  # the last drop of softness before freezing
    epochs: int = 0
    images: int = 0  # of the training split
    seconds: float = 0.0  # of training
    images_per_second: float = 0.0  # median over epochs
    device: str = ""
    precision: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: Commit | None = None
    settings_hash: str = ""
    fingerprint: str = ""
    image_table: str = "images.csv.bz2"  # name of the file beside NAME.json with the predicted images

    def value(self, score: str) -> float | None:
        return self.scores[score]["value"]

    def to_json(self) -> dict[str, Any]:
        """The content of NAME.json."""
        content = to_plain(self)
        del content["path"]
        return {"format": 1, **content}

    @property
    def predictions(self) -> Path:
        return predictions_path(self.path)

    def read_predictions(self) -> Predictions:
        """The predictions as they were kept, with their images."""
        image_table = self.path.with_name(Path(self.image_table).name)  # never in another folder
        if missing := [file.name for file in (self.predictions, image_table) if not file.exists()]:
            raise InputError(f"{self.path} needs {' and '.join(missing)} beside it. Copy all files of the result.")
        return read_kept_predictions(self.path, image_table, self.classes, self.multilabel)

    @property
    def soft_label_history(self) -> dict[str, Any] | None:
        """The soft labels of some epochs; None where none were learned."""
        paths = [soft_label_history_path(self.path), self.path.with_name(f"{self.path.stem}.course.json.bz2")]
        return next((read_json_bz2(path) for path in paths if path.exists()), None)

    @property
    def model(self) -> ModelDescription:
        """The description of the model, as far as it was kept."""
        names = ("backbone", "short_side", "mean", "std", "method", "method_settings")
        content = {name: self.settings.get(name) for name in names}
        content |= {"format": 2, "classes": self.classes, "multilabel": self.multilabel}
        content |= {"class_counts": self.class_counts, "trained": {"seed": self.settings.get("seed")}}
        content["crop"] = [(self.settings.get("augment") or {}).get("crop")] * 2
        return model_from_json(content, self.path)


def predictions_path(result: Path) -> Path:
    """The file with the predictions: the old one where only that exists."""
    new, old = (result.with_name(f"{result.stem}.predictions.{ending}") for ending in ("npy.xz", "csv.bz2"))
    return old if old.exists() and not new.exists() else new


def encode(probabilities: Floats, multilabel: bool = False) -> Codes:
    """The codes of probabilities: of the nearest multiple of 0.0001; below 0.00005 (for several labels also above
    0.99995) of the nearest d · 10^−e (1 − d · 10^−e) with one digit d and e ≤ 9.

    >>> LEVELS[encode(np.array([0.123449, 0.00002, 1e-12]))].tolist()
    [0.1234, 2e-05, 1e-09]
    """
    p = np.asarray(probabilities, dtype=np.float64)
    codes = np.round(p * STEPS).astype(np.int64)
    near_one = codes == STEPS
    codes = np.where(codes == 0, STEPS + 1 + _small_code(p), codes)
    if multilabel:
        codes = np.where(near_one, STEPS + 1 + len(DIGITS) + _small_code(1 - p), codes)
    return codes.astype(np.uint16)


def _small_code(p: Floats) -> npt.NDArray[np.int64]:
    """The index in DIGITS of the nearest number with one significant digit."""
    p = np.clip(p, 1e-9, HALF_STEP)
    place = np.floor(np.log10(p)).astype(np.int64)
    digit = np.round(p / 10.0**place).astype(np.int64)
    place, digit = np.where(digit == 10, place + 1, place), np.where(digit == 10, 1, digit)
    return (-5 - place) * 9 + digit - 1


def write_kept_predictions(result: Path, predictions: Predictions) -> Path:
    """Write the predictions beside NAME.json, as codes; returns the path of their image table."""
    content = io.BytesIO()
    codes = encode(predictions.probabilities, predictions.multilabel)
    np.save(content, np.ascontiguousarray(codes.T, dtype="<u2"), allow_pickle=False)
    write_whole(predictions_path(result), lzma.compress(content.getvalue(), filters=COMPRESSION))
    return write_image_table(result.parent, predictions)


def read_kept_predictions(result: Path, image_table: Path, classes: Sequence[str], multilabel: bool) -> Predictions:
    """The predictions beside NAME.json, of either format."""
    path = predictions_path(result)
    if path.suffix == ".bz2":
        return _without_zeros(read_predictions(path, multilabel, image_table))
    return join_images(path, LEVELS[_read_codes(path, len(classes))].T, classes, multilabel, image_table)


def _read_codes(path: Path, classes: int) -> Codes:
    """The codes [K, N] in a file, of which no more is decompressed than MAX_VALUES and no object is built."""
    limit = 2 * MAX_VALUES + 4096
    try:
        decoder = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=2**28)
        content = decoder.decompress(path.read_bytes(), limit + 1)
        if not decoder.eof:
            raise ValueError(f"it is cut off, or has more than {limit:,} bytes")
        file = io.BytesIO(content)
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        codes = np.frombuffer(content[file.tell() :], dtype="<u2")
    except (lzma.LZMAError, ValueError, OSError) as error:
        raise InputError(f"{path} cannot be read as compressed predictions: {error}. Copy it again.") from error
    if dtype != np.dtype("<u2") or len(shape) != 2 or shape[0] != classes or codes.size != shape[0] * shape[1]:
        raise InputError(
            f"{path}: expected 16-bit codes of {classes} classes, found {dtype} of shape {list(shape)} and "
            f"{codes.size:,} codes. Copy it again."
        )
    if codes.size and codes.max() >= len(LEVELS):
        raise InputError(f"{path}: code {codes.max()} is no probability; the last is {len(LEVELS) - 1}. Copy it again.")
    return codes.reshape(shape)


def soft_label_history_path(result: Path) -> Path:
    return result.with_name(f"{result.stem}.soft_labels.json.bz2")


def write_soft_label_history(result: Path, history: Mapping[str, Any]) -> None:
    """Write the soft labels of some epochs beside NAME.json."""
    write_json_bz2(soft_label_history_path(result), dict(history))


def write_kept_result(result: KeptResult) -> None:
    """Write NAME.json. It is the last file to be written: where it exists, all others do."""
    write_whole(result.path, json.dumps(result.to_json(), allow_nan=False) + "\n")


def read_kept_result(path: str | Path) -> KeptResult:
    """Read a NAME.json; the keys of files written before version 0.2 are read too."""
    path = Path(path)
    try:
        return from_plain(KeptResult, read_json(path) | {"path": path})
    except InputError as error:
        raise InputError(
            f"{path} is not a kept result: {error}. Give a run folder, a predictions.csv, or a result of "
            "`cclnet compare-methods` or `cclnet reproduce`."
        ) from error


def _without_zeros(predictions: Predictions) -> Predictions:
    """Replace probabilities of 0 by 0.000025: early results were rounded to four decimals, so that 0 means anything
    below 0.00005."""
    p = np.where(predictions.probabilities == 0, 2.5e-5, predictions.probabilities)
    if predictions.multilabel:
        return replace(predictions, probabilities=np.where(p == 1, 1 - 2.5e-5, p))
    return replace(predictions, probabilities=p / p.sum(axis=1, keepdims=True))
