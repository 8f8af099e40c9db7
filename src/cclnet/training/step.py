"""One training step: augment, forward, backward, clip, update; replayed as a CUDA graph on one GPU, compiled if the run
is long."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from cclnet.data.augment import augment
from cclnet.data.loader import Batch
from cclnet.methods.base import epoch_sums
from cclnet.network import clip_gradients
from cclnet.settings import Settings
from cclnet.training.cuda_graph import capture_graph, compiled


class TrainStep:
    """``step(batch)`` trains on one batch and returns its losses as one tensor, total first, without waiting for the
    device.

    Everything up to the clipped gradients is fixed work on fixed shapes, so on one GPU it is captured as a CUDA graph
    at the first batch. The optimizer step is not captured, because the learning rates are plain numbers that change.

    Args:
        network: called as ``network(images, labels, weight)``, returns a Loss; may be wrapped for precision,
            compilation or distributed training.
        optimizer: the gradients of the parameter groups of each name are clipped by their own norm.
        backward: runs the backward pass (Fabric's, which handles precision and strategy).
        settings: augmentation; ``clip``, the largest gradient norm of a group (0 for none); ``accumulate``, the number
            of chunks of a batch that go through the network one after the other, to save memory.
        mean, std: normalisation of the images.
        compile: compile the augmentation.
        capture: replay a CUDA graph (one GPU only).
        during_warmup: called before the capture; returns a function to run in a thread while the network compiles.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        backward: Callable[[Tensor], None],
        settings: Settings,
        mean: Tensor,
        std: Tensor,
        *,
        compile: bool,
        capture: bool,
        during_warmup: Callable[[], Callable[[], None] | None] = lambda: None,
    ) -> None:
        self.network, self.optimizer, self.backward = network, optimizer, backward
        self.clip, self.accumulate = settings.clip, settings.accumulate
        self.capture, self.during_warmup = capture, during_warmup
        self.terms: list[str] = []  # names of the losses, known after the first step
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph_batch: Batch | None = None  # input and output of the graph: tensors at fixed addresses
        self._graph_losses: Tensor | None = None

        augmentation = settings.augment

        def augment_batch(crops: Tensor, parameters: Tensor | None) -> Tensor:
            assert parameters is not None  # a training batch has them
            return augment(crops, parameters, augmentation, mean, std)

        self.augment_batch = compiled(augment_batch, fullgraph=True) if compile else augment_batch

    def __call__(self, batch: Batch) -> Tensor:
        if self.capture and self._graph is None:
            self._capture(batch)
        if self._graph is None:
            self.optimizer.zero_grad()
            losses = self._compute_gradients(batch)
        else:
            assert self._graph_batch is not None and self._graph_losses is not None
            _copy(self._graph_batch, batch)
            self._graph.replay()
            losses = self._graph_losses.clone()
        self.optimizer.step()
        return losses

    def _compute_gradients(self, batch: Batch) -> Tensor:
        images = self.augment_batch(batch.crops, batch.parameters)
        chunks = self._chunks(images, batch)
        losses = torch.stack([self._forward_backward(*chunk, len(images)) for chunk in chunks]).sum(dim=0)
        if self.clip > 0:
            clip_gradients(self.optimizer.param_groups, self.clip)
        return losses

    def _chunks(self, images: Tensor, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield images, labels and weights of each chunk. The sizes differ by one image at most."""
        count = self.accumulate
        if count == 1:
            yield images, batch.labels, batch.weight
            return
        weights = (None,) * count if batch.weight is None else batch.weight.tensor_split(count)
        yield from zip(images.tensor_split(count), batch.labels.tensor_split(count), weights, strict=True)

    def _forward_backward(self, images: Tensor, labels: Tensor, weight: Tensor | None, batch_size: int) -> Tensor:
        """Add the gradients of a chunk; return its share of the batch's losses."""
        loss = self.network(images, labels, weight)
        share = len(images) / batch_size
        self.backward(loss.total * share if share < 1 else loss.total)
        self.terms = ["loss", *loss.terms]
        return torch.stack([loss.total, *loss.terms.values()]).detach() * share

    def _capture(self, batch: Batch) -> None:
        """Warm up and capture the graph.

        The warm-up must leave the state unchanged: buffers (batch norm statistics), sums of the epoch and the random
        state are restored.
        The weights do not change, because the optimizer does not step.
        """
        static = _clone(batch)
        changed = [*self.network.buffers(), *(share for _, share in epoch_sums(self.network))]
        buffers = [(buffer, buffer.clone()) for buffer in changed]
        random_state = torch.cuda.get_rng_state()

        def compute_gradients() -> None:
            self._graph_losses = self._compute_gradients(static)

        graph = capture_graph(compute_gradients, self.optimizer, self.during_warmup())
        for buffer, before in buffers:
            buffer.copy_(before)
        torch.cuda.set_rng_state(random_state)
        self._graph, self._graph_batch = graph, static


def _clone(batch: Batch) -> Batch:
    return Batch(*(value.clone() if isinstance(value, Tensor) else value for value in batch))  # type: ignore[arg-type]


def _copy(into: Batch, batch: Batch) -> None:
    for target, value in zip(into, batch, strict=True):
        if isinstance(target, Tensor) and isinstance(value, Tensor):
            target.copy_(value, non_blocking=True)
