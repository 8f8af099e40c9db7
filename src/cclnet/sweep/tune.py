"""``cclnet tune``: search for good settings with Ray Tune (Optuna proposes, ASHA stops the worse half early).

Settings are compared on a validation split that is taken from the training split, by group where groups are known. The
images outside of the training split are removed from the table before anything is decoded.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from cclnet.data.sources import open_data
from cclnet.data.split import SplitNames, make_split
from cclnet.data.table import ImageTable
from cclnet.errors import InputError, NotFinite, unknown
from cclnet.evaluation.metrics import Metric, find, metrics_for, point_estimates
from cclnet.files import make_folder, read_json, write_json, write_whole
from cclnet.methods import check_method_settings
from cclnet.runs.folder import RunFolder, flattened
from cclnet.runs.provenance import origin, settings_hash
from cclnet.schema import from_plain
from cclnet.settings import (
    DataOptions,
    Settings,
    SplitSettings,
    make_settings,
    read_settings,
    to_toml,
)
from cclnet.sweep.cells import RayOptions
from cclnet.sweep.executors import SweepProgress, on_signals
from cclnet.sweep.ray_tasks import cell_gpus, connected, stand_alone
from cclnet.training.checks import check_start

RANGES = ("uniform", "loguniform", "int", "logint")
# They decide what is measured and at what cost, not how well it is solved.
NOT_TUNED = {field.name for field in dataclasses.fields(DataOptions)} | {
    "data", "split", "seed", "folds", "epochs", "by", "ordered", "cache_dir", "decision", "cost", "tta", "logger",
    "max_minutes", "validate_every",
}  # fmt: skip
NOT_IN_PRESET = NOT_TUNED - {"epochs", "decision", "cost", "tta"} | {"compile", "resident", "deterministic"}
RESULT, PRESET = "tune.json", "best.preset.toml"
REDUCTION = 3  # ASHA continues one of so many trials at each of its rungs


@dataclass(frozen=True)
class Range:
    """Numbers from low to high: "uniform" or "loguniform"; whole ones, both ends included: "int" or "logint"."""

    kind: str
    low: float
    high: float


Space = dict[str, "Range | list[Any]"]  # by dotted name of the setting; a list has the values to choose from


def read_space(path: Path, settings: Settings) -> Space:
    """The space of settings in a TOML file. Its names, and the ends of its ranges, are checked on the settings; where
    it has several methods, all of them must have its ``method_settings``."""
    space = dict(_entries(read_settings(path), str(path)))
    if not space:
        raise InputError(f"{path} names no setting to search over.")
    methods = space.get("method", [settings.method])
    for name, options in space.items():
        if name.partition(".")[0] in NOT_TUNED:
            raise InputError(f"{path}: {name} cannot be tuned: all trials need the same. Give it as an option.")
        for value in options if isinstance(options, list) else (options.low, options.high):
            chosen = with_values(settings, {name: value})
            for method in methods if isinstance(methods, list) else ():
                check_method_settings(method, chosen.method_settings)
            if name in ("backbone", "weights") and not {"backbone", "weights"} <= space.keys():
                check_start(chosen)
    return space


def _entries(values: Mapping[str, Any], where: str, prefix: str = "") -> Any:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, list) and value and not any(isinstance(option, (list, dict)) for option in value):
            yield name, value
        elif isinstance(value, dict) and len(value) == 1 and next(iter(value)) in RANGES:
            yield name, _range(name, value, where)
        elif isinstance(value, dict):
            yield from _entries(value, where, f"{name}.")
        else:
            raise InputError(
                f"{where}: {name} is a list of values, such as [64, 128], or a range, such as {{loguniform = [1e-4, "
                f"0.1]}} ({', '.join(RANGES)}); got {value!r}."
            )


def _range(name: str, value: Mapping[str, Any], where: str) -> Range:
    [(kind, ends)] = value.items()
    numbers = isinstance(ends, list) and len(ends) == 2 and all(isinstance(end, (int, float)) for end in ends)
    whole = numbers and all(isinstance(end, int) for end in ends)
    if not numbers or not ends[0] < ends[1] or ("log" in kind and ends[0] <= 0) or ("int" in kind and not whole):
        what = "whole numbers" if "int" in kind else "numbers"
        above = ", the first above 0" if "log" in kind else ""
        raise InputError(f"{where}: {name}: {kind} needs two ascending {what}{above}; got {ends!r}.")
    return Range(kind, *ends)


def with_values(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """The settings with other values, by dotted name.

    >>> with_values(Settings(), {"lr": 0.5, "augment.hue": 0.1}).augment.hue
    0.1
    """
    layers = []
    for name, value in values.items():
        for part in reversed(name.split(".")):
            value = {part: value}
        layers.append(value)
    return make_settings(_without_none(dataclasses.asdict(settings)), *layers)


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, Mapping) and name != "method_settings" else value
        for name, value in values.items()
        if value is not None
    }


@dataclass(frozen=True)
class Inside:
    """Divides the training split of a table again, into train and val; all other images are removed."""

    outer: SplitSettings
    share: float  # of the training split

    def __call__(self, table: ImageTable) -> tuple[ImageTable, SplitNames]:
        splits = make_split(table, self.outer)
        own = replace(table.select(np.flatnonzero(splits == "train")), splits=None)
        inner = SplitSettings(val=self.share, seed=self.outer.seed)  # by group where groups are known
        held_out = {table.names[row] for row in np.flatnonzero(splits != "train").tolist()}
        assert held_out.isdisjoint(own.names), "an image outside of the training split would be used"
        return own, make_split(own, inner)


def train_trial(
    settings: Settings, metric: Metric, inside: Inside, accelerator: str, report: Callable[[int, float], None]
) -> None:
    """Train with the settings; report epoch and metric on the inner validation split after every epoch."""
    from cclnet.training.loop import Training
    from cclnet.training.setup import make_deterministic, make_fabric, prepare_data
    from cclnet.training.validate import Tester, predictions

    if settings.deterministic:
        make_deterministic()
    fabric = make_fabric(settings, accelerator=accelerator)
    fabric.launch()
    with tempfile.TemporaryDirectory(prefix="cclnet-") as scratch:
        run = RunFolder(Path(scratch, "run"))
        run.create(settings)
        data = prepare_data(settings, run, fabric, progress=False, divide=inside)
        training, rows = Training(settings, run, fabric, data), data.rows("val")
        tester = Tester(settings, data, rows, fabric, training.mean, training.std)

        def on_epoch(record: Mapping[str, Any], network: Any) -> None:
            target = network.method.target() if settings.unsoften else None
            logits = tester.logits(training.shipped_classifier)
            found = predictions(data, rows, logits, None if target is None else target.double().tolist())
            report(record["epoch"], float(point_estimates(found, [metric])[metric.name]))

        training.fit(progress=False, on_epoch=on_epoch)


def trial_task(
    values: Mapping[str, Any],
    *,
    settings: Settings,
    metric: str,
    inside: Inside,
    accelerator: str,
    threads: int,
    folder: str,
) -> None:
    """The function that Ray Tune runs with the values of a trial. A trial that diverges gets the worst score."""
    import torch
    from ray import tune

    stand_alone(threads, folder)
    own = find(metric)
    worst = -math.inf if own.higher_is_better else math.inf
    try:
        train_trial(
            with_values(settings, values),
            own,
            inside,
            accelerator,
            lambda epoch, value: tune.report({"epoch": epoch, metric: value if math.isfinite(value) else worst}),
        )
    except NotFinite:
        tune.report({"epoch": 0, metric: worst})
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the next trial may run in the same process


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of ``cclnet tune``."""

    settings: Settings
    space: Path
    out: Path
    metric: str = "balanced_accuracy"
    trials: int = 20
    minutes: float = 0.0  # 0: no limit
    val_share: float = 0.2
    ray: RayOptions = field(default_factory=RayOptions)
    accelerator: str = "auto"

    def __post_init__(self) -> None:
        if self.trials < 1 or self.minutes < 0 or not 0 < self.val_share < 1:
            raise InputError("tune needs at least 1 trial, minutes of at least 0, and a share between 0 and 1.")
        if self.settings.folds:
            raise InputError("tune trains every trial once: leave out folds, and give them to `cclnet train` later.")


@dataclass
class Trial:
    """A trial as tune.json has it."""

    values: dict[str, Any]
    epochs: int = 0
    score: float | None = None  # after the last of these epochs; None: diverged
    state: str = "cut"  # "complete", "stopped" (by ASHA), "diverged", "failed", or "cut" by the end of the search
    reason: str = ""


def tune(request: Request, console: Console | None = None) -> tuple[Path | None, int]:
    """Search, write the best settings as a preset file, and return its path and the number of a signal that ended the
    search (0: none). Trials of an earlier search in the same folder count. A search that was interrupted before its
    first score writes no preset."""
    console = console or Console()
    settings = replace(request.settings, validate_every=request.settings.epochs, logger="none")
    table = open_data(settings.data, settings)
    metric = _metric(request.metric, table)
    space = read_space(request.space, settings)
    inside = Inside(settings.split, request.val_share)
    own, splits = inside(table)
    images = {name: int((splits == name).sum()) for name in ("train", "val")}
    facts = {
        "metric": metric.name,
        "settings": settings_hash(json.loads(json.dumps(dataclasses.asdict(settings), default=str))),
        "space": {name: dataclasses.asdict(o) if isinstance(o, Range) else o for name, o in space.items()},
        "fingerprint": own.fingerprint(),
        "images": images,
        "grouped": own.groups is not None,
    }
    search = _Search(request, metric, facts, _earlier(make_folder(request.out) / RESULT, facts), console)
    console.print(
        f"{images['train']:,} images to train on and {images['val']:,} to compare by {metric.title}, all from the "
        f"training split{', divided by group' if own.groups is not None else ''}; {len(table) - len(own):,} images of "
        "other splits are not read.",
        highlight=False,
    )
    if len(search.trials) < request.trials:
        search.run(settings, space, inside)
    if search.signals:
        has_score = any(trial.score is not None for trial in search.trials.values())
        return search.write_best(settings) if has_score else None, search.signals[0]
    return search.write_best(settings), 0


def _metric(name: str, table: ImageTable) -> Metric:
    known = {metric.name: metric for metric in metrics_for("multi-label" if table.multilabel else "single-label")}
    known = {name: metric for name, metric in known.items() if not metric.per_class and not metric.ordered}
    if name not in known:
        raise unknown("metric", name, known)
    return known[name]


def _earlier(path: Path, facts: Mapping[str, Any]) -> list[Trial]:
    """The trials of an earlier search that ended by themselves. One for other data or settings is refused."""
    if not path.exists():
        return []
    content = read_json(path)
    if different := [name for name, value in facts.items() if content.get(name) != json.loads(json.dumps(value))]:
        raise InputError(f"{path} is of a search with other {', '.join(different)}: choose another --out.")
    trials = [from_plain(Trial, trial) for trial in content.get("trials", [])]
    return [trial for trial in trials if trial.state in ("complete", "stopped", "diverged")]


class _Search:
    """The trials of a search, and how they are written and shown."""

    def __init__(
        self, request: Request, metric: Metric, facts: Mapping[str, Any], earlier: Sequence[Trial], console: Console
    ) -> None:
        self.request, self.metric, self.facts, self.console = request, metric, facts, console
        self.trials: dict[str, Trial] = {f"earlier {number}": trial for number, trial in enumerate(earlier, start=1)}
        self.progress = SweepProgress(console)
        self.signals: list[int] = []

    def run(self, settings: Settings, space: Space, inside: Inside) -> None:
        """Run the trials that are left, until the time is over or a signal arrives."""
        os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # tune.json has what is needed to continue
        request = self.request
        with (
            connected(request.ray.address) as ray,
            tempfile.TemporaryDirectory(prefix="cclnet-") as scratch,
            self.progress,
            on_signals(self._interrupt),
        ):
            from ray import tune

            gpus = cell_gpus(ray, request.ray, request.accelerator)
            task = tune.with_parameters(
                trial_task,
                settings=settings,
                metric=self.metric.name,
                inside=inside,
                accelerator=request.accelerator if gpus else "cpu",
                threads=0 if gpus else max(1, int(request.ray.cell_cpus)),
                folder=str(Path.cwd()),
            )
            resources = {"cpu": request.ray.cell_cpus, "gpu": gpus, "memory": int(request.ray.cell_memory * 1e9)}
            tuner = tune.Tuner(
                tune.with_resources(task, {name: amount for name, amount in resources.items() if amount}),
                param_space={name: _domain(tune, options) for name, options in space.items()},
                tune_config=self._tune_config(tune, settings, space),
                run_config=tune.RunConfig(
                    storage_path=scratch,
                    verbose=0,
                    callbacks=[_callback(tune, self, settings.epochs)],
                    failure_config=tune.FailureConfig(max_failures=1),
                ),
            )
            with suppress(KeyboardInterrupt):
                tuner.fit()
        self.write()

    def _interrupt(self, number: int) -> None:
        self.signals.append(number)
        raise KeyboardInterrupt

    def _tune_config(self, tune: Any, settings: Settings, space: Space) -> Any:
        from ray.tune.schedulers import ASHAScheduler
        from ray.tune.search.optuna import OptunaSearch

        scored = [trial for trial in self.trials.values() if trial.score is not None]
        current = _current_values(settings, space)
        first = [trial.values for trial in scored] or ([current] if current else None)
        return tune.TuneConfig(
            metric=self.metric.name,
            mode="max" if self.metric.higher_is_better else "min",
            num_samples=self.request.trials - len(self.trials),
            time_budget_s=60 * self.request.minutes or None,
            scheduler=ASHAScheduler(
                max_t=settings.epochs,
                grace_period=max(1, settings.epochs // REDUCTION),  # the rate falls late: early scores say little
                reduction_factor=REDUCTION,
            ),
            search_alg=OptunaSearch(
                points_to_evaluate=first,
                evaluated_rewards=[trial.score for trial in scored] or None,
                seed=settings.seed + len(self.trials),  # a continued search proposes others
            ),
            reuse_actors=True,
        )

    def write(self) -> None:
        """Write tune.json."""
        trials = [dataclasses.asdict(trial) for trial in self.trials.values()]
        write_json(self.request.out / RESULT, {"format": 1, **self.facts, "trials": trials, **origin()})

    def best(self) -> Trial:
        """The best of the trials that were trained to the end; without any, of all that have a score."""
        scored = [trial for trial in self.trials.values() if trial.score is not None]
        if not scored:
            reasons = sorted({trial.reason for trial in self.trials.values() if trial.reason})
            raise InputError(f"no trial has a score yet. {' '.join(reasons) or 'Give it more --minutes.'}")
        sign = 1 if self.metric.higher_is_better else -1
        complete = [trial for trial in scored if trial.state == "complete"]
        return max(complete or scored, key=lambda trial: sign * (trial.score or 0.0))

    def write_best(self, settings: Settings) -> Path:
        """Write the settings of the best trial as a preset; returns its path."""
        best, path = self.best(), self.request.out / PRESET
        chosen = with_values(settings, best.values)
        chosen = replace(chosen, weights=str(Path(chosen.weights).absolute()) if chosen.weights else "")
        words = ", ".join(f"{name} = {_short(value)}" for name, value in best.values.items())
        note = f"{words}: {self.metric.name} {best.score:.4f} after {best.epochs} epochs, {len(self.trials)} trials."
        write_whole(path, f"# Chosen by `cclnet tune`: {note}\n{to_toml(chosen, without=NOT_IN_PRESET)}")
        self.console.print(f"best: {note}", highlight=False, markup=False, soft_wrap=True)
        self.console.print(f"train with it: cclnet train DATA --preset {path}", highlight=False, soft_wrap=True)
        return path


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _domain(tune: Any, options: Range | list[Any]) -> Any:
    if isinstance(options, list):
        return tune.choice(options)
    if options.kind in ("int", "logint"):  # Ray Tune leaves out the upper end
        return (tune.randint if options.kind == "int" else tune.lograndint)(options.low, options.high + 1)
    return getattr(tune, options.kind)(options.low, options.high)


def _current_values(settings: Settings, space: Space) -> dict[str, Any]:
    """The values that the settings have now, as far as they lie in the space: the first trial."""
    now = dict(flattened(dataclasses.asdict(settings)))

    def lies_in(value: Any, options: Range | list[Any]) -> bool:
        return value in options if isinstance(options, list) else options.low <= value <= options.high

    return {name: now[name] for name, options in space.items() if name in now and lies_in(now[name], options)}


def _callback(tune: Any, search: _Search, epochs: int) -> Any:
    """What Ray Tune calls as trials go on: it keeps them in the search."""

    class Keep(tune.Callback):  # type: ignore[misc]
        def __init__(self, search: _Search, epochs: int) -> None:
            self.search, self.epochs = search, epochs

        def __getstate__(self) -> dict[str, Any]:
            return {}  # Ray Tune stores its callbacks, to restore a search; here tune.json does that

        def on_trial_start(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
            own = self.search.trials.setdefault(self.name(trial), Trial(dict(trial.config)))
            self.show(trial, "training", own)

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Mapping[str, Any], **_: Any) -> None:
            own, score = self.search.trials[self.name(trial)], result[self.search.metric.name]
            own.epochs, own.score = result["epoch"], score if math.isfinite(score) else None
            self.show(trial, "training", own)

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
            own = self.search.trials[self.name(trial)]
            own.state = "diverged" if own.score is None else "complete" if own.epochs == self.epochs else "stopped"
            self.show(trial, "done", own)
            self.search.write()

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
            own, error = self.search.trials[self.name(trial)], trial.get_error()
            own.state, own.reason = "failed", str(error).strip().splitlines()[-1]  # of a traceback
            self.show(trial, "failed", own)
            self.search.write()

        def name(self, trial: Any) -> str:
            return f"trial {trial.experiment_tag.partition('_')[0]}"

        def show(self, trial: Any, state: str, own: Trial) -> None:
            text = ", ".join(f"{name} {_short(value)}" for name, value in own.values.items())
            score = "" if own.score is None else f", {self.search.metric.short} {own.score:.4f}"
            ended = "" if own.state == "cut" else f", {own.state} {own.reason}"
            self.search.progress.update(
                self.name(trial), state, f"{text}: epoch {own.epochs}/{self.epochs}{score}{ended}"
            )

    return Keep(search, epochs)
