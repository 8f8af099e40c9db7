"""The model card: it says what the files of the run say, and what the model is not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from shipped_run import write_run

from cclnet import InputError
from cclnet.deploy.export import export
from cclnet.evaluation.evaluate import evaluate


def card_of(run: Path, **settings: str) -> str:
    return (export(run, "safetensors", run.parent / "out", **settings) / "README.md").read_text()


def test_the_card_of_an_evaluated_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    scores = evaluate(run, draws=20)
    card = card_of(run)
    assert "Not a medical device" in card
    for heading in (
        "How to use it",
        "Data",
        "Scores",
        "Calibration",
        "Soft labels",
        "Intended use and limits",
        "Licence",
    ):
        assert f"\n## {heading}" in card
    accuracy = scores.overall["accuracy"]
    assert f"| Accuracy | {100 * accuracy.value:.1f}% | [{100 * accuracy.low:.1f}, {100 * accuracy.high:.1f}] |" in card
    assert scores.calibration.temperature.in_words in card
    assert "| ant | 40 | " in card and "Trained on 100 images of insects, from random weights." in card
    assert "Images were split by lesion or patient (seed 0)." in card
    assert "| ant | bee | 0.200 | 0.600 |" in card  # the soft label of ant
    assert "ask who trained them" in card and "somewhere" not in card
    for warning in scores.warnings:
        assert warning.split()[0] in card
    assert re.search(r"\| 0\.\d{3} \| 90\.0% \| \d+\.\d% \|", card)  # where it abstains
    assert "None" not in card.replace("None of", "") and "nan" not in card


def test_the_card_of_a_run_that_was_not_evaluated(tmp_path: Path) -> None:
    card = card_of(write_run(tmp_path / "run", temperature=None), licence="CC BY-NC 4.0 by us")
    assert "has not been evaluated" in card and "none fitted: probabilities are as trained" in card
    assert "CC BY-NC 4.0 by us" in card and "ask who trained them" not in card


def test_the_card_of_several_labels(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", multilabel=True)
    evaluate(run, draws=20)
    card = card_of(run)
    assert "may name several classes for an image" in card and "each independent (sigmoid)" in card
    assert "Mean average precision" in card


def test_names_cannot_break_the_card(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "soft_labels.csv").unlink()
    info = json.loads((run / "model.json").read_text())
    (run / "model.json").write_text(json.dumps(info | {"classes": ["<script>", "a|b", "*c*", "d"]}))
    (run / "predictions.csv").unlink()
    card = card_of(run)
    assert "<script>" not in card and r"a\|b" in card and r"\*c\*" in card


def test_scores_of_something_else_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "scores.json").write_text('{"format": 1, "kind": "comparison"}')
    with pytest.raises(InputError, match=r"scores.json is not what cclnet evaluate writes"):
        card_of(run)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("split", "words"), [("given", "as given with the data."), ("class", "by class, without")])
def test_the_card_names_the_split_that_was_used(tmp_path: Path, split: str, words: str) -> None:
    run = write_run(tmp_path / "run")  # its settings say "group"
    model = json.loads((run / "model.json").read_text())
    model["trained"]["split"] = split
    (run / "model.json").write_text(json.dumps(model))
    assert f"Images were split {words}" in card_of(run)
