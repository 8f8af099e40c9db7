"""Batches of a captured training step."""

import numpy as np
import pytest
import torch

from cclnet.data.loader import Batch
from cclnet.methods import METHODS, method_class
from cclnet.network import CCLNet
from cclnet.settings import AugmentSettings, Settings
from cclnet.training.setup import make_optimizer
from cclnet.training.step import TrainStep, _clone, _copy


def test_the_batch_of_a_graph_keeps_its_tensors() -> None:
    def batch(value: int) -> Batch:
        crops = torch.full((2, 4, 4, 3), value, dtype=torch.uint8)
        return Batch(crops, torch.full((2, 5), float(value)), torch.full((2,), value), None, np.arange(2))

    first = batch(1)
    static = _clone(first)
    addresses = [value.data_ptr() for value in static[:3]]
    _copy(static, batch(7))
    assert all((value == 7).all() for value in static[:3]) and static.weight is None
    assert [value.data_ptr() for value in static[:3]] == addresses
    assert all((value == 1).all() for value in first[:3])


def test_layers_are_clipped_by_one_norm_and_the_method_by_another() -> None:
    plain = Settings(clip=1e-3, augment=AugmentSettings(crop=32))
    layered = Settings(clip=1e-3, augment=AugmentSettings(crop=32), layer_decay=0.5, decay_norms=False)
    batch = Batch(torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8), None, torch.arange(4), None, np.arange(4))
    gradients = []
    for settings in (plain, layered):
        torch.manual_seed(0)
        network = CCLNet("test_resnet", 4)
        optimizer = make_optimizer(settings, network, on_gpu=False)
        step = TrainStep(
            network, optimizer, torch.Tensor.backward, settings, torch.zeros(3), torch.ones(3),
            compile=False, capture=False,
        )  # fmt: skip
        step.augment_batch = lambda crops, _: crops.permute(0, 3, 1, 2) / 255.0
        step(batch)
        for part in (network.classifier, network.method):
            gradients.append(torch.cat([p.grad.flatten() for p in part.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0].norm(), torch.tensor(1e-3))
    for one, other in zip(gradients[:2], gradients[2:], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_can_be_captured_and_computes_the_same(method: str) -> None:
    """A method that copies a tensor from the host in a step cannot be captured."""
    settings, device = Settings(augment=AugmentSettings(crop=32)), torch.device("cuda")
    labels = torch.arange(8, device=device) % 4
    if method_class(method).multilabel:
        labels = torch.nn.functional.one_hot(labels, 4).float()
    crops = torch.randint(0, 256, (8, 32, 32, 3), dtype=torch.uint8, device=device)
    losses = []
    for capture in (False, True):
        torch.manual_seed(0)
        network = CCLNet("test_resnet", 4, method, class_counts=(5, 6, 7, 8)).to(device).train()
        mean, std = torch.zeros(3, device=device), torch.ones(3, device=device)
        optimizer = make_optimizer(settings, network, on_gpu=True)
        step = TrainStep(network, optimizer, torch.Tensor.backward, settings, mean, std, compile=False, capture=capture)
        step.augment_batch = lambda crops, _: crops.permute(0, 3, 1, 2) / 255.0
        batch = Batch(crops, None, labels, None, np.arange(8))
        losses.append(torch.stack([step(batch) for _ in range(3)]))
        network.method.end_epoch()
        losses[-1] = torch.cat([losses[-1], step(batch)[None]])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-4)
