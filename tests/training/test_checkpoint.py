"""Checkpoints: written whole, the last two kept, no pickled objects."""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cclnet import InputError
from cclnet.training.checkpoint import checkpoints, load_checkpoint, load_latest, save_checkpoint


def state(value: float) -> dict:
    return {"network": {"w": torch.full((3,), value)}, "epoch": int(value)}


def test_the_last_two_are_kept_and_the_newest_is_loaded(tmp_path: Path) -> None:
    for epoch in range(5):
        save_checkpoint(tmp_path, state(epoch), epoch, 0)
    assert [path.name for path in checkpoints(tmp_path)] == [
        "epoch-000003-step-00000000.pt", "epoch-000004-step-00000000.pt"]  # fmt: skip
    assert load_latest(tmp_path)["epoch"] == 4
    assert load_latest(tmp_path / "nothing") is None


def test_a_checkpoint_inside_an_epoch_is_newer_than_the_epoch_before(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1), 1, 0)
    save_checkpoint(tmp_path, state(2), 1, 37)
    assert load_latest(tmp_path)["epoch"] == 2


class Evil:
    def __reduce__(self) -> tuple:
        return os.system, ("touch should-not-exist",)


def test_pickled_objects_are_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path, state(1), 1, 0)
    evil = tmp_path / "epoch-000002-step-00000000.pt"
    torch.save({"network": Evil()}, evil)
    with pytest.raises(InputError, match=r"refused.*could run code.*resume from epoch-000001"):
        load_latest(tmp_path)
    evil.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(InputError, match="refused"):
        load_checkpoint(evil)
    assert not (tmp_path / "should-not-exist").exists()


def test_files_that_are_not_checkpoints(tmp_path: Path) -> None:
    torch.save({"weights": torch.ones(2)}, tmp_path / "other.pt")
    with pytest.raises(InputError, match="not a cclnet checkpoint"):
        load_checkpoint(tmp_path / "other.pt")
    save_checkpoint(tmp_path, state(1), 1, 0)
    whole = checkpoints(tmp_path)[0]
    whole.write_bytes(whole.read_bytes()[:100])
    with pytest.raises(InputError, match=r"refused|cannot be read"):
        load_checkpoint(whole)


def test_an_unwritable_folder_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InputError, match="no earlier checkpoint"):
        save_checkpoint(tmp_path / "file" / "checkpoints", state(1), 1, 0)


FULL_DISK = """
import resource, sys, torch
from pathlib import Path
from cclnet import InputError
from cclnet.training.checkpoint import save_checkpoint
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
save_checkpoint(folder, {"network": {"w": torch.ones(1000)}, "epoch": 1}, 1, 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_checkpoint(folder, {"network": {"w": torch.ones(1_000_000)}, "epoch": 2}, 2, 0)
except InputError as error:
    print(error)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="no file size limit on this system")
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """A file size limit simulates the full disk: the write fails in the middle."""
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "could not be written" in done.stdout and "epoch-000001-step-00000000.pt is intact" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-000001-step-00000000.pt"]
    assert load_latest(tmp_path)["epoch"] == 1
