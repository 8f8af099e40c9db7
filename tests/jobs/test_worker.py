"""One job in this process: stopped and gone on with, judged, refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cclnet import InputError
from cclnet.evaluation.evaluate import evaluate
from cclnet.settings import make_settings
from cclnet.sweep.cells import Job, Work
from cclnet.sweep.local import OutOfTime, judge_job, train_job

SETTINGS: dict[str, Any] = {
    "data": "synthetic:images=84,size=32", "backbone": "test_resnet",
    "short_side": 32, "epochs": 3, "batch_size": 16, "lr": 0.02, "method_settings": {"widths": [16, 8], "patience": 2},
    "split": {"by": "class", "val": 0.25}, "augment": {"crop": 28}, "deterministic": True,
}  # fmt: skip
JOB = Job("ccl-seed0", make_settings(SETTINGS))


def work(folder: Path) -> Work:
    return Work(folder / "runs", folder / "results", accelerator="cpu", cache_dir=folder / "cache")


def test_a_job_out_of_time_goes_on_to_the_same_end(tmp_path: Path) -> None:
    whole, stopped, told = work(tmp_path / "whole"), work(tmp_path / "stopped"), []
    train_job(JOB, whole, told.append)
    assert len(told) == 3 and told[0].startswith("epoch 1/3, ") and "softness" in told[0]
    with pytest.raises(OutOfTime):
        train_job(JOB, replace(stopped, deadline=0.0), told.append)
    assert len(told) == 4 and not stopped.is_trained(JOB)
    train_job(JOB, stopped, told.append)
    assert [words.partition(",")[0] for words in told[4:]] == ["epoch 2/3", "epoch 3/3"]
    predictions = [(w.run_folder(JOB) / "predictions.csv").read_bytes() for w in (whole, stopped)]
    assert predictions[0] == predictions[1] and stopped.is_trained(JOB)

    words = judge_job(JOB, stopped)
    result = json.loads((stopped.results / f"{JOB.name}.json").read_text())
    assert f"accuracy {result['scores']['accuracy']['value']:.4f}" in words
    assert not (stopped.run_folder(JOB) / "checkpoints").exists()
    assert (result["epochs"], result["images"], len(result["softness"])) == (3, 63, 3)
    assert result["images_per_second"] > 0 and result["settings"]["method_settings"]["widths"] == [16, 8]
    again = evaluate(stopped.results / f"{JOB.name}.json")
    for name in ("accuracy", "kappa", "macro_f1"):
        assert again.overall[name].value == pytest.approx(result["scores"][name]["value"], abs=1e-6)


def test_a_run_begun_with_other_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    with pytest.raises(OutOfTime):
        train_job(JOB, replace(work(tmp_path), deadline=0.0), lambda words: None)
    other = make_settings(SETTINGS, {"epochs": 4, "lr": 0.5})
    with pytest.raises(InputError, match=r"begun with other settings \(epochs was 3, is 4; lr was 0.02, is 0.5\)"):
        train_job(replace(JOB, settings=other), work(tmp_path), lambda words: None)
