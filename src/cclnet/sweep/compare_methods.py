"""What ``cclnet compare-methods`` does: run every method with every seed, then compare what has finished."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cclnet.data.table import ImageTable
from cclnet.errors import InputError, unknown
from cclnet.evaluation.compare import Comparison, compare
from cclnet.evaluation.metrics import compared_metrics
from cclnet.files import make_folder
from cclnet.methods import METHODS, Classes, build_method, check_method_fits, method_class, method_settings, methods_for
from cclnet.report import write_comparison
from cclnet.report.comparison import comparison_table
from cclnet.report.text import count_text
from cclnet.settings import Settings, in_json, make_settings, parse_overrides
from cclnet.sweep.cells import Job, Work
from cclnet.sweep.local import Log, Outcome, Show, run_jobs
from cclnet.training.setup import open_table

# Who takes part in a comparison of methods: those named, or all that fit the data.


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


def all_that_fit(table: ImageTable, classes_balanced: bool = False) -> tuple[list[Contestant], list[str]]:
    """Every method that makes sense on the data, and why others with the same kind of labels do not, in words."""
    fitting, reasons = [], []
    seen: dict[tuple[object, str], str] = {}
    for name in methods_for(table.multilabel):
        kind = method_class(name)
        what = (kind, repr(sorted(method_settings(name).items())))
        if kind.needs_order:
            reasons.append(f"{name}: for classes that have an order; name it in --methods if these have")
        elif kind.balances_classes and classes_balanced:
            reasons.append(f"{name}: it balances the classes itself; class_weights or balanced_sampling is on")
        elif what in seen:
            reasons.append(f"{name}: the same as {seen[what]}")
        else:
            seen[what] = name
            fitting.append(Contestant(name))
    return fitting, reasons


def check_contestants(contestants: Sequence[Contestant], table: ImageTable, classes_balanced: bool = False) -> None:
    """Build every method once as it will be, so that what cannot be is told before anything runs, all at once."""
    classes = Classes(table.num_classes, 8, tuple(table.class_counts().tolist()))
    problems = []
    for contestant in contestants:
        try:
            check_method_fits(contestant.method, table.multilabel, classes_balanced)
            build_method(contestant.method, classes, contestant.settings)
        except InputError as error:
            problems.append(f"\n  - {contestant.label}: {error}")
    if problems:
        raise InputError(f"these methods cannot take part:{''.join(problems)}")


EVERY_PAIR = "all"


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        settings: what all runs share. Its ``method_settings`` are those of its ``method``, and of no other.
        contestants: the methods; none for all that fit the data.
        seeds: each method is trained with every one. The split has its own, so that all are judged on the same images.
        out: where the runs are kept.
        results: where the comparison goes, and what is kept of each run.
        against: the label of the method that all others are compared with, "all" for every pair, or none for hard
            labels (without these, the first method).
        max_minutes: for all of it; 0 for no limit.
        parallel: runs trained at once.
    """

    settings: Settings
    out: Path
    results: Path
    contestants: tuple[Contestant, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    against: str = ""
    primary: str | None = None
    draws: int = 1000
    max_minutes: float = 0.0
    parallel: int = 1
    accelerator: str = "auto"
    cache_dir: Path | None = None


def compare_methods(request: Request, console: Console | None = None) -> Outcome:
    """Run what has no result yet, and write comparison.html, .md and .json, and scores.md, of all that have one."""
    console = console or Console()
    began = time.time()
    table = open_table(request.settings)
    if request.primary is not None and request.primary not in (known := _metric_names(table)):
        raise unknown("score", request.primary, known)
    contestants = _prepare(request, table, console)
    reference = _reference(request, contestants)
    jobs = jobs_of(request, contestants, table.fingerprint())
    asked = {"methods": list(jobs), "seeds": request.seeds, "parallel": request.parallel}
    log = Log(request.results, began, asked)
    work = Work(
        runs=request.out / "runs",
        results=make_folder(request.results),
        deadline=began + 60 * request.max_minutes if request.max_minutes else float("inf"),
        accelerator=request.accelerator,
        cache_dir=request.cache_dir,
    )
    seed_by_seed = [job for of_seed in zip(*jobs.values(), strict=True) for job in of_seed]
    outcome = run_jobs(seed_by_seed, work, request.parallel, Show(console), on_end=log.write)
    finished = {label: [path for job in own if (path := work.result(job)).exists()] for label, own in jobs.items()}
    _compare({label: paths for label, paths in finished.items() if paths}, reference, request, console)
    console.print(outcome.in_words(log.seconds), highlight=False, markup=False)
    return outcome


def _metric_names(table: ImageTable) -> list[str]:
    return [metric.name for metric in compared_metrics("multi-label" if table.multilabel else "single-label")]


def _prepare(request: Request, table: ImageTable, console: Console) -> Sequence[Contestant]:
    """Choose and check the methods, and decode the images once for all runs."""
    import numpy as np

    from cclnet.data.cache import decode

    balanced = request.settings.class_weights or request.settings.balanced_sampling
    contestants, left_out = (list(request.contestants), []) if request.contestants else all_that_fit(table, balanced)
    if not contestants:
        raise InputError("there is no method for this kind of labels.")
    check_contestants([_with_own_settings(request.settings, c) for c in contestants], table, balanced)
    runs = f"{count_text(len(contestants), 'method')}, {count_text(len(request.seeds), 'seed')} each"
    console.print(f"{runs}, {len(table):,} images of {table.num_classes} classes.", highlight=False)
    for reason in left_out:
        console.print(f"left out: {reason}", highlight=False, markup=False)
    if not isinstance(table.images, np.ndarray):
        decode(table, request.settings.short_side, cache_dir=request.cache_dir, progress=not console.quiet)
    return contestants


def _with_own_settings(settings: Settings, contestant: Contestant) -> Contestant:
    own = settings.method_settings if contestant.method == settings.method else {}
    return replace(contestant, settings={**own, **contestant.settings})


def jobs_of(request: Request, contestants: Sequence[Contestant], images: str = "") -> dict[str, list[Job]]:
    """The runs of each method, by its label, in the order of the seeds. ``images`` is the fingerprint of the data."""
    jobs: dict[str, list[Job]] = {}
    for contestant in contestants:
        chosen = dict(_with_own_settings(request.settings, contestant).settings)
        own = replace(request.settings, method=contestant.method, method_settings=chosen)
        keys = {"method": contestant.method, "method_settings": in_json(contestant.settings)}
        jobs[contestant.label] = [
            Job(contestant.name(seed), replace(own, seed=seed), {**keys, "seed": seed}, images=images)
            for seed in request.seeds
        ]
    return jobs


def _reference(request: Request, contestants: Sequence[Contestant]) -> str | None:
    """The label of the method that the others are compared with; None for every pair."""
    labels = [contestant.label for contestant in contestants]
    if request.against == EVERY_PAIR:
        return None
    if request.against and request.against not in labels:
        raise unknown("method to compare against", request.against, [*labels, EVERY_PAIR])
    return request.against or next((c.label for c in contestants if method_class(c.method).baseline), labels[0])


def _compare(
    finished: Mapping[str, Sequence[Path]], reference: str | None, request: Request, console: Console
) -> Comparison | None:
    """Compare what there is, as it is kept. Nothing is written while the reference has no run."""
    if not finished or (reference is not None and reference not in finished):
        console.print(f"no comparison yet: no run of {reference or 'any method'} has finished.", highlight=False)
        return None
    with console.status(f"comparing {sum(map(len, finished.values()))} runs"):
        comparison = compare(finished, reference, request.primary, request.draws)
    methods = [  # the runs are beside the comparison, wherever the folder is moved
        replace(method, runs=tuple(replace(run, path=Path(run.path).name) for run in method.runs))
        for method in comparison.methods
    ]
    comparison = replace(comparison, methods=tuple(methods))
    page = write_comparison(request.results, comparison)
    console.print(comparison_table(comparison))
    for warning in comparison.warnings:
        console.print(f"note: {warning}", style="yellow", highlight=False, markup=False)
    console.print(f"comparison: {page}", highlight=False, markup=False, soft_wrap=True)
    return comparison
