"""The shipped network and its class activation maps: closed form against its own logits and against Grad-CAM."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from shipped_run import CLASSES

from cclnet import InputError
from cclnet.deploy.engines import TorchEngine
from cclnet.deploy.predictor import enlarge, heat_of
from cclnet.deploy.shipped import Shipped, grad_cam
from cclnet.network import TimmClassifier
from cclnet.runs.model import ModelDescription

PAPER = ("resnet18", "mobilenetv2_100", "efficientnet_b0")


def shipped(backbone: str, crop: int = 64, **settings: object) -> Shipped:
    torch.manual_seed(0)
    description = ModelDescription(backbone, CLASSES, False, crop, (crop, crop), (0.5,) * 3, (0.25,) * 3)
    return Shipped(TimmClassifier(backbone, len(CLASSES), backbone_settings=settings).shipped, description)


def batch(crop: int = 64, count: int = 3) -> torch.Tensor:
    return torch.randint(256, (count, crop, crop, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("backbone", PAPER)
def test_the_mean_of_a_map_is_the_logit_without_its_bias(backbone: str) -> None:
    net = shipped(backbone)
    assert net.layout == "NCHW"
    with torch.no_grad():
        features = net.features(batch())
        logits = net.model.forward_head(features)
        maps = net.evidence(features)
    assert maps.shape == (3, 4, 2, 2)
    torch.testing.assert_close(maps.mean(dim=(2, 3)), logits - net.model.get_classifier().bias, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backbone", PAPER)
def test_grad_cam_is_the_closed_form_by_the_number_of_places(backbone: str) -> None:
    pytest.importorskip("captum")
    net = shipped(backbone)
    classes = torch.tensor([2, 0, 3])
    with torch.no_grad():
        features = net.features(batch())
        maps = net.evidence(features)[torch.arange(3), classes]
    torch.testing.assert_close(grad_cam(net.model, features, classes) * 4, maps, atol=1e-5, rtol=1e-4)


def test_channels_last_has_a_closed_form_too() -> None:
    net = shipped(
        "swin_tiny_patch4_window7_224", img_size=64, embed_dim=8, depths=(1, 1), num_heads=(1, 2), window_size=4
    )
    assert net.layout == "NHWC"
    with torch.no_grad():
        features = net.features(batch())
        logits, maps = net.model.forward_head(features), net.evidence(features)
    torch.testing.assert_close(maps.mean(dim=(2, 3)), logits - net.model.get_classifier().bias, atol=1e-5, rtol=1e-4)
    pytest.importorskip("captum")
    top = logits.argmax(dim=1)
    found = grad_cam(net.model, features, top)
    torch.testing.assert_close(found * found[0].numel(), maps[torch.arange(3), top], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backbone", ["test_convnext", "mobilenetv3_small_050", "test_vit3"])
def test_other_networks_take_grad_cam(backbone: str) -> None:
    """A norm, a further layer or attention pooling between the average and the classifier."""
    pytest.importorskip("captum")
    net = shipped(backbone, 160 if backbone == "test_vit3" else 64)
    assert net.layout is None and not net.maps
    pixels = batch(160 if backbone == "test_vit3" else 64).numpy()
    probabilities, maps, *_ = TorchEngine(net, "cpu").run(pixels, maps=True)
    assert maps is not None and maps.ndim == 3 and np.isfinite(maps).all()
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)


def test_a_class_token_has_no_map() -> None:
    pytest.importorskip("captum")
    net = shipped("test_vit", 160)
    with pytest.raises(InputError, match="takes its decision from a class token"):
        TorchEngine(net, "cpu").run(batch(160).numpy(), maps=True)


def test_grad_cam_without_captum_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "captum.attr", None)
    with pytest.raises(InputError, match=r"pip install 'cclnet\[explain\]'"):
        TorchEngine(shipped("test_convnext"), "cpu").run(batch().numpy(), maps=True)


def test_a_map_points_at_what_it_is_about() -> None:
    """A network that sees one corner: its classifier weighs the one channel that is bright there."""
    net = shipped("resnet18")
    features = torch.zeros(1, 512, 2, 2)
    features[0, 7, 0, 1] = 5.0
    with torch.no_grad():
        net.model.fc.weight.zero_()
        net.model.fc.weight[2, 7] = 1.0
        maps = net.evidence(features)
    assert maps[0, 2].tolist() == [[0.0, 5.0], [0.0, 0.0]]
    heat = enlarge(heat_of(maps[:, 2].numpy())[0], (64, 64))
    assert np.unravel_index(heat.argmax(), heat.shape)[0] < 32 <= np.unravel_index(heat.argmax(), heat.shape)[1]
