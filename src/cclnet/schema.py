"""Frozen dataclasses from plain values (JSON, TOML) and back, driven by type hints and by the :class:`Rule` of a field.

Settings, scores.json, comparison.json, model.json, calibration.json and kept results are all read by ``from_plain``.
Files may come from anywhere, so every value is checked: its type (no conversion between text, numbers and flags), its
range, its length. Numbers must be finite. It is written by hand because cclnet must work without pydantic.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from os import PathLike
from typing import Any, TypeVar, Union

from cclnet.errors import InputError, unknown

T = TypeVar("T")
TOO_LARGE = 2**63  # whole numbers that no array holds
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


@dataclass(frozen=True)
class Rule:
    """What a field means and which values it takes."""

    help: str = ""  # shown by --help and in the documentation
    low: float | None = None  # inclusive bounds, of each number if there are several
    high: float | None = None
    above: float | None = None  # exclusive bounds
    below: float | None = None
    choices: tuple[str, ...] = ()  # the only values allowed
    length: int | None = None  # of a list
    ascending: bool = False  # numbers must not decrease
    max_text: int | None = None  # characters, of each text if there are several
    key: str = ""  # name in the file, if it is not that of the field
    old_name: str = ""  # a previous name, still accepted
    inline: bool = False  # a dict whose entries stand beside the other fields
    convert: bool = False  # for the command line: numbers and paths become text, "none" becomes None
    synonyms: tuple[str, ...] = ()  # names other tools use, which an error translates

    @property
    def bounds(self) -> str:
        """The bounds in words, empty without any.

        >>> Rule(low=0, below=1).bounds
        'at least 0 and below 1'
        """
        named = {"at least": self.low, "above": self.above, "at most": self.high, "below": self.below}
        return " and ".join(f"{words} {bound:g}" for words, bound in named.items() if bound is not None)

    def expected(self, noun: str = "") -> str:
        """
        >>> Rule(above=0, high=1, length=2, ascending=True).expected()
        '2 numbers, in ascending order, above 0 and at most 1'
        """
        if self.length or self.ascending:
            noun = f"{self.length} numbers" if self.length else "numbers"
        text = "" if self.max_text is None else f"at most {self.max_text:,} characters"
        return ", ".join(filter(None, (noun, "in ascending order" if self.ascending else "", self.bounds, text)))

    def allows(self, value: Any) -> bool:
        """Whether a single number or text is finite, within bounds and not too long."""
        if isinstance(value, str):
            return is_utf8(value) and (self.max_text is None or len(value) <= self.max_text)
        return type(value) not in (int, float) or (
            _is_finite(value)
            and (type(value) is float or abs(value) < TOO_LARGE)
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


def rule(help: str = "", **values: Any) -> dict[str, Rule]:
    """The metadata of a dataclass field with a :class:`Rule`."""
    return {"rule": Rule(help, **values)}


def rules(kind: Any) -> dict[str, Rule]:
    """The rule of each field of a dataclass or object, by name."""
    return {field.name: field.metadata.get("rule", _NO_RULE) for field in dataclasses.fields(kind)}


_NO_RULE = Rule()
_hints = functools.cache(typing.get_type_hints)


def from_plain(kind: type[T], content: object, where: str = "") -> T:
    """A dataclass from nested plain values; all problems are reported in one error.

    Unknown keys are ignored, or go to the ``inline`` field. A missing key is an error unless the field has a default.
    ``where`` precedes the names in errors.

    >>> from_plain(Rule, {"length": 2, "ascending": 1})
    Traceback (most recent call last):
    cclnet.errors.InputError: ascending must be true or false, got 1
    """
    if not isinstance(content, Mapping):
        raise InputError(
            f"{where.rstrip(' .') or 'the content'} must be a table of keys and values, got {short(content)}"
        )
    hints, known, values, problems = _hints(typing.cast(Any, kind)), rules(kind), {}, []
    keys = {name: (own.key or name, own.old_name) for name, own in known.items() if not own.inline}
    for field in dataclasses.fields(typing.cast(Any, kind)):
        own = known[field.name]
        try:
            if own.inline:
                taken = {key for pair in keys.values() for key in pair}
                rest = {key: value for key, value in content.items() if key not in taken}
                values[field.name] = _fit(hints[field.name], rest, where.rstrip("."), own)
                continue
            key, old = keys[field.name]
            given = [name for name in (key, old) if name in content]
            if len(given) > 1:
                raise InputError(f"{old} is the old name of {where}{key}: give {key} alone")
            if given and not _is_default(field, content[given[0]]):
                values[field.name] = _fit(hints[field.name], content[given[0]], f"{where}{key}", own)
            elif not given and field.default is MISSING and field.default_factory is MISSING:
                raise InputError(f"{where}{key} must be {_expected(hints[field.name], own)}, got nothing")
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError("; ".join(problems))
    return kind(**values)


def check(instance: Any, where: str = "") -> None:
    """Check the values of an object that was not made by ``from_plain``; lists become tuples. Defaults are right."""
    problems, hints, known = [], _hints(typing.cast(Any, type(instance))), rules(instance)
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if _is_default(field, value):
            continue
        try:
            fitted = _fit(hints[field.name], value, f"{where}{field.name}", known[field.name])
            object.__setattr__(instance, field.name, fitted)
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError("; ".join(problems))


def to_plain(value: Any) -> Any:
    """Dataclasses as dicts under their keys, tuples as lists; what ``from_plain`` reads."""
    if dataclasses.is_dataclass(value):
        content: dict[str, Any] = {}
        for name, own in rules(value).items():
            item = to_plain(getattr(value, name))
            content |= item if own.inline else {own.key or name: item}
        return content
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _fit(hint: Any, value: Any, where: str, own: Rule) -> Any:
    """``value`` as the type of its field: tables as dataclasses, lists as tuples, whole numbers as floats."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        value = tuple(value) if own.convert and isinstance(value, list) else value
        return None if own.convert and value == "none" else value
    if origin in (Union, types.UnionType):
        return _fit_any(arguments, value, where, own)
    if origin in (dict, collections.abc.Mapping) and isinstance(value, Mapping):
        return {key: _fit(arguments[1], item, f"{where}.{key}", own) for key, item in value.items()}
    if origin in (tuple, list) and isinstance(value, (list, tuple)):
        fixed = own.length or (len(arguments) if origin is tuple and arguments[-1] is not ... else None)
        inner = dataclasses.replace(own, length=None, ascending=False) if own.length or own.ascending else own
        items = [_fit(arguments[0], item, f"{where}[{i}]", inner) for i, item in enumerate(value)]
        if fixed in (None, len(items)) and not (own.ascending and items != sorted(items)):
            return items if origin is list else tuple(items)
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_plain(hint, value, f"{where}.")
    elif isinstance(hint, type) and origin is None:
        found = value
        if hint is float and type(value) is int and _is_finite(value):
            found = float(value)
        elif hint is str and own.convert and isinstance(value, (int, float, PathLike)) and type(value) is not bool:
            found = str(value)
        if own.choices and found not in own.choices:
            raise unknown(f"value of {where}", found, own.choices)
        if isinstance(found, hint) and (hint is bool or not isinstance(found, bool)):
            if own.allows(found):
                return found
            huge = type(found) is int and abs(found) >= TOO_LARGE
            odd = isinstance(found, str) and not is_utf8(found)
            expected = "below 2^63" if huge else "UTF-8 text" if odd else own.expected() or "finite"
            raise InputError(f"{where} must be {expected}, got {short(value)}")
        raise InputError(f"{where} must be {_WORDS.get(hint, hint.__name__)}, got {short(value)}")
    raise InputError(f"{where} must be {_expected(hint, own)}, got {short(value)}")


def _fit_any(choices: tuple[Any, ...], value: Any, where: str, own: Rule) -> Any:
    if types.NoneType in choices and (value is None or (own.convert and value == "none")):
        return None
    *first, last = (choice for choice in choices if choice is not types.NoneType)
    for choice in first:
        try:
            return _fit(choice, value, where, own)
        except InputError:  # the last choice reports what does not fit
            continue
    return _fit(last, value, where, own)


def _expected(hint: Any, own: Rule) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _expected(next(choice for choice in reversed(arguments) if choice is not types.NoneType), own)
    if origin in (tuple, list):
        count = "" if origin is list or arguments[-1] is ... else f"{len(arguments)} "
        return own.expected(f"a list of {count}{_PLURALS.get(arguments[0], 'values')}")
    return own.expected(_WORDS[hint]) if hint in _WORDS else "a table of keys and values"


def is_utf8(text: str) -> bool:
    """Whether a text can be written. File names and JSON may contain halves of surrogate pairs, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_finite(value: Any) -> bool:
    """Whether a number is finite as a float; whole numbers in JSON may be larger than any float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    """Whether a value is the default, which no rule applies to: None or an empty list may stand for "not given"."""
    value = tuple(value) if isinstance(value, list) else value
    return type(value) is type(field.default) and bool(value == field.default)


def short(value: object) -> str:
    """The value in at most 61 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of over 4,300 digits
        text = f"{type(value).__name__} of too many digits"
    return text if len(text) <= 60 else f"{text[:60]}…"
