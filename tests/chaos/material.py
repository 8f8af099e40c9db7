"""What the corpus damages: a small data set, a finished and an unfinished run on it, an export, and good files."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from forked import run_forked
from PIL import Image, features

SETTINGS: dict[str, Any] = {
    "backbone": "test_resnet", "epochs": 2, "batch_size": 8, "lr": 0.02, "short_side": 32, "augment": {"crop": 28},
    "split": {"by": "class", "val": 0.3}, "method": "ccl", "method_settings": {"widths": (16, 8)},
}  # fmt: skip
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
SUFFIXES = {"JPEG": "jpg", "JPEG2000": "jp2", "TIFF": "tif"}


@dataclass(frozen=True)
class Material:
    """Folders that are read only; each case copies what it damages."""

    folder: Path
    data: Path  # three classes of eight images
    run: Path  # finished
    unfinished: Path  # two epochs of three, with checkpoints
    export: Path  # to ONNX
    cache: Path  # decoded images of ``data``


def make_material(folder: Path) -> Material:
    """Train and export in forks, so that this process starts no threads."""
    made = Material(folder, *(folder / name for name in ("data", "run", "unfinished", "export", "cache")))
    generator = np.random.default_rng(0)
    for number, label in enumerate(("ant", "bee", "cat")):
        (made.data / label).mkdir(parents=True)
        for i in range(8):
            kind = ("PNG", "JPEG", "WEBP")[i % 3]
            (made.data / label / f"{label}{i}.{suffix_of(kind)}").write_bytes(encoded(picture(generator, number), kind))
    for work in (_train, _stop_early, _export):
        inside = folder / work.__name__
        inside.mkdir()
        done = run_forked(lambda work=work: work(made), inside)
        if done.code:
            raise RuntimeError(f"the material could not be made: {done.output}")
    return made


def _train(made: Material) -> None:
    import cclnet

    settings = {**SETTINGS, "cache_dir": str(made.cache)}
    cclnet.train(made.data, made.run, accelerator="cpu", progress=False, **settings)


def _stop_early(made: Material) -> None:
    import cclnet

    class Stop(Exception):
        pass

    def stop(record: dict[str, Any], _: object) -> None:
        if record["epoch"] == 2:
            raise Stop

    settings = {**SETTINGS, "epochs": 3, "cache_dir": str(made.cache)}
    try:
        cclnet.train(made.data, made.unfinished, accelerator="cpu", progress=False, on_epoch=stop, **settings)
    except Stop:
        return


def _export(made: Material) -> None:
    from cclnet.deploy.export import export

    export(made.run, "onnx", made.export)


def picture(generator: np.random.Generator, hue: int = 0) -> Image.Image:
    """A smooth picture with one stronger channel."""
    coarse = generator.integers(0, 160, (4, 5, 3), dtype=np.uint8)
    coarse[..., hue % 3] += 90
    return Image.fromarray(coarse).resize((44, 38), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str, **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def suffix_of(kind: str) -> str:
    return SUFFIXES.get(kind, kind.lower())


def formats() -> list[str]:
    """The formats that this version of Pillow can write."""
    missing = {"AVIF": not features.check("avif"), "JPEG2000": not features.check("jpg_2000")}
    return [kind for kind in FORMATS if not missing.get(kind)]


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target, symlinks=True))


def dicom(deflate: bool = False, rows: int = 38, columns: int = 44, pixels: bytes | None = None, **more: Any) -> bytes:
    """A DICOM file of grey noise."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian, SecondaryCaptureImageStorage

    data = Dataset()
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian if deflate else ExplicitVRLittleEndian
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = SecondaryCaptureImageStorage
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = "1.2.3"
    data.Rows, data.Columns, data.SamplesPerPixel = rows, columns, 1
    data.PhotometricInterpretation, data.PixelRepresentation = "MONOCHROME2", 0
    data.BitsAllocated, data.BitsStored, data.HighBit = 16, 12, 11
    data.WindowCenter, data.WindowWidth, data.RescaleSlope, data.RescaleIntercept = 2000, 3000, 1, 0
    noise = np.random.default_rng(0).integers(0, 4096, (rows, columns)).astype("<u2") if pixels is None else None
    data.PixelData = pixels if noise is None else noise.tobytes()
    for keyword, value in more.items():
        setattr(data, keyword, value)
    file = io.BytesIO()
    data.save_as(file, enforce_file_format=True)
    return file.getvalue()


def npz(**changes: Any) -> bytes:
    """A MedMNIST file of three splits."""
    generator = np.random.default_rng(0)
    content: dict[str, Any] = {}
    for split, size in (("train", 12), ("val", 6), ("test", 6)):
        content[f"{split}_images"] = generator.integers(0, 256, (size, 28, 28, 3), dtype=np.uint8)
        content[f"{split}_labels"] = (np.arange(size) % 3).astype(np.uint8)[:, None]
    content |= changes
    file = io.BytesIO()
    np.savez_compressed(file, **content)
    return file.getvalue()


Mutation = Callable[[bytes], bytes]
