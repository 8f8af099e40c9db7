"""Where a result comes from: source commit, versions, a hash of the settings."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

COMMIT_VARIABLE = "CCLNET_COMMIT"  # for a source tree copied without its history: "<sha>" or "<sha>-dirty"
PACKAGES = ("torch", "torchvision", "timm", "lightning", "numpy")


@dataclass(frozen=True)
class Commit:
    """The commit of the source tree; ``clean`` is False where tracked files differed from it."""

    sha: str
    clean: bool


@cache
def source_commit() -> Commit | None:
    """The commit of the source tree this package is imported from; None for an installed package."""
    if given := os.environ.get(COMMIT_VARIABLE):
        sha, _, dirty = given.partition("-")
        return Commit(sha, not dirty)
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        sha = _git(root, "rev-parse", "HEAD")
        return Commit(sha, not _git(root, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):  # git is not installed, or refuses a tree of another user
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits that identify nested settings, whatever the order of their keys.

    >>> settings_hash({"lr": 0.1, "seed": 0}) == settings_hash({"seed": 0, "lr": 0.1})
    True
    """
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


def origin(device: str = "") -> dict[str, Any]:
    """What a result file says of its origin: the commit, the versions and the device; by default this machine's CPU."""
    commit = source_commit()
    return {
        "commit": None if commit is None else {"sha": commit.sha, "clean": commit.clean},
        "versions": versions(),
        "device": device or f"CPU, {os.cpu_count()} cores",
    }


def versions() -> dict[str, str]:
    """Versions of Python, cclnet and the packages that decide a training run."""
    return {"python": platform.python_version()} | package_versions(PACKAGES)


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of cclnet and of the given packages."""
    from cclnet import __version__  # a source tree need not be installed

    return {"cclnet": __version__} | {name: version(name) for name in names}
