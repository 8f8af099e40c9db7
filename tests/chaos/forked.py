"""Run a function in a fork of this process, with limits, and measure it: a hostile input must not take the tests along.

A new Python process with torch takes seconds to start; a fork of one that has imported everything takes milliseconds.
"""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SECONDS = 10.0  # of processor time
MEGABYTES = 2000.0  # of the largest process
HANGING_SECONDS = 180.0  # on the clock, on a machine that may be busy
_SECONDS_BETWEEN_LOOKS = 0.05


@dataclass(frozen=True)
class Outcome:
    """How a case ended."""

    code: int  # exit code, negative for a signal
    seconds: float  # of processor time, with its processes
    wall: float  # seconds on the clock
    megabytes: float  # largest resident size of any of its processes
    output: str
    hung: bool


def warm_up() -> None:
    """Import what the commands import, once, before the forks: also what they import only where they need it, since
    each fork would import it again."""
    import onnxruntime  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import pydicom.pixels  # noqa: F401
    import timm  # noqa: F401
    import torch
    import torch.utils.tensorboard
    from PIL import Image

    import cclnet.api
    import cclnet.cli
    import cclnet.data.audit
    import cclnet.deploy.export
    import cclnet.deploy.predict
    import cclnet.report
    import cclnet.training.loop  # noqa: F401

    Image.init()  # the plugins of all formats
    torch.set_num_threads(1)  # a fork has no copies of the threads of its parent
    # Else the garbage collection of each fork visits, and thereby copies, everything that was imported.
    gc.collect()
    gc.freeze()


def run_forked(work: Callable[[], object], folder: Path) -> Outcome:
    """Call ``work`` in a fork with ``folder`` as working and cache folder. SystemExit gives its exit code, another
    exception a traceback and the code 70."""
    log = folder / "output.txt"
    begin = time.monotonic()
    if (child := os.fork()) == 0:
        _run(work, folder, log)
    largest, usage, status = 0.0, None, 0
    while usage is None:
        largest = max(largest, *map(_megabytes, _tree(child)))
        done, status, found = os.wait4(child, os.WNOHANG)
        if done:
            usage = found
        elif time.monotonic() - begin > HANGING_SECONDS:
            for pid in _tree(child):
                os.kill(pid, signal.SIGKILL)
            _, status, usage = os.wait4(child, 0)
        else:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    wall = time.monotonic() - begin
    largest = max(largest, usage.ru_maxrss / 1024)
    output = log.read_text(encoding="utf-8", errors="backslashreplace")[-20_000:] if log.exists() else ""
    code = os.waitstatus_to_exitcode(status)
    return Outcome(code, usage.ru_utime + usage.ru_stime, wall, largest, output, wall > HANGING_SECONDS)


def _run(work: Callable[[], object], folder: Path, log: Path) -> None:
    """Run in the child, and never return from it."""
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for descriptor, name, flags in (
            (0, "/dev/null", os.O_RDONLY),
            (1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        ):
            os.dup2(os.open(name, flags, 0o600), descriptor)
        os.dup2(1, 2)
        work()
        code = 0
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException:  # noqa: BLE001 (a traceback is what the tests look for)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _tree(pid: int) -> list[int]:
    """Return a process and its descendants, as far as they still exist."""
    try:
        own = [
            child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
        ]
    except OSError:
        own = []
    return [pid, *(below for child in own for below in _tree(int(child)))]


def _megabytes(pid: int) -> float:
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) / 1024 if found else 0.0
