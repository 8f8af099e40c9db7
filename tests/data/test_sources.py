"""Choosing a source by looking, and saying in the terminal what was found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from layouts import class_folders, draw, isic_part, write_csv
from PIL import Image
from typer.testing import CliRunner

from cclnet.cli import app, main
from cclnet.data.audit import describe
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
    isic_part(tmp_path, "Training", {"ISIC_1": "MEL", "ISIC_2": "NV"})
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


class TestDescribe:
    def test_numbers(self, tmp_path: Path) -> None:
        class_folders(tmp_path, {"train/a": 3, "train/b": 1, "test/a": 1})
        draw(tmp_path / "train" / "a" / "0.png", size=(30, 20))
        description = describe(open_data(tmp_path))
        assert description.class_counts == {"a": 4, "b": 1}
        assert description.split_counts == {"train": {"a": 3, "b": 1}, "test": {"a": 1, "b": 0}}
        assert description.sizes == {(12, 16): 4, (30, 20): 1}
        assert description.groups is None
        assert description.checked == 5

    def test_broken_images_are_listed_at_once(self, tmp_path: Path) -> None:
        class_folders(tmp_path, {"a": 2, "b": 2})
        (tmp_path / "a" / "0.png").write_text("text")
        (tmp_path / "b" / "1.png").write_bytes(b"")
        problem = describe(open_data(tmp_path)).problems[0]
        assert problem.startswith("images that cannot be read: 2 (0.png: not an image")
        assert "1.png: not an image" in problem

    def test_16_bit_files_of_12_bit_values(self, tmp_path: Path) -> None:
        for name, white in (("dark", 4095), ("right", 65535)):
            for label in ("a", "b"):
                path = tmp_path / name / label / "0.png"
                path.parent.mkdir(parents=True)
                Image.fromarray(np.array([[0, white]], dtype=np.uint16)).save(path)
        assert "brightest pixel is 4095 of 65535" in describe(open_data(tmp_path / "dark")).problems[0]
        assert describe(open_data(tmp_path / "right")).problems == ()

    def test_large_sets_are_sampled_evenly(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("cclnet.data.audit.SAMPLE", 3)
        class_folders(tmp_path, {"a": 5, "b": 4})
        description = describe(open_data(tmp_path))
        assert description.checked == 3
        assert "(3 images checked)" in description._sizes()


class TestDataShow:
    def run(self, *arguments: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["data", "show", *map(str, arguments)], env={"COLUMNS": "200"})
        assert result.exit_code == code, result.output
        return result.output

    def test_it_says_what_it_took_and_what_is_in_it(self, tmp_path: Path) -> None:
        isic_part(tmp_path, "Training", {"ISIC_1": "MEL", "ISIC_2": "NV", "ISIC_3": "NV"})
        isic_part(tmp_path, "Test", {"ISIC_4": "NV"})
        draw(tmp_path / "ISIC2018_Task3_Test_Input" / "ISIC_5.jpg")
        write_csv(
            tmp_path / "ISIC2018_Task3_Training_LesionGroupings.csv",
            [["image", "lesion_id"], ["ISIC_2", "L"], ["ISIC_3", "L"]],
        )
        shown = self.run(tmp_path)
        assert "ISIC challenge folder at" in shown
        assert "4 images, 2 classes" in shown
        assert "groups: 3, at most 2 images per group" in shown
        assert "sizes: 16 x 12" in shown
        assert [cell.strip() for cell in row(shown, "NV")] == ["NV", "3", "75.0%", "2", "1"]
        assert "! images without a label: 1 (ISIC2018_Task3_Test_Input/ISIC_5.jpg)" in shown

    def test_options_reach_the_source(self, tmp_path: Path) -> None:
        draw(tmp_path / "pictures" / "a.png")
        draw(tmp_path / "pictures" / "b.png")
        rows = [["photo", "kinds", "who", "when"], ["a.png", "x/y", "P", "train"], ["b.png", "[bold]z", "P", "test"]]
        path = write_csv(tmp_path / "list.csv", rows)
        shown = self.run(
            path, "--image-column", "photo", "--label-column", "kinds", "--group-column", "who",
            "--split-column", "when", "--label-separator", "/", "--image-folder", tmp_path / "pictures", "--strict",
        )  # fmt: skip
        assert "2 images, 3 classes, multi-label" in shown
        assert row(shown, "[bold]z")

    def test_faults_are_errors_of_the_input(self, tmp_path: Path) -> None:
        class_folders(tmp_path, {"a": 1, "b": 1})
        draw(tmp_path / "stray.png")
        assert "stray.png" in self.run(tmp_path)
        result = CliRunner().invoke(app, ["data", "show", str(tmp_path), "--strict"])
        assert isinstance(result.exception, InputError)

    def test_an_error_is_printed_as_it_is_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("sys.argv", ["cclnet", "data", "show", str(tmp_path / "[bold]x")])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2
        assert "[bold]x" in capsys.readouterr().err.replace("\n", "")


def row(shown: str, name: str) -> list[str]:
    """The cells of the table's row that begins with ``name``."""
    line = next(line for line in shown.splitlines() if line.startswith("│") and line[1:].strip().startswith(name))
    return line.strip("│").split("│")
