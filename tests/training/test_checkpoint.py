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
from cclnet.runs.checksums import verify_folder
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
    with pytest.warns(UserWarning, match=r"epoch-000002.*refused.*could run code.*goes on from.*epoch-000001"):
        assert load_latest(tmp_path)["epoch"] == 1
    assert evil.with_name(f"{evil.name}.refused").exists()
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


@pytest.mark.parametrize("damage", ["bit", "cut", "empty"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_it(tmp_path: Path, damage: str) -> None:
    for epoch in (1, 2):
        save_checkpoint(tmp_path, state(float(epoch)), epoch, 0)
    newest = checkpoints(tmp_path)[-1]
    content = bytearray(newest.read_bytes())
    content[content.index(torch.full((3,), 2.0).numpy().tobytes()) + 5] ^= 1  # one bit of a weight
    newest.write_bytes({"bit": content, "cut": content[:200], "empty": b""}[damage])
    reason = {"bit": "SHA-256", "cut": "SHA-256", "empty": "0 bytes"}[damage]
    with pytest.warns(UserWarning, match=rf"epoch-000002.*{reason}.*goes on from.*epoch-000001"):
        assert load_latest(tmp_path)["epoch"] == 1
    save_checkpoint(tmp_path, state(3), 1, 7)  # the good one is kept, although the refused one had a later name
    assert [path.name for path in checkpoints(tmp_path)] == [
        "epoch-000001-step-00000000.pt", "epoch-000001-step-00000007.pt"]  # fmt: skip
    assert "missing" not in dict(verify_folder(tmp_path)).values()


def test_without_a_good_checkpoint_every_reason_is_given(tmp_path: Path) -> None:
    for epoch in (1, 2):
        save_checkpoint(tmp_path, state(epoch), epoch, 0)
        checkpoints(tmp_path)[-1].write_bytes(b"")
    with pytest.raises(InputError, match=r"epoch-000002.*0 bytes.*epoch-000001.*0 bytes"):
        load_latest(tmp_path)
    assert len(checkpoints(tmp_path)) == 2


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
    assert "File too large" in done.stdout  # the reason that the disk gave, and not torch's
    assert sorted(path.name for path in tmp_path.iterdir()) == ["SHA256SUMS", "epoch-000001-step-00000000.pt"]
    assert load_latest(tmp_path)["epoch"] == 1
