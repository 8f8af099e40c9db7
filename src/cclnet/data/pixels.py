"""One image file to RGB pixels, whatever is in it: what a viewer would show, or an error that names the file."""

from __future__ import annotations

import functools
import io
import os
import struct
import threading
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from cclnet.errors import InputError

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
        from cclnet.data.dicom import read_dicom

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
                from cclnet.data.dicom import dicom_size

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
