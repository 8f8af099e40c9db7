"""Weights from a .safetensors file, which cannot carry code; nothing is built before their shapes are known to fit."""

from __future__ import annotations

from pathlib import Path

from cclnet.deploy.description import Description
from cclnet.deploy.shipped import Shipped
from cclnet.errors import InputError


def read_shipped(path: Path, description: Description, maps: bool = True) -> Shipped:
    """The network of model.json with the weights in ``path``."""
    import torch
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    from cclnet.network import TimmClassifier, image_size_settings

    refuse_pickle(path)
    name, count = description.backbone, len(description.classes)
    size = image_size_settings(name, description.crop)
    try:
        with safe_open(path, framework="pt") as file:
            given = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        with torch.device("meta"):  # shapes alone: a small file that claims a huge network costs no memory
            empty = TimmClassifier(name, count, backbone_settings=size).shipped
        shapes = {key: tuple(value.shape) for key, value in empty.state_dict().items()}
        if given != shapes:
            raise _does_not_fit(path, description, given, shapes)
        model = TimmClassifier(name, count, backbone_settings=size).shipped
        model.load_state_dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is refused: it is not a whole .safetensors file ({error}).") from error
    return Shipped(model, description, maps)


def refuse_pickle(path: Path) -> None:
    """Say what a file that is named as weights really is, where it is one that could run code when it is loaded."""
    with path.open("rb") as file:
        start = file.read(9)
    # A .safetensors file begins with the length of its header, which may look like anything, then the header itself.
    if start[8:] != b"{" and (start[:4] == b"PK\x03\x04" or start[:1] == b"\x80"):
        raise InputError(
            f"{path} is refused: whatever its name says, it is a pickle or a file of torch.save, which can run code "
            "when it is loaded. Models are loaded from .safetensors and .onnx files alone."
        )


def _does_not_fit(
    path: Path, description: Description, given: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]]
) -> InputError:
    missing = [f"{name} {list(shape)}" for name, shape in shapes.items() if given.get(name) != shape]
    unused = [f"{name} {list(shape)}" for name, shape in given.items() if shapes.get(name) != shape]
    listed = [
        ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") for names in (missing, unused)
    ]
    return InputError(
        f"{path} is refused: it does not fit {description.backbone} with {len(description.classes)} classes, which "
        f"model.json names. Expected: {listed[0] or 'nothing more'}; found instead: {listed[1] or 'nothing'}."
    )
