"""Kept results: read as they were written, in their old form too."""

from __future__ import annotations

import io
import json
import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cclnet.errors import InputError
from cclnet.files import write_json_bz2
from cclnet.runs.folder import open_run
from cclnet.runs.kept_result import (
    LEVELS,
    KeptResult,
    encode,
    read_kept_result,
    write_kept_predictions,
    write_kept_result,
    write_soft_label_history,
)
from cclnet.runs.predictions import Floats
from cclnet.runs.provenance import Commit
from made_predictions import single_label

SETTINGS = {
    "backbone": "resnet18", "method": "ccl", "method_settings": {}, "seed": 3, "short_side": 256,
    "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2], "augment": {"crop": 224},
}  # fmt: skip


def saved(array: npt.NDArray[Any], allow_pickle: bool = False) -> bytes:
    content = io.BytesIO()
    np.save(content, array, allow_pickle=allow_pickle)
    return lzma.compress(content.getvalue())


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
    p = np.where(np.eye(4)[made.labels] > 0, 1.0, 0.0)
    table = write_kept_predictions(kept.path, replace(made, probabilities=p))
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


def as_text(result: KeptResult, probabilities: Floats) -> None:
    """Keep the probabilities as results before version 0.2 did."""
    frame = pd.DataFrame(probabilities, columns=[f"p_{name}" for name in result.classes])
    frame.to_csv(result.path.with_name("ccl-seed3.predictions.csv.bz2"), index=False, float_format="%.9g")


def test_predictions_kept_as_text_are_read_and_rounded_zeros_are_no_zeros(result: KeptResult) -> None:
    exact = np.eye(4)[np.arange(20) % 4]
    as_text(result, exact)
    assert result.predictions.name.endswith(".npy.xz")  # the new file where both exist
    result.predictions.unlink()
    p = result.read_predictions().probabilities
    assert p.min() == pytest.approx(2.5e-5, rel=1e-3) and p.shape == (20, 4)
    np.testing.assert_allclose(p.sum(axis=1), 1)


def test_both_formats_give_the_same_numbers(result: KeptResult) -> None:
    logits = np.random.default_rng(0).normal(size=(20, 4)) * 6
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    write_kept_predictions(result.path, replace(result.read_predictions(), probabilities=p))
    new = result.read_predictions().probabilities
    as_text(result, LEVELS[encode(p)])
    result.predictions.unlink()
    np.testing.assert_allclose(result.read_predictions().probabilities, new, rtol=1e-15)


@given(st.floats(0, 1), st.booleans())
def test_a_code_is_the_nearest_level(p: float, multilabel: bool) -> None:
    kept = float(LEVELS[encode(np.array([p]), multilabel)][0])
    assert 0 < kept <= 1 and abs(kept - p) <= 5.0001e-5
    small = min(p, 1 - p) if multilabel else p
    if 1e-9 <= small < 4.9e-5:  # one significant digit
        assert abs(kept - p) <= 0.34 * small + 1e-16
    assert not multilabel or kept < 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no xz", "cannot be read"),
        (lzma.compress(b"no array"), "cannot be read"),
        (saved(np.zeros((4, 20), "<u4")), "uint32"),
        (saved(np.zeros((3, 20), "<u2")), r"\[3, 20\]"),
        (saved(np.zeros((4, 20), "<u2"))[:-20], "cut off"),
        (saved(np.full((4, 20), 65535, "<u2")), "65535"),
        (saved(np.full((4, 19), 2500, "<u2")), "19 rows"),
        (saved(np.array([{"a": 1}] * 80).reshape(4, 20), allow_pickle=True), "object"),
    ],
)
def test_other_predictions_are_refused(result: KeptResult, content: bytes, reason: str) -> None:
    result.predictions.write_bytes(content)
    with pytest.raises(InputError, match=reason):
        result.read_predictions()


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
