"""The keyword forms of training, evaluation and comparison, exported from ``cclnet`` and used by the commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cclnet.errors import InputError
from cclnet.memory import large_imports
from cclnet.settings import Settings, current_names, make_settings, merge_layers, read_settings

if TYPE_CHECKING:
    from cclnet.evaluation.compare import Comparison
    from cclnet.runs.scores import Scores
    from cclnet.sweep.cells import Executor


def run_settings(
    data: str | Path | None,
    recipe: str | Path | None,
    settings: Mapping[str, Any],
    preset: str = "",
    announce: bool = False,
    check: bool = False,
) -> Settings:
    """The settings of a run: of a preset or a recipe file if given, of the embedded demo without data, else of the
    preset that fits; overridden by ``settings``. ``announce`` prints what was chosen and why; ``check`` refuses data
    that does not exist, options that cannot read any, and initial weights that cannot be loaded.

    >>> run_settings("images", None, {"epochs": 10, "augment": {"crop": 64}}, "paper").augment.crop
    64
    """
    from cclnet.presets import choose_preset, demo, preset_file
    from cclnet.training.checks import check_names, check_start

    given = merge_layers(
        current_names(read_settings(recipe)) if recipe else {}, {"data": data} if data else {}, current_names(settings)
    )
    check_names(given)  # before timm is imported and the hub is asked for weights, which takes seconds
    if not preset and (recipe or not data):
        own = make_settings({} if recipe else demo(), given)
        if check:
            _check_data(own)
            check_start(own)
        return own
    if check:
        _check_data(make_settings({"short_side": 65536}, given))
    if check and given.get("pretrained") and not given.get("weights"):
        # Asked for by name, so training from scratch is no substitute. The backbone is that of the preset with weights.
        backbone = read_settings(preset_file(preset or "finetune")).get("backbone", Settings.backbone)
        check_start(make_settings({"short_side": 65536}, {"backbone": backbone} | given))
    choice = choose_preset(preset, given)
    chosen = make_settings(choice.settings, given)
    if check:
        check_start(chosen)
    if announce:  # after everything that can be refused, so that an error stands alone
        _announce(choice.line)
    return chosen


def _check_data(settings: Settings) -> None:
    from cclnet.data.sources import check_data

    check_data(settings.data, settings)


def _announce(line: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def train(
    data: str | Path | None = None,
    out: str | Path | None = None,
    *,
    resume: str | Path | None = None,
    preset: str = "",
    recipe: str | Path | None = None,
    accelerator: str = "auto",
    devices: int | None = None,
    progress: bool = True,
    summary: bool = False,
    executor: Executor | None = None,
    on_epoch: Callable[[dict[str, Any], Any], None] | None = None,
    **settings: Any,
) -> Path:
    """Train a classifier, evaluate it, write its run folder with report, and return the folder.

    ::

        run = cclnet.train("images/", out="runs/mine", backbone="resnet50", epochs=50, augment={"crop": 192})

    Args:
        data: as for :func:`cclnet.open_data`; None trains on the embedded synthetic set with small settings.
        out: the run folder to create. Default: a free name in runs/. Folds in it of the same settings are continued.
        resume: continue the run in this folder with its own settings; only ``cache_dir`` may be given besides.
        preset: "paper", "finetune", "quick" or "best". Default: "finetune" if pretrained weights are available, else
            "paper"; none with a recipe or without data.
        recipe: a TOML file of settings, overridden by ``settings``.
        accelerator: "auto", "cpu" or "cuda".
        devices: devices to train on. torchrun and SLURM set it.
        progress: show a progress bar and one line per epoch.
        summary: print the scores at the end, as the command does.
        executor: where to train folds: several at once on this machine, on a Ray cluster, or as shards. Default: one
            after the other in this process. ``Executor(parallel=4)`` or ``Executor(ray=RayOptions(address="auto"))``,
            both of ``cclnet.sweep``; a script needs ``if __name__ == "__main__":``, because processes import it.
        on_epoch: called after each epoch with its record and the network.
        **settings: fields of :class:`~cclnet.settings.Settings`, tables as dicts. An unknown name is an error that
            suggests the nearest one.
    """
    chosen = None
    cache_dir = settings.pop("cache_dir", None)
    if resume is None:
        # Before pandas and torch are imported, which takes seconds.
        chosen = run_settings(data, recipe, settings, preset, announce=progress, check=True)
        from cclnet.runs.folder import RunFolder, free_name
        from cclnet.training.checks import check_names

        check_names(vars(chosen))
        if executor is not None and executor.shard[1] > 1 and out is None:
            raise InputError("shards train into one folder: give --out, the same for all of them.")
        folder = out or free_name(Path("runs"), chosen)
    elif data or out or preset or recipe or settings:
        raise InputError("a resumed run keeps its settings: give no others with resume, except cache_dir.")
    else:
        from cclnet.runs.folder import RunFolder

        folder = resume
    options: dict[str, Any] = {
        "devices": devices, "accelerator": accelerator, "cache_dir": cache_dir, "progress": progress,
        "on_epoch": on_epoch,
    }  # fmt: skip
    own = chosen or RunFolder(folder).read_settings()
    if own.folds:
        return _train_folds(own, Path(folder), options, executor, summary)
    if executor is not None:
        raise InputError(
            "--parallel, --executor and --shard (executor= in Python) say where folds are trained: give folds, too, "
            "such as --folds 5."
        )
    with large_imports():
        from cclnet.training import loop
        from cclnet.training.setup import is_rank_zero

    run = loop.train(chosen, folder, **options)
    if is_rank_zero():
        evaluate(run, summary=summary)
    return run


def _train_folds(
    settings: Settings, folder: Path, options: Mapping[str, Any], executor: Executor | None, summary: bool
) -> Path:
    with large_imports():
        from cclnet.sweep.folds import train_folds

    scores = train_folds(settings, folder, executor, **options)
    if summary and scores is not None:
        from cclnet.report.terminal import print_scores

        print_scores(scores, folder / "report.html")
    return folder


def ensemble(runs: Sequence[str | Path], out: str | Path, *, summary: bool = False) -> Path:
    """Make one model of several runs of the same classes: the mean of their calibrated probabilities.

    Its folder is that of a run: it is evaluated, compared, exported and served like any other.

    Args:
        runs: folders of finished runs; backbones, crops and normalisation may differ.
        out: the run folder to create.
        summary: print the scores at the end, as the command does.
    """
    from cclnet.deploy.ensemble import make_ensemble

    if (Path(out) / "settings.toml").exists():
        raise InputError(f"{out} holds a run already: choose another --out.")
    folder = make_ensemble(runs, out)
    evaluate(folder, summary=summary)
    return folder


def probe(
    data: str | Path,
    out: str | Path | None = None,
    *,
    accelerator: str = "auto",
    progress: bool = True,
    summary: bool = False,
    **settings: Any,
) -> Path:
    """Fit a logistic regression on the frozen features of a pretrained backbone; write its run folder, with report,
    and return the folder.

    Its predictions are out-of-fold: every image is predicted by a model that was not fitted on its fold. Penalty
    and class weights are chosen inside the other folds. The model is fitted on all folds.

    Args:
        data: as for :func:`cclnet.open_data`. A test split that comes with it is predicted by the model.
        out: the run folder to create. Default: a free name in runs/.
        accelerator: "auto", "cpu" or "cuda".
        progress: show a progress bar.
        summary: print the scores at the end, as the command does.
        **settings: fields of :class:`~cclnet.settings.Settings`, tables as dicts: backbone, weights, folds (default:
            5), tta, method, ...
    """
    from cclnet.presets import probe_settings
    from cclnet.runs.folder import free_name

    given = merge_layers({"data": str(data)}, current_names(settings))
    choice = probe_settings(given)
    chosen = make_settings(choice.settings, given)
    from cclnet.training.checks import check_settings

    check_settings(chosen)
    if progress:
        _announce(choice.line)
    with large_imports():
        from cclnet.training.probe import probe as run_probe

    run = run_probe(chosen, out or free_name(Path("runs"), chosen, "probe"), accelerator=accelerator, progress=progress)
    evaluate(run, summary=summary)
    return run


def evaluate(
    run: str | Path,
    out: str | Path | None = None,
    *,
    data: str | None = None,
    draws: int = 1000,
    decision: str | None = None,
    cost: str | None = None,
    by: str | None = None,
    ordered: bool | None = None,
    calibration: str = "auto",
    summary: bool = False,
) -> Scores:
    """Evaluate a run from its predictions alone; write scores.json, report.html and report.md and return the scores.

    Args:
        run: a run folder, a predictions.csv, or the .json result of a run.
        out: the folder to write to. Default: the run folder, which then also gets calibration.json, or the folder
            of the file.
        data: where the images are, if they have moved since training.
        draws: bootstrap draws for the intervals.
        decision: the decision rule of the model: "accuracy", "balanced" or "costs". Default: as chosen before, else as
            its settings say.
        cost: the costs of errors, such as "MEL:NV=10" (true:predicted), or a .csv or .toml file of them.
        by: columns whose subgroups are scored, such as "sex,age". Default: those of the settings of the run.
        ordered: whether the classes have an order. Default: as the run says, else as their names say.
        calibration: "temperature" (one for all classes), "offsets" (a temperature and an offset for each class, which
            may change decisions; one label per image), or "auto": offsets if they lower the log loss by more than one
            standard error in cross-fitting, and the training did not balance the classes.
        summary: print the scores.
    """
    with large_imports():
        from cclnet.evaluation.evaluate import evaluate as evaluate_run
        from cclnet.report import write_report

    run = Path(run)
    folder = Path(out) if out is not None else run if run.is_dir() else run.parent
    scores = evaluate_run(
        run, folder, draws, decision=decision, cost=cost, by=by, ordered=ordered, calibration=calibration
    )
    report = write_report(run, scores, folder, data)
    if summary:
        from cclnet.report.terminal import print_scores

        print_scores(scores, report)
    return scores


def compare(
    runs: Sequence[str | Path] | Mapping[str, Sequence[str | Path]],
    out: str | Path | None = None,
    *,
    against: str | None = None,
    primary: str | None = None,
    draws: int = 1000,
    calibration: str = "auto",
    summary: bool = False,
) -> Comparison:
    """Compare runs on the same images with paired tests, and return the comparison.

    Args:
        runs: run folders or predictions.csv files; or a dict of them by method. Runs of one method count as its seeds.
        out: the folder for comparison.html, .md and .json and scores.md. Default: nothing is written.
        against: compare every method with this one. Default: all pairs.
        primary: the score of the overall verdict. Default: accuracy.
        draws: bootstrap draws for the intervals.
        calibration: of each run, as for :func:`evaluate`.
        summary: print the verdicts; needs ``out``.
    """
    from cclnet.evaluation.compare import compare as compare_runs

    comparison = compare_runs(runs, against, primary, draws, calibration=calibration)
    if out is not None:
        from cclnet.report import write_comparison

        page = write_comparison(Path(out), comparison)
        if summary:
            from cclnet.report.terminal import print_comparison

            print_comparison(comparison, page)
    return comparison
