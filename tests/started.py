"""Commands of cclnet in processes of their own that have torch, timm and Lightning imported already.

A new process takes six seconds of processor time to import them, and a fork of one that has imported them takes none.
Run as a program, this file is that process. It reads one request a line, forks, and answers with the number of the new
process. Files tell what else there is to know: the output, and at the end the exit code.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any


class Command:
    """``cclnet WORDS`` in a process of its own, with the methods of subprocess.Popen that the tests use."""

    def __init__(self, words: Sequence[str], cwd: Path, env: Mapping[str, str] = os.environ) -> None:
        server, folder = _server()
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        request = {"words": [*words], "cwd": str(cwd), "env": {**env}, "folder": str(self._folder)}
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        self.pid = int(server.stdout.readline())

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while the command runs."""
        path = self._folder / "code"
        return int(path.read_text()) if path.exists() else None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        end = time.monotonic() + timeout
        while (code := self.returncode) is None:
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(f"it did not end within {timeout:g} s")
            time.sleep(0.02)
        return code

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Wait for the end and return what was written to stdout and stderr."""
        self.wait(timeout)
        output, errors = ((self._folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
        return output, errors

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _server() -> tuple[subprocess.Popen[str], Path]:
    """The process that forks, and a folder for what the commands write. Both end with the tests."""
    folder = Path(tempfile.mkdtemp(prefix="cclnet-started-"))
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    # In the reverse order: the process ends when its input does.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.wait)
    atexit.register(server.stdin.close)
    return server, folder


def _import_everything() -> None:
    import timm  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    import cclnet.api
    import cclnet.cli
    import cclnet.evaluation.evaluate
    import cclnet.report
    import cclnet.training.loop  # noqa: F401

    # Else the garbage collection of each fork visits, and thereby copies, everything that was imported.
    gc.collect()
    gc.freeze()


def _next_fork() -> dict[str, Any]:
    """The request that a fork of this process is to carry out. Returns in the forks only."""
    folders: dict[int, Path] = {}

    def write_codes(*_: object) -> None:
        while folders:
            number, status = os.waitpid(-1, os.WNOHANG)
            if not number:
                break
            folder = folders.pop(number)
            (folder / "code.partial").write_text(str(os.waitstatus_to_exitcode(status)))
            (folder / "code.partial").rename(folder / "code")

    signal.signal(signal.SIGCHLD, write_codes)
    for line in sys.stdin:
        request = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # until the number of the fork is in `folders`
        number = os.fork()
        if not number:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        else:
            folders[number] = Path(request["folder"])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        if not number:
            return dict(request)
        print(number, flush=True)
    for number in list(folders):  # the tests have ended
        os.kill(number, signal.SIGKILL)
    sys.exit()


def _begin(request: Mapping[str, Any]) -> None:
    """Make this process look as if it had just been started for the request."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["cclnet", *request["words"]]
    for number, name in enumerate((os.devnull, "stdout", "stderr")):
        flags = os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY
        os.dup2(os.open(Path(request["folder"], name), flags, 0o600), number)


def _run() -> int:
    """Run the command and what is due at the end of a process, and return the exit code."""
    from cclnet.cli import main

    code = 0
    try:
        main()
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException:  # noqa: BLE001 (as Python itself does)
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _import_everything()
    _begin(_next_fork())
    os._exit(_run())  # without a visit to everything that was imported
