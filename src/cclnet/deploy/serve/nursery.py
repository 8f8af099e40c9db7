"""A clean process from which those that read uploads are forked: it has imported all they need and does nothing else.

So they start at once and share memory, and none of them inherits a thread, a lock, a socket or the weights of the
server. It is started as a program of its own, so it does not import the main module of whoever serves, as
multiprocessing would. Unix only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

_PID_BYTES = 8


class Nursery:
    """The server's side: asks for processes that read uploads, and has them ended."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair()
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        # In a session of its own, Ctrl-C does not reach it: it ends when the server's end of the line is closed.
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self._lock = threading.Lock()

    def start(self) -> tuple[int, Connection]:
        """A new process, and the line to it."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._line, [bytes(_PID_BYTES)], [theirs.fileno()])
            pid = int.from_bytes(_receive(self._line), "big")
        if not pid:
            raise RuntimeError("the process that readers are started from has ended")
        return pid, Connection(ours.detach())

    def end(self, pid: int) -> None:
        """Kill a process that was started here."""
        with self._lock:
            self._line.sendall(pid.to_bytes(_PID_BYTES, "big"))
            _receive(self._line)

    def close(self) -> None:
        """End it, with all that was started here. More than once does no harm."""
        self._line.close()
        self._process.wait()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _receive(line: socket.socket) -> bytes:
    return line.recv(_PID_BYTES, socket.MSG_WAITALL)


def _serve(line: socket.socket) -> None:
    """The nursery's side: zero with a socket asks for a process, anything else for the end of that one."""
    # Imported here, for the server's side needs none of it.
    with contextlib.suppress(ImportError):  # without torch images are resized to the same bits, three times as slowly
        import torch  # noqa: F401
    from cclnet.deploy.serve.reading import work

    children: set[int] = set()
    while True:
        asked, sockets, _, _ = socket.recv_fds(line, _PID_BYTES, 1)
        if len(asked) < _PID_BYTES:
            return  # the server is gone; so are then the lines of the children, which end of themselves
        pid = int.from_bytes(asked, "big")
        if sockets:
            pid = os.fork()
            if pid == 0:
                line.close()
                work(Connection(sockets[0]))
                os._exit(0)
            children.add(pid)
            os.close(sockets[0])
        elif pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)  # until now nobody else can have got this number
            children.discard(pid)
        line.sendall(pid.to_bytes(_PID_BYTES, "big"))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
