"""Two hundred hostile uploads, each with the allowed response statuses."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from PIL import Image
from served import LIMITS, image_bytes

BOUNDARY = "5ca1ab1e"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
UNUSABLE = (422,)


@dataclass(frozen=True)
class Hostile:
    """A request to /predict: ``chunked`` sends the body in pieces, without its length."""

    name: str
    body: bytes
    content_type: str = "application/octet-stream"
    statuses: tuple[int, ...] = UNUSABLE
    headers: dict[str, str] = field(default_factory=dict)
    chunked: bool = False
    query: str = ""


def hostile_uploads() -> list[Hostile]:
    return [*_cut_off(), *_damaged(), *_bombs(), *_other_things(), *_forms(), *_too_large(), *_odd_headers()]


def form(*parts: tuple[str, bytes], end: bool = True) -> bytes:
    """Return a form of parts, each with its headers and its content."""
    body = b"".join(
        b"--%s\r\n%s\r\n\r\n%s\r\n" % (BOUNDARY.encode(), head.encode("latin-1"), content) for head, content in parts
    )
    return body + (b"--%s--\r\n" % BOUNDARY.encode() if end else b"")


def field_named(name: str, filename: str = "a.png") -> str:
    return f'Content-Disposition: form-data; name="{name}"; filename="{filename}"'


def noise(kind: str, **how: object) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **how)  # type: ignore[arg-type]
    return file.getvalue()


def _cut_off() -> Iterator[Hostile]:
    for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM"):
        whole = noise(kind)
        for share in (0.02, 0.1, 0.3, 0.5, 0.7, 0.9):
            yield Hostile(f"{kind} cut off at {share:.0%}", whole[: int(len(whole) * share)])


def _damaged() -> Iterator[Hostile]:
    """Random bytes of the header are changed. A file that is decodable all the same may be answered."""
    chance = random.Random(0)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"):
        whole = noise(kind)
        for trial in range(9):
            broken = bytearray(whole)
            for place in chance.sample(range(min(64, len(whole))), 12):
                broken[place] = chance.randrange(256)
            yield Hostile(f"{kind} damaged, trial {trial}", bytes(broken), statuses=(200, 422))


def _bombs() -> Iterator[Hostile]:
    for width, height in ((100_000, 100_000), (2**31 - 1, 2**31 - 1), (1, 2**31 - 1), (5_000, 5_000)):
        yield Hostile(f"PNG that says {width} x {height}", png(width, height))
    for width, height in ((0, 0), (0, 10), (10, 0)):
        yield Hostile(f"PNG of {width} x {height}", png(width, height))
        yield Hostile(f"GIF of {width} x {height}", gif(width, height))
        yield Hostile(f"BMP of {width} x {height}", bmp(width, height))
        yield Hostile(f"PPM of {width} x {height}", b"P6 %d %d 255\n" % (width, height))
    yield Hostile("GIF of 65535 x 65535", gif(65535, 65535))
    yield Hostile("BMP of 60000 x 60000", bmp(60_000, 60_000))
    yield Hostile("BMP of a negative size", bmp(-5, -(2**31)))
    yield Hostile("PPM of 10^9 x 10^9", b"P6 1000000000 1000000000 255\n")
    yield Hostile("TIFF of 10^9 pixels a side", tiff(10**9, 10**9))
    text_bomb = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**27)))
    yield Hostile("PNG with a bomb in its text", png(4, 4, text_bomb))
    yield Hostile("DICOM with a bomb inside", dicom_bomb(900 * 2**20))
    yield Hostile("sixty thousand wide, one high", image_bytes(size=(60_000, 1)))


def _other_things() -> Iterator[Hostile]:
    chance = random.Random(1)
    things = {
        "nothing": b"", "one byte": b"\0", "text": b"What is this lesion?", "HTML": b"<html><script>alert(1)</script>",
        "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "PDF": b"%PDF-1.7\n", "zip": b"PK\3\4" + bytes(100), "ELF": b"\x7fELF" + bytes(100),
        "gzip": b"\x1f\x8b\x08" + bytes(50),
        "pickle": b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
        "ICO": b"\0\0\1\0\1\0\x10\x10\0\0\1\0\x20\0\x68\4\0\0\x16\0\0\0" + bytes(64),
        "PNG signature alone": b"\x89PNG\r\n\x1a\n",
        "JPEG start alone": b"\xff\xd8\xff", "DICM alone": bytes(128) + b"DICM",
        "RIFF alone": b"RIFF\xff\xff\xff\xffWEBP",
        "zeros": bytes(10_000), "ones": b"\xff" * 10_000,
        "XML bomb": b"<?xml version='1.0'?><!DOCTYPE a [<!ENTITY a '" + b"&b;" * 99,
        "a path": b"/etc/passwd", "an address": b"http://169.254.169.254/latest/meta-data/", "JSON": b'{"image": "x"}',
    }  # fmt: skip
    for name, content in things.items():
        yield Hostile(f"{name} instead of an image", content)
        if name in ("nothing", "text", "pickle", "SVG"):
            yield Hostile(f"{name} in a form", form((field_named("image"), content)), FORM)
    for trial in range(8):
        yield Hostile(f"random bytes, trial {trial}", chance.randbytes(2000))


def _forms() -> Iterator[Hostile]:
    image, good = field_named("image"), image_bytes()
    yield Hostile("a form without fields", form(), FORM, (400, 422))
    yield Hostile("a form that does not end", form((image, good), end=False), FORM, (400,))
    yield Hostile("a form cut off in the image", form((image, good))[:-60], FORM, (400,))
    yield Hostile("a form cut off in a header", form((image, good))[:20], FORM, (400,))
    yield Hostile("a form of another boundary", form((image, good)), "multipart/form-data; boundary=other", (400,))
    yield Hostile("a form without a boundary", form((image, good)), "multipart/form-data", (400,))
    yield Hostile("a form with an empty boundary", form((image, good)), 'multipart/form-data; boundary=""', (400,))
    yield Hostile(
        "a form with a huge boundary", form((image, good)), f"multipart/form-data; boundary={'x' * 5000}", (400,)
    )
    yield Hostile("no form at all", good, FORM, (400,))
    yield Hostile("an empty form", b"", FORM, (400,))
    yield Hostile("another field", form((field_named("photo"), good)), FORM)
    yield Hostile("two images", form((image, good), (image, good)), FORM)
    yield Hostile("many fields", form(*[(field_named(f"f{i}"), b"x") for i in range(500)]), FORM, (400,))
    yield Hostile("many images", form(*[(image, good)] * 100), FORM, (400,))
    yield Hostile("a huge header", form((f"{image}\r\nX-Long: {'x' * 30_000}", good)), FORM, (400, 431))
    yield Hostile("a huge file name", form((field_named("image", "x" * 30_000), good)), FORM, (400, 431))
    yield Hostile(
        "many headers of a field",
        form((image + "".join(f"\r\nX-{i}: {i}" for i in range(900)), good)),
        FORM,
        (400, 431),
    )
    yield Hostile("a header without a colon", form(("Content-Disposition", good)), FORM, (400,))
    yield Hostile("a header with odd signs", form(("Content\0Disposition: form-data", good)), FORM, (400,))
    yield Hostile("a field without a name", form(("Content-Disposition: form-data", good)), FORM, (400, 422))
    yield Hostile("a field without headers", form(("", good)), FORM, (400, 422))
    yield Hostile("half boundaries", b"\r\n--5ca1ab1" * 20_000, FORM, (400,))
    for path in (
        "../../../etc/passwd",
        "/etc/passwd",
        "C:\\windows\\x",
        "a\\..\\b",
        "%2e%2e%2fx",
        "a;rm -rf x",
        "x\t.png",
        "con",
    ):
        yield Hostile(f"the path {path} for a text", form((field_named("image", path), b"not an image")), FORM)
    for kind in (
        "text/plain",
        "application/json",
        "application/x-www-form-urlencoded",
        "text/html",
        "multipart/mixed",
        "",
        "/",
    ):
        yield Hostile(f"the type '{kind}'", good, kind, (415,))


def _too_large() -> Iterator[Hostile]:
    over = bytes(LIMITS.upload_bytes + 1)
    much = bytes(LIMITS.upload_bytes + 100_000)
    yield Hostile("one byte too many", over, statuses=(413,))
    yield Hostile("one byte too many in a form", form((field_named("image"), over)), FORM, (413,))
    yield Hostile("much too long", much, statuses=(413,))
    yield Hostile("much too long, without saying so", much, statuses=(413,), chunked=True)
    yield Hostile(
        "a form much too long, without saying so", form((field_named("image"), much)), FORM, (413,), chunked=True
    )
    yield Hostile("a form of a header that does not end", b"--5ca1ab1e\r\nX: " + much, FORM, (413,), chunked=True)
    yield Hostile("a good image and much behind it", image_bytes() + much, statuses=(413,), chunked=True)


def _odd_headers() -> Iterator[Hostile]:
    good = image_bytes()
    yield Hostile("a compressed body", zlib.compress(good), statuses=(415,), headers={"content-encoding": "gzip"})
    yield Hostile("more headers than a request has", good, statuses=(400, 431), headers={"x-long": "x" * 40_000})
    yield Hostile("many headers", good, statuses=(400, 431), headers={f"x-{i}": "y" * 100 for i in range(300)})
    yield Hostile("an odd type", good, 'image/\xff; q="', (200, 415))
    yield Hostile("an odd question", good, query="?explain=%00", statuses=(422,))
    yield Hostile("a long question", good, query=f"?explain={'1' * 5000}", statuses=(422,))
    yield Hostile("a number as an answer", good, query="?picture=2", statuses=(422,))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, extra: bytes = b"") -> bytes:
    """Return a PNG that claims a size; its pixels are a few zeros."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(bytes(10)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + extra + pixels + chunk(b"IEND", b"")


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0) + b";"


def bmp(width: int, height: int) -> bytes:
    return (
        b"BM"
        + struct.pack("<IHHI", 54, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    )


def tiff(width: int, height: int) -> bytes:
    tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8),
            (278, 4, 1, height), (279, 4, 1, 2**31)]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + bytes(4)


def dicom_bomb(size: int) -> bytes:
    """Return a DICOM file whose deflated content unpacks to ``size`` zeros."""
    syntax = b"1.2.840.10008.1.2.1.99\0\0"[:22]
    meta = b"\2\0\x10\0UI" + struct.pack("<H", len(syntax)) + syntax
    head = b"\2\0\0\0UL\4\0" + struct.pack("<I", len(meta)) + meta
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    block = packer.compress(bytes(2**22)) + packer.flush(zlib.Z_FULL_FLUSH)  # from here on the same bytes again
    return bytes(128) + b"DICM" + head + block * (size // 2**22) + packer.flush()
