"""A CCLNet inside the Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cclnet.errors import InputError
from cclnet.integrations.scores import plain_loss
from cclnet.network import CCLNet


class TrainerModel(nn.Module):
    """Speaks the Trainer's language: ``model(pixel_values, labels)`` → a dict with ``loss`` in training, and
    with ``loss`` (cross entropy, binary for several labels) and ``logits`` in evaluation.

    The whole network is inside this module, so that distributed data parallel wraps backbone and head together.
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
        return {"loss": plain_loss(self.network.method, logits, labels), "logits": logits}


def method_callback(network: CCLNet, clip_norm: float | None = None) -> Any:
    """A callback for the Trainer that ends the method's epochs, and clips each parameter group by its own norm.

    The Trainer's own ``max_grad_norm`` takes one norm over all parameters and would let the head's gradient
    shrink the network's step, so it must be 0 where ``clip_norm`` is given.
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise InputError(
            "the Hugging Face Trainer needs transformers and accelerate: pip install 'cclnet[huggingface]'"
        ) from error

    class MethodCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if clip_norm and args.max_grad_norm:
                raise InputError(
                    f"max_grad_norm is {args.max_grad_norm}, which clips all parameters by one norm before each "
                    "group is clipped by its own. Use TrainingArguments(max_grad_norm=0)."
                )
            if clip_norm and args.fp16:
                raise InputError(
                    "clip_norm would see gradients that are still scaled for float16. Use "
                    "TrainingArguments(bf16=True), or leave clip_norm out."
                )

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if clip_norm:
                for group in kwargs["optimizer"].param_groups:
                    nn.utils.clip_grad_norm_(group["params"], clip_norm)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            network.method.end_epoch()

    return MethodCallback()
