"""The network that is shipped: from a uint8 image to calibrated probabilities and class activation maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from cclnet.data.augment import normalise
from cclnet.errors import InputError
from cclnet.functional import inverse_of, unsoften_by
from cclnet.network import TimmClassifier, image_size_settings
from cclnet.runs.checksums import checking
from cclnet.runs.model import ModelDescription


class Shipped(nn.Module):
    """``shipped(uint8 [N, h, w, 3])`` → probabilities [N, K]; maps [N, K, h', w'] where they have a closed form; with
    ``with_features`` the pooled features [N, F].

    A network that averages its last feature map A and classifies linearly has the logit
    ``z_k = b_k + mean_xy Σ_c W_kc A_c(x, y)``. Its class activation map ``M_k(x, y) = Σ_c W_kc A_c(x, y)`` is what each
    position adds to the logit; the mean of the map is the logit without its bias.
    """

    def __init__(
        self, model: nn.Module, description: ModelDescription, temperature: float | None = None,
        with_features: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model: Any = model
        self.with_features = with_features
        self.multilabel = description.multilabel
        self.temperature = temperature or 1.0
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(description.mean), persistent=False)
        self.register_buffer("std", torch.tensor(description.std), persistent=False)
        self.inverse: Tensor | None
        target = None if description.target is None else torch.tensor(description.target, dtype=torch.float64)
        self.register_buffer("inverse", None if target is None else inverse_of(target), persistent=False)
        self.eval()
        self.layout = map_layout(self, description.crop)
        self.maps = self.layout is not None

    def features(self, batch: Tensor) -> Tensor:
        """The last feature map, in the layout of the network."""
        return self.model.forward_features(normalise(batch, self.mean, self.std))

    def probabilities(self, logits: Tensor) -> Tensor:
        if self.inverse is not None:
            logits = unsoften_by(torch.softmax(logits, dim=1), self.inverse.to(logits.dtype)).log()
        scaled = logits / self.temperature
        return torch.sigmoid(scaled) if self.multilabel else torch.softmax(scaled, dim=1)

    def evidence(self, features: Tensor) -> Tensor:
        """The class activation maps of all classes, [N, K, h', w']."""
        weight = self.model.get_classifier().weight
        planes = features if self.layout == "NCHW" else features.permute(0, 3, 1, 2)
        return nn.functional.conv2d(planes, weight[:, :, None, None])

    def forward(self, batch: Tensor) -> tuple[Tensor, ...]:
        features = self.features(batch)
        outputs = [self.probabilities(self.model.forward_head(features))]
        outputs += [self.evidence(features)] if self.maps else []
        outputs += [self.pooled(features)] if self.with_features else []
        return tuple(outputs)

    def pooled(self, features: Tensor) -> Tensor:
        """The pooled features before the classifier, [N, F]."""
        return self.model.forward_head(features, pre_logits=True)

    @property
    def outputs(self) -> list[str]:
        """The names of what ``forward`` returns."""
        return ["probabilities", *(["maps"] if self.maps else []), *(["features"] if self.with_features else [])]


@torch.no_grad()
def map_layout(shipped: Shipped, crop: tuple[int, int]) -> str | None:
    """ "NCHW" or "NHWC" where the logits are a linear function of the mean of the last feature map, else None.

    Tested on an image, because what is between pooling and classifier (a norm, another layer) has many names.
    """
    linear = shipped.model.get_classifier()
    noise = torch.randint(256, (1, *crop, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    features = shipped.features(noise.to(shipped.mean.device))
    if not isinstance(linear, nn.Linear) or features.dim() != 4:
        return None
    logits = shipped.model.forward_head(features)
    for layout, positions in (("NCHW", (2, 3)), ("NHWC", (1, 2))):
        pooled = features.mean(dim=positions)
        if pooled.shape[1] == linear.in_features and torch.allclose(linear(pooled), logits, rtol=1e-4, atol=1e-4):
            return layout
    return None


def read_shipped(
    path: Path, description: ModelDescription, temperature: float | None = None, with_features: bool = False
) -> Shipped:
    """The network of model.json with the weights in ``path``, a .safetensors file, which cannot contain code.

    The network is built after its shapes were compared with those in the file, so that a small file that claims a huge
    network costs no memory. ``temperature`` None is 1.
    """
    _refuse_pickle(path)
    size = image_size_settings(description.backbone, description.crop)
    with checking(path):
        return Shipped(_read_network(path, description, size), description, temperature, with_features)


def _read_network(path: Path, description: ModelDescription, size: dict[str, Any]) -> nn.Module:
    name, count = description.backbone, len(description.classes)
    try:
        with safe_open(path, framework="pt") as file:
            given = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        with torch.device("meta"):  # shapes without memory
            empty = TimmClassifier(name, count, backbone_settings=size).shipped
        shapes = {key: tuple(value.shape) for key, value in empty.state_dict().items()}
        if given != shapes:
            raise InputError(
                f"{path} is refused: it does not fit {name} with {count} classes, which model.json names. Expected: "
                f"{_listed(shapes, given) or 'nothing more'}; found instead: {_listed(given, shapes) or 'nothing'}."
            )
        model = TimmClassifier(name, count, backbone_settings=size).shipped
        model.load_state_dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is refused: it is not a whole .safetensors file ({error}).") from error
    return model


def _refuse_pickle(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(9)
    # A .safetensors file begins with the length of its header, any 8 bytes, then the header, which begins with "{".
    if start[8:] != b"{" and (start[:4] == b"PK\x03\x04" or start[:1] == b"\x80"):
        raise InputError(
            f"{path} is refused: despite its name it is a pickle or a file of torch.save, which can run code when it "
            "is loaded. Models are loaded only from .safetensors and .onnx files."
        )


def _listed(shapes: Mapping[str, tuple[int, ...]], other: Mapping[str, tuple[int, ...]]) -> str:
    """The first entries of ``shapes`` that ``other`` does not have."""
    names = [f"{name} {list(shape)}" for name, shape in shapes.items() if other.get(name) != shape]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def grad_cam(model: Any, features: Tensor, classes: Tensor) -> Tensor:
    """Grad-CAM (captum) of one class per image at the last feature map, before clipping, [N, h', w'].

    ``Σ_c α_c A_c`` with ``α_c`` the mean over positions of ``∂z_k / ∂A_c``. Where the network averages A and classifies
    linearly, this is the class activation map divided by the number of positions.
    """
    try:
        from captum.attr import LayerGradCam
    except ImportError as error:
        raise InputError(
            "the maps of this network have no closed form, and Grad-CAM needs captum: pip install 'cclnet[explain]'"
        ) from error
    planes, restore = _as_planes(model, features.detach())
    head = _Head(model, restore)
    with torch.enable_grad():
        maps = LayerGradCam(head, head.planes).attribute(planes.requires_grad_(), target=classes)[:, 0].detach()
    if not maps.any():
        raise InputError(
            f"{type(model).__name__} takes its decision from a class token and not from its last feature map, so it "
            "has no class activation map. A backbone that averages its features has one."
        )
    return maps


class _Head(nn.Module):
    """The network after the last feature map, as a function of it."""

    def __init__(self, model: Any, restore: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.planes = nn.Identity()
        self.model, self.restore = model, restore

    def forward(self, planes: Tensor) -> Tensor:
        return self.model.forward_head(self.restore(self.planes(planes)))


def _as_planes(model: Any, features: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A feature map as [N, C, h, w], and the function that restores the layout of the network."""
    if features.dim() == 4 and features.shape[1] == model.num_features:
        return features, lambda planes: planes
    if features.dim() == 4:
        return features.permute(0, 3, 1, 2), lambda planes: planes.permute(0, 2, 3, 1)
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    prefix = getattr(model, "num_prefix_tokens", 0)
    if features.dim() != 3 or grid is None or features.shape[1] != prefix + grid[0] * grid[1]:
        raise InputError(f"{type(model).__name__} has no spatial feature map to explain: {list(features.shape)}.")
    first, patches = features[:, :prefix], features[:, prefix:]
    return (
        patches.transpose(1, 2).unflatten(2, grid),
        lambda planes: torch.cat([first, planes.flatten(2).transpose(1, 2)], dim=1),
    )
