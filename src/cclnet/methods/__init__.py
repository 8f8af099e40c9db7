"""The methods by name, and the functions that build, check and describe them."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cclnet.errors import InputError, unknown
from cclnet.methods.base import Classes, Loss, Method, rename_settings
from cclnet.methods.ccl import CCL
from cclnet.methods.ccl_balanced import CCLBalanced
from cclnet.methods.ccl_centroid import CCLCentroid
from cclnet.methods.ccl_confusion import CCLConfusion
from cclnet.methods.ccl_forward import CCLForward
from cclnet.methods.ccl_multilabel import CCLMultilabel
from cclnet.methods.confidence_penalty import ConfidencePenalty
from cclnet.methods.focal import Focal
from cclnet.methods.hard import BinaryCrossEntropy, Hard
from cclnet.methods.label_relaxation import LabelRelaxation
from cclnet.methods.lsr import LSR
from cclnet.methods.margin_smoothing import MarginSmoothing
from cclnet.methods.maxsup import MaxSup
from cclnet.methods.online_smoothing import OnlineSmoothing
from cclnet.methods.ordinal import Ordinal
from cclnet.methods.teacher_free import TeacherFree
from cclnet.schema import short

__all__ = [
    "METHODS", "Classes", "Loss", "Method", "build_method", "check_method_fits", "check_method_settings", "method_card",
    "method_class", "method_settings", "methods_for", "register_method", "rename_settings", "when_to_use",
]  # fmt: skip

METHODS: dict[str, Callable[..., Method]] = {
    "ccl": CCL,
    "ccl-balanced": CCLBalanced,
    "ccl-centroid": CCLCentroid,
    "ccl-confusion": CCLConfusion,
    "ccl-forward": CCLForward,
    "hard": Hard,
    "lsr": LSR,
    # The four label smoothing rows of Table 1 of the paper; 0.5228 is the collapse point of CCL with seven classes.
    "lsr-u1": partial(LSR, epsilon=0.1, prior=False),
    "lsr-u5": partial(LSR, epsilon=0.5228, prior=False),
    "lsr-a1": partial(LSR, epsilon=0.1, prior=True),
    "lsr-a5": partial(LSR, epsilon=0.5228, prior=True),
    # Methods of other papers, with the defaults of these papers.
    "ols": OnlineSmoothing,
    "tf-kd": TeacherFree,
    "mbls": MarginSmoothing,
    "maxsup": MaxSup,
    "label-relaxation": LabelRelaxation,
    "confidence-penalty": ConfidencePenalty,
    "focal": Focal,
    "ordinal": Ordinal,
    # Multi-label: hard labels and CCL.
    "bce": BinaryCrossEntropy,
    "ccl-multilabel": CCLMultilabel,
}


def register_method(name: str, method: Callable[..., Method]) -> None:
    """Add a ``Method`` subclass, or a ``partial`` of one, to ``METHODS``, for all commands and functions to use.

    Register at the top level of a module: comparisons train in new processes, which import the main module again.
    """
    kind = _class_of(method)
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise InputError(f"method '{name}' must be a subclass of cclnet.Method, or a partial of one, got {method!r}.")
    if name in METHODS and method_class(name).__module__ != kind.__module__:
        raise InputError(f"there is already a method '{name}': register yours under another name.")
    METHODS[name] = method


def _class_of(factory: Callable[..., Method]) -> Any:
    return factory.func if isinstance(factory, partial) else factory


def method_class(name: str) -> type[Method]:
    """The class of a method."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    kind: type[Method] = _class_of(METHODS[name])
    return kind


def methods_for(multilabel: bool) -> list[str]:
    """Names of the multi-label methods, or of the single-label ones.

    >>> methods_for(multilabel=True)
    ['bce', 'ccl-multilabel']
    """
    return [name for name in METHODS if method_class(name).multilabel == multilabel]


def check_method_fits(name: str, multilabel: bool, classes_balanced: bool = False) -> None:
    """Raise an InputError when a method does not fit the labels of the data, or class_weights or balanced_sampling."""
    kind = method_class(name)
    if multilabel and not kind.multilabel:
        raise InputError(
            f"method '{name}' is for one label per image, but images of this data set may have several, or none. "
            "Use 'ccl-multilabel' (soft labels) or 'bce' (hard labels)."
        )
    if kind.multilabel and not multilabel:
        raise InputError(
            f"method '{name}' is multi-label, but images of this data set have one label each. Use "
            f"'{kind.single_label_counterpart}', or another single-label method: {', '.join(methods_for(False))}."
        )
    if kind.balances_classes and classes_balanced:
        raise InputError(
            f"method '{name}' already balances the classes; class_weights or balanced_sampling would balance them "
            "twice. Turn these settings off, or use 'ccl' with one of them."
        )


def method_settings(name: str) -> dict[str, Any]:
    """The settings of a method with their defaults.

    >>> method_settings("lsr-a1")
    {'epsilon': 0.1, 'prior': True}
    """
    method_class(name)  # an unknown name is an error
    return {key: p.default for key, p in inspect.signature(METHODS[name]).parameters.items() if key != "classes"}


def check_method_settings(name: str, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings under their current names; an unknown method or setting, or one of the wrong type, is an error."""
    known = method_settings(name)
    chosen = rename_settings(settings or {})
    for key, value in chosen.items():
        if not known:
            raise InputError(f"method '{name}' has no settings, got '{key}'.")
        if key not in known:
            raise unknown(f"setting of method '{name}'", key, known)
        _check_type(name, key, value, known[key])
    return chosen


def build_method(name: str, classes: Classes, settings: Mapping[str, Any] | None = None) -> Method:
    """Build a method by name; ``settings`` override its defaults."""
    chosen = check_method_settings(name, settings)  # first: it also refuses an unknown name
    return METHODS[name](classes, **chosen)


LARGEST = 1e18  # a number that float32 and int64 hold


def _check_type(method: str, key: str, value: Any, default: Any) -> None:
    """Raise an InputError unless a setting has the type of its default. A default of None allows any type."""
    if default is None or (value is None and type(default) is int):  # None turns a count such as patience off
        return
    number = (int, float)
    wanted = bool if isinstance(default, bool) else number if isinstance(default, number) else type(default)
    words = {bool: "true or false", number: "a number", tuple: "a list", str: "a string"}.get(wanted, str(wanted))
    fits = isinstance(value, (list, tuple) if wanted is tuple else wanted)
    fits = fits and (wanted is bool or not isinstance(value, bool))
    if fits and wanted is tuple and default and isinstance(default[0], int):
        words, fits = "a list of integers", all(type(item) is int for item in value)
    items = value if wanted is tuple else [value]
    if fits and any(isinstance(item, number) and LARGEST < abs(item) < math.inf for item in items):
        words, fits = f"at most {LARGEST:g} in size", False
    if not fits:
        raise InputError(f"setting {key} of method '{method}' must be {words}, got {short(value)}.")


def method_card(name: str) -> str:
    """The card of a method in Markdown: idea, formula, settings, when not to use it."""
    kind = method_class(name)
    if kind.card and not kind.card.endswith(".md"):
        return kind.card
    if module := getattr(sys.modules[kind.__module__], "__file__", None):  # a notebook has no file
        file = Path(module).with_name(kind.card) if kind.card else Path(module).with_suffix(".md")
        if file.exists():
            return file.read_text(encoding="utf-8")
    return f"# {name}\n\n{inspect.getdoc(kind)}\n"


def when_to_use() -> str:
    """Which method for which data, as a Markdown table; docs/methods.md shows the same."""
    return Path(__file__).with_name("when_to_use.md").read_text(encoding="utf-8")
