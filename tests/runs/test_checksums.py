"""A file that is not the one that was written is refused; a kill between two writes is no fault."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cclnet import InputError
from cclnet.runs import checksums
from cclnet.runs.checksums import (
    FILE_NAME,
    accept_folder,
    check_file,
    checking,
    remove_covered,
    verify_folder,
    write_covered,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_covered(tmp_path / "model.json", "content")
    return tmp_path / "model.json"


def test_the_line_is_that_of_sha256sum(file: Path) -> None:
    expected = hashlib.sha256(b"content").hexdigest()
    assert (file.parent / FILE_NAME).read_text() == f"{expected}  model.json\n"
    if program := shutil.which("sha256sum"):
        assert subprocess.run([program, "--check", "--strict", FILE_NAME], cwd=file.parent).returncode == 0


@pytest.mark.parametrize("size", [0, 1, 2**20 - 1, 2**20, 2**21 + 7])
def test_any_size_is_hashed(tmp_path: Path, size: int) -> None:
    content = bytes(i % 251 for i in range(size))
    (tmp_path / "file").write_bytes(content)
    assert checksums.file_digest(tmp_path / "file") == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("bit", range(0, 56, 5))
def test_every_flipped_bit_is_noticed_until_it_is_accepted(file: Path, bit: int) -> None:
    check_file(file)
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"model\.json is refused.*verify .* --accept"):
        check_file(file)
    assert dict(verify_folder(file.parent)) == {"model.json": "changed"}
    accept_folder(file.parent)
    check_file(file)


def test_what_was_read_is_what_is_checked(file: Path) -> None:
    content = file.read_bytes()
    check_file(file, content)
    with pytest.raises(InputError, match="SHA-256"):
        check_file(file, content[:-1] + bytes([content[-1] ^ 1]))
    file.write_text("replaced after it was read")
    check_file(file, content)


def test_a_fault_comes_before_the_error_that_it_causes(file: Path) -> None:
    file.write_text("damaged")
    with pytest.raises(InputError, match="SHA-256"), checking(file):
        raise KeyError("what a reader says of damaged bytes")


def test_a_file_without_a_line_is_not_covered(file: Path) -> None:
    other = file.with_name("notes.txt")
    other.write_text("mine")
    check_file(other)
    check_file(file.with_name("nothing"))
    remove_covered(file)
    assert dict(verify_folder(file.parent)) == {"notes.txt": "not covered"}
    assert not (file.parent / FILE_NAME).exists()


def test_a_file_that_is_gone_is_missing(file: Path) -> None:
    file.unlink()
    assert dict(verify_folder(file.parent)) == {"model.json": "missing"}
    accept_folder(file.parent)
    assert dict(verify_folder(file.parent)) == {}


def test_a_file_that_is_gone_is_not_read_as_if_there_never_was_one(file: Path) -> None:
    assert checksums.is_there(file) and not checksums.is_there(file.with_name("calibration.json"))
    file.unlink()
    for check in (check_file, checksums.is_there):
        with pytest.raises(InputError, match=r"model\.json is missing.*verify .* --accept"):
            check(file)
    accept_folder(file.parent)
    assert not checksums.is_there(file)


def test_what_is_no_file_is_refused_without_being_read(file: Path) -> None:
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)):
        odd = file.with_name("odd")
        make(odd)
        with pytest.raises(InputError, match=r"odd (is refused|cannot be read)"):
            check_file(odd)
        with pytest.raises(InputError, match=r"odd (is refused|cannot be read)"), checking(odd):
            odd.read_bytes()
        if odd.is_dir():
            odd.rmdir()
        else:
            odd.unlink()


def test_a_sparse_file_is_not_hashed(file: Path) -> None:
    with file.open("wb") as sparse:
        sparse.truncate(2**40)
    assert dict(verify_folder(file.parent)) == {"model.json": "changed"}
    for use in (lambda: check_file(file), lambda: accept_folder(file.parent)):
        with pytest.raises(InputError, match="bytes; at most"):
            use()


def test_lost_or_contradicting_checksums_are_refused(file: Path) -> None:
    sums = file.with_name(FILE_NAME)
    whole = sums.read_text()
    sums.write_text(whole + whole)  # the same line twice
    check_file(file)
    sums.write_text(whole + f"{'0' * 64}  model.json\n")
    with pytest.raises(InputError, match=r"line 2 is another checksum of 'model\.json'"):
        check_file(file)
    sums.write_text("")
    with pytest.raises(InputError, match="is empty"):
        check_file(file)
    sums.unlink()
    sums.symlink_to("nowhere")
    with pytest.raises(InputError, match="cannot be read"):
        check_file(file)
    sums.unlink()
    os.mkfifo(sums)
    with pytest.raises(InputError, match="a pipe"):
        check_file(file)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", range(4))
@pytest.mark.parametrize("replaced", [True, False])
def test_a_kill_at_any_moment_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int, replaced: bool
) -> None:
    """A write renames three files: the announcement, the file, its checksum."""
    path, renamed = tmp_path / "model.json", 0
    if replaced:
        write_covered(path, "old")
    rename = Path.replace

    def killed(own: Path, target: Path) -> Path:
        nonlocal renamed
        if renamed == moment:
            raise Killed
        renamed += 1
        return rename(own, target)

    monkeypatch.setattr(Path, "replace", killed)
    if moment < 3:
        with pytest.raises(Killed):
            write_covered(path, "new")
    else:
        write_covered(path, "new")
    monkeypatch.undo()
    assert renamed == moment
    check_file(path)
    states = dict(verify_folder(tmp_path))
    assert states == ({"model.json": "ok"} if replaced or moment > 1 else {})
    if states:
        assert path.read_text() == ("new" if moment > 1 else "old")
    write_covered(path, "newer")  # and everything goes on
    assert (tmp_path / FILE_NAME).read_text() == f"{hashlib.sha256(b'newer').hexdigest()}  model.json\n"


@pytest.mark.parametrize(
    "text", [b"abc  model.json\n", b"\xff\n", b"0" * 64 + b"  ../model.json\n", b"0" * (2**20 + 1)]
)
def test_a_broken_list_is_named(file: Path, text: bytes) -> None:
    (file.parent / FILE_NAME).write_bytes(text)
    with pytest.raises(InputError, match=FILE_NAME):
        check_file(file)
    accept_folder(file.parent)
    check_file(file)
