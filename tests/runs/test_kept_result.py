"""Kept results: read as they were written, in their old form too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cclnet.errors import InputError
from cclnet.files import write_json_bz2
from cclnet.runs.folder import open_run
from cclnet.runs.kept_result import KeptResult, read_kept_result, write_kept_result, write_soft_label_history
from cclnet.runs.predictions import write_probabilities
from cclnet.runs.provenance import Commit
from made_predictions import single_label

SETTINGS = {
    "backbone": "resnet18", "method": "ccl", "method_settings": {}, "seed": 3, "short_side": 256,
    "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2], "augment": {"crop": 224},
}  # fmt: skip


@pytest.fixture
def result(tmp_path: Path) -> KeptResult:
    kept = KeptResult(
        path=tmp_path / "ccl-seed3.json",
        name="ccl-seed3",
        keys={"method": "ccl", "seed": 3},
        settings=SETTINGS,
        scores={"accuracy": {"value": 0.9, "low": 0.8, "high": 1.0}},
        classes=["ant", "bee", "cat", "dog"],
        class_counts=[4, 3, 2, 1],
        split={"name": "all"},
        soft_labels=np.full((4, 4), 0.25).tolist(),
        commit=Commit("abc", True),
    )
    made = single_label(20)
    p = np.where(np.eye(4)[made.labels] > 0, 1.0, 0.0)  # as if rounded to four decimals
    table = write_probabilities(kept.predictions, replace(made, probabilities=p))
    kept = replace(kept, image_table=table.name)
    write_kept_result(kept)
    return kept


def test_what_is_written_is_read_again(result: KeptResult) -> None:
    assert read_kept_result(result.path) == result and result.value("accuracy") == 0.9
    assert json.loads(result.path.read_text())["cell"] == {"method": "ccl", "seed": 3}
    assert result.soft_label_history is None
    write_soft_label_history(result.path, {"epochs": [1], "matrices": [[[1.0]]]})
    assert result.soft_label_history == {"epochs": [1], "matrices": [[[1.0]]]}


def test_results_of_version_0_1_are_read(result: KeptResult) -> None:
    content = json.loads(result.path.read_text())
    result = replace(result, inverse_frequency_agreement=0.25)
    del content["inverse_frequency_agreement"]
    old = content | {"part": content.pop("split"), "correlation": content.pop("soft_labels"), "course": "unknown today"}
    old["rarity_agreement"] = 0.25
    del old["multilabel"], old["commit"], old["settings_hash"]
    result.path.write_text(json.dumps(old))
    write_json_bz2(result.path.with_name("ccl-seed3.course.json.bz2"), {"epochs": [], "matrices": []})
    read = read_kept_result(result.path)
    assert read == replace(result, commit=None) and read.soft_label_history == {"epochs": [], "matrices": []}


def test_rounded_zeros_are_no_zeros(result: KeptResult) -> None:
    p = result.read_predictions().probabilities
    assert p.min() == pytest.approx(2.5e-5, rel=1e-3)
    np.testing.assert_allclose(p.sum(axis=1), 1)


def test_a_kept_result_is_opened_like_a_run(result: KeptResult) -> None:
    run = open_run(result.path)
    assert run.model is not None and (run.model.method, run.seed, run.model.crop) == ("ccl", 3, (224, 224))
    assert run.settings()["augment.crop"] == 224 and run.folder is None and run.soft_labels is not None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cell": None}, r"cell"),
        ({"settings": [1]}, "settings"),
        ({"classes": "ab"}, "classes"),
        ({"settings": {}}, "backbone must be text, .*got nothing"),
    ],
)
def test_another_json_is_refused(result: KeptResult, changes: dict[str, object], reason: str) -> None:
    content = json.loads(result.path.read_text()) | changes
    result.path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    with pytest.raises(InputError, match=reason):
        open_run(result.path)
