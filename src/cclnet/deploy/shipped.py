"""The network that is shipped: from a uint8 image to calibrated probabilities and the evidence for each class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cclnet.data.augment import normalise
from cclnet.deploy.description import Description
from cclnet.functional import inverse_of, unsoften_by


class Shipped(nn.Module):
    """``shipped(uint8 [N, h, w, 3])`` → probabilities [N, K], and maps [N, K, h', w'] where they have a closed form.

    A network that averages its last feature map A and classifies linearly gives the logit
    ``z_k = b_k + mean_xy Σ_c W_kc A_c(x, y)``, so that ``M_k(x, y) = Σ_c W_kc A_c(x, y)`` says what each place adds to
    it: its mean is the logit without its bias. That is the class activation map.
    """

    def __init__(self, model: nn.Module, description: Description, maps: bool = True) -> None:
        super().__init__()
        self.model: Any = model
        self.multilabel = description.multilabel
        self.temperature = description.temperature or 1.0
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(description.mean), persistent=False)
        self.register_buffer("std", torch.tensor(description.std), persistent=False)
        self.inverse: Tensor | None
        target = None if description.target is None else torch.tensor(description.target, dtype=torch.float64)
        self.register_buffer("inverse", None if target is None else inverse_of(target), persistent=False)
        self.eval()
        self.layout = map_layout(self, description.crop)
        self.maps = maps and self.layout is not None

    def features(self, batch: Tensor) -> Tensor:
        """The last feature map, as the network gives it."""
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
        probabilities = self.probabilities(self.model.forward_head(features))
        return (probabilities, self.evidence(features)) if self.maps else (probabilities,)


@torch.no_grad()
def map_layout(shipped: Shipped, crop: tuple[int, int]) -> str | None:
    """ "NCHW" or "NHWC" where the logits are a linear function of the average of the last feature map, else None.

    Tried on an image instead of read off the architecture, for what stands between pooling and classifier (a norm, a
    further layer) has many names.
    """
    linear = shipped.model.get_classifier()
    device = shipped.mean.device
    noise = torch.randint(256, (1, *crop, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    features = shipped.features(noise.to(device))
    if not isinstance(linear, nn.Linear) or features.dim() != 4:
        return None
    logits = shipped.model.forward_head(features)
    for layout, places in (("NCHW", (2, 3)), ("NHWC", (1, 2))):
        pooled = features.mean(dim=places)
        if pooled.shape[1] == linear.in_features and torch.allclose(linear(pooled), logits, rtol=1e-4, atol=1e-4):
            return layout
    return None
