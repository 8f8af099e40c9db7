"""A folder per class: names, splits, stray images, and links that lead in circles or away."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

import pytest
from layouts import class_folders, draw

from cclnet.data.sources import open_data
from cclnet.errors import InputError


def test_class_folders(tmp_path: Path) -> None:
    table = open_data(class_folders(tmp_path, {"naevus": 2, "melanoma": 3}))
    assert table.source == "folder per class"
    assert table.classes == ("melanoma", "naevus")
    assert table.class_counts().tolist() == [3, 2]
    assert table.names[0] == "melanoma/0.png"
    assert table.images[0] == tmp_path / "melanoma" / "0.png"
    assert table.groups is None
    assert table.splits is None
    assert table.problems == ()


def test_classes_are_ordered_as_a_person_would(tmp_path: Path) -> None:
    table = open_data(class_folders(tmp_path, {"grade 10": 1, "grade 9": 1, "Grade 1": 1}))
    assert table.classes == ("Grade 1", "grade 9", "grade 10")


def test_splits_above_the_classes(tmp_path: Path) -> None:
    class_folders(tmp_path, {"Training/a": 2, "Training/b": 2, "valid/a": 1, "test/b": 1, "test/c": 1})
    table = open_data(tmp_path)
    assert table.classes == ("a", "b", "c")
    assert table.splits is not None
    assert dict(zip(table.names, table.splits, strict=True)) == {
        "Training/a/0.png": "train",
        "Training/a/1.png": "train",
        "Training/b/0.png": "train",
        "Training/b/1.png": "train",
        "test/b/0.png": "test",
        "test/c/0.png": "test",
        "valid/a/0.png": "val",
    }


def test_deeper_folders_belong_to_their_class(tmp_path: Path) -> None:
    draw(tmp_path / "a" / "patient 1" / "left" / "1.png")
    draw(tmp_path / "b" / "1.png")
    assert open_data(tmp_path).names == ["a/patient 1/left/1.png", "b/1.png"]


def test_non_ascii_names_and_spaces(tmp_path: Path) -> None:
    for label in ("Nävus", "メラノーマ", 'with  spaces [red] & "quotes"'):
        draw(tmp_path / label / "bild nr. ü 1.png")
    table = open_data(tmp_path)
    assert set(table.classes) == {"Nävus", "メラノーマ", 'with  spaces [red] & "quotes"'}
    assert all(path.is_file() for path in table.images)


def test_one_class_in_two_spellings_of_its_accent(tmp_path: Path) -> None:
    for split, form in (("train", "NFC"), ("test", "NFD")):
        class_folders(tmp_path, {f"{split}/{unicodedata.normalize(form, 'Nävus')}": 1, f"{split}/b": 1})
    assert open_data(tmp_path).classes == ("b", "Nävus")


def test_the_folder_one_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(class_folders(tmp_path, {"a": 1, "b": 1}))
    table = open_data(".")
    assert table.names == ["a/0.png", "b/0.png"]
    assert all(path.is_file() for path in table.images)


def test_stray_images_are_counted_and_strict_refuses(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 2, "b": 2})
    draw(tmp_path / "stray.png")
    draw(tmp_path / "masks" / "0.png")
    (tmp_path / "a" / "notes.txt").write_text("not an image")
    table = open_data(tmp_path)
    assert len(table) == 4
    assert table.problems == ("images without a label (in no class folder): 2 (masks/0.png, stray.png)",)
    with pytest.raises(InputError, match=r"stray.png"):
        open_data(tmp_path, strict=True)


def test_a_test_split_without_classes_is_counted(tmp_path: Path) -> None:
    class_folders(tmp_path, {"train/a": 2, "train/b": 2, "test": 3, "extra/c": 1})
    table = open_data(tmp_path)
    assert table.classes == ("a", "b")
    assert table.problems == (
        "images without a label (in no class folder): 4 (extra/c/0.png, test/0.png, test/1.png, test/2.png)",
    )


def test_one_class_only(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"one class only \(a, 2 images\)"):
        open_data(class_folders(tmp_path, {"a": 2}), source="folders")
    with pytest.raises(InputError, match=r"one class folder only \(a\)"):
        open_data(tmp_path)


def test_an_empty_class_folder_is_named(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "c").mkdir()
    table = open_data(tmp_path, strict=True)
    assert table.classes == ("a", "b")
    assert table.problems == ("folders without a file, left out: 1 (c)",)


def test_links_in_circles_end(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "b" / "itself").symlink_to(tmp_path / "b" / "itself")
    (tmp_path / "b" / "c.png").symlink_to("d.png")
    (tmp_path / "b" / "d.png").symlink_to("c.png")
    (tmp_path / "again").symlink_to(tmp_path / "a")
    table = open_data(tmp_path)
    assert table.names == ["a/0.png", "a/1.png", "b/0.png", "b/1.png"]


def test_links_that_lead_out_are_refused_unless_allowed(tmp_path: Path) -> None:
    secret = draw(tmp_path / "elsewhere" / "secret.png")
    root = class_folders(tmp_path / "data", {"a": 2, "b": 2})
    (root / "a" / "link.png").symlink_to(secret)
    (root / "c").symlink_to(secret.parent)
    (root / "a" / "inside.png").symlink_to(root / "b" / "0.png")
    (root / "a" / "notes.txt").symlink_to("/etc/hostname")  # no image: nobody reads it
    with pytest.raises(InputError, match=r"lead out of it: .*data/a/link\.png, .*data/c\. .*--follow-links") as caught:
        open_data(root)
    assert "inside.png" not in str(caught.value)
    assert "notes.txt" not in str(caught.value)
    assert {"a/link.png", "c/secret.png", "a/inside.png"} <= set(open_data(root, follow_links=True).names)


def test_the_data_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    class_folders(tmp_path / "real", {"a": 1, "b": 1})
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert open_data(tmp_path / "link").names == ["a/0.png", "b/0.png"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_called_png_does_not_hang(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 1, "b": 1})
    os.mkfifo(tmp_path / "a" / "pipe.png")
    assert len(open_data(tmp_path)) == 2


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 1, "b": 1, "c": 1})
    (tmp_path / "b").chmod(0)
    with pytest.raises(InputError, match=r"cannot list the folder .*b: Permission denied"):
        open_data(tmp_path)
    (tmp_path / "b").chmod(0o755)


@pytest.mark.skipif(os.name == "nt", reason="names are always text there")
def test_names_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 2, "b": 2})
    folder = os.fsencode(tmp_path)
    os.rename(folder + b"/b/0.png", folder + b"/b/0\xff.png")  # noqa: PTH104
    with pytest.raises(InputError, match=r"1 names are not UTF-8: 'b/0\\udcff\.png'.*--exclude"):
        open_data(tmp_path)
    table = open_data(tmp_path, exclude="b/0?.png")
    assert len(table) == 3
    assert table.problems == (r"images left out by exclude: 1 (b/0\udcff.png)",)  # which files can have
