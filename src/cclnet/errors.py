"""Errors a user can meet: each says what was expected, what came, and what to do next."""

from __future__ import annotations

import difflib
import shlex
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """Something that was given cannot be used. The command line prints the message alone."""


class NotFinite(InputError):
    """Numbers that should be finite are NaN or infinite: training has diverged, or its input is broken."""


def resume_command(run: Path) -> str:
    """The command that continues a run, to be pasted into a shell.

    >>> resume_command(Path("runs/my run"))
    "cclnet train --resume 'runs/my run'"
    """
    return f"cclnet train --resume {shlex.quote(str(run))}"


class Interrupted(Exception):
    """A signal ended the run between two steps; a checkpoint was written."""

    def __init__(self, run: Path, signal: int) -> None:
        super().__init__(f"stopped by signal {signal}. Continue with: {resume_command(run)}")
        self.signal = signal


def unknown(kind: str, name: object, known: Iterable[str], meant: str = "", otherwise: str = "") -> InputError:
    """An error for an unknown name, which suggests ``meant`` or else the nearest valid one, and says ``otherwise``.

    >>> print(unknown("method", "clc", ["ccl", "hard"]))
    unknown method 'clc'; did you mean 'ccl'? Known: ccl, hard
    """
    names = sorted(known)
    near = [meant] if meant else difflib.get_close_matches(str(name), names, n=8, cutoff=0.5)
    hint = (f"; did you mean '{near[0]}'?" if near else ".") + (f" {otherwise}." if otherwise else "")
    listed, word = (names, "Known") if len(names) <= 40 else (near or names[:8], f"Some of {len(names)} known")
    return InputError(f"unknown {kind} '{name}'{hint} {word}: {', '.join(listed)}")


def check_range(name: str, value: float, interval: str, hint: str) -> float:
    """``value`` if it lies in ``interval``, such as "[0, 1)" or "(0, inf)", else an InputError with the hint.

    >>> check_range("alpha", 0.1, "[0, 1)", "usually 0.1")
    0.1
    """
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    above = value >= low if interval.startswith("[") else value > low
    below = value <= high if interval.endswith("]") else value < high
    if not (above and below):
        raise InputError(f"{name} must lie in {interval}, got {value}: {hint}.")
    return value


def first_line(error: Exception) -> str:
    """What a library says went wrong, without its advice.

    >>> first_line(ValueError("no such size.\\nTry another")), first_line(ValueError())
    ('no such size', 'ValueError')
    """
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def show_warnings_as_notes() -> None:
    """From now on print Python warnings in this process as one line on stderr, without source paths and code."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        print(f"note: {' '.join(str(message).split())}", file=sys.stderr)

    warnings.showwarning = show
