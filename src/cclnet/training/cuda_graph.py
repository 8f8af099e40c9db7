"""Compiling work for a GPU and recording it as a CUDA graph, with a short start."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch._dynamo.config
import torch._inductor.config
from torch.utils._python_dispatch import TorchDispatchMode

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
ROOM = 24 * 2**30  # free memory of the device with which convolutions beside those of the training cannot do harm


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


class Convolution(NamedTuple):
    """A convolution as a network asks for it: all that cuDNN makes its plan of."""

    images: torch.Size
    weight: torch.Size
    settings: tuple[Any, ...]  # of ``torch.convolution``, after its bias


def rehearsal(
    network: Classifier,
    shape: tuple[int, ...],
    device: torch.device,
    precision: Callable[[], AbstractContextManager[Any]],
) -> Callable[[], None]:
    """What does every convolution of the network once, forward and backward, to be called in a thread.

    cuDNN loads its kernels and plans a convolution when it is first asked for it; for many-layered networks that takes
    as long as a third of the compiling, needs no Python, and what is then known is known to the compiled network too.
    The thread must call no module: while torch traces, those of every thread count as traced. So the network is asked
    here, before, and only for shapes; one that cannot run on those alone is not rehearsed.
    """
    try:
        asked = convolutions(network, shape)
    except (NotImplementedError, RuntimeError):
        asked = []

    def rehearse() -> None:
        if not asked or torch.cuda.mem_get_info(device)[0] < ROOM:
            return
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)), precision():
                for convolution in asked:
                    _convolve(convolution, device)
                torch.cuda.current_stream(device).synchronize()
        except torch.OutOfMemoryError:  # it only saves time: the training itself may well fit
            return

    return rehearse


def convolutions(network: Classifier, shape: tuple[int, ...]) -> list[Convolution]:
    """The different ones that a batch of this shape asks for, in their order. Nothing is computed and nothing of the
    network changes."""
    found: dict[Convolution, None] = {}

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.convolution.default:
                images, weight, _, *settings = args
                as_tuples = (tuple(each) if isinstance(each, list) else each for each in settings)
                found[Convolution(images.shape, weight.shape, tuple(as_tuples))] = None
            return function(*args, **(kwargs or {}))

    shapes_alone = copy.deepcopy(network).to("meta").eval()
    with Noting(), torch.no_grad():
        shapes_alone.features(torch.empty(shape, device="meta"))
    return list(found)


def _convolve(convolution: Convolution, device: torch.device) -> None:
    laid_out = torch.channels_last if len(convolution.images) == 4 else torch.contiguous_format
    images, weight = (
        torch.zeros(size, device=device).to(memory_format=laid_out).requires_grad_() for size in convolution[:2]
    )
    torch.convolution(images, weight, None, *convolution.settings).float().sum().backward()


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
