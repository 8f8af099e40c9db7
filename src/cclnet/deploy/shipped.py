"""The network that is shipped: from a uint8 image to calibrated probabilities and class activation maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from cclnet.data.augment import normalise
from cclnet.data.table import listed
from cclnet.data.views import VIEWS
from cclnet.errors import InputError
from cclnet.functional import inverse_of, unsoften_by
from cclnet.network import TimmClassifier, image_size_settings
from cclnet.runs.calibration_map import CalibrationMap
from cclnet.runs.checksums import checking
from cclnet.runs.model import ModelDescription
from cclnet.settings import TTA

Answer = tuple[Tensor, Tensor | None, Tensor | None]  # probabilities, maps, features


class Calibrated(nn.Module):
    """Logits [N, K] → calibrated probabilities, by the temperature and class offsets of a calibration map."""

    def __init__(self, calibration: CalibrationMap | None, description: ModelDescription) -> None:
        super().__init__()
        calibration = calibration or CalibrationMap()
        calibration.check(len(description.classes), description.multilabel)
        self.multilabel, self.temperature = description.multilabel, calibration.temperature or 1.0
        self.offsets: Tensor | None
        given = None if calibration.offsets is None else torch.tensor(calibration.offsets, dtype=torch.float64)
        self.register_buffer("offsets", given, persistent=False)

    @property
    def is_identity(self) -> bool:
        return self.temperature == 1.0 and self.offsets is None

    def forward(self, logits: Tensor) -> Tensor:
        scaled = logits / self.temperature
        if self.offsets is not None:
            scaled = scaled + self.offsets.to(logits.dtype)
        return torch.sigmoid(scaled) if self.multilabel else torch.softmax(scaled, dim=1)


class Shipped(nn.Module):
    """``shipped(uint8 [N, h, w, 3])`` → probabilities [N, K]; maps [N, K, h', w'] where they have a closed form; with
    ``with_features`` the pooled features [N, F].

    A network that averages its last feature map A and classifies linearly has the logit
    ``z_k = b_k + mean_xy Σ_c W_kc A_c(x, y)``. Its class activation map ``M_k(x, y) = Σ_c W_kc A_c(x, y)`` is what each
    position adds to the logit; the mean of the map is the logit without its bias. With test-time augmentation the maps
    are those of the image itself.
    """

    def __init__(
        self, model: nn.Module, description: ModelDescription, calibration: CalibrationMap | None = None,
        with_features: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model: Any = model
        self.with_features = with_features
        self.multilabel = description.multilabel
        self.calibrated = Calibrated(calibration, description)
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(description.mean), persistent=False)
        self.register_buffer("std", torch.tensor(description.std), persistent=False)
        self.views = [VIEWS[name] for name in TTA[description.tta]]
        self.inverse: Tensor | None
        target = None if description.target is None else torch.tensor(description.target, dtype=torch.float64)
        self.register_buffer("inverse", None if target is None else inverse_of(target), persistent=False)
        self.eval()
        self.layout = map_layout(self, description.crop)
        self.maps = self.layout is not None

    def features(self, batch: Tensor) -> Tensor:
        """The last feature map, in the layout of the network."""
        return self.model.forward_features(normalise(batch, self.mean, self.std))

    def logits(self, batch: Tensor, features: Tensor) -> Tensor:
        """The logits [N, K], averaged over the views; ``features`` are those of the first view, the image itself."""
        logits = self.model.forward_head(features)
        if len(self.views) == 1:
            return logits
        images = normalise(batch, self.mean, self.std)
        return torch.stack([logits, *(self.model(view(images)) for view in self.views[1:])]).mean(dim=0)

    def probabilities(self, logits: Tensor) -> Tensor:
        if self.inverse is not None:
            logits = unsoften_by(torch.softmax(logits, dim=1), self.inverse.to(logits.dtype)).log()
        return self.calibrated(logits)

    def evidence(self, features: Tensor) -> Tensor:
        """The class activation maps of all classes, [N, K, h', w']."""
        weight = self.model.get_classifier().weight
        planes = features if self.layout == "NCHW" else features.permute(0, 3, 1, 2)
        return nn.functional.conv2d(planes, weight[:, :, None, None])

    def forward(self, batch: Tensor) -> tuple[Tensor, ...]:
        features = self.features(batch)
        outputs = [self.probabilities(self.logits(batch, features))]
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
    def answer(self, batch: Tensor, maps: bool) -> Answer:
        """Probabilities in float64; with ``maps`` the map of the most probable class of each image; the pooled features
        if ``with_features``."""
        features = self.features(batch)
        probabilities = self.probabilities(self.logits(batch, features).double())
        pooled = self.pooled(features) if self.with_features else None
        top = probabilities.argmax(dim=1)
        if not maps:
            return probabilities, None, pooled
        if self.layout is not None:
            return probabilities, self.evidence(features)[torch.arange(len(batch)), top], pooled
        return probabilities, grad_cam(self.model, features, top), pooled


class Ensemble(nn.Module):
    """Several networks as one: ``ensemble(uint8 [N, h, w, 3])`` → the mean of their calibrated probabilities; of their
    maps where all members see the same region and have maps; the features of the first member if it gives them.

    Every member takes its own crop from the image, scaled to its own short side if that is smaller.
    """

    def __init__(
        self, members: list[Shipped], description: ModelDescription, calibration: CalibrationMap | None = None
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self._members = members  # the same with their type
        self.with_features = members[0].with_features
        self.multilabel, self.calibrated = description.multilabel, Calibrated(calibration, description)
        self.boxes: list[tuple[int, int, int, int]] = []
        for index, own in enumerate(description.members):
            box = member_box(description, index)
            self.boxes.append(box)
            for name, size, want in (("rows", box[2], own.crop[0]), ("columns", box[3], own.crop[1])):
                self.register_buffer(f"{name}{index}", _resizing(size, want), persistent=False)
        same = all(box == (0, 0, *description.crop) for box in self.boxes)
        sizes = {(own.crop, own.backbone) for own in description.members}
        self.maps = same and len(sizes) == 1 and all(member.maps for member in members)
        self.eval()

    def inputs(self, batch: Tensor) -> list[Tensor]:
        """What each member sees of the images, [N, h, w, 3]."""
        found = []
        for index, (top, left, height, width) in enumerate(self.boxes):
            own = batch[:, top : top + height, left : left + width]
            rows, columns = self.get_buffer(f"rows{index}"), self.get_buffer(f"columns{index}")
            if rows.shape[0] != height or columns.shape[0] != width:
                scaled = torch.einsum("oh,nhwc->nowc", rows, own.float())
                own = torch.einsum("pw,nowc->nopc", columns, scaled).round().clamp(0, 255)
            found.append(own)
        return found

    def average(self, probabilities: Sequence[Tensor]) -> Tensor:
        """The mean [N, K] of the members' probabilities, after the calibration of the ensemble."""
        mean = torch.stack(tuple(probabilities)).mean(dim=0)
        if self.calibrated.is_identity:
            return mean
        return self.calibrated(torch.logit(mean, eps=1e-7) if self.multilabel else mean.clamp(min=1e-12).log())

    def forward(self, batch: Tensor) -> tuple[Tensor, ...]:
        members = [member(own) for member, own in zip(self._members, self.inputs(batch), strict=True)]
        outputs = [self.average([own[0] for own in members])]
        outputs += [torch.stack([own[1] for own in members]).mean(dim=0)] if self.maps else []
        outputs += [members[0][-1]] if self.with_features else []
        return tuple(outputs)

    @property
    def outputs(self) -> list[str]:
        """The names of what ``forward`` returns."""
        return ["probabilities", *(["maps"] if self.maps else []), *(["features"] if self.with_features else [])]

    @torch.no_grad()
    def answer(self, batch: Tensor, maps: bool) -> Answer:
        """As :meth:`Shipped.answer`."""
        if maps and not self.maps:
            raise InputError(
                "this ensemble has no class activation maps: its networks see different regions of an image, or have "
                "none in closed form. Explain its members, or make an ensemble of runs with one backbone and crop."
            )
        features, probabilities = [], []
        for member, own in zip(self._members, self.inputs(batch), strict=True):
            features.append(member.features(own))
            probabilities.append(member.probabilities(member.logits(own, features[-1]).double()))
        mean = self.average(probabilities)
        pooled = self._members[0].pooled(features[0]) if self.with_features else None
        if not maps:
            return mean, None, pooled
        top, images = mean.argmax(dim=1), torch.arange(len(batch))
        found = [member.evidence(own)[images, top] for member, own in zip(self._members, features, strict=True)]
        return mean, torch.stack(found).mean(dim=0), pooled


def member_box(description: ModelDescription, index: int) -> tuple[int, int, int, int]:
    """The top, left, height and width of what a member sees, in the pixels of the ensemble's input."""
    own, (height, width) = description.members[index], description.crop
    size = [round(side * description.short_side / own.short_side) for side in own.crop]
    top, left = (round((have - want) / 2) for have, want in zip((height, width), size, strict=True))
    return top, left, size[0], size[1]


def _resizing(size: int, want: int) -> Tensor:
    """The matrix [want, size] that resizes a line of pixels, bicubic with antialiasing."""
    if size == want:
        return torch.eye(size)
    unit = torch.eye(size)[None, None]
    return nn.functional.interpolate(unit, size=(want, size), mode="bicubic", antialias=True)[0, 0]


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
    path: Path, description: ModelDescription, calibration: CalibrationMap | None = None, with_features: bool = False
) -> Shipped | Ensemble:
    """The network of model.json with the weights in ``path``, a .safetensors file, which cannot contain code.

    The network is built after its shapes were compared with those in the file, so that a small file that claims a huge
    network costs no memory. Without ``calibration`` probabilities are as trained.
    """
    _refuse_pickle(path)
    members = {f"{i}.": description.member(i) for i in range(len(description.members))} or {"": description}
    with checking(path):
        networks = _read_networks(path, description, members)
    if not description.members:
        return Shipped(networks[0], description, calibration, with_features)
    shipped = [
        Shipped(model, own, info.map, with_features and model is networks[0])
        for model, own, info in zip(networks, members.values(), description.members, strict=True)
    ]
    return Ensemble(shipped, description, calibration)


def _read_networks(
    path: Path, description: ModelDescription, members: Mapping[str, ModelDescription]
) -> list[nn.Module]:
    """The networks of ``members``, by what the names of their weights begin with."""
    try:
        with safe_open(path, framework="pt") as file:
            given = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        shapes: dict[str, tuple[int, ...]] = {}
        for prefix, own in members.items():
            with torch.device("meta"):  # shapes without memory
                empty = _network(own)
            shapes |= {prefix + key: tuple(value.shape) for key, value in empty.state_dict().items()}
        if given != shapes:
            raise InputError(
                f"{path} is refused: it does not fit {description.backbone} with {len(description.classes)} classes, "
                f"which model.json names. Expected: {_besides(shapes, given) or 'nothing more'}; found instead: "
                f"{_besides(given, shapes) or 'nothing'}."
            )
        weights, networks = load_file(path), []
        for prefix, own in members.items():
            networks.append(_network(own))
            networks[-1].load_state_dict({key: weights[prefix + key] for key in networks[-1].state_dict()})
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is refused: it is not a whole .safetensors file ({error}).") from error
    return networks


def _network(description: ModelDescription) -> nn.Module:
    size = image_size_settings(description.backbone, description.crop)
    return TimmClassifier(
        description.backbone, len(description.classes), backbone_settings=size, pooling=description.pooling
    ).shipped


def _refuse_pickle(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(9)
    # A .safetensors file begins with the length of its header, any 8 bytes, then the header, which begins with "{".
    if start[8:] != b"{" and (start[:4] == b"PK\x03\x04" or start[:1] == b"\x80"):
        raise InputError(
            f"{path} is refused: despite its name it is a pickle or a file of torch.save, which can run code when it "
            "is loaded. Models are loaded only from .safetensors and .onnx files."
        )


def _besides(shapes: Mapping[str, tuple[int, ...]], other: Mapping[str, tuple[int, ...]]) -> str:
    """The first entries of ``shapes`` that ``other`` does not have."""
    return listed([f"{name} {list(shape)}" for name, shape in shapes.items() if other.get(name) != shape], 6)


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
