"""One training step: augment, forward, backward, clip, update; compiled, and replayed as a CUDA graph, where
that pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cclnet.data.augment import augment
from cclnet.data.loader import Batch
from cclnet.settings import AugmentSettings
from cclnet.training.cuda_graph import compiled, recorded


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
        accumulate: parts of a batch that go through the network one after the other, where it does not fit whole.
        capture: replay as a CUDA graph (one device only).
        rehearsal: makes what is done in a thread while the first batch is compiled and captured.
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
        accumulate: int,
        compile: bool,
        capture: bool,
        rehearsal: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        self.network = network
        self.optimizer = optimizer
        self.backward = backward
        self.clip = clip
        self.accumulate = accumulate
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
        losses = torch.stack([self._backward(*part, len(images)) for part in self._parts(images, batch)]).sum(dim=0)
        if self.clip > 0:
            for group in self.optimizer.param_groups:
                nn.utils.clip_grad_norm_(group["params"], self.clip)
        return losses

    def _parts(self, images: Tensor, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Images, labels and weights of each part; no two differ by more than one image."""
        count = self.accumulate
        if count == 1:
            yield images, batch.labels, batch.weight
            return
        weights = (None,) * count if batch.weight is None else batch.weight.tensor_split(count)
        yield from zip(images.tensor_split(count), batch.labels.tensor_split(count), weights, strict=True)

    def _backward(self, images: Tensor, labels: Tensor, weight: Tensor | None, of: int) -> Tensor:
        """Add the gradients of a part of ``of`` images; returns what it adds to the losses of all."""
        loss = self.network(images, labels, weight)
        share = len(images) / of
        self.backward(loss.total * share if share < 1 else loss.total)
        self.terms = ["loss", *loss.terms]
        return torch.stack([loss.total, *loss.terms.values()]).detach() * share

    def _record(self, batch: Batch) -> None:
        """Warm up, then capture. The warm-up must leave no trace: buffers (batch norm's averages) and the random
        state are put back, weights are not touched because the optimizer does not step."""
        self._inputs = _clone(batch)
        buffers = [(buffer, buffer.clone()) for buffer in self.network.buffers()]
        random_state = torch.cuda.get_rng_state()
        inputs = self._inputs

        def work() -> None:
            self._losses = self._gradients(inputs)

        graph = recorded(work, self.optimizer, self.rehearsal and self.rehearsal())
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
