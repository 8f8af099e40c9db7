"""Checkpoints: written whole, the last two kept, loaded without pickled code."""

from __future__ import annotations

import pickle
import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from cclnet.errors import InputError
from cclnet.files import write_whole

KEPT = 2
_NAME = re.compile(r"epoch-(\d{6})-step-(\d{8})\.pt")


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    found = folder.glob("epoch-*-step-*.pt") if folder.is_dir() else ()
    return sorted(path for path in found if _NAME.fullmatch(path.name))


def save_checkpoint(folder: Path, state: dict[str, Any], epoch: int, step: int) -> Path:
    """Write the state after ``epoch`` whole epochs and ``step`` steps of the next; keep the last two checkpoints.

    If it cannot be written, the error names the previous checkpoint, which is kept.
    """
    path = folder / f"epoch-{epoch:06d}-step-{step:08d}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: torch.save(state, file))
    except (OSError, InputError, RuntimeError) as error:  # torch's writer reports a full disk as RuntimeError
        previous = checkpoints(folder)
        kept = f"{previous[-1]} is intact and can be resumed" if previous else "there is no earlier checkpoint"
        raise InputError(f"the checkpoint {path.name} could not be written ({error}); {kept}.") from error
    for old in checkpoints(folder)[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


class CheckpointWriter:
    """Writes checkpoints in a thread: ``save`` copies the state and returns before it is on the disk.

    An error is raised by the next ``save`` or by ``close``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: Future[Path] | None = None

    def save(self, state: dict[str, Any], epoch: int, step: int) -> None:
        self.close()
        thread = ThreadPoolExecutor(1)
        self._written = thread.submit(save_checkpoint, self.folder, _copy_to_cpu(state), epoch, step)
        thread.shutdown(wait=False)  # the thread ends when the checkpoint is written

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        written, self._written = self._written, None
        if written is not None:
            written.result()


def _copy_to_cpu(value: Any) -> Any:
    """Return the same nested state with its tensors copied to the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy_to_cpu(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy_to_cpu(item) for item in value]
    return value


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Load a checkpoint; files that contain anything but tensors and plain values are refused."""
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} is refused: it is damaged, or holds pickled objects, which could run code. "
            "Only checkpoints written by cclnet are loaded."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(state, dict) or "network" not in state:
        raise InputError(f"{path} is not a cclnet checkpoint.")
    return state


def load_latest(folder: Path, device: torch.device | str = "cpu") -> dict[str, Any] | None:
    """Load the newest checkpoint of a run; None if there is none.

    An unreadable checkpoint is not skipped: the error names the older one that could be used instead.
    """
    found = checkpoints(folder)
    if not found:
        return None
    try:
        return load_checkpoint(found[-1], device)
    except InputError as error:
        older = f" Remove it to resume from {found[-2].name}." if len(found) > 1 else ""
        raise InputError(f"{error}{older}") from error
