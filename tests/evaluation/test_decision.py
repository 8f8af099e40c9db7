"""Thresholds from the curve of risk against coverage."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats
from sklearn import metrics

from cclnet import InputError
from cclnet.evaluation.calibration import logits_of, risk_coverage, with_logits
from cclnet.evaluation.decision import confidence, curve_of_run, measure_curve
from cclnet.evaluation.evaluate import evaluate
from cclnet.evaluation.statistics import independent_images
from cclnet.runs.calibration_map import CalibrationMap
from cclnet.runs.decision_rule import DecisionRule
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import curve_from_json
from cclnet.runs.predictions import Predictions, read_predictions, write_predictions
from made_predictions import several_labels, single_label, with_temperature
from made_predictions import write_run as made_run

# Ten images: the confidence falls from 1.0 by tenths; the third and the last two are wrong.
TEN = measure_curve(np.linspace(1, 0.1, 10), np.array([1, 1, 0, 1, 1, 1, 1, 1, 0, 0], bool), "val")


def write_run(folder: Path, multilabel: bool = False) -> Path:
    """A folder with predictions of 150 images of val and 50 of test."""
    folder.mkdir()
    made = several_labels(200) if multilabel else single_label(200, groups=80)
    splits = np.array(["val"] * 150 + ["test"] * 50)
    predictions = Predictions(made.images, made.labels, made.probabilities, made.classes, made.groups, splits)
    write_predictions(folder / "predictions.csv", predictions)
    return folder


def test_the_curve_by_hand() -> None:
    np.testing.assert_allclose(TEN.coverage, np.arange(1, 11) / 10)
    np.testing.assert_allclose(TEN.risk * np.arange(1, 11), [0, 0, 1, 1, 1, 1, 1, 1, 2, 3])


@pytest.mark.parametrize(
    ("asked", "kept"),
    [({"coverage": 0.5}, 5), ({"coverage": 0.51}, 6), ({"coverage": 1.0}, 10), ({"risk": 0.0}, 2), ({"risk": 0.15}, 8),
     ({"risk": 0.21}, 8), ({"risk": 0.3}, 10)],
)  # fmt: skip
def test_thresholds_by_hand(asked: dict[str, float], kept: int) -> None:
    point = TEN.at(**asked)
    assert round(TEN.coverage[point] * 10) == kept
    assert (np.linspace(1, 0.1, 10) >= TEN.threshold[point]).sum() == kept


@settings(deadline=None, max_examples=60)
@given(arrays(np.float64, st.integers(1, 60), elements=st.sampled_from([0.2, 0.4, 0.5, 0.7, 0.9, 1.0])), st.data())
def test_a_threshold_does_what_it_promises(sure: np.ndarray, data: st.DataObject) -> None:
    right = data.draw(arrays(np.bool_, len(sure)))
    curve = measure_curve(sure, right, "val")
    coverage = data.draw(st.floats(0.01, 1))
    kept = sure >= curve.threshold[curve.at(coverage=coverage)]
    assert kept.mean() >= coverage - 1e-9
    risk = float(curve.risk.max() * 0.999)
    if (curve.risk <= risk).any():
        kept = sure >= curve.threshold[curve.at(risk=risk)]
        assert (~right[kept]).mean() <= risk


def test_it_is_the_curve_of_the_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    curve = curve_of_run(folder, CalibrationMap(1.5), DecisionRule())
    held_out = with_temperature(read_predictions(folder / "predictions.csv").of_split("test"), 1.5)
    assert (curve.split, curve.images) == ("test", 50)
    reported = risk_coverage(held_out)
    np.testing.assert_allclose(curve.coverage, [p.coverage for p in reported])
    np.testing.assert_allclose(curve.risk, [p.risk for p in reported])


def test_several_labels_are_right_together_or_wrong(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", multilabel=True)
    curve = curve_of_run(folder, CalibrationMap(), DecisionRule())
    held_out = read_predictions(folder / "predictions.csv", multilabel=True).of_split("test")
    wrong = ((held_out.probabilities >= 0.5) != held_out.labels).any(axis=1)
    assert curve.risk[-1] == pytest.approx(wrong.mean())
    assert curve.threshold[-1] == 0  # keeps everything
    sure = np.sort(confidence(held_out.probabilities, None))[::-1]
    assert curve.threshold[0] == pytest.approx(sure[:2].mean())


@pytest.mark.parametrize("noise", [0.0, 2e-7])
def test_rounding_of_an_engine_moves_no_image_across_the_threshold(noise: float) -> None:
    rng = np.random.default_rng(0)
    sure = np.concatenate([rng.random(60), 1 - 1e-8 * rng.random(40)])  # many have the highest confidence
    curve = measure_curve(sure, np.ones(100, bool), "val")
    again = curve_from_json(json.loads(json.dumps(curve.to_json())), Path("calibration.json"))
    said = (sure + noise * rng.choice((-1, 1), 100)).astype(np.float32)
    for coverage in np.arange(0.02, 1.01, 0.02):
        assert (said >= again.threshold[again.at(coverage=coverage)]).mean() >= coverage - 1e-9


def test_a_long_curve_is_thinned_and_still_ends_at_everything() -> None:
    sure = np.random.default_rng(0).random(5000)
    curve = measure_curve(sure, sure > 0.3, "val")
    assert (
        len(curve.coverage) == 1000
        and curve.coverage[-1] == 1
        and curve.risk[-1] == pytest.approx((sure <= 0.3).mean())
    )


def test_in_words() -> None:
    assert TEN.in_words(TEN.at(coverage=0.8)) == (
        "abstains where the confidence is below 0.25. On the 10 images of split 'val' this keeps 80.0%; 12.5% of those "
        "are wrong (95% interval 2.2% to 47.1%)"
    )


def test_images_of_one_patient_do_not_count_as_many() -> None:
    """Ten patients with a hundred images each, two of them wrong throughout: as certain as ten images."""
    patients = np.repeat(np.arange(10), 100)
    right = patients >= 2
    sure = np.random.default_rng(0).random(1000)
    curve = measure_curve(sure, right, "val", patients)
    again = curve_from_json(json.loads(json.dumps(curve.to_json())), Path("calibration.json"))
    for own in (curve, again):
        assert own.in_words(own.at(coverage=1.0)).endswith(
            "20.0% of those are wrong (95% interval 5.7% to 51.0% over patients or lesions)"
        )
    alone = measure_curve(sure, right, "val")
    assert alone.in_words(alone.at(coverage=1.0)).endswith("(95% interval 17.6% to 22.6%)")
    assert "independent" not in alone.to_json()
    none_wrong = measure_curve(sure, np.ones(1000, bool), "val", patients)
    assert none_wrong.independent is not None and none_wrong.independent[-1] == pytest.approx(10)
    each_alone = measure_curve(sure, right, "val", np.arange(1000))
    np.testing.assert_allclose(each_alone.independent, 1000 * each_alone.coverage)


def test_what_images_are_worth_is_what_a_loop_finds() -> None:
    rng = np.random.default_rng(1)
    groups, wrong = rng.integers(0, 12, 80), rng.random(80) < 0.3
    found = independent_images(wrong, groups)
    for n in range(1, 81):
        sizes, errors = np.bincount(groups[:n]), np.bincount(groups[:n], wrong[:n])
        sizes, errors = sizes[sizes > 0], errors[sizes > 0]
        count, share, least = len(sizes), errors.sum() / n, n**2 / (sizes**2).sum()
        expected = least
        if 0 < share < 1 and count > 1:
            variance = count / (count - 1) * ((errors - share * sizes) ** 2).sum() / n**2
            few = stats.norm.ppf(0.975) / stats.t.ppf(0.975, count - 1)
            expected = np.clip(share * (1 - share) / variance * few**2, least, n) if variance > 0 else n
        assert found[n - 1] == pytest.approx(expected)


def test_the_groups_of_a_run_are_used(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    curve = curve_of_run(folder, CalibrationMap(1.5), DecisionRule())
    assert curve.independent is not None and "over patients or lesions" in curve.in_words(curve.at(coverage=0.9))


@pytest.mark.parametrize(
    ("asked", "message"),
    [({}, "either a coverage or a risk"), ({"coverage": 0.5, "risk": 0.1}, "and not both"),
     ({"coverage": 0.0}, "above 0 and at most 1; got 0"), ({"coverage": 90.0}, "got 90"),
     ({"risk": 1.0}, "from 0 to less than 1; got 1"), ({"risk": -0.1}, "got -0.1")],
)  # fmt: skip
def test_invalid_requests(asked: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TEN.at(**asked)


def test_a_risk_out_of_reach_says_what_is_in_reach() -> None:
    curve = measure_curve(np.array([0.9, 0.8]), np.array([False, True]), "val")
    with pytest.raises(InputError, match=r"no threshold keeps the risk at 0.1 .* the least is 0.5, for 100.0% of them"):
        curve.at(risk=0.1)


def test_to_json_and_back() -> None:
    again = curve_from_json(TEN.to_json(), Path("calibration.json"))
    assert (again.split, again.images) == ("val", 10)
    np.testing.assert_allclose(again.threshold, TEN.threshold)
    np.testing.assert_allclose(again.risk, TEN.risk)


@pytest.mark.parametrize(
    "odd", [None, {}, {"split": "val", "images": 3, "rows": []}, {"split": "val", "images": 3, "rows": [[0.5, 2, 0]]},
            {"split": "val", "images": 3, "rows": [["x", 1, 0]]}, {"split": "val", "images": 0, "rows": [[0, 1, 0]]},
            {"split": "val", "images": 3, "rows": [[0.5, 0.5, 0], [0.4, 0.5, 0]]},
            {"split": "val", "images": 3, "rows": [[0.5, 0.5, 0], [0, 0.9, 0]]},
            {"split": "val", "images": 3, "rows": [[0.5, 0.5, 0], [0.1, 1, 0]]},
            *({"split": "val", "images": 3, "rows": [[0, 1, 0]], "independent": odd}
              for odd in ("x", [], [0], [4], [float("nan")], [1, 1], None))],
)  # fmt: skip
def test_a_curve_from_a_file_is_checked(odd: object) -> None:
    with pytest.raises(InputError, match=r"calibration.json: .*abstention curve"):
        curve_from_json(odd, Path("calibration.json"))


def test_rules_side_by_side_are_those_of_scikit_learn(tmp_path: Path) -> None:
    """Each rule is scored on the calibrated probabilities; the expected cost is the mean cost of the decisions."""
    run = write_run(tmp_path / "run")
    scores = evaluate(run, draws=20, cost="ant|bee:cat=7", decision="balanced")
    assert scores.decisions is not None and scores.decisions.chosen == "balanced"
    held_out = read_predictions(run / "predictions.csv").of_split("test")
    calibrated = with_temperature(held_out, scores.calibration.temperature.value or np.nan)
    weights = 1 / np.bincount(read_predictions(run / "predictions.csv").of_split("val").labels)
    costs = np.ones((4, 4)) - np.eye(4)
    costs[:2, 2] = 7
    chosen = {
        "accuracy": held_out.probabilities.argmax(axis=1),
        "balanced": (calibrated.probabilities * weights).argmax(axis=1),
        "costs": (calibrated.probabilities @ costs).argmin(axis=1),
    }
    assert [own.rule for own in scores.decisions.rules] == list(chosen)
    for own in scores.decisions.rules:
        decided, labels = chosen[own.rule], held_out.labels
        expected = {
            "accuracy": metrics.accuracy_score(labels, decided),
            "balanced_accuracy": metrics.balanced_accuracy_score(labels, decided),
            "macro_f1": metrics.f1_score(labels, decided, average="macro"),
            "expected_cost": costs[labels, decided].mean(),
        }
        assert {name: score.value for name, score in own.scores.items()} == pytest.approx(expected)
        np.testing.assert_array_equal(own.confusion, metrics.confusion_matrix(labels, decided))
        low, high = own.scores["expected_cost"].low, own.scores["expected_cost"].high
        assert low is not None and high is not None and low < expected["expected_cost"] < high


def test_a_chosen_rule_is_kept_until_another_is_asked_for(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", single_label(120), settings='decision = "balanced"\n')

    def chosen(**asked: str) -> tuple[str, object]:
        scores = evaluate(run, draws=2, **asked)  # type: ignore[arg-type]
        written = RunFolder(run).read_calibration().decision
        assert scores.decisions is not None and written is not None and written.name == scores.decisions.chosen
        return written.name, written.costs and written.costs[0][1]

    assert chosen() == ("balanced", None)  # of settings.toml
    assert chosen(cost="ant:bee=5") == ("costs", 5.0)
    assert chosen() == ("costs", 5.0)  # of calibration.json
    assert chosen(decision="accuracy") == ("accuracy", 5.0)  # the costs stay known
    assert chosen(decision="costs") == ("costs", 5.0)


def test_decision_rules_are_for_one_label_per_image(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", several_labels(60))
    assert evaluate(run, draws=2).decisions is None
    with pytest.raises(InputError, match="several labels"):
        evaluate(run, draws=2, decision="balanced")


def test_logit_norm_ignores_the_temperature() -> None:
    made = single_label(200, 5)
    chosen = made.probabilities.argmax(axis=1)
    once, scaled = (confidence(own.probabilities, chosen, "logit_norm") for own in (made, with_temperature(made, 3.0)))
    np.testing.assert_allclose(once, scaled)
    assert ((once > 0) & (once <= np.sqrt(4 / 5) + 1e-12)).all()  # the largest is that of one-hot logits
    assert confidence(np.full((1, 5), 0.2), np.array([0]), "logit_norm").tolist() == [0]


def scaled_at_random(images: int = 600) -> Predictions:
    """Logits whose scale differs between images and says nothing: the probability misleads, the direction does not."""
    made = single_label(images, 5, skill=2.0, groups=images // 2)
    scale = np.random.default_rng(1).uniform(0.05, 3, images)
    return with_logits(made, logits_of(made) * scale[:, None])


@pytest.mark.parametrize(("make", "best"), [(scaled_at_random, "logit_norm"), (single_label, "probability")])
def test_the_better_confidence_is_chosen(tmp_path: Path, make: Callable[[int], Predictions], best: str) -> None:
    made = replace(make(600), splits=np.full(600, "val"))
    scores = evaluate(made_run(tmp_path / "run", made), draws=20)
    found = scores.abstention
    assert found is not None and found.chosen == best
    other = "probability" if best == "logit_norm" else "logit_norm"
    assert (found.aurc[best].value or 0) < (found.aurc[other].value or 0)
    assert found.aurc_of_choice == pytest.approx(found.aurc[best].value, abs=0.02)  # the halves agree
    plain = scores.calibration.after or scores.calibration.before
    assert found.aurc["probability"].value == pytest.approx(plain.scores["aurc"].value)
    calibration = RunFolder(tmp_path / "run").read_calibration()
    assert calibration.confidence == best
    curve = curve_of_run(tmp_path / "run", calibration.map, DecisionRule(), best)
    again = curve_from_json(json.loads(json.dumps(curve.to_json())), Path("calibration.json"))
    assert again.confidence == curve.confidence == best


def test_two_classes_have_one_confidence(tmp_path: Path) -> None:
    scores = evaluate(made_run(tmp_path / "run", single_label(80, 2, skill=-3.0)), draws=2)
    assert scores.abstention is not None and scores.abstention.chosen == "probability"
