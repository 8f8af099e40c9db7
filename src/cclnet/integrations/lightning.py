"""A CCLNet in the Lightning Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from cclnet.integrations import accuracy, validation_loss
from cclnet.network import CCLNet

Groups = list[dict[str, Any]]


class LightningClassifier(pl.LightningModule):  # type: ignore[misc]  # lightning is not typed
    """A Lightning module for batches (images, labels), which logs the loss terms in training, and loss and accuracy in
    validation and testing.

    The module contains the whole network, so that a distributed strategy wraps backbone and head together.
    ``Trainer(gradient_clip_val=…)`` clips each parameter group by its own norm.

    Args:
        network: the network to train, with any method.
        optimizer: builds an optimizer from parameter groups; by default SGD with momentum 0.9. Override
            ``configure_optimizers`` to add a schedule.
        lr, lr_ccl, weight_decay: as in ``CCLNet.param_groups``.
    """

    def __init__(
        self,
        network: CCLNet,
        optimizer: Callable[[Groups], torch.optim.Optimizer] | None = None,
        lr: float = 0.1,
        lr_ccl: float = 0.0005,
        weight_decay: float = 1e-4,
    ) -> None:
        super().__init__()
        self.network = network
        self.make_optimizer = optimizer or (lambda groups: torch.optim.SGD(groups, momentum=0.9))
        self.rates = {"lr": lr, "lr_ccl": lr_ccl, "weight_decay": weight_decay}

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        loss = self.network(*batch)
        self.log_dict(loss.terms, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        total: Tensor = loss.total
        return total

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        self._log_scores(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        self._log_scores(batch, "test")

    def predict_step(self, batch: Tensor | Sequence[Tensor], batch_index: int) -> Tensor:
        """Logits of a batch of images, with or without labels."""
        logits: Tensor = self(batch if isinstance(batch, Tensor) else batch[0])
        return logits

    def _log_scores(self, batch: tuple[Tensor, Tensor], split: str) -> None:
        images, labels = batch
        logits = self(images)
        scores = {f"{split}_loss": validation_loss(self.network.method, logits, labels)}
        scores[f"{split}_accuracy"] = accuracy(self.network.method, logits, labels)
        self.log_dict(scores, batch_size=len(images), sync_dist=True)

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
        """Clip each parameter group by its own norm: with one norm over all parameters, the gradient of the head would
        shrink the step of the network."""
        if gradient_clip_val and gradient_clip_algorithm != "value":
            for group in optimizer.param_groups:
                nn.utils.clip_grad_norm_(group["params"], gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
