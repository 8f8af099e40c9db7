"""Files are written whole, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import pytest

from cclnet import InputError
from cclnet.files import make_folder, write_whole


def test_text_bytes_and_functions(tmp_path: Path) -> None:
    def fill(file: BinaryIO) -> None:
        file.write(b"filled")

    for content, expected in (("text ü", "text ü".encode()), (b"bytes", b"bytes"), (fill, b"filled")):
        write_whole(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == expected
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_stood_there_stands_when_writing_fails(tmp_path: Path) -> None:
    def break_off(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    write_whole(tmp_path / "file", "before")
    with pytest.raises(InputError, match="No space left on device"):
        write_whole(tmp_path / "file", break_off)
    assert (tmp_path / "file").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_place_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot write"):
        write_whole(tmp_path / "file" / "below", "text")
    with pytest.raises(InputError, match="cannot be made"):
        make_folder(tmp_path / "file" / "below")


def test_other_errors_pass_through(tmp_path: Path) -> None:
    def fail(file: BinaryIO) -> None:
        raise KeyError("a bug, not a full disk")

    with pytest.raises(KeyError):
        write_whole(tmp_path / "file", fail)
    assert not list(tmp_path.iterdir())
