"""A CCLNet in the Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cclnet.errors import InputError
from cclnet.integrations import validation_loss
from cclnet.network import CCLNet, clip_gradients


class TrainerModel(nn.Module):
    """A CCLNet with the interface of the Trainer: ``model(pixel_values, labels)`` → a dict.

    The dict has ``loss`` in training, and ``loss`` (cross entropy with the hard labels) and ``logits`` in evaluation.
    The module contains the whole network, so that distributed data parallel wraps backbone and head together.
    """

    def __init__(self, network: CCLNet) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if labels is not None and self.training:
            return {"loss": self.network(pixel_values, labels).total}
        logits: Tensor = self.network(pixel_values)
        if labels is None:
            return {"logits": logits}
        return {"loss": validation_loss(self.network.method, logits, labels), "logits": logits}


def method_callback(network: CCLNet, clip_norm: float | None = None) -> Any:
    """A callback for the Trainer that calls ``end_epoch`` of the method and clips each parameter group by its own norm.

    With one norm over all parameters (``max_grad_norm``), the gradient of the head would shrink the network's step.
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise InputError("the Trainer needs transformers and accelerate: pip install 'cclnet[huggingface]'") from error

    class MethodCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if clip_norm and args.max_grad_norm:
                raise InputError(
                    f"clip_norm needs max_grad_norm=0, got {args.max_grad_norm}, which clips all parameters by one "
                    "norm first. Use TrainingArguments(max_grad_norm=0)."
                )
            if clip_norm and args.fp16:
                raise InputError(
                    "clip_norm does not work with fp16, whose gradients are still scaled at this point. Use "
                    "TrainingArguments(bf16=True), or omit clip_norm."
                )

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if clip_norm:
                clip_gradients(kwargs["optimizer"].param_groups, clip_norm)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            network.method.end_epoch()

    return MethodCallback()
