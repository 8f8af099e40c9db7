"""Compiling work for a GPU and recording it as a CUDA graph, with a short start."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor

# Choices of the compiler that cost seconds at the start and gain nothing here. Trying several launch shapes for
# every pointwise kernel took 15 s and made no network of ours faster; partitions are for the compiler's own graphs.
QUICK_START: dict[str, str | int | bool | Callable[..., Any]] = {
    "triton.autotune_pointwise": False,
    "graph_partition": False,
}


def compiled(work: Any, fullgraph: bool = False) -> Any:
    """``torch.compile`` with what is known to start quickly, as far as this torch knows the options."""
    known = torch._inductor.list_options()
    options = {name: value for name, value in QUICK_START.items() if name in known}
    return torch.compile(work, fullgraph=fullgraph, options=options)


def recorded(work: Callable[[], object], optimizer: torch.optim.Optimizer) -> torch.cuda.CUDAGraph:
    """``work``, which fills the gradients of the optimizer's parameters, as a graph: a replay does it again.

    It is run three times first, for that is when compilers compile and libraries choose.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), _no_garbage_collection():
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            work()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad(set_to_none=True)  # so that a replay writes gradients instead of adding
    graph = torch.cuda.CUDAGraph()
    # Other threads may be loading ahead: only what this one does must be capturable.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A compiler makes millions of objects that stay: looking through them again and again takes seconds."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
