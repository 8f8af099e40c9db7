"""How learned soft labels are used: the weight of their divergence, temperature, sharpening, and mixed images."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cclnet import InputError, build_method, functional
from cclnet.methods import Classes, Method

CLASSES = Classes(4, 6, (10, 20, 30, 40))
WITH_HEAD = ("ccl", "ccl-balanced")
ALL = (*WITH_HEAD, "ccl-centroid")


def fresh(name: str, **chosen: object) -> Method:
    torch.manual_seed(0)
    small = {"widths": (8, 5)} if name in WITH_HEAD else {}
    return build_method(name, CLASSES, {**small, **chosen})


def batch(count: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.rand(count, 6, generator=generator)
    return features, torch.randn(count, 4, generator=generator), torch.arange(count) % 4


def freeze(method: Method) -> None:
    method.head.frozen_dictionary.copy_(method.head.live_dictionary)
    method.head.frozen_flag.fill_(True)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("weight", [0.0, 0.5, 3.0])
def test_the_weight_of_the_divergence(name: str, weight: float) -> None:
    method = fresh(name, kl_weight=weight)
    features, logits, labels = batch()
    logits.requires_grad_()
    terms = method(features, logits, labels).terms
    target = method.soft_labels().float()[labels]
    torch.testing.assert_close(terms["kl"], weight * functional.kl_to_target(logits, target))
    [gradient] = torch.autograd.grad(terms["cross_entropy"] + terms["kl"], logits)
    # The same as cross entropy with the mean of hard and soft label, (1 + w) times: at 0, hard labels.
    hard = F.one_hot(labels, 4).float()
    mean = (1 + weight) * functional.cross_entropy(logits, (hard + weight * target) / (1 + weight))
    torch.testing.assert_close(gradient, torch.autograd.grad(mean, logits)[0])


@pytest.mark.parametrize("name", WITH_HEAD)
def test_temperature_keeps_the_order_and_leads_from_even_to_hard_labels(name: str) -> None:
    plain = fresh(name).soft_labels()
    warm = fresh(name, temperature=2.0).soft_labels()
    torch.testing.assert_close(warm, torch.softmax(plain.log() / 2.0, dim=1))
    assert torch.equal(warm.argsort(dim=1), plain.argsort(dim=1))
    torch.testing.assert_close(fresh(name, temperature=1e6).soft_labels(), torch.full((4, 4), 0.25), atol=1e-4, rtol=0)
    torch.testing.assert_close(fresh(name, temperature=1e-3).soft_labels(), torch.eye(4))


@pytest.mark.parametrize("name", WITH_HEAD)
def test_what_the_head_learns_from_has_no_temperature(name: str) -> None:
    terms = [fresh(name, temperature=t)(*batch()).terms["head_cross_entropy"] for t in (1.0, 0.1)]
    assert torch.equal(*terms)


@pytest.mark.parametrize("name", WITH_HEAD)
def test_labels_are_sharpened_once_frozen_and_not_before(name: str) -> None:
    method, plain = fresh(name, sharpen=3.0), fresh(name)
    assert torch.equal(method.soft_labels(), plain.soft_labels())
    freeze(method)
    cubed = plain.soft_labels() ** 3
    torch.testing.assert_close(method.soft_labels(), cubed / cubed.sum(dim=1, keepdim=True))
    restored = fresh(name, sharpen=3.0)
    restored.load_state_dict(method.state_dict())
    assert torch.equal(restored.soft_labels(), method.soft_labels())


@pytest.mark.parametrize("name", ALL)
def test_mixed_images_get_mixed_rows(name: str) -> None:
    method = fresh(name)
    features, logits, labels = batch()
    shares = 0.3 * F.one_hot(labels, 4).float() + 0.7 * F.one_hot(labels.roll(1), 4).float()
    terms = method(features, logits, shares).terms
    table = method.soft_labels().float()
    target = 0.3 * table[labels] + 0.7 * table[labels.roll(1)]
    torch.testing.assert_close(terms["kl"], functional.kl_to_target(logits, target))
    torch.testing.assert_close(terms["cross_entropy"], functional.cross_entropy(logits, shares))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"kl_weight": -0.1}, "kl_weight.*got -0.1"),
        ({"kl_weight": float("inf")}, "kl_weight.*got inf"),
        ({"temperature": 0.0}, r"temperature must lie in \(0, inf\), got 0.0"),
        ({"sharpen": -1.0}, r"sharpen must lie in \(0, inf\), got -1.0"),
    ],
)
def test_settings_that_make_no_sense(name: str, chosen: dict, says: str) -> None:
    if name == "ccl-centroid" and "kl_weight" not in chosen:
        says = "unknown setting of method 'ccl-centroid'"  # its softness is the temperature
    with pytest.raises(InputError, match=says):
        fresh(name, **chosen)
