"""One image at a given short side, as the decoded cache keeps it."""

from __future__ import annotations

import functools
import io
import math
import os
import struct
import sys
import threading
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from cclnet.errors import InputError

# One image file to RGB pixels, whatever is in it: what a viewer would show, or an error that names the file.


RGB = npt.NDArray[np.uint8]

# Past this an image is refused by its header, before a byte is decoded: 600 MB as RGB, 14,142 pixels square.
MAX_PIXELS = 200_000_000

# Only formats that store pixels. Others that Pillow knows run an interpreter (EPS) or fetch other files.
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "DIB", "GIF", "PPM", "JPEG2000", "AVIF")
SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp", ".dib", ".gif", ".ppm", ".pgm",
     ".pbm", ".pnm", ".jp2", ".j2k", ".avif", ".dcm", ".dicom")
)  # fmt: skip
_JPEG = ("JPEG", "MPO")  # MPO: a phone's JPEG with further pictures behind the first

# What Pillow's decoders raise when a file is broken; anything else is a fault of ours and shall be seen.
_BROKEN = (OSError, SyntaxError, ValueError, TypeError, EOFError, LookupError, OverflowError, MemoryError,
           struct.error, zlib.error, Image.DecompressionBombError)  # fmt: skip
_PILLOW_LIMIT = threading.Lock()


class UnreadableImage(InputError):
    """An image file that cannot be used. Carries ``path`` and ``reason``, so that many are listed at once."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(path, reason)  # the arguments as they are, so that it travels between processes
        self.path = Path(path)
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot read {self.path}: {self.reason}"


def read_image(path: str | Path, *, min_short_side: int | None = None, max_pixels: int = MAX_PIXELS) -> RGB:
    """The pixels of an image file as RGB, uint8 [H, W, 3], upright; to be read, not written.

    EXIF orientation is applied. Grey becomes three equal channels; 16 bits are scaled to 8, white to white.
    Transparent pixels are laid on black, which is what "no signal" looks like in medical images and what padding
    gives later on. Colour profiles are left alone. Of an animation or a file of pages the first picture is taken;
    DICOM with several frames is refused.

    ``min_short_side`` allows a large JPEG to be decoded at 1/2, 1/4 or 1/8 of its size, which is several times
    faster, as long as the short side stays at least this long. Other formats ignore it.

    Raises :class:`UnreadableImage` for a file that is missing, truncated, not an image, or larger than
    ``max_pixels`` by its header.
    """
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 (what pathlib adds shows beside a fast decoder)
            content = file.read()
    except OSError as error:
        raise UnreadableImage(path, error.strerror or str(error)) from error
    return decode_image(content, path, min_short_side=min_short_side, max_pixels=max_pixels)


def decode_image(
    content: bytes, path: str | Path, *, min_short_side: int | None = None, max_pixels: int = MAX_PIXELS
) -> RGB:
    """As :func:`read_image`, from the content of a file. ``path`` is its name, for errors; nothing is opened there."""
    if _is_dicom(path, content):
        return read_dicom(Path(path), io.BytesIO(content), max_pixels)
    if (fast := _decode_jpeg(content, path, min_short_side, max_pixels)) is not None:
        return fast
    image = _open(path, io.BytesIO(content), max_pixels)
    try:
        if image.format in _JPEG and (scale := _jpeg_scale(image.height, image.width, min_short_side)) > 1:
            image.draft(None, (image.width // scale, image.height // scale))
        image.load()
        return _to_rgb(path, image)
    except UnreadableImage:
        raise
    except _BROKEN as error:
        raise UnreadableImage(path, _reason(error)) from error


def rgb_of(image: Image.Image) -> RGB:
    """The pixels of an image that Pillow has opened or made, as :func:`read_image` would give them."""
    try:
        return _to_rgb(getattr(image, "filename", "") or "image", image)
    except UnreadableImage:
        raise
    except _BROKEN as error:
        raise UnreadableImage(getattr(image, "filename", "") or "image", _reason(error)) from error


def image_size(path: str | Path, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Height and width of the upright image, from the header alone."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(132)
            file.seek(0)
            if _is_dicom(path, start):
                return dicom_size(path, file, max_pixels)
            image = _open(path, file, max_pixels)
            # A TIFF that Pillow turns by itself has its size turned already.
            turned = _orientation(image) >= 5 and image.format != "TIFF"
            return (image.width, image.height) if turned else (image.height, image.width)
    except OSError as error:
        raise UnreadableImage(path, error.strerror or str(error)) from error


def brightest_16_bit(path: str | Path, *, max_pixels: int = MAX_PIXELS) -> int | None:
    """The largest value of a 16-bit grey image, None for any other: far below 65535 it will come out dark."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            image = _open(path, file, max_pixels)
            return int(np.asarray(image).max()) if image.mode.startswith("I;16") else None
    except UnreadableImage:
        raise
    except _BROKEN as error:
        raise UnreadableImage(path, _reason(error)) from error


def _is_dicom(path: str | Path, start: bytes) -> bool:
    return start[128:132] == b"DICM" or os.fspath(path).lower().endswith((".dcm", ".dicom"))


def _open(path: str | Path, file: BinaryIO, max_pixels: int) -> ImageFile.ImageFile:
    """Read the header and refuse what is too large. Pillow's own limit, which is one for the whole process and
    warns before it refuses, is lifted for as long as the header is read.
    """
    with _PILLOW_LIMIT:
        pillow_limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            image = Image.open(file, formats=_formats())
        except _BROKEN as error:
            raise UnreadableImage(path, _reason(error)) from error
        finally:
            Image.MAX_IMAGE_PIXELS = pillow_limit
    check_size(path, image.height, image.width, max_pixels)
    return image


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(known for known in FORMATS if known in Image.OPEN)  # an older Pillow has no AVIF


def check_size(path: str | Path, height: int, width: int, max_pixels: int) -> None:
    """Refuse an image that a header of a few bytes could blow up to more than the memory holds."""
    if height * width > max_pixels:
        raise UnreadableImage(
            path,
            f"its header says {width:,} x {height:,} pixels, more than the limit of {max_pixels:,} (max_pixels)",
        )
    if height * width == 0:
        raise UnreadableImage(path, f"its header says {width} x {height} pixels")


def _jpeg_scale(height: int, width: int, min_short_side: int | None) -> int:
    """The largest of 8, 4, 2, 1 that a JPEG can be shrunk by while decoding and keep its short side."""
    if min_short_side is None:
        return 1
    return next((s for s in (8, 4, 2) if min(height, width) // s >= min_short_side), 1)


def _decode_jpeg(content: bytes, path: str | Path, min_short_side: int | None, max_pixels: int) -> RGB | None:
    """A plain JPEG by simplejpeg, which is several times faster and gives the same bits; None to let Pillow do it.

    Pillow also judges what simplejpeg is not sure of: stray bytes are harmless, a missing end is not.
    """
    if not content.startswith(b"\xff\xd8\xff"):
        return None
    try:
        import simplejpeg
    except ImportError:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError:
        return None
    if colours not in ("YCbCr", "Gray", "RGB"):
        return None
    check_size(path, height, width, max_pixels)
    scale = _jpeg_scale(height, width, min_short_side)
    try:
        pixels = simplejpeg.decode_jpeg(content, min_height=-(-height // scale), min_width=-(-width // scale))
    except ValueError:
        return None
    # Pillow takes longer to open a file than a small one takes to decode, so it is asked only where need be.
    if _may_be_turned(content):
        return _turn(pixels, _orientation(_open(path, io.BytesIO(content), max_pixels)))
    return pixels


def _may_be_turned(jpeg: bytes) -> bool:
    """Whether a block before the picture may say how to hold it; True as well where the blocks are not understood."""
    at = 2
    while jpeg[at : at + 1] == b"\xff" and jpeg[at + 1 : at + 2] != b"\xda":  # a block; the picture follows the last
        at += 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
    return jpeg[at : at + 2] != b"\xff\xda" or any(sign in jpeg[:at] for sign in (b"Exif", b"tiff:Orientation"))


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1..8. A broken EXIF block costs the orientation, not the image, as in every viewer."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except _BROKEN:
        return 1
    return value if value in range(1, 9) else 1


def _turn(pixels: RGB, orientation: int) -> RGB:
    """Set pixels upright: 2 to 4 mirror or turn by 180 degrees, 5 to 8 also swap rows with columns."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def _to_rgb(path: str | Path, image: Image.Image) -> RGB:
    """The pixels of a loaded image, upright, copied no more often than need be."""
    if _orientation(image) > 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        return grey_to_rgb(_scale_deep(path, np.asarray(image)))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        see_through = image.convert("LA").convert("RGBA") if image.mode == "La" else image.convert("RGBA")
        on_black = Image.new("RGB", image.size)
        on_black.paste(see_through, mask=see_through.getchannel("A"))
        return np.asarray(on_black)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _scale_deep(path: str | Path, values: npt.NDArray[np.generic]) -> RGB:
    """Grey of 16 bits (65535 is white) or floats (1.0 is white) to 8 bits. Pillow alone would clip at 255."""
    low, high = float(values.min()), float(values.max())
    white = 1.0 if values.dtype.kind == "f" else 65535.0
    if not (low >= 0 and high <= white):
        raise UnreadableImage(
            path,
            f"its pixels go from {low:g} to {high:g}, where 0 should be black and {white:g} white. "
            "Save it with 8 or 16 bits a channel",
        )
    return np.rint(values.astype(np.float64) * (255.0 / white)).astype(np.uint8)


def grey_to_rgb(grey: npt.NDArray[np.uint8]) -> RGB:
    """[H, W] to [H, W, 3]."""
    return np.repeat(grey[:, :, None], 3, axis=2)


def _reason(error: BaseException) -> str:
    """What went wrong, in words for the person who has the file."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image in a format that is known here, whatever its name says"
    text = str(error) or type(error).__name__
    return f"the file is broken or cut off ({text})"


# DICOM files as a viewer shows them: rescaled, windowed, and with MONOCHROME1 turned the right way round.


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


Pixels = npt.NDArray[np.uint8]

# A large JPEG is shrunk while it is decoded, to no less than twice the size wanted, and then properly. Pillow's
# thumbnails do the same; the result differs from one proper step over the whole image by about one level of 255 in
# the root mean square, for a fraction of the time.
_GAP = 2


def read_resized(image: str | Path | bytes, short_side: int, max_pixels: int = MAX_PIXELS) -> Pixels:
    """An image file, or the content of one, as RGB, uint8 [H, W, 3], upright, with the given short side."""
    large_enough = _GAP * short_side
    if isinstance(image, bytes):
        name: str | Path = "image"
        pixels = decode_image(image, name, min_short_side=large_enough, max_pixels=max_pixels)
    else:
        name, pixels = image, read_image(image, min_short_side=large_enough, max_pixels=max_pixels)
    return to_short_side(pixels, short_side, name, max_pixels)


def to_short_side(pixels: Pixels, short_side: int, path: str | Path = "image", max_pixels: int = MAX_PIXELS) -> Pixels:
    """Pixels [H, W, 3] with the given short side; ``path`` names them in the error for what is too long and thin."""
    height, width = resized_shape(pixels.shape[0], pixels.shape[1], short_side)
    if height * width > max_pixels:
        was = f"{pixels.shape[1]} x {pixels.shape[0]}"
        raise UnreadableImage(path, f"{was} pixels is too long and thin to have a short side of {short_side}")
    return resize(pixels, height, width)


def resized_shape(height: int, width: int, short_side: int) -> tuple[int, int]:
    """Height and width with the short side as given and the shape kept, to the nearest pixel.

    >>> resized_shape(450, 600, 256)
    (256, 341)
    """
    scale = short_side / min(height, width)
    return round(height * scale), round(width * scale)


def resize(pixels: Pixels, height: int, width: int) -> Pixels:
    """Bicubic and antialiased, [H, W, 3] to [height, width, 3].

    torch gives the levels of Pillow to within one, four times as fast. Where torch is not loaded, a model in another
    engine shall not need it for this alone: the same bits come from sparse products, several times as slowly.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    return _resize_by_torch(pixels, height, width) if "torch" in sys.modules else resize_plainly(pixels, height, width)


def _resize_by_torch(pixels: Pixels, height: int, width: int) -> Pixels:
    import torch
    import torch.nn.functional as F

    planes = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)[None]
    resized = F.interpolate(planes, size=(height, width), mode="bicubic", antialias=True)
    return resized[0].permute(1, 2, 0).contiguous().numpy()


def resize_plainly(pixels: Pixels, height: int, width: int) -> Pixels:
    """What torch computes, bit for bit: along the width, then along the height, in whole numbers of 16 bits."""
    turned = _resize_lines(np.ascontiguousarray(pixels.transpose(1, 0, 2)), width)
    return _resize_lines(np.ascontiguousarray(turned.transpose(1, 0, 2)), height)


def _resize_lines(lines: Pixels, count: int) -> Pixels:
    """[n, ...] to [count, ...], each output the weighted sum of the inputs around its place."""
    if len(lines) == count:
        return lines
    from scipy import sparse

    first, weights = _weights(len(lines), count)
    # Weights as whole numbers: as many bits after the point as leave the largest within 15 bits.
    bits = next(b for b in range(22, 0, -1) if int(0.5 + weights.max() * 2**b) < 2**15)
    whole = np.trunc(weights * 2**bits + np.where(weights < 0, -0.5, 0.5)).astype(np.int32)
    row, tap = np.nonzero(whole)
    matrix = sparse.csr_array((whole[row, tap], (row, first[row] + tap)), shape=(count, len(lines)))
    sums = matrix @ lines.reshape(len(lines), -1).astype(np.int32)
    sums += 1 << (bits - 1)
    return np.clip(sums >> bits, 0, 255).astype(np.uint8).reshape(count, *lines.shape[1:])


def _weights(old: int, new: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Where the inputs of each output begin, [new], and their weights, [new, taps], rows summing to one: the cubic of
    Keys (a = -1/2) around the output's centre, stretched where the image gets smaller, cut off at the edges."""
    scale = old / new
    stretch = max(scale, 1.0)
    centre = scale * (np.arange(new) + 0.5)
    first = np.maximum((centre - 2 * stretch + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + 2 * stretch + 0.5).astype(np.int64), old)
    place = first[:, None] + np.arange(2 * math.ceil(2 * stretch) + 1)
    x = np.abs(place - centre[:, None] + 0.5) / stretch
    near, far = (1.5 * x - 2.5) * x * x + 1, -0.5 * (((x - 5) * x + 8) * x - 4)
    weights = np.where((place < last[:, None]) & (x < 2), np.where(x < 1, near, far), 0.0)
    return first, weights / weights.sum(axis=1, keepdims=True)
