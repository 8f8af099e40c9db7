"""Checkpoints: written whole with a checksum, the last two kept, loaded without pickled code."""

from __future__ import annotations

import pickle
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from cclnet.errors import InputError, first_line
from cclnet.runs.checksums import CHECKPOINT, checking, remove_covered, uncover, write_covered

KEPT = 2
_KINDS: dict[str, Any] = {
    "network": dict, "optimizer": dict, "average": (dict, type(None)), "epoch": int, "steps": int,
    "sums": (torch.Tensor, type(None)), "terms": (list, tuple), "seconds": (int, float), "best": dict,
    "random": torch.Tensor, "device_random": torch.Tensor,
}  # fmt: skip


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    found = folder.glob("epoch-*-step-*.pt") if folder.is_dir() else ()
    return sorted(path for path in found if CHECKPOINT.fullmatch(path.name))


def save_checkpoint(folder: Path, state: dict[str, Any], epoch: int, step: int) -> Path:
    """Write the state after ``epoch`` whole epochs and ``step`` steps of the next; keep the last two checkpoints.

    If it cannot be written, the error names the previous checkpoint, which is kept.
    """
    path = folder / f"epoch-{epoch:06d}-step-{step:08d}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_covered(path, lambda file: torch.save(state, file))
    except (OSError, InputError, RuntimeError) as error:  # torch's writer reports a full disk as RuntimeError
        previous = checkpoints(folder)
        kept = f"{previous[-1]} is intact and can be resumed" if previous else "there is no earlier checkpoint"
        raise InputError(f"the checkpoint {path.name} could not be written ({error}); {kept}.") from error
    if outdated := checkpoints(folder)[:-KEPT]:
        remove_covered(*outdated)
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


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint to the CPU; a damaged file, or one with anything but tensors and plain values, is refused."""
    if path.is_file() and path.stat().st_size == 0:
        raise InputError(f"{path} is empty (0 bytes): the disk was full, or lost it in a power failure.")
    try:
        with checking(path):
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} is refused: it is damaged, or holds pickled objects, which could run code. "
            "Only checkpoints written by cclnet are loaded."
        ) from error
    except InputError:
        raise
    except Exception as error:  # damaged bytes make torch's reader fail in any way
        raise InputError(f"{path} cannot be read: {first_line(error)}.") from error
    if not isinstance(state, dict) or "network" not in state:
        raise InputError(f"{path} is not a cclnet checkpoint.")
    wrong = [name for name, kind in _KINDS.items() if name in state and not isinstance(state[name], kind)]
    if wrong:
        raise InputError(f"{path} is not a cclnet checkpoint: {', '.join(wrong)} are of another kind.")
    return state


def load_latest(folder: Path, set_aside: bool = True) -> dict[str, Any] | None:
    """Load the newest checkpoint of a run that can be used; None if there is none at all.

    A warning says which newer one was refused and why. With ``set_aside`` that file is renamed, so that it does not
    count as one of the checkpoints to keep.
    """
    found = checkpoints(folder)
    refused: dict[Path, InputError] = {}
    for path in reversed(found):
        try:
            state = load_checkpoint(path)
        except InputError as error:
            refused[path] = error
            continue
        for bad, reason in refused.items():
            warnings.warn(f"{reason} The run goes on from the checkpoint before it, {path.name}.", stacklevel=2)
            if set_aside:
                uncover(bad)
                bad.rename(bad.with_name(f"{bad.name}.refused"))
        return state
    if found:
        reasons = " ".join(str(error) for error in refused.values())
        raise InputError(f"no checkpoint in {folder} can be used. {reasons}")
    return None
