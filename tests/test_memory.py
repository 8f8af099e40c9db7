"""Memory that a process keeps after freeing it."""

import gc
import platform
import subprocess
import sys

import pytest

from cclnet.memory import large_imports

# Page faults of taking and freeing 64 MB ten times, in a process of its own because the effect lasts.
SCRIPT = """
import resource, torch
from cclnet.memory import keep_freed_memory
if {kept}:
    assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.zeros(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def faults(kept: bool) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(kept=kept)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    assert faults(kept=True) < 0.01 * faults(kept=False)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_and_kept_memory_counts_towards_the_limit_of_a_worker() -> None:
    script = """
import resource
from cclnet.data.parallel import limit_memory
from cclnet.memory import free_heap_bytes, keep_freed_memory
keep_freed_memory()
large, above = bytes(2**29), bytes(2**20)
before = free_heap_bytes()
del large
assert free_heap_bytes() - before > 0.99 * 2**29
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit_memory(2**30)
print((resource.getrlimit(resource.RLIMIT_AS)[0] - size) / 2**30)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0.4 < float(done.stdout) < 0.51  # half of the 1 GiB is in the heap


def test_imports_without_the_collection_of_garbage_leave_it_as_it_was() -> None:
    collected = gc.get_stats()[2]["collections"]
    with large_imports():
        assert not gc.isenabled()
        with large_imports():  # an import within an import
            made = [[] for _ in range(200_000)]
        assert not gc.isenabled()
    assert gc.isenabled() and not gc.get_freeze_count() and gc.get_stats()[2]["collections"] == collected
    gc.disable()
    try:
        with large_imports():
            pass
        assert not gc.isenabled()  # as the program decided
    finally:
        gc.enable()
    assert made
