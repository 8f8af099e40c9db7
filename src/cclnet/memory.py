"""How the C library of Linux returns memory to the system, which decides the speed of networks on a CPU; and when
Python looks for garbage."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Parameters of mallopt in glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
TOP_PAD = 2**26  # bytes that the heap grows by
# The fields of mallinfo2 in glibc's malloc.h, all of type size_t; fordblks are the free bytes.
MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


def keep_freed_memory() -> bool:
    """Let this process keep the memory it frees, and use it again; return whether the C library can do that.

    glibc returns every block of more than 32 MB to the system when it is freed, and takes it back page by page. The
    feature maps of a network are such blocks, and a training step frees and takes all of them: on a CPU it can spend
    more time on new pages than on computing. The process then keeps the memory of its largest step until it ends.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    # The heap instead of mappings of their own, and the heap is not cut off at its end.
    return all(mallopt(key, value) for key, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, TOP_PAD)))


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO]


def free_heap_bytes() -> int:
    """Bytes that this process has freed and kept: it can use them again without asking the system. 0 where unknown."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return 0
    mallinfo.restype = _MallInfo
    return int(mallinfo().fordblks)


@contextmanager
def large_imports() -> Iterator[None]:
    """Import packages such as torch in this block without looking for garbage meanwhile.

    They make a million objects that stay until the end. Python looks through all of them several times while they
    come, and finds nothing: that is a quarter of the time that torch, timm and Lightning take to be imported.
    """
    if not gc.isenabled() or gc.get_freeze_count():  # as the program decided, or within another such block
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # Together these move all objects to the oldest generation, which is looked through least.
        gc.freeze()
        gc.unfreeze()
        gc.enable()
