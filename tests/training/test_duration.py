"""The expected time of a run: arithmetic, advice, and that measuring changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cclnet.data.sources import open_data
from cclnet.runs.folder import RunFolder
from cclnet.settings import make_settings
from cclnet.training import duration
from cclnet.training.console import Display
from cclnet.training.duration import RunLength, first_estimate, seconds_per_image

CPU = torch.device("cpu")
SPLITS = np.array(["train"] * 1000 + ["val"] * 300)


def test_the_expected_time_counts_steps_and_validations() -> None:
    settings = make_settings({"epochs": 10, "batch_size": 100, "validate_every": 2})
    length = RunLength.of(settings, SPLITS, CPU)
    assert (length.images, length.steps, length.left) == (1000, 10, 100)
    # 100 steps, and 5 validations of 3 batches at a third of a step each
    assert length.seconds(6.0) == pytest.approx(6.0 * (100 + 15 / 3))
    resumed = RunLength.of(settings, SPLITS, CPU, steps=10, done=80)
    assert resumed.left == 20 and resumed.seconds(6.0) == pytest.approx(6.0 * (20 + 3 / 3))


def test_a_long_run_on_a_cpu_names_the_preset() -> None:
    length = RunLength.of(make_settings({"epochs": 10, "batch_size": 100}), SPLITS, CPU)
    short, hour, day = (length.lines(seconds, "measured") for seconds in (0.1, 36.0, 1000.0))
    assert short == [] and len(hour) == 1
    assert "1,000 training images" in hour[0] and "100 steps" in hour[0] and "36 s per step" in hour[0]
    assert "CPU" in hour[0] and f"expected time {36 * 110 / 60:.0f} minutes" in hour[0]
    assert len(day) == 2 and f"--preset {duration.CPU_PRESET}" in day[1]
    assert len(replace(length, on_cpu=False).lines(1000.0, "measured")) == 1
    small = replace(length, crop=96).lines(1000.0, "measured")
    assert len(small) == 2 and "--preset" not in small[1] and "--epochs" in small[1]  # it is that small already
    cut = replace(length, max_minutes=30.0).lines(1000.0, "measured")
    assert len(cut) == 1 and "30 minutes (max_minutes)" in cut[0]


def test_the_probe_leaves_the_random_state_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings({"backbone": "test_resnet", "augment": {"crop": 28}, "short_side": 32, "batch_size": 8})
    for name in ("synthetic:images=40,size=32", "synthetic-multilabel:images=40,size=32"):
        table = open_data(name)
        chosen = replace(settings, method="ccl-multilabel" if table.multilabel else "ccl")
        splits = np.array(["train"] * len(table))
        before = torch.get_rng_state()
        assert 0 < seconds_per_image(chosen, table, splits) < 10
        assert torch.equal(before, torch.get_rng_state())
    assert first_estimate(chosen, table, splits, CPU) == []  # short: not measured
    monkeypatch.setattr(duration, "PROBED_RUN", 0)
    monkeypatch.setattr(duration, "WORTH_A_LINE", 0.0)
    assert "first estimate" in first_estimate(chosen, table, splits, CPU)[0]


def test_the_second_estimate_comes_after_three_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 100.0, 110.0, 120.0, 121.0])
    monkeypatch.setattr("cclnet.training.console.time.monotonic", lambda: next(clock))
    length = RunLength.of(make_settings({"epochs": 10, "batch_size": 100}), SPLITS, CPU)
    display = Display(RunFolder(tmp_path), length, show=True, logger="none")
    for step in range(4):
        display.step(0, step, 100, 0.0, torch.ones(1), "")
        assert ("10 s per step" in capsys.readouterr().out) == (step == 2)
