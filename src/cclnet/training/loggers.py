"""The history of a run for other tools, through Lightning's loggers: TensorBoard, CSV, MLflow, Weights & Biases.

metrics.jsonl is always written and is what cclnet reads; these are copies for the user.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
from torch import Tensor

from cclnet.errors import InputError
from cclnet.runs.folder import RunFolder, flattened
from cclnet.settings import LOGGERS

PROJECT = "cclnet"  # experiment of MLflow, project of Weights & Biases
_RUN_TAG = "cclnet.run"  # by which a resumed run finds its run in MLflow


class Loggers:
    """The loggers named in the settings, on rank 0; they are opened when training begins.

    Args:
        names: as ``Settings.logger``: separated by commas, "none", or "" for TensorBoard where it is installed.
    """

    def __init__(self, names: str, run: RunFolder) -> None:
        chosen = names or ("tensorboard" if find_spec("tensorboard") else "none")
        self.names = [] if chosen == "none" else list(dict.fromkeys(name.strip() for name in chosen.split(",")))
        self.run, self.opened = run, dict[str, Any]()

    def __enter__(self) -> Loggers:
        done = self.run.read_history()
        for name in self.names:
            try:
                self.opened[name] = _OPEN[name](self.run, len(done))
            except ImportError as error:  # ModuleNotFoundError of Lightning or of the tool itself
                raise InputError(f"logger '{name}' needs a further package: pip install 'cclnet[{name}]'.") from error
        for record in done if "csv" in self.opened else ():  # Lightning's CSV file begins anew
            self.opened["csv"].log_metrics(_scalars(record), int(record["epoch"]))
        parameters = {name: str(value) for name, value in flattened(self.run.read_settings_table())}
        for name in {"mlflow", "wandb"} & self.opened.keys():
            self.opened[name].log_hyperparams(parameters)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for name, logger in self.opened.items():
            logger.finalize("success" if kind is None else "failed")
            if name == "wandb":
                logger.experiment.finish(exit_code=int(kind is not None))

    def log(self, record: Mapping[str, Any], soft_labels: Tensor | None = None) -> None:
        """Log the record of an epoch; the soft labels, if given, as a picture where the tool shows pictures."""
        epoch = int(record["epoch"])
        for logger in self.opened.values():
            logger.log_metrics(_scalars(record), epoch)
            logger.save()
        if soft_labels is None:
            return
        if "tensorboard" in self.opened:
            writer = self.opened["tensorboard"].experiment
            writer.add_image("soft labels", matrix_image(soft_labels), epoch, dataformats="HWC")
            writer.flush()
        if "wandb" in self.opened:
            self.opened["wandb"].log_image("soft labels", [matrix_image(soft_labels)], step=epoch)


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in record.items() if name != "epoch" and isinstance(value, (int, float))}


def _tensorboard(run: RunFolder, done: int) -> Any:
    from lightning.fabric.loggers import TensorBoardLogger

    again = {"purge_step": done + 1} if done else {}  # what a resumed run repeats
    logger = TensorBoardLogger(run.path, run.tensorboard.name, version="", **again)
    logger.experiment  # noqa: B018  # opens the file
    return logger


def _csv(run: RunFolder, done: int) -> Any:
    from lightning.fabric.loggers import CSVLogger

    (run.path / "csv" / "metrics.csv").unlink(missing_ok=True)  # else Lightning warns that it deletes it
    return CSVLogger(run.path, "csv", version="")


def _mlflow(run: RunFolder, done: int) -> Any:
    """At MLFLOW_TRACKING_URI, else in the file mlflow.db beside the run folder."""
    from lightning.pytorch.loggers import MLFlowLogger
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    for name in ("lightning.pytorch.loggers.mlflow", "mlflow.store.db.utils", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)  # that the experiment and the database are new
    address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.path.resolve().parent / 'mlflow.db'}"
    identity, found = _identity(run), None
    try:
        client = MlflowClient(address)
        experiment = client.get_experiment_by_name(PROJECT) if done else None
        if experiment is not None:
            wanted = f"tags.`{_RUN_TAG}` = '{identity}'"
            found = next(iter(client.search_runs([experiment.experiment_id], wanted)), None)
        logger = MLFlowLogger(
            PROJECT, run.path.resolve().name, tracking_uri=address, tags={_RUN_TAG: identity},
            run_id=found.info.run_id if found else None,
        )  # fmt: skip
        logger.experiment  # noqa: B018  # opens the run
    except (MlflowException, OSError) as error:
        raise InputError(f"MLflow at {address} does not answer: {error}. Set MLFLOW_TRACKING_URI.") from error
    return logger


def _wandb(run: RunFolder, done: int) -> Any:
    """Where Weights & Biases is set up to write; WANDB_MODE=offline keeps it in the run folder."""
    from lightning.pytorch.loggers import WandbLogger

    project = os.environ.get("WANDB_PROJECT", PROJECT)
    logger = WandbLogger(
        run.path.resolve().name, str(run.path), id=_identity(run), project=project, log_model=False, resume="allow"
    )
    logger.experiment  # noqa: B018  # opens the run
    return logger


_OPEN = {"tensorboard": _tensorboard, "csv": _csv, "mlflow": _mlflow, "wandb": _wandb}
assert (*_OPEN, "none") == LOGGERS


def _identity(run: RunFolder) -> str:
    """A name that a resumed run has again, and a new run in a folder of the same name has not."""
    of_run = f"{run.path.resolve()} {run.settings.stat().st_mtime_ns}"
    return hashlib.blake2b(of_run.encode(), digest_size=8).hexdigest()


def matrix_image(matrix: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a [K, K] matrix as an image [H, W, 3] with cells of at least 16 pixels."""
    from matplotlib import colormaps

    values = matrix.float().cpu().numpy()
    cell = max(16, 224 // len(values))
    colours = colormaps["viridis"](values / max(float(values.max()), 1e-12))[..., :3]
    return (colours * 255).astype(np.uint8).repeat(cell, axis=0).repeat(cell, axis=1)
