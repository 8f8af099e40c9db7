"""The audit finds each thing that is wrong, and nothing where all is well."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from cclnet.cli import app
from cclnet.data.audit import ADVICE, audit, audit_tables
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
def class_folders(tmp_path: Path) -> Path:
    for number in range(30):
        folder = tmp_path / "data" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        picture(number).save(folder / f"{number}.png")
    return tmp_path / "data"


def run(*arguments: object):
    return CliRunner().invoke(app, ["data", "audit", *map(str, arguments)], env={"COLUMNS": "200"})


def test_the_command_shows_a_table_and_writes_every_finding(tmp_path, class_folders):
    (class_folders / "a" / "broken.png").write_text("text")
    picture(0).save(class_folders / "b" / "copy.png")
    result = run(class_folders, "--out", tmp_path / "out", "--cache-dir", tmp_path / "cache", "--quiet")
    assert result.exit_code == 0, result.output
    assert "unreadable" in result.output
    assert ADVICE["unreadable"] in result.output
    written = pd.read_csv(tmp_path / "out" / "audit.csv", keep_default_na=False)
    assert list(written.columns) == ["finding", "image", "other", "detail"]
    assert written["finding"][0] == "unreadable"
    assert written["finding"].str.startswith("exact duplicate across").sum() == 1


def test_the_command_says_when_all_is_well(tmp_path, class_folders):
    result = run(class_folders, "--out", tmp_path / "out", "--cache-dir", tmp_path / "cache")
    assert result.exit_code == 0, result.output
    assert "30 images: nothing found." in result.output
    assert (tmp_path / "out" / "audit.csv").read_text() == "finding,image,other,detail\n"


def test_a_folder_that_cannot_be_made_is_named_before_the_work(tmp_path, class_folders):
    (tmp_path / "file").write_text("")
    result = run(class_folders, "--out", tmp_path / "file" / "out", "--cache-dir", tmp_path / "cache")
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
              "small class", "unusual size"]  # fmt: skip
    assert sorted(ADVICE) == sorted(pairs + others)


# The real images.


def test_isic2018_by_class_shares_lesions_with_train(tmp_path):
    if "CCLNET_ISIC2018" not in os.environ:
        pytest.skip("CCLNET_ISIC2018 does not name the ISIC 2018 folder")
    from cclnet.data.sources import open_data

    table = open_data(Path(os.environ["CCLNET_ISIC2018"]))
    found = audit(table, SplitSettings(by="class"), 64, tmp_path / "cache", progress=False)
    share = found.leaks.query("split == 'val' and `class` == ''")["share"].item()
    assert round(share, 2) in (0.37, 0.38, 0.39, 0.40)
    counts = found.findings["finding"].value_counts()
    assert counts["group in several splits"] == found.leaks["shared"][0]
    assert counts.filter(like="exact duplicate").sum() == 2
