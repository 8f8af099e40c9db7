"""Decision rules: closed forms, the brute-force search over classes, and what users may write as costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cclnet import InputError
from cclnet.runs.decision_rule import DecisionRule, balancing_weights, decide, make_rule, read_costs

CLASSES = ("mel", "nevus", "bcc")
KNOWN = DecisionRule(weights=(1.0, 0.5, 2.0))


def probabilities(images: int, classes: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(classes), images)


def test_the_rule_of_costs_is_the_cheapest_class_by_brute_force() -> None:
    p, costs = probabilities(200, 4), np.random.default_rng(1).uniform(0, 5, (4, 4))
    cheapest = [min(range(4), key=lambda j: sum(row[k] * costs[k, j] for k in range(4))) for row in p]
    assert decide(p, DecisionRule("costs", costs=tuple(map(tuple, costs.tolist())))).tolist() == cheapest


def test_equal_costs_are_the_rule_for_accuracy() -> None:
    p, equal = probabilities(500), tuple(map(tuple, (1 - np.eye(3)).tolist()))
    assert (decide(p, DecisionRule("costs", costs=equal)) == p.argmax(axis=1)).all()


def test_balanced_is_the_cost_of_an_error_inverse_to_the_frequency_of_its_class() -> None:
    counts = np.array([700, 200, 100])
    weights = balancing_weights(counts.tolist(), {})
    costs = (1 - np.eye(3)) / (counts[:, None] / counts.sum())
    p = probabilities(500)
    by_costs = decide(p, DecisionRule("costs", costs=tuple(map(tuple, costs.tolist()))))
    assert (decide(p, DecisionRule("balanced", weights=weights)) == by_costs).all()


def test_balanced_recovers_equal_priors() -> None:
    """Two normal densities with priors of 0.9 and 0.1: the balanced rule cuts half-way between the means."""
    x = np.linspace(-3, 5, 801)
    densities = np.exp(-((x[:, None] - [0, 2]) ** 2) / 2) * [0.9, 0.1]
    p = densities / densities.sum(axis=1, keepdims=True)
    chosen = decide(p, DecisionRule("balanced", weights=balancing_weights((900, 100), {})))
    assert x[chosen == 1].min() == pytest.approx(1.0, abs=0.02)
    assert x[decide(p, DecisionRule()) == 1].min() == pytest.approx(1 + np.log(9) / 2, abs=0.02)


@pytest.mark.parametrize("setting", ["class_weights", "balanced_sampling"])
def test_a_model_that_was_trained_on_balanced_classes_is_not_balanced_twice(setting: str) -> None:
    assert balancing_weights((900, 100), {setting: True}) == (1.0, 1.0)


def test_what_the_loss_has_adjusted_already_is_not_divided_by_again() -> None:
    full, half, none = (balancing_weights((900, 100), {"logit_adjustment": tau}) for tau in (0.0, 0.5, 1.0))
    assert none == (1.0, 1.0)
    np.testing.assert_allclose(np.square(half), full)


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=9).filter(any))
def test_weights_are_inverse_to_the_counts(counts: list[int]) -> None:
    weights = balancing_weights(counts, {})
    assert weights is not None
    products = np.array(weights) * np.maximum(counts, 1)
    np.testing.assert_allclose(products, products[0])


def test_costs_given_alone_choose_their_rule() -> None:
    assert make_rule(CLASSES, False, KNOWN, None, "mel:nevus=10").name == "costs"
    assert make_rule(CLASSES, False, KNOWN, "balanced", "mel:nevus=10").name == "balanced"
    kept = make_rule(CLASSES, False, DecisionRule("costs", costs=((0.0,) * 3,) * 3))
    assert kept.name == "costs"


def test_costs_by_text_csv_and_toml_agree(tmp_path: Path) -> None:
    expected = np.array([[0, 10, 1], [1, 0, 1], [1, 10, 0]], float)
    table = "true,mel,nevus,bcc\n" + "\n".join(
        f"{name},{','.join(map(str, row))}" for name, row in zip(CLASSES, expected, strict=True)
    )
    (tmp_path / "costs.csv").write_text(table)
    (tmp_path / "costs.toml").write_text("[mel]\nnevus = 10\n[bcc]\nnevus = 10\n")
    for given_costs in (
        "mel|bcc:nevus=10",
        "mel:nevus=10, bcc:nevus=10",
        tmp_path / "costs.csv",
        tmp_path / "costs.toml",
    ):
        np.testing.assert_array_equal(read_costs(str(given_costs), CLASSES), expected)


def test_a_class_name_may_have_a_colon_or_a_bar() -> None:
    assert read_costs("grade: 1:a|b=3", ("grade: 1", "a|b")).tolist() == [[0, 3], [1, 0]]


@pytest.mark.parametrize(
    ("text", "named"),
    [("mel:nevvus=10", "nevus"), ("mel=10", "mel=10"), ("mel:nevus=-1", "-1"), ("mel:nevus=x", "'x'"),
     ("mel:nevus=nan", "nan"), ("mel:nevus=inf", "inf"), ("nothing.csv", "nothing.csv"), ("no.toml", "no.toml")],
)  # fmt: skip
def test_wrong_costs_are_refused(text: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        read_costs(text, CLASSES)


@pytest.mark.parametrize("content", ["", "true,mel,nevus,bcc\nmel,0,1\n", "a,b\n\xff"])
def test_a_broken_table_of_costs_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "costs.csv").write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=r"costs\.csv"):
        read_costs(str(tmp_path / "costs.csv"), CLASSES)


def test_a_toml_file_of_values_is_refused(tmp_path: Path) -> None:
    (tmp_path / "costs.toml").write_text("mel = 10\n")
    with pytest.raises(InputError, match="mel"):
        read_costs(str(tmp_path / "costs.toml"), CLASSES)


@pytest.mark.parametrize(
    ("decision", "cost", "known", "multilabel", "named"),
    [("costs", None, KNOWN, False, "cost"), ("balanced", None, DecisionRule(), False, "class counts"),
     ("balanced", None, KNOWN, True, "several labels"), (None, "mel:nevus=2", KNOWN, True, "several labels"),
     ("balanced", None, DecisionRule(weights=(1.0, 2.0)), False, "3 classes")],
)  # fmt: skip
def test_a_rule_without_its_numbers_is_refused(
    decision: str | None, cost: str | None, known: DecisionRule, multilabel: bool, named: str
) -> None:
    with pytest.raises(InputError, match=named):
        make_rule(CLASSES, multilabel, known, decision, cost)
