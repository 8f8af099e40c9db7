"""CCL-Net: soft labels learned from how alike the classes of your images look."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cclnet.errors import InputError

if TYPE_CHECKING:
    from cclnet.deploy.model import load
    from cclnet.head import CCLHead
    from cclnet.methods import METHODS, Loss, Method, build_method, register_method
    from cclnet.network import CCLNet

__version__ = "0.1.0"

__all__ = ["METHODS", "CCLHead", "CCLNet", "InputError", "Loss", "Method", "__version__", "build_method", "load",
           "register_method"]  # fmt: skip

# Where each name is, imported when it is first asked for: neither a model in ONNX Runtime nor `--help` needs torch.
_PLACES = {
    "CCLHead": "cclnet.head",
    "CCLNet": "cclnet.network",
    "METHODS": "cclnet.methods",
    "Loss": "cclnet.methods",
    "Method": "cclnet.methods",
    "build_method": "cclnet.methods",
    "load": "cclnet.deploy.model",
    "register_method": "cclnet.methods",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'cclnet' has no attribute {name!r}")
    value = getattr(import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
