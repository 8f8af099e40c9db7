"""DICOM files as a viewer shows them: rescaled, windowed, and with MONOCHROME1 turned the right way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from cclnet.data.pixels import RGB, UnreadableImage, check_size, grey_to_rgb
from cclnet.errors import InputError


def read_dicom(path: Path, file: BinaryIO, max_pixels: int) -> RGB:
    """The picture in a DICOM file as RGB, uint8 [H, W, 3].

    Grey pictures pass through the modality table or rescale slope and intercept, then the first table or window
    of interest; without one, the darkest pixel becomes black and the brightest white, as viewers do. MONOCHROME1,
    where zero is white, is inverted last. Several frames are refused: which of them the label means is not known.
    """
    header = _header(path, file)
    check_size(path, int(header.Rows), int(header.Columns), max_pixels)
    from pydicom.pixels import pixel_array

    try:
        file.seek(0)
        return _show(header, pixel_array(file))
    except (ValueError, RuntimeError, NotImplementedError, AttributeError, LookupError, OSError, EOFError) as error:
        raise UnreadableImage(path, f"its pixel data cannot be decoded ({error})") from error


def dicom_size(path: Path, file: BinaryIO) -> tuple[int, int]:
    """Height and width, from the header alone."""
    header = _header(path, file)
    return int(header.Rows), int(header.Columns)


def _header(path: Path, file: BinaryIO) -> Any:
    """Everything but the pixels, checked to describe one picture."""
    try:
        from pydicom import dcmread
        from pydicom.errors import BytesLengthException, InvalidDicomError
    except ImportError as error:
        raise InputError(f"{path} is DICOM, which needs pydicom: pip install 'cclnet[dicom]'") from error
    try:
        header = dcmread(file, stop_before_pixels=True)
        frames = int(header.get("NumberOfFrames") or 1)
        missing = [key for key in ("Rows", "Columns", "PhotometricInterpretation") if not header.get(key)]
    except (InvalidDicomError, BytesLengthException, ValueError, TypeError, NotImplementedError, AttributeError,
            LookupError, OSError, EOFError) as error:  # fmt: skip
        raise UnreadableImage(path, f"not a DICOM file, or cut off ({error})") from error
    if missing:
        raise UnreadableImage(path, f"this DICOM file holds no picture (no {', '.join(missing)})")
    if frames > 1:
        raise UnreadableImage(path, f"multi-frame DICOM ({frames} frames). Save the frame you mean as its own file")
    return header


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
    grey = _to_uint8(apply_voi_lut(values, header), low, high)
    return grey_to_rgb(255 - grey if kind == "MONOCHROME1" else grey)


def _shown_range(header: Any, values: npt.NDArray[Any]) -> tuple[float, float]:
    """What comes out of the table or window of interest for black and for white."""
    from pydicom.pixels import apply_windowing

    if tables := header.get("VOILUTSequence"):
        return 0.0, 2.0 ** int(tables[0].LUTDescriptor[2]) - 1
    if header.get("WindowWidth") is not None and header.get("WindowCenter") is not None:
        with np.errstate(over="ignore"):  # the sigmoid of something very dark
            low, high = apply_windowing(np.array([-1e9, 1e9]), header)
        return float(low), float(high)
    return float(values.min()), float(values.max())


def _to_uint8(values: npt.NDArray[Any], low: float, high: float) -> npt.NDArray[np.uint8]:
    share = (values.astype(np.float64) - low) / ((high - low) or 1.0)
    return np.rint(np.clip(share, 0.0, 1.0) * 255).astype(np.uint8)
