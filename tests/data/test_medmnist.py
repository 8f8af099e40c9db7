"""MedMNIST files of every kind, and their download from a server on this machine."""

from __future__ import annotations

import hashlib
import http.server
import random
import sys
import threading
import types
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cclnet.data.audit import describe
from cclnet.data.sources import open_data
from cclnet.errors import InputError

SIZES = {"train": 6, "val": 3, "test": 4}


def arrays(side: int = 28, channels: int = 3, classes: int = 7, multilabel: bool = False) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    made: dict[str, np.ndarray] = {}
    for split, size in SIZES.items():
        shape = (size, side, side, 3) if channels == 3 else (size, side, side)
        made[f"{split}_images"] = generator.integers(0, 256, shape, dtype=np.uint8)
        if multilabel:
            made[f"{split}_labels"] = (
                np.eye(classes, dtype=np.uint8)[np.arange(size) % classes]
                | np.eye(classes, dtype=np.uint8)[(np.arange(size) * 2) % classes]
            )
        else:
            made[f"{split}_labels"] = (np.arange(size) % classes).astype(np.uint8)[:, None]
    return made


def write(path: Path, content: dict[str, Any], compressed: bool = True) -> Path:
    (np.savez_compressed if compressed else np.savez)(path, **content)
    return path


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("name", "side"), [("dermamnist", 28), ("dermamnist_64", 64), ("dermamnist_128", 128)])
def test_all_splits_in_one_array(tmp_path: Path, name: str, side: int, channels: int, compressed: bool) -> None:
    content = arrays(side, channels, classes=7)
    content["test_labels"][0] = 6
    table = open_data(write(tmp_path / f"{name}.npz", content, compressed))
    assert table.source == "MedMNIST"
    assert isinstance(table.images, np.ndarray)
    np.testing.assert_array_equal(table.images, np.concatenate([content[f"{split}_images"] for split in SIZES]))
    np.testing.assert_array_equal(table.labels, np.concatenate([content[f"{split}_labels"][:, 0] for split in SIZES]))
    assert table.labels.dtype == np.int64
    assert table.splits is not None
    assert table.splits.tolist() == ["train"] * 6 + ["val"] * 3 + ["test"] * 4
    assert table.classes == ("AKIEC", "BCC", "BKL", "DF", "MEL", "NV", "VASC")
    assert table.names[5:7] == ["train_000005", "val_000000"]
    assert describe(table).sizes == {(side, side): 13}


def test_several_labels(tmp_path: Path) -> None:
    content = arrays(channels=1, classes=14, multilabel=True)
    table = open_data(write(tmp_path / "chestmnist.npz", content))
    assert table.multilabel
    assert table.labels.dtype == np.uint8
    assert table.classes[:2] == ("atelectasis", "cardiomegaly")
    kept = np.concatenate([content[f"{split}_labels"] for split in SIZES]).any(axis=0)
    assert table.labels.shape == (13, kept.sum())
    assert table.problems[0].startswith(f"classes without an image, left out: {14 - kept.sum()} (")


def test_names_of_an_unknown_set_are_its_numbers(tmp_path: Path) -> None:
    assert open_data(write(tmp_path / "mine.npz", arrays(classes=3))).classes == ("0", "1", "2")
    # Called after a set that has fewer classes: its names are not believed.
    assert open_data(write(tmp_path / "pneumoniamnist.npz", arrays(classes=3))).classes == ("0", "1", "2")


def test_labels_of_one_dimension_and_a_missing_split(tmp_path: Path) -> None:
    content = {"train_images": np.zeros((4, 5, 6), np.uint8), "train_labels": np.array([0, 1, 1, 0])}
    table = open_data(write(tmp_path / "a.npz", content))
    assert table.labels.tolist() == [0, 1, 1, 0]
    assert table.splits is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_images": np.zeros((6, 28, 28, 28), np.uint8)}, r"Volumes \(the 3D sets\) are not supported"),
        ({"train_images": np.zeros((6, 28, 28, 3), np.float32)}, "train_images must be uint8 in C order, got float32"),
        ({"train_images": np.zeros((6, 64, 64, 3), np.uint8)}, r"the same size in all splits.*\(6, 64, 64, 3\)"),
        ({"train_labels": np.zeros((5, 1), np.uint8)}, "6 train_images but 5 train_labels"),
        ({"train_labels": np.array(["a"] * 6)}, "cannot be read as .npz"),
        ({"train_labels": np.full((6, 1), -1)}, "class numbers from 0"),
        ({"train_labels": np.full((6, 1), 0.5)}, "class numbers from 0"),
        ({"train_labels": np.full((6, 1), np.nan)}, "6 labels are not numbers"),
        ({"train_labels": np.array([{}] * 6, dtype=object)}, "cannot be read as .npz: Object arrays cannot be loaded"),
        ({"train_labels": np.zeros((6, 1), np.uint8), "val_labels": np.zeros((3, 1), np.uint8),
          "test_labels": np.zeros((4, 1), np.uint8)}, "one class only"),
    ],
)  # fmt: skip
def test_faults_are_named(tmp_path: Path, change: dict[str, np.ndarray], message: str) -> None:
    path = write(tmp_path / "dermamnist.npz", arrays() | change)
    with pytest.raises(InputError, match=message):
        open_data(path)


def test_labels_of_several_classes_must_be_marks(tmp_path: Path) -> None:
    content = arrays(multilabel=True)
    content["val_labels"] = content["val_labels"] * 2
    with pytest.raises(InputError, match="must be zeros and ones"):
        open_data(write(tmp_path / "a.npz", content))


def test_a_file_without_splits_a_cut_off_one_and_one_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected train_images, .* found x\.npy"):
        open_data(write(tmp_path / "x.npz", {"x": np.zeros(3)}))
    whole = write(tmp_path / "cut.npz", arrays()).read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.npz").write_text("hello")
    for name in ("cut.npz", "text.npz"):
        with pytest.raises(InputError, match=r"cannot be read as \.npz: .*Is the download complete\?"):
            open_data(tmp_path / name)


def test_an_array_that_announces_more_than_it_holds_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w") as archive, archive.open("train_images.npy", "w") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (10**9, 1000, 1000, 3)}
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(InputError, match="3,000,000,000,000,000"):
        open_data(path)


class TestDownload:
    @pytest.fixture
    def package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
        """A stand-in for the medmnist package whose addresses lead to a server on this machine."""
        (tmp_path / "server").mkdir()
        (tmp_path / "home").mkdir()
        content = write(tmp_path / "server" / "dermamnist_64.npz", arrays(64)).read_bytes()
        handler = partial(QuietHandler, directory=str(tmp_path / "server"))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            info = {
                "dermamnist": {
                    "url": "http://127.0.0.1:9/never",
                    "MD5": "0" * 32,
                    "url_64": f"http://127.0.0.1:{server.server_port}/dermamnist_64.npz",
                    "MD5_64": hashlib.md5(content, usedforsecurity=False).hexdigest(),
                },
                "organmnist3d": {"url": "", "MD5": ""},
            }
            module = types.ModuleType("medmnist.info")
            module.INFO, module.DEFAULT_ROOT = info, str(tmp_path / "home")  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, "medmnist", types.ModuleType("medmnist"))
            monkeypatch.setitem(sys.modules, "medmnist.info", module)
            yield info
            server.shutdown()

    def test_downloaded_once_and_checked(self, package: dict[str, Any], tmp_path: Path) -> None:
        table = open_data("medmnist:DermaMNIST_64")
        assert isinstance(table.images, np.ndarray)
        assert table.images.shape == (13, 64, 64, 3)
        assert table.root == tmp_path / "home" / "dermamnist_64.npz"
        (tmp_path / "server" / "dermamnist_64.npz").unlink()
        assert len(open_data("medmnist:dermamnist_64")) == 13

    def test_a_wrong_checksum(self, package: dict[str, Any]) -> None:
        package["dermamnist"]["MD5_64"] = "1" * 32
        with pytest.raises(InputError, match=r"dermamnist_64\.npz has a wrong checksum"):
            open_data("medmnist:dermamnist_64")

    def test_no_network(self, package: dict[str, Any]) -> None:
        with pytest.raises(InputError, match=r"dermamnist\.npz could not be downloaded"):
            open_data("medmnist:dermamnist")

    def test_unknown_names_and_sizes(self, package: dict[str, Any]) -> None:
        with pytest.raises(InputError, match=r"unknown MedMNIST set 'dermanist'; did you mean 'dermamnist'\?"):
            open_data("medmnist:dermanist")
        with pytest.raises(InputError, match="unknown MedMNIST set 'organmnist3d'"):
            open_data("medmnist:organmnist3d")
        with pytest.raises(InputError, match=r"unknown size of dermamnist '65'; did you mean '64'\?"):
            open_data("medmnist:dermamnist_65")

    def test_the_package_is_asked_for_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "medmnist.info", None)
        with pytest.raises(InputError, match=r"pip install 'cclnet\[medmnist\]'"):
            open_data("medmnist:dermamnist")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_a_small_file_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    labels = np.zeros((3000, 1), np.uint8)
    path = write(tmp_path / "bomb.npz", {"train_images": np.zeros((3000, 224, 224), np.uint8), "train_labels": labels})
    with pytest.raises(InputError, match=r"would unpack to 150,5\d\d,\d\d\d, more than 100 times"):
        open_data(path)


def test_labels_that_are_one_value_or_announced_larger_than_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="train_labels is a single value"):
        open_data(write(tmp_path / "single.npz", {**arrays(), "train_labels": np.array(3)}))
    path = write(tmp_path / "announced.npz", {**arrays(), "train_labels": np.zeros((6, 1), np.uint8)}, compressed=False)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"'shape': (6, 1), }       ", b"'shape': (600000000000,)}"))
    assert path.read_bytes() != content
    with pytest.raises(InputError, match=r"cannot be read as \.npz"):
        open_data(path)


@pytest.mark.parametrize("member", ["train_labels", "train_images"])
@pytest.mark.parametrize("shape", ["(6, 10**12)", "(6, 1000000000000)", "(-6,)", "(6, 99999999999999999999)", "(6.5,)"])
def test_an_array_that_announces_too_much_takes_no_memory(tmp_path: Path, member: str, shape: str) -> None:
    path = write(tmp_path / "a.npz", arrays())
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".encode().ljust(117) + b"\n"
    changed = tmp_path / "b.npz"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, b"\x93NUMPY\x01\x00v\x00" + header if name == f"{member}.npy" else content)
    with pytest.raises(InputError, match=r"cannot be read as \.npz|must be|6 train_images but -6"):
        open_data(changed)


def test_a_mutated_archive_is_read_or_refused(tmp_path: Path) -> None:
    content, path, generator = write(tmp_path / "a.npz", arrays()).read_bytes(), tmp_path / "b.npz", random.Random(0)
    places = [content.find(mark) for mark in (b"NUMPY", b"PK\x01\x02", b"PK\x05\x06", b"PK\x03\x04")]
    read: list[int] = []  # images, 0 where the archive was refused
    for _ in range(150):
        mutated = bytearray(content)
        for _ in range(generator.randrange(1, 4)):
            at = min(generator.choice(places) + generator.randrange(120), len(mutated) - 1)
            mutated[at] = generator.randrange(256)
        path.write_bytes(mutated)
        try:
            read.append(len(open_data(path)))
        except InputError:
            read.append(0)
    # All 13 images, or those of the splits whose names are whole.
    assert set(read) <= {0, 6, 7, 13} and 0 < read.count(0) < len(read)
