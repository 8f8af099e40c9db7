"""Images inside tar and Parquet files, read in place: nothing is extracted.

An image in an archive is named by a path below the archive:

    train-0001.tar/@5120+20480/a/17.jpg       20,480 bytes from byte 5,120 of an uncompressed tar file
    train-0001.parquet/@17/a/17.jpg           row 17 of a Parquet file

No file has such a path, because an archive is not a folder. The first part behind the archive says where the bytes are;
the rest is the name of the image, which is shown and whose suffix tells the format, and is never opened.

Archives are untrusted input. Headers, names and images have limits, and no position outside of the file is read.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
import numpy.typing as npt

from cclnet.errors import InputError, first_line

MAX_IMAGE_BYTES = 6 * 200_000_000 + 2**26  # of an image, as a file or in an archive: 200 megapixels at 16 bits
MAX_NAME = 4096  # bytes of a name in a tar file
MAX_MEMBERS = 50_000_000  # of one tar file
_ROWS_AT_ONCE = 16  # of a row group
MAX_EQUAL_CELLS = 2**22  # values of a Parquet file with over 20 of them in each of its bytes
MAX_EQUAL_TEXT = 2**26  # bytes of text of a Parquet file of less than a hundredth of that
MAX_ROW_GROUP = 2**30  # bytes of the images of one row group of a Parquet file, which are read at once
_EXTENDED = 2**20  # bytes of an extended header of a tar file
_BLOCK = 512
_REFERENCE = re.compile(r"(?s)(.*\.(?:tar|parquet|pq))/@(\d{1,15})(?:\+(\d{1,15}))?/.*", re.IGNORECASE)


@dataclass(frozen=True)
class Reference:
    """Where an image in an archive is: bytes of a tar file, or a row of a Parquet file (``size`` None)."""

    archive: str
    start: int
    size: int | None


def reference_of(path: str | Path) -> Reference | None:
    """Return where the image of a path is, if the path leads into an archive.

    >>> reference_of("set/train-0.tar/@512+100/a/1.jpg")
    Reference(archive='set/train-0.tar', start=512, size=100)
    """
    found = _REFERENCE.fullmatch(os.fspath(path))
    return None if found is None else Reference(found[1], int(found[2]), None if found[3] is None else int(found[3]))


class ArchivedImages(Sequence[Path]):
    """The paths of images in archives. A path is made when it is asked for: a million of them would take 300 MB."""

    def __init__(
        self,
        archives: Sequence[str],
        archive: npt.NDArray[np.int32],  # index of the archive of each image, [N]
        start: npt.NDArray[np.int64],  # [N]
        size: npt.NDArray[np.int64] | None,  # [N]; None for rows of Parquet files
        names: Sequence[str],
    ) -> None:
        self.archives, self.archive, self.start, self.size, self.names = archives, archive, start, size, names

    def __len__(self) -> int:
        return len(self.archive)

    def text(self, row: int) -> str:
        """Return one path as text."""
        size = "" if self.size is None else f"+{self.size[row]}"
        return f"{self.archives[self.archive[row]]}/@{self.start[row]}{size}/{self.names[row]}"

    @overload
    def __getitem__(self, row: int) -> Path: ...
    @overload
    def __getitem__(self, row: slice) -> ArchivedImages: ...
    def __getitem__(self, row: int | slice) -> Path | ArchivedImages:
        return self.select(np.arange(len(self))[row]) if isinstance(row, slice) else Path(self.text(int(row)))

    def select(self, rows: npt.NDArray[np.intp]) -> ArchivedImages:
        size = None if self.size is None else self.size[rows]
        return ArchivedImages(
            self.archives, self.archive[rows], self.start[rows], size, [self.names[i] for i in rows.tolist()]
        )


def read_archived(reference: Reference) -> bytes:
    """Return the content of an image in an archive; an OSError if it cannot be read."""
    if reference.size is None:
        return _read_row(reference)
    if reference.size > MAX_IMAGE_BYTES:
        raise OSError(f"it has {reference.size:,} bytes, at most {MAX_IMAGE_BYTES:,} are read")
    with open(reference.archive, "rb", buffering=0) as file:  # noqa: PTH123 (pathlib is slow compared with the decoder)
        file.seek(reference.start)
        content = file.read(reference.size)
    if len(content) < reference.size:
        raise OSError(f"{reference.archive} ends before it")
    return content


@dataclass(frozen=True)
class Member:
    """A regular file in a tar file."""

    name: str
    start: int
    size: int


def tar_members(path: Path) -> Iterator[Member]:
    """Yield the regular files of an uncompressed tar file (ustar, GNU or pax) in order. Folders, links and devices are
    passed over.

    Not with ``tarfile``: that reads extended headers of any size into the memory, keeps every member, and takes ten
    times as long for a million images.
    """
    length = path.stat().st_size
    with path.open("rb", buffering=2**16) as file:
        at, name, size = 0, "", -1  # name and size from an extended header, for the member behind it
        for _ in range(MAX_MEMBERS):
            header = file.read(_BLOCK)
            if not header.strip(b"\0"):
                return  # the end: two blocks of zeros, of which some writers leave one or both out
            own_size = _check_header(path, header, at)
            kind, begin = header[156:157], at + _BLOCK
            if kind in b"Lx":
                name, size = _extended(path, file, kind, own_size, name, size)
            else:
                own_size = own_size if size < 0 else size
                if begin + own_size > length:
                    raise InputError(f"{path} is truncated: the member at byte {at:,} ends behind the file.")
                if kind in b"0\0":
                    yield Member(name or _name_of(header), begin, own_size)
                name, size = "", -1
            at = begin + -(-own_size // _BLOCK) * _BLOCK
            file.seek(at)
    raise InputError(f"{path} has more than {MAX_MEMBERS:,} members. Divide it into several files.")


def _check_header(path: Path, header: bytes, at: int) -> int:
    """Return the size in a header whose checksum is right."""
    try:
        if len(header) == _BLOCK:
            expected = int(header[148:156].strip(b"\0 ") or b"x", 8)
            if sum(header) - sum(header[148:156]) + 8 * 32 == expected:
                field = header[124:136]
                # GNU writes sizes of 8 GiB and more in binary, with the first bit set.
                size = int.from_bytes(field[1:], "big") if field[0] & 128 else int(field.strip(b"\0 ") or b"0", 8)
                if size < 2**62:
                    return size
    except ValueError:
        pass
    compressed = at == 0 and header[:2] in (b"\x1f\x8b", b"BZ", b"\xfd7", b"(\xb5")
    hint = "Unpack it first (gunzip): images are read in place." if compressed else "Is the download complete?"
    raise InputError(f"{path} is not an uncompressed tar file, or damaged at byte {at:,}. {hint}")


def _extended(path: Path, file: BinaryIO, kind: bytes, length: int, name: str, size: int) -> tuple[str, int]:
    """Return the name and size in an extended header, or those from before."""
    if length > _EXTENDED:
        raise InputError(f"{path} has an extended header of {length:,} bytes; at most {_EXTENDED:,} are read.")
    content = file.read(length)
    if kind == b"L":
        return content.rstrip(b"\0").decode("utf-8", "surrogateescape"), size
    while content:
        digits, _, _ = content.partition(b" ")
        record = content[: int(digits)] if digits.isdigit() and len(digits) < 8 else b""
        if not record.endswith(b"\n"):
            raise InputError(f"{path} has a damaged extended header.")
        key, _, value = record[len(digits) + 1 : -1].partition(b"=")
        if key == b"path":
            name = value.decode("utf-8", "surrogateescape")
        elif key == b"size" and value.isdigit() and len(value) < 16:
            size = int(value)
        content = content[len(record) :]
    return name, size


def _name_of(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0" and (prefix := header[345:500].partition(b"\0")[0]):
        name = prefix + b"/" + name
    return name.decode("utf-8", "surrogateescape")


def safe_name(name: str) -> str | None:
    """Return a name in an archive as a relative path; None if it is absolute, leads upwards, or is too long.

    >>> safe_name("./a//1.jpg"), safe_name("../1.jpg"), safe_name("/etc/1.jpg")
    ('a/1.jpg', None, None)
    """
    name = name.replace("\\", "/")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or not parts or len(name) > MAX_NAME or "\0" in name:
        return None
    return "/".join(parts)


def import_pyarrow(path: str | Path) -> Any:
    """Return ``pyarrow`` with its Parquet reader, or say that ``path`` needs it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(f"{path} is a Parquet file, which needs pyarrow: pip install 'cclnet[parquet]'") from error
    return pyarrow


def refuse_bomb(path: Path, columns: Sequence[str]) -> None:
    """Refuse a Parquet file of few bytes whose ``columns`` would take gigabytes of memory as text: equal values take no
    room in it, however many or long they are."""
    pyarrow = import_pyarrow(path)
    from pyarrow import compute

    described, size = pyarrow.parquet.read_metadata(path), path.stat().st_size
    cells = described.num_rows * max(1, len(columns))
    if cells > MAX_EQUAL_CELLS and cells > 20 * size:
        raise InputError(f"{path} is refused: its {size:,} bytes claim to have {cells:,} values.")
    table, texts = pyarrow.parquet.read_table(path, columns=list(columns), read_dictionary=list(columns)), 0
    for column in table.columns:
        if pyarrow.types.is_dictionary(column.type):
            lengths = (compute.binary_length(own.dictionary).take(own.indices) for own in column.chunks)
            texts += sum(compute.sum(own).as_py() or 0 for own in lengths)
    if texts > MAX_EQUAL_TEXT and texts > 100 * size:
        raise InputError(f"{path} is refused: its {size:,} bytes claim to have {texts:,} bytes of text.")


def bytes_column(schema: Any) -> str | None:
    """Return the column of a Parquet schema that has the content of images: binary, or a struct with a binary field
    ``bytes``, as Hugging Face datasets write it. Of several, the first with a usual name."""
    import pyarrow

    def is_binary(kind: Any) -> bool:
        return pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)

    found = [
        field.name
        for field in schema
        if is_binary(field.type)
        or (
            pyarrow.types.is_struct(field.type)
            and any(field.type.field(i).name == "bytes" and is_binary(field.type.field(i).type)
                    for i in range(field.type.num_fields))
        )
    ]  # fmt: skip
    usual = [name for name in ("image", "img", "jpg", "png", "image_bytes", "bytes", "content") if name in found]
    return (usual or found or [None])[0]


@functools.lru_cache(maxsize=4)
def _parquet(path: str, _: tuple[int, int]) -> tuple[Any, npt.NDArray[np.int64], str]:
    """Return an open Parquet file, the first row of each of its row groups and of the end, and the column of images.
    The second argument is size and time of the file, so that a changed one is opened again."""
    file = import_pyarrow(path).parquet.ParquetFile(path)
    groups = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    column = bytes_column(file.schema_arrow)
    if column is None:
        raise OSError("the file has no column of images any more")
    return file, np.concatenate([[0], np.cumsum(groups)]).astype(np.int64), column


@functools.lru_cache(maxsize=1)
def _row_group(path: str, version: tuple[int, int], group: int) -> Any:
    """Return the images of one row group, None if they are too large. One result is kept, because images are read in
    order."""
    file, _, column = _parquet(path, version)
    described = file.metadata.row_group(group)
    size = sum(described.column(i).total_uncompressed_size for i in range(described.num_columns)
               if described.column(i).path_in_schema.split(".")[0] == column)  # fmt: skip
    if size > MAX_ROW_GROUP:
        return None
    batches, size = [], 0
    for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=[column]):
        size += batch.nbytes  # of equal images, the file has one
        if size > MAX_ROW_GROUP:
            return None
        batches.append(batch.column(0))
    return import_pyarrow(path).chunked_array(batches)


def _read_row(reference: Reference) -> bytes:
    try:
        status = os.stat(reference.archive)  # noqa: PTH116
        version = status.st_size, status.st_mtime_ns
        _, starts, _ = _parquet(reference.archive, version)
        group = int(np.searchsorted(starts, reference.start, side="right")) - 1
        if not 0 <= group < len(starts) - 1:
            raise OSError(f"{reference.archive} has no row {reference.start}")
        images = _row_group(reference.archive, version, group)
        if images is None:
            raise OSError(
                f"its row group has too large images: at most {MAX_ROW_GROUP:,} bytes are read. Write smaller ones"
            )
        value = images[reference.start - int(starts[group])].as_py()
    except (OSError, InputError):
        raise
    except Exception as error:  # damaged files make pyarrow fail in any way
        raise OSError(f"{reference.archive} cannot be read as Parquet ({first_line(error)})") from error
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise OSError(f"row {reference.start} of {reference.archive} has no image")
    if len(content) > MAX_IMAGE_BYTES:
        raise OSError(f"it has {len(content):,} bytes, at most {MAX_IMAGE_BYTES:,} are read")
    return content
