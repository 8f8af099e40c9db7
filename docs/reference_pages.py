"""The reference pages of the site, generated from the code: commands, settings, presets, run folder."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import typer

from cclnet.cli import app
from cclnet.presets import PRESETS, preset_file
from cclnet.runs import data_summary, model, predictions, scores
from cclnet.runs import folder as run_files
from cclnet.schema import rules
from cclnet.settings import DataOptions, Settings, default_text


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]] | list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def commands() -> str:
    """Every command with its arguments and options."""
    group: Any = typer.main.get_command(app)
    parts = [
        "# Command line",
        "Generated from the code. `cclnet COMMAND --help` prints the same. Options named *settings* are described "
        "with their ranges in [settings](settings.md).",
        table(
            ("command", ""), [(f"[`cclnet {path}`](#{_anchor(path)})", _first(own.help)) for path, own in _all(group)]
        ),
    ]
    for path, command in _all(group):
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        words = [_names(p) if p.required else f"[{_names(p)}]" for p in arguments]
        usage = " ".join(["cclnet", path, *words])
        parts += [f"## cclnet {path} {{#{_anchor(path)}}}", inspect.cleandoc(command.help or ""),
                  f"```text\n{usage} [OPTIONS]\n```"]  # fmt: skip
        rows = [(f"`{_names(p)}`", p.help or "") for p in command.params if not getattr(p, "hidden", False)]
        parts.append(table(("argument or option", ""), rows))
    return "\n\n".join(parts) + "\n"


def _all(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _all(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def _anchor(path: str) -> str:
    return path.replace(" ", "-")


def _first(text: str | None) -> str:
    return inspect.cleandoc(text or "").partition("\n\n")[0]


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return (parameter.name or "").upper()
    names = " / ".join([*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {(parameter.name or 'value').upper()}"


def settings() -> str:
    """Every setting with default, range and help."""
    parts = [
        "# Settings",
        "Generated from the code. A setting is an option of `cclnet train` (`--batch-size 64`), a `--set NAME=VALUE`, "
        "a key of a TOML recipe (`cclnet train --recipe FILE`) and a keyword of `cclnet.train`. The defaults are "
        "those of the preset `paper`; [other presets](presets.md) change some. An unknown name is an error that "
        "names the nearest valid one.",
    ]
    own = list(dict.fromkeys(["", *(f.name for f in dataclasses.fields(Settings) if _is_nested(f))]))
    titles = {"": "Training and data", "split": "Split", "augment": "Augmentation"}
    for name in own:
        kind = Settings if not name else type(next(f.default for f in dataclasses.fields(Settings) if f.name == name))
        parts += [f"## {titles.get(name, name)}", table(("setting", "default", "values", ""), list(_rows(kind, name)))]
    return "\n\n".join(parts) + "\n"


def _is_nested(field: Any) -> bool:
    return dataclasses.is_dataclass(field.default)


def _rows(kind: Any, name: str) -> Iterator[tuple[str, ...]]:
    for field in sorted(dataclasses.fields(kind), key=lambda field: field.name in rules(DataOptions)):
        if not _is_nested(field):
            own = rules(kind)[field.name]
            path = f"`{name}.{field.name}`" if name else f"`{field.name}`"
            yield path, default_text(field), ", ".join(own.choices) or own.expected(), own.help


def presets() -> str:
    """The settings of every preset."""
    parts = [
        "# Presets",
        "A preset is a file of settings: `cclnet train DATA --preset NAME`. Options override it. Without a name, "
        "`cclnet train` chooses `finetune` if pretrained weights are available, else `paper`.",
    ]
    for name, description in PRESETS.items():
        parts += [f"## {name}", f"{description[0].upper()}{description[1:]}.",
                  f"```toml\n{preset_file(name).read_text(encoding='utf-8').strip()}\n```"]  # fmt: skip
    return "\n\n".join(parts) + "\n"


# File of a run folder: the stage that writes it, and what it holds.
FILES = {
    "settings.toml": ("train", "every setting of the run; `--recipe` reads it"),
    "split.csv": ("train", "`image`, `split` and, where known, `group`, `label`, `fold`"),
    "data.json": ("train", "what was left out of the data, and copies across splits"),
    "metrics.jsonl": ("train", "one record per epoch: losses, learning rates, speed, validation scores"),
    "checkpoints": ("train", "state to resume from, one file per kept epoch"),
    "tensorboard": ("train", "the same history for TensorBoard"),
    "model.safetensors": ("train", "weights of the backbone with its classifier; none of the head"),
    "model.json": ("train", "classes, preparation of an image, backbone, method"),
    "features.safetensors": ("train", "feature statistics, for refusing images unlike the training images"),
    "soft_labels.csv": ("train", "the learned soft labels, one row per class; only of methods that learn them"),
    "soft_labels.jsonl": ("train", "soft labels over the epochs"),
    "predictions.csv": ("train", "`image`, `label`, `split`, `group` and one `p_<class>` per class, held-out images"),
    "metadata.csv": ("train", "columns of the data that divide images into subgroups"),
    "calibration.json": (
        "evaluate",
        "temperature, offsets, abstention curve, decision rule, thresholds of prediction sets",
    ),
    "scores.json": ("evaluate", "every score of the report with its interval"),
    "report.html": ("evaluate", "the report; `report.md` is the same as text"),
    "SHA256SUMS": ("train, evaluate", "checksums; `cclnet verify RUN` checks them"),
}
# Dataclasses that describe the content of a file.
CONTENT = {
    "model.json": (model, "ModelDescription"),
    "calibration.json": (model, "Calibration"),
    "predictions.csv": (predictions, "Predictions"),
    "split.csv": (run_files, "SplitTable"),
    "data.json": (data_summary, "DataSummary"),
    "scores.json": (scores, "Scores"),
}


def run_folder() -> str:
    """The files of a run, and the fields of those that dataclasses describe."""
    own = run_files.RunFolder("run")
    names = {path.name for name, path in vars(own).items() if name != "path" and not name.startswith("_")}
    if undescribed := names - FILES.keys():
        raise ValueError(f"docs/reference_pages.py describes no {', '.join(sorted(undescribed))} of a run folder.")
    parts = [
        "# Run folder",
        "Generated from `cclnet.runs`, the only code that reads or writes these files. A run is a folder. It suffices "
        "to resume training, to evaluate without the model, and to deploy the model. Every file is written whole, and "
        "no stage changes the file of an earlier one.",
        table(("file", "written by", "content"), [(f"`{name}`", *facts) for name, facts in FILES.items()]),
    ]
    for file, (module, name) in CONTENT.items():
        parts += [f"## {file}", _doc(module, name), _fields(module, name)]
        for inner in _used(module, name):
            parts += [f"### {inner}", _doc(module, inner), _fields(module, inner)]
    return "\n\n".join(parts) + "\n"


def _doc(module: ModuleType, name: str) -> str:
    return _first(getattr(module, name).__doc__)


def _fields(module: ModuleType, name: str) -> str:
    return table(("field", "type", ""), list(_field_rows(getattr(module, name))))


def fields(path: str) -> str:
    """The table of the fields of a dataclass, by its place such as cclnet.data.table.ImageTable."""
    module, _, name = path.rpartition(".")
    return _fields(importlib.import_module(module), name)


def _field_rows(kind: type) -> Iterator[tuple[str, ...]]:
    """Name, type and comment of each field; the comment is above the field or at the end of its line."""
    lines = textwrap.dedent(inspect.getsource(kind)).splitlines()
    node = ast.parse("\n".join(lines)).body[0]
    assert isinstance(node, ast.ClassDef)
    for entry in node.body:
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            comment = _comment(lines, entry).replace("[", r"\[")  # [K] is a shape, no link
            yield f"`{entry.target.id}`", f"`{ast.unparse(entry.annotation)}`", comment


def _comment(lines: list[str], entry: ast.AnnAssign) -> str:
    end = lines[(entry.end_lineno or entry.lineno) - 1][entry.end_col_offset or 0 :].strip()
    if end.startswith("#"):
        return end.lstrip("# ")
    above, number = [], entry.lineno - 2
    while number >= 0 and lines[number].strip().startswith("#"):
        above.insert(0, lines[number].strip().lstrip("# "))
        number -= 1
    return " ".join(above)


def _used(module: ModuleType, name: str) -> list[str]:
    """The dataclasses of the module that the fields of a dataclass refer to, in order, and those that they refer to."""
    found: list[str] = []
    waiting = [name]
    while waiting:
        text = " ".join(str(field.type) for field in dataclasses.fields(getattr(module, waiting.pop(0))))
        for other, kind in vars(module).items():
            is_new = other not in found and other != name
            if is_new and inspect.isclass(kind) and dataclasses.is_dataclass(kind) and other in _words(text):
                found.append(other)
                waiting.append(other)
    return found


def _words(text: str) -> set[str]:
    return set("".join(c if c.isalnum() or c == "_" else " " for c in text).split())
