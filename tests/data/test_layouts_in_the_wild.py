"""Public sets as they are downloaded, drawn with small images: each is read as what it is, or refused with the option
that reads it. None is read as another task."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from layouts import class_folders, draw, ham_rows, write_csv
from PIL import Image

from cclnet.data.identifiers import suspected_ids
from cclnet.data.sources import open_data
from cclnet.data.split import make_split
from cclnet.data.table import ImageTable
from cclnet.errors import InputError
from cclnet.settings import SplitSettings


def mask(path: Path, size: tuple[int, int] = (12, 16), levels: tuple[int, int] = (0, 255)) -> Path:
    """A segmentation mask: a box of the second grey level on the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full(size, levels[0], np.uint8)
    pixels[2:-2, 3:-3] = levels[1]
    Image.fromarray(pixels).save(path)
    return path


def labels_of(table: ImageTable) -> dict[str, str]:
    return dict(zip(table.names, table.label_names(), strict=True))


def groups_of(table: ImageTable) -> list[str]:
    assert table.groups is not None
    return table.groups.tolist()


def splits_of(table: ImageTable) -> list[str]:
    assert table.splits is not None
    return table.splits.tolist()


class TestFoldersThatAreNoClasses:
    def test_kaggle_competition(self, tmp_path: Path) -> None:
        """APTOS 2019: train.csv names the files of train_images without suffix; the submission has invented labels."""
        for i in range(4):
            draw(tmp_path / "train_images" / f"{i:03d}a.png", seed=i)
            draw(tmp_path / "test_images" / f"{i:03d}b.png", seed=9 + i)
        write_csv(tmp_path / "train.csv", [["id_code", "diagnosis"], *([f"{i:03d}a", i % 2] for i in range(4))])
        write_csv(tmp_path / "test.csv", [["id_code"], *([f"{i:03d}b"] for i in range(4))])
        write_csv(tmp_path / "sample_submission.csv", [["id_code", "diagnosis"], *([f"{i:03d}b", 0] for i in range(4))])
        table = open_data(tmp_path)
        assert labels_of(table) == {"000a": "0", "001a": "1", "002a": "0", "003a": "1"}
        assert table.splits is None
        assert any("names no image, left out: 1 (test_images)" in problem for problem in table.problems)

    def test_formats_beside_a_table(self, tmp_path: Path) -> None:
        """A TCIA set on Kaggle: the same images in two formats, and a label column that no custom knows."""
        rows = [["", "Age", "Contrast", "raw_input_path", "id", "tiff_name", "dicom_name"]]
        for i in range(6):
            name = f"ID_{i:04d}_AGE_00{60 + i % 3}"
            draw(tmp_path / "tiff_images" / f"{name}.tif", seed=i)
            (tmp_path / "dicom_dir").mkdir(exist_ok=True)
            (tmp_path / "dicom_dir" / f"{name}.dcm").write_bytes(bytes(128) + b"DICM")
            rows.append([i, 60 + i % 3, i % 2 == 0, f"../data/{i}.dcm", i, f"{name}.tif", f"{name}.dcm"])
        write_csv(tmp_path / "overview.csv", rows)
        with pytest.raises(
            InputError, match=r"overview\.csv: neither.*Columns with few values: Age, Contrast.*--label-c"
        ):
            open_data(tmp_path)
        table = open_data(tmp_path, label_column="Contrast")
        assert table.classes == ("False", "True")
        assert {path.parent.name for path in table.images} == {"tiff_images"}

    def test_one_of_the_formats_of_a_table(self, tmp_path: Path) -> None:
        """The same set without the folder of the first format: the column is the one that names the files."""
        rows = [["tiff_name", "png_name", "label"], *([f"s{i}.tif", f"s{i}.png", "ab"[i % 2]] for i in range(4))]
        write_csv(tmp_path / "overview.csv", rows)
        for i in range(4):
            draw(tmp_path / "png_images" / f"s{i}.png", seed=i)
        assert open_data(tmp_path).names == [f"s{i}.png" for i in range(4)]

    @pytest.mark.parametrize(
        "names", [("train_images", "test_images"), ("train", "test"), ("dicom_dir", "tiff_images"), ("images", "masks"),
                  ("a. Training Set", "b. Testing Set"), ("images_001", "images_002"), ("fold_1", "fold_2"),
                  ("stage_2_train_images", "stage_2_test_images"), ("patient_01", "patient_02"), ("P001", "P002"),
                  ("TCGA-A1-A0SB", "TCGA-A1-A0SD"), ("visit1", "visit2"), ("trainA", "testA"), ("cxr_train", "cxr_val"),
                  ("boneage-training-dataset", "boneage-test-dataset"), ("train_patches", "val_patches"),
                  ("C-NMC_training_data", "C-NMC_test_prelim_phase_data"), ("chest_png", "chest_dcm")],
    )  # fmt: skip
    def test_refused_without_a_table(self, tmp_path: Path, names: tuple[str, str]) -> None:
        class_folders(tmp_path, dict.fromkeys(names, 2))
        with pytest.raises(InputError, match=r"not of classes.*--image-column.*--source folders"):
            open_data(tmp_path)
        assert open_data(tmp_path, source="folders").classes == tuple(sorted(names))

    def test_splits_and_classes_in_one_name_are_refused(self, tmp_path: Path) -> None:
        class_folders(tmp_path, {f"{split}_{label}": 2 for split in ("train", "test") for label in ("nv", "mel")})
        with pytest.raises(InputError, match=r"not of classes"):
            open_data(tmp_path)

    def test_a_test_set_beside_the_classes(self, tmp_path: Path) -> None:
        """IQ-OTH/NCCD: the word that all folders share does not make a class of the test set."""
        class_folders(tmp_path, {"Bengin cases": 2, "Malignant cases": 2, "Test cases": 2})
        table = open_data(tmp_path)
        assert table.classes == ("Bengin cases", "Malignant cases")
        assert any("images without a label" in problem and ": 2 (Test cases/" in problem for problem in table.problems)

    def test_a_copy_of_the_classes_beside_them(self, tmp_path: Path) -> None:
        """Brain tumours and malaria on Kaggle: yes, no, and a folder with another yes and no."""
        class_folders(
            tmp_path, {f"{above}{label}": 2 for above in ("", "brain_tumor_dataset/") for label in ("yes", "no")}
        )
        with pytest.raises(
            InputError, match=r"brain_tumor_dataset contains .*no, yes.*--exclude 'brain_tumor_dataset/\*'"
        ):
            open_data(tmp_path)
        assert open_data(tmp_path, exclude="brain_tumor_dataset/*").classes == ("no", "yes")
        assert open_data(tmp_path / "brain_tumor_dataset").classes == ("no", "yes")
        blood = {f"images/{s}/{c}": 1 for s in ("TRAIN", "TEST", "TEST_SIMPLE") for c in ("a", "b")}
        class_folders(tmp_path / "blood", blood)
        with pytest.raises(InputError, match=r"--exclude 'images/TEST_SIMPLE/\*'"):
            open_data(tmp_path / "blood")
        assert splits_of(open_data(tmp_path / "blood", exclude="images/TEST_SIMPLE/*")) == [
            "test",
            "test",
            "train",
            "train",
        ]

    def test_one_class_named_like_a_split(self, tmp_path: Path) -> None:
        class_folders(tmp_path, {"valid": 2, "invalid": 2})
        with pytest.raises(InputError, match=r"one class folder only \(invalid\).*valid.*--source folders"):
            open_data(tmp_path)
        assert open_data(tmp_path, source="folders").classes == ("invalid", "valid")

    def test_the_same_folders_in_each_class_folder(self, tmp_path: Path) -> None:
        """Magnifications or hospitals above the classes: neither reading is taken without asking."""
        class_folders(tmp_path, {f"{site}/{label}": 2 for site in ("site_A", "site_B") for label in ("nv", "mel")})
        with pytest.raises(
            InputError, match=r"site_A, site_B all contain .* mel, nv.*--class-level 1.*--class-level 2"
        ):
            open_data(tmp_path)
        assert open_data(tmp_path, class_level=1).classes == ("site_A", "site_B")
        assert labels_of(open_data(tmp_path, class_level=2))["site_B/nv/0.png"] == "nv"
        with pytest.raises(InputError, match=r"no image lies in a folder of level 3"):
            open_data(tmp_path, class_level=3)
        class_folders(tmp_path / "split", {f"{split}/40X/{label}": 2 for split in ("train", "test") for label in "ab"})
        assert open_data(tmp_path / "split", class_level=2).classes == ("a", "b")

    def test_other_folders_inside_class_folders_are_pointed_out(self, tmp_path: Path) -> None:
        """LC25000: five classes in two folders."""
        names = ("colon_image_sets/colon_aca", "colon_image_sets/colon_n", "lung_image_sets/lung_aca")
        class_folders(tmp_path, dict.fromkeys(names, 2))
        table = open_data(tmp_path)
        assert table.classes == ("colon_image_sets", "lung_image_sets")
        assert any("--class-level 2" in problem and "colon_aca" in problem for problem in table.problems)
        assert open_data(tmp_path, class_level=2).classes == ("colon_aca", "colon_n", "lung_aca")
        class_folders(tmp_path / "series", {f"{label}/{100 + i}": 2 for label in "ab" for i in range(4)})
        assert not open_data(tmp_path / "series").problems

    @pytest.mark.parametrize("path", ["images/{split}/{label}", "{label}/{split}", "{label}/{split}_images"])
    def test_split_folders_at_another_level_are_used(self, tmp_path: Path, path: str) -> None:
        class_folders(tmp_path, {path.format(split=s, label=c): 1 for s in ("train", "test") for c in ("a", "b")})
        table = open_data(tmp_path)
        assert table.classes == ("a", "b")
        assert all(split in name for name, split in zip(table.names, splits_of(table), strict=True))
        assert "splits are those of the folders: 2 (test, train)" in table.problems

    def test_split_folders_that_share_a_name(self, tmp_path: Path) -> None:
        class_folders(tmp_path, {f"chest_{split}/{label}": 1 for split in ("train", "test") for label in ("a", "b")})
        assert splits_of(open_data(tmp_path)) == ["test", "test", "train", "train"]

    def test_a_data_set_further_inside(self, tmp_path: Path) -> None:
        class_folders(tmp_path, {"archive/BreaKHis_v1/breast/benign": 1, "archive/BreaKHis_v1/breast/malignant": 1})
        with pytest.raises(InputError, match=r"BreaKHis_v1/breast looks like one \(folder per class\)") as caught:
            open_data(tmp_path)
        assert "\n" not in str(caught.value)
        for i in range(3):
            draw(tmp_path / "table" / "scans" / f"s{i}.png", seed=i)
        write_csv(
            tmp_path / "table" / "csv" / "all.csv", [["image", "label"], *([f"s{i}", "ab"[i % 2]] for i in range(3))]
        )
        with pytest.raises(InputError, match=r"csv/all\.csv.*--image-folder .*table\)"):
            open_data(tmp_path / "table")
        assert len(open_data(tmp_path / "table/csv/all.csv", image_folder=str(tmp_path / "table"))) == 3

    @pytest.mark.parametrize(
        ("file", "reason"),
        [("labels.xlsx", r"labels\.xlsx: save tables as CSV"), ("train.txt", r"train\.txt: save tables as CSV")],
    )
    def test_labels_in_another_kind_of_file(self, tmp_path: Path, file: str, reason: str) -> None:
        draw(tmp_path / "images" / "0.png")
        (tmp_path / file).write_text("0 normal")
        with pytest.raises(InputError, match=reason):
            open_data(tmp_path)

    @pytest.mark.parametrize(
        ("file", "reason"), [("a/1.nii.gz", r"1\.nii\.gz.*2D images"), ("all.zip", r"archives \(all\.zip\): unpack")]
    )
    def test_files_that_are_no_images(self, tmp_path: Path, file: str, reason: str) -> None:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"x")
        with pytest.raises(InputError, match=reason):
            open_data(tmp_path)

    @pytest.mark.parametrize(
        "names",
        [
            ("ALL", "AML"),
            ("n01440764", "n02102040"),
            ("cases", "controls"),
            ("stage1", "stage2"),
            ("1", "2"),
            ("test_positive", "healthy"),
        ],
    )
    def test_classes_with_similar_names_are_read(self, tmp_path: Path, names: tuple[str, str]) -> None:
        class_folders(tmp_path, dict.fromkeys(names, 2))
        assert set(open_data(tmp_path).classes) == set(names)

    def test_class_folders_inside_containers(self, tmp_path: Path) -> None:
        """C-NMC leukaemia: folds above the classes."""
        class_folders(tmp_path, {"fold_0/all": 1, "fold_0/hem": 1, "fold_1/all": 1, "fold_1/hem": 2})
        table = open_data(tmp_path)
        assert table.classes == ("all", "hem")
        assert table.class_counts().tolist() == [2, 3]

    def test_split_folders_with_longer_names(self, tmp_path: Path) -> None:
        class_folders(tmp_path, {"train_dir/nv": 2, "train_dir/mel": 1, "val_dir/nv": 1, "val_dir/mel": 1})
        assert splits_of(open_data(tmp_path)) == ["train", "train", "train", "val", "val"]

    def test_patients_above_the_classes(self, tmp_path: Path) -> None:
        """Breast histopathology: a folder per patient, with the folders 0 and 1 of its patches."""
        class_folders(tmp_path, {f"{10000 + i}/{k}": 1 for i in range(21) for k in (0, 1) if i % 3 or k})
        table = open_data(tmp_path)
        assert table.classes == ("0", "1")
        assert len(set(groups_of(table))) == 21
        class_folders(tmp_path / "few", {"patient1/benign": 1, "patient2/malignant": 1})
        assert groups_of(open_data(tmp_path / "few")) == ["patient1", "patient2"]

    def test_class_folders_beside_a_table_of_their_files(self, tmp_path: Path) -> None:
        """Columns that no custom knows, recognised by the names of files in them: both readings are offered."""
        class_folders(tmp_path, {"benign": 3, "malignant": 3})
        for i in range(3):
            draw(tmp_path / "benign" / f"b{i}.png", seed=i)
        write_csv(tmp_path / "all.csv", [["scan", "birads"], *([f"b{i}", i] for i in range(3))])
        with pytest.raises(InputError, match=r"source=folders.*all\.csv.*source=manifest"):
            open_data(tmp_path)


class TestColumns:
    @pytest.mark.parametrize(
        ("image", "label", "group"),
        [("id_code", "diagnosis", ""), ("filename", "finding", "patientid"), ("image", "level", ""),
         ("Image name", "Retinopathy grade", ""), ("img_id", "diagnostic", "patient_id"),
         ("image file path", "pathology", "patient_id"), ("md5hash", "label", ""),
         ("SOPInstanceUID", "class", "PatientID"), ("DDI_file", "disease", ""), ("X_ray_image_name", "Label", "")],
    )  # fmt: skip
    def test_of_public_sets(self, tmp_path: Path, image: str, label: str, group: str) -> None:
        rows = [["index", image, label, group or "note"]]
        for i in range(4):
            draw(tmp_path / "files" / f"scan{i}.png", seed=i)
            rows.append([i, f"scan{i}", "ab"[i % 2], f"P{i // 2}"])
        write_csv(tmp_path / "table.csv", rows)
        table = open_data(tmp_path)
        assert labels_of(table) == {"scan0": "a", "scan1": "b", "scan2": "a", "scan3": "b"}
        assert table.groups is None if not group else groups_of(table) == ["P0", "P0", "P1", "P1"]

    def test_a_patient_column_that_names_the_files(self, tmp_path: Path) -> None:
        """RSNA pneumonia: patientId is the stem of the only image of a patient, with one row per box."""
        rows = [["patientId", "x", "y", "Target"]]
        for i in range(4):
            draw(tmp_path / "stage_2_train_images" / f"000{i}-aa.png", seed=i)
            rows += [[f"000{i}-aa", box, box, i % 2] for box in range(1 + i % 2)]
        write_csv(tmp_path / "stage_2_train_labels.csv", rows)
        table = open_data(tmp_path)
        assert labels_of(table) == {"0000-aa": "0", "0001-aa": "1", "0002-aa": "0", "0003-aa": "1"}
        assert table.groups is None

    def test_a_usual_name_that_names_no_files_gives_way(self, tmp_path: Path) -> None:
        rows = [["image_id", "photo", "label"]]
        for i in range(4):
            draw(tmp_path / f"scan{i}.png", seed=i)
            rows.append([1000 + i, f"scan{i}.png", "ab"[i % 2]])
        assert open_data(write_csv(tmp_path / "t.csv", rows)).names == [f"scan{i}.png" for i in range(4)]

    def test_a_split_column_by_its_values(self, tmp_path: Path) -> None:
        rows = [["image", "label", "Dataset_type"]]
        for i in range(4):
            draw(tmp_path / f"{i}.png", seed=i)
            rows.append([f"{i}.png", "ab"[i % 2], "TRAIN" if i < 2 else "TEST"])
        assert splits_of(open_data(write_csv(tmp_path / "t.csv", rows))) == ["train", "train", "test", "test"]

    def test_images_in_another_folder(self, tmp_path: Path) -> None:
        """The error names the option, and with it the only table of the folder is read."""
        for i in range(4):
            draw(tmp_path / "scans" / f"{i}a.png", seed=i)
        rows = [["case", "quality"], *([f"{i}a", "ab"[i % 2]] for i in range(4))]
        write_csv(tmp_path / "tables" / "all.csv", rows)
        with pytest.raises(InputError, match="--image-folder"):
            open_data(tmp_path / "tables")
        table = open_data(tmp_path / "tables", image_folder=str(tmp_path / "scans"), label_column="quality")
        assert labels_of(table) == {"0a": "a", "1a": "b", "2a": "a", "3a": "b"}

    def test_label_cells_with_stray_spaces(self, tmp_path: Path) -> None:
        rows = [["image", "label"], ["0.png", " a "], ["1.png", "a\u00a0"], ["2.png", "b"]]
        for i in range(3):
            draw(tmp_path / f"{i}.png", seed=i)
        assert open_data(write_csv(tmp_path / "t.csv", rows)).classes == ("a", "b")

    @pytest.mark.parametrize(
        "column", ["pat_id", "ptid", "anon_patient_id", "Patient Number", "PatientName", "ID_patient", "empi_anon",
                   "SubjectKey", "donor_id"]
    )  # fmt: skip
    def test_patients_by_other_names(self, tmp_path: Path, column: str) -> None:
        """A column that is missed lets patients into several splits, and nothing says so."""
        table = open_data(self.table(tmp_path, {"label": "ab" * 4, column: ["Q1", "Q1", "Q2", "Q2"] * 2}))
        assert groups_of(table) == ["Q1", "Q1", "Q2", "Q2"] * 2

    @pytest.mark.parametrize("column", ["patient_age", "Patient Sex", "lesion_type", "case_description"])
    def test_facts_about_patients_are_no_groups(self, tmp_path: Path, column: str) -> None:
        assert open_data(self.table(tmp_path, {"label": "ab" * 4, column: "xxyyzzww"})).groups is None

    def table(self, folder: Path, columns: dict[str, object], names: str = "s00{}", suffix: str = ".png") -> Path:
        """A table of eight images with these columns, each a text or list of eight cells."""
        for i in range(8):
            draw(folder / "scans" / f"s00{i}{suffix}", seed=i)
        cells = zip(*columns.values(), strict=True)
        rows = [["image", *columns], *([names.format(i), *row] for i, row in enumerate(cells))]
        return write_csv(folder / "table.csv", rows)

    def test_groups_and_splits_that_are_words(self, tmp_path: Path) -> None:
        """ADNI: Group is the diagnosis, Subject the patient; a part of the body is no split."""
        subjects = [f"002_S_{i // 2}" for i in range(8)]
        columns = {"Subject": subjects, "Group": ["AD", "AD", "CN", "CN"] * 2, "part": ["arm", "leg"] * 4}
        path = self.table(tmp_path, columns)
        with pytest.raises(InputError, match=r"Columns with few values: .*Group"):
            open_data(path)
        table = open_data(path, label_column="Group")
        assert table.classes == ("AD", "CN") and groups_of(table) == subjects and table.splits is None
        assert any("like splits whose values are none, not used: 1 (part)" in problem for problem in table.problems)
        table = open_data(self.table(tmp_path, {"label": "ab" * 4, "lesion": ["papule", "macule"] * 4}))
        assert table.groups is None
        assert any("whose values are words, not used" in p and "(lesion)" in p for p in table.problems)
        with pytest.raises(InputError, match=r"found hold in the column split.*--split-column"):
            open_data(self.table(tmp_path, {"label": "ab" * 4, "split": ["train", "hold"] * 4}))

    def test_one_table_for_each_split(self, tmp_path: Path) -> None:
        whole = pd.read_csv(self.table(tmp_path, {"label": "ab" * 4}), dtype=str)
        (tmp_path / "table.csv").unlink()
        for name, own in {"chest_train": whole[:4], "chest_valid": whole[4:6], "chest_test": whole[6:]}.items():
            own.to_csv(tmp_path / f"{name}.csv", index=False)
        table = open_data(tmp_path)
        assert dict(zip(table.names, splits_of(table), strict=True)) == {
            f"s00{i}": "train" if i < 4 else "val" if i < 6 else "test" for i in range(8)
        }
        assert "split from chest_test.csv, chest_train.csv, chest_valid.csv" in table.columns and table.extra.empty
        assert len(open_data(tmp_path / "chest_train.csv")) == 4
        whole[:1].to_csv(tmp_path / "chest_test.csv", index=False)  # an image in two splits
        with pytest.raises(InputError, match="images have several rows that differ: s000"):
            open_data(tmp_path)
        whole[6:].to_csv(tmp_path / "more.csv", index=False)  # no split
        with pytest.raises(InputError, match=r"several tables that fit.*more\.csv"):
            open_data(tmp_path)

    def test_zeros_and_ones_that_are_not_the_task(self, tmp_path: Path) -> None:
        """Neither facts about patients nor the columns that happen to lack -1 are learned in place of the labels."""
        with pytest.raises(InputError, match=r"Columns with few values: smoker, male, birads"):
            open_data(self.table(tmp_path, {"smoker": "01" * 4, "male": "0011" * 2, "birads": "1213" * 2}))
        with pytest.raises(InputError, match=r"zeros and ones \(edema, mass\) or grading.*'edema,mass'"):
            open_data(self.table(tmp_path, {"edema": "01" * 4, "mass": "0011" * 2, "grading": "xyxz" * 2}))
        with pytest.raises(InputError, match=r"zeros and ones \(edema, mass\) or sex_male"):
            open_data(self.table(tmp_path, {"edema": "01" * 4, "mass": "0011" * 2, "sex_male": "01" * 4}))
        with pytest.raises(InputError, match=r"edema contain -1"):
            marks = {"edema": ["1", "0", "-1", "1"] * 2, "mass": "0011" * 2, "nodule": "01" * 4}
            open_data(self.table(tmp_path, marks))
        table = open_data(self.table(tmp_path, {"edema": "01" * 4, "mass": "0011" * 2, "Sex": "MF" * 4}))
        assert table.classes == ("edema", "mass")

    def test_no_header(self, tmp_path: Path) -> None:
        for i in range(5):
            draw(tmp_path / "scans" / f"s{i}.png", seed=i)
        for suffix in (".png", ""):
            rows = [[f"s{i}{suffix}", "ab"[i % 2]] for i in range(5)]
            path = write_csv(tmp_path / "table.csv", rows)
            for options in ({}, {"label_column": "a"}):
                with pytest.raises(InputError, match=r"table\.csv has no header.*image,label"):
                    open_data(path, **options)

    def test_numbers_and_texts_are_no_classes(self, tmp_path: Path) -> None:
        rows = [["image", "target"], *([f"s{i}", i / 7] for i in range(12))]
        for i in range(12):
            draw(tmp_path / f"s{i}.png", seed=i)
        with pytest.raises(InputError, match=r"target has 12 different values in 12 rows"):
            open_data(write_csv(tmp_path / "t.csv", rows))

    @pytest.mark.parametrize(
        ("names", "suffix"), [("s00{}.jpeg", ".png"), ("s00{}.png", ".PNG"), ("s00{}.png", ".jpg")]
    )
    def test_images_with_another_suffix(self, tmp_path: Path, names: str, suffix: str) -> None:
        table = open_data(self.table(tmp_path, {"label": "ab" * 4}, names, suffix))
        assert table.class_counts().tolist() == [4, 4]
        assert any("another suffix than in the table: 8" in problem for problem in table.problems)

    def test_names_of_no_image(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"none of the 8 names in the column image \(x0.*such as scans/s000\.png"):
            open_data(self.table(tmp_path, {"label": "ab" * 4}, "x{}"))

    def test_several_labels_in_a_cell_are_pointed_out(self, tmp_path: Path) -> None:
        table = open_data(self.table(tmp_path, {"label": ["melanoma; in situ", "nevus"] * 4}))
        assert table.multilabel
        assert any("several labels in a cell" in problem and ": 4 (" in problem for problem in table.problems)


class TestSplitFoldersBesideATable:
    def test_of_a_manifest_are_used(self, tmp_path: Path) -> None:
        rows = [["image", "label"]]
        for i, split in enumerate(("train", "train", "val", "test")):
            draw(tmp_path / split / f"x{i}.png", seed=i)
            rows.append([f"x{i}", "ab"[i % 2]])
        write_csv(tmp_path / "metadata.csv", rows)
        table = open_data(tmp_path)
        assert splits_of(table) == ["train", "train", "val", "test"]
        assert "splits are those of the folders: 3 (test, train, val)" in table.problems

    def test_of_ham10000_are_used_or_reported(self, tmp_path: Path) -> None:
        images = {f"ISIC_{i}": (f"HAM_{i}", "nv" if i % 2 else "mel") for i in range(4)}
        write_csv(tmp_path / "HAM10000_metadata.csv", ham_rows(images))
        for i, folder in enumerate(("train_dir/mel", "train_dir/nv", "val_dir/mel", "val_dir/nv")):
            draw(tmp_path / folder / f"ISIC_{i}.jpg", seed=i)
        table = open_data(tmp_path)
        assert table.source == "HAM10000"
        assert splits_of(table) == ["train", "train", "val", "val"]
        (tmp_path / "val_dir/nv/ISIC_3.jpg").rename(tmp_path / "ISIC_3.jpg")
        table = open_data(tmp_path)
        assert table.splits is None
        assert any("named train and val are no splits" in problem for problem in table.problems)


class TestMasks:
    def test_beside_the_images(self, tmp_path: Path) -> None:
        """BUSI: benign (1).png, benign (1)_mask.png and a second mask of some images."""
        for label in ("benign", "malignant"):
            for i in (1, 2):
                draw(tmp_path / label / f"{label} ({i}).png", seed=i)
                mask(tmp_path / label / f"{label} ({i})_mask.png")
            mask(tmp_path / label / f"{label} (1)_mask_1.png")
        table = open_data(tmp_path)
        assert len(table) == 4
        assert not any("mask" in name for name in table.names)
        assert any("masks, left out" in problem and ": 6 (" in problem for problem in table.problems)
        assert len(open_data(tmp_path, strict=True)) == 4
        assert len(open_data(tmp_path, keep_masks=True)) == 10

    def test_in_a_folder_beside_the_images(self, tmp_path: Path) -> None:
        """COVID-19 radiography: COVID/images/1.png and COVID/masks/1.png."""
        for label in ("COVID", "Normal"):
            for i in (1, 2):
                draw(tmp_path / label / "images" / f"{label}-{i}.png", seed=i)
                mask(tmp_path / label / "masks" / f"{label}-{i}.png")
        assert open_data(tmp_path).names == [f"{c}/images/{c}-{i}.png" for c in ("COVID", "Normal") for i in (1, 2)]

    @pytest.mark.parametrize("name", ["{}_masks", "{} mask", "masks_{}"])
    def test_in_a_folder_named_after_the_class(self, tmp_path: Path, name: str) -> None:
        for label in ("benign", "malignant"):
            for i in range(2):
                draw(tmp_path / label / f"{i}.jpg", seed=i)
                mask(tmp_path / name.format(label) / f"{i}.png")
        table = open_data(tmp_path)
        assert table.classes == ("benign", "malignant") and len(table) == 4
        assert any("masks, left out" in problem and ": 4 (" in problem for problem in table.problems)

    @pytest.mark.parametrize(
        ("image", "segmented"),
        [("{}/{}.png", "{}/mask_{}.png"), ("{}/image_{}.png", "{}/mask_{}.png"), ("{}/img{}.jpg", "{}/msk{}.png"),
         ("{}/IMD00{}.bmp", "{}/IMD00{}_lesion.bmp"), ("{}/{}.png", "{}/{}_left_lung_mask.png"),
         ("{}/x{}.bmp", "{}/x{}_anno.bmp"), ("{}/x{}.png", "{}/PNGmasks/x{}.png"),
         ("images/{}/x{}.png", "masks/{}/x{}.png"), ("{}/case{}/image.png", "{}/case{}/mask.png")],
    )  # fmt: skip
    def test_of_other_names(self, tmp_path: Path, image: str, segmented: str) -> None:
        for label in ("benign", "malignant"):
            for i in (1, 2, 3):
                draw(tmp_path / image.format(label, i), seed=i)
                mask(tmp_path / segmented.format(label, i))
        table = open_data(tmp_path)
        assert table.names == [image.format(label, i) for label in ("benign", "malignant") for i in (1, 2, 3)]
        assert any("masks, left out" in problem and ": 6 (" in problem for problem in table.problems)

    def test_in_folders_beside_one_of_images(self, tmp_path: Path) -> None:
        """Montgomery County: masks of the left and right lung are no class beside the X-rays."""
        for i in range(3):
            draw(tmp_path / "CXR_png" / f"MCUCXR_{i}.png", seed=i)
            mask(tmp_path / "ManualMask" / "leftMask" / f"MCUCXR_{i}.png")
            mask(tmp_path / "ManualMask" / "rightMask" / f"MCUCXR_{i}.png")
        with pytest.raises(InputError, match="one class folder only"):
            open_data(tmp_path)

    def test_the_name_of_the_data_folder_says_nothing(self, tmp_path: Path) -> None:
        class_folders(tmp_path / "lesion_masks", {"a": 2, "b": 2})
        mask(tmp_path / "lesion_masks" / "a" / "0_seg.png")
        assert len(open_data(tmp_path / "lesion_masks")) == 4

    def test_a_class_named_after_another_is_kept(self, tmp_path: Path) -> None:
        """Pictures, with the names of those of the other class: the content is that of no mask."""
        class_folders(tmp_path, {"face": 2, "face mask": 2})
        assert open_data(tmp_path).classes == ("face", "face mask")

    @pytest.mark.parametrize(
        ("size", "levels", "left_out"),
        [
            ((12, 16), (0, 255), True),
            ((12, 16), (255, 255), True),
            ((24, 32), (0, 255), False),
            ((12, 16), None, False),
        ],
    )
    def test_by_name_and_content(self, tmp_path: Path, size, levels, left_out: bool) -> None:
        """Not by name alone: the picture of a face mask is an image."""
        class_folders(tmp_path, {"a": 2, "b": 2})
        draw(tmp_path / "a" / "x.png")
        if levels is None:
            draw(tmp_path / "a" / "x_mask.png", seed=3, size=size)
        else:
            mask(tmp_path / "a" / "x_mask.png", size, levels)
        assert ("a/x_mask.png" not in open_data(tmp_path).names) is left_out

    def test_a_binary_image_of_its_own_is_kept(self, tmp_path: Path) -> None:
        class_folders(tmp_path, {"a": 2, "b": 2})
        mask(tmp_path / "a" / "drawing_mask.png")  # no image drawing.png beside it
        assert len(open_data(tmp_path)) == 5

    def test_lossy_masks(self, tmp_path: Path) -> None:
        class_folders(tmp_path, {"a": 2, "b": 2})
        draw(tmp_path / "a" / "x.png", size=(64, 80))
        mask(tmp_path / "a" / "x_segmentation.jpg", (64, 80))
        assert len(open_data(tmp_path)) == 5


class TestFilesAlone:
    def test_a_folder_with_one_npz(self, tmp_path: Path) -> None:
        arrays = {}
        for split in ("train", "val", "test"):
            arrays[f"{split}_images"] = np.zeros((3, 8, 8), np.uint8)
            arrays[f"{split}_labels"] = np.array([[0], [1], [1]])
        np.savez(tmp_path / "breastmnist.npz", **arrays)
        table = open_data(tmp_path)
        assert table.source == "MedMNIST"
        assert table.root == tmp_path / "breastmnist.npz"
        np.savez(tmp_path / "octmnist.npz", **arrays)
        with pytest.raises(InputError, match="2 MedMNIST files"):
            open_data(tmp_path)
        np.savez(tmp_path / "octmnist.npz", features=np.zeros(3))
        assert open_data(tmp_path).source == "MedMNIST"

    def test_an_evaluation_set(self, tmp_path: Path) -> None:
        class_folders(tmp_path, {"val/a": 2, "val/b": 2, "test/a": 2, "test/b": 2})
        table = open_data(tmp_path)
        assert set(splits_of(table)) == {"val", "test"}
        assert any(
            "no training split, only test and val" in problem and "predict" in problem for problem in table.problems
        )
        with pytest.raises(InputError, match=r"test, val and no train.*split\.by=class"):
            make_split(table)
        assert set(make_split(table, SplitSettings(by="class")).tolist()) == {"train", "val", "test"}


class TestIdsInNames:
    def pneumonia(self, root: Path) -> Path:
        """Paul Mooney's chest X-rays: person12_bacteria_34.jpeg, patients in several splits."""
        for person in range(8):
            for shot in range(3):
                split = "test" if person < 3 and shot == 2 else "train"
                draw(root / split / "PNEUMONIA" / f"person{person}_bacteria_{10 * person + shot}.jpeg", seed=person)
        for i in range(6):
            draw(root / ("test" if i > 3 else "train") / "NORMAL" / f"IM-{100 + i:04d}-0001.jpeg", seed=i)
        return root

    def test_are_pointed_out_and_taken(self, tmp_path: Path) -> None:
        table = open_data(self.pneumonia(tmp_path))
        found = suspected_ids(table)
        assert found is not None
        assert (found.ids, found.images, found.divided) == (8, 24, 3)
        grouped = open_data(tmp_path, group_regex=found.regex)
        assert len({group for group in groups_of(grouped) if group.startswith("person")}) == 8
        assert sum(group.startswith("alone") for group in groups_of(grouped)) == 6
        assert suspected_ids(grouped) is None

    @pytest.mark.parametrize(
        ("names", "ids"),
        [([f"{p:08d}_{s:03d}.png" for p in range(8) for s in range(2)], 8),
         ([f"TCGA-A{p}-X{p}-0{s}.png" for p in range(8) for s in range(2)], 8),
         ([f"patient{p:05d}/study1/view{s}.jpg" for p in range(8) for s in range(2)], 8),
         ([f"SOB_B_A-14-{22549 + p}AB-40-00{s}.png" for p in range(8) for s in range(2)], 8),
         ([f"OAS1_{p:04d}_MR1_mpr-1_{s}.jpg" for p in range(8) for s in range(2)], 8),
         ([f"a/1{p:02d}/{s}.png" for p in range(8) for s in range(2)], 8),
         ([f"a/SOB/SOB_B_{p}AB/{m}X/{s}.png" for p in range(8) for m in (40, 100) for s in range(2)], 8),
         ([f"train/{p}/{s}.png" for p in "ab" for s in range(8)], 0),
         ([f"x/site{p % 4}/{p}.png" for p in range(16)], 0),
         ([f"ISIC_{i:07d}.jpg" for i in range(16)], 0),
         ([f"benign ({i}).png" for i in range(16)], 0),
         ([f"Te-gl_{i:04d}.jpg" for i in range(16)], 0)],
    )  # fmt: skip
    def test_of_other_sets(self, tmp_path: Path, names: list[str], ids: int) -> None:
        labels = np.arange(len(names)) // 4 % 2
        table = ImageTable("made", tmp_path, names, [tmp_path / name for name in names], labels, ("a", "b"))
        found = suspected_ids(table)
        assert (0 if found is None else found.ids) == ids
        if found is not None:
            from cclnet.data.identifiers import groups_by_regex

            assert len(set(groups_by_regex(names, found.regex))) == ids

    def test_a_class_with_a_number_is_no_id(self, tmp_path: Path) -> None:
        """EyePACS sorted into train/0 to train/4: the folders are the classes."""
        names = [f"train/{k}/{i}.png" for k in range(5) for i in range(4)]
        labels, classes = np.repeat(np.arange(5), 4), tuple("01234")
        table = ImageTable("made", tmp_path, names, [tmp_path / n for n in names], labels, classes)
        assert suspected_ids(table) is None

    def test_a_counter_shared_by_classes_is_no_id(self, tmp_path: Path) -> None:
        names = [f"{i:03d}_{c}.png" for i in range(8) for c in "ab"]
        table = ImageTable("made", tmp_path, names, [tmp_path / n for n in names], np.arange(16) % 2, ("a", "b"))
        assert suspected_ids(table) is None

    def test_a_regex_that_cannot_be_used(self, tmp_path: Path) -> None:
        class_folders(tmp_path, {"a": 2, "b": 2})
        with pytest.raises(InputError, match=r"group_regex '\(' is not a regular expression"):
            open_data(tmp_path, group_regex="(")
        with pytest.raises(InputError, match=r"group_regex 'person' matches no image name"):
            open_data(tmp_path, group_regex="person")


class TestLeavingOut:
    def test_exclude(self, tmp_path: Path) -> None:
        class_folders(tmp_path, {"a": 3, "b": 3})
        table = open_data(tmp_path, exclude="a/0.png, 2.*")
        assert table.names == ["a/1.png", "b/0.png", "b/1.png"]
        assert "images left out by exclude: 3 (a/0.png, a/2.png, b/2.png)" in table.problems
        assert "patterns of exclude that fit no image: 1 (c/*)" in open_data(tmp_path, exclude="c/*").problems

    def test_exclude_rows_that_would_be_refused(self, tmp_path: Path) -> None:
        rows = [["image", "label"], ["0.png", "a"], ["0.png", "b"], ["1.png", "a"], ["2.png", "b"]]
        for i in range(3):
            draw(tmp_path / f"{i}.png", seed=i)
        path = write_csv(tmp_path / "t.csv", rows)
        with pytest.raises(InputError, match=r"0\.png.*--exclude"):
            open_data(path)
        table = open_data(path, exclude="0.png")
        assert table.names == ["1.png", "2.png"]
        assert table.problems == ("images left out by exclude: 2 (0.png, 0.png)",)

    def test_min_class_size(self, tmp_path: Path) -> None:
        class_folders(tmp_path, {"a": 3, "b": 3, "rare": 1})
        table = open_data(tmp_path, min_class_size=2)
        assert table.classes == ("a", "b")
        assert "classes with fewer than 2 images, left out: 1 (rare (1))" in table.problems
        with pytest.raises(InputError, match="min_class_size must be at least 0"):
            open_data(tmp_path, min_class_size=-1)

    def test_min_class_size_of_several_labels_keeps_the_images(self, tmp_path: Path) -> None:
        rows = [["image", "labels"], ["0.png", "a|rare"], ["1.png", "a|b"], ["2.png", "b"]]
        for i in range(3):
            draw(tmp_path / f"{i}.png", seed=i)
        table = open_data(write_csv(tmp_path / "t.csv", rows), min_class_size=2)
        assert table.labels.tolist() == [[1, 0], [1, 1], [0, 1]]

    def test_merge_labels(self, tmp_path: Path) -> None:
        class_folders(tmp_path / "data", {"Normal": 2, "normal ": 1, "virus": 2, "bacteria": 1, "unclear": 4})
        table = open_data(tmp_path / "data")
        assert any("several spellings" in problem and "Normal and normal" in problem for problem in table.problems)
        rows = [
            ["old", "new"],
            ["normal", "Normal"],
            ["virus", "pneumonia"],
            ["bacteria", "pneumonia"],
            ["unclear", ""],
        ]
        merged = write_csv(tmp_path / "merge.csv", rows)
        table = open_data(tmp_path / "data", merge_labels=str(merged))
        assert dict(zip(table.classes, table.class_counts().tolist(), strict=True)) == {"Normal": 3, "pneumonia": 3}
        write_csv(merged, [["old", "new"], ["viurs", "pneumonia"]])
        with pytest.raises(InputError, match="did you mean 'virus'"):
            open_data(tmp_path / "data", merge_labels=str(merged))
        write_csv(merged, [["virus", "pneumonia"], ["bacteria", "pneumonia"]])  # virus would not be merged
        with pytest.raises(InputError, match="expected the columns old and new, got virus, pneumonia"):
            open_data(tmp_path / "data", merge_labels=str(merged))

    def test_merge_several_labels(self, tmp_path: Path) -> None:
        rows = [["image", "labels"], ["0.png", "a|b"], ["1.png", "b|c"], ["2.png", "c"]]
        for i in range(3):
            draw(tmp_path / f"{i}.png", seed=i)
        path, merged = write_csv(tmp_path / "t.csv", rows), write_csv(tmp_path / "m.txt", [["old", "new"], ["b", "a"]])
        table = open_data(path, merge_labels=str(merged))
        assert table.classes == ("a", "c")
        assert table.labels.tolist() == [[1, 0], [1, 1], [0, 1]]
