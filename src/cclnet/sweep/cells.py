"""What is to be run: a job is one training run of an experiment, and all jobs share where they work and how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cclnet.runs.folder import RunFolder
from cclnet.settings import Settings

# Settings in which what is kept of a run may differ from what is asked for and still be the same run.
INCIDENTAL = ("follow_links", "resident", "compile", "max_minutes", "validate_every")


@dataclass(frozen=True)
class Job:
    """One training run of an experiment.

    Attributes:
        name: of its run folder and of its result; ends in the seed, "-seed0".
        settings: what to train.
        keys: what tells it from the others, as plain values; kept in its result.
        shelf: the folder of its result inside that of all results.
        images: the fingerprint of the images and labels; empty where it is not asked for.
        incidental: settings in which what was kept of it before may differ.
    """

    name: str
    settings: Settings
    keys: Mapping[str, Any] = field(default_factory=dict)
    shelf: str = ""
    images: str = ""
    incidental: tuple[str, ...] = INCIDENTAL


@dataclass(frozen=True)
class Work:
    """What all jobs share. It is sent to every process.

    Attributes:
        runs: the folder in which each job has its run folder.
        results: the folder of results.
        deadline: when training stops, in seconds of ``time.time()``; infinite for never.
        accelerator, cache_dir: as in ``train``.
    """

    runs: Path
    results: Path
    deadline: float = float("inf")
    accelerator: str = "auto"
    cache_dir: Path | None = None

    def run_folder(self, job: Job) -> Path:
        return self.runs / job.name

    def result(self, job: Job) -> Path:
        """Where the result of a job is, or will be."""
        return self.results / job.shelf / f"{job.name}.json"

    def is_trained(self, job: Job) -> bool:
        return RunFolder(self.run_folder(job)).predictions.exists()  # the last file of a run
