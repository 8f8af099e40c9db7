"""Dataclasses from plain values: types, ranges, names, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from cclnet.errors import InputError
from cclnet.schema import check, from_plain, rule, to_plain


@dataclass(frozen=True)
class Inner:
    share: float = field(metadata=rule(low=0, below=1))
    name: str = field(default="", metadata=rule(max_text=3))


@dataclass(frozen=True)
class Outer:
    count: int = field(metadata=rule(key="n", old_name="number", low=0))
    inner: Inner
    rows: tuple[tuple[float, float], ...] = ()
    limits: tuple[float, ...] = field(default=(), metadata=rule(length=2, ascending=True))
    kind: str = field(default="a", metadata=rule(choices=("a", "b")))
    texts: list[str] | None = None
    rest: Mapping[str, Any] = field(default_factory=dict, metadata=rule(inline=True))


GIVEN: dict[str, Any] = {
    "n": 3,
    "inner": {"share": 0},
    "rows": [[1, 2.5]],
    "limits": [1, 2],
    "texts": ["x"],
    "more": [1],
}


def test_values_become_a_dataclass_and_return() -> None:
    made = from_plain(Outer, GIVEN)
    assert made == Outer(3, Inner(0.0), ((1.0, 2.5),), (1.0, 2.0), "a", ["x"], {"more": [1]})
    assert from_plain(Outer, to_plain(made)) == made
    assert to_plain(made)["n"] == 3 and to_plain(made)["more"] == [1]
    assert from_plain(Outer, {"number": 3, "inner": {"share": 0.5}}).count == 3


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"n": True}, "n must be a whole number, got True"),
        ({"n": 1.0}, "n must be a whole number"),
        ({"n": -1}, "n must be at least 0, got -1"),
        ({"number": 2}, "number is the old name of at n: give n alone"),
        ({"inner": 3}, "at inner must be a table of keys and values, got 3"),
        ({"inner": {}}, "inner.share must be a number, at least 0 and below 1, got nothing"),
        ({"inner": {"share": 10**400}}, "inner.share must be a number"),
        ({"inner": {"share": float("nan")}}, "got nan"),
        ({"inner": {"share": "0.5"}}, "got '0.5'"),
        ({"inner": {"share": 0, "name": "long"}}, "inner.name must be at most 3 characters, got 'long'"),
        ({"rows": [[1, 2], [1]]}, r"rows\[1\] must be a list of 2 numbers, got \[1\]"),
        ({"rows": [[1, None]]}, r"rows\[0\]\[1\] must be a number, got None"),
        ({"limits": [1]}, "limits must be 2 numbers, in ascending order"),
        ({"limits": [2, 1]}, r"in ascending order, got \[2, 1\]"),
        ({"kind": "c"}, "unknown value of at kind 'c'"),
        ({"texts": [1]}, r"texts\[0\] must be text, got 1"),
        ({"texts": "abc"}, "texts must be a list of texts, got 'abc'"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        from_plain(Outer, GIVEN | changes, "at ")


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(InputError, match=r"n must be.*; inner\.share must be.*; texts must be"):
        from_plain(Outer, {"n": "x", "inner": {"share": 1}, "texts": 2})


@pytest.mark.parametrize("content", [None, [], "text", 3])
def test_only_a_table_is_read(content: object) -> None:
    with pytest.raises(InputError, match="must be a table"):
        from_plain(Outer, content)


def test_an_object_made_by_hand_is_checked() -> None:
    made = Outer(1, Inner(0.5), limits=[1, 2])  # type: ignore[arg-type]
    check(made)
    assert made.limits == (1.0, 2.0)
    with pytest.raises(InputError, match=r"it\.count must be .*; it\.limits must be"):
        check(Outer(-1, Inner(0.5), limits=(1.0,)), "it.")
