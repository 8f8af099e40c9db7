"""A metric and a method that are registered from outside the package work everywhere, from training to the report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor
from typer.testing import CliRunner

import cclnet
from cclnet import functional
from cclnet.cli import app
from cclnet.evaluation.metrics import Metric, register, unregister
from cclnet.methods import METHODS, Classes, Loss, Method
from cclnet.runs.predictions import Predictions


class LogitPenalty(Method):
    """``L = CE(q, y) + λ · mean z²``."""

    def __init__(self, classes: Classes, strength: float = 0.125) -> None:
        super().__init__(classes)
        self.strength = strength

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        self.check_labels(logits, labels)
        return Loss.of(
            cross_entropy=functional.cross_entropy(logits, labels, weight),
            logit_penalty=self.strength * logits.square().mean(),
        )


def error_rate(predictions: Predictions) -> float:
    return float((predictions.probabilities.argmax(axis=1) != predictions.labels).mean())


@pytest.fixture
def registered() -> Iterator[None]:
    cclnet.register_method("logit-penalty", LogitPenalty)
    register(Metric("wrong_share", "Wrong share", "Share of misclassified images.", error_rate, higher_is_better=False,
                    tasks=("single-label",)))  # fmt: skip
    yield
    METHODS.pop("logit-penalty")
    unregister("wrong_share")


@pytest.mark.usefixtures("registered")
def test_a_registered_method_and_metric_are_used_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = cclnet.train(
        "synthetic:images=56,size=16", tmp_path / "run", method="logit-penalty", backbone="test_resnet", epochs=1,
        batch_size=16, short_side=16, augment={"crop": 16}, accelerator="cpu", progress=False, summary=True,
    )  # fmt: skip
    (epoch,) = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert "logit_penalty" in epoch
    assert json.loads((run / "model.json").read_text(encoding="utf-8"))["method"] == "logit-penalty"

    scores = json.loads((run / "scores.json").read_text(encoding="utf-8"))["scores"]
    assert scores["wrong_share"]["value"] == pytest.approx(1 - scores["accuracy"]["value"])
    assert "Wrong share" in (run / "report.html").read_text(encoding="utf-8")
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "wrong share" in line)
    assert f"{scores['wrong_share']['value']:.4f}" in row

    listed = CliRunner().invoke(app, ["methods"]).output
    assert "logit-penalty  strength=0.125" in listed and "ccl-centroid" in listed
    assert "mean z²" in CliRunner().invoke(app, ["methods", "logit-penalty"]).output


def test_nothing_stays_registered() -> None:
    assert "logit-penalty" not in CliRunner().invoke(app, ["methods"]).output
