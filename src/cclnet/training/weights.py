"""Starting from weights of elsewhere, for people without a network."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cclnet.errors import InputError
from cclnet.network import CCLNet


def load_weights(network: CCLNet, path: Path) -> None:
    """Start from the weights in a file. A classifier for other classes is left out and starts anew; any other
    mismatch is refused, listed by name."""
    given = read_weights(path)
    shipped, last = network.classifier.shipped, network.classifier.last_layer
    own = shipped.state_dict()
    fits = {name: value for name, value in given.items() if name in own and value.shape == own[name].shape}
    missing = [name for name in own if name not in fits and not name.startswith(last)]
    unused = [f"{name} {list(value.shape)}" for name, value in given.items() if name not in fits]
    unused = [name for name in unused if not name.startswith(last)]
    if missing or unused:
        raise InputError(
            f"{path} does not fit the backbone. Missing or of another shape: {_listed(missing)}. "
            f"Not used: {_listed(unused)}. Choose the backbone these weights were made for, and for a transformer "
            "the size of the images, augment.crop."
        )
    shipped.load_state_dict(fits, strict=False)


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a .safetensors file, or of a state dict saved by torch; pickled objects are refused."""
    if not path.is_file():
        raise InputError(f"there is no weights file {path}.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise InputError(f"{path} is refused: it is not a .safetensors file or plain state dict ({error}).") from error
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"{path} holds no state dict: expected names with tensors.")
    return state


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return (", ".join(names[:12]) or "none") + more
