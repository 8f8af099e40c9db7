"""The formulas against closed forms, float64 oracles written with loops, and properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from cclnet import InputError, functional
from cclnet.functional import binary_cross_entropy, binary_kl, multi_hot_targets, noisy_or_targets


def loop_distance(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    out = np.zeros((len(a), len(b)))
    for i, x in enumerate(a.double().numpy()):
        for j, y in enumerate(b.double().numpy()):
            out[i, j] = np.sum((x / np.linalg.norm(x) - y / np.linalg.norm(y)) ** 2)
    return out


def test_distance_equals_the_loop() -> None:
    a, b = torch.randn(5, 9, dtype=torch.float64), torch.randn(4, 9, dtype=torch.float64)
    np.testing.assert_allclose(functional.squared_distance(a, b).numpy(), loop_distance(a, b), atol=1e-14)


@pytest.mark.parametrize("size", [1e-30, 1e-18, 1.0, 1e18, 1e30])
def test_distance_does_not_see_length(size: float) -> None:
    a, b = torch.randn(5, 9), torch.randn(4, 9)
    expected = functional.squared_distance(a.double(), b.double())
    torch.testing.assert_close(functional.squared_distance(a * size, b).double(), expected, atol=2e-6, rtol=0)


def test_zero_rows_are_safe() -> None:
    a = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, 3, dtype=torch.float64)
    distance = functional.squared_distance(a, b)
    torch.testing.assert_close(distance, torch.ones_like(distance))
    distance.sum().backward()
    assert torch.equal(a.grad, torch.zeros_like(a))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 12), st.integers(1, 20), st.integers(0, 10_000), st.floats(1e-3, 1e3))
def test_soft_labels_are_distributions_with_the_own_class_largest(k: int, d: int, seed: int, scale: float) -> None:
    dictionary = torch.randn(k, d, generator=torch.Generator().manual_seed(seed))
    labels = functional.soft_labels(dictionary)
    torch.testing.assert_close(labels.sum(dim=1), torch.ones(k))
    assert (labels.diagonal() >= labels.amax(dim=1)).all()
    distance = functional.dictionary_distance(dictionary)
    assert ((distance >= 0) & (distance <= 4)).all()
    torch.testing.assert_close(functional.soft_labels(dictionary * scale), labels, atol=1e-5, rtol=0)


def test_orthonormal_dictionary_is_label_smoothing_at_the_collapse_point() -> None:
    labels = functional.soft_labels(torch.eye(7, dtype=torch.float64))
    epsilon, softness = functional.collapse_point(7)
    assert round(epsilon, 4) == 0.5228 and round(softness, 4) == 0.5519
    torch.testing.assert_close(labels, functional.smoothed_labels(7, epsilon), atol=1e-15, rtol=0)
    assert float(functional.softness(labels)) == pytest.approx(softness, abs=1e-15)


@pytest.mark.parametrize("k", range(2, 101))
def test_collapse_point_for_all_sizes(k: int) -> None:
    epsilon, softness = functional.collapse_point(k)
    labels = functional.soft_labels(torch.eye(k, dtype=torch.float64))
    torch.testing.assert_close(labels, functional.smoothed_labels(k, epsilon), atol=1e-14, rtol=0)
    assert float(labels[0, 0]) == pytest.approx(softness, abs=1e-14)


def test_correlation_loss_equals_the_double_sum() -> None:
    dictionary = torch.randn(5, 4, dtype=torch.float64)
    pairs = loop_distance(dictionary, dictionary)
    for margin in (0.5, 2.0, 4.0):
        expected = sum(max(pairs[i, j] - margin, 0.0) for i in range(5) for j in range(5)) / 25
        assert float(functional.class_correlation_loss(dictionary, margin)) == pytest.approx(expected, abs=1e-14)


def test_kl_sums_over_classes_and_averages_over_the_batch() -> None:
    logits, target = torch.randn(6, 4, dtype=torch.float64), torch.rand(6, 4, dtype=torch.float64)
    target[0] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    target = target / target.sum(dim=1, keepdim=True)
    q = torch.softmax(logits, dim=1)
    expected = sum(float(p) * math.log(p / q[n, k]) for n in range(6) for k, p in enumerate(target[n]) if p > 0)
    assert float(functional.kl_to_target(logits, target)) == pytest.approx(expected / 6, abs=1e-12)


def test_weights_weigh_samples() -> None:
    logits, labels = torch.randn(3, 4), torch.tensor([0, 1, 2])
    weight = torch.tensor([3.0, 0.0, 0.0])
    alone = functional.cross_entropy(logits[:1], labels[:1])
    torch.testing.assert_close(functional.cross_entropy(logits, labels, weight), alone)
    target = torch.softmax(torch.randn(3, 4), dim=1)
    torch.testing.assert_close(
        functional.kl_to_target(logits, target, weight), functional.kl_to_target(logits[:1], target[:1])
    )


def test_rows_of_indices_and_of_mixtures_agree() -> None:
    table, labels = torch.softmax(torch.randn(4, 4), dim=1), torch.tensor([2, 0])
    torch.testing.assert_close(functional.rows_of(table, F.one_hot(labels, 4).float()), table[labels])
    half = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    torch.testing.assert_close(functional.rows_of(table, half)[0], (table[0] + table[1]) / 2)


def test_smoothing_is_epsilon_over_k_on_every_class() -> None:
    uniform = functional.smoothed_labels(4, 0.2)
    assert float(uniform[1, 1]) == pytest.approx(0.85) and float(uniform[1, 0]) == pytest.approx(0.05)
    prior = torch.tensor([0.7, 0.2, 0.1])
    torch.testing.assert_close(
        functional.smoothed_labels(3, 0.5, prior)[2], torch.tensor([0.35, 0.1, 0.55], dtype=torch.float64)
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((1, 0.1), "at least 2 classes"),
        ((3, 1.5), r"epsilon must lie in \[0, 1\], got 1.5"),
        ((3, 0.1, torch.tensor([0.5, 0.5])), r"shape \[3\]"),
        ((3, 0.1, torch.tensor([0.5, 0.6, 0.2])), "sum 1"),
        ((2, 0.1, torch.tensor([-0.5, 1.5])), "no value below 0"),
        ((2, 0.1, torch.tensor([float("nan"), 1.0])), "must be a distribution"),
    ],
)
def test_smoothing_refuses(arguments: tuple, says: str) -> None:
    with pytest.raises(InputError, match=says):
        functional.smoothed_labels(*arguments)


def test_collapse_point_refuses_one_class() -> None:
    with pytest.raises(InputError, match=r"got 1: .* at least 2 classes"):
        functional.collapse_point(1)


def test_gradients() -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    target = torch.softmax(torch.randn(3, 4, dtype=torch.float64), dim=1).requires_grad_()
    table = torch.softmax(torch.randn(4, 4, dtype=torch.float64), dim=1).requires_grad_()
    assert gradcheck(functional.squared_distance, (draw(3, 5), draw(4, 5)))
    assert gradcheck(functional.dictionary_distance, (draw(4, 5),))
    assert gradcheck(functional.soft_labels, (draw(4, 5),))
    assert gradcheck(lambda x: functional.class_correlation_loss(x, 1.7), (draw(4, 5),))
    assert gradcheck(functional.softness, (draw(4, 4),))
    assert gradcheck(functional.kl_to_target, (draw(3, 4), target))
    assert gradcheck(functional.cross_entropy, (draw(3, 4), target))
    assert gradcheck(lambda z: functional.cross_entropy(z, torch.tensor([0, 3, 1])), (draw(3, 4),))
    assert gradcheck(lambda t: functional.rows_of(t, torch.tensor([0, 3, 3])), (table,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    """What half inputs can hold is computed as exactly as float32 can, in and out of autocast: 2e-6."""
    a, b = torch.randn(6, 64).to(dtype), torch.randn(5, 64).to(dtype)
    logits, target = torch.randn(6, 5).to(dtype), torch.softmax(torch.randn(6, 5), dim=1)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    calls = [
        lambda f: functional.squared_distance(f(a), f(b)),
        lambda f: functional.soft_labels(f(b)),
        lambda f: functional.class_correlation_loss(f(b), 1.5),
        lambda f: functional.kl_to_target(f(logits), f(target)),
        lambda f: functional.cross_entropy(f(logits), labels),
    ]
    for call in calls:
        expected = call(lambda x: x.double())
        assert expected.dtype == torch.float64
        with torch.autocast("cpu", dtype=dtype):
            for got in (call(lambda x: x), call(lambda x: x.float())):
                assert got.dtype == torch.float32
                torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=2e-6)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [-6e4, 6e4, 0.0]], requires_grad=True)
    target = torch.eye(3)[:2]
    loss = functional.kl_to_target(logits, target) + functional.cross_entropy(logits, torch.tensor([0, 1]))
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(0, 10_000))
def test_what_is_softened_is_unsoftened(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(5, size, generator=generator, dtype=torch.float64) + 0.05
    chances /= chances.sum(dim=1, keepdim=True)
    labels = torch.rand(size, size, generator=generator, dtype=torch.float64)
    target = 0.6 * torch.eye(size, dtype=torch.float64) + 0.4 * labels / labels.sum(dim=1, keepdim=True)
    torch.testing.assert_close(functional.unsoften(chances @ target, target), chances)


def test_no_class_is_ruled_out_by_unsoftening() -> None:
    target = functional.smoothed_labels(3, 0.5)
    found = functional.unsoften(torch.eye(3, dtype=torch.float64), target, least=0.01)  # harder than it could learn
    torch.testing.assert_close(found.sum(dim=1), torch.ones(3, dtype=torch.float64))
    assert found.argmax(dim=1).tolist() == [0, 1, 2] and 0.001 < float(found.min()) < 0.01


def test_labels_that_do_not_tell_classes_apart_cannot_be_taken_out() -> None:
    with pytest.raises(InputError, match="singular"):
        functional.unsoften(torch.full((1, 3), 1 / 3), functional.smoothed_labels(3, 1.0).float())


SEED = st.integers(0, 10**6)


def a_table(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(3.0 * torch.randn(size, size, dtype=torch.float64, generator=generator), dim=1)


def some_targets(count: int, size: int, seed: int) -> torch.Tensor:
    return (torch.rand(count, size, generator=torch.Generator().manual_seed(seed)) < 0.4).double()


def noisy_or_by_loops(table: torch.Tensor, targets: torch.Tensor) -> list[list[float]]:
    size = len(table)
    return [
        [1.0 - math.prod(1.0 - float(row[j]) * float(table[j, k]) for j in range(size)) for k in range(size)]
        for row in targets
    ]


@pytest.mark.parametrize("size", [2, 5, 30])
def test_the_target_is_the_chance_that_any_label_is_taken_for_the_class(size: int) -> None:
    table, targets = a_table(size, 0), some_targets(20, size, 1)
    torch.testing.assert_close(
        noisy_or_targets(table, targets), torch.tensor(noisy_or_by_loops(table, targets), dtype=torch.float64)
    )
    shares = torch.rand(20, size, dtype=torch.float64)  # of mixed images
    torch.testing.assert_close(
        noisy_or_targets(table, shares), torch.tensor(noisy_or_by_loops(table, shares), dtype=torch.float64)
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 30), SEED)
def test_one_label_gives_the_row_of_its_class(size: int, seed: int) -> None:
    table = a_table(size, seed)
    labels = torch.randint(size, (40,), generator=torch.Generator().manual_seed(seed))
    one, rows = noisy_or_targets(table, F.one_hot(labels, size)), functional.rows_of(table, labels)
    torch.testing.assert_close(one, rows, atol=0.0, rtol=1e-15)
    assert torch.equal(one.float(), rows.float())  # to the last bit of what the loss is computed in


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), SEED)
def test_a_further_label_lowers_nothing_and_targets_stay_between_the_largest_and_the_sum(size: int, seed: int) -> None:
    table, targets = a_table(size, seed), some_targets(12, size, seed)
    target = noisy_or_targets(table, targets)
    raised = targets[:, :, None] * table
    assert bool((target >= raised.amax(dim=1) - 1e-12).all())
    assert bool((target <= raised.sum(dim=1).clamp(max=1.0) + 1e-12).all())
    more = targets.clone()
    more[:, seed % size] = 1.0
    assert bool((noisy_or_targets(table, more) >= target - 1e-12).all())


def test_no_label_and_certain_tables() -> None:
    targets = some_targets(6, 4, 3)
    assert torch.equal(noisy_or_targets(torch.eye(4), targets.float()), targets.float())  # hard labels
    assert not noisy_or_targets(a_table(4, 0), torch.zeros(2, 4)).any()


def test_absent_labels_are_raised_in_proportion_to_likeness() -> None:
    """To first order in p, which is what proportion means for a probability that is bounded."""
    table = a_table(5, 2) * 1e-6
    targets = torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(noisy_or_targets(table, targets), targets @ table, atol=0.0, rtol=1e-5)


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
    targets = some_targets(5, 3, 0)
    torch.testing.assert_close(binary_kl(logits, targets), binary_cross_entropy(logits, targets))
    torch.testing.assert_close(
        binary_cross_entropy(logits, targets), F.binary_cross_entropy_with_logits(logits, targets)
    )


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


def test_multi_hot_targets_of_any_type() -> None:
    expected = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float32):
        assert torch.equal(multi_hot_targets(expected.to(dtype), 2, 2), expected)


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (
            torch.tensor([0, 1]),
            r"shape \[2, 3\], one column per class, got torch.int64 \[2\]. .* 'ccl-centroid'",
        ),
        (torch.zeros(2, 4), r"shape \[2, 3\], .* got torch.float32 \[2, 4\]"),
        (torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]]), "between 0 .* and 1 .*, got 0 to 2"),
        (torch.tensor([[0, 1, -1], [0, 0, 0]]), "got -1 to 1. Replace unknown labels"),
        (torch.tensor([[0.0, 1.0, math.nan], [0.0, 0.0, 0.0]]), "got nan to nan"),
    ],
)
def test_labels_that_are_not_multi_hot(labels: torch.Tensor, says: str) -> None:
    with pytest.raises(InputError, match=says):
        multi_hot_targets(labels, 2, 3)
