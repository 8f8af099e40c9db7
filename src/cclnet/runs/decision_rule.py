"""The decision rule: which class is chosen from calibrated probabilities, by accuracy, balanced accuracy or costs.

The balanced rule divides by the class frequencies π that the probabilities of the model contain. Where the training
weighted or drew the classes equally there are none left, and it is the rule for accuracy; where it adjusted the logits
by τ log π, it divides by π^(1 − τ). Calibration with class offsets puts the class frequencies of the images that it was
fitted on into the probabilities, whatever the training: the rule then divides by these.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cclnet.errors import InputError, unknown
from cclnet.schema import rule
from cclnet.settings import read_settings

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
RULES = ("accuracy", "balanced", "costs")
BALANCING = ("class_weights", "balanced_sampling")  # settings by which a model is trained on equal class frequencies


@dataclass(frozen=True)
class DecisionRule:
    """How a class is chosen from calibrated probabilities p.

    - accuracy: the largest ``p_k``.
    - balanced: the largest ``p_k w_k``, the weights w being inverse to the class frequencies in p.
    - costs: the smallest expected cost ``Σ_k p_k c_kj`` over j.

    Weights and costs are kept also where another rule is chosen.
    """

    name: str = field(default="accuracy", metadata=rule(choices=RULES))
    weights: tuple[float, ...] | None = field(default=None, metadata=rule(above=0))  # [K]; None: frequencies unknown
    costs: tuple[tuple[float, ...], ...] | None = field(default=None, metadata=rule(low=0))  # [K, K], row: true class

    def check(self, classes: int) -> None:
        """Refuse a rule without the numbers that it needs, or with those of other classes."""
        sizes = {"weights": [len(self.weights or ())], "costs": [len(self.costs or ()), *map(len, self.costs or ())]}
        wrong = [name for name, found in sizes.items() if getattr(self, name) is not None and set(found) != {classes}]
        needed = {"balanced": "weights", "costs": "costs"}.get(self.name)
        if needed is not None and getattr(self, needed) is None:
            wrong.append(needed)
        if wrong:
            raise InputError(f"decision '{self.name}': {' and '.join(wrong)} must be given for {classes} classes")


def decide(probabilities: Floats, chosen: DecisionRule) -> Indices:
    """The index of the chosen class of each image, [N] from [N, K]; the first of a tie.

    >>> p = np.array([[0.2, 0.8], [0.05, 0.95]])
    >>> decide(p, DecisionRule()), decide(p, DecisionRule("costs", costs=((0.0, 10.0), (1.0, 0.0))))
    (array([1, 1]), array([0, 1]))
    """
    if chosen.name == "costs":
        return (probabilities @ np.asarray(chosen.costs)).argmin(axis=1)
    return (probabilities * np.asarray(chosen.weights) if chosen.name == "balanced" else probabilities).argmax(axis=1)


def keeps_frequencies(settings: Mapping[str, Any]) -> bool:
    """Whether the probabilities of a model contain the class frequencies of its training, as ``settings`` say.

    >>> keeps_frequencies({}), keeps_frequencies({"class_weights": True}), keeps_frequencies({"logit_adjustment": 1.0})
    (True, False, False)
    """
    return not any(settings.get(name) for name in (*BALANCING, "logit_adjustment"))


def balancing_weights(class_counts: Sequence[int] | None, settings: Mapping[str, Any]) -> tuple[float, ...] | None:
    """The weights of the balanced rule, [K]; None where the counts are unknown. ``settings`` are those of the training.

    A class without a training image counts as if it had one.

    >>> balancing_weights((30, 10), {}), balancing_weights((30, 10), {"class_weights": True})
    ((0.6666666666666666, 2.0), (1.0, 1.0))
    """
    if class_counts is None:
        return None
    counts = np.maximum(class_counts, 1)
    equal = any(settings.get(name) for name in BALANCING)
    exponent = 0.0 if equal else 1.0 - float(settings.get("logit_adjustment", 0.0))
    return tuple(((counts.sum() / (len(counts) * counts)) ** exponent).tolist())


def make_rule(
    classes: Sequence[str], multilabel: bool, known: DecisionRule, decision: str | None = None, cost: str | None = None
) -> DecisionRule:
    """The rule that a user asked for. ``known`` has the rule, weights and costs that hold where nothing is asked.

    ``cost`` is read by :func:`read_costs`; given alone it chooses the rule "costs".
    """
    costs = tuple(map(tuple, read_costs(cost, classes).tolist())) if cost else known.costs
    name = decision or ("costs" if cost else known.name)
    if multilabel:
        if name != "accuracy" or cost:
            raise InputError("decision rules choose one class per image; with several labels each is its own decision.")
        return DecisionRule()
    if name == "costs" and costs is None:
        raise InputError("decision 'costs' needs costs: give them by cost, such as MEL:NV=10 (true:predicted).")
    if name == "balanced" and known.weights is None:
        raise InputError("decision 'balanced' needs the class counts of the training, which are not known here.")
    made = replace(known, name=name, costs=costs)
    made.check(len(classes))
    return made


def read_costs(given: str, classes: Sequence[str]) -> Floats:
    """The cost matrix [K, K], row: true class, column: chosen class. Errors that are not named cost 1.

    ``given`` is the path of a file, or entries "true:chosen=cost" separated by commas; "a|b:c|d=10" names four.
    A .csv file is a table with the chosen classes in its header and the true class in the first column. A .toml file
    has a table for each true class, with the costs of the chosen ones.

    >>> read_costs("mel:nevus=10", ("mel", "nevus", "bcc")).tolist()
    [[0.0, 10.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    """
    suffix = Path(given).suffix.lower()
    if suffix == ".csv":
        entries = _costs_of_csv(Path(given))
    elif suffix == ".toml":
        tables = read_settings(given)
        if odd := [name for name, own in tables.items() if not isinstance(own, Mapping)]:
            raise InputError(f"{given}: expected a table of costs for each true class, got a value for {odd[0]}.")
        entries = [(true, chosen, cost) for true, own in tables.items() for chosen, cost in own.items()]
    else:
        entries = [entry for text in given.split(",") for entry in _costs_of_text(text.strip(), classes)]
    matrix = 1.0 - np.eye(len(classes))
    index = {name: k for k, name in enumerate(classes)}
    for true, chosen, cost in entries:
        for name in (true, chosen):
            if name not in index:
                raise unknown("class in the costs", name, list(classes))
        try:
            value = float(cost)
        except (TypeError, ValueError):
            value = np.nan
        if not 0 <= value < np.inf:
            raise InputError(f"the cost of {true}:{chosen} must be a number of at least 0, got {cost!r}.")
        matrix[index[true], index[chosen]] = value
    return matrix


def _costs_of_csv(path: Path) -> list[tuple[str, str, Any]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header, *rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error, ValueError) as error:
        raise InputError(f"{path} cannot be read as a table of costs: {error}.") from error
    if wrong := [row[0] for row in rows if len(row) != len(header)]:
        raise InputError(f"{path}: row {wrong[0]} must have {len(header)} cells, as the header has.")
    return [(row[0], name, cell) for row in rows for name, cell in zip(header[1:], row[1:], strict=True)]


def _costs_of_text(text: str, classes: Sequence[str]) -> list[tuple[str, str, Any]]:
    def names(side: str) -> list[str]:
        return [side] if side in classes else side.split("|")

    pair, equals, cost = text.rpartition("=")
    # A class name may have a colon or a bar of its own: known names come first.
    cuts = [cut for cut, sign in enumerate(pair) if sign == ":"]
    best = next((cut for cut in cuts if set(names(pair[:cut])) <= set(classes)), cuts[0] if cuts else None)
    if not equals or best is None:
        raise InputError(
            f"costs are given as true:predicted=cost, such as MEL:NV=10, or as a .csv or .toml file; got '{text}'."
        )
    return [(true, chosen, cost) for true in names(pair[:best]) for chosen in names(pair[best + 1 :])]
