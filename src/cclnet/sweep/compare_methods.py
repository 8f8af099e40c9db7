"""``cclnet compare-methods``: train every method with every seed, then compare the runs that have finished."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cclnet.data.sources import open_data
from cclnet.data.table import ImageTable
from cclnet.errors import InputError, unknown
from cclnet.evaluation.compare import compare
from cclnet.evaluation.metrics import compared_metrics
from cclnet.files import make_folder
from cclnet.methods import METHODS, Classes, build_method, check_method_fits, method_class, method_settings, methods_for
from cclnet.report import write_comparison
from cclnet.report.comparison import comparison_table
from cclnet.report.text import count_text
from cclnet.runs.predictions import names_in_order
from cclnet.settings import Settings, in_json, make_settings, parse_overrides
from cclnet.sweep.cells import Cell, SweepOptions, SweepSummary
from cclnet.sweep.executors import run_sweep
from cclnet.sweep.prepare import prepare

EVERY_PAIR = "all"


@dataclass(frozen=True)
class Entry:
    """A method in the comparison, with those of its settings that differ from its defaults."""

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """
        >>> Entry("lsr", {"epsilon": 0.3}).label
        'lsr (epsilon=0.3)'
        """
        text = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.method} ({text})" if text else self.method

    def name(self, seed: int) -> str:
        """The name of its cell with a seed, as a file name.

        >>> Entry("ccl", {"widths": (16, 8)}).name(0)
        'ccl-widths-16-8-seed0'
        """
        words = (self.method, *(f"{name}-{value}" for name, value in self.settings.items()), f"seed{seed}")
        return re.sub(r"[^\w.]+", "-", "-".join(words))


def parse_entries(text: str) -> list[Entry]:
    """Methods separated by commas, each with optional settings after a colon.

    >>> [entry.label for entry in parse_entries("hard, lsr:epsilon=.3,prior=true, ccl:widths=[16,8]")]
    ['hard', 'lsr (epsilon=0.3, prior=True)', 'ccl (widths=(16, 8))']
    """
    given: list[tuple[str, list[str]]] = []
    for word in re.split(r",(?![^\[]*\])", text):
        method, colon, first = word.strip().partition(":")
        if colon or (method and "=" not in method):
            given.append((method.strip(), [first] if colon else []))
        elif method and given:  # another setting of the method before
            given[-1][1].append(method)
        elif method:
            raise InputError(f"expected a method first, such as lsr:epsilon=0.3; got '{text}'.")
    entries = []
    for method, assignments in given:
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        settings = make_settings({"method_settings": parse_overrides(assignments)}).method_settings
        entries.append(Entry(method, settings))
    labels = [entry.label for entry in entries]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        raise InputError(f"given more than once: {', '.join(repeated)}.")
    return entries


def fitting_entries(table: ImageTable, classes_balanced: bool = False) -> tuple[list[Entry], list[str]]:
    """Every method that fits the data, and for each other method with the same kind of labels why it does not."""
    fitting, reasons = [], []
    seen: dict[tuple[object, str], str] = {}
    for name in methods_for(table.multilabel):
        kind = method_class(name)
        identity = (kind, repr(sorted(method_settings(name).items())))
        if kind.needs_order:
            reasons.append(f"{name}: for classes that have an order; name it in --methods if these have")
        elif kind.balances_classes and classes_balanced:
            reasons.append(f"{name}: it balances the classes itself; class_weights or balanced_sampling is on")
        elif identity in seen:
            reasons.append(f"{name}: the same as {seen[identity]}")
        else:
            seen[identity] = name
            fitting.append(Entry(name))
    return fitting, reasons


def check_entries(entries: Sequence[Entry], table: ImageTable, classes_balanced: bool = False) -> None:
    """Build every method once, so that all errors are reported before anything runs."""
    classes = Classes(table.num_classes, 8, tuple(table.class_counts().tolist()))
    problems = []
    for entry in entries:
        try:
            check_method_fits(entry.method, table.multilabel, classes_balanced)
            build_method(entry.method, classes, entry.settings)
        except InputError as error:
            problems.append(f"\n  - {entry.label}: {error}")
    if problems:
        raise InputError(f"these methods cannot take part:{''.join(problems)}")


@dataclass(frozen=True, kw_only=True)
class Request(SweepOptions):
    """The arguments of ``cclnet compare-methods``."""

    settings: Settings  # shared by all runs; its method_settings belong to its method alone
    entries: tuple[Entry, ...] = ()  # empty: all methods that fit the data
    seeds: tuple[int, ...] = (0, 1, 2)  # the split has a seed of its own: all runs are evaluated on the same images
    against: str = ""  # label of the reference method; "all": every pair; empty: hard labels, else the first method
    primary: str | None = None
    draws: int = 1000


def compare_methods(request: Request, console: Console | None = None) -> SweepSummary:
    """Run the cells that have no result, and write comparison.html, .md and .json, and scores.md, of all that have."""
    console = console or Console()
    began = time.time()
    table = open_data(request.settings.data, request.settings)
    ordered = request.settings.ordered or (request.settings.ordered is None and names_in_order(table.classes))
    known = compared_metrics("multi-label" if table.multilabel else "single-label")
    metrics = [metric.name for metric in known if ordered or not metric.ordered]
    if request.primary is not None and request.primary not in metrics:
        raise unknown("score", request.primary, metrics)
    entries = _choose_entries(request, table, console)
    reference = _reference(request, entries)
    runs = len(entries) * len(request.seeds)
    prepare(request.settings, table, runs, request.accelerator, request.cache_dir, console)
    make_folder(request.results)
    cells = cells_of(request, entries, table.fingerprint())
    requested = {"methods": list(cells), "seeds": request.seeds, "parallel": request.parallel}
    seed_by_seed = [cell for of_seed in zip(*cells.values(), strict=True) for cell in of_seed]
    summary = run_sweep(seed_by_seed, request, requested, console, began)
    if summary.signal:  # no time for a comparison
        console.print(summary.text(), highlight=False, markup=False)
        return summary
    context = request.context(began)
    finished = {
        label: [path for cell in own if (path := context.result(cell)).exists()] for label, own in cells.items()
    }
    _compare({label: paths for label, paths in finished.items() if paths}, reference, request, console)
    console.print(summary.text(), highlight=False, markup=False)
    return summary


def _choose_entries(request: Request, table: ImageTable, console: Console) -> list[Entry]:
    balanced = request.settings.class_weights or request.settings.balanced_sampling
    entries, left_out = (list(request.entries), []) if request.entries else fitting_entries(table, balanced)
    if not entries:
        raise InputError("there is no method for this kind of labels.")
    check_entries([_with_shared_settings(request.settings, entry) for entry in entries], table, balanced)
    runs = f"{count_text(len(entries), 'method')}, {count_text(len(request.seeds), 'seed')} each"
    console.print(f"{runs}, {len(table):,} images of {table.num_classes} classes.", highlight=False)
    for reason in left_out:
        console.print(f"left out: {reason}", highlight=False, markup=False)
    return entries


def _with_shared_settings(settings: Settings, entry: Entry) -> Entry:
    shared = settings.method_settings if entry.method == settings.method else {}
    return replace(entry, settings={**shared, **entry.settings})


def cells_of(request: Request, entries: Sequence[Entry], fingerprint: str = "") -> dict[str, list[Cell]]:
    """The cells of each entry by its label, in the order of the seeds. ``fingerprint`` is that of the data."""
    cells: dict[str, list[Cell]] = {}
    for entry in entries:
        chosen = dict(_with_shared_settings(request.settings, entry).settings)
        settings = replace(request.settings, method=entry.method, method_settings=chosen)
        keys = {"method": entry.method, "method_settings": in_json(entry.settings)}
        cells[entry.label] = [
            Cell(entry.name(seed), replace(settings, seed=seed), {**keys, "seed": seed}, fingerprint=fingerprint)
            for seed in request.seeds
        ]
    return cells


def _reference(request: Request, entries: Sequence[Entry]) -> str | None:
    """The label of the method that the others are compared with; None for every pair."""
    labels = [entry.label for entry in entries]
    if request.against == EVERY_PAIR:
        return None
    if request.against and request.against not in labels:
        raise unknown("method to compare against", request.against, [*labels, EVERY_PAIR])
    return request.against or next((e.label for e in entries if method_class(e.method).baseline), labels[0])


def _compare(finished: Mapping[str, Sequence[Path]], reference: str | None, request: Request, console: Console) -> None:
    """Compare the kept results. Nothing is written before the reference has a run."""
    if not finished or (reference is not None and reference not in finished):
        console.print(f"no comparison yet: no run of {reference or 'any method'} has finished.", highlight=False)
        return
    with console.status(f"comparing {sum(map(len, finished.values()))} runs"):
        comparison = compare(finished, reference, request.primary, request.draws, calibration="temperature")
    methods = [  # runs by file name: they stay beside the comparison if the folder is moved
        replace(method, runs=tuple(replace(run, path=Path(run.path).name) for run in method.runs))
        for method in comparison.methods
    ]
    comparison = replace(comparison, methods=tuple(methods))
    page = write_comparison(request.results, comparison)
    console.print(comparison_table(comparison))
    for warning in comparison.warnings:
        console.print(f"note: {warning}", style="yellow", highlight=False, markup=False)
    console.print(f"comparison: {page}", highlight=False, markup=False, soft_wrap=True)
