"""DICOM files as a viewer shows them: rescaled, windowed, and with MONOCHROME1 turned the right way round."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from cclnet.data.pixels import RGB, UnreadableImage, check_size, grey_to_rgb
from cclnet.errors import InputError


def read_dicom(path: Path, file: BinaryIO, max_pixels: int) -> RGB:
    """The picture in a DICOM file as RGB, uint8 [H, W, 3].

    Grey pictures pass through the modality table or rescale slope and intercept, then the first window or, where
    there is none, the table of interest. Without either, the darkest pixel becomes black and the brightest white, as
    viewers do. MONOCHROME1, where zero is white, is inverted last. Several frames are refused: which of them the
    label means is not known.
    """
    header = _header(path, file, max_pixels)
    from pydicom.pixels import pixel_array

    try:
        file.seek(0)
        return _show(header, pixel_array(file))
    except _broken() as error:
        raise UnreadableImage(path, f"its pixel data cannot be decoded ({error})") from error


def dicom_size(path: Path, file: BinaryIO, max_pixels: int) -> tuple[int, int]:
    """Height and width, from the header alone."""
    header = _header(path, file, max_pixels)
    return int(header.Rows), int(header.Columns)


def _header(path: Path, file: BinaryIO, max_pixels: int) -> Any:
    """Everything but the pixels, checked to describe one picture that is not too large."""
    try:
        from pydicom import dcmread
    except ImportError as error:
        raise InputError(f"{path} is DICOM, which needs pydicom: pip install 'cclnet[dicom]'") from error
    try:
        header = dcmread(file, stop_before_pixels=True)
        missing = [key for key in ("Rows", "Columns", "PhotometricInterpretation") if not header.get(key)]
        frames = int(header.get("NumberOfFrames") or 1)
        height, width = int(header.get("Rows") or 0), int(header.get("Columns") or 0)
    except _broken() as error:
        raise UnreadableImage(path, f"not a DICOM file, or cut off ({error})") from error
    if missing:
        raise UnreadableImage(path, f"this DICOM file holds no picture (no {', '.join(missing)})")
    if frames > 1:
        raise UnreadableImage(path, f"multi-frame DICOM ({frames} frames). Save the frame you mean as its own file")
    check_size(path, height, width, max_pixels)
    return header


def _broken() -> tuple[type[Exception], ...]:
    """What pydicom and its decoders raise when a file is damaged, or compressed in a way that nothing here undoes."""
    from pydicom.errors import BytesLengthException, InvalidDicomError

    return (InvalidDicomError, BytesLengthException, ValueError, TypeError, RuntimeError, AttributeError, LookupError,
            OSError, EOFError, MemoryError, ArithmeticError, struct.error, zlib.error)  # fmt: skip


def _show(header: Any, stored: npt.NDArray[Any]) -> RGB:
    from pydicom.pixels import apply_color_lut, apply_modality_lut, apply_voi_lut

    kind = str(header.PhotometricInterpretation)
    if kind == "PALETTE COLOR":
        colours = apply_color_lut(stored, header)
        return _to_uint8(colours, 0, np.iinfo(colours.dtype).max)
    if stored.ndim == 3:
        return _to_uint8(stored, 0, 2 ** int(header.BitsStored) - 1)
    if kind not in ("MONOCHROME1", "MONOCHROME2"):
        raise ValueError(f"photometric interpretation {kind}")
    values = apply_modality_lut(stored, header)
    low, high = _shown_range(header, values)
    grey = _to_uint8(apply_voi_lut(values, header, prefer_lut=False), low, high)
    return grey_to_rgb(255 - grey if kind == "MONOCHROME1" else grey)


def _shown_range(header: Any, values: npt.NDArray[Any]) -> tuple[float, float]:
    """What comes out of the window or table of interest for black and for white."""
    from pydicom.pixels import apply_windowing

    if header.get("WindowWidth") is not None and header.get("WindowCenter") is not None:
        with np.errstate(over="ignore"):  # the sigmoid of something very dark
            low, high = apply_windowing(np.array([-1e9, 1e9]), header)
        return float(low), float(high)
    if tables := header.get("VOILUTSequence"):
        entries, _, bits = (int(value) for value in tables[0].LUTDescriptor)
        if bits == 8 and not 0 < entries <= 256:
            raise ValueError(f"an 8-bit table of interest with {entries or 65536} entries")  # pydicom's index overflows
        return 0.0, 2.0**bits - 1
    return float(values.min()), float(values.max())


def _to_uint8(values: npt.NDArray[Any], low: float, high: float) -> npt.NDArray[np.uint8]:
    share = (values.astype(np.float64) - low) / ((high - low) or 1.0)
    return np.rint(np.clip(share, 0.0, 1.0) * 255).astype(np.uint8)
