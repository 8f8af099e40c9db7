"""torch.compile with a short start-up, and capture of compiled work as a CUDA graph."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config

from cclnet.data.parallel import available_cores

# Compiler options that cost seconds of start-up and make none of the networks here faster. Autotuning of pointwise
# kernels took 15 s. Partitions serve the compiler's own CUDA graphs. Loop reordering is a twelfth of the compile time,
# and a channels_last network has one order throughout. Fixed sizes need no assertions.
COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "triton.autotune_pointwise": False,
    "graph_partition": False,
    "loop_ordering_after_fusion": False,
    "size_asserts": False,
}


def compiled(function: Any, fullgraph: bool = False) -> Any:
    """Return ``torch.compile(function)`` with those COMPILE_OPTIONS that this version of torch has."""
    _configure_compile_workers()  # the worker processes start with the first call of torch.compile
    known = torch._inductor.list_options()
    options = {name: value for name, value in COMPILE_OPTIONS.items() if name in known}
    return torch.compile(function, fullgraph=fullgraph, options=options)


def _configure_compile_workers() -> None:
    """Use half of the cores for compile workers, and keep the workers while the process lives.

    Compile workers compete with the main thread for CPU: with 8 of them instead of 16 on 16 cores, the first step came
    after 53 s instead of 64 s. By default torch stops workers that were idle for 60 s and forks new ones, from a
    process that may still have threads, when the next run in the same process compiles. Such a fork can deadlock, and
    the compiler waits for its workers without a limit. The environment variables TORCHINDUCTOR_COMPILE_THREADS and
    TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL take precedence.
    """
    config = torch._inductor.config
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        config.compile_threads = min(config.compile_threads or 1, max(2, available_cores() // 2))
    if hasattr(config, "quiesce_async_compile_pool"):
        config.quiesce_async_compile_pool = False


def capture_graph(compute_gradients: Callable[[], object], optimizer: torch.optim.Optimizer) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of ``compute_gradients``, which must fill the gradients of the optimizer's parameters.

    The function runs three times before the capture, because compilation and the choice of algorithms happen then.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            compute_gradients()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad(set_to_none=True)  # so that a replay writes gradients instead of adding to them
    graph = torch.cuda.CUDAGraph()
    # "thread_local", because other threads may be prefetching batches during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        compute_gradients()
    return graph
