"""A CCLNet in the Lightning Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from cclnet.integrations import accuracy, validation_loss
from cclnet.network import CCLNet, clip_gradients

Groups = list[dict[str, Any]]


class LightningClassifier(pl.LightningModule):  # type: ignore[misc]  # lightning is not typed
    """A Lightning module for batches (images, labels). It logs loss terms in training, else loss and accuracy.

    The module contains the whole network, so that a distributed strategy wraps backbone and head together.
    ``Trainer(gradient_clip_val=…)`` clips each parameter group by its own norm.

    Args:
        optimizer: builds an optimizer from parameter groups; by default SGD with momentum 0.9. Override
            ``configure_optimizers`` to add a schedule.
        rates: lr, lr_ccl and weight_decay, as in ``CCLNet.param_groups``.
    """

    def __init__(
        self, network: CCLNet, optimizer: Callable[[Groups], torch.optim.Optimizer] | None = None, **rates: Any
    ) -> None:
        super().__init__()
        self.network, self.rates = network, rates
        self.make_optimizer = optimizer or (lambda groups: torch.optim.SGD(groups, momentum=0.9))

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        loss = self.network(*batch)
        self.log_dict(loss.terms, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return loss.total

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        self._log_scores(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        self._log_scores(batch, "test")

    def predict_step(self, batch: Tensor | Sequence[Tensor], batch_index: int) -> Tensor:
        """Logits of a batch of images, with or without labels."""
        return self(batch if isinstance(batch, Tensor) else batch[0])

    def _log_scores(self, batch: tuple[Tensor, Tensor], split: str) -> None:
        images, labels = batch
        logits = self(images)
        scores = {"loss": validation_loss, "accuracy": accuracy}
        logged = {f"{split}_{name}": score(self.network.method, logits, labels) for name, score in scores.items()}
        self.log_dict(logged, batch_size=len(images), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.network.method.end_epoch())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.network.param_groups(**self.rates))

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip network and method by their own norms: with one norm over all parameters, the gradient of the head would
        shrink the step of the network."""
        if gradient_clip_val and gradient_clip_algorithm != "value":
            clip_gradients(optimizer.param_groups, gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
