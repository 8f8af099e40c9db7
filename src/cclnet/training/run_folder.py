"""A run is a folder: enough to run it again, to score it again without the model, and to ship it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from cclnet.correlation_file import write_correlation
from cclnet.errors import InputError
from cclnet.files import write_whole
from cclnet.training.settings import Settings, make_settings, read_settings, to_toml


class RunFolder:
    """The files of a run, by name."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.settings = self.path / "settings.toml"
        self.split = self.path / "split.csv"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.weights = self.path / "model.safetensors"
        self.model = self.path / "model.json"
        self.correlation = self.path / "correlation.csv"
        self.predictions = self.path / "predictions.csv"
        self.tensorboard = self.path / "tensorboard"

    def create(self, settings: Settings) -> None:
        """Make the folder for a new run. One that holds a run already is left alone."""
        if self.settings.exists():
            raise InputError(
                f"{self.path} holds a run already. Go on with it: cclnet train --resume {self.path}; "
                "or choose another --out."
            )
        if left := [path.name for path in self._of_a_run() if path.exists()]:
            raise InputError(f"{self.path} has {', '.join(left)} of another run: remove them, or choose another --out.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"the run folder {self.path} cannot be made: {error.strerror}. Choose another --out."
            ) from error
        write_whole(self.settings, to_toml(settings))

    def discard(self) -> None:
        """Take a folder back in which nothing was trained that could be gone on with."""
        if any(self.checkpoints.glob("*.pt")):
            return
        for path in (self.settings, *self._of_a_run()):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def _of_a_run(self) -> tuple[Path, ...]:
        """What a run writes while it trains, beside its settings."""
        return self.split, self.metrics, self.checkpoints, self.tensorboard

    def read_settings(self) -> Settings:
        if not self.settings.exists():
            raise InputError(f"{self.path} holds no run to resume (no settings.toml): start it with --out.")
        return make_settings(read_settings(self.settings))

    def read_metrics(self) -> list[dict[str, Any]]:
        """One record for each epoch so far."""
        if not self.metrics.exists():
            return []
        return [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]

    def write_metrics(self, records: Sequence[Mapping[str, Any]]) -> None:
        write_whole(self.metrics, "".join(json.dumps(record) + "\n" for record in records))

    def write_model(self, state: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
        from safetensors.torch import save

        write_whole(self.weights, save({name: value.contiguous().cpu() for name, value in state.items()}))
        write_whole(self.model, json.dumps(description, indent=1, ensure_ascii=False) + "\n")

    def write_correlation(self, matrix: Tensor, classes: Sequence[str]) -> None:
        write_correlation(self.correlation, classes, matrix.double().cpu().numpy())


def free_name(folder: Path, settings: Settings) -> Path:
    """A folder that is not there yet, named after what is run in it."""
    stem = Path(settings.data.partition(":")[0]).stem or "data"
    name = f"{stem}-{settings.backbone}-{settings.method}-seed{settings.seed}"
    for number in range(1, 10_000):
        path = folder / (name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return path
    raise InputError(f"there are too many runs called {name} in {folder}: give --out.")

