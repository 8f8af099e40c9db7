"""The command line: one file per command, each a few lines over the Python API.

Options that stand for settings are generated from the fields of the settings classes (:func:`with_settings`).
Command modules import torch only when they run, so that ``--help`` and errors in the settings are immediate.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import rich.control
import typer
from rich.console import Console
from rich.markup import escape

from cclnet.errors import InputError, show_warnings_as_notes, unknown
from cclnet.schema import rules
from cclnet.settings import DataOptions, Settings, default_text, merge_layers, parse_overrides

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown",
    # --batch_size is --batch-size: settings are written with underscores in files and with --set.
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
)  # fmt: skip

# Arguments and options of several commands.
SOURCES = "Folder, CSV, Parquet, tar, .npz, medmnist:NAME or synthetic."
Data = Annotated[str, typer.Argument(help=f"{SOURCES} Default: a small synthetic set.")]
MovedData = Annotated[str | None, typer.Option(help="Where the images are, if they have moved since training.")]
Draws = Annotated[int, typer.Option(min=2, help="Bootstrap draws for the intervals.")]
Calibration = Annotated[
    str,
    typer.Option(help="temperature, offsets (a temperature and an offset for each class), or auto: offsets where they "
                 "lower the cross-fitted log loss."),
]  # fmt: skip
Accelerator = Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")]
_PRESET = "paper, finetune, quick, best or a .toml file. Default: finetune if pretrained weights are found, else paper."
Preset = Annotated[str, typer.Option(help=_PRESET)]
Refuse = Annotated[
    float | None,
    typer.Option(min=0, max=0.5, help="Refuse images that are farther from the training images than all but this share "
                 "of the held-out images. 0: refuse none. Default: 0.01."),
]  # fmt: skip
# Options of sweeps, as SweepOptions has them.
MaxMinutes = Annotated[
    float, typer.Option(help="Time limit of the command; the same command continues later. 0: none.")
]
Parallel = Annotated[
    int, typer.Option(help="Number of runs at once on this machine, which divide its GPUs, or its cores. With Ray "
                      "the resources of a run decide.")
]  # fmt: skip
Shard = Annotated[str, typer.Option(help="i/n: this machine is number i of n that divide the runs.")]
StallMinutes = Annotated[float, typer.Option(help="Restart a run that makes no progress for this many minutes.")]
Executor = Annotated[str, typer.Option(help="Where to run: local (this machine) or ray (a Ray cluster).")]
Address = Annotated[
    str | None,
    typer.Option(help="Address of the Ray cluster: auto (the cluster of this node) or HOST:PORT. Default: start Ray on "
                 "this machine."),
]  # fmt: skip
CellCpus = Annotated[float | None, typer.Option(help="Ray: CPUs of each run. Default: 1.")]
CellGpus = Annotated[
    float | None, typer.Option(help="Ray: GPUs of each run, 0.25 for four runs on one. Default: 1 if there are any.")
]
CellMemory = Annotated[float | None, typer.Option(help="Ray: memory of each run in GB. Default: not reserved.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


def with_settings(
    kind: type, *, only: tuple[str, ...] = (), without: tuple[str, ...] = (), defaults: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per field of a settings class in place of its ``**settings``.

    The command receives the options that were given, by field name. Fields that are not of plain type, or that the
    command declares itself, have no option. Commands that take all ``Settings`` also get ``--set``. ``defaults`` are
    the texts of the defaults, by field name, of a command that has others than the settings class.
    """
    complete = issubclass(kind, Settings) and not only

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = {parameter.name for parameter in own}
        generated = [
            parameter
            for field in dataclasses.fields(kind)
            if field.name not in names and field.name not in without and (not only or field.name in only)
            for parameter in _options(kind, field, (defaults or {}).get(field.name), PRESETS_APPLY if complete else "")
            if parameter.name not in names
        ]
        if complete:
            generated.append(_parameter("overrides", Annotated[list[str] | None, _SET]))

        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            own_arguments = {name: arguments.pop(name) for name in names}
            overrides = parse_overrides(arguments.pop("overrides", None) or [])
            given = {name: value for name, value in arguments.items() if value is not None}
            settings = merge_layers(given, overrides)
            for name in names & settings.keys():  # --set data=... is the same as DATA
                if name not in rules(kind):
                    raise unknown("setting", name, list(rules(kind)))
                own_arguments[name] = settings.pop(name)
            command(**own_arguments, **settings)

        parameters = [*own, *generated]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


PRESETS_APPLY = " (the defaults are those of the preset paper; --preset and --recipe replace them)"
_SET = typer.Option("--set", help="Any setting, name=value: --set augment.hue=0.1 --set method_settings.softness=0.7")


def _options(kind: type, field: dataclasses.Field[Any], default: str | None, note: str) -> Iterator[inspect.Parameter]:
    """The option of a setting, and a hidden one for its old name. ``default`` replaces that of the settings class."""
    hint = typing.get_type_hints(kind)[field.name]
    plain = next((t for t in (str, int, float, bool) if t in (hint, *typing.get_args(hint))), None)
    if plain is None or typing.get_origin(hint) in (tuple, dict):
        return
    rule = rules(kind)[field.name]
    description = rule.help if default is None else rule.help.partition(" Default: ")[0]
    default = default_text(field) if default is None else default
    facts = [
        description,
        f"One of {', '.join(rule.choices)}." if rule.choices else "",
        f"Default: {default}." if default and plain is not bool else "",
    ]
    panel = "Data options" if field.name in rules(DataOptions) else f"Settings{note}"
    option = typer.Option(help=" ".join(filter(None, facts)), rich_help_panel=panel, show_default=False)
    yield _parameter(field.name, Annotated[plain | None, option])
    if rule.old_name:
        yield _parameter(rule.old_name, Annotated[plain | None, typer.Option(hidden=True)])
    for name in rule.synonyms:  # taken so that the error names the option that is meant
        yield _parameter(name, Annotated[str | None, typer.Option(hidden=True)])


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def parse_list(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def parse_seeds(text: str) -> tuple[int, ...]:
    """The seeds in a text such as "0,1,2"."""
    try:
        seeds = tuple(int(word) for word in parse_list(text))
    except ValueError:
        seeds = ()
    if not seeds:
        raise InputError(f"seeds are whole numbers separated by commas, such as 0,1,2; got '{text}'.")
    if len(set(seeds)) < len(seeds):
        raise InputError(f"each seed may be given once; got '{text}'.")
    return seeds


@app.callback(invoke_without_command=True)
def every_command(
    version: Annotated[bool, typer.Option("--version", help="Print versions and exit.")] = False,
) -> None:
    """Train, evaluate and serve classifiers of medical images. Contains CCL-Net, which learns soft labels."""
    if version:
        from cclnet.runs.provenance import versions

        typer.echo(", ".join(f"{name} {number}" for name, number in versions().items()))
        raise typer.Exit


def _register_commands() -> None:
    # Imported here because the command modules use the helpers above.
    from cclnet.cli.benchmark_command import benchmark
    from cclnet.cli.compare_command import compare, compare_methods
    from cclnet.cli.data_command import data_app
    from cclnet.cli.doubts_command import doubts
    from cclnet.cli.ensemble_command import ensemble
    from cclnet.cli.evaluate_command import evaluate
    from cclnet.cli.export_command import export
    from cclnet.cli.methods_command import methods
    from cclnet.cli.predict_command import predict
    from cclnet.cli.presets_command import presets_app
    from cclnet.cli.probe_command import probe
    from cclnet.cli.push_command import push
    from cclnet.cli.reproduce_command import reproduce
    from cclnet.cli.serve_command import serve
    from cclnet.cli.train_command import train
    from cclnet.cli.tune_command import tune
    from cclnet.cli.verify_command import verify

    evaluation = (evaluate, compare, compare_methods, doubts)
    training = (train, tune, probe, ensemble, benchmark)
    for command in (*training, *evaluation, serve, predict, export, push, verify, reproduce, methods):
        app.command()(command)
    app.add_typer(data_app, name="data")
    app.add_typer(presets_app, name="presets")


_register_commands()


def main() -> None:
    """Run a command. An error the user can correct is one line on stderr and exit code 2, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may be no text
    # Rich removes some control characters from what it prints. Names of files and classes, which others chose, may
    # contain any. They could change the title of the terminal, its clipboard, or what was printed before.
    rich.control._CONTROL_STRIP_TRANSLATE.update(dict.fromkeys((*range(9), *range(11, 32), *range(127, 160))))
    show_warnings_as_notes()
    try:
        app(prog_name="cclnet")
    except InputError as error:
        # Escaped, because names and hints such as cclnet[dicom] contain brackets that are not markup.
        # Not wrapped, because commands and paths in it are to be copied.
        text = f"[bold red]error:[/bold red] {escape(str(error))}"
        Console(stderr=True).print(text, highlight=False, soft_wrap=True)
        sys.exit(2)
