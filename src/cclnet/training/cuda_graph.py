"""torch.compile with a short start-up, and capture of a training step as a CUDA graph."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.config
from torch import nn

from cclnet.data.loader import side_stream
from cclnet.data.parallel import available_cores
from cclnet.network import Classifier

# Compiler options that cost seconds of start-up and make none of the networks here faster. Autotuning of pointwise
# kernels took 15 s. Partitions serve the compiler's own CUDA graphs. Loop reordering is a twelfth of the compile time,
# and a channels_last network has one order throughout. Fixed sizes need no assertions.
COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "triton.autotune_pointwise": False,
    "graph_partition": False,
    "loop_ordering_after_fusion": False,
    "size_asserts": False,
}

# Shape of the images, shape of the weight, and arguments of ``torch.convolution`` after the bias.
Convolution = tuple[torch.Size, torch.Size, tuple[Any, ...]]
MEMORY_FOR_PLANNING = 24 * 2**30  # free device memory from which planning convolutions cannot disturb training
_planned: set[Convolution] = set()  # by this process


def compiled(function: Any, fullgraph: bool = False) -> Any:
    """Return ``torch.compile(function)`` with those COMPILE_OPTIONS that this version of torch has.

    Half of the cores are used for compile workers, because more compete with the main thread. They are kept while the
    process lives: by default torch stops idle workers after 60 s and forks new ones for the next run, from a process
    with threads, which can deadlock. The variables TORCHINDUCTOR_COMPILE_THREADS and
    TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL take precedence.
    """
    config = torch._inductor.config  # set first: the worker processes start with the first call of torch.compile
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        config.compile_threads = min(config.compile_threads or 1, max(2, available_cores() // 2))
    if hasattr(config, "quiesce_async_compile_pool"):
        config.quiesce_async_compile_pool = False
    known = torch._inductor.list_options()
    options = {name: value for name, value in COMPILE_OPTIONS.items() if name in known}
    return torch.compile(function, fullgraph=fullgraph, options=options)


def capture_graph(
    compute_gradients: Callable[[], object],
    optimizer: torch.optim.Optimizer,
    meanwhile: Callable[[], None] | None = None,
) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of ``compute_gradients``, which must fill the gradients of the optimizer's parameters.

    The function runs three times before the capture, because compilation and the choice of algorithms happen then;
    ``meanwhile`` runs in a thread beside the three.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    stream = side_stream("capture", device)
    stream.wait_stream(torch.cuda.current_stream())
    beside = threading.Thread(target=meanwhile, name="plan convolutions")  # without a target it ends at once
    beside.start()
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            compute_gradients()
    beside.join()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad(set_to_none=True)  # so that a replay writes gradients instead of adding to them
    graph = torch.cuda.CUDAGraph()
    # "thread_local", because other threads may be prefetching batches during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        compute_gradients()
    return graph


def plan_convolutions(
    network: Classifier,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> Callable[[], None] | None:
    """Return a function that runs every distinct convolution of the network once, forward and backward; None if this
    process has run them all. ``dtype`` is the one in which training runs them.

    cuDNN loads its kernels and plans a convolution when it first meets it. Done in a thread while torch.compile traces
    in Python, an earlier form of this brought the first step of an EfficientNet-B0 from 78 s to 57 s (one H200). The
    thread must call no module, because torch.fx traces the module calls of every thread, so shapes are collected here.
    It must not use autocast either: all threads share autocast's cache of casted weights. A thread that empties it, on
    leaving autocast, holds the lock of the cache and waits for Python's, while the thread that traces with fake tensors
    does the reverse.
    """
    try:
        wanted = [convolution for convolution in convolutions(network, shape) if convolution not in _planned]
    except (NotImplementedError, RuntimeError):  # a network that cannot run on the meta device
        return None
    if not wanted:
        return None

    def plan() -> None:
        if torch.cuda.mem_get_info(device)[0] < MEMORY_FOR_PLANNING:
            return
        try:
            with torch.cuda.stream(side_stream("planning", device)):
                run_convolutions(wanted, device, dtype)
                torch.cuda.current_stream(device).synchronize()
        except torch.OutOfMemoryError:  # planning only saves time; training itself may fit
            return
        _planned.update(wanted)

    return plan


def run_convolutions(wanted: Sequence[Convolution], device: torch.device, dtype: torch.dtype) -> None:
    """Run convolutions of zeros, forward and backward."""
    for images_size, weight_size, settings in wanted:
        layout = torch.channels_last if len(images_size) == 4 else torch.contiguous_format
        images, weight = (
            torch.zeros(size, device=device, dtype=dtype).to(memory_format=layout).requires_grad_()
            for size in (images_size, weight_size)
        )
        torch.convolution(images, weight, None, *settings).float().sum().backward()


def convolutions(network: Classifier, shape: tuple[int, ...]) -> list[Convolution]:
    """Return the distinct convolutions that a batch of this shape runs, in order, from a copy on the meta device."""
    found: dict[Convolution, None] = {}

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(module, nn.Conv2d) and isinstance(module.padding, tuple)
        settings = (module.stride, module.padding, module.dilation, False, (0, 0), module.groups)
        found[inputs[0].shape, module.weight.shape, settings] = None

    on_meta = copy.deepcopy(network).to("meta").eval()
    for module in on_meta.modules():
        if isinstance(module, nn.Conv2d) and isinstance(module.padding, tuple):
            module.register_forward_pre_hook(note)
    with torch.no_grad():
        on_meta.features(torch.empty(shape, device="meta"))
    return list(found)
