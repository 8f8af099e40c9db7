"""Cells (the training runs of a sweep), the options that every sweep takes, and the summary of how its cells ended."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from cclnet.errors import InputError, unknown
from cclnet.files import make_folder, write_whole
from cclnet.runs.folder import RunFolder
from cclnet.settings import Settings

# Settings that may differ between a kept result and its cell, because they do not change what is trained.
IGNORED_SETTINGS = ("follow_links", "by", "ordered", "resident", "compile", "max_minutes", "validate_every")
EXECUTORS = ("local", "ray")
REPORT = "report.html"  # the last file of an evaluated run
T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """One training run of a sweep."""

    name: str  # of its run folder and its result; ends in the seed, "-seed0"
    settings: Settings
    keys: Mapping[str, Any] = field(default_factory=dict)  # what distinguishes it from other cells; kept in its result
    subfolder: str = ""  # of its result, inside the folder of results
    fingerprint: str = ""  # of images and labels; empty: not checked
    ignored_settings: tuple[str, ...] = IGNORED_SETTINGS


@dataclass(frozen=True)
class SweepContext:
    """What all cells of a sweep share. It is sent to every process."""

    runs: Path  # folder of the run folders
    results: Path | None  # folder of the kept results; None: the result of a cell is its evaluated run folder
    deadline: float = float("inf")  # in seconds of time.time(): training stops with a checkpoint
    accelerator: str = "auto"
    cache_dir: Path | None = None
    stall_seconds: float = 600.0  # a training process that reports nothing for so long is killed

    def run_folder(self, cell: Cell) -> RunFolder:
        return RunFolder(self.runs / cell.name)

    def result(self, cell: Cell) -> Path:
        """The path of the result of a cell, whether it exists or not."""
        if self.results is None:
            return self.run_folder(cell).path / REPORT
        return self.results / cell.subfolder / f"{cell.name}.json"

    def is_trained(self, cell: Cell) -> bool:
        return self.run_folder(cell).find_predictions() is not None  # the last file of training


@dataclass(frozen=True)
class RayOptions:
    """Where Ray runs, and what it reserves for each cell."""

    address: str = "local"  # HOST:PORT; "auto": the cluster of this node; "local": Ray is started on this machine
    cell_cpus: float = 1.0  # also the threads of a cell that trains on a CPU
    cell_gpus: float | None = None  # may be a fraction; None: one where the cluster has GPUs and they may be used
    cell_memory: float = 0.0  # GB; 0: not reserved

    def __post_init__(self) -> None:
        if self.cell_cpus <= 0 or (self.cell_gpus or 0) < 0 or self.cell_memory < 0:
            raise InputError("a cell needs more than 0 CPUs, and no less than 0 GPUs and memory.")
        if self.address.startswith("ray://"):
            raise InputError(
                f"{self.address} is an address of the Ray client, for programs outside of the cluster. Run the command "
                "on a node of the cluster, with --address auto."
            )


def choose_executor(name: str, **given: Any) -> RayOptions | None:
    """The options of Ray that were given (those that are None were not) if it is the executor; None for this machine.

    >>> choose_executor("ray", address=None, cell_gpus=0.5)
    RayOptions(address='local', cell_cpus=1.0, cell_gpus=0.5, cell_memory=0.0)
    """
    given = {option: value for option, value in given.items() if value is not None}
    if name not in EXECUTORS:
        raise unknown("executor", name, EXECUTORS)
    if name == "ray":
        return RayOptions(**given)
    if given:
        raise InputError(f"{', '.join(given)} are options of Ray: give --executor ray, too.")
    return None


@dataclass(frozen=True, kw_only=True)
class Executor:
    """Where cells run, how many at once, and which of them."""

    parallel: int = 1  # cells trained at once on this machine; Ray decides by the resources of a cell
    shard: tuple[int, int] = (1, 1)  # (i, n): this is machine i of n that share the cells
    stall_minutes: float = 10.0  # a training process that reports nothing for so long is killed
    ray: RayOptions | None = None  # None: the cells run on this machine

    def __post_init__(self) -> None:
        if self.parallel < 1:
            raise InputError(f"parallel must be at least 1, got {self.parallel}.")
        if not 1 <= self.shard[0] <= self.shard[1]:
            raise InputError(f"shard is i/n with i from 1 to n, got {self.shard[0]}/{self.shard[1]}.")
        if self.stall_minutes <= 0:
            raise InputError(f"stall_minutes must be above 0, got {self.stall_minutes:g}.")

    def own_shard(self, cells: Sequence[T]) -> list[T]:
        """Every n-th cell, beginning with the i-th."""
        return list(cells[self.shard[0] - 1 :: self.shard[1]])

    @property
    def command_options(self) -> str:
        """The options of the command line that are not the defaults, each with a space before it.

        >>> Executor(parallel=4, shard=(2, 3)).command_options
        ' --parallel 4 --shard 2/3'
        >>> Executor(ray=RayOptions(cell_gpus=0.5)).command_options
        ' --executor ray --cell-gpus 0.5'
        """
        ray = {} if self.ray is None else {"executor": "ray", **_changed(self.ray)}
        given = {**_changed(self), "ray": None, **ray}
        if "shard" in given:
            given["shard"] = f"{self.shard[0]}/{self.shard[1]}"
        words = (f" --{name.replace('_', '-')} {value}" for name, value in given.items() if value is not None)
        return "".join(words)


def _changed(options: Executor | RayOptions) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    own = ((entry.name, getattr(options, entry.name), entry.default) for entry in fields(options))
    return {name: value for name, value, default in own if value != default}


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Executor):
    """The options of every command that runs a sweep."""

    out: Path  # run folders go to out/runs
    results: Path
    max_minutes: float = 0.0  # for the whole sweep; 0: no limit
    accelerator: str = "auto"
    cache_dir: Path | None = None

    def context(self, began: float) -> SweepContext:
        return SweepContext(
            runs=self.out / "runs",
            results=self.results,
            deadline=began + 60 * self.max_minutes if self.max_minutes else float("inf"),
            accelerator=self.accelerator,
            cache_dir=self.cache_dir,
            stall_seconds=60 * self.stall_minutes,
        )


def parse_shard(text: str) -> tuple[int, int]:
    """
    >>> parse_shard("2/4")
    (2, 4)
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if not found:
        raise InputError(f"shard is i/n, such as 1/4 for the first of four machines; got '{text}'.")
    return int(found[1]), int(found[2])


@dataclass
class SweepSummary:
    """The names of all cells, and of those that ended by how they did; failed ones with the reason."""

    names: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # had a result before
    failed: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.time)
    signal: int = 0  # number of the signal that stopped the sweep

    @property
    def exit_code(self) -> int:
        """Of the command: as a shell reports a signal, 1 if a cell failed, else 0."""
        return 128 + self.signal if self.signal else int(bool(self.failed))

    @property
    def unfinished(self) -> list[str]:
        ended = {*self.done, *self.skipped, *self.failed}
        return [name for name in self.names if name not in ended]

    @property
    def minutes(self) -> float:
        return (time.time() - self.began) / 60

    def text(self) -> str:
        """What happened to the cells, for a terminal; kinds without a cell are not mentioned.

        >>> print(SweepSummary(["a", "b", "c"], done=["a"], skipped=["b", "c"]).text())
        1 run done in 0.0 minutes; 2 runs had their result already.
        """
        had = _runs(self.skipped) + (" had its" if len(self.skipped) == 1 else " had their") + " result already"
        counts = [f"{_runs(self.done)} done in {self.minutes:.1f} minutes"] if self.done else []
        counts += [had] if self.skipped else []
        lines = [f"stopped by signal {self.signal}."] if self.signal else []
        lines += ["; ".join(counts) + "." if counts else f"no run done in {self.minutes:.1f} minutes."]
        if self.unfinished:
            names = ", ".join(self.unfinished)
            lines.append(f"{len(self.unfinished)} unfinished, continue with the same command: {names}")
        lines += [f"failed: {name}: {reason}" for name, reason in self.failed.items()]
        return "\n".join(lines)


def _runs(names: Sequence[str]) -> str:
    return f"{len(names)} run{'' if len(names) == 1 else 's'}"


class SweepLog:
    """log.jsonl beside the results: one line per command, with what was requested and the minutes it took.

    The line is rewritten whenever a cell ends, so that it exists even if the machine stops. A shard has a file of its
    own, because the others may write at the same time.
    """

    def __init__(self, results: Path, requested: Mapping[str, Any], shard: tuple[int, int] = (1, 1)) -> None:
        name = "log.jsonl" if shard[1] == 1 else f"log-{shard[0]}-of-{shard[1]}.jsonl"
        self.path, self.requested = results / name, requested
        self.earlier: str | None = None

    def write(self, summary: SweepSummary) -> None:
        if self.earlier is None:
            self.earlier = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        line = {
            "began": datetime.fromtimestamp(summary.began, timezone.utc).isoformat(timespec="seconds"),
            **self.requested,
            "done": summary.done,
            "unfinished": len(summary.unfinished),
            "failed": len(summary.failed),
            "minutes": round(summary.minutes, 2),
        }
        make_folder(self.path.parent)
        write_whole(self.path, self.earlier + json.dumps(line) + "\n")
