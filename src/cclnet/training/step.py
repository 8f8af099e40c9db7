"""One training step: augment, forward, backward, clip, update; compiled, and replayed as a CUDA graph, where
that pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cclnet.data.augment import AugmentSettings, augment
from cclnet.data.loader import Batch
from cclnet.training.compiled import compiled, recorded


class TrainStep:
    """``step(batch)`` trains on one batch and returns its losses as one tensor, total first, without waiting
    for the device.

    Everything up to the clipped gradients is fixed work on fixed shapes, so on one GPU it is captured as a CUDA
    graph at the first batch. The optimizer stays outside: its rates are plain numbers that change.

    Args:
        network: called as ``network(images, labels, weight)`` → Loss; may be wrapped for precision, compiling
            or distributed running.
        optimizer: its parameter groups are clipped one by one, each by its own norm.
        backward: how to run backward (Fabric's, which knows about precision and strategy).
        clip: largest gradient norm of a group; 0 for none.
        capture: replay as a CUDA graph (one device only).
        rehearsal: done in a thread while the first batch is compiled and captured.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        backward: Callable[[Tensor], None],
        settings: AugmentSettings,
        mean: Tensor,
        std: Tensor,
        clip: float,
        compile: bool,
        capture: bool,
        rehearsal: Callable[[], None] | None = None,
    ) -> None:
        self.network = network
        self.optimizer = optimizer
        self.backward = backward
        self.clip = clip
        self.capture = capture
        self.rehearsal = rehearsal
        self.terms: list[str] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Batch | None = None
        self._losses: Tensor | None = None

        def augmented(crops: Tensor, parameters: Tensor | None) -> Tensor:
            assert parameters is not None  # a training batch has them
            return augment(crops, parameters, settings, mean, std)

        self.augmented = compiled(augmented, fullgraph=True) if compile else augmented

    def __call__(self, batch: Batch) -> Tensor:
        if self.capture and self._graph is None:
            self._record(batch)
        if self._graph is None:
            self.optimizer.zero_grad()
            losses = self._gradients(batch)
        else:
            assert self._inputs is not None and self._losses is not None
            _copy(self._inputs, batch)
            self._graph.replay()
            losses = self._losses.clone()
        self.optimizer.step()
        return losses

    def _gradients(self, batch: Batch) -> Tensor:
        images = self.augmented(batch.crops, batch.parameters)
        loss = self.network(images, batch.labels, batch.weight)
        self.backward(loss.total)
        if self.clip > 0:
            for group in self.optimizer.param_groups:
                nn.utils.clip_grad_norm_(group["params"], self.clip)
        self.terms = ["loss", *loss.terms]
        return torch.stack([loss.total, *loss.terms.values()]).detach()

    def _record(self, batch: Batch) -> None:
        """Warm up, then capture. The warm-up must leave no trace: buffers (batch norm's averages) and the random
        state are put back, weights are not touched because the optimizer does not step."""
        self._inputs = _clone(batch)
        buffers = [(buffer, buffer.clone()) for buffer in self.network.buffers()]
        random_state = torch.cuda.get_rng_state()
        inputs = self._inputs

        def work() -> None:
            self._losses = self._gradients(inputs)

        graph = recorded(work, self.optimizer, self.rehearsal)
        for buffer, before in buffers:
            buffer.copy_(before)
        torch.cuda.set_rng_state(random_state)
        self._graph = graph


def _map(function: Callable[..., Any], *batches: Any) -> Any:
    """Apply ``function`` to the tensors of batches of the same structure."""
    first = batches[0]
    if isinstance(first, Tensor):
        return function(*batches)
    if isinstance(first, tuple):
        parts = [_map(function, *parts) for parts in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return first


def _clone(batch: Batch) -> Batch:
    copied: Batch = _map(torch.clone, batch)
    return copied


def _copy(into: Batch, batch: Batch) -> None:
    _map(lambda a, b: a.copy_(b, non_blocking=True), into, batch)
