"""Choosing a source by looking, and saying in the terminal what was found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from layouts import class_folders, draw, isic_split, write_csv

from cclnet.data.sources import SOURCES, open_data
from cclnet.errors import InputError


class TestNothingFits:
    def test_an_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="is an empty folder") as caught:
            open_data(tmp_path)
        for source in SOURCES.values():  # what can be read is listed, all of it
            assert source.title in str(caught.value)

    def test_images_without_labels(self, tmp_path: Path) -> None:
        draw(tmp_path / "images" / "a.png")
        draw(tmp_path / "b.png")
        with pytest.raises(InputError, match=r"contains images \(such as .*\.png\) but no labels"):
            open_data(tmp_path)

    @pytest.mark.parametrize("content", [b"", "größe,bösartig\na.png,x\n".encode("latin-1")])
    def test_a_table_that_is_no_text_is_named(self, tmp_path: Path, content: bytes) -> None:
        draw(tmp_path / "a.png")
        (tmp_path / "labels.csv").write_bytes(content)
        with pytest.raises(InputError, match=r"labels\.csv cannot be read as a table.*UTF-8"):
            open_data(tmp_path)

    def test_columns_of_a_table_without_image_names_are_named(self, tmp_path: Path) -> None:
        draw(tmp_path / "a.png")
        (tmp_path / "labels.csv").write_text("Foto;Befund\n1;x\n2;y\n")
        with pytest.raises(InputError, match=r"labels\.csv: Foto, Befund.*--image-column"):
            open_data(tmp_path)

    def test_neither_images_nor_tables(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("nothing here")
        with pytest.raises(InputError, match="neither images nor a table"):
            open_data(tmp_path)

    def test_a_data_set_one_folder_down_is_pointed_at(self, tmp_path: Path) -> None:
        class_folders(tmp_path / "archive" / "chest", {"train/a": 1, "train/b": 1})
        with pytest.raises(InputError, match=r"but .*archive/chest looks like one \(folder per class\)"):
            open_data(tmp_path / "archive")

    def test_a_file_of_another_kind(self, tmp_path: Path) -> None:
        (tmp_path / "images.zip").write_bytes(b"PK")
        with pytest.raises(InputError, match=r"images\.zip is not a supported table or \.npz"):
            open_data(tmp_path / "images.zip")

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"nowhere does not exist\. Supported layouts:"):
            open_data(tmp_path / "nowhere")


def test_an_unknown_source_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown source 'folder'; did you mean 'folders'\?"):
        open_data(tmp_path, source="folder")


def test_columns_mean_a_manifest_whatever_else_fits(tmp_path: Path) -> None:
    isic_split(tmp_path, "Training", {"ISIC_1": "MEL", "ISIC_2": "NV"})
    rows = [["image", "site"], ["ISIC_1", "arm"], ["ISIC_2", "leg"]]
    path = write_csv(tmp_path / "sites.csv", rows)
    assert open_data(tmp_path).source == "ISIC challenge folder"
    assert open_data(path, label_column="site").classes == ("arm", "leg")


class TestSynthetic:
    def test_by_name_with_settings(self) -> None:
        table = open_data("synthetic:images=40,classes=4,size=16,overlap=much")
        assert len(table) == 40
        assert table.num_classes == 4
        np.testing.assert_array_equal(
            table.images, open_data("synthetic:images=40,classes=4,size=16,overlap=0.2").images
        )

    def test_faults_are_named(self) -> None:
        with pytest.raises(
            InputError, match=r"unknown setting of the synthetic set 'overlp'; did you mean 'overlap'\?"
        ):
            open_data("synthetic:overlp=much")
        with pytest.raises(InputError, match=r"synthetic:size=big: size must be an integer, such as size=\d+"):
            open_data("synthetic:size=big")
        with pytest.raises(InputError, match="size must be an integer"):
            open_data("synthetic:size")

    def test_a_folder_of_that_name_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class_folders(tmp_path / "synthetic", {"a": 1, "b": 1})
        monkeypatch.chdir(tmp_path)
        assert open_data("synthetic").source == "folder per class"


def test_synthetic_sets_take_the_options_that_select(tmp_path: Path) -> None:
    plain = open_data("synthetic:images=70,size=16")
    merge = tmp_path / "merge.csv"
    merge.write_text(f"old,new\n{plain.classes[0]},merged\n{plain.classes[1]},merged\n")
    merged = open_data("synthetic:images=70,size=16", merge_labels=str(merge))
    assert merged.num_classes == plain.num_classes - 1 and "merged" in merged.classes
    kept = open_data("synthetic:images=70,size=16", exclude=f"{plain.names[0]}")
    assert list(kept.names) == list(plain.names[1:])
