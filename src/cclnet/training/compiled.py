"""Compiling work for a GPU and recording it as a CUDA graph, with a short start."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch._dynamo.config
import torch._inductor.config

from cclnet.data.parallel import available_cores
from cclnet.network import Classifier

# Choices of the compiler that cost seconds at the start and gain nothing here. Trying several launch shapes for
# every pointwise kernel took 15 s and made no network of ours faster; partitions are for the compiler's own graphs;
# other orders of loops are a twelfth of its work, and networks in channels_last have one order throughout; sizes that
# cannot change need no checks.
QUICK_START: dict[str, str | int | bool | Callable[..., Any]] = {
    "triton.autotune_pointwise": False,
    "graph_partition": False,
    "loop_ordering_after_fusion": False,
    "size_asserts": False,
}
ROOM = 24 * 2**30  # free memory of the device with which a second network beside the first one cannot do harm


def compiled(work: Any, fullgraph: bool = False) -> Any:
    """``torch.compile`` with what is known to start quickly, as far as this torch knows the options."""
    _leave_cores()
    known = torch._inductor.list_options()
    options = {name: value for name, value in QUICK_START.items() if name in known}
    return torch.compile(work, fullgraph=fullgraph, options=options)


def _leave_cores() -> None:
    """Workers of the compiler for half of the cores, unless it was told how many.

    It starts one for every core, and they take from the thread that all wait for, which decides what to compile: with
    8 of them instead of 16 on 16 cores a first step came after 53 s instead of 64. They start as soon as anything is
    given to ``torch.compile``.
    """
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        config = torch._inductor.config
        config.compile_threads = min(config.compile_threads or 1, max(2, available_cores() // 2))


def recorded(
    work: Callable[[], object], optimizer: torch.optim.Optimizer, beside: Callable[[], None] | None = None
) -> torch.cuda.CUDAGraph:
    """``work``, which fills the gradients of the optimizer's parameters, as a graph: a replay does it again.

    It is run three times first, for that is when compilers compile and libraries choose. ``beside`` runs in a thread
    meanwhile.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    helper = threading.Thread(target=beside or (lambda: None), name="rehearsal")
    helper.start()
    with torch.cuda.stream(stream), _no_garbage_collection():
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            work()
    helper.join()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.empty_cache()  # what the rehearsal needed; while recording nothing can be given back
    optimizer.zero_grad(set_to_none=True)  # so that a replay writes gradients instead of adding
    graph = torch.cuda.CUDAGraph()
    # Other threads may be loading ahead: only what this one does must be capturable.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph


def rehearse(
    network: Classifier,
    shape: tuple[int, ...],
    device: torch.device,
    precision: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Run a copy of the network forward and backward once, uncompiled, on images of zeros.

    cuDNN loads its kernels and plans every convolution when it is first asked to; for many-layered networks that takes
    as long as half of the compiling, needs no Python, and what is then known is known to the compiled network too.
    Nothing else is left behind: in evaluation nothing is drawn and no average moves.
    """
    if torch.cuda.mem_get_info(device)[0] < ROOM:
        return
    try:
        with torch.cuda.stream(torch.cuda.Stream(device)), precision():
            rehearsed = copy.deepcopy(network).eval()
            images = torch.zeros(shape, device=device).to(memory_format=torch.channels_last)
            rehearsed.logits(rehearsed.features(images)).float().sum().backward()
            torch.cuda.current_stream(device).synchronize()
    except torch.OutOfMemoryError:  # it only saves time: the training itself may well fit
        return


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A compiler makes millions of objects that stay: looking through them again and again takes seconds, and so does
    the once that torch asks for after each piece of work, where it has that setting."""
    was_on = gc.isenabled()
    gc.disable()
    asks_itself = hasattr(torch._dynamo.config, "run_gc_after_compile")
    try:
        with torch._dynamo.config.patch(run_gc_after_compile=False) if asks_itself else nullcontext():
            yield
    finally:
        if was_on:
            gc.enable()
