"""Tables of images: columns by name or by custom, one label or several, and every fault named at once."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from layouts import class_folders, draw, write_csv
from PIL import Image

from cclnet.data.sources import manifest, open_data
from cclnet.errors import InputError

ROWS = [["image", "label", "patient_id", "split", "age"], ["a.png", "x", "P1", "train", 30],
        ["b.png", "y", "P1", "Validation", 40], ["c.png", "x", "", "test", ""]]  # fmt: skip


def images(root: Path, *names: str) -> Path:
    for i, name in enumerate(names):
        draw(root / name, seed=i)
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return images(tmp_path, "a.png", "b.png", "c.png")


def labels(table) -> list[str]:
    return [table.classes[label] for label in table.labels]


def test_one_name_for_different_files_of_one_size_is_no_copy(tmp_path: Path) -> None:
    """Uncompressed images of one shape have one size."""
    for i, place in enumerate(("left", "right")):
        (tmp_path / place).mkdir()
        draw(tmp_path / place / "a.bmp", seed=i)
        draw(tmp_path / place / "b.bmp", seed=7)  # a copy, really
        draw(tmp_path / place / "c.bmp", seed=8)
    rows = [["image", "label"], ["a.bmp", "x"], ["b.bmp", "y"], ["c.bmp", "x"]]
    sizes = {path.stat().st_size for path in tmp_path.glob("*/*.bmp")}
    assert len(sizes) == 1
    with pytest.raises(InputError, match=r"a\.bmp"):
        open_data(write_csv(tmp_path / "m.csv", rows), strict=True)
    assert list(open_data(tmp_path / "m.csv").names) == ["b.bmp", "c.bmp"]


class TestColumns:
    @pytest.mark.parametrize(("suffix", "separator"), [(".csv", ","), (".csv", ";"), (".tsv", "\t"), (".tab", "\t")])
    def test_columns_by_custom(self, folder: Path, suffix: str, separator: str) -> None:
        path = write_csv(folder / f"labels{suffix}", ROWS, separator)
        for given in (path, folder):
            table = open_data(given, strict=True)
            assert table.source == "manifest"
            assert table.root == folder
            assert table.names == ["a.png", "b.png", "c.png"]
            assert labels(table) == ["x", "y", "x"]
            assert table.groups is not None
            assert table.groups.tolist() == ["P1", "P1", "alone: c.png"]
            assert table.splits is not None
            assert table.splits.tolist() == ["train", "val", "test"]
            assert table.extra["age"].tolist() == ["30", "40", ""]

    def test_columns_by_name(self, folder: Path) -> None:
        rows = [["who", "what", "file name", "when"], ["Q", "x", "a.png", "train"], ["Q", "y", "b.png", "dev"]]
        path = write_csv(folder / "labels.csv", rows)
        table = open_data(path, image_column="file name", label_column="what", group_column="who", split_column="when")
        assert labels(table) == ["x", "y"]
        assert table.groups is not None
        assert table.groups.tolist() == ["Q", "Q"]
        assert table.splits is not None
        assert table.splits.tolist() == ["train", "val"]

    def test_names_of_columns_as_people_write_them(self, folder: Path) -> None:
        rows = [
            ["Image Index", "Finding Labels", "Follow-up #", "Patient ID"],
            ["a.png", "Hernia", 0, 1],
            ["b.png", "Mass", 1, 1],
        ]
        table = open_data(write_csv(folder / "Data_Entry.csv", rows))
        assert table.classes == ("Hernia", "Mass")
        assert table.groups is not None
        assert table.groups.tolist() == ["1", "1"]

    def test_the_patient_is_the_wider_group(self, folder: Path) -> None:
        rows = [["image", "label", "lesion_id", "patient_id"], ["a.png", "x", "L1", "P"], ["b.png", "y", "L2", "P"]]
        table = open_data(write_csv(folder / "labels.csv", rows))
        assert table.groups is not None
        assert table.groups.tolist() == ["P", "P"]

    def test_an_unknown_column_is_named_with_the_nearest(self, folder: Path) -> None:
        path = write_csv(folder / "labels.csv", ROWS)
        with pytest.raises(InputError, match=r"unknown column of labels\.csv 'labl'; did you mean 'label'\?"):
            open_data(path, label_column="labl")

    def test_no_image_column_and_no_label_column(self, folder: Path) -> None:
        path = write_csv(folder / "labels.csv", [["photo", "label"], ["first.png", "x"]])  # names no file
        with pytest.raises(InputError, match=r"photo, label.*--image-column"):
            open_data(path)
        path = write_csv(folder / "labels.csv", [["image", "weight"], ["a.png", "60"]])
        with pytest.raises(InputError, match=r"label column.*zeros and ones.*--label-column"):
            open_data(path)

    def test_two_columns_that_may_be_the_label(self, folder: Path) -> None:
        rows = [["image", "diagnosis", "target"], ["a.png", "nevus", 0], ["b.png", "melanoma", 1]]
        path = write_csv(folder / "labels.csv", rows)
        with pytest.raises(InputError, match="diagnosis, target may all be the label"):
            open_data(path)
        assert open_data(path, label_column="diagnosis").classes == ("melanoma", "nevus")

    def test_columns_of_the_same_name(self, folder: Path) -> None:
        path = write_csv(folder / "labels.csv", [["image", "label", "label"], ["a.png", "x", "y"]])
        with pytest.raises(InputError, match=r"columns of the same name: label\. Rename or remove one"):
            open_data(path)

    def test_rows_of_another_length(self, folder: Path) -> None:
        path = write_csv(folder / "labels.csv", [["image", "label"], ["a.png", "x"], ["b.png", "y", "z"], ["c.png"]])
        with pytest.raises(InputError, match="the header has 2 columns, but line 3 has 3, line 4 has 1"):
            open_data(path)

    def test_unknown_split_names_are_refused(self, folder: Path) -> None:
        path = write_csv(
            folder / "labels.csv", [["image", "label", "split"], ["a.png", "x", "fold1"], ["b.png", "y", ""]]
        )
        with pytest.raises(InputError, match=r"splits must be among train, .*; found \(empty\), fold1"):
            open_data(path)


class TestLabels:
    def test_several_in_one_cell(self, folder: Path) -> None:
        for separator, given in (("|", None), (";", None), ("/", "/"), (" + ", "+")):
            rows = [["image", "label"], ["a.png", f"x{separator}z"], ["b.png", "y"], ["c.png", "z"]]
            table = open_data(write_csv(folder / "labels.csv", rows), label_separator=given)
            assert table.multilabel
            assert table.classes == ("x", "y", "z")
            assert table.labels.tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 1]]
            assert table.labels.dtype == np.uint8

    def test_columns_of_zeros_and_ones(self, folder: Path) -> None:
        rows = [
            ["image", "edema", "mass", "age"],
            ["a.png", 1, 1, 30],
            ["b.png", "0.0", "1.0", 40],
            ["c.png", "False", "false", 2],
        ]
        table = open_data(write_csv(folder / "labels.csv", rows))
        assert table.multilabel
        assert table.classes == ("edema", "mass")
        assert table.labels.tolist() == [[1, 1], [0, 1], [0, 0]]  # none of them is a label too
        assert list(table.extra) == ["age"]

    def test_columns_with_one_mark_a_row_are_one_label(self, folder: Path) -> None:
        rows = [["image", "x", "y"], ["a.png", 1, 0], ["b.png", 0, 1]]
        path = write_csv(folder / "labels.csv", rows)
        assert labels(open_data(path)) == ["x", "y"]

    def test_columns_of_marks_chosen_by_name(self, folder: Path) -> None:
        rows = [["image", "x", "y", "smoker"], ["a.png", 1, 1, 0], ["b.png", 0, 1, 1]]
        path = write_csv(folder / "labels.csv", rows)
        assert open_data(path).classes == ("x", "y", "smoker")
        assert open_data(path, label_column="x, y").classes == ("x", "y")
        assert open_data(path, label_column=["y", "x"]).classes == ("y", "x")
        with pytest.raises(InputError, match=r"unknown column of labels.csv 'z'"):
            open_data(path, label_column="x,z")

    def test_marks_that_are_neither(self, folder: Path) -> None:
        rows = [["image", "x", "y"], ["a.png", 1, -1], ["b.png", 0, 0.5]]
        with pytest.raises(InputError, match=r"0 and 1, found y=-1, y=0\.5"):
            open_data(write_csv(folder / "labels.csv", rows), label_column="x,y")

    @pytest.mark.parametrize("nothing", ["", "nan", "NaN", "<NA>", "null"])
    def test_nan_labels_are_left_out_and_named(self, folder: Path, nothing: str) -> None:
        rows = [["image", "label"], ["a.png", "x"], ["b.png", "y"], ["c.png", nothing]]
        path = write_csv(folder / "labels.csv", rows)
        table = open_data(path)
        assert table.names == ["a.png", "b.png"]
        assert table.problems == ("images without a label: 1 (c.png)",)
        with pytest.raises(InputError, match=r"images without a label: 1 \(c\.png\)"):
            open_data(path, strict=True)
        marks = [["image", "x", "y"], ["a.png", 1, 0], ["b.png", 0, 1], ["c.png", nothing, 1]]
        assert open_data(write_csv(folder / "labels.csv", marks)).problems == table.problems

    def test_na_and_none_are_names_of_classes(self, folder: Path) -> None:
        rows = [["image", "label"], ["a.png", "NA"], ["b.png", "None"], ["c.png", "1"]]
        assert open_data(write_csv(folder / "labels.csv", rows)).classes == ("1", "NA", "None")

    def test_one_class_only_and_none(self, folder: Path) -> None:
        path = write_csv(folder / "labels.csv", [["image", "label"], ["a.png", "x"], ["b.png", "x"]])
        with pytest.raises(InputError, match=r"one class only \(x, 2 images\)"):
            open_data(path)
        path = write_csv(folder / "labels.csv", [["image", "label"], ["a.png", ""], ["b.png", ""]])
        with pytest.raises(InputError, match=r"no image is left .*\(images without a label: 2"):
            open_data(path)
        path = write_csv(folder / "labels.csv", [["image", "label"]])
        with pytest.raises(InputError, match="the table is empty"):
            open_data(path)

    def test_the_same_image_in_several_rows(self, folder: Path) -> None:
        rows = [["image", "label"], ["a.png", "x"], ["b.png", "y"], ["a.png", "x"]]
        assert open_data(write_csv(folder / "labels.csv", rows)).names == ["a.png", "b.png"]
        path = write_csv(folder / "labels.csv", [*rows, ["a.png", "y"]])
        with pytest.raises(InputError, match=r"several rows that differ: a\.png"):
            open_data(path)
        path = write_csv(folder / "labels.csv", [*rows, ["./a.png", "y"]])
        with pytest.raises(InputError, match=r"same file: .*a\.png"):
            open_data(path)


class TestFiles:
    def test_names_without_suffix_and_folder(self, tmp_path: Path) -> None:
        images(tmp_path, "deep/er/a.png", "deep/b.JPG", "c.webp")
        rows = [["image", "label"], ["a", "x"], ["b", "y"], ["elsewhere/c.webp", "x"]]
        table = open_data(write_csv(tmp_path / "labels.csv", rows), strict=True)
        assert [path.name for path in table.images] == ["a.png", "b.JPG", "c.webp"]
        assert table.names == ["a", "b", "elsewhere/c.webp"]

    def test_a_name_that_fits_several_files(self, tmp_path: Path) -> None:
        images(tmp_path, "1/a.png", "2/a.png", "b.png", "c.png")
        draw(tmp_path / "2" / "a.png", size=(50, 50))
        rows = [["image", "label"], ["a", "x"], ["b.png", "y"], ["c.png", "x"]]
        table = open_data(write_csv(tmp_path / "labels.csv", rows))
        assert table.names == ["b.png", "c.png"]
        assert "names that fit several files: 1 (a)" in table.problems

    def test_labels_without_image_and_images_without_row(self, folder: Path) -> None:
        rows = [["image", "label"], ["a.png", "x"], ["b.png", "y"], ["gone.png", "x"], ["", "y"]]
        path = write_csv(folder / "labels.csv", rows)
        table = open_data(path)
        assert table.problems == (
            "rows without the name of an image (row): 1 (5)",
            "labels without an image: 1 (gone.png)",
            "images without a row in the table: 1 (c.png)",
        )
        with pytest.raises(InputError, match=r"(?s)strict:.*gone\.png.*c\.png"):
            open_data(path, strict=True)

    def test_images_in_another_folder(self, tmp_path: Path) -> None:
        images(tmp_path / "pictures", "a.png", "b.png")
        path = write_csv(tmp_path / "tables" / "labels.csv", [["image", "label"], ["a.png", "x"], ["b.png", "y"]])
        assert len(open_data(path, image_folder=tmp_path / "pictures")) == 2
        with pytest.raises(InputError, match=r"the image folder .* does not exist"):
            open_data(path, image_folder=tmp_path / "nowhere")

    @pytest.mark.parametrize("name", ["../secret.png", "/etc/secret.png", "in/../../secret.png", "..\\secret.png"])
    def test_names_that_leave_the_folder_are_refused(self, tmp_path: Path, name: str) -> None:
        draw(tmp_path / "secret.png")
        images(tmp_path / "data", "a.png", "in/b.png")
        rows = [["image", "label"], ["a.png", "x"], [name, "y"]]
        with pytest.raises(InputError, match=r"outside the data folder .*secret\.png\. .*--image-folder"):
            open_data(write_csv(tmp_path / "data" / "labels.csv", rows))

    def test_names_that_stay_inside_are_fine_however_written(self, tmp_path: Path) -> None:
        images(tmp_path, "in/a.png", "b.png", "in/c.png")
        rows = [["image", "label"], [tmp_path / "in" / "a.png", "x"], ["in/../b.png", "y"], ["in\\c.png", "x"]]
        assert len(open_data(write_csv(tmp_path / "labels.csv", rows), strict=True)) == 3

    def test_links_that_leave_the_folder_are_refused(self, tmp_path: Path) -> None:
        draw(tmp_path / "secret" / "s.png")
        root = images(tmp_path / "data", "a.png")
        (root / "link.png").symlink_to(tmp_path / "secret" / "s.png")
        (root / "behind").symlink_to(tmp_path / "secret")
        rows = [["image", "label"], ["a.png", "x"], ["link.png", "y"], ["behind/s.png", "x"]]
        path = write_csv(root / "labels.csv", rows)
        with pytest.raises(InputError, match=r"lead out of it: .*link\.png, .*behind/s\.png"):
            open_data(path)
        assert len(open_data(path, follow_links=True)) == 3

    def test_non_ascii_names_in_either_spelling(self, tmp_path: Path) -> None:
        decomposed = unicodedata.normalize("NFD", "Läsion é 1.png")
        images(tmp_path, decomposed, "ラベル 2.png")
        rows = [["image", "label"], ["Läsion é 1.png", "bösartig"], ["ラベル 2.png", "良性"]]
        path = tmp_path / "läbels.csv"
        for encoding in ("utf-8", "utf-8-sig", "utf-16"):
            write_csv(path, rows)
            path.write_text(path.read_text(encoding="utf-8"), encoding=encoding)
            table = open_data(path, strict=True)
            assert open_data(tmp_path).names == table.names  # recognised by its first lines
            assert table.classes == ("bösartig", "良性")
            assert all(file.is_file() for file in table.images)

    def test_one_number_in_two_spellings_is_refused(self, tmp_path: Path) -> None:
        images(tmp_path, "a.png", "b.png", "c.png", "d.png")
        labels = ["0", "1", "0.0", "1.5"]
        rows = [["image", "label"], *([f"{name}.png", label] for name, label in zip("abcd", labels, strict=True))]
        path = write_csv(tmp_path / "labels.csv", rows)
        with pytest.raises(InputError, match=r"same number.*: 0 and 0\.0\..*--merge-labels"):
            open_data(path)
        merged = write_csv(tmp_path / "merge.csv", [["old", "new"], ["0.0", "0"]])
        table = open_data(path, merge_labels=str(merged))
        assert table.classes == ("0", "1", "1.5")
        assert not any("several spellings" in problem for problem in table.problems)

    def test_another_encoding_is_named(self, folder: Path) -> None:
        path = folder / "labels.csv"
        path.write_bytes("image,label\na.png,bösartig\n".encode("latin-1"))
        with pytest.raises(InputError, match=r"labels\.csv is not UTF-8"):
            open_data(path)

    def test_quotes_commas_and_line_ends(self, folder: Path) -> None:
        path = folder / "labels.csv"
        path.write_bytes(b'image,label,note\r\na.png,"x, or so","two\r\nlines"\r\nb.png,y,\r\n\r\n')
        assert open_data(path).classes == ("x, or so", "y")

    def test_an_index_column_without_name_and_trailing_commas(self, folder: Path) -> None:
        path = folder / "labels.csv"
        path.write_text(",image,label\n0,a.png,x,\n1,b.png,y,\n")
        assert open_data(path).names == ["a.png", "b.png"]

    def test_a_table_too_large_is_refused(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(manifest, "MAX_BYTES", 20)
        with pytest.raises(InputError, match="limit of 20 "):
            open_data(write_csv(folder / "labels.csv", ROWS))

    def test_a_cell_without_end_is_refused(self, folder: Path) -> None:
        path = folder / "labels.csv"
        path.write_text('image,label\na.png,"' + "x" * 200_000)
        with pytest.raises(InputError, match="cannot be read as a table: field larger than field limit"):
            open_data(path)

    def test_several_tables_in_a_folder(self, folder: Path) -> None:
        write_csv(folder / "one.csv", ROWS)
        write_csv(folder / "two.csv", ROWS)
        with pytest.raises(InputError, match=r"several tables that fit: one\.csv, two\.csv"):
            open_data(folder)
        with pytest.raises(InputError, match="no table that fits"):
            open_data(folder, image_column="photo")
        write_csv(folder / "two.csv", [["photo", "label"], ["a.png", "x"], ["b.png", "y"]])
        assert open_data(folder, image_column="photo").names == ["a.png", "b.png"]


class TestParquet:
    @pytest.fixture(autouse=True)
    def _pyarrow(self) -> None:
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")

    def test_the_same_as_csv(self, folder: Path) -> None:
        rows = pd.DataFrame(
            {"image": ["a.png", "b.png", "c.png"], "label": [3, 10, None], "patient_id": [7.0, 8.0, None]}
        )
        rows.to_parquet(folder / "labels.parquet")
        table = open_data(folder)
        assert table.classes == ("3", "10")
        assert table.groups is not None
        assert table.groups.tolist() == ["7", "8"]
        assert table.problems == ("images without a label: 1 (c.png)",)

    def test_lists_and_marks(self, folder: Path) -> None:
        names = ["a.png", "b.png", "c.png"]
        pd.DataFrame({"image": names, "labels": [["x", "y"], ["y"], ["x"]]}).to_parquet(folder / "1.parquet")
        assert open_data(folder / "1.parquet").labels.tolist() == [[1, 1], [0, 1], [1, 0]]
        pd.DataFrame({"image": names, "x": [True, False, True], "y": [1, 1, 0]}).to_parquet(folder / "2.parquet")
        assert open_data(folder / "2.parquet").labels.tolist() == [[1, 1], [0, 1], [1, 0]]

    def test_a_file_that_is_none(self, folder: Path) -> None:
        (folder / "labels.parquet").write_text("image,label")
        with pytest.raises(InputError, match="cannot be read as Parquet"):
            open_data(folder / "labels.parquet")

    def test_pyarrow_is_asked_for_by_name(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "labels.parquet").touch()
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(InputError, match=r"pip install 'cclnet\[parquet\]'"):
            open_data(folder / "labels.parquet")


def test_class_folders_and_a_manifest_fit_both(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 1, "b": 1})
    write_csv(tmp_path / "labels.csv", [["image", "label"], ["a/0.png", "x"], ["b/0.png", "y"]])
    ways = r"2 ways: folder per class \(a, b\): source=folders; manifest \(labels\.csv\): source=manifest"
    with pytest.raises(InputError, match=ways):
        open_data(tmp_path)
    assert open_data(tmp_path, source="folders").classes == ("a", "b")
    assert open_data(tmp_path, source="manifest").classes == ("x", "y")
    assert open_data(tmp_path / "labels.csv").classes == ("x", "y")


def test_a_label_is_no_image_even_where_files_are_numbered(tmp_path: Path) -> None:
    images(tmp_path, "other/1.png", "other/2.png")
    (tmp_path / "table.csv").write_text("name,label\nx,1\ny,2\n")
    with pytest.raises(InputError, match="no image column found among name, label"):
        open_data(tmp_path / "table.csv")


def test_a_table_with_very_many_columns_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "wide.csv").write_text("image,label," + ",".join(f"c{i}" for i in range(1_000_000)) + "\na.png,x\n")
    with pytest.raises(InputError, match="1,000,002 columns, more than the limit of 20,000"):
        open_data(tmp_path / "wide.csv")


@pytest.mark.parametrize("row", [1, 2])
@pytest.mark.parametrize("column", [0, 1])
def test_cells_longer_than_any_file_name_or_integer(tmp_path: Path, row: int, column: int) -> None:
    for name in "abc":
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    cells = [["image", "label"], ["a.png", "x"], ["b.png", "y"], ["c.png", "z"]]
    cells[row][column] = "9" * 5000
    (tmp_path / "table.csv").write_text("\n".join(",".join(line) for line in cells))
    assert len(open_data(tmp_path / "table.csv")) == 3 - (column == 0)
    with pytest.raises(InputError, match="does not exist"):
        open_data("9" * 5000)
