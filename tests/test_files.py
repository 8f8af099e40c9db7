"""Files are written whole, or not at all."""

from __future__ import annotations

import bz2
from pathlib import Path
from typing import BinaryIO

import pytest

from cclnet import InputError, files
from cclnet.files import make_folder, read_json_bz2, write_json_bz2, write_whole


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
    with pytest.raises(InputError, match=r"No space left on device: the disk mounted at /.* of .* GB free"):
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


def test_compressed_json_comes_back(tmp_path: Path) -> None:
    content = {"matrix": [[0.1, 1e-9], [None, "ü"]]}
    write_json_bz2(tmp_path / "file.json.bz2", content)
    assert read_json_bz2(tmp_path / "file.json.bz2") == content


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"no bzip2", "Invalid data stream"), (bz2.compress(b"{")[:-4], "ended before"), (bz2.compress(b"{"), "Expecting"),
     (bz2.compress(b"\xff\xfe\xff"), "codec"), (b"", "ended before")],
)  # fmt: skip
def test_what_is_no_compressed_json_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "file.json.bz2").write_bytes(content)
    with pytest.raises(InputError, match=rf"file\.json\.bz2 is not JSON .*{problem}.*Remove it"):
        read_json_bz2(tmp_path / "file.json.bz2")


def test_a_small_file_that_unfolds_to_a_large_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_JSON", 1000)
    (tmp_path / "file.json.bz2").write_bytes(bz2.compress(b" " * 1_000_000 + b"1"))
    with pytest.raises(InputError, match="more than 1,000 bytes"):
        read_json_bz2(tmp_path / "file.json.bz2")
    (tmp_path / "file.json.bz2").write_bytes(bz2.compress(b" " * 999 + b"1"))
    assert read_json_bz2(tmp_path / "file.json.bz2") == 1
