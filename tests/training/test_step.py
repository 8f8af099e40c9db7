"""Batches of a captured training step."""

import numpy as np
import torch

from cclnet.data.loader import Batch
from cclnet.training.step import _clone, _copy


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
