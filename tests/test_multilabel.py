"""The mathematics of several labels at once, against loops and in its limits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cclnet import InputError, functional
from cclnet.functional import any_of, binary_cross_entropy, binary_kl, marks_of

SEED = st.integers(0, 10**6)


def a_table(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(3.0 * torch.randn(size, size, dtype=torch.float64, generator=generator), dim=1)


def some_marks(count: int, size: int, seed: int) -> torch.Tensor:
    return (torch.rand(count, size, generator=torch.Generator().manual_seed(seed)) < 0.4).double()


def any_by_loops(table: torch.Tensor, marks: torch.Tensor) -> list[list[float]]:
    size = len(table)
    return [
        [1.0 - math.prod(1.0 - float(row[j]) * float(table[j, k]) for j in range(size)) for k in range(size)]
        for row in marks
    ]


@pytest.mark.parametrize("size", [2, 5, 30])
def test_the_target_is_the_chance_that_any_label_is_taken_for_the_class(size: int) -> None:
    table, marks = a_table(size, 0), some_marks(20, size, 1)
    torch.testing.assert_close(any_of(table, marks), torch.tensor(any_by_loops(table, marks), dtype=torch.float64))
    shares = torch.rand(20, size, dtype=torch.float64)  # of mixed images
    torch.testing.assert_close(any_of(table, shares), torch.tensor(any_by_loops(table, shares), dtype=torch.float64))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 30), SEED)
def test_one_label_gives_the_row_of_its_class(size: int, seed: int) -> None:
    table = a_table(size, seed)
    labels = torch.randint(size, (40,), generator=torch.Generator().manual_seed(seed))
    one, rows = any_of(table, F.one_hot(labels, size)), functional.rows_of(table, labels)
    torch.testing.assert_close(one, rows, atol=0.0, rtol=1e-15)
    assert torch.equal(one.float(), rows.float())  # to the last bit of what the loss is computed in


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), SEED)
def test_a_further_label_lowers_nothing_and_targets_stay_between_the_largest_and_the_sum(size: int, seed: int) -> None:
    table, marks = a_table(size, seed), some_marks(12, size, seed)
    target = any_of(table, marks)
    raised = marks[:, :, None] * table
    assert bool((target >= raised.amax(dim=1) - 1e-12).all())
    assert bool((target <= raised.sum(dim=1).clamp(max=1.0) + 1e-12).all())
    more = marks.clone()
    more[:, seed % size] = 1.0
    assert bool((any_of(table, more) >= target - 1e-12).all())


def test_no_label_and_certain_tables() -> None:
    marks = some_marks(6, 4, 3)
    assert torch.equal(any_of(torch.eye(4), marks.float()), marks.float())  # hard labels
    assert not any_of(a_table(4, 0), torch.zeros(2, 4)).any()


def test_absent_labels_are_raised_in_proportion_to_likeness() -> None:
    """To first order in p, which is what proportion means for a probability that is bounded."""
    table = a_table(5, 2) * 1e-6
    marks = torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(any_of(table, marks), marks @ table, atol=0.0, rtol=1e-5)


def test_losses_by_loops() -> None:
    logits, target = 3.0 * torch.randn(6, 4, dtype=torch.float64), torch.rand(6, 4, dtype=torch.float64)
    target[0] = torch.tensor([0.0, 1.0, 0.5, 0.0])
    weight = torch.rand(6, dtype=torch.float64)
    entropies, divergences = [], []
    for z_row, t_row in zip(logits.tolist(), target.tolist(), strict=True):
        entropy = divergence = 0.0
        for z, t in zip(z_row, t_row, strict=True):
            q = 1.0 / (1.0 + math.exp(-z))
            for p, of in ((t, q), (1.0 - t, 1.0 - q)):
                entropy -= p * math.log(of)
                divergence += p * math.log(p / of) if p > 0 else 0.0
        entropies.append(entropy / 4)
        divergences.append(divergence / 4)
    for loss, each in ((binary_cross_entropy, entropies), (binary_kl, divergences)):
        values = torch.tensor(each, dtype=torch.float64)
        torch.testing.assert_close(loss(logits, target), values.mean())
        torch.testing.assert_close(loss(logits, target, weight), (values * weight).mean())


def test_divergence_is_zero_where_the_target_is_met_and_cross_entropy_for_hard_labels() -> None:
    logits = torch.randn(5, 3, dtype=torch.float64)
    assert float(binary_kl(logits, torch.sigmoid(logits)).abs()) < 1e-12
    marks = some_marks(5, 3, 0)
    torch.testing.assert_close(binary_kl(logits, marks), binary_cross_entropy(logits, marks))
    torch.testing.assert_close(binary_cross_entropy(logits, marks), F.binary_cross_entropy_with_logits(logits, marks))


@pytest.mark.parametrize("loss", [binary_cross_entropy, binary_kl])
def test_gradients_and_extreme_logits(loss) -> None:
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    target = torch.rand(4, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda z: loss(z, target), (logits,))
    far = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    value = loss(far, torch.tensor([[0.0, 1.0, 0.5]]))
    value.backward()
    assert bool(torch.isfinite(value)) and bool(torch.isfinite(far.grad).all())


def test_half_precision_is_raised() -> None:
    logits, target = torch.randn(5, 3), torch.rand(5, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = binary_kl(logits.bfloat16(), target)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, binary_kl(logits.bfloat16().float(), target))


def test_marks_may_be_of_any_type() -> None:
    expected = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float32):
        assert torch.equal(marks_of(expected.to(dtype), 2, 2), expected)


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (
            torch.tensor([0, 1]),
            r"shape \[2, 3\], a column a class, got torch.int64 \[2\]. For one label .* 'ccl-centroid'",
        ),
        (torch.zeros(2, 4), r"shape \[2, 3\], .* got torch.float32 \[2, 4\]"),
        (torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]]), "from 0 .* to 1 .*, got 0 to 2"),
        (torch.tensor([[0, 1, -1], [0, 0, 0]]), "got -1 to 1. A label that is not known"),
        (torch.tensor([[0.0, 1.0, math.nan], [0.0, 0.0, 0.0]]), "got nan to nan"),
    ],
)
def test_labels_that_are_no_marks(labels: torch.Tensor, says: str) -> None:
    with pytest.raises(InputError, match=says):
        marks_of(labels, 2, 3)
