"""What is done beside the compiling leaves no trace."""

import gc
import os
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cclnet import CCLNet
from cclnet.network import Classifier
from cclnet.training import cuda_graph as compiled


def test_the_compiler_s_algebra_is_remembered() -> None:
    code = "import cclnet.training.loop, sympy.core.cache; print(sympy.core.cache.SYMPY_CACHE_SIZE)"
    environment = {name: value for name, value in os.environ.items() if name != "SYMPY_CACHE_SIZE"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "None"


SHAPE = (4, 3, 64, 64)


def small_network() -> Classifier:
    return CCLNet("resnet10t", 7, "hard", backbone_settings={"drop_rate": 0.5}).classifier


class Convolutions(TorchDispatchMode):
    """Those that are done, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.convolution.default:
            self.done.append(f"{args[0].shape} {args[1].shape} {args[3:]}")
        return function(*args, **(kwargs or {}))


def test_what_is_rehearsed_is_what_the_network_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    network = small_network()
    asked = compiled.convolutions(network, SHAPE)
    with Convolutions() as of_network, torch.no_grad():
        network.features(torch.zeros(SHAPE))
    # While torch traces, a module that another thread calls is taken for a part of what is traced.
    monkeypatch.setattr(nn.Module, "__call__", lambda *_, **__: pytest.fail("a module was called"))
    with Convolutions() as rehearsed:
        for convolution in asked:
            compiled._convolve(convolution, torch.device("cpu"))
    assert rehearsed.done == list(dict.fromkeys(of_network.done)) and len(asked) > 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_rehearsal_leaves_no_trace() -> None:
    device = torch.device("cuda")
    network = small_network().to(device)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    random = torch.cuda.get_rng_state()
    compiled.rehearsal(network, SHAPE, device, nullcontext)()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters()) and network.training
    assert torch.equal(torch.cuda.get_rng_state(), random)


def test_no_rehearsal_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[torch.device] = []

    def free_and_total(device: torch.device) -> tuple[int, int]:
        looked.append(device)
        return compiled.ROOM - 1, compiled.ROOM

    monkeypatch.setattr(torch.cuda, "mem_get_info", free_and_total)
    monkeypatch.setattr(compiled, "_convolve", lambda *_: pytest.fail("a convolution was done"))
    compiled.rehearsal(small_network(), SHAPE, torch.device("cpu"), nullcontext)()
    assert looked == [torch.device("cpu")]


def test_a_network_that_needs_numbers_is_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Branching(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.flatten(1) if images.sum() > 0 else -images.flatten(1)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: pytest.fail("a rehearsal was begun"))
    network = CCLNet(Branching(), 3, "hard", feature_width=12).classifier
    with pytest.raises(RuntimeError):
        compiled.convolutions(network, (2, 3, 2, 2))
    compiled.rehearsal(network, (2, 3, 2, 2), torch.device("cpu"), nullcontext)()


def test_options_are_those_this_torch_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiled.QUICK_START, "no_such_option", True)
    monkeypatch.setattr(torch, "compile", lambda work, **asked: asked["options"])
    assert set(compiled.compiled(None)) == set(compiled.QUICK_START) - {"no_such_option"}


@pytest.mark.parametrize(("cores", "asked", "workers"), [(16, None, 8), (2, None, 2), (1, None, 1), (16, "12", 12)])
def test_the_compiler_leaves_cores_to_the_thread_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, cores: int, asked: str | None, workers: int
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", asked)
    monkeypatch.setattr(compiled, "available_cores", lambda: cores)
    at_the_start = []  # when torch.compile is called its workers start
    monkeypatch.setattr(torch, "compile", lambda *_, **__: at_the_start.append(torch._inductor.config.compile_threads))
    with torch._inductor.config.patch(compile_threads=int(asked or cores)):
        compiled.compiled(None)
        compiled.compiled(None)
    assert at_the_start == [workers, workers]


def test_no_garbage_is_collected_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    collected = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: collected.append(generation))

    def squares(values: torch.Tensor) -> torch.Tensor:
        return values * values

    with compiled._no_garbage_collection():
        torch.compile(squares, backend="eager")(torch.ones(2))
        assert not collected and not gc.isenabled()
    torch._dynamo.reset()
    del collected[:]  # a reset may collect
    torch.compile(squares, backend="eager")(torch.ones(3))
    assert collected and gc.isenabled()  # torch does it by itself
