"""WebDataset tar files: samples, labels, splits, and what hostile or damaged archives must not do."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from layouts import draw
from PIL import Image

from cclnet.data import archives
from cclnet.data.archives import ArchivedImages, reference_of, tar_members
from cclnet.data.audit import audit, describe
from cclnet.data.cache import decode, decode_readable
from cclnet.data.image_io import UnreadableImage, image_size, read_image
from cclnet.data.sources import open_data
from cclnet.errors import InputError


def png(seed: int, size: tuple[int, int] = (12, 16)) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def write_tar(path: Path, members: Mapping[str, bytes], kind: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def samples(first: int, count: int) -> dict[str, bytes]:
    return {
        f"{i:04d}.{suffix}": content
        for i in range(first, first + count)
        for suffix, content in (("png", png(i)), ("cls", b"%d\n" % (i % 3)))
    }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_tar(tmp_path / "set" / "train-0000.tar", samples(0, 12))
    write_tar(tmp_path / "set" / "train-0001.tar", samples(12, 12))
    write_tar(tmp_path / "set" / "val-0000.tar", samples(24, 12))
    return tmp_path / "set"


def test_images_labels_and_splits(data: Path) -> None:
    table = open_data(data)
    assert table.source == "WebDataset" and len(table) == 36
    assert table.classes == ("0", "1", "2") and table.labels.tolist() == [i % 3 for i in range(36)]
    assert table.splits is not None and table.splits.tolist() == ["train"] * 24 + ["val"] * 12
    assert isinstance(table.images, ArchivedImages) and table.images[3].name == "0003.png"
    for row in (0, 13, 35):
        expected = np.asarray(Image.open(io.BytesIO(png(row))))
        np.testing.assert_array_equal(read_image(table.images[row]), expected)
        assert image_size(table.images[row]) == (12, 16)
    some = table.select(np.array([30, 2]))
    assert some.names == ["0030.png", "0002.png"] and isinstance(some.images, ArchivedImages)
    assert [path.name for path in some.images[:1]] == ["0030.png"]


def test_the_other_stages_take_it_as_any_data(data: Path, tmp_path: Path) -> None:
    table = open_data(data)
    images = decode(table, 12, tmp_path / "cache", workers=2, progress=False)
    for row in (0, 20):
        np.testing.assert_array_equal(images.image(row), read_image(table.images[row]))
    assert describe(table).sizes == {(12, 16): 36}
    assert audit(table, short_side=12, cache_dir=tmp_path / "cache", progress=False).images == 36


def test_class_names_groups_and_splits_of_samples(tmp_path: Path) -> None:
    described: dict[str, bytes] = {}
    for i in range(8):
        told = {"label": i % 2, "patient_id": f"p{i // 4}", "split": "train" if i < 4 else "test"}
        described |= {f"a/{i}.jpg": png(i), f"a/{i}.json": json.dumps(told).encode()}
    write_tar(tmp_path / "all.tar", described)
    (tmp_path / "classes.txt").write_text("nevus\nmelanoma\n")
    table = open_data(tmp_path / "all.tar")
    assert table.classes == ("nevus", "melanoma") and table.names[0] == "a/0.jpg"
    assert table.groups is not None and set(table.groups) == {"p0", "p1"}
    assert table.splits is not None and table.splits.tolist() == ["train"] * 4 + ["test"] * 4


def test_folders_in_a_tar_file_are_classes_where_no_sample_has_a_label(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", {f"{label}/{i}.png": png(i) for label in ("cat", "dog") for i in range(3)})
    table = open_data(tmp_path)
    assert table.classes == ("cat", "dog") and len(table) == 6


def test_same_names_in_two_files_are_told_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_tar(tmp_path / f"{name}.tar", samples(0, 3))
    assert open_data(tmp_path).names[::3] == ["one/0000.png", "two/0000.png"]


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    members = {**samples(0, 6), "alone.png": png(1), "image_gone.cls": b"1", "../out.png": png(2), "/etc/x.png": png(3)}
    table = open_data(write_tar(tmp_path / "x.tar", members))
    assert len(table) == 6
    problems = " ".join(table.problems)
    assert "without a label: 1 (alone.png)" in problems and "without an image: 1 (image_gone)" in problems
    assert "lead out of the tar file: 2" in problems
    with pytest.raises(InputError, match="strict"):
        open_data(tmp_path / "x.tar", strict=True)


def test_text_that_is_no_text_is_refused(data: Path, tmp_path: Path) -> None:
    surrogate = {"label": 1, "patient_id": "\udc00"}
    members = {**samples(0, 6), "6.png": png(6), "6.json": json.dumps(surrogate).encode()}
    with pytest.raises(InputError, match=r"6\.json cannot be read: .*surrogate"):
        open_data(write_tar(tmp_path / "x.tar", members))
    (data / "classes.txt").write_bytes(b"caf\xe9\nbar\n")
    with pytest.raises(InputError, match=r"classes\.txt cannot be read: .*utf-8"):
        open_data(data)
    (data / "classes.txt").unlink()
    (data / "classes.txt").symlink_to("/dev/zero")
    with pytest.raises(InputError, match=r"classes\.txt cannot be read: .*device"):
        open_data(data)


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_of_tarfile(tmp_path: Path, kind: int) -> None:
    long = "/".join(["a" * 40] * (2 if kind == tarfile.USTAR_FORMAT else 5))
    path = write_tar(tmp_path / "x.tar", {"1.png": png(1), f"{long}/2.png": png(2), "3.cls": b"0", "empty": b""}, kind)
    with tarfile.open(path, "a", format=kind) as tar:
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(link), tar.addfile(folder)
    with tarfile.open(path) as tar:
        expected = [(m.name, m.offset_data, m.size) for m in tar if m.isreg()]
    assert [tuple(vars(member).values()) for member in tar_members(path)] == expected


@pytest.mark.parametrize("cut", [100, 700, 5000])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    path = write_tar(tmp_path / "x.tar", {"1.png": b"x" * 9000})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InputError, match=r"truncated|damaged"):
        list(tar_members(path))


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    import gzip

    path = write_tar(tmp_path / "x.tar", samples(0, 3))
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(InputError, match="gunzip"):
        open_data(path)


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "x.tar", samples(0, 6))
    monkeypatch.setattr(archives, "MAX_MEMBERS", 5)
    with pytest.raises(InputError, match="more than 5 members"):
        open_data(path)
    monkeypatch.undo()
    write_tar(path, {"1.png": png(1), "1.json": b" " * 2**21})
    with pytest.raises(InputError, match=r"1\.json has 2,097,152 bytes"):
        open_data(path)
    write_tar(path, {"1.png": png(1), "1.json": b"[" * 100_000})
    with pytest.raises(InputError, match=r"1\.json cannot be read"):
        open_data(path)
    header = bytearray(write_tar(path, {"a" * 200: b""}, tarfile.PAX_FORMAT).read_bytes())
    header[124:136] = b"%011o\0" % 2**30  # the size of the extended header
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    path.write_bytes(header)
    with pytest.raises(InputError, match="extended header of 1,073,741,824 bytes"):
        list(tar_members(path))


def test_positions_outside_of_the_file_are_not_read(data: Path, tmp_path: Path) -> None:
    tar = data / "train-0000.tar"
    size = tar.stat().st_size
    for where in (f"@{size}+10", f"@0+{size + 1}", f"@0+{2**40}"):
        with pytest.raises(UnreadableImage, match=r"ends before it|at most"):
            read_image(Path(f"{tar}/{where}/x.png"))
    assert reference_of("x.tar/@1+2") is None and reference_of("x.tar/0/x.png") is None
    draw(tmp_path / "odd.tar" / "@1+2" / "x.png")  # a folder that is named like this is a folder
    assert read_image(tmp_path / "odd.tar" / "@1+2" / "x.png").shape == (12, 16, 3)


def test_a_tar_file_that_changes_is_decoded_again_and_one_that_goes_is_named(data: Path, tmp_path: Path) -> None:
    table = open_data(data)
    decode(table, 12, tmp_path / "cache", workers=1, progress=False)
    (data / "val-0000.tar").unlink()
    broken = decode_readable(table, 12, tmp_path / "cache", workers=1, progress=False)[1]
    assert sorted(broken) == list(range(24, 36))
