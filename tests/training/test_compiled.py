"""What is done beside the compiling leaves no trace."""

import gc
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from cclnet import CCLNet
from cclnet.training import compiled


def test_the_compiler_s_algebra_is_remembered() -> None:
    code = "import cclnet.training.loop, sympy.core.cache; print(sympy.core.cache.SYMPY_CACHE_SIZE)"
    environment = {name: value for name, value in os.environ.items() if name != "SYMPY_CACHE_SIZE"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "None"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_rehearsal_leaves_no_trace() -> None:
    device = torch.device("cuda")
    network = CCLNet("resnet10t", 7, "hard", backbone_settings={"drop_rate": 0.5}).to(device)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    random = torch.cuda.get_rng_state()
    compiled.rehearse(network.classifier, (4, 3, 64, 64), device, nullcontext)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters()) and network.training
    assert torch.equal(torch.cuda.get_rng_state(), random)


def test_no_rehearsal_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (compiled.ROOM - 1, compiled.ROOM))
    network = CCLNet(torch.nn.Linear(5, 6), 3, "hard", feature_width=6)
    monkeypatch.setattr(compiled.copy, "deepcopy", lambda network: pytest.fail("a second network was made"))
    compiled.rehearse(network.classifier, (2, 5), torch.device("cpu"), nullcontext)


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
