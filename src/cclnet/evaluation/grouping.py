"""Which runs are seeds of one method, and all runs in one order of images: what a comparison starts from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cclnet.errors import InputError
from cclnet.evaluation.runs import Run, open_run
from cclnet.predictions import Predictions

OF_THE_METHOD = ("method", "method_settings", "backbone", "lr_ccl")


@dataclass(frozen=True)
class Group:
    """The runs of one method, in the order of their seeds where these are known."""

    name: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> tuple[int | None, ...]:
        return tuple(run.seed for run in self.runs)

    def paired_with(self, other: Group) -> bool:
        """Whether both have the same seeds, each once."""
        known = None not in self.seeds and len(set(self.seeds)) == len(self.seeds)
        return known and self.seeds == other.seeds


def open_groups(runs: Sequence[str | Path] | Mapping[str, Sequence[str | Path]]) -> tuple[list[Group], list[str]]:
    """Open runs and group them: as named in a dict, else by method, its settings and backbone in model.json; a run
    without a model.json stands alone. Also what to beware of."""
    if isinstance(runs, Mapping):
        opened = {name: [open_run(path) for path in paths] for name, paths in runs.items()}
        if empty := [name for name, members in opened.items() if not members]:
            raise InputError(f"no run of {', '.join(empty)}: give every method at least one run.")
        names = _unique_names([run for members in opened.values() for run in members])
        groups = [_group(name, [names[id(run)] for run in members]) for name, members in opened.items()]
        warnings: list[str] = []
    else:
        found = [open_run(path) for path in runs]
        names = _unique_names(found)
        groups, warnings = _by_model(list(names.values()))
    if not groups:
        raise InputError("nothing to compare: give run folders or predictions.csv files.")
    warnings += [words for group in groups for words in _setting_warnings(group)]
    return groups, warnings + _differences_beside_the_method(groups)


def _unique_names(runs: list[Run]) -> dict[int, Run]:
    """Runs by identity, those of equal name under their path instead; a path given twice is refused."""
    paths = Counter(run.path.resolve() for run in runs)
    if doubled := [str(path) for path, count in paths.items() if count > 1]:
        raise InputError(f"given more than once: {', '.join(doubled)}. A run can stand for one seed only.")
    names = Counter(run.name for run in runs)
    return {id(run): run if names[run.name] == 1 else replace(run, name=str(run.path)) for run in runs}


def _group(name: str, runs: Sequence[Run]) -> Group:
    known = all(run.seed is not None for run in runs)
    return Group(name, tuple(sorted(runs, key=lambda run: run.seed or 0) if known else runs))


def _by_model(runs: list[Run]) -> tuple[list[Group], list[str]]:
    alike: dict[str, list[Run]] = {}
    for run in runs:
        model = run.model or {}
        kind = [model.get("method"), model.get("method_settings"), model.get("backbone")]
        key = json.dumps(kind, sort_keys=True) if "method" in model else f"alone: {run.name}"
        alike.setdefault(key, []).append(run)
    groups: list[Group] = []
    warnings = []
    several_backbones = len({run.model.get("backbone") for run in runs if run.model}) > 1
    shared = Counter(_name(members[0], several_backbones) for members in alike.values())
    for members in alike.values():
        repeated = [str(seed) for seed, count in Counter(run.seed for run in members).items() if count > 1]
        if repeated:  # the same seed twice is no repetition: something else was changed
            warnings.append(
                f"{', '.join(run.name for run in members)} are of one method and backbone but repeat seed "
                f"{', '.join(repeated)}: each stands for itself. If some are seeds of one method all the same, "
                "give these alone, each seed once, or name the groups in Python: "
                "cclnet.evaluation.compare.compare({name: [run, ...], ...})."
            )
            groups += [_group(run.name, [run]) for run in members]
        else:
            name = _name(members[0], several_backbones)
            if shared[name] > 1:
                name = _name(members[0], several_backbones, with_settings=True)
            groups.append(_group(name, members))
    return groups, warnings


def _name(run: Run, with_backbone: bool, with_settings: bool = False) -> str:
    """Its method, and of what else tells it from the others as much as is needed."""
    if not run.model or "method" not in run.model:
        return run.name
    settings = ", ".join(f"{name}={value}" for name, value in (run.model.get("method_settings") or {}).items())
    name = f"{run.model['method']} ({settings or 'defaults'})" if with_settings else run.model["method"]
    return f"{name}, {run.model.get('backbone', 'unknown backbone')}" if with_backbone else name


def _setting_warnings(group: Group) -> list[str]:
    """Runs counted as seeds of one method that were not trained alike."""
    settings = [run.settings() for run in group.runs]
    known = [s for s in settings if s]
    names = {name for s in known for name in s}
    differing = sorted(name for name in names if len({json.dumps(s.get(name), default=str) for s in known}) > 1)
    if not differing:
        return []
    return [f"The runs of {group.name} are counted as seeds of one method but differ in {', '.join(differing)}."]


def _differences_beside_the_method(groups: Sequence[Group]) -> list[str]:
    """Settings, other than those of the method and the backbone, in which methods were trained differently."""
    known = {group.name: settings for group in groups if (settings := group.runs[0].settings())}
    names = set.intersection(*map(set, known.values())) if known else set()
    shown = []
    for name in sorted(name for name in names if name.partition(".")[0] not in OF_THE_METHOD):
        values = {group: settings[name] for group, settings in known.items()}
        if len({json.dumps(value, default=str) for value in values.values()}) > 1:
            shown.append(f"{name} ({', '.join(f'{group}: {value}' for group, value in values.items())})")
    if not shown:
        return []
    return [f"Not only the methods differ, so a difference may not be theirs: {'; '.join(shown)}."]


def line_up(runs: Sequence[Run]) -> list[Predictions]:
    """The reported predictions of every run, images and classes in the order of the first. Runs that are not about
    the same images, labels, classes and groups are refused, all in one error."""
    first = runs[0].predictions.of_part(runs[0].part)
    order = np.argsort(first.images)
    lined, problems = [], []
    for run in runs:
        own = run.predictions.of_part(run.part)
        found = _differences(first, own, runs[0].name)
        if found:
            problems.append(f"{run.name} ({run.part}, {len(own):,} images): {'; '.join(found)}.")
            continue
        place = np.empty(len(own), np.intp)
        place[order] = np.argsort(own.images)
        lined.append(_in_class_order(own.select(place), first.classes))
    if not problems:
        labels = [(run, int((p.labels != first.labels).reshape(len(p), -1).any(axis=1).sum()))
                  for run, p in zip(runs, lined, strict=True)]  # fmt: skip
        problems = [f"{run.name}: other labels than {runs[0].name} for {n:,} images." for run, n in labels if n]
        problems += _group_problems(runs, lined)
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise InputError(
            f"these runs cannot be compared, they are not about the same thing:{listed}\n"
            "Train them on one split (the split.csv of one run serves for all)."
        )
    groups = next((p.groups for p in lined if p.groups is not None), None)
    return [replace(p, groups=groups) for p in lined]


def _differences(first: Predictions, own: Predictions, name: str) -> list[str]:
    found = []
    if own.multilabel != first.multilabel:
        kinds = {True: "several labels", False: "one label"}
        found.append(f"{kinds[own.multilabel]} an image, where {name} has {kinds[first.multilabel]}")
    for words, ours, theirs in (("class", own.classes, first.classes), ("image", own.images, first.images)):
        extra, missing = np.setdiff1d(ours, theirs), np.setdiff1d(theirs, ours)
        if len(extra):
            found.append(f"{_some(extra, words)} that {name} does not have")
        if len(missing):
            found.append(f"without {_some(missing, words)} of {name}")
    return found


def _some(names: np.typing.NDArray[np.str_], what: str) -> str:
    plural = {"class": "classes", "image": "images"}[what]
    shown = ", ".join(names[:3].tolist()) + (", ..." if len(names) > 3 else "")
    return f"{len(names):,} {what if len(names) == 1 else plural} ({shown})"


def _in_class_order(predictions: Predictions, classes: tuple[str, ...]) -> Predictions:
    order = np.array([predictions.classes.index(name) for name in classes])
    labels = predictions.labels[:, order] if predictions.multilabel else np.argsort(order)[predictions.labels]
    return replace(predictions, labels=labels, probabilities=predictions.probabilities[:, order], classes=classes)


def _group_problems(runs: Sequence[Run], lined: Sequence[Predictions]) -> list[str]:
    known = [(run, p.groups) for run, p in zip(runs, lined, strict=True) if p.groups is not None]
    problems = []
    for run, groups in known[1:]:
        differing = int((groups != known[0][1]).sum())
        if differing:
            problems.append(f"{run.name}: other groups than {known[0][0].name} for {differing:,} images.")
    return problems
