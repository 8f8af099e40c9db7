"""Options of the compiler, its worker processes, and the capture of a CUDA graph."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cclnet import CCLNet
from cclnet.network import Classifier
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


SHAPE = (4, 3, 64, 64)


def small_network() -> Classifier:
    return CCLNet("resnet10t", 7, "hard", backbone_settings={"drop_rate": 0.5}).classifier


class Convolutions(TorchDispatchMode):
    """Records the convolutions that are run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.convolution.default:
            settings = tuple(tuple(each) if isinstance(each, list) else each for each in args[3:])
            self.found.append((args[0].shape, args[1].shape, settings))
        return function(*args, **(kwargs or {}))


def test_the_planned_convolutions_are_those_of_the_network() -> None:
    network = small_network()
    planned = cuda_graph.convolutions(network, SHAPE)
    with Convolutions() as of_network, torch.no_grad():
        network.features(torch.zeros(SHAPE))
    assert [tuple(convolution) for convolution in planned] == list(dict.fromkeys(of_network.found)) and len(planned) > 5
    assert next(network.parameters()).device.type == "cpu"  # the network itself was not touched


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_planning_leaves_the_network_and_random_state_alone_and_happens_once() -> None:
    device = torch.device("cuda")
    network = small_network().to(device)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    random = torch.cuda.get_rng_state()
    plan = cuda_graph.plan_convolutions(network, SHAPE, device, torch.bfloat16)
    assert plan is not None
    plan()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters()) and network.training
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert cuda_graph.plan_convolutions(network, SHAPE, device, torch.bfloat16) is None


def test_planning_runs_the_type_of_training_and_stays_out_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving autocast in one thread while another traces with fake tensors can stop both for good (plan_convolutions
    says why)."""
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def convolution(images: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
        seen.append((images.dtype, weight.dtype))
        return images.sum() + weight.sum()

    monkeypatch.setattr(cuda_graph, "_planned", set())
    monkeypatch.setattr(cuda_graph, "side_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * cuda_graph.MEMORY_FOR_PLANNING,) * 2)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch, "convolution", convolution)
    monkeypatch.setattr(torch.autocast, "__enter__", lambda self: pytest.fail("autocast was entered"))
    network = small_network()
    plan = cuda_graph.plan_convolutions(network, SHAPE, torch.device("cpu"), torch.bfloat16)
    assert plan is not None
    plan()
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)} and len(seen) == len(cuda_graph._planned) > 5


def test_nothing_is_planned_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def free_and_total(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return cuda_graph.MEMORY_FOR_PLANNING - 1, cuda_graph.MEMORY_FOR_PLANNING

    monkeypatch.setattr(cuda_graph, "_planned", set())  # other tests may have planned the same network
    monkeypatch.setattr(torch.cuda, "mem_get_info", free_and_total)
    monkeypatch.setattr(torch, "convolution", lambda *_: pytest.fail("a convolution was run"))
    plan = cuda_graph.plan_convolutions(small_network(), SHAPE, torch.device("cpu"), torch.float32)
    assert plan is not None
    plan()
    assert asked == [torch.device("cpu")] and not cuda_graph._planned


def test_a_network_that_needs_values_is_not_planned() -> None:
    class Branching(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.flatten(1) if images.sum() > 0 else -images.flatten(1)

    network = CCLNet(Branching(), 3, "hard", feature_width=12).classifier
    with pytest.raises(RuntimeError):
        cuda_graph.convolutions(network, (2, 3, 2, 2))
    assert cuda_graph.plan_convolutions(network, (2, 3, 2, 2), torch.device("cpu"), torch.float32) is None
