"""Grad-CAM by captum, for networks whose class activation maps have no closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cclnet.errors import InputError


def grad_cam(model: Any, features: Tensor, classes: Tensor) -> Tensor:
    """Grad-CAM of one class an image at the network's last feature map, before clipping, [N, h', w'].

    ``Σ_c α_c A_c`` with ``α_c`` the mean over places of ``∂z_k / ∂A_c``: where the network averages A and classifies
    linearly this is the class activation map divided by the number of places.
    """
    try:
        from captum.attr import LayerGradCam
    except ImportError as error:
        raise InputError(
            "the maps of this network have no closed form, and Grad-CAM needs captum: pip install 'cclnet[explain]'"
        ) from error
    planes, back = _as_planes(model, features.detach())
    end = _End(model, back)
    with torch.enable_grad():
        maps = LayerGradCam(end, end.planes).attribute(planes.requires_grad_(), target=classes)[:, 0].detach()
    if not maps.any():
        raise InputError(
            f"{type(model).__name__} takes its decision from a class token, past its last feature map: there is no "
            "class activation map to show. A backbone that averages its features has one."
        )
    return maps


class _End(nn.Module):
    """What follows the last feature map, as a function of it."""

    def __init__(self, model: Any, back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.planes = nn.Identity()
        self.model, self.back = model, back

    def forward(self, planes: Tensor) -> Tensor:
        return self.model.forward_head(self.back(self.planes(planes)))


def _as_planes(model: Any, features: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A feature map as [N, C, h, w], and the way back to how the network lays it out."""
    if features.dim() == 4 and features.shape[1] == model.num_features:
        return features, lambda planes: planes
    if features.dim() == 4:
        return features.permute(0, 3, 1, 2), lambda planes: planes.permute(0, 2, 3, 1)
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    prefix = getattr(model, "num_prefix_tokens", 0)
    if features.dim() != 3 or grid is None or features.shape[1] != prefix + grid[0] * grid[1]:
        raise InputError(
            f"{type(model).__name__} has no feature map of places to draw a map of: {list(features.shape)}."
        )
    first, places = features[:, :prefix], features[:, prefix:]
    return (
        places.transpose(1, 2).unflatten(2, grid),
        lambda planes: torch.cat([first, planes.flatten(2).transpose(1, 2)], dim=1),
    )
