"""scores.json as dataclasses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cclnet.errors import InputError
from cclnet.evaluation.evaluate import evaluate
from cclnet.runs.scores import Estimate, Scores, SplitSummary, read_scores, write_scores
from cclnet.schema import from_plain, to_plain
from made_predictions import single_label, write_run

MATRIX = [[0.6, 0.3, 0.1], [0.3, 0.5, 0.2], [0.1, 0.2, 0.7]]


@pytest.fixture
def scores(tmp_path: Path) -> Scores:
    import numpy as np

    return evaluate(write_run(tmp_path / "run", single_label(40, 3), matrix=np.array(MATRIX)), draws=10)


def test_what_is_written_is_read_again(scores: Scores, tmp_path: Path) -> None:
    write_scores(tmp_path / "scores.json", scores)
    assert read_scores(tmp_path / "scores.json") == scores
    content = scores.to_json()
    assert content["per_class"][0]["class"] == "ant" and "recall" in content["per_class"][0]  # inline
    assert "ece" in content["calibration"]["before"] and "overall" not in content


def test_older_keys_are_read(scores: Scores) -> None:
    content = scores.to_json()
    content["part"] = content.pop("split")
    content["part"]["images_of_parts"] = content["part"].pop("images_of_splits")
    soft_labels = content["correlation"] = content.pop("soft_labels")
    soft_labels["rarity_agreement"] = soft_labels.pop("inverse_frequency_agreement")
    soft_labels["most_alike_pairs"] = soft_labels.pop("most_similar_pairs")
    for row in soft_labels["per_class"]:
        row["most_alike"] = row.pop("most_similar")
    assert Scores.from_json(content) == scores


def _without(content: dict[str, Any], *path: str) -> dict[str, Any]:
    changed = json.loads(json.dumps(content))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return changed


def test_what_is_missing_or_of_another_type_is_named(scores: Scores) -> None:
    content = scores.to_json()
    with pytest.raises(InputError, match=r"calibration\.temperature\.value must be a number, got nothing"):
        Scores.from_json(_without(content, "calibration", "temperature", "value"))
    with pytest.raises(InputError, match=r"split\.images must be a whole number, got 'many'"):
        Scores.from_json(content | {"split": content["split"] | {"images": "many"}})
    with pytest.raises(InputError, match=r"scores\.accuracy must be"):
        Scores.from_json(content | {"scores": {"accuracy": 0.5}})
    with pytest.raises(InputError, match="kind 'scores'"):
        Scores.from_json(content | {"kind": "comparison"})
    with pytest.raises(InputError, match="kind 'scores'"):
        Scores.from_json([])


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"format": 1, "kind": "scores"}'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "scores.json").write_text(text)
    with pytest.raises(InputError, match=r"scores\.json is not what cclnet evaluate writes"):
        read_scores(tmp_path / "scores.json")


def test_unknown_keys_are_ignored() -> None:
    content = {"value": 1, "low": None, "high": None, "later": 3}
    assert from_plain(Estimate, content) == Estimate(1.0, None, None)
    split = SplitSummary("val", 2, None, (1, 1), (), {"all": 2})
    assert from_plain(SplitSummary, to_plain(split)) == split


def test_reading_scores_needs_no_torch() -> None:
    check = "import sys, cclnet.runs.scores; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'cclnet.data')))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
