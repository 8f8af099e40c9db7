"""Who takes part in a comparison of methods: those named, or all that fit the data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cclnet.data.table import ImageTable
from cclnet.errors import InputError, unknown
from cclnet.methods import METHODS, Classes, build_method, check_method_fits, method_settings, methods_for
from cclnet.training.settings import make_settings, parse_overrides

NEED_ORDER = ("ordinal",)


@dataclass(frozen=True)
class Contestant:
    """A method, with those of its settings that differ from its defaults."""

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """
        >>> Contestant("lsr", {"epsilon": 0.3}).label
        'lsr (epsilon=0.3)'
        """
        told = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.method} ({told})" if told else self.method

    def name(self, seed: int) -> str:
        """Of its run with a seed, as a file name.

        >>> Contestant("ccl", {"widths": (16, 8)}).name(0)
        'ccl-widths-16-8-seed0'
        """
        words = (self.method, *(f"{name}-{value}" for name, value in self.settings.items()), f"seed{seed}")
        return re.sub(r"[^\w.]+", "-", "-".join(words))


def parse_contestants(text: str) -> list[Contestant]:
    """Names separated by commas, each with settings after a colon if need be.

    >>> [c.label for c in parse_contestants("hard, lsr:epsilon=.3,prior=true, ccl:widths=[16,8]")]
    ['hard', 'lsr (epsilon=0.3, prior=True)', 'ccl (widths=(16, 8))']
    """
    words = [word.strip() for word in re.split(r",(?![^\[]*\])", text) if word.strip()]
    given: list[tuple[str, list[str]]] = []
    for word in words:
        method, colon, first = word.partition(":")
        if colon or "=" not in word:
            given.append((method.strip(), [first] if colon else []))
        elif given:  # another setting of the method before
            given[-1][1].append(word)
        else:
            raise InputError(f"methods begin with the name of one, such as lsr:epsilon=0.3; got '{text}'.")
    made = []
    for method, assignments in given:
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        settings = make_settings({"method_settings": parse_overrides(assignments)}).method_settings
        made.append(Contestant(method, settings))
    labels = [contestant.label for contestant in made]
    if doubled := sorted({label for label in labels if labels.count(label) > 1}):
        raise InputError(f"given more than once: {', '.join(doubled)}.")
    return made


def all_that_fit(table: ImageTable) -> tuple[list[Contestant], list[str]]:
    """Every method that makes sense on the data, and why others with the same kind of labels do not, in words."""
    fitting, reasons = [], []
    seen: dict[tuple[object, str], str] = {}
    for name in methods_for(table.multilabel):
        factory = METHODS[name]
        what = (factory.func if isinstance(factory, partial) else factory, repr(sorted(method_settings(name).items())))
        if name in NEED_ORDER:
            reasons.append(f"{name}: for classes that have an order; name it in --methods if these have")
        elif what in seen:
            reasons.append(f"{name}: the same as {seen[what]}")
        else:
            seen[what] = name
            fitting.append(Contestant(name))
    return fitting, reasons


def check_contestants(contestants: Sequence[Contestant], table: ImageTable) -> None:
    """Build every method once as it will be, so that what cannot be is told before anything runs, all at once."""
    classes = Classes(table.num_classes, 8, tuple(table.class_counts().tolist()))
    problems = []
    for contestant in contestants:
        try:
            check_method_fits(contestant.method, table.multilabel)
            build_method(contestant.method, classes, contestant.settings)
        except InputError as error:
            problems.append(f"\n  - {contestant.label}: {error}")
    if problems:
        raise InputError(f"these methods cannot take part:{''.join(problems)}")
