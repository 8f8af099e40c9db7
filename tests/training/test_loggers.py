"""The history of a run in other tools: what metrics.jsonl says, also after a stop and a resume."""

from __future__ import annotations

import csv
import json
import sys
import time
from pathlib import Path

import pytest

from cclnet import InputError
from cclnet.runs.folder import RunFolder
from cclnet.settings import make_settings
from cclnet.training.loggers import Loggers
from cclnet.training.loop import train

SETTINGS = {
    "data": "synthetic:images=60", "backbone": "test_resnet", "short_side": 36, "augment": {"crop": 32}, "epochs": 2,
    "batch_size": 16, "method": "hard",
}  # fmt: skip
RECORDS = [
    {"epoch": 1, "loss": 2.0, "lr": 0.1, "val_accuracy": 0.25},
    {"epoch": 2, "loss": 1.0, "lr": 0.01, "val_accuracy": 0.5},
    {"epoch": 3, "loss": 0.5, "lr": 0.01, "val_accuracy": 0.75},
]


def made_run(folder: Path, logger: str) -> RunFolder:
    run = RunFolder(folder)
    run.create(make_settings({**SETTINGS, "logger": logger}))
    return run


def log_in_two_parts(run: RunFolder, logger: str) -> None:
    """One epoch, then a resumed run with the two others."""
    for start, end in ((0, 1), (1, 3)):
        with Loggers(logger, run) as loggers:
            for record in RECORDS[start:end]:
                loggers.log(record)
        run.history.write_text("".join(json.dumps(record) + "\n" for record in RECORDS[:end]))


def test_a_training_run_in_a_csv_file(tmp_path: Path) -> None:
    path = train(make_settings({**SETTINGS, "logger": "csv"}), tmp_path / "run", accelerator="cpu", progress=False)
    rows = list(csv.DictReader((path / "csv" / "metrics.csv").open()))
    history = RunFolder(path).read_history()
    assert [int(row["step"]) for row in rows] == [1, 2] and not (path / "tensorboard").exists()
    assert [float(row["loss"]) for row in rows] == pytest.approx([record["loss"] for record in history])


def test_a_resumed_run_keeps_its_csv_file(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", "csv")
    log_in_two_parts(run, "csv")
    rows = list(csv.DictReader((run.path / "csv" / "metrics.csv").open()))
    assert [(float(row["loss"]), float(row["val_accuracy"])) for row in rows] == [(2, 0.25), (1, 0.5), (0.5, 0.75)]


def test_tensorboard_has_every_epoch_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = made_run(tmp_path / "run", "")
    log_in_two_parts(run, "")  # the default where it is installed
    events = accumulator.EventAccumulator(str(run.tensorboard)).Reload()
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [(1, 2.0), (2, 1.0), (3, 0.5)]


def test_mlflow_has_one_run_with_every_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = made_run(tmp_path / "run", "mlflow")
    log_in_two_parts(run, "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("cclnet").experiment_id])
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(1, 2.0), (2, 1.0), (3, 0.5)]
    assert found.info.run_name == "run" and found.info.status == "FINISHED"
    assert found.data.params["backbone"] == "test_resnet"


def test_wandb_offline_keeps_its_files_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = made_run(tmp_path / "run", "wandb")
    with Loggers("wandb", run) as loggers:
        loggers.log(RECORDS[0])
        assert loggers.opened["wandb"].experiment.summary["loss"] == 2.0
    (kept,) = (run.path / "wandb").glob("offline-run-*/*.wandb")
    until = time.monotonic() + 30  # its own process writes the file, sometimes 0.1 s after finish() has returned
    while kept.stat().st_size <= 1000 and time.monotonic() < until:
        time.sleep(0.05)
    assert kept.stat().st_size > 1000


def test_none_writes_nothing(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", "none")
    log_in_two_parts(run, "none")
    assert sorted(path.name for path in run.path.iterdir()) == ["metrics.jsonl", "settings.toml"]


def test_without_tensorboard_the_default_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cclnet.training.loggers.find_spec", lambda name: None)
    assert Loggers("", made_run(tmp_path / "run", "")).names == []


def test_an_unknown_or_missing_logger_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="tensorboard"):
        make_settings({**SETTINGS, "logger": "csv,tensorbord"})
    run = made_run(tmp_path / "run", "mlflow")
    for name in ("mlflow", "mlflow.exceptions", "mlflow.tracking"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=r"cclnet\[mlflow\]"), Loggers("mlflow", run):
        pass
