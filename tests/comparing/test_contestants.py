"""Who takes part, and who cannot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cclnet import METHODS, InputError
from cclnet.data.table import ImageTable
from cclnet.sweep.compare_methods import Contestant, all_that_fit, check_contestants, parse_contestants


def table(several_labels: bool = False) -> ImageTable:
    labels = np.eye(3, dtype=np.uint8)[[0, 1, 2, 0]] if several_labels else np.array([0, 1, 2, 0])
    return ImageTable("made", Path(), list("abcd"), np.zeros((4, 8, 8), np.uint8), labels, ("A", "B", "C"))


def test_by_default_all_that_fit_each_once() -> None:
    chosen, left_out = all_that_fit(table())
    names = [contestant.method for contestant in chosen]
    assert {"hard", "lsr", "lsr-u5", "lsr-a1", "ccl", "ols", "tf-kd", "mbls", "maxsup", "focal"} <= set(names)
    assert left_out == [
        "lsr-u1: the same as lsr",
        "ordinal: for classes that have an order; name it in --methods if these have",
    ]
    check_contestants(chosen, table())


def test_a_method_that_balances_classes_is_left_out_where_the_loader_does() -> None:
    chosen, left_out = all_that_fit(table(), classes_balanced=True)
    assert "ccl-balanced" not in [contestant.method for contestant in chosen]
    assert [reason.partition(":")[0] for reason in left_out] == ["ccl-balanced", "lsr-u1", "ordinal"]
    with pytest.raises(InputError, match=r"ccl-balanced.*class_weights"):
        check_contestants([Contestant("ccl-balanced")], table(), classes_balanced=True)


def test_several_labels_have_their_own_methods() -> None:
    chosen, left_out = all_that_fit(table(several_labels=True))
    assert [contestant.method for contestant in chosen] == ["bce", "ccl-multilabel"] and not left_out
    everything = all_that_fit(table())[0] + chosen
    assert {contestant.method for contestant in everything} == set(METHODS) - {"ordinal", "lsr-u1"}


def test_every_method_that_cannot_take_part_is_named() -> None:
    asked = [Contestant("bce"), Contestant("hard"), Contestant("lsr", {"epsilon": 2.0}), Contestant("ols", {"beta": 1})]
    with pytest.raises(InputError) as raised:
        check_contestants(asked, table())
    said = str(raised.value)
    assert said.startswith("these methods cannot take part:") and said.count("\n  - ") == 3
    assert "- bce: " in said and "- lsr (epsilon=2.0): " in said and "- ols (beta=1): unknown setting" in said
    with pytest.raises(InputError, match=r"- hard: method 'hard' .* 'bce'"):
        check_contestants([Contestant("hard")], table(several_labels=True))


def test_one_method_may_take_part_with_several_settings() -> None:
    chosen = parse_contestants("lsr, lsr:epsilon=.3, lsr:epsilon=0.3,prior=true")
    assert [dict(contestant.settings) for contestant in chosen] == [
        {},
        {"epsilon": 0.3},
        {"epsilon": 0.3, "prior": True},
    ]
    assert [contestant.name(1) for contestant in chosen] == [
        "lsr-seed1",
        "lsr-epsilon-0.3-seed1",
        "lsr-epsilon-0.3-prior-True-seed1",
    ]
    assert parse_contestants("") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clc", "unknown method 'clc'; did you mean 'ccl'"),
        ("epsilon=1,lsr", "methods begin with the name of one, such as lsr:epsilon=0.3; got 'epsilon=1,lsr'"),
        ("hard,ccl,hard", "given more than once: hard"),
    ],
)
def test_what_names_no_methods(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_contestants(text)
