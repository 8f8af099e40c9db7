"""Reading one image file: the same picture from every mode and format, and a named error for every broken file."""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import draw
from PIL import Image, ImageOps, features

from cclnet.data import image_io
from cclnet.data.image_io import (
    UnreadableImage,
    brightest_16_bit,
    image_size,
    read_image,
    read_resized,
    resize,
    resize_without_torch,
    rgb_of,
)
from cclnet.errors import InputError


def smooth(height: int = 90, width: int = 130) -> np.ndarray:
    """A picture without symmetry, smooth enough for JPEG."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([255 * x / width, 255 * y / height, 127 + 127 * np.sin(x / 9)], axis=2).astype(np.uint8)


@pytest.fixture
def no_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".webp", ".gif", ".ppm", ".jp2"])
def test_lossless_formats_give_the_pixels_back(tmp_path: Path, suffix: str) -> None:
    pixels = smooth(20, 30) // 64 * 64  # few colours, so that a palette holds them
    path = tmp_path / f"image{suffix}"
    Image.fromarray(pixels).save(path, **({"lossless": True} if suffix == ".webp" else {}))
    read = read_image(path)
    assert read.dtype == np.uint8
    np.testing.assert_array_equal(read, np.asarray(Image.open(path).convert("RGB")))
    if suffix != ".gif":
        np.testing.assert_array_equal(read, pixels)
    assert image_size(path) == (20, 30)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif"])
def test_exif_orientation_is_applied(tmp_path: Path, suffix: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"image{suffix}"
    Image.fromarray(smooth()).save(path, exif=exif)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))
    np.testing.assert_array_equal(read_image(path), upright)
    assert image_size(path) == upright.shape[:2]
    assert upright.shape[:2] == ((130, 90) if orientation >= 5 else (90, 130))


@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("short_side", [None, 11, 12, 22, 23, 45, 46, 90, 500])
def test_both_jpeg_decoders_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, orientation: int, short_side: int | None
) -> None:
    pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "image.jpg"
    Image.fromarray(smooth()).convert(mode).save(path, exif=exif)
    fast = read_image(path, min_short_side=short_side)
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    np.testing.assert_array_equal(read_image(path, min_short_side=short_side), fast)


def jpeg_with(blocks: bytes) -> bytes:
    """A JPEG with blocks put in behind its first two bytes."""
    file = io.BytesIO()
    Image.fromarray(smooth()).save(file, "JPEG")
    return file.getvalue()[:2] + blocks + file.getvalue()[2:]


def block(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def exif_block(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return block(0xE1, exif.tobytes())


XMP = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.parametrize(
    "blocks",
    [
        block(0xFE, b"a comment with the mark of a picture \xff\xda in it") + exif_block(6),
        block(0xE1, XMP),
        b"\xff\xff" + exif_block(6),
        exif_block(6)[:2] + b"\xff\xff",
    ],
    ids=["behind another block", "XMP", "behind filling", "cut off"],
)
def test_orientation_is_found_wherever_pillow_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: bytes
) -> None:
    pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
    path = tmp_path / "image.jpg"
    path.write_bytes(jpeg_with(blocks))

    def outcome() -> object:
        try:
            return read_image(path).tolist()
        except UnreadableImage as error:
            return str(error)

    fast = outcome()
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    assert outcome() == fast
    if isinstance(fast, list):
        assert (len(fast), len(fast[0])) == (130, 90)  # turned


@pytest.mark.parametrize(
    ("asked", "given"), [(10, 12), (12, 12), (13, 24), (24, 24), (25, 48), (48, 48), (49, 96), (500, 96)]
)
def test_a_jpeg_is_shrunk_while_decoding_but_never_too_far(tmp_path: Path, asked: int, given: int) -> None:
    path = tmp_path / "image.jpg"
    Image.fromarray(smooth(96, 128)).save(path, quality=95)
    read = read_image(path, min_short_side=asked)
    assert read.shape == (given, given * 4 // 3, 3)
    small = Image.fromarray(smooth(96, 128)).resize(read.shape[1::-1], Image.Resampling.BOX)
    assert np.abs(read - np.asarray(small, dtype=float)).mean() < 3


def test_the_hint_leaves_other_formats_alone(tmp_path: Path) -> None:
    assert read_image(draw(tmp_path / "a.png", size=(64, 80)), min_short_side=8).shape == (64, 80, 3)


def test_cmyk_jpeg(tmp_path: Path) -> None:
    path = tmp_path / "print.jpg"
    Image.fromarray(smooth()).convert("CMYK").save(path, quality=95)
    assert np.abs(read_image(path).astype(float) - smooth()).mean() < 3
    assert read_image(path, min_short_side=20).shape[:2] == (23, 33)


def test_palette_one_bit_and_grey(tmp_path: Path) -> None:
    pixels = smooth(20, 30) // 128 * 128
    Image.fromarray(pixels).quantize(16).save(tmp_path / "palette.png")
    np.testing.assert_array_equal(read_image(tmp_path / "palette.png"), pixels)
    black_white = np.eye(8, dtype=bool)
    Image.fromarray(black_white).save(tmp_path / "bit.png")
    np.testing.assert_array_equal(read_image(tmp_path / "bit.png")[..., 1], black_white * 255)
    grey = smooth(20, 30)[..., 0]
    Image.fromarray(grey).save(tmp_path / "grey.png")
    np.testing.assert_array_equal(read_image(tmp_path / "grey.png"), np.stack([grey] * 3, axis=2))


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_16_bit_grey_is_scaled_and_not_clipped(tmp_path: Path, suffix: str) -> None:
    values = np.linspace(0, 65535, 256 * 4).astype(np.uint16).reshape(32, 32)
    path = tmp_path / f"deep{suffix}"
    Image.fromarray(values).save(path)
    np.testing.assert_array_equal(read_image(path)[..., 0], np.rint(values / 257))
    assert brightest_16_bit(path) == 65535
    assert brightest_16_bit(draw(tmp_path / f"flat{suffix}")) is None


def test_floats_from_zero_to_one_and_not_beyond(tmp_path: Path) -> None:
    values = np.linspace(0, 1, 20, dtype=np.float32).reshape(4, 5)
    Image.fromarray(values).save(tmp_path / "float.tif")
    np.testing.assert_array_equal(read_image(tmp_path / "float.tif")[..., 2], np.rint(values * 255))
    Image.fromarray(values * 700 - 5).save(tmp_path / "counts.tif")
    with pytest.raises(UnreadableImage, match=r"from -5 to 695, expected 0 \(black\) to 1 \(white\)"):
        read_image(tmp_path / "counts.tif")
    Image.fromarray(np.array([[0, 70000]], dtype=np.int32)).save(tmp_path / "long.tif")
    with pytest.raises(UnreadableImage, match=r"65535 \(white"):
        read_image(tmp_path / "long.tif")


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_pixels_are_laid_on_black(tmp_path: Path, mode: str) -> None:
    image = Image.new(mode, (3, 1), (200, 255) if mode == "LA" else (200, 100, 40, 255))
    image.putalpha(Image.fromarray(np.array([[0, 128, 255]], dtype=np.uint8)))
    image.save(tmp_path / "a.png")
    colour = np.array([200, 200, 200] if mode == "LA" else [200, 100, 40])
    np.testing.assert_allclose(read_image(tmp_path / "a.png")[0], [colour * 0, colour * 128 / 255, colour], atol=1)


def test_a_transparent_palette_colour_becomes_black(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putdata([0, 1])
    image.save(tmp_path / "a.png", transparency=1)
    assert read_image(tmp_path / "a.png").tolist() == [[[10, 20, 30], [0, 0, 0]]]


def test_of_several_pictures_the_first_is_taken(tmp_path: Path) -> None:
    pages = [Image.fromarray(np.full((4, 5, 3), value, dtype=np.uint8)) for value in (10, 200)]
    pages[0].save(tmp_path / "pages.tif", save_all=True, append_images=pages[1:])
    pages[0].save(tmp_path / "phone.jpg", "MPO", save_all=True, append_images=pages[1:])
    for name in ("pages.tif", "phone.jpg"):
        np.testing.assert_array_equal(read_image(tmp_path / name), np.asarray(pages[0]))


def png_header(width: int, height: int) -> bytes:
    """A PNG of some 60 bytes that claims to be as large as one likes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def jpeg_header(width: int, height: int) -> bytes:
    """A real JPEG whose header has been told another size."""
    file = io.BytesIO()
    Image.fromarray(smooth(16, 16)).save(file, "JPEG")
    content = bytearray(file.getvalue())
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(content)


@pytest.mark.filterwarnings("error")  # Pillow's own warning about bombs would be a second voice
@pytest.mark.parametrize("content", [png_header(50_000, 50_000), jpeg_header(50_000, 50_000)], ids=["png", "jpeg"])
def test_a_decompression_bomb_is_refused_by_its_header(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bomb.jpg"
    path.write_bytes(content)
    for read in (read_image, image_size, lambda path: read_image(path, min_short_side=256)):
        with pytest.raises(UnreadableImage, match=r"bomb\.jpg: its header says 50,000 x 50,000 pixels, more than"):
            read(path)


def test_the_limit_of_pixels_is_a_setting_and_pillows_stays_as_it_was(tmp_path: Path) -> None:
    before = Image.MAX_IMAGE_PIXELS
    path = draw(tmp_path / "a.png", size=(10, 10))
    assert read_image(path, max_pixels=100).shape == (10, 10, 3)
    with pytest.raises(UnreadableImage, match="more than the limit of 99"):
        read_image(path, max_pixels=99)
    assert before == Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif", ".bmp"])
def test_a_truncated_file_is_named(tmp_path: Path, suffix: str) -> None:
    path = draw(tmp_path / f"cut off{suffix}", size=(60, 80))
    path.write_bytes(path.read_bytes()[:-1500])
    with pytest.raises(UnreadableImage, match=r"cut off\.\w+: the file is broken or truncated"):
        read_image(path)


def test_a_truncated_jpeg_is_named_without_simplejpeg_too(tmp_path: Path, no_simplejpeg: None) -> None:
    path = draw(tmp_path / "a.jpg", size=(60, 80))
    path.write_bytes(path.read_bytes()[:-1500])
    with pytest.raises(UnreadableImage, match="broken or truncated"):
        read_image(path)


def test_stray_bytes_in_a_jpeg_do_no_harm(tmp_path: Path) -> None:
    path = draw(tmp_path / "a.jpg", size=(60, 80))
    pixels = read_image(path)
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0" + path.read_bytes()[-2:])
    np.testing.assert_array_equal(read_image(path), pixels)


def test_text_an_empty_file_a_folder_and_nothing_are_named(tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("not a picture")
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "folder.jpg").mkdir()
    for name, reason in [
        ("text.jpg", "not an image"), ("empty.jpg", "not an image"), ("folder.jpg", "directory"), ("no.jpg", "No such")
    ]:  # fmt: skip
        for read in (read_image, image_size):
            with pytest.raises(UnreadableImage, match=reason) as caught:
                read(tmp_path / name)
            assert caught.value.path == tmp_path / name
            assert name in str(caught.value)


def test_postscript_is_never_run(tmp_path: Path) -> None:
    Image.fromarray(smooth()).save(tmp_path / "a.eps")
    with pytest.raises(UnreadableImage, match="not an image in a supported format"):
        read_image((tmp_path / "a.eps").rename(tmp_path / "a.png"))


def test_the_error_travels_between_processes() -> None:
    error = UnreadableImage("a/b.jpg", "too odd")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert isinstance(again, InputError)
    assert (str(again), again.path, again.reason) == ("cannot read a/b.jpg: too odd", Path("a/b.jpg"), "too odd")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    suffix=st.sampled_from([".jpg", ".png", ".webp", ".tif", ".gif", ".bmp", ".ppm"]),
    damage=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_damaged_files_give_pixels_or_the_named_error(tmp_path: Path, suffix: str, damage: list) -> None:
    path = draw(tmp_path / f"image{suffix}", size=(24, 24))
    content = bytearray(path.read_bytes())
    for at, value in damage:
        content[at % len(content)] = value
    path.write_bytes(content)
    try:
        read = read_image(path, max_pixels=1_000_000)
    except UnreadableImage as error:
        assert error.path == path
    else:
        assert read.dtype == np.uint8
        assert read.ndim == 3


# Resizing without torch gives the same bits, so that a deployed model sees the pixels it was trained on.

SIDES = st.integers(1, 150)


@settings(max_examples=150, deadline=None)
@given(SIDES, SIDES, SIDES, SIDES, st.integers(0, 2**31), st.booleans())
def test_the_bits_of_torch(height: int, width: int, new_height: int, new_width: int, seed: int, hard: bool) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    if hard:  # black and white, where the cubic overshoots and is cut off
        pixels = np.where(pixels > 127, 255, 0).astype(np.uint8)
    np.testing.assert_array_equal(
        resize_without_torch(pixels, new_height, new_width), resize(pixels, new_height, new_width)
    )


def test_one_colour_stays_that_colour() -> None:
    pixels = np.full((37, 53, 3), (10, 200, 255), np.uint8)
    assert (resize_without_torch(pixels, 20, 90) == (10, 200, 255)).all()


def test_resizing_without_torch_takes_little_memory_beside_the_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The integers of the whole image would take four times as much as its pixels."""
    monkeypatch.setattr(image_io, "_BAND_PIXELS", 2**14)
    pixels = smooth(1200, 1600)
    expected = resize(pixels, 120, 160)
    resize_without_torch(pixels[:40], 10, 30)  # imports
    tracemalloc.start()
    try:
        found = resize_without_torch(pixels, 120, 160)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(found, expected)
    assert peak < pixels.nbytes


WITHOUT_TORCH = """
import sys
import numpy as np
from cclnet.data.image_io import read_resized
np.save(sys.argv[2], read_resized(sys.argv[1], 40))
assert "torch" not in sys.modules
"""


def test_files_are_read_alike_in_a_process_without_torch(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.jpg")
    subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "noise.jpg"), str(tmp_path / "out.npy")], check=True
    )
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), read_resized(tmp_path / "noise.jpg", 40))


def test_the_content_of_a_file_is_as_good_as_the_file(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 200, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.jpg")
    path = tmp_path / "noise.jpg"
    np.testing.assert_array_equal(read_resized(path.read_bytes(), 40), read_resized(path, 40))


def scan_bomb(scans: int, side: int = 64) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    file = io.BytesIO()
    Image.fromarray(smooth(side, side)).save(file, "JPEG", progressive=True)
    whole = file.getvalue()
    last = whole.rindex(b"\xff\xda")
    return whole[:-2] + whole[last:-2] * scans + b"\xff\xd9"


def test_a_jpeg_with_very_many_scans_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bomb.jpg").write_bytes(scan_bomb(5000))
    with pytest.raises(UnreadableImage, match=r"a JPEG with 5,01\d scans"):
        read_image(tmp_path / "bomb.jpg")
    assert read_image(scan_bomb(20)).shape == (64, 64, 3)


def test_scans_are_only_counted_outside_of_metadata_and_before_the_end() -> None:
    file = io.BytesIO()
    Image.fromarray(smooth(64, 64)).save(file, "JPEG", progressive=True, comment=b"\xff\xda" * 9000)
    np.testing.assert_array_equal(read_image(file.getvalue() + b"\xff\xda" * 900), read_image(scan_bomb(0)))


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes in folders")
def test_pipes_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    for name in ("pipe.png", "zero.png"):
        for read in (read_image, image_size, brightest_16_bit):
            with pytest.raises(UnreadableImage, match="a pipe or a device"):
                read(tmp_path / name)


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(UnreadableImage, match="1,099,511,627,776 bytes"):
        read_image(tmp_path / "huge.png")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "I;16", "F"])
def test_bands_give_the_same_pixels(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rgb = Image.fromarray(smooth())
    if mode == "I;16":
        image = Image.fromarray(smooth()[..., 0].astype(np.uint16) * 200)
    else:
        image = Image.fromarray(smooth()[..., 1].astype(np.float32) / 255) if mode == "F" else rgb.convert(mode)
    if mode == "RGBA":
        image.putalpha(Image.fromarray(smooth()[..., 2]))
    whole = rgb_of(image)
    monkeypatch.setattr(image_io, "_BAND_PIXELS", 1000)
    np.testing.assert_array_equal(rgb_of(image), whole)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
def test_flipped_bits_of_avif_are_named() -> None:
    """Its decoder raises RuntimeError, unlike those of other formats."""
    file, causes = io.BytesIO(), set[str]()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (38, 44, 3), dtype=np.uint8)).save(file, "AVIF")
    content = file.getvalue()
    for bit in range(0, 8 * len(content), 97):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            read_image(bytes(damaged))
        except UnreadableImage as error:
            causes.add(type(error.__cause__).__name__)
    assert "RuntimeError" in causes
