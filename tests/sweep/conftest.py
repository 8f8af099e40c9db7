"""Ray in the tests: its files and sockets are in a folder of one test alone, and no process of it is left over."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from waiting import wait_for


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for all that Ray writes; at the end no process of Ray may be left that knows it."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short, because it has sockets
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # by default 15 above that of the test
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield folder
    wait_for(lambda: not processes_of(folder), seconds=60)
    shutil.rmtree(folder)


@pytest.fixture
def cluster(ray_folder: Path) -> Iterator[Any]:
    pytest.importorskip("ray", reason="sweeps on Ray need the extra cclnet[ray]")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    for _ in range(2):
        made.add_node(**node)
    yield made
    for left in [*made.worker_nodes, made.head_node]:
        made.remove_node(left, allow_graceful=True)  # else its agents may stay for a minute


def processes_of(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text().replace("\0", " ")
            # multiprocessing keeps a process of its own until the tests end.
            if str(folder).encode() in (process / "environ").read_bytes() and "multiprocessing" not in command:
                found.append(command)
        except OSError:  # it has ended
            continue
    return found
