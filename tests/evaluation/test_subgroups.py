"""Subgroups: how columns are divided, and that a subgroup is evaluated as its images alone are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cclnet.deploy.card import model_card
from cclnet.errors import InputError
from cclnet.evaluation.bootstrap import units_of
from cclnet.evaluation.evaluate import evaluate
from cclnet.evaluation.metrics import compute, subgroup_metrics
from cclnet.evaluation.subgroups import GROUP_SIZE, MAX_SUBGROUPS, divide, group_sizes, score_subgroups
from cclnet.report import write_report
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import Calibration, ModelDescription
from cclnet.runs.predictions import Predictions, names_in_order, write_predictions
from cclnet.runs.scores import Scores
from made_predictions import several_labels, single_label


def columns(made: Predictions) -> pd.DataFrame:
    ages = [str(20 + 7 * (i % 9)) for i in range(len(made))]
    sexes = ["female" if i % 3 else "male" if i else "" for i in range(len(made))]
    return pd.DataFrame({"sex": sexes, "age": ages}, index=made.images)


@given(st.lists(st.sampled_from(["", "NA", "a", "b", "7", "8.5"]), min_size=1, max_size=40))
def test_every_image_is_in_one_subgroup(values: list[str]) -> None:
    found, order = divide(values)
    assert len(found) == len(values) and set(found) == set(order) and len(set(order)) == len(order)
    assert sum(name == "unknown" for name in found) == sum(value in ("", "NA") for value in values)


@given(st.lists(st.integers(-5, 90), min_size=1, max_size=60))
def test_numbers_are_divided_in_order(numbers: list[int]) -> None:
    found, order = divide([str(number) for number in numbers])
    place = [order.index(name) for name in found]
    assert [place[i] for i in np.argsort(numbers, kind="stable")] == sorted(place)
    assert len(order) <= 6 and set(order) == set(found)


def test_rare_values_are_pooled() -> None:
    found, order = divide([f"site {i}" for i in range(40)] + ["site 3"])
    assert len(order) == MAX_SUBGROUPS and order[0] == "site 3" and order[-1] == "other"
    assert (found == "other").sum() == 40 - (MAX_SUBGROUPS - 1)


def test_a_subgroup_is_evaluated_as_its_images_alone() -> None:
    made = single_label(120, groups=40)
    by_sex, by_age, by_size = score_subgroups(made, columns(made), ["sex", "age"], 100, 3)
    assert [own.name for own in by_sex.subgroups] == ["female", "male", "unknown"]
    assert sum(own.images for own in by_age.subgroups) == 120 and by_size.column == GROUP_SIZE
    female = made.select(np.array(columns(made)["sex"]) == "female")
    units = units_of(female)
    (expected,) = compute([(female, subgroup_metrics("single-label"))], units, 100, 3)
    found = by_sex.subgroups[0]
    assert found.images == len(female) and found.units == units.count
    assert found.class_counts == tuple(female.class_counts)
    assert found.scores == {name: sample.estimates(female, units)[0] for name, sample in expected.items()}
    assert list(found.scores) == ["accuracy", "balanced_accuracy", "macro_auroc"]
    assert found.scores["accuracy"].value == pytest.approx((female.probabilities.argmax(1) == female.labels).mean())
    assert "female" in by_sex.in_words and "male" in by_sex.in_words and "unknown" not in by_sex.in_words
    assert f"female ({100 * (found.scores['accuracy'].value or 0):.1f}% of {found.images} images)" in by_sex.in_words


def test_small_subgroups_are_not_called_the_best() -> None:
    made = single_label(50)
    right = made.probabilities.argmax(axis=1) == made.labels
    few = np.flatnonzero(right)[:3]
    site = np.where(np.arange(50) % 2, "north", "south").astype(object)
    site[few] = "small"  # always right
    (by_site,) = score_subgroups(made, pd.DataFrame({"site": site}, index=made.images), ["site"], 20, 0)
    assert by_site.subgroups[-1].name == "small" and by_site.subgroups[-1].scores["accuracy"].value == 1
    assert "small" not in by_site.in_words and "north" in by_site.in_words and "south" in by_site.in_words


def test_group_sizes() -> None:
    made = single_label(60, groups=20)
    assert made.groups is not None
    found = group_sizes(units_of(made))
    assert found is not None
    ranges = {1: "1 image", 2: "2 images", 3: "3 to 4 images", 4: "3 to 4 images"}
    for image, group in enumerate(made.groups):
        size = int((made.groups == group).sum())
        assert found[0][image] == ranges.get(size, "5 to 9 images")
    assert group_sizes(units_of(single_label(20))) is None  # no groups
    assert group_sizes(units_of(replace(made, groups=np.repeat([f"g{i}" for i in range(20)], 3)))) is None


def write(folder: Path, made: Predictions) -> RunFolder:
    run = RunFolder(folder)
    folder.mkdir()
    write_predictions(run.predictions, made)
    run.write_metadata(made.images.tolist(), columns(made).assign(note=[f"note {i}" for i in range(len(made))]))
    return run


@pytest.mark.parametrize("multilabel", [False, True])
def test_subgroups_in_scores_and_reports(tmp_path: Path, multilabel: bool) -> None:
    made = several_labels(150) if multilabel else single_label(150, groups=50)
    run = write(tmp_path / "run", made)
    assert list(run.read_metadata()) == ["sex", "age"]  # a note of its own for every image is no subgroup
    scores = evaluate(run.path, draws=30, by="sex, age")
    assert [own.column for own in scores.subgroups] == ["sex", "age", *([] if multilabel else [GROUP_SIZE])]
    assert Scores.from_json(json.loads(run.scores.read_text())) == scores
    page = write_report(run.path, scores).read_text()
    text = (run.path / "report.md").read_text()
    for words in ("By sex", "female", "below 34"):
        assert words in page and words in text
    description = ModelDescription("test_resnet", made.classes, multilabel, 32, (28, 28), (0.5,) * 3, (0.5,) * 3)
    card = model_card(run.path, description, Calibration())
    assert "### Subgroups" in card and "by sex, age" in card and "have not been evaluated" not in card
    with pytest.raises(InputError, match=r"'sx'.*'sex'"):
        evaluate(run.path, draws=30, by="sx")


def test_columns_beside_the_predictions(tmp_path: Path) -> None:
    made = single_label(60)
    write_predictions(tmp_path / "predictions.csv", made)
    plain = tmp_path / "predictions.csv"
    with pytest.raises(InputError, match="no further columns"):
        evaluate(plain, tmp_path, draws=20, by="sex")
    pd.read_csv(plain).assign(sex=["f", "m"] * 30).to_csv(tmp_path / "wide.csv", index=False)
    (by_sex,) = evaluate(tmp_path / "wide.csv", draws=20, by="sex").subgroups
    assert [(own.name, own.images) for own in by_sex.subgroups] == [("f", 30), ("m", 30)]


def test_order_of_the_classes(tmp_path: Path) -> None:
    assert names_in_order(["grade 9", "grade 10", "grade 11"]) and names_in_order(["KL0", "KL1", "KL2"])
    for names in (["0", "1"], ["1", "3", "4"], ["a 1", "b 2", "c 3"], ["2", "1", "0"], ["vi", "vii", "nv"]):
        assert not names_in_order(names), names
    made = single_label(60)
    run = RunFolder(tmp_path)
    write_predictions(run.predictions, made)
    assert "quadratic_weighted_kappa" not in evaluate(tmp_path, draws=20).overall
    assert evaluate(tmp_path, draws=20, ordered=True).overall["quadratic_weighted_kappa"].low is not None
    write_predictions(run.predictions, replace(made, classes=("0", "1", "2", "3")))
    assert "quadratic_weighted_kappa" in evaluate(tmp_path, draws=20).overall
    assert "quadratic_weighted_kappa" not in evaluate(tmp_path, draws=20, ordered=False).overall
