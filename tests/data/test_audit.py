"""data audit finds each problem and nothing in a clean set; data show counts what a set contains."""

from __future__ import annotations

import io
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from layouts import class_folders, draw, isic_split, write_csv
from PIL import Image, ImageEnhance
from rich.console import Console
from typer.testing import CliRunner

from cclnet.cli import app, main
from cclnet.data import duplicates
from cclnet.data.audit import ADVICE, audit, audit_tables, describe
from cclnet.data.cache import DecodedImages
from cclnet.data.duplicates import BITS, BLANK, NEAR, near_pairs, perceptual_hashes, same_pixels, sample_rows
from cclnet.data.sources import open_data
from cclnet.data.table import ImageTable
from cclnet.errors import InputError
from cclnet.settings import SplitSettings


def picture(seed: int, size=(64, 48)) -> Image.Image:
    grain = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    return Image.fromarray(grain).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture
def table(tmp_path: Path) -> ImageTable:
    """Forty images of two classes, in pairs of one lesion, given as train and val, with nothing wrong."""
    folder = tmp_path / "images"
    folder.mkdir()
    paths = [folder / f"{number:02d}.png" for number in range(40)]
    for number, path in enumerate(paths):
        picture(number).save(path)
    return ImageTable(
        source="test set",
        root=folder,
        names=[path.stem for path in paths],
        images=paths,
        labels=np.repeat([0, 1], 20),
        classes=("MEL", "NV"),
        groups=np.array([f"lesion {number // 2}" for number in range(40)]),
        splits=np.array((["train"] * 16 + ["val"] * 4) * 2),
    )


@pytest.fixture
def look(tmp_path: Path):
    def findings(table: ImageTable, **split) -> list[tuple[str, ...]]:
        found = audit(table, SplitSettings(**split), 32, tmp_path / "cache", workers=1, progress=False)
        return [tuple(row) for row in found.findings.itertuples(index=False)]

    return findings


def test_nothing_where_nothing_is_wrong(table, look):
    assert look(table) == []


def test_unreadable_and_truncated_files(table, look):
    table.images[3].write_text("not an image")
    table.images[5].write_bytes(table.images[5].read_bytes()[:200])
    table.images[8].unlink()
    found = look(table)
    assert [(row[0], row[1]) for row in found] == [("unreadable", "03"), ("unreadable", "05"), ("unreadable", "08")]
    assert "not an image" in found[0][3]
    assert "truncated" in found[1][3]
    assert "No such file" in found[2][3]


def test_exact_duplicates_within_and_across(table, look):
    for copy, original in ((1, 0), (16, 2), (20, 4), (36, 6)):
        picture(original).save(table.images[copy])
    assert sorted(look(table)) == [
        ("exact duplicate", "01", "00", "the same pixels; group lesion 0"),
        ("exact duplicate across classes", "20", "04", "the same pixels; MEL and NV; groups lesion 2 and lesion 10"),
        ("exact duplicate across splits", "16", "02", "the same pixels; train and val; groups lesion 1 and lesion 8"),
        (
            "exact duplicate across splits and classes",
            "36",
            "06",
            "the same pixels; train and val; MEL and NV; groups lesion 3 and lesion 18",
        ),
    ]


def test_near_duplicates_within_and_across(table, look):
    for copy, original in ((1, 0), (17, 2)):
        table.images[copy].unlink()
        picture(original).save(table.images[copy], "JPEG", quality=60)
    found = look(replace(table, groups=None))
    assert [row[:3] for row in found] == [
        ("near duplicate", "01", "00"),
        ("near duplicate across splits", "17", "02"),
    ]
    assert found[1][3].endswith("of 256 bits differ; train and val")


def test_an_image_with_many_near_ones_is_named_once_with_its_nearest(table, look):
    for row in range(1, 10):
        picture(0, size=(64 + row, 48)).save(table.images[row])
    found = look(replace(table, groups=None))
    assert len(found) == 9
    assert {row[0] for row in found} == {"near duplicate"}


def test_groups_divided_between_given_splits(table, look):
    groups = table.groups.copy()
    groups[16:18] = "lesion 0"
    found = look(replace(table, groups=groups))
    assert found == [
        ("group in several splits", "16", "00", "group lesion 0 in train and val"),
        ("group in several splits", "17", "00", "group lesion 0 in train and val"),
    ]


def test_images_without_a_group_have_none_in_common(table, look):
    groups = table.groups.copy()
    groups[[0, 1, 16, 17, 20]] = ""
    assert look(replace(table, groups=groups)) == []


def test_groups_divided_by_a_split_by_class_are_counted_per_class(table, tmp_path):
    table = replace(table, splits=None)
    found = audit(table, SplitSettings(by="class", val=0.25), 32, tmp_path / "cache", workers=1, progress=False)
    all_of_val, mel, nv = found.leaks["shared"]
    assert all_of_val == mel + nv == (found.findings["finding"] == "group in several splits").sum() > 0
    by_group = audit(table, SplitSettings(), 32, tmp_path / "cache", workers=1, progress=False)
    assert by_group.leaks["shared"].sum() == 0
    assert by_group.findings.empty


def test_label_conflicts_inside_a_group(table, look):
    groups = table.groups.copy()
    groups[20] = groups[2]
    found = look(replace(table, groups=groups))
    assert found == [("label conflict in a group", "20", "02", "group lesion 1: MEL, NV")]


def test_small_classes_and_a_split_that_cannot_be(table, look):
    labels = table.labels.copy()
    labels[0] = 2
    table = replace(table, labels=labels, classes=("MEL", "NV", "DF"), groups=None, splits=None)
    found = look(table)
    assert [row[0] for row in found] == ["no split", "small class"]
    assert "Too few images: DF (1)" in found[0][3]
    assert found[1][3] == "DF: 1 images"


def test_unusual_sizes_and_blank_images(table, look):
    picture(3, size=(20, 15)).save(table.images[3])
    picture(5, size=(200, 30)).save(table.images[5])
    picture(6, size=(80, 60)).save(table.images[6])
    Image.new("RGB", (64, 48), "black").save(table.images[8])
    Image.new("RGB", (64, 48), "white").save(table.images[9])
    assert [row[:2] for row in look(table)] == [
        ("blank image", "08"),
        ("blank image", "09"),
        ("unusual size", "03"),
        ("unusual size", "05"),
    ]


def test_several_usual_sizes_are_not_unusual(table, look):
    for row in range(0, 40, 2):
        picture(row, size=(320, 240)).save(table.images[row])
    assert look(table) == []


def test_images_in_memory_with_several_labels(look):
    array = np.stack([np.asarray(picture(seed)) for seed in range(30)])
    array[7] = array[3]
    labels = np.tile(np.array([[1, 0], [0, 1], [1, 1]], np.uint8), (10, 1))
    groups = np.array([f"patient {row // 3}" for row in range(30)])
    table = ImageTable("array", Path(), [str(row) for row in range(30)], array, labels, ("A", "B"), groups)
    found = look(table, val=0.0)
    assert found == [
        ("exact duplicate across classes", "7", "3", "the same pixels; A and B; groups patient 1 and patient 2")
    ]


def test_all_images_broken(table, look):
    for path in table.images:
        path.write_text("text")
    assert len(look(table)) == 40


# In the terminal.


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    for number in range(30):
        folder = tmp_path / "data" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        picture(number).save(folder / f"{number}.png")
    return tmp_path / "data"


def run(*arguments: object):
    return CliRunner().invoke(app, ["data", "audit", *map(str, arguments)], env={"COLUMNS": "200"})


def test_the_command_shows_a_table_and_writes_every_finding(tmp_path, data_folder):
    (data_folder / "a" / "broken.png").write_text("text")
    picture(0).save(data_folder / "b" / "copy.png")
    result = run(data_folder, "--out", tmp_path / "out", "--cache-dir", tmp_path / "cache", "--quiet")
    assert result.exit_code == 0, result.output
    assert "unreadable" in result.output
    assert ADVICE["unreadable"] in result.output
    written = pd.read_csv(tmp_path / "out" / "audit.csv", keep_default_na=False)
    assert list(written.columns) == ["finding", "image", "other", "detail"]
    assert written["finding"][0] == "unreadable"
    assert written["finding"].str.startswith("exact duplicate across").sum() == 1


def test_names_in_the_file_are_no_formulas(tmp_path, data_folder):
    """A spreadsheet would run the name of an image that begins with a sign."""
    (data_folder / "a").rename(data_folder / "=a")
    (data_folder / "=a" / "broken.png").write_text("text")
    run(data_folder, "--out", tmp_path / "out", "--cache-dir", tmp_path / "cache", "--quiet")
    assert pd.read_csv(tmp_path / "out" / "audit.csv")["image"].tolist() == ["'=a/broken.png"]


def test_the_command_says_when_all_is_well(tmp_path, data_folder):
    result = run(data_folder, "--out", tmp_path / "out", "--cache-dir", tmp_path / "cache")
    assert result.exit_code == 0, result.output
    assert "30 images: nothing found." in result.output
    assert (tmp_path / "out" / "audit.csv").read_text() == "finding,image,other,detail\n"


def test_a_folder_that_cannot_be_made_is_named_before_the_work(tmp_path, data_folder):
    (tmp_path / "file").write_text("")
    result = run(data_folder, "--out", tmp_path / "file" / "out", "--cache-dir", tmp_path / "cache")
    assert isinstance(result.exception, InputError)
    assert "cannot be made: Not a directory" in str(result.exception)
    assert not (tmp_path / "cache").exists()


def test_leaks_are_shown_by_split_and_class(table, tmp_path):
    table = replace(table, splits=None, classes=("MEL", "[red]NV"))
    found = audit(table, SplitSettings(by="class"), 32, tmp_path / "cache", workers=1, progress=False)
    screen = io.StringIO()
    Console(width=200, file=screen).print(audit_tables(found, "audit.csv"))
    text = screen.getvalue()
    first = found.leaks.iloc[0]
    assert (
        f"{first['share']:.0%} of the val images ({first['shared']} of {first['images']}) share a group with train:"
        in text
    )
    assert "[red]NV" in text


def test_every_finding_has_advice():
    pairs = [
        f"{kind} duplicate{across}"
        for kind in ("exact", "near")
        for across in ("", " across splits", " across classes", " across splits and classes")
    ]
    others = ["unreadable", "blank image", "group in several splits", "label conflict in a group", "no split",
              "small class", "unusual size", "ids in image names"]  # fmt: skip
    assert sorted(ADVICE) == sorted(pairs + others)


# Perceptual hashes.


def large_picture(seed: int) -> Image.Image:
    return picture(seed, size=(320, 240))


def compressed(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=40)
    return Image.open(file).convert("RGB")


def distance(left: Image.Image, right: Image.Image) -> int:
    hashes = perceptual_hashes([sample_rows(np.asarray(image)) for image in (left, right)])["hash"]
    return int(np.bitwise_count(hashes[0] ^ hashes[1]).sum())


CHANGES = {
    "another compression": compressed,
    "half the size": lambda image: image.resize((160, 120), Image.Resampling.BICUBIC),
    "another shape": lambda image: image.resize((240, 240), Image.Resampling.BICUBIC),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.1),
    "less contrast": lambda image: ImageEnhance.Contrast(image).enhance(0.7),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_hash_survives(change):
    assert all(distance(large_picture(seed), CHANGES[change](large_picture(seed))) <= NEAR for seed in range(10))


def test_other_images_are_far():
    distances = [distance(large_picture(seed), large_picture(seed + 1)) for seed in range(0, 20, 2)]
    assert min(distances) > 80
    assert np.mean(distances) == pytest.approx(BITS / 2, abs=16)


def test_an_even_surface_spans_no_grey_levels():
    flat, picture = np.full((40, 50, 3), 77, np.uint8), np.asarray(large_picture(0))
    contrast = perceptual_hashes([sample_rows(flat), sample_rows(picture)])["contrast"]
    assert contrast[0] <= BLANK and contrast[1] > 50


@pytest.mark.parametrize("limit", [0, 5, NEAR])
def test_pairs_are_those_of_a_search_over_all(limit):
    generator = np.random.default_rng(limit)
    bits = generator.integers(0, 2, (120, BITS), dtype=np.uint8)
    copies = bits[generator.integers(0, 120, 200)]
    for row, copy in enumerate(copies):
        copy[generator.choice(BITS, row % (2 * NEAR), replace=False)] ^= 1
    hashes = np.packbits(np.concatenate([bits, copies]), axis=1).view(np.uint64)
    pairs, differing = near_pairs(hashes, limit)
    everything = np.bitwise_count(hashes[:, None] ^ hashes[None]).sum(axis=2)
    expected = np.argwhere(np.triu(everything <= limit, k=1))
    assert len(expected) > 3
    np.testing.assert_array_equal(pairs, expected)
    np.testing.assert_array_equal(differing, everything[tuple(expected.T)])


@pytest.mark.parametrize("first", [0, 100, BITS - NEAR])
def test_bits_that_differ_side_by_side_are_found_too(first):
    bits = np.random.default_rng(0).integers(0, 2, (2, BITS), dtype=np.uint8)
    bits[1] = bits[0]
    bits[1, first : first + NEAR] ^= 1
    pairs, differing = near_pairs(np.packbits(bits, axis=1).view(np.uint64))
    assert pairs.tolist() == [[0, 1]]
    assert differing.tolist() == [NEAR]


def test_frames_of_one_video_are_found_once_each_and_quickly():
    """Two thousand nearly equal hashes share nearly all bands: 2 million pairs, none twice."""
    bits = np.tile(np.random.default_rng(0).integers(0, 2, BITS, dtype=np.uint8), (2000, 1))
    rows = np.arange(2000)
    bits[rows, rows % BITS] ^= 1
    began = time.process_time()
    pairs, differing = near_pairs(np.packbits(bits, axis=1).view(np.uint64))
    assert len(pairs) == 2000 * 1999 // 2 and differing.max() == 2
    assert time.process_time() - began < 60  # it was minutes, and gigabytes, when each was found in every band


def test_of_many_images_only_nearer_pairs_are_searched_for(monkeypatch):
    monkeypatch.setattr(duplicates, "MANY", 1000)
    bits = np.random.default_rng(0).integers(0, 2, (3000, BITS), dtype=np.uint8)
    for row in range(60):
        bits[3 * row] = bits[3 * row + 1]
        bits[3 * row, np.random.default_rng(row).choice(BITS, row % 12, replace=False)] ^= 1
    hashes = np.packbits(bits, axis=1).view(np.uint64)
    pairs, differing = near_pairs(hashes)
    expected = [[3 * row, 3 * row + 1] for row in range(60) if row % 12 <= duplicates.NEAR_OF_MANY]
    assert pairs.tolist() == expected and differing.max() == 8
    everywhere = np.tile(hashes[:1], (3000, 1))  # one picture: no pairs of all with all
    assert len(near_pairs(everywhere)[0]) <= 3000 * duplicates._MOST_NEIGHBOURS


@pytest.mark.parametrize("count", [0, 1])
def test_no_pairs_among_none_or_one(count):
    pairs, differing = near_pairs(np.zeros((count, 4), np.uint64))
    assert pairs.shape == (0, 2)
    assert differing.shape == (0,)


def test_same_pixels_in_another_shape_are_another_image():
    array = np.zeros((4, 2, 6, 3), np.uint8)
    array[1:, 0] = 9
    images = DecodedImages.from_array(array)
    images.heights[3], images.widths[3] = 3, 4
    hashes = np.zeros((4, 4), np.uint64)
    assert same_pixels(hashes, images, np.arange(4)) == {2: 1}
    assert same_pixels(hashes, images, np.array([0, 2])) == {}


# data show.


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
        isic_split(tmp_path, "Training", {"ISIC_1": "MEL", "ISIC_2": "NV", "ISIC_3": "NV"})
        isic_split(tmp_path, "Test", {"ISIC_4": "NV"})
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


# The real images.


def test_isic2018_by_class_shares_lesions_with_train(tmp_path):
    if "CCLNET_ISIC2018" not in os.environ:
        pytest.skip("CCLNET_ISIC2018 does not name the ISIC 2018 folder")
    table = open_data(Path(os.environ["CCLNET_ISIC2018"]))
    found = audit(table, SplitSettings(by="class"), 64, tmp_path / "cache", progress=False)
    share = found.leaks.query("split == 'val' and `class` == ''")["share"].item()
    assert round(share, 2) in (0.37, 0.38, 0.39, 0.40)
    counts = found.findings["finding"].value_counts()
    assert counts["group in several splits"] == found.leaks["shared"][0]
    assert counts.filter(like="exact duplicate").sum() == 2
