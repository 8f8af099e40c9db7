"""Splits: no divided group, class ratios kept, the seed alone decides, and every refusal names its cause."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cclnet.data.split import divided_groups, leaks, make_split, read_split, split_kind, split_table, stratify
from cclnet.data.table import ImageTable
from cclnet.errors import InputError
from cclnet.runs.folder import write_split_file
from cclnet.settings import SplitSettings


def table_of(labels, groups=None, splits=None, classes=None) -> ImageTable:
    labels = np.asarray(labels)
    count = classes or (labels.shape[1] if labels.ndim == 2 else labels.max() + 1)
    return ImageTable(
        source="made-up set",
        root=Path(),
        names=[f"image {i:05d}" for i in range(len(labels))],
        images=np.zeros((len(labels), 2, 2), np.uint8),
        labels=labels,
        classes=tuple("ABCDEFGHIJ"[:count]),
        groups=None if groups is None else np.asarray(groups, dtype=str),
        splits=None if splits is None else np.asarray(splits, dtype=str),
    )


def lesions(counts=(1113, 670, 514, 115), seed=0) -> ImageTable:
    """Images of each class in lesions of one to four images, as in HAM10000."""
    generator = np.random.default_rng(seed)
    labels, groups = [], []
    for class_, count in enumerate(counts):
        lesion = np.repeat(np.arange(count), generator.choice([1, 1, 1, 2, 3, 4], count))[:count]
        labels += [class_] * count
        groups += [f"lesion {class_}-{number}" for number in lesion]
    return table_of(labels, groups)


def shares(table: ImageTable, splits, name: str):
    return table.class_counts(np.flatnonzero(splits == name)) / table.class_counts()


@pytest.mark.parametrize("by", ["auto", "group"])
@pytest.mark.parametrize("seed", range(3))
def test_by_group_divides_no_group_and_keeps_ratios(by, seed):
    table = lesions()
    splits = make_split(table, SplitSettings(by=by, val=0.2, test=0.13, calibration=0.07, seed=seed))
    assert divided_groups(splits, table.groups) == {}
    for split, wanted in {"train": 0.6, "val": 0.2, "test": 0.13, "calibration": 0.07}.items():
        np.testing.assert_allclose(shares(table, splits, split), wanted, atol=0.02)


def test_by_class_gives_the_exact_share_of_every_class():
    table = table_of(np.repeat([0, 1, 2], [100, 50, 10]))
    splits = make_split(table, SplitSettings(val=0.3, test=0.1))
    assert table.class_counts(np.flatnonzero(splits == "val")).tolist() == [30, 15, 3]
    assert table.class_counts(np.flatnonzero(splits == "test")).tolist() == [10, 5, 1]


def test_auto_goes_by_group_where_groups_are_known_and_class_ignores_them():
    table = lesions()
    assert divided_groups(make_split(table), table.groups) == {}
    assert len(divided_groups(make_split(table, SplitSettings(by="class")), table.groups)) > 100


def test_group_sizes_are_spread_evenly_too():
    table = lesions(counts=(3000, 3000))
    splits = make_split(table)
    sizes = pd.Series(table.groups).map(pd.Series(table.groups).value_counts()).to_numpy()
    assert sizes[splits == "val"].mean() == pytest.approx(sizes[splits == "train"].mean(), abs=0.05)


@pytest.mark.parametrize("by", ["class", "group"])
def test_the_seed_decides_and_the_order_of_rows_does_not(by):
    table = lesions()
    chosen = SplitSettings(by=by, test=0.1, calibration=0.1, seed=4)
    splits = make_split(table, chosen)
    assert (make_split(table, chosen) == splits).all()
    assert (make_split(table, replace(chosen, seed=5)) != splits).any()
    order = np.random.default_rng(0).permutation(len(table))
    assert (make_split(table.select(order), chosen) == splits[order]).all()


def test_calibration_comes_out_of_train_and_val_does_not_change_test():
    table = lesions()
    plain = make_split(table, SplitSettings(test=0.1))
    with_calibration = make_split(table, SplitSettings(test=0.1, calibration=0.1))
    assert (plain[with_calibration == "calibration"] == "train").all()
    for split in ("val", "test"):
        assert ((plain == split) == (with_calibration == split)).all()
    assert ((make_split(table, SplitSettings(test=0.1, val=0.4)) == "test") == (plain == "test")).all()


@pytest.mark.parametrize("by", ["class", "group"])
def test_folds_hold_every_image_out_once(by):
    table = lesions()
    held_out = np.zeros(len(table), dtype=int)
    for fold in range(4):
        splits = make_split(table, SplitSettings(by=by, folds=4, fold=fold, test=0.1, calibration=0.1))
        held_out += splits == "val"
        np.testing.assert_allclose(shares(table, splits, "val"), 0.225, atol=0.02)
        if by == "group":
            assert divided_groups(splits, table.groups) == {}
    assert (held_out == (splits != "test")).all()


def test_no_held_out_split():
    assert (make_split(lesions(), SplitSettings(val=0)) == "train").all()


def test_images_without_a_group_stand_alone():
    table = table_of([0] * 10 + [1] * 10, ["a"] * 3 + [""] * 17)
    splits = make_split(table, SplitSettings(val=0.5))
    assert len(set(splits[:3])) == 1
    assert (splits[10:] == "val").sum() == 5
    assert divided_groups(splits, table.groups) == {}


def test_every_split_gets_every_class_when_there_are_enough_units():
    table = table_of(np.repeat([0, 1, 2], [1000, 3, 2]))
    for seed in range(5):
        splits = make_split(table, SplitSettings(val=0.01, seed=seed))
        assert (table.class_counts(np.flatnonzero(splits == "val")) >= 1).all()
        assert (table.class_counts(np.flatnonzero(splits == "train")) >= 1).all()


def test_several_labels_at_once_keep_their_ratios():
    generator = np.random.default_rng(0)
    labels = (generator.random((4000, 5)) < [0.5, 0.2, 0.1, 0.03, 0.01]).astype(np.uint8)
    for groups in (None, [f"patient {i}" for i in generator.integers(0, 900, 4000)]):
        table = table_of(labels, groups)
        splits = make_split(table, SplitSettings(val=0.25))
        stray = np.abs(shares(table, splits, "val") - 0.25)
        assert (stray <= np.maximum(0.02, 1.01 / table.class_counts())).all()  # two points, or one image
        assert (splits == "val").mean() == pytest.approx(0.25, abs=0.01)
        assert groups is None or divided_groups(splits, table.groups) == {}


@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=6, max_size=40),
    folds=st.integers(2, 5),
    seed=st.integers(0, 99),
)
def test_every_unit_is_assigned_and_deviations_are_bounded_by_the_largest_units(counts, folds, seed):
    counts = np.array(counts)
    subset = stratify(counts, np.full(folds, 1 / folds), np.random.default_rng(seed))
    assert ((subset >= 0) & (subset < folds)).all()
    totals = counts.sum(axis=0)
    for p in range(folds):
        stray = np.abs(counts[subset == p].sum(axis=0) - totals / folds)
        assert (stray <= 4 * counts.max(axis=0, initial=0) + 1e-9).all()


def test_patients_with_several_diagnoses_leave_no_class_without_training():
    """A unit that fills one class's gap may be the last of another where it lies: that one stays."""
    checked = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        counts = np.zeros((rng.integers(6, 25), rng.integers(3, 6)), np.int64)
        for unit in counts:
            unit[rng.choice(len(unit), rng.integers(1, 3), replace=False)] = rng.integers(1, 6)
        if ((counts > 0).sum(axis=0) < 2).any():
            continue
        checked += 1
        subset = stratify(counts, [0.8, 0.2], np.random.default_rng(seed))
        assert (counts[subset == 0] > 0).any(axis=0).all(), seed
    assert checked > 200


# Splits that come with the data.


def test_given_splits_are_kept():
    given_splits = ["train"] * 6 + ["test"] * 4
    table = table_of([0, 1] * 5, splits=given_splits)
    assert make_split(table).tolist() == given_splits


def test_a_given_train_split_alone_is_no_split():
    assert (make_split(table_of([0] * 10, splits=["train"] * 10)) == "val").sum() == 2


def test_calibration_is_taken_from_a_given_train_split():
    table = table_of([0, 1] * 20, splits=["train"] * 30 + ["val"] * 10)
    splits = make_split(table, SplitSettings(calibration=0.1))
    assert (splits[:30] == "calibration").sum() == 4
    assert (splits[30:] == "val").all()


def test_a_given_test_split_is_kept_when_the_rest_is_split():
    table = table_of([0, 1] * 20, splits=["train"] * 20 + ["val"] * 10 + ["test"] * 10)
    splits = make_split(table, SplitSettings(by="class", val=0.2))
    assert (splits[30:] == "test").all()
    assert (splits[:30] == "val").sum() == 6


def test_given_splits_that_divide_a_group_are_refused_unless_allowed():
    table = table_of([0, 1] * 5, groups=list("abcdefghia"), splits=["train"] * 5 + ["val"] * 5)
    with pytest.raises(InputError, match=r"1 groups .*: a \(train and val\).*20.0% of the val images"):
        make_split(table)
    assert (make_split(table, SplitSettings(allow_leaks=True)) == table.splits).all()
    assert divided_groups(make_split(table, SplitSettings(by="group", val=0.4)), table.groups) == {}


def test_a_given_test_split_that_shares_groups_is_refused():
    table = table_of([0] * 10, groups=list("aabbccddea"), splits=["train"] * 8 + ["test"] * 2)
    with pytest.raises(InputError, match="test split that comes with the made-up set has 1 groups"):
        make_split(table, SplitSettings(by="group"))


# The file.


def test_a_split_is_written_and_accepted_back(tmp_path):
    table = lesions()
    splits = make_split(table, SplitSettings(test=0.1))
    write_split_file(tmp_path / "split.csv", split_table(table, splits))
    rows = pd.read_csv(tmp_path / "split.csv")
    assert list(rows.columns) == ["image", "split", "group", "label"]
    assert rows["label"][0] == "A"
    order = np.random.default_rng(0).permutation(len(table))
    assert (read_split(tmp_path / "split.csv", table.select(order)) == splits[order]).all()
    from_file = make_split(table, SplitSettings(file=str(tmp_path / "split.csv"), seed=99))
    assert (from_file == splits).all()


def test_names_of_any_kind_survive_the_file(tmp_path):
    names = ["007", "NA", "ünï, çödé", 'say "x"', "1e5", " spaced "]
    table = replace(table_of([[1, 0], [0, 1], [1, 1], [0, 0], [1, 0], [0, 1]]), names=names)
    splits = np.array(["train", "val", "test", "train", "calibration", "val"])
    write_split_file(tmp_path / "split.csv", split_table(table, splits))
    assert (read_split(tmp_path / "split.csv", table) == splits).all()
    labels = pd.read_csv(tmp_path / "split.csv", keep_default_na=False)["label"].tolist()
    assert labels == ["A", "B", "A|B", "", "A", "B"]


def test_a_file_that_does_not_fit_names_all_that_is_wrong(tmp_path):
    table = table_of([0] * 8)
    path = tmp_path / "split.csv"
    path.write_text("image,part\nimage 00000,train\nimage 00000,val\nelsewhere,train\nimage 00001,dev\n")
    with pytest.raises(InputError) as error:
        read_split(path, table)
    for expected in (
        "6 images of the data are not in the file: image 00002, image 00003",
        "1 images in the file are not in the data: elsewhere",
        "1 images are in the file more than once: image 00000",
        "1 split names are none of train, calibration, val, test: 'dev'",
    ):
        assert expected in str(error.value)


def test_a_file_without_its_columns(tmp_path):
    (tmp_path / "split.csv").write_text("name,fold\na,1\n")
    with pytest.raises(InputError, match="no column image and split; found name, fold"):
        read_split(tmp_path / "split.csv", table_of([0]))


@pytest.mark.parametrize("content", [None, b"", b'image,part\n"a', b"image,part\n\xff\xfe,train\n"])
def test_a_file_that_cannot_be_read(tmp_path, content):
    if content is not None:
        (tmp_path / "split.csv").write_bytes(content)
    with pytest.raises(InputError, match=r"split\.csv"):
        read_split(tmp_path / "split.csv", table_of([0]))


def test_a_file_with_leaks_is_refused_unless_allowed(tmp_path):
    table = lesions()
    splits = make_split(table, SplitSettings(by="class"))
    write_split_file(tmp_path / "split.csv", split_table(table, splits))
    from_file = SplitSettings(file=str(tmp_path / "split.csv"))
    with pytest.raises(InputError, match=r"split\.csv has \d+ groups .* and \d+ more"):
        make_split(table, from_file)
    assert (make_split(table, replace(from_file, allow_leaks=True)) == splits).all()


# Refusals.


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"by": "lesion"}, "split.by 'lesion'"),
        ({"val": 1.0}, "split.val must be at least 0 and below 1, got 1.0"),
        ({"test": -0.1}, "split.test must be at least 0"),
        ({"val": 0.5, "test": 0.3, "calibration": 0.2}, "leave nothing to train on"),
        ({"folds": 1}, "split.folds must be at least 2"),
        ({"folds": 5, "fold": 5}, "split.fold .* folds=5, fold=5"),
        ({"folds": 5, "fold": -1}, "split.fold must be at least 0, got -1"),
        ({"folds": 2, "calibration": 0.5}, "leave nothing to train on"),
    ],
)
def test_settings_that_cannot_be(chosen, message):
    with pytest.raises(InputError, match=message):
        SplitSettings(**chosen)


@pytest.mark.parametrize(
    ("table", "chosen", "message"),
    [
        (table_of([0, 0, 1]), {}, r"at least 2 images of every class. Too few images: B \(1\)"),
        (table_of([0, 0, 1, 1], list("abcc")), {}, r"at least 2 groups of every class. Too few groups: B \(1\)"),
        (table_of([0] * 9 + [1] * 4 + [2] * 3), {"folds": 5}, r"5 folds need .* B \(4\), C \(3\)"),
        (table_of([0] * 9), {"by": "group"}, "made-up set has no groups"),
        (table_of([0] * 9), {"by": "given"}, "made-up set has no splits"),
        (table_of([0] * 4, splits=["train", "train", "test", "test"]), {"folds": 2}, "comes with splits"),
        (table_of([0] * 4, splits=["train", "train", "test", "test"]), {"test": 0.2}, "comes with splits"),
        (
            table_of([0] * 4, splits=["train", "train", "test", "test"]),
            {"by": "class", "test": 0.2},
            "already has a test split",
        ),
        (
            table_of([0] * 4, splits=["train", "train", "calibration", "test"]),
            {"calibration": 0.2},
            "already has a calibration split",
        ),
        (
            table_of([0] * 4, splits=["train", "test", "test", "test"]),
            {"calibration": 0.5},
            "calibration needs 2 images, but only 1 are left",
        ),
    ],
)
def test_tables_that_cannot_be_split_so(table, chosen, message):
    with pytest.raises(InputError, match=message):
        make_split(table, SplitSettings(**chosen))


# Leaks.


def test_leaks_by_split_and_class():
    splits = np.array(["train", "train", "val", "val", "val", "test", "calibration"])
    groups = np.array(["a", "", "a", "b", "", "c", "a"])
    found = leaks(splits, groups, np.array([0, 1, 0, 0, 1, 1, 1]), ("x", "y")).set_index(["split", "class"])
    assert found.loc[("val", "")].tolist() == [3, 1, pytest.approx(1 / 3)]
    assert found.loc[("val", "x")].tolist() == [2, 1, 0.5]
    assert found.loc[("test", "")].tolist() == [1, 0, 0]
    assert found.loc[("calibration", "y"), "share"] == 1
    assert np.isnan(found.loc[("test", "x"), "share"])
    several = leaks(splits, groups, np.eye(2, dtype=np.uint8)[[0, 1, 0, 0, 1, 1, 1]], ("x", "y"))
    pd.testing.assert_frame_equal(several.set_index(["split", "class"]), found)


# The real images.


@pytest.fixture(scope="module")
def isic2018() -> ImageTable:
    if "CCLNET_ISIC2018" not in os.environ:
        pytest.skip("CCLNET_ISIC2018 does not name the ISIC 2018 folder")
    from cclnet.data.sources import open_data

    return open_data(Path(os.environ["CCLNET_ISIC2018"]))


@pytest.mark.parametrize("seed", range(5))
def test_isic2018_by_lesion_every_class_within_two_points(isic2018, seed):
    splits = make_split(isic2018, SplitSettings(val=0.2, seed=seed))
    assert divided_groups(splits, isic2018.groups) == {}
    assert leaks(splits, isic2018.groups)["shared"].sum() == 0
    np.testing.assert_allclose(shares(isic2018, splits, "val"), 0.2, atol=0.02)


def test_isic2018_by_class_leaks_lesions(isic2018):
    found = pd.concat(
        leaks(
            make_split(isic2018, SplitSettings(by="class", seed=seed)),
            isic2018.groups,
            isic2018.labels,
            isic2018.classes,
        )
        for seed in range(8)
    )
    share = found.groupby("class")["share"]
    assert 0.37 <= share.mean()[""] <= 0.40
    assert share.min()[""] > 0.36
    assert share.max()[""] < 0.415
    assert share.mean()["MEL"] == pytest.approx(0.71, abs=0.02)


def test_the_kind_of_split_is_the_one_that_is_made() -> None:
    labels, groups, splits = [0, 1] * 4, list("aabbccdd"), ["train", "train", "val", "val"] * 2
    tables = [table_of(labels), table_of(labels, groups), table_of(labels, groups, splits)]
    assert [split_kind(table, SplitSettings()) for table in tables] == ["class", "group", "given"]
    assert split_kind(tables[2], SplitSettings(by="class")) == "class"
    assert split_kind(tables[2], SplitSettings(file="split.csv")) == "file"
