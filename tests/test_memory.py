"""Memory that a process keeps after freeing it."""

import platform
import subprocess
import sys

import pytest

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
