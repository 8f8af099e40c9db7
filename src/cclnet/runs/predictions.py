"""predictions.csv: the predicted probabilities of a run, from which it is evaluated, compared and reported.

Columns: ``image``; where known ``split`` (train, calibration, val, test) and ``group`` (lesion, patient); ``label``;
then ``p_<class>`` for each class. A label is a class name; where an image may carry several labels they are joined by
``|``, and an empty label is none of them. Texts that a spreadsheet would run as a formula are marked, see
``cclnet.runs.spreadsheet``. A name ending in ``.gz`` or ``.bz2`` is compressed.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from cclnet.errors import InputError
from cclnet.files import Writer, check_regular, write_whole
from cclnet.runs.checksums import check_file
from cclnet.runs.spreadsheet import mark_texts, unmark_texts

Strings = npt.NDArray[np.str_]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Labels = Integers | npt.NDArray[np.uint8]
Rows = npt.NDArray[np.bool_] | npt.NDArray[np.intp]
Columns = dict[str, npt.NDArray[np.generic]]

MAX_UNPACKED, MAX_RATIO = 2**26, 100  # bytes of a compressed table; larger ones: at most so many times their size
MAX_COLUMNS = 10_000  # classes and what is known of the images; a confusion matrix of them takes 800 MB
MAX_TEXT, MAX_CHARACTERS = 2**16, 2**29  # of a text, and of all texts in a column
_HEADER_BYTES = 2**26
_OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
SPLITS = ("train", "calibration", "val", "test")
IMAGE_COLUMNS = ("image", "split", "group", "label")  # what is known before prediction


@dataclass(frozen=True)
class Predictions:
    """The predicted probabilities of N images for K classes."""

    images: Strings  # unique names, [N]
    labels: Labels  # class indices, int64 [N]; or zeros and ones, uint8 [N, K], where an image may carry several
    probabilities: Floats  # [N, K]; rows sum to one for class indices
    classes: tuple[str, ...]  # [K]
    groups: Strings | None = None  # lesion or patient, [N], empty where unknown; None where none is known
    splits: Strings | None = None  # "train", "calibration", "val" or "test", [N]; None where not given
    ordered: bool | None = None  # whether ``classes`` are in order, as grades are; None: as their names say

    def __post_init__(self) -> None:
        if self.ordered is None:
            object.__setattr__(self, "ordered", self.labels.ndim == 1 and names_in_order(self.classes))
        object.__setattr__(self, "probabilities", np.asarray(self.probabilities, dtype=np.float64))
        columns = [(name, getattr(self, name)) for name in ("labels", "probabilities", "groups", "splits")]
        odd = [f"{len(own)} {name}" for name, own in columns if own is not None and len(own) != len(self.images)]
        if odd or self.probabilities.shape[1:] != (len(self.classes),):
            found = ", ".join([*odd, f"probabilities of shape {list(self.probabilities.shape)}"])
            raise InputError(f"{len(self.images)} images and {len(self.classes)} classes, but {found}.")
        _refuse(_content_problems(self), "these predictions")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def multilabel(self) -> bool:
        return self.labels.ndim == 2

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def targets(self) -> npt.NDArray[np.uint8]:
        """Zeros and ones [N, K], for single labels too."""
        if self.multilabel:
            return self.labels.astype(np.uint8)
        return (self.labels[:, None] == np.arange(self.num_classes)).astype(np.uint8)

    @property
    def class_counts(self) -> Integers:
        """Images of each class, [K]."""
        return self.targets.sum(axis=0, dtype=np.int64)

    def select(self, rows: Rows, names: Strings | None = None) -> Predictions:
        """The predictions of the given rows, in their order; new ``names`` are needed where rows repeat."""
        fields = ("images", "labels", "probabilities", "groups", "splits")
        chosen = {name: own[rows] for name in fields if (own := getattr(self, name)) is not None}
        return replace(self, **(chosen if names is None else chosen | {"images": names}))

    def of_split(self, split: str) -> Predictions:
        """The predictions of one split; "all" for every image."""
        if split == "all":
            return self
        return self.select(np.zeros(len(self), bool) if self.splits is None else self.splits == split)


def names_in_order(classes: Sequence[str]) -> bool:
    """Whether three or more class names are numbers or grades in a row: the same text around consecutive numbers
    (Arabic, or Roman up to X), or consecutive numbers in front of any text.

    >>> names_in_order(["0", "1", "2"]), names_in_order(["stage I", "stage II", "stage III"])
    (True, True)
    >>> names_in_order(["0_none", "1_mild", "2_severe"]), names_in_order(["MEL", "NV", "BCC"])
    (True, False)
    """
    if len(classes) < 3:
        return False
    roman = ("i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix", "x")
    for pattern, same_text in ((r"(\D*)(\d+)(\D*)", True), (r"(.*?)\b([ivx]+)()", True), (r"()(\d+)[\W_].*()", False)):
        found = [re.fullmatch(pattern, name.strip().lower()) for name in classes]
        if not all(found) or (same_text and len({(m[1], m[3]) for m in found if m}) > 1):
            continue
        texts = [m[2] for m in found if m]
        if all(text.isdigit() or text in roman for text in texts):
            numbers = [int(text) if text.isdigit() else roman.index(text) + 1 for text in texts]
            return numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return False


def label_texts(labels: Labels, classes: Sequence[str]) -> list[str]:
    """Labels as the files have them: class names; several labels of one image are joined by ``|``.

    >>> label_texts(np.array([[1, 1], [0, 0]], np.uint8), ("a", "b"))
    ['a|b', '']
    """
    names = np.array(classes, dtype=object)
    return ["|".join(names[row > 0]) for row in labels] if labels.ndim == 2 else names[labels].tolist()


def sum_tolerance(num_classes: int) -> float:
    """How far the sum of a row may be from one: four decimals per class round by up to K times 0.00005."""
    return max(1e-3, num_classes * 5e-5)


def examples(names: npt.NDArray[np.str_] | list[str]) -> str:
    """The first three names, and whether there are more."""
    shown = ", ".join(str(name) for name in names[:3])
    return shown + (", ..." if len(names) > 3 else "")


def counted(number: int, what: str) -> str:
    """
    >>> counted(1, "image"), counted(1200, "image")
    ('1 image', '1,200 images')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def duration_text(seconds: float) -> str:
    """How long something takes: "42 seconds", "10 minutes", "2.2 hours", "3.1 days"."""
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    if seconds < 48 * 3600:
        return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
    return f"{seconds / 86400:.1f} days"


class ContentError(InputError):
    """Predictions that cannot be evaluated, for each of these reasons."""

    def __init__(self, what: str, problems: list[str]) -> None:
        super().__init__(f"{what} cannot be evaluated:" + "".join(f"\n  - {problem}" for problem in problems))
        self.problems = problems


def _refuse(problems: list[str], what: str) -> None:
    if problems:
        raise ContentError(what, problems)


def _content_problems(own: Predictions) -> list[str]:
    """One sentence per kind of fault, with counts and first examples."""
    images, labels, classes, problems = own.images, own.labels, own.classes, []
    if len(set(images.tolist())) != len(images):
        names, counts = np.unique(images, return_counts=True)
        problems.append(
            f"{counted(int((counts > 1).sum()), 'image')} more than once: {examples(names[counts > 1])}. "
            "Every image is evaluated once: average its predictions, or give each its own name."
        )
    p = own.probabilities
    missing = ~np.isfinite(p).all(axis=1)
    if missing.any():
        problems.append(
            f"{counted(int(missing.sum()), 'image')} with a probability that is missing or not finite: "
            f"{examples(images[missing])}."
        )
    beyond = np.isfinite(p) & ((p < 0) | (p > 1))
    outside = beyond.any(axis=1)
    if outside.any():
        problems.append(
            f"{counted(int(outside.sum()), 'image')} with a probability outside [0, 1]: "
            f"{examples(images[outside])} (the first has {p[beyond][0]:g}). Are these logits? "
            f"Take their {'sigmoid' if own.multilabel else 'softmax'} first."
        )
    sums = np.where(missing | outside, 1.0, p.sum(axis=1))  # a row with a worse fault is reported for that alone
    off = np.abs(sums - 1) > sum_tolerance(p.shape[1])
    if off.any() and not own.multilabel:
        problems.append(
            f"{counted(int(off.sum()), 'image')} whose probabilities do not sum to one: {examples(images[off])} "
            f"(the first sums to {sums[off][0]:.6g}). Where an image may carry several labels, join them by |."
        )
    if len(classes) < 2:
        problems.append("one class only; at least two are needed: add a column p_<the other>, 1 - p.")
    limit = 1 if own.multilabel else len(classes) - 1
    if labels.size and (labels.min() < 0 or labels.max() > limit):
        problems.append(f"labels must lie in 0..{limit}, got {labels.min()}..{labels.max()}.")
    if own.splits is not None and (odd := sorted(set(own.splits.tolist()) - set(SPLITS))):
        named = examples([repr(name) for name in odd])
        problems.append(f"{counted(len(odd), 'unknown split')}: {named}. Splits are {', '.join(SPLITS)}.")
    return problems


def read_predictions(
    path: str | Path, multilabel: bool | None = None, image_table: str | Path | None = None
) -> Predictions:
    """Read a predictions.csv (or .csv.gz, .csv.bz2); all faults are reported in one error.

    Rows of single-label probabilities within rounding of one are normalised to sum to one.

    Args:
        multilabel: whether an image may carry several labels. None finds out: it may where a label contains ``|``, or
            where a label is empty and most rows do not sum to one.
        image_table: the file with the IMAGE_COLUMNS, where they were written separately.
    """
    path = Path(path)
    check_file(path)
    header, frame = _read_frame(path)
    if image_table is not None:
        header, frame = _beside_images(path, header, frame, Path(image_table))
    return _from_frame(path, header, frame, multilabel)


def join_images(
    path: Path, probabilities: Floats, classes: Sequence[str], multilabel: bool, image_table: Path
) -> Predictions:
    """The predictions of ``path``, which has only probabilities [N, K], with the IMAGE_COLUMNS of ``image_table``."""
    header = [f"p_{name}" for name in classes]
    header, frame = _beside_images(path, header, pd.DataFrame(probabilities, columns=header), image_table)
    return _from_frame(path, header, frame, multilabel)


def _beside_images(
    path: Path, header: list[str], frame: pd.DataFrame, image_table: Path
) -> tuple[list[str], pd.DataFrame]:
    known, rows = _read_frame(image_table)
    if len(rows) != len(frame):
        raise InputError(
            f"{path} has {len(frame):,} rows and {image_table} {len(rows):,}: they do not belong to the same images."
        )
    return known + header, pd.concat([rows, frame], axis=1)


def _from_frame(path: Path, header: list[str], frame: pd.DataFrame, multilabel: bool | None) -> Predictions:
    """The predictions in the columns of a file; all its faults in one error."""
    if "problem" in header:  # of `cclnet predict`: images that could not be read have no prediction
        unread = frame["problem"].astype(str).to_numpy() != ""
        if unread.any():
            skipped = f"{counted(int(unread.sum()), 'image')} without a prediction (see the column 'problem')"
            warnings.warn(f"{path}: {skipped}, left out of all scores.", stacklevel=2)
            frame = frame[~unread].reset_index(drop=True)
    classes = tuple(name[2:] for name in header if name.startswith("p_"))
    problems = _header_problems(header, classes)
    if len(frame) == 0:
        problems.append("no image: the file has a header only.")
    _refuse(problems, str(path))  # without its columns nothing else can be checked
    # Anything else than a number becomes NaN, which is then reported.
    numbers = [pd.to_numeric(frame["p_" + name], errors="coerce") for name in classes]
    probabilities = np.column_stack([column.to_numpy(dtype=np.float64, na_value=np.nan) for column in numbers])
    texts = text_column(path, frame["label"])
    near_one = np.abs(probabilities.sum(axis=1) - 1) <= sum_tolerance(len(classes))
    if multilabel is None:
        kinds = set(np.unique(texts).tolist()) - set(classes)
        multilabel = any("|" in kind for kind in kinds) or ("" in kinds and float(near_one.mean()) < 0.5)
    images = text_column(path, frame["image"])
    labels, problems = _read_labels(texts, classes, multilabel, images)
    if not multilabel:
        probabilities[near_one] /= probabilities[near_one].sum(axis=1, keepdims=True)
    groups, splits = (text_column(path, frame[c]) if c in header else None for c in ("group", "split"))
    try:
        predictions = Predictions(images, labels, probabilities, classes, groups, splits)
    except ContentError as error:
        problems += error.problems
    _refuse(problems, str(path))
    return predictions


def read_further_columns(path: Path) -> pd.DataFrame:
    """The columns of a predictions.csv that predictions do not need, such as sex or age, as text, indexed by image."""
    _, frame = _read_frame(path)
    known = [name for name in frame if name in (*IMAGE_COLUMNS[1:], "problem") or str(name).startswith("p_")]
    return frame.drop(columns=known).astype(str).set_index("image")


def _read_frame(path: Path) -> tuple[list[str], pd.DataFrame]:
    """The column names just as the header has them, and the rows. Text stays text: a class may be called NA."""
    if not path.exists():
        raise InputError(f"no file {path}. Expected a predictions.csv with the columns image, label and p_<class>.")
    check_regular(path)
    try:
        text = _unpacked(path) if path.suffix in _OPENERS else None
        with path.open("rb") if text is None else io.BytesIO(text) as file:
            columns = file.readline(_HEADER_BYTES).count(b",") + 1
        if columns > MAX_COLUMNS:
            raise InputError(f"{path} has {columns:,} columns; at most {MAX_COLUMNS:,} are read.")
        given: Any = {"keep_default_na": False, "encoding": "utf-8-sig", "compression": None}
        first = pd.read_csv(path if text is None else io.BytesIO(text), header=None, nrows=1, dtype=str, **given)
        header = [str(name) for name in first.iloc[0]]
        texts = dict.fromkeys((*IMAGE_COLUMNS, "part"), "str")
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(path if text is None else io.BytesIO(text), dtype=texts, index_col=False,
                                low_memory=False, float_precision="round_trip", **given)  # fmt: skip
    except (pd.errors.EmptyDataError, pd.errors.ParserError, pd.errors.ParserWarning, UnicodeDecodeError,
            OSError, EOFError, lzma.LZMAError, zlib.error) as error:  # fmt: skip
        raise InputError(f"{path} cannot be read as comma-separated text: {error}") from error
    for name in ("image", "group", "label"):
        if name in frame and header.count(name) == 1:
            frame[name] = unmark_texts(frame[name])
    if "split" not in header and "part" in header:  # the name of the column before version 0.2
        header = ["split" if name == "part" else name for name in header]
        frame = frame.rename(columns={"part": "split"}).astype({"split": "str"})
    return header, frame


def _unpacked(path: Path) -> bytes:
    """The content of a compressed table. A few bytes can decompress to gigabytes, which no table of results does."""
    limit = max(MAX_UNPACKED, MAX_RATIO * path.stat().st_size)
    with _OPENERS[path.suffix](path) as file:
        text: bytes = file.read(limit + 1)
    if len(text) > limit:
        raise InputError(f"{path} is refused: it decompresses to more than {limit:,} bytes. If it is whole, unpack it.")
    return text


def text_column(path: Path, cells: pd.Series[Any]) -> Strings:
    """A column of texts as an array, in which every text takes the room of the longest."""
    longest = int(cells.str.len().max()) if len(cells) else 0
    if longest > MAX_TEXT or longest * len(cells) > MAX_CHARACTERS:
        raise InputError(f"{path}: a text in the column '{cells.name}' has {longest:,} characters. Is it damaged?")
    return cells.to_numpy(dtype=np.str_)


def _header_problems(header: list[str], classes: tuple[str, ...]) -> list[str]:
    shown = ", ".join(header[:12]) + (", ..." if len(header) > 12 else "")
    problems = [f"no column '{name}' (found: {shown})." for name in ("image", "label") if name not in header]
    if not classes:
        problems.append(f"no column 'p_<class>' with the probability of a class (found: {shown}).")
    if doubled := sorted(name for name, count in Counter(header).items() if count > 1):
        problems.append(f"{counted(len(doubled), 'column')} more than once: {examples(doubled)}.")
    if "" in classes:
        problems.append("a column 'p_' without the name of its class.")
    return problems


def _read_labels(
    texts: Strings, classes: tuple[str, ...], multilabel: bool, images: Strings
) -> tuple[Labels, list[str]]:
    """Labels from their texts, and their faults; each distinct text is parsed once."""
    kinds, kind_of = np.unique(texts, return_inverse=True)
    place = {name: k for k, name in enumerate(classes)}
    table = np.zeros((len(kinds), len(classes)), np.uint8)
    strange: dict[str, int] = {}  # unknown name -> its row of kinds
    for row, kind in enumerate(kinds.tolist()):
        names = [kind] if not multilabel or kind in place else [name for name in kind.split("|") if name]
        strange.update({name: row for name in names if name not in place})
        table[row, [place[name] for name in names if name in place]] = 1
    problems = []
    if strange:
        wrong = np.isin(kind_of, list(strange.values()))
        named = examples([repr(name) if name else "no label" for name in strange])
        problems.append(
            f"{counted(int(wrong.sum()), 'image')} with a label that has no column p_<class>: {named} "
            f"(first image: {images[wrong][0]}). Known classes: {', '.join(classes[:20])}"
            f"{', ...' if len(classes) > 20 else ''}."
        )
    labels = table[kind_of] if multilabel else table.argmax(axis=1).astype(np.int64)[kind_of]
    return labels, problems


def write_predictions(path: str | Path, predictions: Predictions, write: Writer = write_whole) -> None:
    """Write predictions.csv whole; nine significant digits restore a float32 exactly."""
    _write(Path(path), {**image_columns(predictions), **probability_columns(predictions)}, write)


def write_image_table(folder: Path, predictions: Predictions) -> Path:
    """Write the IMAGE_COLUMNS once for all runs on the same images: ``images-XXXXXXXX.csv.bz2``, named by a hash of its
    content. Returns its path."""
    columns = image_columns(predictions)
    digest = hashlib.blake2b(_csv(columns), digest_size=4).hexdigest()
    images = folder / f"images-{digest}.csv.bz2"
    if not images.exists():
        _write(images, columns)
    return images


def image_columns(predictions: Predictions) -> Columns:
    """IMAGE_COLUMNS, as far as they are known."""
    if predictions.multilabel and (odd := [name for name in predictions.classes if "|" in name]):
        raise InputError(f"labels are joined by '|', so no class name may contain it: {examples(odd)}. Rename it.")
    labels = np.array(label_texts(predictions.labels, predictions.classes), dtype=np.str_)
    values = (predictions.images, predictions.splits, predictions.groups, labels)
    return {name: value for name, value in zip(IMAGE_COLUMNS, values, strict=True) if value is not None}


def probability_columns(predictions: Predictions) -> Columns:
    return {f"p_{name}": predictions.probabilities[:, k] for k, name in enumerate(predictions.classes)}


def _csv(columns: Columns) -> bytes:
    cells = {name: mark_texts(own.tolist()) if own.dtype.kind == "U" else own for name, own in columns.items()}
    return pd.DataFrame(cells).to_csv(index=False, float_format="%.9g", lineterminator="\n").encode()


def _write(path: Path, columns: Columns, write: Writer = write_whole) -> None:
    text = _csv(columns)
    if path.suffix == ".gz":
        text = gzip.compress(text, compresslevel=6, mtime=0)  # without a time the same predictions give the same bytes
    write(path, bz2.compress(text) if path.suffix == ".bz2" else text)
