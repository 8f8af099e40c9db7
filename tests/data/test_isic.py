"""ISIC challenge folders and HAM10000, drawn small in the layouts they are downloaded in, and the real images."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
from layouts import (
    HAM_IMAGES,
    ISIC2018,
    ISIC2019,
    class_folders,
    draw,
    ham_rows,
    isic_split,
    truth_rows,
    write_csv,
)

from cclnet.data.sources import open_data
from cclnet.data.table import ImageTable
from cclnet.errors import InputError

TRAINING = {"ISIC_1": "MEL", "ISIC_2": "NV", "ISIC_3": "NV", "ISIC_4": "AKIEC"}


def counts(table: ImageTable) -> dict[str, int]:
    return dict(zip(table.classes, table.class_counts().tolist(), strict=True))


def labels(table: ImageTable) -> dict[str, str]:
    return {name: table.classes[label] for name, label in zip(table.names, table.labels, strict=True)}


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """The training split of 2018 as the challenge ships it."""
    isic_split(tmp_path, "Training", TRAINING)
    groupings = [["image", "lesion_id", "diagnosis_confirm_type"]]
    groupings += [[image, lesion, "histo"] for image, lesion in zip(TRAINING, ("A", "B", "B", "C"), strict=True)]
    write_csv(tmp_path / "ISIC2018_Task3_Training_LesionGroupings.csv", groupings)
    return tmp_path


class TestIsic2018:
    def test_the_training_split(self, official: Path) -> None:
        table = open_data(official)
        assert table.source == "ISIC challenge folder"
        assert labels(table) == TRAINING
        assert table.classes == ("MEL", "NV", "AKIEC")
        assert table.groups is not None
        assert table.groups.tolist() == ["A", "B", "B", "C"]
        assert table.splits is None  # one split alone is no split
        assert table.extra["diagnosis_confirm_type"].tolist() == ["histo"] * 4
        assert [path.name for path in table.images] == [f"{name}.jpg" for name in table.names]
        assert table.problems == ("classes without an image, left out: 4 (BCC, BKL, DF, VASC)",)

    @pytest.mark.parametrize(
        "given",
        [
            "ISIC2018_Task3_Training_Input",
            "ISIC2018_Task3_Training_GroundTruth",
            "ISIC2018_Task3_Training_GroundTruth/ISIC2018_Task3_Training_GroundTruth.csv",
        ],
    )
    def test_any_of_its_folders_or_the_csv_may_be_given(self, official: Path, given: str) -> None:
        table = open_data(official / given)
        assert labels(table) == TRAINING
        assert table.groups is not None
        assert all(path.is_relative_to(table.root) for path in table.images)

    @pytest.mark.parametrize("place", [".", "ISIC2018_Task3_Training_Input"])
    def test_the_truth_may_lie_beside_or_among_the_images(self, official: Path, place: str) -> None:
        inside = official / "ISIC2018_Task3_Training_GroundTruth"
        shutil.move(inside / "ISIC2018_Task3_Training_GroundTruth.csv", official / place)
        inside.rmdir()
        for given in (official, official / "ISIC2018_Task3_Training_Input"):
            assert labels(open_data(given)) == TRAINING

    def test_official_folders_give_the_splits(self, official: Path) -> None:
        isic_split(official, "Validation", {"ISIC_5": "MEL"})
        isic_split(official, "Test", {"ISIC_6": "BKL", "ISIC_7": "NV"})
        table = open_data(official)
        assert table.splits is not None
        assert dict(zip(table.names, table.splits, strict=True)) == dict.fromkeys(TRAINING, "train") | {
            "ISIC_5": "val",
            "ISIC_6": "test",
            "ISIC_7": "test",
        }
        assert table.groups is not None
        assert table.groups[4:].tolist() == ["alone: ISIC_5", "alone: ISIC_6", "alone: ISIC_7"]
        assert labels(open_data(official / "ISIC2018_Task3_Test_Input")) == {"ISIC_6": "BKL", "ISIC_7": "NV"}

    def test_a_split_whose_truth_is_kept_secret_is_counted(self, official: Path) -> None:
        for i in range(20):
            draw(official / "ISIC2018_Task3_Test_Input" / f"ISIC_{100 + i}.jpg")
        draw(official / "ISIC2018_Task1-2_Training_Input" / "ISIC_9.jpg")  # another task: not ours to count
        table = open_data(official)
        assert len(table) == 4
        assert any(
            problem.startswith("images without a label: 20 (ISIC2018_Task3_Test_Input/ISIC_100.jpg, ")
            and problem.endswith(" and 12 more)")
            for problem in table.problems
        )

    def test_ham10000_metadata_beside_it_adds_to_it(self, official: Path) -> None:
        (official / "ISIC2018_Task3_Training_LesionGroupings.csv").unlink()
        images = {image: (f"HAM_{i // 2}", label.lower()) for i, (image, label) in enumerate(TRAINING.items())}
        write_csv(official / "HAM10000_metadata.csv", ham_rows(images))
        table = open_data(official)
        assert table.source == "ISIC challenge folder"
        assert table.groups is not None
        assert table.groups.tolist() == ["HAM_0", "HAM_0", "HAM_1", "HAM_1"]
        assert table.extra["sex"].tolist() == ["male"] * 4

    def test_masks_and_texts_among_the_images_are_passed_over(self, official: Path) -> None:
        folder = official / "ISIC2018_Task3_Training_Input"
        draw(folder / "ISIC_1_segmentation.png")
        draw(folder / "ISIC_1_superpixels.png")
        draw(folder / "._ISIC_1.jpg")
        (folder / "LICENSE.txt").write_text("free")
        assert not any("without a label" in problem for problem in open_data(official).problems)

    def test_a_copy_of_the_truth_counts_once_and_another_of_its_name_not(self, official: Path) -> None:
        name = "ISIC2018_Task3_Training_GroundTruth.csv"
        shutil.copy(official / "ISIC2018_Task3_Training_GroundTruth" / name, official)
        assert labels(open_data(official)) == TRAINING
        write_csv(official / name, truth_rows(ISIC2018, {"ISIC_1": "NV"}))
        with pytest.raises(InputError, match="have the same name and differ"):
            open_data(official)

    def test_the_folder_one_stands_in(self, official: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        draw(official / "ISIC2018_Task3_Training_Input" / "ISIC_9.jpg")
        monkeypatch.chdir(official)
        table = open_data(".")
        assert labels(table) == TRAINING
        assert table.problems[0] == "images without a label: 1 (ISIC2018_Task3_Training_Input/ISIC_9.jpg)"

    def test_images_behind_a_link_out_of_the_folder(
        self, official: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        elsewhere = tmp_path_factory.mktemp("elsewhere") / "images"
        shutil.move(official / "ISIC2018_Task3_Training_Input", elsewhere)
        (official / "ISIC2018_Task3_Training_Input").symlink_to(elsewhere)
        with pytest.raises(InputError, match=r"lead out of it: .*ISIC2018_Task3_Training_Input\. .*--follow-links"):
            open_data(official)
        assert labels(open_data(official, follow_links=True)) == TRAINING

    def test_the_order_is_that_of_the_names(self, official: Path) -> None:
        reverse = dict(reversed(TRAINING.items()))
        truth = official / "ISIC2018_Task3_Training_GroundTruth" / "ISIC2018_Task3_Training_GroundTruth.csv"
        write_csv(truth, truth_rows(ISIC2018, reverse))
        assert open_data(official).names == list(TRAINING)


class TestIsic2018WithFaults:
    def test_labels_without_image_and_images_without_label(self, official: Path) -> None:
        (official / "ISIC2018_Task3_Training_Input" / "ISIC_2.jpg").unlink()
        draw(official / "ISIC2018_Task3_Training_Input" / "ISIC_77.jpg")
        table = open_data(official)
        assert table.names == ["ISIC_1", "ISIC_3", "ISIC_4"]
        assert table.problems[:2] == (
            "labels without an image: 1 (ISIC_2)",
            "images without a label: 1 (ISIC2018_Task3_Training_Input/ISIC_77.jpg)",
        )
        with pytest.raises(InputError, match=r"(?s)strict:.*ISIC_2.*ISIC_77"):
            open_data(official, strict=True)

    @pytest.mark.parametrize(
        "marks", ["nan,nan,nan,nan,nan,nan,nan", ",,,,,,", "0,0,0,0,0,0,0", "1,1,0,0,0,0,0", "2,0,0,0,0,0,0"]
    )
    def test_a_row_that_marks_no_class_or_two(self, official: Path, marks: str) -> None:
        truth = official / "ISIC2018_Task3_Training_GroundTruth" / "ISIC2018_Task3_Training_GroundTruth.csv"
        truth.write_text(truth.read_text().replace("ISIC_2,0.0,1.0,0.0,0.0,0.0,0.0,0.0", f"ISIC_2,{marks}"))
        table = open_data(official)
        assert "ISIC_2" not in table.names
        assert table.problems[0] == f"rows of {truth.name} that do not mark exactly one class: 1 (ISIC_2)"
        assert len(table.problems) == 2  # its image is not called unlabelled a second time
        with pytest.raises(InputError, match="exactly one class"):
            open_data(official, strict=True)

    def test_two_columns_for_one_class(self, official: Path) -> None:
        truth = official / "ISIC2018_Task3_Training_GroundTruth" / "ISIC2018_Task3_Training_GroundTruth.csv"
        whole = truth.read_text()
        truth.write_text(whole.replace("BKL", "AK"))
        with pytest.raises(InputError, match="two columns for AKIEC"):
            open_data(official)
        truth.write_text(whole.replace("BKL", "MEL"))
        with pytest.raises(InputError, match="columns of the same name: MEL"):
            open_data(official)

    def test_two_challenges_that_share_images(self, official: Path) -> None:
        isic_split(official, "Training", {"ISIC_1": "MEL", "ISIC_50": "SCC"}, year=2019)
        with pytest.raises(InputError, match=r"labelled twice in .*: ISIC_1\. Give the folder of one challenge"):
            open_data(official)

    def test_one_class_only(self, tmp_path: Path) -> None:
        isic_split(tmp_path, "Training", {"ISIC_1": "NV", "ISIC_2": "NV"})
        with pytest.raises(InputError, match=r"one class only \(NV, 2 images\)"):
            open_data(tmp_path)

    def test_no_image_at_all(self, official: Path) -> None:
        shutil.rmtree(official / "ISIC2018_Task3_Training_Input")
        with pytest.raises(InputError, match=r"no image is left .*\(labels without an image: 4"):
            open_data(official)

    def test_asked_for_by_name_where_it_is_not(self, tmp_path: Path) -> None:
        for source, expected in (("isic", "no ISIC ground truth"), ("ham10000", "no HAM10000 metadata")):
            with pytest.raises(InputError, match=expected):
                open_data(class_folders(tmp_path, {"a": 1, "b": 1}), source=source)


class TestIsic2019:
    IMAGES: ClassVar = {
        "ISIC_0000001": "MEL",
        "ISIC_0000002_downsampled": "AK",
        "ISIC_0000003": "SCC",
        "ISIC_0000004": "AK",
    }

    def test_its_classes_and_metadata(self, tmp_path: Path) -> None:
        isic_split(tmp_path, "Training", self.IMAGES, year=2019)
        rows = [["image", "age_approx", "anatom_site_general", "lesion_id", "sex"]]
        rows += [
            [image, 60, "back", lesion, "f"] for image, lesion in zip(self.IMAGES, ("L1", "L1", "", ""), strict=True)
        ]
        write_csv(tmp_path / "ISIC_2019_Training_Metadata.csv", rows)
        table = open_data(tmp_path)
        assert counts(table) == {"MEL": 1, "AKIEC": 2, "SCC": 1}  # AK and AKIEC are one class, UNK has no image
        assert table.groups is not None
        assert table.groups.tolist() == ["L1", "L1", "alone: ISIC_0000003", "alone: ISIC_0000004"]
        assert table.extra["anatom_site_general"].tolist() == ["back"] * 4
        assert "images without a group, each taken alone: 2 (ISIC_0000003, ISIC_0000004)" in table.problems
        assert len(open_data(tmp_path, strict=True)) == 4  # none of this is a fault

    def test_unk_and_weights_in_the_test_split(self, tmp_path: Path) -> None:
        isic_split(tmp_path, "Training", self.IMAGES, year=2019)
        isic_split(tmp_path, "Test", {"ISIC_9": "UNK"}, year=2019)
        truth = tmp_path / "ISIC_2019_Test_GroundTruth.csv"
        header, row = truth.read_text().splitlines()
        truth.write_text(f"{header},score_weight,validation_weight\n{row},1.0,0.0\n")
        table = open_data(tmp_path)
        assert labels(table)["ISIC_9"] == "UNK"
        assert table.classes == ("MEL", "AKIEC", "SCC", "UNK")

    def test_names_with_and_without_downsampled(self, tmp_path: Path) -> None:
        isic_split(tmp_path, "Training", self.IMAGES, year=2019)
        folder = tmp_path / "ISIC_2019_Training_Input"
        (folder / "ISIC_0000002_downsampled.jpg").rename(folder / "ISIC_0000002.jpg")
        (folder / "ISIC_0000003.jpg").rename(folder / "ISIC_0000003_downsampled.jpg")
        table = open_data(tmp_path, strict=True)
        assert [path.stem for path in table.images] == [
            "ISIC_0000001", "ISIC_0000002", "ISIC_0000003_downsampled", "ISIC_0000004",
        ]  # fmt: skip
        assert table.names == list(self.IMAGES)

    def test_images_one_folder_deeper_and_in_a_folder_of_another_name(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "a" / "ISIC_2019_Training_GroundTruth.csv", truth_rows(ISIC2019, self.IMAGES))
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        for image in self.IMAGES:
            draw(tmp_path / "a" / "ISIC_2019_Training_Input" / "ISIC_2019_Training_Input" / f"{image}.jpg")
            draw(tmp_path / "b" / "pictures" / f"{image}.PNG")
        assert open_data(tmp_path / "a", strict=True).names == open_data(tmp_path / "b", strict=True).names


class TestHam10000:
    @pytest.mark.parametrize("separator", [",", "\t"])
    @pytest.mark.parametrize("dataset", [False, True])
    @pytest.mark.parametrize("name", ["HAM10000_metadata.csv", "HAM10000_metadata", "HAM10000_metadata.tab"])
    def test_metadata_of_every_kind(self, tmp_path: Path, name: str, dataset: bool, separator: str) -> None:
        write_csv(tmp_path / name, ham_rows(HAM_IMAGES, dataset), separator)
        for i, image in enumerate(HAM_IMAGES):
            draw(tmp_path / f"HAM10000_images_part_{1 + i % 2}" / f"{image}.jpg")
        write_csv(tmp_path / "hmnist_28_28_L.csv", [["pixel0000", "label"], [1, 2]])
        (tmp_path / "ATTRIBUTION.txt").write_text("by somebody")
        for given in (tmp_path, tmp_path / name):
            table = open_data(given, strict=True)
            assert table.source == "HAM10000"
            assert counts(table) == {"MEL": 2, "NV": 2, "AKIEC": 1}
            assert table.names == list(HAM_IMAGES)
            assert table.groups is not None
            assert table.groups.tolist() == ["HAM_1", "HAM_1", "HAM_2", "HAM_3", "HAM_4"]
            assert set(table.extra) == {"dx_type", "age", "sex", "localization"} | ({"dataset"} if dataset else set())
            assert table.splits is None

    def test_kaggle_ships_every_image_twice(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "HAM10000_metadata.csv", ham_rows(HAM_IMAGES))
        for i, image in enumerate(HAM_IMAGES):
            first = draw(tmp_path / "HAM10000_images_part_1" / f"{image}.jpg", seed=i)
            (tmp_path / "copy").mkdir(exist_ok=True)
            shutil.copy(first, tmp_path / "copy")
        assert len(open_data(tmp_path, strict=True)) == 5
        draw(tmp_path / "copy" / "ISIC_0024307.jpg", size=(40, 40))
        table = open_data(tmp_path)
        assert len(table) == 4
        assert table.problems == ("labels for which several files fit: 1 (ISIC_0024307)",)

    def test_the_dataverse_has_a_test_split(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "HAM10000_metadata", ham_rows(HAM_IMAGES, dataset=True))
        test = {"ISIC_0034524": ("HAM_9", "nv"), "ISIC_0034525": ("HAM_8", "mel")}
        write_csv(tmp_path / "ISIC2018_Task3_Test_GroundTruth.csv", ham_rows(test, dataset=True))
        for image in HAM_IMAGES:
            draw(tmp_path / "HAM10000_images_part_1" / f"{image}.jpg")
            draw(tmp_path / "HAM10000_segmentations_lesion_tschandl" / f"{image}_segmentation.png")
        for image in test:
            draw(tmp_path / "ISIC2018_Task3_Test_Images" / f"{image}.jpg")
        table = open_data(tmp_path, strict=True)
        assert table.splits is not None
        assert table.splits.tolist() == ["train"] * 5 + ["test"] * 2

    def test_faults_are_named(self, tmp_path: Path) -> None:
        images = HAM_IMAGES | {"ISIC_0024311": ("HAM_5", "nan"), "ISIC_0024312": ("HAM_6", "nv")}
        write_csv(tmp_path / "HAM10000_metadata.csv", ham_rows(images))
        for image in [*HAM_IMAGES, "ISIC_0024311", "ISIC_0099999"]:
            draw(tmp_path / "images" / f"{image}.jpg")
        table = open_data(tmp_path)
        assert table.names == list(HAM_IMAGES)
        assert table.problems == (
            "rows without a diagnosis: 1 (ISIC_0024311)",
            "images without a label: 1 (images/ISIC_0099999.jpg)",
            "labels without an image: 1 (ISIC_0024312)",
        )
        with pytest.raises(InputError, match=r"(?s)ISIC_0024311.*ISIC_0099999.*ISIC_0024312"):
            open_data(tmp_path, strict=True)

    def test_the_same_metadata_twice_must_agree(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "HAM10000_metadata.csv", ham_rows(HAM_IMAGES))
        write_csv(tmp_path / "HAM10000_metadata", ham_rows(HAM_IMAGES, dataset=True), "\t")
        for image in HAM_IMAGES:
            draw(tmp_path / f"{image}.jpg")
        assert len(open_data(tmp_path, strict=True)) == 5
        write_csv(tmp_path / "HAM10000_metadata.csv", ham_rows(HAM_IMAGES | {"ISIC_0024308": ("HAM_2", "bcc")}))
        with pytest.raises(InputError, match="two diagnoses or lesions: ISIC_0024308"):
            open_data(tmp_path)


def test_the_real_images_from_both_layouts(tmp_path: Path) -> None:
    root = os.environ.get("CCLNET_ISIC2018")
    if not root:
        pytest.skip("CCLNET_ISIC2018 does not name a folder with the ISIC 2018 images")
    published = {"MEL": 1113, "NV": 6705, "BCC": 514, "AKIEC": 327, "BKL": 1099, "DF": 115, "VASC": 142}
    official = open_data(root)
    kaggle_rows = [["lesion_id", "image_id", "dx"]]
    for i, (name, label) in enumerate(labels(official).items()):
        assert official.groups is not None
        kaggle_rows.append([official.groups[i], name, label.lower()])
        copy = tmp_path / f"HAM10000_images_part_{1 if i < 5000 else 2}" / official.images[i].name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(b"")  # only names are read here
    write_csv(tmp_path / "HAM10000_metadata.csv", kaggle_rows)
    kaggle = open_data(tmp_path)
    for table in (official, kaggle):
        assert counts(table) == published
        assert table.groups is not None
        assert len(set(table.groups)) == 7470
        assert table.problems == ()
    assert official.names == kaggle.names
    assert (official.labels == kaggle.labels).all()
