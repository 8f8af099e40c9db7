from __future__ import annotations

from pathlib import Path

import pytest
from fake_run import MakeRun

from cclnet.errors import InputError
from cclnet.report.html import RunFiles, flat_settings, read_run


def test_a_run_folder_has_settings_and_epochs(make_run: MakeRun) -> None:
    found = read_run(make_run())
    assert len(found.records) == 40 and found.settings["split"] == {"by": "group", "val": 0.2}


def test_a_file_alone_has_neither(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    assert read_run(run / "predictions.csv") == RunFiles(run)
    assert read_run(tmp_path) == RunFiles(tmp_path)  # a folder without them


def test_broken_files_are_named(make_run: MakeRun) -> None:
    run = make_run()
    (run / "metrics.jsonl").write_text('{"epoch": 1, "loss": 1.0}\n{"epoch": 2, "lo')
    with pytest.raises(InputError, match=r"metrics.jsonl, line 2 is not JSON"):
        read_run(run)
    (run / "metrics.jsonl").write_text("[1, 2]\n")
    with pytest.raises(InputError, match=r"line 1: expected an object with an 'epoch', got '\[1, 2\]'"):
        read_run(run)
    (run / "settings.toml").write_text("lr = = 1")
    with pytest.raises(InputError, match=r"settings.toml is not valid TOML"):
        read_run(run)


def test_settings_are_listed_as_they_would_be_given() -> None:
    settings = {"deterministic": True, "drops": [0.5, 0.75], "split": {"by": "group"}}
    assert list(flat_settings(settings)) == [("deterministic", "true"), ("drops", "0.5, 0.75"), ("split.by", "group")]
