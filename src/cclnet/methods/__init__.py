"""Label-softening methods behind one protocol, and the plain dict of their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files
from typing import Any

from cclnet.errors import InputError, unknown
from cclnet.methods.base import Classes, Loss, Method
from cclnet.methods.ccl import CCL
from cclnet.methods.ccl_balanced import CCLBalanced
from cclnet.methods.ccl_centroid import CCLCentroid
from cclnet.methods.ccl_confusion import CCLConfusion
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

__all__ = [
    "METHODS",
    "Classes",
    "Loss",
    "Method",
    "build_method",
    "check_method_fits",
    "method_card",
    "method_settings",
    "methods_for",
]

METHODS: dict[str, Callable[..., Method]] = {
    "ccl": CCL,
    "ccl-balanced": CCLBalanced,
    "ccl-centroid": CCLCentroid,
    "ccl-confusion": CCLConfusion,
    "hard": Hard,
    "lsr": LSR,
    # The four rows of the paper's Table 1; .5228 is where CCL on seven classes collapses to.
    "lsr-u1": partial(LSR, epsilon=0.1, prior=False),
    "lsr-u5": partial(LSR, epsilon=0.5228, prior=False),
    "lsr-a1": partial(LSR, epsilon=0.1, prior=True),
    "lsr-a5": partial(LSR, epsilon=0.5228, prior=True),
    # The rivals, with their papers' defaults.
    "ols": OnlineSmoothing,
    "tf-kd": TeacherFree,
    "mbls": MarginSmoothing,
    "maxsup": MaxSup,
    "label-relaxation": LabelRelaxation,
    "confidence-penalty": ConfidencePenalty,
    "focal": Focal,
    "ordinal": Ordinal,
    # For several labels an image: its own hard labels, and CCL.
    "bce": BinaryCrossEntropy,
    "ccl-multilabel": CCLMultilabel,
}
MULTILABEL = ("bce", "ccl-multilabel")


def methods_for(multilabel: bool) -> list[str]:
    """The methods for images with several labels each, or with one.

    >>> methods_for(multilabel=True)
    ['bce', 'ccl-multilabel']
    """
    return [name for name in METHODS if (name in MULTILABEL) == multilabel]


def check_method_fits(name: str, multilabel: bool) -> None:
    """Refuse a method for one label an image where images have several, and the other way round."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    if multilabel and name not in MULTILABEL:
        raise InputError(
            f"method '{name}' spreads one label over the classes, but these images may have several labels each, or "
            "none. Use 'ccl-multilabel' (soft labels) or 'bce' (hard ones)."
        )
    if name in MULTILABEL and not multilabel:
        instead = {"bce": "hard", "ccl-multilabel": "ccl-centroid"}[name]
        raise InputError(
            f"method '{name}' takes a decision for each class on its own, but these images have one label each. Use "
            f"'{instead}', its counterpart for one label, or any other for one: {', '.join(methods_for(False))}."
        )


def method_settings(name: str) -> dict[str, Any]:
    """The settings of a method with their defaults.

    >>> method_settings("lsr-a1")
    {'epsilon': 0.1, 'prior': True}
    """
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    parameters = inspect.signature(METHODS[name]).parameters
    return {key: p.default for key, p in parameters.items() if key != "classes"}


def build_method(name: str, classes: Classes, settings: Mapping[str, Any] | None = None) -> Method:
    """Build a method by name; ``settings`` override its defaults."""
    known = method_settings(name)
    for key in settings or {}:
        if key not in known:
            if not known:
                raise InputError(f"method '{name}' has no settings, got '{key}'.")
            raise unknown(f"setting of method '{name}'", key, known)
    for key, value in (settings or {}).items():
        _check_kind(name, key, value, known[key])
    return METHODS[name](classes, **(settings or {}))


def _check_kind(method: str, key: str, value: Any, default: Any) -> None:
    """Refuse words for numbers and the like: of which kind a setting is, its default says."""
    if default is None:
        return  # nothing is said
    number = (int, float)
    wanted = bool if isinstance(default, bool) else number if isinstance(default, number) else type(default)
    if wanted is number and value is None and not isinstance(default, float):
        return  # a count of which there may be none, such as patience
    kinds = (list, tuple) if wanted is tuple else wanted
    if not isinstance(value, kinds) or (wanted is number and isinstance(value, bool)):
        words = {bool: "true or false", number: "a number", tuple: "a list", str: "a word"}[wanted]
        raise InputError(f"setting {key} of method '{method}' must be {words}, got {value!r}.")
    whole = wanted is tuple and default and isinstance(default[0], int)
    if whole and isinstance(value, (list, tuple)) and not all(type(item) is int for item in value):
        raise InputError(f"setting {key} of method '{method}' must be a list of whole numbers, got {list(value)!r}.")


def method_card(name: str) -> str:
    """The card of a method: idea, formula, settings, when not to use it. Markdown."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    factory = METHODS[name]
    kind = factory.func if isinstance(factory, partial) else factory
    return files(__name__).joinpath(f"{kind.__module__.rpartition('.')[2]}.md").read_text(encoding="utf-8")
