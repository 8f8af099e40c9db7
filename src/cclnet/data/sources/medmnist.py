"""MedMNIST: one .npz file with images and labels of three splits, at any size; ``medmnist:NAME`` downloads it."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from cclnet.data.sources.source import Source, SourceNotes, finish, image_files, plain_files
from cclnet.data.table import ImageTable
from cclnet.errors import InputError, unknown
from cclnet.settings import DataOptions, read_settings

# The files contain class numbers only. These are the names in the collection; for DermaMNIST those of ISIC.
_MAX_COMPRESSION = 100  # deflate reaches 1,032 on zeros; images, and label maps in few colours, stay below 50
_MAX_UNCHECKED = 2**27  # bytes: what unpacks to less is harmless
_CLASS_NAMES = Path(__file__).with_name("medmnist_classes.toml")


def find(path: Path) -> list[Path]:
    """Return the file; in a folder without images, the files that have images of MedMNIST's splits."""
    if path.is_file():
        return [path] if path.suffix.lower() == ".npz" else []
    archives = [file for file in plain_files(path, [".npz"]) if _has_images(file)]
    return [] if not archives or image_files(path, follow_links=True, first_only=True) else archives


def _has_images(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("_images.npy") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError):
        return False


def read(path: Path, options: DataOptions) -> ImageTable:
    """Return all splits in one array, in the order train, val, test."""
    if path.is_dir():
        archives = find(path)
        if len(archives) != 1:
            raise InputError(f"{path} has {len(archives)} MedMNIST files: give the path of one.")
        path = archives[0]
    try:
        with zipfile.ZipFile(path) as archive:
            splits = [name for name in ("train", "val", "test") if f"{name}_images.npy" in archive.namelist()]
            if not splits:
                raise InputError(
                    f"{path}: expected train_images, val_images or test_images of a MedMNIST file, "
                    f"found {', '.join(archive.namelist()) or 'nothing'}."
                )
            _check_compression(path, archive)
            images, sizes = _read_images(path, archive, splits)
            labels = _read_labels(path, archive, splits, sizes)
    except InputError:
        raise
    except Exception as error:  # damaged archives make zipfile and numpy fail in any way
        raise InputError(f"{path} cannot be read as .npz: {error}. Is the download complete?") from error
    names = [f"{split}_{i:06d}" for split, size in zip(splits, sizes, strict=True) for i in range(size)]
    of_image = np.repeat(np.array(splits, dtype=np.str_), sizes)
    table = ImageTable(SOURCE.title, path, names, images, labels, _class_names(path, labels), splits=of_image)
    return finish(table, SourceNotes(), options)


def _check_compression(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse a small file that unpacks to gigabytes: arrays of images are never compressed that much."""
    size = sum(member.file_size for member in archive.infolist())
    if size > _MAX_UNCHECKED and size > _MAX_COMPRESSION * path.stat().st_size:
        raise InputError(
            f"{path} has {path.stat().st_size:,} bytes but would unpack to {size:,}, more than {_MAX_COMPRESSION} "
            "times as many. Images do not compress like that; save real ones, or save them uncompressed (numpy.savez)."
        )


def _read_images(path: Path, archive: zipfile.ZipFile, splits: list[str]) -> tuple[npt.NDArray[np.uint8], list[int]]:
    """Unpack every split directly into the final array, so that large sets take their memory only once."""
    shapes = [_shape(path, archive, f"{split}_images.npy") for split in splits]
    size = shapes[0][1:]
    if len({shape[1:] for shape in shapes}) > 1 or not (len(size) == 2 or (len(size) == 3 and size[2] in (1, 3))):
        raise InputError(
            f"{path}: images must be [N, H, W] or [N, H, W, 3] and the same size in all splits, got "
            f"{', '.join(map(str, shapes))}. Volumes (the 3D sets) are not supported."
        )
    counts = [shape[0] for shape in shapes]
    images = np.empty((sum(counts), *size), dtype=np.uint8)
    begin = 0
    for split, count in zip(splits, counts, strict=True):
        with archive.open(f"{split}_images.npy") as file:
            _read_npy_header(file)
            rest = images[begin : begin + count].reshape(-1)
            while len(rest):
                if not (piece := file.read(min(2**24, len(rest)))):
                    raise EOFError(f"{file.name} ends early")
                rest[: len(piece)] = np.frombuffer(piece, dtype=np.uint8)
                rest = rest[len(piece) :]
        begin += count
    return images, counts


def _shape(path: Path, archive: zipfile.ZipFile, member: str) -> tuple[int, ...]:
    with archive.open(member) as file:
        shape, fortran_order, dtype = _read_npy_header(file)
    if member.endswith("_images.npy") and (dtype != np.uint8 or fortran_order):
        raise InputError(f"{path}: {member.removesuffix('.npy')} must be uint8 in C order, got {dtype} {shape}.")
    if 0 in shape[1:]:
        raise InputError(f"{path}: {member.removesuffix('.npy')} is empty: {shape}.")
    if not shape:
        raise InputError(f"{path}: {member.removesuffix('.npy')} is a single value, expected one entry per image.")
    expected = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if archive.getinfo(member).file_size < expected:
        raise EOFError(f"{member} has {archive.getinfo(member).file_size:,} bytes, but its header says {expected:,}")
    return shape


def _read_npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


def _read_labels(
    path: Path, archive: zipfile.ZipFile, splits: list[str], sizes: list[int]
) -> npt.NDArray[np.int64] | npt.NDArray[np.uint8]:
    """Return labels: [N] and [N, 1] mean one label per image; [N, K] of zeros and ones means multi-label."""
    pieces = []
    for split, size in zip(splits, sizes, strict=True):
        _shape(path, archive, f"{split}_labels.npy")
        with archive.open(f"{split}_labels.npy") as file:
            piece = np.lib.format.read_array(file, allow_pickle=False)
        if len(piece) != size:
            raise InputError(f"{path}: {size} {split}_images but {len(piece)} {split}_labels.")
        pieces.append(piece.reshape(size, -1))
    labels = np.concatenate(pieces)
    if labels.dtype.kind == "f" and not np.isfinite(labels).all():
        raise InputError(f"{path}: {np.count_nonzero(~np.isfinite(labels).all(axis=1)):,} labels are not numbers.")
    if labels.shape[1] == 1:
        single = labels[:, 0].astype(np.int64)
        if (single != labels[:, 0]).any() or (single < 0).any() or single.max(initial=0) >= 10_000:
            raise InputError(f"{path}: labels must be class numbers from 0.")
        return single
    if not np.isin(labels, (0, 1)).all():
        raise InputError(f"{path}: multi-label labels must be zeros and ones.")
    return labels.astype(np.uint8)


def _class_names(path: Path, labels: npt.NDArray[Any]) -> tuple[str, ...]:
    count = labels.shape[1] if labels.ndim == 2 else int(labels.max(initial=0)) + 1
    name = re.match("[a-z0-9]*", path.stem.lower())
    known = read_settings(_CLASS_NAMES).get(name[0] if name else "", ())
    return tuple(known) if len(known) >= count else tuple(str(i) for i in range(count))


def download(name: str) -> Path:
    """Return the file of a MedMNIST set, such as ``dermamnist_224``, in the folder of the medmnist package. It is
    downloaded if missing, and verified with the checksum in the package."""
    try:
        from medmnist.info import DEFAULT_ROOT, INFO
    except ImportError as error:
        raise InputError(
            "medmnist:NAME needs the medmnist package: pip install 'cclnet[medmnist]'. Or download the .npz file "
            "and give its path."
        ) from error
    from torchvision.datasets.utils import download_url

    flag, _, size = name.lower().partition("_")
    if flag not in INFO or flag.endswith("3d"):
        raise unknown("MedMNIST set", flag, [known for known in INFO if not known.endswith("3d")])
    version = "" if size in ("", "28") else f"_{size}"
    if f"url{version}" not in INFO[flag]:
        sizes = [key.removeprefix("url_") for key in INFO[flag] if key.startswith("url_")]
        raise unknown(f"size of {flag}", size, ["28", *sizes])
    file = f"{flag}{version}.npz"
    try:
        download_url(INFO[flag][f"url{version}"], root=DEFAULT_ROOT, filename=file, md5=INFO[flag][f"MD5{version}"])
    except OSError as error:  # also urllib's URLError
        raise InputError(
            f"{file} could not be downloaded ({error}). Check the network, or give the path of a local file."
        ) from error
    except RuntimeError as error:
        raise InputError(
            f"{Path(DEFAULT_ROOT) / file} has a wrong checksum: the download was truncated or changed. "
            "Remove it and try again."
        ) from error
    return Path(DEFAULT_ROOT) / file


SOURCE = Source("MedMNIST", "dermamnist.npz, chestmnist_224.npz, … or medmnist:NAME to download", find, read)
