"""Frozen features of images: computed once, cached on disk, and resumed after an interruption.

On a CPU the network runs in ONNX Runtime where that is installed (cclnet[export]): two to three times as fast.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from cclnet.data.augment import normalise
from cclnet.data.cache import DecodedImages, file_entries
from cclnet.data.loader import Loader
from cclnet.data.parallel import available_cores, counting_images
from cclnet.data.table import ImageTable
from cclnet.data.views import VIEWS
from cclnet.errors import first_line
from cclnet.files import cache_folder, check_regular, make_folder, write_whole
from cclnet.network import TimmClassifier, silent_exporters, to_onnx
from cclnet.settings import Settings

Floats32 = npt.NDArray[np.float32]
Forward = Callable[[Tensor], Tensor]  # normalised images [n, 3, h, w] to features [n, F]

PART = 512  # images per file: the work that a killed run loses at most
BATCH = 32
FEWEST_FOR_ONNX = 1024  # forward passes; fewer take less time than the conversion to ONNX
LARGEST_DIFFERENCE = 1e-3  # of features between ONNX Runtime and PyTorch, relative to their largest value
_FORMAT = 1  # increase when the same images give other features than before: older files are then ignored


def frozen_features(
    classifier: TimmClassifier,
    settings: Settings,
    table: ImageTable,
    images: DecodedImages,
    views: Sequence[str],
    device: torch.device,
    progress: bool = True,
) -> dict[str, Floats32]:
    """Return the pooled features [N, F] of the central crops for each view (see ``cclnet.data.views``).

    They are kept in ``cache_dir``, in files of 512 images with a checksum, named by the images (names, sizes, times),
    the weights and the preprocessing.
    """
    keys = {view: _key(classifier, settings, table, view) for view in views}
    folders = {view: cache_folder(settings.cache_folder) / "features" / key for view, key in keys.items()}
    starts = range(0, len(table), PART)
    parts = {(view, start): folders[view] / f"{start:08d}.npz" for view in views for start in starts}
    found = {own: _read(path, min(PART, len(table) - own[1])) for own, path in parts.items()}
    missing = [start for start in starts if any(found[view, start] is None for view in views)]
    classifier = classifier.eval().to(device).to(memory_format=torch.channels_last)
    left = sum(min(PART, len(table) - start) for start in missing)
    forward = None
    if device.type == "cpu" and left * len(views) >= FEWEST_FOR_ONNX:
        forward = onnx_forward(classifier, settings.augment.crop)
    with counting_images("Computing features", len(table), len(table) - left, progress and bool(missing)) as count:
        for start in missing:
            rows = np.arange(start, min(start + PART, len(table)))
            wanted = [view for view in views if found[view, start] is None]
            computed = _compute(forward or classifier.features, settings, table, images, rows, wanted, device, count)
            for view, values in computed.items():
                found[view, start] = values
                _write(parts[view, start], values)
    return {view: np.concatenate([_whole(found[view, start]) for start in starts]) for view in views}


@torch.inference_mode()
def _compute(
    forward: Forward,
    settings: Settings,
    table: ImageTable,
    images: DecodedImages,
    rows: npt.NDArray[np.intp],
    views: Sequence[str],
    device: torch.device,
    count: Callable[[int], None],
) -> dict[str, Floats32]:
    loader = Loader(images, table.labels, rows, batch_size=BATCH, crop=settings.augment.crop, device=device)
    mean, std = (torch.tensor(own, device=device) for own in (settings.input_mean, settings.input_std))
    found: dict[str, list[Tensor]] = {view: [] for view in views}
    for batch in loader.epoch():
        normalised = normalise(batch.crops, mean, std)
        for view in views:
            found[view].append(forward(VIEWS[view](normalised)).float().cpu())
        count(len(batch.rows))
    return {view: torch.cat(own).numpy() for view, own in found.items()}


class _Features(nn.Module):
    """The features of a classifier as a module, which is what can be converted."""

    def __init__(self, classifier: TimmClassifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier.features(images)


@torch.no_grad()
def onnx_forward(classifier: TimmClassifier, crop: int) -> Forward | None:
    """``classifier.features`` in ONNX Runtime; None where that is not installed or cannot run the network."""
    if not all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime")):
        return None
    import onnxruntime

    images = torch.randn(2, 3, crop, crop, generator=torch.Generator().manual_seed(0))
    try:
        with silent_exporters():
            model = to_onnx(_Features(classifier).eval(), images)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = min(available_cores(), torch.get_num_threads())
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError):
        return None  # PyTorch runs every network

    def forward(batch: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"images": batch.contiguous().numpy()})[0])

    expected = classifier.features(images)
    difference = (forward(images) - expected).abs().max() / expected.abs().max()
    return forward if float(difference) < LARGEST_DIFFERENCE else None


def _key(classifier: TimmClassifier, settings: Settings, table: ImageTable, view: str) -> str:
    """Return the name of the folder for these features."""
    digest = hashlib.blake2b(digest_size=12)
    if isinstance(table.images, np.ndarray):
        digest.update(np.ascontiguousarray(table.images).tobytes())
    else:
        digest.update(file_entries(table.images, table.root)[0].tobytes())
    for name, value in classifier.shipped.state_dict().items():
        if not name.startswith(classifier.last_layer):
            digest.update(name.encode())
            digest.update(value.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    prepared: dict[str, Any] = {
        "format": _FORMAT,
        "backbone": settings.backbone,
        "short_side": settings.short_side,
        "crop": settings.augment.crop,
        "mean": settings.input_mean,
        "std": settings.input_std,
        "view": view,
    }
    if settings.pooling != "last":
        prepared["pooling"] = settings.pooling
    digest.update(json.dumps(prepared, sort_keys=True).encode())
    return f"{settings.backbone}-{digest.hexdigest()}"


def _read(path: Path, count: int) -> Floats32 | None:
    """Return the features in a file; None where it is missing or damaged, because they can be computed again."""
    if not path.exists():
        return None
    try:
        check_regular(path)
        with np.load(path, allow_pickle=False) as file:
            values = file["features"]  # read to its end, where zipfile compares the CRC-32
        if values.dtype != np.float32 or values.ndim != 2 or len(values) != count:
            raise ValueError(f"{values.dtype} {list(values.shape)} instead of the features of {count} images")
    except Exception as error:  # noqa: BLE001 (damaged bytes make zipfile and numpy fail in any way)
        warnings.warn(f"{path} is damaged, its features are computed again: {first_line(error)}.", stacklevel=2)
        return None
    return values


def _write(path: Path, values: Floats32) -> None:
    make_folder(path.parent)
    write_whole(path, lambda file: np.savez(file, features=values))


def _whole(values: Floats32 | None) -> Floats32:
    assert values is not None
    return values
