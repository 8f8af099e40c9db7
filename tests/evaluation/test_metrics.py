"""The registry: what is derived from it, and metrics registered from outside."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cclnet.errors import InputError
from cclnet.evaluation.bootstrap import bootstrap, interval, units_of
from cclnet.evaluation.classification import SPECIFICITIES, decision_statistic
from cclnet.evaluation.compare import compare
from cclnet.evaluation.evaluate import evaluate
from cclnet.evaluation.metrics import (
    AFTER,
    BOTH,
    Metric,
    compared_metrics,
    find,
    headline_metrics,
    metrics_for,
    register,
    unregister,
)
from cclnet.report import write_comparison, write_report
from cclnet.report.terminal import print_scores
from cclnet.runs.predictions import Predictions
from made_predictions import several_labels, single_label, write_run


def error_rate(predictions: Predictions) -> float:
    return float((predictions.probabilities.argmax(axis=1) != predictions.labels).mean())


def class_share(predictions: Predictions) -> np.ndarray:
    return predictions.class_counts / len(predictions)


@pytest.fixture
def registered() -> Iterator[Metric]:
    metric = Metric(
        "error_rate", "Error rate", "Share of images that are misclassified.", error_rate,
        higher_is_better=False, unit="percent", tasks=("single-label",),
    )  # fmt: skip
    yield register(metric)
    unregister("error_rate")


@pytest.mark.parametrize("task", BOTH)
def test_every_metric_is_described(task: str) -> None:
    for metric in (*metrics_for(task), *compared_metrics(task)):
        assert metric.description.endswith(".") and metric.title[0].isupper() and metric.short, metric.name
        assert find(metric.name) == metric
        low, high = metric.bounds_for(task)
        assert low < high and (metric.unit != "percent" or (low, high) == (0.0, 1.0)), metric.name


def test_what_is_compared() -> None:
    single, multi = ([metric.name for metric in compared_metrics(task)] for task in BOTH)
    calibration = ["nll", "brier", "ece", "aurc", "nll_calibrated", "ece_calibrated"]
    assert single == ["accuracy", "balanced_accuracy", "macro_f1", "kappa", "quadratic_weighted_kappa", "macro_jaccard",
                      "macro_auroc", "mean_average_precision", *calibration, "auroc"]  # fmt: skip
    assert multi[0] == "mean_average_precision"  # the primary metric
    assert set(multi) == {"mean_average_precision", "macro_auroc", "macro_f1", "micro_f1", "subset_accuracy",
                          "hamming_loss", *calibration, "auroc"}  # fmt: skip
    lower = {metric.name for metric in compared_metrics("multi-label") if not metric.higher_is_better}
    assert lower == {*calibration, "hamming_loss"}
    own_units = {metric.name for metric in compared_metrics("single-label") if metric.unit == "own"}
    assert own_units == {"nll", "brier", "nll_calibrated"}  # the others read as points


def test_the_brier_score_of_several_labels_is_at_most_one() -> None:
    brier = find("brier")
    assert brier.bounds_for("single-label") == (0.0, 2.0) and brier.bounds_for("multi-label") == (0.0, 1.0)


def test_both_evaluation_and_comparison_use_the_bounds_of_the_task(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", several_labels(80))
    found = evaluate(run, draws=50).calibration.before.scores["brier"]
    (method,) = compare([run], draws=50).methods
    own = method.scores["brier"]
    assert (own.mean, own.low, own.high) == (found.value, found.low, found.high)


def test_a_metric_not_registered_here_is_shown_under_its_own_name() -> None:
    assert find("new_score").title == "New score" and find("new_score").description == ""
    assert find("accuracy_calibrated").title == "Accuracy calibrated"  # accuracy does not depend on temperature
    assert find("ece_calibrated").short == "ECE after calibration"


def test_a_name_is_registered_once(registered: Metric) -> None:
    with pytest.raises(InputError, match="error_rate"):
        register(registered)
    with pytest.raises(InputError, match="no metric 'nothing'"):
        unregister("nothing")
    with pytest.raises(InputError, match="per class"):
        register(Metric("x", "X", "X.", class_share, per_class=True, calibration=True))


def test_a_function_is_resampled_as_a_statistic_of_totals_is(registered: Metric, tmp_path: Path) -> None:
    made = single_label(60, groups=12)
    scores = evaluate(write_run(tmp_path / "run", made), draws=40, seed=3)
    accuracy, error = scores.overall["accuracy"], scores.overall["error_rate"]
    assert accuracy.value is not None and error.value == pytest.approx(1 - accuracy.value)
    units = units_of(made)
    drawn = 1 - bootstrap([decision_statistic(made)], units, 40, 3)[0]["accuracy"]
    assert (error.low, error.high) == pytest.approx(interval(error.value, drawn, units.count))


def test_a_registered_metric_appears_everywhere(registered: Metric, tmp_path: Path) -> None:
    base = single_label(60)
    better = replace(base, probabilities=0.2 * base.probabilities + 0.8 * np.eye(4)[base.labels])
    runs = {name: [write_run(tmp_path / f"{name}{s}", made, name, s) for s in range(2)]
            for name, made in (("ccl", better), ("hard", base))}  # fmt: skip
    scores = evaluate(runs["hard"][0], draws=20)
    assert json.loads((runs["hard"][0] / "scores.json").read_text())["scores"]["error_rate"]["value"] is not None
    page = write_report(runs["hard"][0], scores)
    assert "Error rate" in page.read_text() and registered.description in page.with_suffix(".md").read_text()
    console = Console(file=io.StringIO(), width=200)
    print_scores(scores, page, console)
    assert "error rate" in console.file.getvalue()  # type: ignore[attr-defined]
    compared = compare(runs, primary="error_rate", draws=20)
    test = compared.comparisons[0].metrics["error_rate"]
    assert (
        test.difference is not None and test.difference < 0 and compared.comparisons[0].verdict.startswith("Error rate")
    )
    written = write_comparison(tmp_path / "out", compared)
    assert "Error rate" in written.read_text() and "Error rate" in (tmp_path / "out" / "scores.md").read_text()


def test_a_metric_of_classes_may_be_registered(tmp_path: Path) -> None:
    register(Metric("class_share", "Share", "Share of the images.", class_share, per_class=True))
    try:
        made = single_label(60, 3)
        scores = evaluate(write_run(tmp_path / "run", made), draws=20)
        assert [row.scores["class_share"].value for row in scores.per_class] == pytest.approx(made.class_counts / 60)
        assert all(row.scores["class_share"].low is not None for row in scores.per_class)
        assert "class_share" not in scores.overall and "Share" in write_report(tmp_path / "run", scores).read_text()
    finally:
        unregister("class_share")


def test_a_calibration_metric_may_be_registered(tmp_path: Path) -> None:
    def confidence(predictions: Predictions) -> float:
        return float(predictions.probabilities.max(axis=1).mean())

    register(Metric("confidence", "Confidence", "Mean confidence.", confidence, tasks=("single-label",),
                    calibration=True, compared_after=True))  # fmt: skip
    try:
        run = write_run(tmp_path / "run", single_label(60))
        before, after = evaluate(run, draws=20).calibration.stages()
        assert before.scores["confidence"].value == pytest.approx(before.mean_confidence)
        assert after.scores["confidence"].value == pytest.approx(after.mean_confidence) != before.mean_confidence
        assert "confidence" + AFTER in compare([run], draws=20).methods[0].scores
    finally:
        unregister("confidence")


def test_a_metric_may_be_undefined(tmp_path: Path) -> None:
    register(Metric("nothing", "Nothing", "Never defined.", lambda predictions: math.nan))
    try:
        scores = evaluate(write_run(tmp_path / "run", several_labels(30)), draws=20)
        assert scores.overall["nothing"].value is None and any("nothing" in warning for warning in scores.warnings)
    finally:
        unregister("nothing")


def test_headlines_and_classes_follow_the_task() -> None:
    assert [m.name for m in headline_metrics("single-label")] == [
        "accuracy", "balanced_accuracy", "macro_f1", "kappa", "quadratic_weighted_kappa", "macro_jaccard",
        "macro_auroc", "ece",
    ]  # fmt: skip
    assert [m.name for m in headline_metrics("multi-label")] == [
        "mean_average_precision", "macro_f1", "macro_auroc", "micro_f1", "subset_accuracy", "ece",
    ]  # fmt: skip
    assert {m.name for m in metrics_for("multi-label") if m.per_class} == {
        "precision", "recall", "f1", "jaccard", "auroc", "average_precision", *SPECIFICITIES,
    }  # fmt: skip
