"""`cclnet benchmark` on the CPU: measurements, parts and methods."""

from dataclasses import replace

import pytest

from cclnet.errors import InputError
from cclnet.runs.provenance import source_commit
from cclnet.settings import make_settings
from cclnet.training.benchmark import benchmark, markdown_table, results_table


@pytest.fixture
def settings():
    return make_settings(
        {"data": "synthetic:images=70,size=36", "short_side": 36, "batch_size": 16, "augment": {"crop": 32}}
    )


def test_only_the_requested_parts_and_methods_are_measured(settings):
    methods = ["hard", "ccl-centroid"]
    measured = benchmark(settings, ["test_byobnet"], methods, ["epochs"], epochs=1, accelerator="cpu")
    (row,) = measured["rows"]
    assert row["hard"] > 0 and row["hard_first_step_seconds"] > 0 and len(row["ccl-centroid_epochs"]) == 2
    assert row["ccl-centroid_over_hard"] == pytest.approx(row["hard"] / row["ccl-centroid"])
    commit = source_commit()
    assert measured["commit"] == (commit and {"sha": commit.sha, "clean": commit.clean})
    assert "ceiling" not in row and "of_ceiling" not in row and "reference" not in row
    heads = ["backbone", "hard", "ccl-centroid", "ccl-centroid time", "start-up"]
    assert f"| {' | '.join(heads)} |" in markdown_table(measured)
    assert [column.header for column in results_table(measured).columns] == heads


def test_multilabel_data_is_timed_with_multilabel_methods(settings):
    multilabel = replace(settings, data="synthetic-multilabel:images=60,size=32")
    row = benchmark(multilabel, ["test_resnet"], methods=["bce"], parts=["epochs"], epochs=1, accelerator="cpu")[
        "rows"
    ][0]
    assert row["bce"] > 0
    with pytest.raises(InputError, match="epochs alone"):
        benchmark(multilabel, ["test_resnet"], methods=["bce"], epochs=1, accelerator="cpu")


def test_an_unknown_part_is_refused(settings):
    with pytest.raises(InputError, match="did you mean 'epochs'"):
        benchmark(settings, ["test_byobnet"], parts=["epoch"], accelerator="cpu")
