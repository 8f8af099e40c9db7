"""The formulas of CCL-Net as pure functions.

Shapes: N images, K classes, D embedding dimensions. Every function computes in float32 or higher under autocast
(float64 stays float64), because distances and softmax are inaccurate in half precision.

Multi-label functions take multi-hot targets [N, K]: 1 for a class that is present, 0 for one that is absent, values
in between for mixed images. Each class has its own logit, ``q_k = sigmoid(z_k)``; losses are means over the classes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cclnet.errors import InputError, check_range

LEAST = 1e-3  # smallest probability that ``unsoften`` returns, before normalisation

Function = TypeVar("Function", bound=Callable[..., Tensor])


def full_precision(function: Function) -> Function:
    """Decorator: run ``function`` outside of autocast, with half-precision tensor arguments cast to float32.

    >>> full_precision(torch.exp)(torch.zeros(1, dtype=torch.bfloat16))
    tensor([1.])
    """

    def to_float32(value: object) -> object:
        half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        return cast(Tensor, value).float() if half else value

    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> Tensor:
        device = next(a.device.type for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        with torch.autocast(device, enabled=False):
            return function(*(to_float32(a) for a in args), **{k: to_float32(v) for k, v in kwargs.items()})

    return cast(Function, wrapper)


def _unit_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """L2-normalised rows and their squared norms: 1, or 0 for a zero row.

    A zero row stays zero and gets no gradient: dividing by a tiny norm would give an enormous one.
    """
    largest = rows.detach().abs().amax(dim=-1, keepdim=True)
    is_zero = largest == 0
    rows = rows / largest.masked_fill(is_zero, 1.0)  # prevents overflow and underflow of the squares
    square = rows.square().sum(dim=-1, keepdim=True)
    unit = rows * square.masked_fill(is_zero, 1.0).rsqrt()
    return unit.masked_fill(is_zero, 0.0), (~is_zero).to(rows.dtype)


@full_precision
def squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """Squared Euclidean distance between L2-normalised rows: [N, D], [K, D] → [N, K], each in [0, 4].

    ``f_d(a, b) = | a/|a| − b/|b| |²``. A zero row stays zero, so its distance from every non-zero row is 1.

    >>> squared_distance(torch.tensor([[3.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]]))
    tensor([[0., 2., 4.]])
    """
    unit_a, norm_a = _unit_rows(a)
    unit_b, norm_b = _unit_rows(b)
    return (norm_a + norm_b.mT - 2.0 * unit_a @ unit_b.mT).clamp(0.0, 4.0)


def dictionary_distance(dictionary: Tensor) -> Tensor:
    """Squared distances ``f_d`` between all pairs of class embeddings: [K, D] → [K, K], with an exact zero diagonal.

    >>> dictionary_distance(torch.eye(2))
    tensor([[0., 2.],
            [2., 0.]])
    """
    diagonal = torch.eye(dictionary.shape[0], dtype=torch.bool, device=dictionary.device)
    return squared_distance(dictionary, dictionary).masked_fill(diagonal, 0.0)


def soft_labels(dictionary: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """The learned label distributions: [K, D] → [K, K]; row k is the soft label of class k.

    ``p_k = softmax over k' of −f_d(c_k', c_k) / T``; the paper uses T = 1. The own class has the largest probability.

    >>> soft_labels(torch.eye(2))
    tensor([[0.8808, 0.1192],
            [0.1192, 0.8808]])
    """
    return torch.softmax(-dictionary_distance(dictionary) / temperature, dim=1)


def softness(labels: Tensor) -> Tensor:
    """Mean probability of the own class, ``1/K Σ_k p_kk``: [K, K] → scalar. Lower is softer.

    >>> softness(torch.tensor([[0.9, 0.1], [0.3, 0.7]]))
    tensor(0.8000)
    """
    return labels.diagonal().mean()


def class_correlation_loss(dictionary: Tensor, margin: float = 2.0) -> Tensor:
    """Penalty on class embeddings that are farther apart than ``margin``: [K, D] → scalar.

    ``l_CC = 1/K² Σ_i Σ_j relu(f_d(c_i, c_j) − b)`` with the margin b; b = 2 is a right angle.

    >>> class_correlation_loss(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    tensor(1.)
    """
    return torch.relu(dictionary_distance(dictionary) - margin).mean()


def batch_mean(losses: Tensor, weight: Tensor | None) -> Tensor:
    """Weighted mean over the batch, ``1/N Σ_n w_n l_n``: [N], [N] or None → scalar.

    Dividing by N and not by the sum of the weights makes the mean over processes equal to that of the whole batch.

    >>> batch_mean(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 0.0]))
    tensor(1.)
    """
    return losses.mean() if weight is None else (losses * weight).mean()


@full_precision
def cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
    """Cross entropy ``−Σ_k y_k log softmax(z)_k``, mean over the batch → scalar.

    Logits [N, K]; labels are class indices [N] or distributions [N, K]; ``weight`` [N] weights the images.

    >>> cross_entropy(torch.zeros(1, 4), torch.tensor([2]))
    tensor(1.3863)
    """
    return batch_mean(F.cross_entropy(logits, labels, reduction="none"), weight)


@full_precision
def kl_to_target(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """``KL(p ‖ softmax(z)) = Σ_k p_k (log p_k − log softmax(z)_k)``, mean over the batch → scalar.

    Logits [N, K]; target distributions [N, K]; ``weight`` [N] weights the images.

    >>> kl_to_target(torch.zeros(1, 4), torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    tensor(1.3863)
    """
    losses = F.kl_div(F.log_softmax(logits, dim=1), target, reduction="none").sum(dim=1)
    return batch_mean(losses, weight)


@full_precision
def rows_of(table: Tensor, labels: Tensor) -> Tensor:
    """The row of ``table`` [K, C] for each image → [N, C]; mixed images (mixup, CutMix) get the mixture of the rows.

    ``labels`` are class indices [N] or class weights [N, K].

    >>> rows_of(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([1]))
    tensor([[0.2000, 0.8000]])
    """
    return labels.to(table.dtype) @ table if labels.is_floating_point() else table[labels]


@full_precision
def log_complement(logits: Tensor) -> Tensor:
    """``log(1 − softmax(z)_k)`` of every class, finite for any confidence: [N, K] → [N, K].

    Only the largest probability can round to one, so its complement is the ``logsumexp`` of the other classes. The
    others are at most 0.5, where ``log1p`` is accurate.

    >>> log_complement(torch.tensor([[0.0, 0.0], [1000.0, 0.0]]))[:, 0]
    tensor([-6.9315e-01, -1.0000e+03])
    """
    largest = logits.argmax(dim=1, keepdim=True)
    others = logits.scatter(1, largest, -torch.inf).logsumexp(dim=1, keepdim=True)
    at_most_half = torch.softmax(logits, dim=1).scatter(1, largest, 0.0)
    return torch.log1p(-at_most_half).scatter(1, largest, others - logits.logsumexp(dim=1, keepdim=True))


def smoothed_labels(num_classes: int, epsilon: float, prior: Tensor | None = None) -> Tensor:
    """Label smoothing (LSR), ``(1 − ε) δ_{k,y} + ε u(k)``: a [K, K] float64 table, row y for class y.

    ``u`` is uniform (ε/K on every class, including the correct one) or the ``prior`` [K].

    >>> smoothed_labels(2, 0.5)
    tensor([[0.7500, 0.2500],
            [0.2500, 0.7500]], dtype=torch.float64)
    """
    check_range("num_classes", num_classes, "[2, inf)", "label smoothing needs at least 2 classes")
    check_range("epsilon", epsilon, "[0, 1]", "usually 0.05 to 0.2")
    if prior is None:
        prior = torch.full((num_classes,), 1.0 / num_classes, dtype=torch.float64)
    prior = prior.detach().double()
    if prior.shape != (num_classes,):
        raise InputError(f"prior must have shape [{num_classes}], got {list(prior.shape)}.")
    if not (prior >= 0).all() or not math.isclose(float(prior.sum()), 1.0, abs_tol=1e-4):
        raise InputError(
            f"prior must be a distribution over {num_classes} classes (no value below 0, sum 1), "
            f"got {prior.tolist()}. Divide the class counts by their sum."
        )
    eye = torch.eye(num_classes, dtype=torch.float64, device=prior.device)
    return (1.0 - epsilon) * eye + epsilon * (prior / prior.sum())


def collapse_point(num_classes: int, margin: float = 2.0) -> tuple[float, float]:
    """(ε, softness) of an overfitted head (Proposition S1), whose classes are all at distance ``margin`` (b).

    The soft labels are then uniform label smoothing: ``ε = K e^−b / S`` and softness ``1/S``, with
    ``S = 1 + (K − 1) e^−b``.

    >>> "ε {:.4f}, softness {:.4f}".format(*collapse_point(7))
    'ε 0.5228, softness 0.5519'
    """
    check_range("num_classes", num_classes, "[2, inf)", "a collapse point needs at least 2 classes")
    total = 1.0 + (num_classes - 1) * math.exp(-margin)
    return num_classes * math.exp(-margin) / total, 1.0 / total


def unsoften(probabilities: Tensor, target: Tensor, least: float = LEAST) -> Tensor:
    """Class probabilities with the effect of the soft labels removed: [N, K], [K, K] → [N, K].

    A network trained towards row k of A for images of class k predicts ``q = π A``, with π the class probabilities.
    This returns ``π = q A⁻¹``, clamped to ``least`` (prediction errors can make π negative) and normalised.

    >>> unsoften(torch.tensor([[0.7, 0.3]]), torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    tensor([[0.7500, 0.2500]])
    """
    exact = probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
    return unsoften_by(exact, inverse_of(target.double()).to(exact), least)


def inverse_of(target: Tensor) -> Tensor:
    """``A⁻¹`` of soft labels, for ``unsoften_by``: [K, K] → [K, K]; a singular table is an error.

    >>> inverse_of(torch.tensor([[0.75, 0.25], [0.25, 0.75]]))
    tensor([[ 1.5000, -0.5000],
            [-0.5000,  1.5000]])
    """
    if not torch.linalg.svdvals(target)[-1] > 1e-6:
        raise InputError(
            "unsoften needs invertible soft labels, but these are singular: two classes, or mixtures of classes, have "
            "the same soft label. Train without unsoften, or with harder labels."
        )
    return torch.linalg.inv(target)


def unsoften_by(probabilities: Tensor, inverse: Tensor, least: float = LEAST) -> Tensor:
    """``unsoften`` with a precomputed inverse ``A⁻¹``: [N, K], [K, K] → [N, K].

    >>> unsoften_by(torch.tensor([[0.7, 0.3]]), torch.eye(2))
    tensor([[0.7000, 0.3000]])
    """
    clamped = (probabilities @ inverse).clamp(min=least)
    return clamped / clamped.sum(dim=1, keepdim=True)


def multi_hot_targets(labels: Tensor, count: int, num_classes: int) -> Tensor:
    """Multi-label targets as floating-point numbers [N, K]; other shapes or values outside of [0, 1] are an error.

    Values are checked on the CPU only: on a GPU the check would synchronise with the device at every step.

    >>> multi_hot_targets(torch.tensor([[True, False]]), 1, 2)
    tensor([[1., 0.]])
    """
    if labels.shape != (count, num_classes):
        hint = " For one label per image use a single-label method: 'ccl-centroid', 'hard'."
        raise InputError(
            f"labels of a multi-label method must be zeros and ones of shape [{count}, {num_classes}], one column per "
            f"class, got {labels.dtype} {list(labels.shape)}.{hint if labels.dim() == 1 else ''}"
        )
    targets = labels if labels.is_floating_point() else labels.to(torch.get_default_dtype())
    on_cpu = targets.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_cpu and not bool(((targets >= 0) & (targets <= 1)).all()):
        raise InputError(
            "labels of a multi-label method must lie between 0 (absent) and 1 (present), got "
            f"{float(targets.min()):g} to {float(targets.max()):g}. Replace unknown labels (-1, NaN) by 0 or 1 first."
        )
    return targets


@full_precision
def noisy_or_targets(table: Tensor, targets: Tensor) -> Tensor:
    """Soft multi-label targets by a noisy OR over the present classes: [K, K], [N, K] → [N, K].

    ``t_k = 1 − Π_j (1 − m_j p_jk)``: each present class j (m_j = 1) is confused with class k with probability p_jk, and
    t_k is the probability that at least one is. A single label gives its row of ``table``, no label gives zeros.

    >>> table = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]])
    >>> noisy_or_targets(table, torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]))
    tensor([[0.8000, 0.1000, 0.1000],
            [0.8200, 0.8200, 0.1900]])
    """
    # In logarithms, so that a small p keeps all of its digits.
    return -torch.expm1(torch.log1p(-targets.to(table.dtype)[:, :, None] * table).sum(dim=1))


@full_precision
def binary_cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """``−1/K Σ_k t_k log q_k + (1 − t_k) log(1 − q_k)``, mean over the batch → scalar.

    Logits and targets [N, K]; ``weight`` [N] weights the images.

    >>> binary_cross_entropy(torch.zeros(1, 3), torch.tensor([[1.0, 0.0, 1.0]]))
    tensor(0.6931)
    """
    losses = F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction="none")
    return batch_mean(losses.mean(dim=1), weight)


@full_precision
def binary_kl(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """``1/K Σ_k KL(t_k ‖ q_k)`` between Bernoulli distributions, mean over the batch → scalar.

    Logits and targets [N, K]; ``weight`` [N] weights the images.

    >>> binary_kl(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.7311]])).abs() < 1e-6
    tensor(True)
    """
    target = target.to(logits.dtype)
    entropy = -torch.xlogy(target, target) - torch.xlogy(1.0 - target, 1.0 - target)
    return binary_cross_entropy(logits, target, weight) - batch_mean(entropy.mean(dim=1), weight)
