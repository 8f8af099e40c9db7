"""Class offsets beside the temperature: the fit, the choice, and that everything downstream uses the same map."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special
from sklearn.linear_model import LogisticRegression
from typer.testing import CliRunner

from cclnet import InputError
from cclnet.cli import app
from cclnet.evaluation.bootstrap import Units, units_of
from cclnet.evaluation.calibration import (
    calibrate,
    calibrated,
    calibration_values,
    fit_offsets,
    fit_temperature,
    gain_of_offsets,
    halves_of,
    kind_for,
    logits_of,
    losses,
    offsets_loss,
    with_logits,
)
from cclnet.evaluation.compare import compare
from cclnet.evaluation.conformal import fit_thresholds
from cclnet.evaluation.evaluate import evaluate
from cclnet.runs.calibration_map import CalibrationMap
from cclnet.runs.decision_rule import DecisionRule, decide
from cclnet.runs.folder import RunFolder
from cclnet.runs.predictions import Predictions
from made_predictions import SINGLE_LABEL, several_labels, single_label, write_run

SHIFT = np.array([1.0, -0.5, -1.0, 0.5])


def drawn(images: int = 2000, seed: int = 0, groups: int = 0) -> Predictions:
    """Labels drawn from the probabilities: neither a temperature nor an offset is missing."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(4, 0.7), images)
    labels = (p.cumsum(axis=1) < rng.random((images, 1))).sum(axis=1).clip(0, 3)
    of = np.array([f"g{i}" for i in rng.integers(0, groups, images)]) if groups else None
    return Predictions(np.arange(images).astype(str), labels, p, ("ant", "bee", "cat", "dog"), of)


def shifted(
    images: int = 2000, seed: int = 0, groups: int = 0, shift: np.ndarray = SHIFT, t: float = 2.0
) -> Predictions:
    """The same, too confident by a factor ``t`` and with classes that are predicted too often by ``shift``."""
    made = drawn(images, seed, groups)
    return with_logits(made, (logits_of(made) + shift) * t)


def test_a_planted_temperature_and_planted_offsets_are_found() -> None:
    found = fit_offsets(shifted(40_000))
    assert found is not None and found.offsets is not None and sum(found.offsets) == pytest.approx(0, abs=1e-9)
    assert found.temperature == pytest.approx(2.0, rel=0.03)
    np.testing.assert_allclose(found.offsets, -(SHIFT - SHIFT.mean()), atol=0.06)


def test_two_classes_with_another_frequency_differ_by_the_log_of_the_odds_ratio() -> None:
    """Two normal classes have p = σ(x) at equal frequencies; among 9:1 the offsets make up for log 9."""
    rng = np.random.default_rng(0)
    labels = (rng.random(60_000) < 0.1).astype(np.int64)
    x = rng.normal(size=60_000) + labels - 0.5
    p = np.stack([special.expit(-x), special.expit(x)], axis=1)
    found = fit_offsets(Predictions(np.arange(60_000).astype(str), labels, p, ("a", "b")))
    assert found is not None and found.offsets is not None and found.temperature == pytest.approx(1.0, rel=0.03)
    assert found.offsets[0] - found.offsets[1] == pytest.approx(np.log(9), abs=0.05)


def test_two_classes_are_a_logistic_regression() -> None:
    """An independent oracle: of the logit difference, with the same penalty on the intercept (as a feature)."""
    made = shifted(300, shift=SHIFT).select(slice(0, 300))  # type: ignore[arg-type]
    two = made.labels < 2
    p = made.probabilities[two, :2] / made.probabilities[two, :2].sum(axis=1, keepdims=True)
    logits, labels = np.log(p), made.labels[two]
    found = fit_offsets(Predictions(np.arange(len(p)).astype(str), labels, p, ("a", "b")))
    assert found is not None and found.offsets is not None and found.temperature is not None
    x = logits[:, 1] - logits[:, 0]
    # b = (-β/2, β/2) has the penalty β²/4 in the sum; the slope has none, so it is made large.
    oracle = LogisticRegression(C=2.0, fit_intercept=False, tol=1e-10, max_iter=10_000)
    oracle.fit(np.stack([1e4 * x, np.ones_like(x)], axis=1), labels)
    slope, intercept = oracle.coef_[0] * (1e4, 1)
    assert 1 / found.temperature == pytest.approx(slope, rel=1e-3)
    assert found.offsets[1] - found.offsets[0] == pytest.approx(intercept, rel=1e-3)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(1, 40))
def test_the_gradient_is_that_of_finite_differences(seed: int, classes: int, images: int) -> None:
    rng = np.random.default_rng(seed)
    logits, labels = rng.normal(size=(images, classes)) * 3, rng.integers(0, classes, images)
    loss = offsets_loss(logits, labels)
    point = np.append(rng.uniform(0.2, 3), rng.normal(size=len(np.unique(labels))))
    numeric = optimize.approx_fprime(point, lambda at: loss(at)[0], 1e-7)
    np.testing.assert_allclose(loss(point)[1], numeric, atol=2e-6)


def test_the_fit_is_where_the_penalised_likelihood_is_highest() -> None:
    made = shifted(400, seed=3)
    found = fit_offsets(made)
    assert found is not None and found.offsets is not None and found.temperature is not None
    loss, best = offsets_loss(logits_of(made), made.labels), np.append(1 / found.temperature, found.offsets)
    for step in np.random.default_rng(0).normal(size=(50, 5)) * 0.01:
        assert loss(best + step)[0] >= loss(best)[0]
    nll = calibration_values(calibrated(made, found))["nll"]
    assert loss(best)[0] == pytest.approx(nll + np.square(found.offsets).sum() / (2 * 400), rel=1e-9)


def test_the_penalty_vanishes_with_the_number_of_images() -> None:
    """The same images n times: the sum of the probabilities of a class becomes its number of images."""
    made, worst = shifted(200, seed=1), []
    for times in (1, 4, 64):
        rows = np.tile(np.arange(200), times)
        whole = made.select(rows, np.arange(len(rows)).astype(str))
        found = fit_offsets(whole)
        assert found is not None
        worst.append(np.abs(calibrated(whole, found).probabilities.mean(axis=0) - whole.class_counts / len(rows)).max())
    assert worst[0] > worst[1] > worst[2] and worst[2] < 1e-3


def test_a_class_without_images_keeps_its_place() -> None:
    made = shifted(2000, seed=2)
    found = fit_offsets(made.select(made.labels != 2))
    assert found is not None and found.offsets is not None
    assert found.offsets[2] == 0 and sum(found.offsets) == pytest.approx(0, abs=1e-9)
    assert np.isfinite(found.offsets).all() and np.isfinite(calibrated(made, found).probabilities).all()


@pytest.mark.parametrize("made", SINGLE_LABEL.values(), ids=SINGLE_LABEL)
@pytest.mark.parametrize("kind", ["auto", "offsets"])
def test_degenerate_predictions_are_survived(made: Predictions, kind: str) -> None:
    for split, fitting in ((None, made), ("val", made)):
        found, after = calibrate(made, split, fitting, units_of(made), 0, kind)
        assert (after is None) == (found.value is None)
        if after is not None:
            assert np.isfinite(after.probabilities).all() and np.isfinite(found.offsets or (0.0,)).all()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("split", [None, "val"])
def test_offsets_are_chosen_where_classes_are_predicted_too_often(seed: int, split: str | None) -> None:
    made, aside = shifted(600, seed, groups=200), shifted(600, seed + 100)
    found, after = calibrate(made, split, made if split is None else aside, units_of(made), seed)
    plain, scaled = calibrate(made, split, made if split is None else aside, units_of(made), seed, "temperature")
    assert found.offsets is not None and plain.offsets is None and after is not None and scaled is not None
    assert losses(after)[0].mean() < losses(scaled)[0].mean() - 0.02
    assert np.mean(after.probabilities.argmax(axis=1) == made.labels) > np.mean(
        scaled.probabilities.argmax(1) == made.labels
    )
    assert "change decisions" in found.in_words and "lower the log loss by" in found.in_words


@pytest.mark.parametrize("images", [40, 200, 1000])
def test_the_temperature_stays_alone_where_nothing_is_shifted(images: int) -> None:
    """Without a shift offsets cost log loss, so they are chosen in few samples, and then cost little."""
    chosen, cost = 0, []
    for seed in range(15):
        made = shifted(images, seed, shift=np.zeros(4))
        found, _ = calibrate(made, "val", made, units_of(made), seed)
        if found.value is None:
            continue
        chosen += found.offsets is not None
        new = shifted(2000, seed + 1000, shift=np.zeros(4))
        cost.append(
            losses(calibrated(new, found.map))[0].mean()
            - losses(calibrated(new, CalibrationMap(found.value)))[0].mean()
        )
    assert chosen <= 2 and np.mean(cost) < 0.01


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 120), st.integers(0, 40), st.booleans())
def test_without_offsets_everything_is_as_with_the_temperature_alone(
    seed: int, images: int, groups: int, halves: bool
) -> None:
    made = single_label(images, 3, seed, groups=groups)
    fitting, split = (made, None) if halves else (single_label(images, 3, seed + 1), "val")
    found, after = calibrate(made, split, fitting, units_of(made), seed)
    if found.offsets is None:
        plain, scaled = calibrate(made, split, fitting, units_of(made), seed, "temperature")
        assert found == plain
        if after is None or scaled is None:
            assert after is scaled
        else:
            np.testing.assert_array_equal(after.probabilities, scaled.probabilities)


def test_the_temperature_alone_is_what_it_was() -> None:
    """The formula of the versions without offsets, to the last bit."""
    made = shifted(300, groups=80)
    units = units_of(made)
    second = halves_of(units, 0)
    first, other = (fit_temperature(made.select(half)) for half in (~second, second))
    found, after = calibrate(made, None, made, units, 0, "temperature")
    assert after is not None and (found.halves, found.value) == ((first, other), np.sqrt(first * other))
    scaled = np.log(np.clip(made.probabilities, np.finfo(float).eps, 1)) / np.where(second, first, other)[:, None]
    np.testing.assert_array_equal(after.probabilities, special.softmax(scaled, axis=1))
    assert found.offsets is None and found.offsets_of_halves is None


def test_each_half_has_the_offsets_of_the_other() -> None:
    made = shifted(500, groups=120)
    units = units_of(made)
    second = halves_of(units, 4)
    maps = [fit_offsets(made.select(half)) for half in (~second, second)]
    found, after = calibrate(made, None, made, units, 4)
    assert after is not None and found.maps_of_halves == tuple(maps) and found.value is not None
    for rows, own in ((second, maps[0]), (~second, maps[1])):
        assert own is not None
        expected = calibrated(made.select(rows), own).probabilities
        np.testing.assert_allclose(after.probabilities[rows], expected, rtol=1e-12)
    temperatures, offsets = zip(*((own.temperature, own.offsets) for own in maps if own), strict=True)
    assert found.value == pytest.approx(np.sqrt(np.prod(temperatures)))
    np.testing.assert_allclose(found.offsets, np.mean(offsets, axis=0), rtol=1e-12)


def test_the_gain_is_cross_fitted_over_groups() -> None:
    """Every group twice: the standard error is that of the groups, about √2 times that of as many images."""
    made = shifted(400)
    names = np.concatenate([[f"{i}a", f"{i}b"] for i in range(400)])
    twice = made.select(np.repeat(np.arange(400), 2), names)
    groups = np.repeat(np.arange(400), 2)
    gain, error = gain_of_offsets(twice, Units(groups, 400, "groups"), 0)
    alone, error_alone = gain_of_offsets(made, units_of(made), 0)
    assert gain == pytest.approx(alone, rel=0.1) and error == pytest.approx(error_alone, rel=0.1)
    assert np.isnan(gain_of_offsets(made, Units(np.zeros(400, np.intp), 1, "groups"), 0)).all()
    two = Units(np.arange(400) % 2, 2, "groups")
    assert np.isfinite(gain_of_offsets(made, two, 0)).all()


def test_a_calibration_that_is_none_or_for_several_labels_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", several_labels(60))
    with pytest.raises(InputError, match="unknown calibration 'ofsets'; did you mean 'offsets'"):
        evaluate(run, draws=2, calibration="ofsets")
    with pytest.raises(InputError, match="for one label per image"):
        evaluate(run, draws=2, calibration="offsets")
    assert evaluate(run, draws=2).calibration.temperature.offsets is None


def split_run(folder: Path, seed: int = 0, **more: str) -> Path:
    """A run with a shift, and the splits val and test."""
    made = replace(shifted(1200, seed), splits=np.array(["val"] * 600 + ["test"] * 600))
    return write_run(folder, made, class_counts=[100, 100, 100, 100], **more)


def test_everything_in_the_evaluation_uses_the_map_that_is_written(tmp_path: Path) -> None:
    run = split_run(tmp_path / "run")
    scores = evaluate(run, draws=20, decision="balanced", cost="ant:bee=5")
    kept = RunFolder(run).read_calibration()
    assert kept.map == scores.calibration.temperature.map and kept.map.offsets is not None
    assert json.loads((run / "calibration.json").read_text())["format"] == 2
    predictions = RunFolder(run).read_predictions()
    val, test = (calibrated(predictions.of_split(name), kept.map) for name in ("val", "test"))
    assert scores.calibration.after is not None and scores.decisions is not None
    assert scores.calibration.after.scores["nll"].value == pytest.approx(calibration_values(test)["nll"])
    for own in scores.decisions.rules:
        rule = replace(kept.decision or DecisionRule(), name=own.rule)
        right = float(np.mean(decide(test.probabilities, rule) == test.labels))
        assert own.scores["accuracy"].value == pytest.approx(right)
    assert kept.sets == fit_thresholds(val, "val")
    assert RunFolder(run).read_scores() == scores


def test_the_balanced_rule_divides_by_the_frequencies_that_the_offsets_put_in(tmp_path: Path) -> None:
    run = split_run(tmp_path / "run")
    evaluate(run, draws=2)
    counts = RunFolder(run).read_predictions().of_split("val").class_counts
    decision = RunFolder(run).read_calibration().decision
    assert decision is not None and decision.weights == pytest.approx(600 / (4 * counts))
    evaluate(run, draws=2, calibration="temperature")  # those of the training again
    decision = RunFolder(run).read_calibration().decision
    assert decision is not None and decision.weights == pytest.approx(np.ones(4))
    assert json.loads((run / "calibration.json").read_text())["format"] == 1
    assert "offsets" not in json.loads((run / "calibration.json").read_text())["temperature"]


@pytest.mark.parametrize("line", ["class_weights = true", "balanced_sampling = true", "logit_adjustment = 1.0"])
def test_a_training_that_balanced_the_classes_keeps_the_temperature_alone(tmp_path: Path, line: str) -> None:
    run = split_run(tmp_path / "run", settings=f"{line}\n")
    assert evaluate(run, draws=2).calibration.temperature.offsets is None
    assert evaluate(run, draws=2, calibration="offsets").calibration.temperature.offsets is not None
    decision, counts = RunFolder(run).read_calibration().decision, RunFolder(run).read_predictions().of_split("val")
    assert decision is not None and decision.weights == pytest.approx(600 / (4 * counts.class_counts))
    assert kind_for("auto", {}) == "auto" and kind_for("offsets", {"class_weights": True}) == "offsets"


def test_a_comparison_calibrates_each_run_in_its_own_order_of_classes(tmp_path: Path) -> None:
    first = split_run(tmp_path / "first")
    made = RunFolder(first).read_predictions()
    order = np.array([2, 0, 3, 1])
    other = replace(
        made, labels=np.argsort(order)[made.labels], probabilities=made.probabilities[:, order],
        classes=tuple(made.classes[k] for k in order),
    )  # fmt: skip
    second = write_run(tmp_path / "second", other, method="hard")
    found = compare([first, second], draws=5)
    for method in found.methods:
        value = evaluate(method.runs[0].path, draws=2).calibration.after
        assert value is not None and method.scores["nll_calibrated"].mean == pytest.approx(value.scores["nll"].value)
    alone = compare([first, second], draws=5, calibration="temperature")
    assert alone.methods[0].scores["nll_calibrated"].mean > found.methods[0].scores["nll_calibrated"].mean + 0.02  # type: ignore[operator]


def test_the_command_takes_the_kind_of_calibration(tmp_path: Path) -> None:
    run = split_run(tmp_path / "run")
    for kind, chosen in (("temperature", False), ("auto", True), ("offsets", True)):
        result = CliRunner().invoke(app, ["evaluate", str(run), "--draws", "2", "--calibration", kind])
        assert result.exit_code == 0 and (RunFolder(run).read_calibration().map.offsets is not None) == chosen
        assert ("and offsets" in result.output) == chosen
    refused = CliRunner().invoke(app, ["compare", str(run), "--out", str(tmp_path / "out"), "--calibration", "platt"])
    assert isinstance(refused.exception, InputError) and "unknown calibration 'platt'" in str(refused.exception)
