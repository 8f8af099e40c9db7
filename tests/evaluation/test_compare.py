from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from cclnet.errors import InputError
from cclnet.evaluation.compare import Comparison, RunReference, SeedCounts, compare
from cclnet.evaluation.evaluate import evaluate
from cclnet.runs.predictions import Predictions, write_predictions
from made_predictions import several_labels, single_label, write_run

IMAGES = 150


def model_of(seed: int, skill: float, images: int = IMAGES, groups: bool = True) -> Predictions:
    """What one model says about the same images as all the others."""
    labels = np.random.default_rng(99).integers(0, 3, images)
    rng = np.random.default_rng((seed, round(100 * skill)))
    logits = rng.normal(size=(images, 3)) + skill * np.eye(3)[labels]
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    of = np.array([f"g{i // 2}" for i in range(images)]) if groups else None
    return Predictions(np.array([f"i{i:04d}" for i in range(images)]), labels, p, ("ant", "bee", "cat"), of)


def methods(folder: Path, seeds: int = 5, **skills: float) -> list[Path]:
    return [write_run(folder / f"{method}-{seed}", model_of(seed, skill), method, seed)
            for method, skill in skills.items() for seed in range(seeds)]  # fmt: skip


def test_the_whole_dict(tmp_path: Path) -> None:
    compared = compare(methods(tmp_path, ccl=2.5, hard=1.0), draws=100)
    content = compared.to_json()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert Comparison.from_json(content) == compared
    assert list(content) == [
        "format", "kind", "task", "classes", "split", "intervals", "primary", "metrics", "methods", "comparisons",
        "soft_labels", "warnings", "versions",
    ]  # fmt: skip
    assert [m.name for m in compared.metrics] == [
        "accuracy", "balanced_accuracy", "macro_f1", "kappa", "macro_jaccard", "macro_auroc",
        "mean_average_precision", "nll", "brier", "ece", "aurc", "nll_calibrated", "ece_calibrated",
        *(f"auroc:{name}" for name in compared.classes),
    ]  # fmt: skip
    lower = [m.name for m in compared.metrics if not m.higher_is_better]
    assert lower == ["nll", "brier", "ece", "aurc", "nll_calibrated", "ece_calibrated"]
    assert [m.name for m in compared.methods] == ["ccl", "hard"]
    assert [run.seed for run in compared.methods[0].runs] == [0, 1, 2, 3, 4]
    (found,) = compared.comparisons
    assert found.seeds == SeedCounts(5, 5, True) and found.in_words == "5 seeds each, paired by seed."
    assert list(found.metrics) == [m.name for m in compared.metrics]
    assert found.mcnemar is None and compared.soft_labels is None and compared.warnings == ()


def test_values_are_those_of_evaluate_and_differences_follow(tmp_path: Path) -> None:
    runs = methods(tmp_path, ccl=2.0, hard=1.5)
    compared = compare(runs, draws=100)
    scores = [evaluate(run, draws=10) for run in runs]
    for name in ("accuracy", "kappa", "macro_auroc", "nll", "ece"):
        values = [(j.overall | j.calibration.before.scores)[name].value for j in scores]
        ours = [m.scores[name].values for m in compared.methods]
        assert [*ours[0], *ours[1]] == pytest.approx(values, abs=1e-12)
        test = compared.comparisons[0].metrics[name]
        d = np.array(values[:5]) - np.array(values[5:])
        assert test.difference == pytest.approx(d.mean())
        assert test.seed_differences == pytest.approx(tuple(d.tolist()))
        assert test.effect_size == pytest.approx(d.mean() / d.std(ddof=1))
        assert test.p >= stats.ttest_1samp(d, 0).pvalue  # never surer than the seeds alone
        assert test.low < test.difference < test.high
        mean = compared.methods[0].scores[name]
        assert mean.mean == pytest.approx(np.mean(values[:5])) and mean.sd == pytest.approx(np.std(values[:5], ddof=1))
        assert mean.low < mean.mean < mean.high
    for k, of_class in enumerate(compared.classes):
        values = [j.per_class[k].scores["auroc"].value for j in scores]
        ours = [m.scores[f"auroc:{of_class}"].values for m in compared.methods]
        assert [*ours[0], *ours[1]] == pytest.approx(values, abs=1e-12)


def test_a_large_difference_is_found_and_said_in_words(tmp_path: Path) -> None:
    compared = compare(methods(tmp_path, hard=0.5, ccl=3.0), draws=200)
    (found,) = compared.comparisons
    accuracy, nll = found.metrics["accuracy"], found.metrics["nll"]
    assert accuracy.evidence and accuracy.better == "b" and accuracy.difference < 0
    assert nll.evidence and nll.better == "b" and nll.difference > 0  # lower is better
    points = 100 * abs(accuracy.difference)
    assert accuracy.verdict.startswith(f"ccl is better by {points:.1f} points [")
    assert found.verdict.startswith("Accuracy: ccl is better by")
    assert "Evidence of a difference in: balanced accuracy (ccl better)" in found.verdict
    assert accuracy.permutation.p == accuracy.permutation.smallest_possible == 0.0625
    assert "With 5 seeds it cannot fall below 0.0625" in accuracy.permutation.in_words
    assert accuracy.bootstrap.high < 0


def test_equal_methods_are_not_told_apart(tmp_path: Path) -> None:
    """Seeds from one distribution, a draw in which they lie as usual; benchmarks/statistics.py counts over many."""
    made = {name: [model_of(100 * n + s, 1.5) for s in range(5)] for n, name in enumerate("ab")}
    runs = {
        name: [write_run(tmp_path / f"{name}{s}", p, seed=s) for s, p in enumerate(own)] for name, own in made.items()
    }
    (found,) = compare(runs, draws=60).comparisons
    assert not any(test.evidence for test in found.metrics.values())
    assert found.metrics["accuracy"].verdict.startswith("No evidence of a difference: a minus b is ")
    assert found.verdict.endswith("No evidence of a difference in any other score.")


def test_one_seed_each_speaks_of_models_alone(tmp_path: Path) -> None:
    compared = compare(methods(tmp_path, seeds=1, ccl=3.0, hard=0.5), draws=100)
    (found,) = compared.comparisons
    accuracy = found.metrics["accuracy"]
    assert not accuracy.evidence and accuracy.better is None and accuracy.p < 0.05
    assert accuracy.verdict.startswith(
        "One seed each: nothing can be said about the methods, only about these models: that of ccl is better"
    )
    assert accuracy.permutation is None and accuracy.effect_size is None and accuracy.seed_differences is None
    right = [(p := model_of(0, skill)).probabilities.argmax(axis=1) == p.labels for skill in (3.0, 0.5)]
    assert found.mcnemar.only_a_right == (right[0] & ~right[1]).sum()
    assert "χ² with continuity correction" in found.mcnemar.in_words
    assert "those of one group are not" in found.mcnemar.in_words
    assert "too few to say anything about the methods" in found.in_words
    assert any("train at least five" in w for w in compared.warnings)
    assert compared.methods[0].scores["accuracy"].sd is None


def test_one_seed_against_several_is_no_claim_either(tmp_path: Path) -> None:
    runs = methods(tmp_path, seeds=3, ccl=3.0, hard=0.5)
    (found,) = compare({"many": runs[:3], "one": runs[3:4]}, draws=50).comparisons
    assert not found.metrics["accuracy"].evidence and found.mcnemar is None
    assert found.metrics["accuracy"].verdict.startswith("One seed of one: nothing can be said")


def test_few_seeds_are_called_few_once(tmp_path: Path) -> None:
    found = compare(methods(tmp_path, seeds=3, ccl=1.6, hard=1.5, lsr=1.4), draws=50)
    assert len(found.comparisons) == 3
    assert [w for w in found.warnings if "few" in w] == [
        "With fewer than 5 seeds only large differences can be told from chance."
    ]
    assert "few" not in " ".join(pair.in_words for pair in found.comparisons)
    enough = compare(methods(tmp_path / "more", seeds=5, ccl=1.6, hard=1.5), draws=50)
    assert not any("few" in warning for warning in enough.warnings)


def test_seeds_that_differ_are_not_paired(tmp_path: Path) -> None:
    runs = methods(tmp_path, ccl=2.0, hard=1.5)
    (found,) = compare({"a": runs[:5], "b": runs[6:9]}, draws=50).comparisons
    test = found.metrics["accuracy"]
    assert found.seeds == SeedCounts(5, 3, False) and found.in_words.startswith("5 and 3 seeds, not paired")
    assert test.seed_differences is None and test.permutation.arrangements == 56
    assert "Exact permutation of the seeds between the methods" in test.permutation.in_words


def test_holm_counts_the_comparisons(tmp_path: Path) -> None:
    compared = compare(methods(tmp_path, seeds=3, ccl=2.0, hard=1.5, lsr=1.6), draws=50)
    pairs = [(c.a.split(",")[0], c.b.split(",")[0]) for c in compared.comparisons]
    assert pairs == [("ccl", "hard"), ("ccl", "lsr"), ("hard", "lsr")]
    p = [c.metrics["accuracy"].p for c in compared.comparisons]
    corrected = [c.metrics["accuracy"].p_holm for c in compared.comparisons]
    assert min(corrected) == pytest.approx(min(1.0, 3 * min(p))) and all(
        c >= q for c, q in zip(corrected, p, strict=True)
    )


def test_methods_against_one(tmp_path: Path) -> None:
    runs = methods(tmp_path, seeds=2, ccl=2.0, hard=1.5, lsr=1.6)
    compared = compare(runs, against="hard", primary="kappa", draws=20)
    assert [(c.a, c.b) for c in compared.comparisons] == [
        ("ccl", "hard"), ("lsr", "hard"),
    ]  # fmt: skip
    assert compared.primary == "kappa" and compared.comparisons[0].verdict.startswith("Kappa: ")
    with pytest.raises(InputError, match="unknown method 'hart'; did you mean 'hard'"):
        compare(runs, against="hart", draws=20)
    with pytest.raises(InputError, match="unknown score 'acuracy'; did you mean 'accuracy'"):
        compare(runs, primary="acuracy", draws=20)


def test_the_order_of_images_and_classes_does_not_matter(tmp_path: Path) -> None:
    runs = methods(tmp_path, seeds=2, ccl=2.0, hard=1.5)
    straight = compare(runs, draws=50)
    made = model_of(1, 1.5)
    order = np.array([2, 0, 1])
    turned = Predictions(made.images, np.argsort(order)[made.labels], made.probabilities[:, order],
                         tuple(made.classes[k] for k in order), made.groups)  # fmt: skip
    write_predictions(runs[3] / "predictions.csv", turned.select(np.random.default_rng(0).permutation(IMAGES)))
    again = compare(runs, draws=50)
    for metric in ("accuracy", "macro_f1", "macro_auroc", "ece", "nll_calibrated"):
        for key in ("difference", "low", "high", "p"):
            first, second = (getattr(c.comparisons[0].metrics[metric], key) for c in (straight, again))
            assert first == pytest.approx(second, rel=1e-6, abs=1e-9), (metric, key)


def test_runs_about_other_things_are_refused_all_at_once(tmp_path: Path) -> None:
    made = model_of(0, 2.0)
    other_labels = replace(made, labels=np.where(np.arange(IMAGES) < 4, (made.labels + 1) % 3, made.labels))
    cases = {
        "first": made,
        "fewer": made.select(np.arange(IMAGES - 2)),
        "others": replace(made, images=np.char.add("x", made.images)),
        "classes": replace(made, classes=("ant", "bee", "cow")),
        "several": replace(several_labels(IMAGES, 3), images=made.images, classes=made.classes),
    }
    runs = [write_run(tmp_path / name, p, name) for name, p in cases.items()]
    with pytest.raises(InputError) as caught:
        compare(runs)
    message = str(caught.value)
    for expected in (
        "these runs cannot be compared",
        "fewer (all, 148 images): without 2 images (i0148, i0149) of first",
        "others (all, 150 images): 150 images (xi0000, xi0001, xi0002, ...) that first does not have",
        "classes (all, 150 images): 1 class (cow) that first does not have; without 1 class (cat) of first",
        "several (all, 150 images): several labels per image, where first has one label",
        "Train them on one split",
    ):
        assert expected in message
    labels = write_run(tmp_path / "labels", other_labels, "labels")
    groups = write_run(tmp_path / "groups", replace(made, groups=np.array(["g"] * IMAGES)), "groups")
    with pytest.raises(InputError) as caught:
        compare([runs[0], labels, groups])
    assert "labels: other labels than first for 4 images." in str(caught.value)
    assert "groups: other groups than first for 150 images." in str(caught.value)


def test_groups_known_to_one_run_serve_all(tmp_path: Path) -> None:
    known = write_run(tmp_path / "known", model_of(0, 2.0), "a")
    unknown = write_run(tmp_path / "unknown", model_of(1, 2.0, groups=False), "b")
    for runs in ([known, unknown], [unknown, known]):
        assert compare(runs, draws=20).intervals.over == "groups"


def test_methods_of_one_name_are_told_apart_by_their_settings(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{e}-{s}", model_of(s, 1.5), "lsr", s, method_settings={"epsilon": e})
            for e in (0.1, 0.5) for s in range(2)]  # fmt: skip
    names = [m.name for m in compare(runs, draws=20).methods]
    assert names == ["lsr (epsilon=0.1)", "lsr (epsilon=0.5)"]


def test_the_backbone_is_told_where_there_are_several(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{b}-{m}", model_of(0, 1.5), m) for b in ("small", "large") for m in ("ccl", "hard")]
    for run in runs:
        model = json.loads((run / "model.json").read_text())
        (run / "model.json").write_text(json.dumps(model | {"backbone": run.name.partition("-")[0]}))
    names = [method.name for method in compare(runs, draws=20).methods]
    assert names == ["ccl, small", "hard, small", "ccl, large", "hard, large"]


def test_no_difference_lies_beyond_what_is_possible(tmp_path: Path) -> None:
    """Two seeds that contradict each other: the interval of a mean of two is wider than accuracy can differ."""
    skills = {"a": (4.0, 0.0), "b": (0.0, 4.0)}
    runs = [write_run(tmp_path / f"{name}{s}", model_of(s, skill), name, s)
            for name, each in skills.items() for s, skill in enumerate(each)]  # fmt: skip
    (found,) = compare(runs, draws=50).comparisons
    for metric, largest in (("accuracy", 1.0), ("kappa", 2.0), ("brier", 2.0), ("ece", 1.0)):
        test = found.metrics[metric]
        assert -largest <= test.low <= test.difference <= test.high <= largest
    assert found.metrics["accuracy"].low == -1 and "[-100.0, 100.0]" in found.metrics["accuracy"].verdict
    assert found.metrics["nll"].high > 2  # has no largest


def test_a_seed_twice_is_no_repetition(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, model_of(n, 1.5), "ccl", 0) for n, name in enumerate(("short", "long"))]
    compared = compare(runs, draws=20)
    assert [m.name for m in compared.methods] == ["short", "long"]
    assert any(
        w.startswith("short, long are of one method and backbone but repeat seed 0")
        and "give these alone, each seed once, or name the groups in Python" in w
        for w in compared.warnings
    )


def test_seeds_trained_unlike_are_told(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"r{s}", model_of(s, 1.5), "ccl", s, settings=f"lr = {lr}\n[split]\nseed = {s}\n")
            for s, lr in enumerate((0.1, 0.01))]  # fmt: skip
    warnings = compare(runs, draws=20).warnings
    assert warnings == ("The runs of ccl are counted as seeds of one method but differ in lr.",)
    (runs[0] / "settings.toml").write_text("= broken")
    with pytest.raises(InputError, match=r"settings\.toml is not valid TOML"):
        compare(runs, draws=20)


def test_a_setting_that_an_earlier_version_did_not_have_counts_as_its_default(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"r{s}", model_of(s, 1.5), "ccl", s, settings=f"lr = 0.1\n{later}")
            for s, later in enumerate(("", "unsoften = false\naccumulate = 1\ndrop_rate = 0.0\n"))]  # fmt: skip
    assert compare(runs, draws=20).warnings == ()
    (runs[1] / "settings.toml").write_text("lr = 0.1\nunsoften = true\n")
    assert any(w.endswith("differ in unsoften.") for w in compare(runs, draws=20).warnings)


def test_methods_trained_unlike_are_told(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / m, model_of(0, 1.5), m, settings=f"epochs = {epochs}\nlr = 0.1\nlr_ccl = {epochs}\n")
            for m, epochs in (("ccl", 160), ("hard", 5))]  # fmt: skip
    assert (
        "Not only the methods differ, so a difference may not be theirs: epochs (ccl: 160, hard: 5)."
        in compare(runs, draws=20).warnings
    )


def test_a_model_of_another_make_stands_alone(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, model_of(i, 1.5)) for i, name in enumerate(("one", "two"))]
    for run in runs:
        model = json.loads((run / "model.json").read_text())
        del model["method"], model["method_settings"]
        (run / "model.json").write_text(json.dumps(model | {"name": "x"}))
    assert [method.name for method in compare(runs, draws=20).methods] == ["one", "two"]


def test_what_does_not_vary_has_no_interval(tmp_path: Path) -> None:
    sure = model_of(0, 60.0, images=12)
    write_predictions(tmp_path / "a.csv", sure)
    write_predictions(tmp_path / "b.csv", sure)
    (found,) = compare([tmp_path / "a.csv", tmp_path / "b.csv"], draws=20).comparisons
    test = found.metrics["accuracy"]
    assert (test.difference, test.low, test.high, test.p) == (0, None, None, 1)
    assert test.verdict.endswith("no evidence of a difference (a minus b is 0.0 points).")


def test_files_without_a_run_stand_alone(tmp_path: Path) -> None:
    for name, seed in (("one.csv", 0), ("two.csv.gz", 1)):
        write_predictions(tmp_path / name, model_of(seed, 1.5))
    compared = compare([tmp_path / "one.csv", tmp_path / "two.csv.gz"], draws=20)
    assert [m.name for m in compared.methods] == ["one", "two"]
    assert compared.methods[0].runs == (RunReference("one", str(tmp_path / "one.csv"), None),)


def test_runs_of_equal_name_go_by_their_path(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / folder / "run", model_of(0, 1.5), folder) for folder in "ab"]
    names = [run.name for m in compare(runs, draws=20).methods for run in m.runs]
    assert names == [str(run) for run in runs]


def test_what_cannot_be_grouped_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", model_of(0, 1.5))
    with pytest.raises(InputError, match="given more than once"):
        compare([run, run])
    with pytest.raises(InputError, match="no run of hard: give every method at least one run"):
        compare({"ccl": [run], "hard": []})
    with pytest.raises(InputError, match="nothing to compare"):
        compare([])


def test_one_method_alone_is_scored_and_compared_with_nothing(tmp_path: Path) -> None:
    compared = compare(methods(tmp_path, seeds=3, ccl=2.0), draws=20)
    assert compared.comparisons == () and len(compared.methods[0].scores["accuracy"].values) == 3


def test_the_same_predictions_twice_do_not_differ(tmp_path: Path) -> None:
    runs = {name: [write_run(tmp_path / f"{name}{s}", model_of(s, 1.5), seed=s) for s in range(3)] for name in "ab"}
    (found,) = compare(runs, draws=20).comparisons
    test = found.metrics["accuracy"]
    assert test.difference == 0 and test.p == 1 and not test.evidence and test.permutation.p == 1


def test_without_a_temperature_there_are_no_scores_after_it(tmp_path: Path) -> None:
    perfect = replace(model_of(0, 2.0), probabilities=np.eye(3)[model_of(0, 2.0).labels] * 0.97 + 0.01)
    runs = [write_run(tmp_path / "perfect", perfect, "a"), write_run(tmp_path / "usual", model_of(0, 2.0), "b")]
    compared = compare(runs, draws=20)
    assert "nll_calibrated" not in [m.name for m in compared.metrics]
    assert "No temperature could be fitted for perfect: no scores after calibration." in compared.warnings


def test_undefined_scores_are_not_compared(tmp_path: Path) -> None:
    def one_class(seed: int) -> Predictions:  # no AUROC without another class
        return replace(model_of(seed, 1.0), labels=np.zeros(IMAGES, int))

    runs = {
        name: [write_run(tmp_path / f"{name}{s}", one_class(s + 7 * n), seed=s) for s in range(2)]
        for n, name in enumerate("ab")
    }
    (found,) = compare(runs, draws=20).comparisons
    test = found.metrics["macro_auroc"]
    assert test.difference is None and test.p_holm is None and not test.evidence
    assert test.verdict == "Cannot be compared: undefined for at least one of the runs."


def test_several_labels_are_compared_too(tmp_path: Path) -> None:
    base = several_labels(120, 3)
    runs = [write_run(tmp_path / f"{m}{s}", replace(base, probabilities=_noisy(base, s, skill)), m, s)
            for m, skill in (("a", 3.0), ("b", 0.5)) for s in range(3)]  # fmt: skip
    compared = compare(runs, draws=50)
    assert compared.primary == "mean_average_precision" and compared.task == "multi-label"
    (found,) = compared.comparisons
    assert found.metrics["hamming_loss"].better == "a" and found.metrics["hamming_loss"].difference < 0
    assert found.mcnemar is None


def _noisy(base: Predictions, seed: int, skill: float) -> np.ndarray:
    noise = np.random.default_rng((seed, round(10 * skill))).normal(size=base.labels.shape)
    return 1 / (1 + np.exp(-(noise + skill * (base.labels - 0.5))))


def test_soft_labels_of_two_runs_are_compared(tmp_path: Path) -> None:
    a = np.array([[0.6, 0.3, 0.1], [0.3, 0.5, 0.2], [0.1, 0.2, 0.7]])
    uniform = np.full((3, 3), 0.2) + 0.4 * np.eye(3)
    made = single_label(30, 3)
    runs = [
        write_run(tmp_path / name, made, name, matrix=matrix)
        for name, matrix in (("x", a), ("y", a**2), ("u", uniform))
    ]
    found = compare(runs, draws=20).soft_labels
    assert found is not None and found.runs == ("x", "y", "u")
    assert found.agreement[0] == (pytest.approx(1.0), pytest.approx(1.0), None)
    assert found.mean_agreement == pytest.approx(1.0)  # over the pairs that have one
