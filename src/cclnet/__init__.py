"""CCL-Net: soft labels learned from the visual similarity of classes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cclnet.errors import InputError

if TYPE_CHECKING:
    from cclnet.api import compare, ensemble, evaluate, probe, train
    from cclnet.data.sources import open_data
    from cclnet.deploy.predictor import load
    from cclnet.head import CCLHead
    from cclnet.methods import METHODS, Loss, Method, build_method, register_method
    from cclnet.network import CCLNet
    from cclnet.training.soft_label_classifier import SoftLabelClassifier

__version__ = "0.2.0"

__all__ = [
    "METHODS",
    "CCLHead",
    "CCLNet",
    "InputError",
    "Loss",
    "Method",
    "SoftLabelClassifier",
    "__version__",
    "build_method",
    "compare",
    "ensemble",
    "evaluate",
    "load",
    "open_data",
    "probe",
    "register_method",
    "train",
]

# Imported on first use: neither a model in ONNX Runtime nor `--help` needs torch.
_MODULES = {
    "CCLHead": "cclnet.head",
    "CCLNet": "cclnet.network",
    "METHODS": "cclnet.methods",
    "Loss": "cclnet.methods",
    "Method": "cclnet.methods",
    "SoftLabelClassifier": "cclnet.training.soft_label_classifier",
    "build_method": "cclnet.methods",
    "compare": "cclnet.api",
    "ensemble": "cclnet.api",
    "evaluate": "cclnet.api",
    "load": "cclnet.deploy.predictor",
    "open_data": "cclnet.data.sources",
    "probe": "cclnet.api",
    "train": "cclnet.api",
    "register_method": "cclnet.methods",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'cclnet' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
