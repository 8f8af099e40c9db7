"""Read one image file as the RGB pixels that a viewer shows, whatever its format, and resize it to a short side.

Image files are untrusted input. Whatever a small file can make large is checked before it is decoded: width times
height, the size of deflated DICOM data, the number of scans of a JPEG. Conversions work on bands of rows, so that an
image of ``MAX_PIXELS`` takes less than 2 GB. What still takes too much is ended by the limits of the processes that
decode (:mod:`cclnet.data.parallel`).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import math
import os
import stat
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from cclnet.data.archives import MAX_IMAGE_BYTES, read_archived, reference_of
from cclnet.errors import InputError

RGB = npt.NDArray[np.uint8]

MAX_PIXELS = 200_000_000  # larger images are refused by their header: 600 MB as RGB, 14,142 pixels square
MAX_WEBP_PIXELS = 100_000_000  # Pillow takes 20 bytes per pixel for WebP
MAX_SCANS = 100  # of a JPEG: each takes time for the whole image. Encoders write one, or about ten if it is progressive
_HEADER_BYTES = 2**20  # allowed in deflated data before and behind the pixels; parsing more takes seconds
_BAND_PIXELS = 2**22  # converted at a time
_EXPLICIT_VR = b"1.2.840.10008.1.2.1\0"  # the transfer syntax of DICOM elements that are not compressed

# Formats that only store pixels. Others that Pillow reads run an interpreter (EPS) or open other files.
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "DIB", "GIF", "PPM", "JPEG2000", "AVIF")
SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp", ".dib", ".gif", ".ppm", ".pgm",
     ".pbm", ".pnm", ".jp2", ".j2k", ".avif", ".dcm", ".dicom")
)  # fmt: skip
_JPEG = ("JPEG", "MPO")  # MPO: JPEG of a phone, followed by further pictures

# Raised by Pillow's decoders for a broken file. Any other exception is a bug here and is not caught.
_PILLOW_ERRORS = (OSError, SyntaxError, ValueError, TypeError, EOFError, LookupError, OverflowError, RuntimeError,
                  struct.error, zlib.error, Image.DecompressionBombError)  # fmt: skip
_TOO_MUCH_MEMORY = "decoding it takes more memory than is allowed"
_PILLOW_LIMIT_LOCK = threading.Lock()

# A large JPEG is first reduced while decoding, to no less than twice the target size, as Pillow's thumbnails are. The
# result differs from resizing in one step by about one grey level (RMS), at a fraction of the time.
_REDUCING_GAP = 2


class UnreadableImage(InputError):
    """An image file that cannot be used, with ``path`` and ``reason``, so that many can be listed in one error."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(path, reason)  # both arguments, so that the error can be pickled
        self.path = Path(path)
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot read {self.path}: {self.reason}"


def read_image(image: str | Path | bytes, *, min_short_side: int | None = None, max_pixels: int = MAX_PIXELS) -> RGB:
    """Return an image file, or the content of one, as upright RGB, uint8 [H, W, 3]. The array may be read-only.

    Grey becomes three equal channels; 16 bits are scaled to 8 bits. Transparent pixels become black, which means "no
    signal" in medical images and equals padding. Colour profiles are ignored. Of an animation or multi-page file the
    first image is used. An image larger than ``max_pixels`` by its header is refused. ``min_short_side`` allows a large
    JPEG to be decoded at 1/2, 1/4 or 1/8 of its size while the short side stays at least this long.
    """
    content, path = (image, "image") if isinstance(image, bytes) else (_read_bytes(image), image)
    try:
        return _decode(content, path, min_short_side, max_pixels)
    except MemoryError:
        raise UnreadableImage(path, _TOO_MUCH_MEMORY) from None


def _decode(content: bytes, path: str | Path, min_short_side: int | None, max_pixels: int) -> RGB:
    if _is_dicom(path, content):
        return _read_dicom(path, io.BytesIO(content), max_pixels)
    _check_scans(path, content)
    if (fast := _decode_jpeg(content, path, min_short_side, max_pixels)) is not None:
        return fast
    with _named_errors(path):
        opened = _open(path, io.BytesIO(content), max_pixels)
        if opened.format in _JPEG and (scale := _jpeg_scale(opened.height, opened.width, min_short_side)) > 1:
            opened.draft(None, (opened.width // scale, opened.height // scale))
        opened.load()
        return _to_rgb(path, opened)


def _read_bytes(path: str | Path) -> bytes:
    try:
        with _open_file(path, buffering=0) as file:
            return file.read()
    except OSError as error:
        raise UnreadableImage(path, error.strerror or str(error)) from error


def _open_file(path: str | Path, buffering: int = -1) -> Any:
    """Open a file that may be an image, or an image in an archive. A pipe or a device, from which a program could read
    for ever, is not."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError:  # a path into an archive, which is not a folder
        if (inside := reference_of(path)) is None:
            raise
        return io.BufferedReader(io.BytesIO(read_archived(inside)))
    status, most = os.fstat(descriptor), MAX_IMAGE_BYTES
    if not stat.S_ISREG(status.st_mode) or status.st_size > most:
        os.close(descriptor)
        what = f"it has {status.st_size:,} bytes, at most {most:,} are read"
        raise UnreadableImage(path, what if stat.S_ISREG(status.st_mode) else "it is a directory, a pipe or a device")
    return open(descriptor, "rb", buffering=buffering)  # noqa: PTH123 (pathlib is slow compared with the decoder)


def rgb_of(image: Image.Image) -> RGB:
    """Return the pixels of a Pillow image as :func:`read_image` does."""
    path = getattr(image, "filename", "") or "image"
    with _named_errors(path):
        return _to_rgb(path, image)


def image_size(path: str | Path) -> tuple[int, int]:
    """Return height and width of the upright image, from the header alone."""
    path = Path(path)
    try:
        with _open_file(path) as file:
            if _is_dicom(path, file.peek(132)):
                header = _dicom_header(path, _inflated_dicom(path, file, MAX_PIXELS), MAX_PIXELS)
                return int(header.Rows), int(header.Columns)
            image = _open(path, file, MAX_PIXELS)
            # Pillow rotates TIFF by itself, so its size is already that of the upright image.
            swapped = _orientation(image) >= 5 and image.format != "TIFF"
            return (image.width, image.height) if swapped else (image.height, image.width)
    except OSError as error:
        raise UnreadableImage(path, error.strerror or str(error)) from error


def brightest_16_bit(path: str | Path) -> int | None:
    """Return the largest value of a 16-bit grey image, None for any other image."""
    with _named_errors(path), _open_file(path) as file:
        image = _open(path, file, MAX_PIXELS)
        return int(np.asarray(image).max()) if image.mode.startswith("I;16") else None


@contextlib.contextmanager
def _named_errors(path: str | Path) -> Iterator[None]:
    """Raise what Pillow raises for a broken file as UnreadableImage."""
    try:
        yield
    except (UnreadableImage, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise UnreadableImage(path, "not an image in a supported format, whatever its suffix") from error
    except _PILLOW_ERRORS as error:
        reason = f"the file is broken or truncated ({str(error) or type(error).__name__})"
        raise UnreadableImage(path, reason) from error


def _is_dicom(path: str | Path, start: bytes) -> bool:
    return start[128:132] == b"DICM" or os.fspath(path).lower().endswith((".dcm", ".dicom"))


def _open(path: str | Path, file: BinaryIO, max_pixels: int) -> ImageFile.ImageFile:
    """Open an image by its header and refuse one that is too large. Pillow's own limit is global and warns before it
    refuses, so it is suspended while the header is read."""
    with _PILLOW_LIMIT_LOCK, _named_errors(path):
        pillow_limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            image = Image.open(file, formats=_formats())
        finally:
            Image.MAX_IMAGE_PIXELS = pillow_limit
    _check_size(
        path, image.height, image.width, min(max_pixels, MAX_WEBP_PIXELS) if image.format == "WEBP" else max_pixels
    )
    return image


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(known for known in FORMATS if known in Image.OPEN)  # older versions of Pillow have no AVIF


def _check_size(path: str | Path, height: int, width: int, max_pixels: int) -> None:
    """Refuse an image by the size in its header, before memory for it is allocated."""
    if not 0 < height * width <= max_pixels:
        limit = f", more than the limit of {max_pixels:,} (max_pixels)" if height * width else ""
        raise UnreadableImage(path, f"its header says {width:,} x {height:,} pixels{limit}")


def _check_scans(path: str | Path, content: bytes) -> None:
    """Refuse a JPEG with very many scans. The two bytes that begin a scan do not occur in the compressed data, but may
    in metadata and behind the end, so that segments are only parsed where the bytes are frequent."""
    if content.startswith(b"\xff\xd8") and content.count(b"\xff\xda") > MAX_SCANS:
        scans = sum(marker == 0xDA for marker in _jpeg_markers(content))
        if scans > MAX_SCANS:
            raise UnreadableImage(path, f"a JPEG with {scans:,} scans, more than the limit of {MAX_SCANS}")


def _jpeg_markers(content: bytes) -> Iterator[int]:
    """Yield the markers of a JPEG up to its end, without those inside other segments."""
    at = 2
    while (at := content.find(b"\xff", at)) >= 0 and at + 1 < len(content):
        marker = content[at + 1]
        if marker == 0xD9:
            return
        if marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD8:  # a stuffed byte, a fill byte, or without content
            at += 1 if marker == 0xFF else 2
        else:
            yield marker
            at += 2 + max(2, int.from_bytes(content[at + 2 : at + 4], "big"))


def _jpeg_scale(height: int, width: int, min_short_side: int | None) -> int:
    """Return the largest factor of 8, 4, 2, 1 by which a JPEG can be reduced while decoding."""
    if min_short_side is None:
        return 1
    return next((s for s in (8, 4, 2) if min(height, width) // s >= min_short_side), 1)


def _decode_jpeg(content: bytes, path: str | Path, min_short_side: int | None, max_pixels: int) -> RGB | None:
    """Decode a JPEG with simplejpeg, several times faster with the same bits. None leaves it to Pillow, which also
    handles what simplejpeg rejects: stray bytes are harmless, a truncated file is an error."""
    if not content.startswith(b"\xff\xd8\xff"):
        return None
    try:
        import simplejpeg

        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
    except (ImportError, ValueError):
        return None
    if colours not in ("YCbCr", "Gray", "RGB"):
        return None
    _check_size(path, height, width, max_pixels)
    scale = _jpeg_scale(height, width, min_short_side)
    try:
        pixels = simplejpeg.decode_jpeg(content, min_height=-(-height // scale), min_width=-(-width // scale))
    except ValueError:
        return None
    # Opening a file with Pillow takes longer than decoding a small one, so it is only done where needed.
    if _may_have_orientation(content):
        return _orient(pixels, _orientation(_open(path, io.BytesIO(content), max_pixels)))
    return pixels


def _may_have_orientation(jpeg: bytes) -> bool:
    """Return whether a segment before the image data may hold an orientation; True where they cannot be parsed."""
    at = 2
    while jpeg[at : at + 1] == b"\xff" and jpeg[at + 1 : at + 2] != b"\xda":  # until the start of scan
        at += 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
    return jpeg[at : at + 2] != b"\xff\xda" or any(marker in jpeg[:at] for marker in (b"Exif", b"tiff:Orientation"))


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 where the EXIF block is broken, as viewers do."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except _PILLOW_ERRORS:
        return 1
    return value if value in range(1, 9) else 1


def _orient(pixels: RGB, orientation: int) -> RGB:
    """Return upright pixels: orientations 2 to 4 mirror or rotate by 180 degrees, 5 to 8 also transpose."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def _to_rgb(path: str | Path, image: Image.Image) -> RGB:
    """Return the upright pixels of a loaded image."""
    if _orientation(image) > 1:
        image = ImageOps.exif_transpose(image)
    width, height = image.size
    return _in_bands(height, width, lambda top, end: _band_to_rgb(path, image, top, end))


def _in_bands(height: int, width: int, convert: Callable[[int, int], RGB]) -> RGB:
    """Return RGB [H, W, 3] of ``convert(first row, end row)``; a large image is converted in several bands."""
    rows = max(1, _BAND_PIXELS // width)
    if rows >= height:
        return convert(0, height)
    pixels = np.empty((height, width, 3), np.uint8)
    for top in range(0, height, rows):
        end = min(top + rows, height)
        pixels[top:end] = convert(top, end)
    return pixels


def _band_to_rgb(path: str | Path, whole: Image.Image, top: int, end: int) -> RGB:
    image = whole if (top, end) == (0, whole.height) else whole.crop((0, top, whole.width, end))
    if image.mode.startswith("I") or image.mode == "F":
        return grey_to_rgb(_scale_to_8_bits(path, np.asarray(image)))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        with_alpha = image.convert("LA").convert("RGBA") if image.mode == "La" else image.convert("RGBA")
        on_black = Image.new("RGB", image.size)
        on_black.paste(with_alpha, mask=with_alpha.getchannel("A"))
        return np.asarray(on_black)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _scale_to_8_bits(path: str | Path, values: npt.NDArray[np.generic]) -> RGB:
    """Scale 16-bit grey (65535 is white) or floats (1.0 is white) to 8 bits. Pillow alone would clip at 255."""
    low, high = float(values.min()), float(values.max())
    white = 1.0 if values.dtype.kind == "f" else 65535.0
    if not (low >= 0 and high <= white):
        found, expected = f"its pixels range from {low:g} to {high:g}", f"0 (black) to {white:g} (white)"
        raise UnreadableImage(path, f"{found}, expected {expected}. Save it with 8 or 16 bits per channel")
    return np.rint(values.astype(np.float64) * (255.0 / white)).astype(np.uint8)


def grey_to_rgb(grey: npt.NDArray[np.uint8]) -> RGB:
    """Repeat a grey image [H, W] to [H, W, 3]."""
    return np.repeat(grey[:, :, None], 3, axis=2)


def _read_dicom(path: str | Path, file: BinaryIO, max_pixels: int) -> RGB:
    """Return the image in a DICOM file as a viewer shows it. Grey images pass through the modality LUT or rescale slope
    and intercept, then the first window or, without one, the VOI LUT; without either, the range of the pixels is
    scaled to black and white. MONOCHROME1, where zero is white, is inverted last."""
    file = _inflated_dicom(path, file, max_pixels)
    header = _dicom_header(path, file, max_pixels)
    from pydicom.pixels import apply_color_lut, apply_modality_lut, apply_voi_lut, pixel_array

    try:
        file.seek(0)
        stored = pixel_array(file)
        kind = str(header.PhotometricInterpretation)
        height, width = stored.shape[:2]

        def colour(top: int, end: int) -> RGB:
            if kind != "PALETTE COLOR":
                return _to_uint8(stored[top:end], 0, 2 ** int(header.BitsStored) - 1)
            colours = apply_color_lut(stored[top:end], header)
            return _to_uint8(colours, 0, np.iinfo(colours.dtype).max)

        if kind == "PALETTE COLOR" or stored.ndim == 3:
            return _in_bands(height, width, colour)
        if kind not in ("MONOCHROME1", "MONOCHROME2"):
            raise ValueError(f"photometric interpretation {kind}")
        low, high = _display_range(header, stored)

        def grey(top: int, end: int) -> RGB:
            values = apply_modality_lut(stored[top:end], header)
            shown = _to_uint8(apply_voi_lut(values, header, prefer_lut=False), low, high)
            return grey_to_rgb(255 - shown if kind == "MONOCHROME1" else shown)

        return _in_bands(height, width, grey)
    except _dicom_errors() as error:
        raise UnreadableImage(path, f"its pixel data cannot be decoded ({error})") from error


def _inflated_dicom(path: str | Path, file: BinaryIO, max_pixels: int) -> BinaryIO:
    """Return a DICOM file of which the elements are deflated as one where they are not, and any other as it is.

    pydicom inflates without a limit, to up to a thousand times the size of the file. Here the elements before the
    pixels are inflated first; they say how many bytes the pixels have.
    """
    start = file.read(2**16)
    if (at := _start_of_deflated(start)) is None:
        file.seek(0)
        return file
    file.seek(at)
    plain = start[:132] + b"\2\0\x10\0UI" + struct.pack("<H", len(_EXPLICIT_VR)) + _EXPLICIT_VR
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        plain += inflater.decompress(file.read(), _HEADER_BYTES)
        header = _dicom_header(path, io.BytesIO(plain), max_pixels)
        samples, bits = (int(header.get(key) or most) for key, most in (("SamplesPerPixel", 3), ("BitsAllocated", 16)))
        allowed = int(header.Rows) * int(header.Columns) * min(samples, 4) * min(bits, 64) // 8 + _HEADER_BYTES
        plain += inflater.decompress(inflater.unconsumed_tail, allowed)
    except (zlib.error, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UnreadableImage):
            raise
        raise UnreadableImage(path, f"not a DICOM file, or truncated ({error})") from error
    if inflater.unconsumed_tail:
        size = f"{header.Columns} x {header.Rows}"
        raise UnreadableImage(path, f"its deflated data has more than {allowed:,} bytes for {size} pixels")
    return io.BytesIO(plain)


def _start_of_deflated(start: bytes) -> int | None:
    """Return where the deflated elements of a DICOM file begin, from its first bytes; None if it has none."""
    at, deflated = 132, False
    while start[128:132] == b"DICM" and start[at : at + 2] == b"\2\0":  # the file meta information, never deflated
        tag, kind = start[at : at + 4], start[at + 4 : at + 6]
        long = kind in (b"OB", b"OW", b"UN", b"SQ", b"UT")
        begin = at + (12 if long else 8)
        at = begin + int.from_bytes(start[begin - 4 : begin] if long else start[begin - 2 : begin], "little")
        deflated |= tag == b"\2\0\x10\0" and start[begin:at].rstrip(b"\0 ") == b"1.2.840.10008.1.2.1.99"
    return at if deflated else None


def _dicom_header(path: str | Path, file: BinaryIO, max_pixels: int) -> Any:
    """Read everything but the pixels and check that it describes one image that is not too large."""
    try:
        from pydicom import dcmread
    except ImportError as error:
        raise InputError(f"{path} is a DICOM file, which needs pydicom: pip install 'cclnet[dicom]'") from error
    try:
        header = dcmread(file, stop_before_pixels=True)
        missing = [key for key in ("Rows", "Columns", "PhotometricInterpretation") if not header.get(key)]
        frames = int(header.get("NumberOfFrames") or 1)
        height, width = int(header.get("Rows") or 0), int(header.get("Columns") or 0)
    except _dicom_errors() as error:
        raise UnreadableImage(path, f"not a DICOM file, or truncated ({error})") from error
    if missing:
        raise UnreadableImage(path, f"this DICOM file contains no image (no {', '.join(missing)})")
    if frames > 1:  # the label may belong to any of them
        raise UnreadableImage(path, f"multi-frame DICOM ({frames} frames). Save the labelled frame as its own file")
    _check_size(path, height, width, max_pixels)
    return header


def _dicom_errors() -> tuple[type[Exception], ...]:
    """Return what pydicom and its decoders raise for a file that is damaged or in an unsupported compression."""
    from pydicom.errors import BytesLengthException, InvalidDicomError

    return (InvalidDicomError, BytesLengthException, ValueError, TypeError, RuntimeError, AttributeError, LookupError,
            OSError, EOFError, ArithmeticError, struct.error, zlib.error)  # fmt: skip


def _display_range(header: Any, stored: npt.NDArray[Any]) -> tuple[float, float]:
    """Return the values of black and white after the window or VOI LUT; without either, the range of the values."""
    from pydicom.pixels import apply_modality_lut, apply_windowing

    if header.get("WindowWidth") is not None and header.get("WindowCenter") is not None:
        with np.errstate(over="ignore"):  # the sigmoid of a very low value
            low, high = apply_windowing(np.array([-1e9, 1e9]), header)
        return float(low), float(high)
    if tables := header.get("VOILUTSequence"):
        entries, _, bits = (int(value) for value in tables[0].LUTDescriptor)
        if bits == 8 and not 0 < entries <= 256:
            raise ValueError(f"an 8-bit VOI LUT with {entries or 65536} entries")  # pydicom's index overflows
        return 0.0, 2.0**bits - 1
    rows = max(1, _BAND_PIXELS // stored.shape[1])
    bands = (apply_modality_lut(stored[top : top + rows], header) for top in range(0, len(stored), rows))
    lows, highs = zip(*((float(values.min()), float(values.max())) for values in bands), strict=True)
    return min(lows), max(highs)


def _to_uint8(values: npt.NDArray[Any], low: float, high: float) -> npt.NDArray[np.uint8]:
    share = (values.astype(np.float64) - low) / ((high - low) or 1.0)
    return np.rint(np.clip(share, 0.0, 1.0) * 255).astype(np.uint8)


def read_resized(image: str | Path | bytes, short_side: int, max_pixels: int = MAX_PIXELS) -> RGB:
    """Return an image file, or the content of one, as upright RGB, uint8 [H, W, 3], with the given short side."""
    path = "image" if isinstance(image, bytes) else image
    pixels = read_image(image, min_short_side=_REDUCING_GAP * short_side, max_pixels=max_pixels)
    try:
        return to_short_side(pixels, short_side, path, max_pixels)
    except MemoryError:
        raise UnreadableImage(path, _TOO_MUCH_MEMORY) from None


def to_short_side(pixels: RGB, short_side: int, path: str | Path = "image", max_pixels: int = MAX_PIXELS) -> RGB:
    """Resize pixels [H, W, 3] to the given short side; ``path`` is only used in the error."""
    height, width = resized_shape(pixels.shape[0], pixels.shape[1], short_side)
    if height * width > max_pixels:
        size = f"{pixels.shape[1]} x {pixels.shape[0]}"
        raise UnreadableImage(path, f"{size} pixels is too elongated for a short side of {short_side}")
    return resize(pixels, height, width)


def resized_shape(height: int, width: int, short_side: int) -> tuple[int, int]:
    """Return height and width for the given short side at the same aspect ratio, to the nearest pixel.

    >>> resized_shape(450, 600, 256)
    (256, 341)
    """
    scale = short_side / min(height, width)
    return round(height * scale), round(width * scale)


def resize(pixels: RGB, height: int, width: int) -> RGB:
    """Resize [H, W, 3] to [height, width, 3], bicubic and antialiased: with torch, or where it is not imported (a
    deployed model in another engine) with sparse products, which give the same bits several times slower."""
    if pixels.shape[:2] == (height, width):
        return pixels
    if "torch" not in sys.modules:
        return resize_without_torch(pixels, height, width)
    import torch

    planes = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)[None]
    try:
        resized = torch.nn.functional.interpolate(planes, size=(height, width), mode="bicubic", antialias=True)
    except RuntimeError as error:
        raise (MemoryError() if "allocate memory" in str(error) else error) from None
    return resized[0].permute(1, 2, 0).contiguous().numpy()


def resize_without_torch(pixels: RGB, height: int, width: int) -> RGB:
    """Resize as torch does, bit for bit: along the width, then along the height, with 16-bit integer weights."""
    columns = _resize_lines(pixels.transpose(1, 0, 2), width)
    return np.ascontiguousarray(_resize_lines(columns.transpose(1, 0, 2), height))


def _resize_lines(lines: RGB, count: int) -> RGB:
    """Resize [n, m, 3] to [count, m, 3]; each output line is a weighted sum of input lines. In bands, because the
    integers take four times the memory of the pixels."""
    if len(lines) == count:
        return lines
    from scipy import sparse

    first, weights = _cubic_weights(len(lines), count)
    # Integer weights with as many fractional bits as keep the largest within 15 bits.
    bits = next(b for b in range(22, 0, -1) if int(0.5 + weights.max() * 2**b) < 2**15)
    integers = np.trunc(weights * 2**bits + np.where(weights < 0, -0.5, 0.5)).astype(np.int32)
    row, tap = np.nonzero(integers)
    matrix = sparse.csr_array((integers[row, tap], (row, first[row] + tap)), shape=(count, len(lines)))
    resized = np.empty((count, *lines.shape[1:]), np.uint8)
    size = max(1, _BAND_PIXELS // max(len(lines), count))
    for start in range(0, lines.shape[1], size):
        band = lines[:, start : start + size]
        sums = matrix @ band.reshape(len(lines), -1).astype(np.int32)
        sums += 1 << (bits - 1)
        resized[:, start : start + size] = np.clip(sums >> bits, 0, 255).reshape(count, *band.shape[1:])
    return resized


def data_uri(image: Image.Image, kind: str, **options: int) -> str:
    """Return an image as a data URI, in the format ``kind`` with Pillow's options for it."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def _cubic_weights(old: int, new: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the first input of each output, [new], and the weights, [new, taps], rows summing to one: the Keys cubic
    (a = -1/2) around the output's centre, stretched when shrinking and truncated at the edges."""
    scale = old / new
    stretch = max(scale, 1.0)
    centre = scale * (np.arange(new) + 0.5)
    first = np.maximum((centre - 2 * stretch + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + 2 * stretch + 0.5).astype(np.int64), old)
    index = first[:, None] + np.arange(2 * math.ceil(2 * stretch) + 1)
    x = np.abs(index - centre[:, None] + 0.5) / stretch
    near, far = (1.5 * x - 2.5) * x * x + 1, -0.5 * (((x - 5) * x + 8) * x - 4)
    weights = np.where((index < last[:, None]) & (x < 2), np.where(x < 1, near, far), 0.0)
    return first, weights / weights.sum(axis=1, keepdims=True)
