"""Options of the compiler, its worker processes, and the capture of a CUDA graph."""

import pytest
import torch
from torch import nn

from cclnet.training import cuda_graph


def test_only_options_that_torch_has_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cuda_graph.COMPILE_OPTIONS, "no_such_option", True)
    monkeypatch.setattr(torch, "compile", lambda function, **arguments: arguments["options"])
    assert set(cuda_graph.compiled(None)) == set(cuda_graph.COMPILE_OPTIONS) - {"no_such_option"}


@pytest.mark.parametrize(("cores", "variable", "workers"), [(16, None, 8), (2, None, 2), (1, None, 1), (16, "12", 12)])
def test_half_of_the_cores_compile(
    monkeypatch: pytest.MonkeyPatch, cores: int, variable: str | None, workers: int
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", variable)
    monkeypatch.setattr(cuda_graph, "available_cores", lambda: cores)
    seen = []  # at the call of torch.compile, which starts the workers
    monkeypatch.setattr(torch, "compile", lambda *_, **__: seen.append(torch._inductor.config.compile_threads))
    with torch._inductor.config.patch(compile_threads=int(variable or cores)):
        cuda_graph.compiled(None)
        cuda_graph.compiled(None)
    assert seen == [workers, workers]


@pytest.mark.skipif(not hasattr(torch._inductor.config, "quiesce_async_compile_pool"), reason="torch keeps its workers")
def test_compile_workers_are_kept_between_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    config = torch._inductor.config
    monkeypatch.setattr(torch, "compile", lambda *_, **__: seen.append(config.quiesce_async_compile_pool))
    with config.patch(quiesce_async_compile_pool=True):
        cuda_graph.compiled(None)
    assert seen == [False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_replay_writes_the_gradients() -> None:
    layer = nn.Linear(3, 2, device="cuda")
    inputs = torch.randn(5, 3, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    graph = cuda_graph.capture_graph(lambda: layer(inputs).square().sum().backward(), optimizer)
    for _ in range(2):  # the second replay does not add to the first
        inputs.normal_()
        graph.replay()
        expected = torch.autograd.grad(layer(inputs).square().sum(), list(layer.parameters()))
        for parameter, gradient in zip(layer.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
