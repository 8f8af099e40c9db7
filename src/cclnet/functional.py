"""The mathematics of CCL-Net: pure functions, one formula each.

Shapes: N samples, K classes, D the width of an embedding. Every function computes in float32 at least,
whatever autocast says (float64 stays float64), because distances and softmax lose their meaning in half
precision.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cclnet.errors import InputError

__all__ = [
    "batch_mean",
    "class_correlation_loss",
    "collapse_point",
    "cross_entropy",
    "dictionary_distance",
    "full_precision",
    "inverse_of",
    "kl_to_target",
    "log_complement",
    "rows_of",
    "smoothed_labels",
    "soft_labels",
    "softness",
    "squared_distance",
    "unsoften",
    "unsoften_by",
]

LEAST = 1e-3  # what taking soft labels out leaves to every class

Function = TypeVar("Function", bound=Callable[..., Tensor])


def full_precision(function: Function) -> Function:
    """Leave autocast and raise half-precision arguments to float32 for the length of one call."""

    def raised(value: object) -> object:
        half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        return cast(Tensor, value).float() if half else value

    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> Tensor:
        device = next(a.device.type for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        with torch.autocast(device, enabled=False):
            return function(*(raised(a) for a in args), **{k: raised(v) for k, v in kwargs.items()})

    return cast(Function, wrapper)


def _unit_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows at length one, and their squared lengths afterwards: 1, or 0 for a zero row, which has no
    direction, stays zero and passes no gradient (dividing by a tiny length would pass an enormous one)."""
    largest = rows.detach().abs().amax(dim=-1, keepdim=True)
    is_zero = largest == 0
    rows = rows / largest.masked_fill(is_zero, 1.0)  # so that squaring neither overflows nor underflows
    square = rows.square().sum(dim=-1, keepdim=True)
    unit = rows * square.masked_fill(is_zero, 1.0).rsqrt()
    unit = unit.masked_fill(is_zero, 0.0)
    return unit, (~is_zero).to(rows.dtype)


@full_precision
def squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """Squared Euclidean distance between L2-normalised rows: [N, D], [K, D] → [N, K], each in [0, 4].

    ``f_d(a, b) = | a/|a| − b/|b| |²``. A zero row stays zero, so its distance from every other row is 1.

    >>> squared_distance(torch.tensor([[3.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]]))
    tensor([[0., 2., 4.]])
    """
    unit_a, length_a = _unit_rows(a)
    unit_b, length_b = _unit_rows(b)
    return (length_a + length_b.mT - 2.0 * unit_a @ unit_b.mT).clamp(0.0, 4.0)


def dictionary_distance(dictionary: Tensor) -> Tensor:
    """``f_d`` between all pairs of class embeddings: [K, D] → [K, K], with a diagonal of exact zeros.

    >>> dictionary_distance(torch.eye(2))
    tensor([[0., 2.],
            [2., 0.]])
    """
    own = torch.eye(dictionary.shape[0], dtype=torch.bool, device=dictionary.device)
    return squared_distance(dictionary, dictionary).masked_fill(own, 0.0)


def soft_labels(dictionary: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """The learned label distributions: [K, D] → [K, K]; row k is the distribution of class k.

    ``p_k = softmax over k' of −f_d(c_k', c_k) / T``. The own class is always the largest of its row. The paper has no
    temperature (T = 1); a lower one gives harder labels, with the same order within a row.

    >>> soft_labels(torch.eye(2))
    tensor([[0.8808, 0.1192],
            [0.1192, 0.8808]])
    """
    return torch.softmax(-dictionary_distance(dictionary) / temperature, dim=1)


def softness(labels: Tensor) -> Tensor:
    """Mean probability of the own class, the diagonal of [K, K]: the lower, the softer.

    >>> softness(torch.tensor([[0.9, 0.1], [0.3, 0.7]]))
    tensor(0.8000)
    """
    return labels.diagonal().mean()


def class_correlation_loss(dictionary: Tensor, margin: float = 2.0) -> Tensor:
    """``l_CC = 1/K² Σ_i Σ_j relu(f_d(c_i, c_j) − b)``: keeps class embeddings within ``margin`` (b) of each
    other; b = 2 is a right angle. [K, D] → scalar.

    >>> class_correlation_loss(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    tensor(1.)
    """
    return torch.relu(dictionary_distance(dictionary) - margin).mean()


def batch_mean(losses: Tensor, weight: Tensor | None) -> Tensor:
    """Mean over the batch, each sample times its weight. Weights are expected to average one over the
    training set, so dividing by N (and not by their sum) keeps every rank's share of a batch exact."""
    return losses.mean() if weight is None else (losses * weight).mean()


@full_precision
def cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
    """Cross entropy of [N, K] logits with class indices [N] or target distributions [N, K] → scalar.

    ``weight`` [N] weighs the samples, never the classes of a soft target.

    >>> cross_entropy(torch.zeros(1, 4), torch.tensor([2]))
    tensor(1.3863)
    """
    return batch_mean(F.cross_entropy(logits, labels, reduction="none"), weight)


@full_precision
def kl_to_target(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """``KL(p ‖ softmax(z)) = Σ_k p_k (log p_k − log softmax(z)_k)``: summed over classes, mean over the batch.

    Logits [N, K], target distributions [N, K] → scalar; ``weight`` [N] weighs the samples.

    >>> kl_to_target(torch.zeros(1, 4), torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    tensor(1.3863)
    """
    losses = F.kl_div(F.log_softmax(logits, dim=1), target, reduction="none").sum(dim=1)
    return batch_mean(losses, weight)


@full_precision
def rows_of(table: Tensor, labels: Tensor) -> Tensor:
    """The rows of a [K, K] table of label distributions that belong to a batch → [N, K].

    ``labels`` are class indices [N], or weights of classes [N, K] where images were mixed (mixup, cutmix).

    >>> rows_of(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([1]))
    tensor([[0.2000, 0.8000]])
    """
    return labels.to(table.dtype) @ table if labels.is_floating_point() else table[labels]


@full_precision
def log_complement(logits: Tensor) -> Tensor:
    """``log(1 − softmax(z)_k)`` of every class, finite however sure the prediction is: [N, K] → [N, K].

    Only the largest probability can come near one. For that class the others' ``logsumexp`` is taken, which
    no rounding turns into ``log 0``; the rest are at most a half, where ``log1p`` is exact.

    >>> log_complement(torch.tensor([[0.0, 0.0], [1000.0, 0.0]]))[:, 0]
    tensor([-6.9315e-01, -1.0000e+03])
    """
    largest = logits.argmax(dim=1, keepdim=True)
    others = logits.scatter(1, largest, -torch.inf).logsumexp(dim=1, keepdim=True)
    at_most_half = torch.softmax(logits, dim=1).scatter(1, largest, 0.0)
    return torch.log1p(-at_most_half).scatter(1, largest, others - logits.logsumexp(dim=1, keepdim=True))


def smoothed_labels(num_classes: int, epsilon: float, prior: Tensor | None = None) -> Tensor:
    """Label smoothing (LSR): ``(1 − ε) δ_{k,y} + ε u(k)`` as a [K, K] float64 table, row y for class y.

    ``u`` is uniform (ε/K on every class, the correct one included) or the ``prior`` [K].

    >>> smoothed_labels(2, 0.5)
    tensor([[0.7500, 0.2500],
            [0.2500, 0.7500]], dtype=torch.float64)
    """
    if num_classes < 2:
        raise InputError(f"label smoothing needs at least 2 classes, got {num_classes}.")
    if not 0.0 <= epsilon <= 1.0:
        raise InputError(f"epsilon must lie in [0, 1], got {epsilon}. Usual values are 0.05 to 0.2.")
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
    """Where the head ends when it overfits (Proposition S1): every pair of classes at distance ``margin``.

    The soft labels are then uniform label smoothing with ``ε = K e^−b / S`` and have softness ``1/S``, where
    ``S = 1 + (K − 1) e^−b``. Returns (ε, softness).

    >>> "ε {:.4f}, softness {:.4f}".format(*collapse_point(7))
    'ε 0.5228, softness 0.5519'
    """
    if num_classes < 2:
        raise InputError(f"a collapse point needs at least 2 classes, got {num_classes}.")
    total = 1.0 + (num_classes - 1) * math.exp(-margin)
    return num_classes * math.exp(-margin) / total, 1.0 / total


def unsoften(probabilities: Tensor, target: Tensor, least: float = LEAST) -> Tensor:
    """Take the soft labels out of what a network says again: [N, K], [K, K] → [N, K].

    A network trained towards row k of A for the images of class k says ``q = π A``, with π the chances of the classes.
    This is ``π = q A⁻¹``, where no class gets less than ``least`` (q is never quite on the mark, and π may then fall
    below zero), made to sum to one. A must be invertible, as a table is whose rows give their own class more than half.

    >>> unsoften(torch.tensor([[0.7, 0.3]]), torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    tensor([[0.7500, 0.2500]])
    """
    exact = probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
    return unsoften_by(exact, inverse_of(target.double()).to(exact), least)


def inverse_of(target: Tensor) -> Tensor:
    """``A⁻¹`` for ``unsoften_by``; labels that cannot be told apart are refused."""
    if not torch.linalg.svdvals(target)[-1] > 1e-6:
        raise InputError("these soft labels cannot be taken out again: classes, or mixtures of them, share one.")
    return torch.linalg.inv(target)


def unsoften_by(probabilities: Tensor, inverse: Tensor, least: float = LEAST) -> Tensor:
    """``unsoften`` with the inverse at hand."""
    found = (probabilities @ inverse).clamp(min=least)
    return found / found.sum(dim=1, keepdim=True)


# The mathematics of several labels at once: pure functions, one formula each.
#
# Shapes: N images, K classes. An image's labels are marks, a row of K numbers: 1 where the class is there, 0 where
# it is
# not; in between where images were mixed. Each class has a logit of its own, ``q_k = sigmoid(z_k)``, and K decisions
# are
# taken that know nothing of each other. Losses are means over the classes, so that their size does not grow with K.


__all__ = ["any_of", "binary_cross_entropy", "binary_kl", "marks_of"]


def marks_of(labels: Tensor, count: int, num_classes: int) -> Tensor:
    """Labels as floating-point marks [N, K]; what are no marks is refused. Booleans and whole numbers will do.

    As everywhere, values are looked at on the CPU only: on a GPU the look would wait for the device at every step.

    >>> marks_of(torch.tensor([[True, False]]), 1, 2)
    tensor([[1., 0.]])
    """
    if labels.shape != (count, num_classes):
        hint = " For one label an image take a method for one: 'ccl-centroid', 'hard'." if labels.dim() == 1 else ""
        raise InputError(
            f"labels of a multi-label method must be zeros and ones of shape [{count}, {num_classes}], a column a "
            f"class, got {labels.dtype} {list(labels.shape)}.{hint}"
        )
    marks = labels if labels.is_floating_point() else labels.to(torch.get_default_dtype())
    if (
        marks.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not bool(((marks >= 0) & (marks <= 1)).all())
    ):
        raise InputError(
            "labels of a multi-label method must lie from 0 (not there) to 1 (there), got "
            f"{float(marks.min()):g} to {float(marks.max()):g}. A label that is not known (-1, NaN) has to be decided "
            "first."
        )
    return marks


@full_precision
def any_of(table: Tensor, marks: Tensor) -> Tensor:
    """The soft target of marks [N, K], by a table [K, K] of label distributions (row k: that of class k) → [N, K].

    ``t_k = 1 − Π_j (1 − m_j p_jk)``: each class that is there is taken for class k with probability p_jk, and t_k is
    the chance that any of them is. One label alone gives its row, no label zeros, and no further label lowers any.

    >>> table = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]])
    >>> any_of(table, torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]))
    tensor([[0.8000, 0.1000, 0.1000],
            [0.8200, 0.8200, 0.1900]])
    """
    # By logarithms, so that a small p keeps all its digits.
    return -torch.expm1(torch.log1p(-marks.to(table.dtype)[:, :, None] * table).sum(dim=1))


@full_precision
def binary_cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """``−1/K Σ_k t_k log q_k + (1 − t_k) log(1 − q_k)`` of logits and targets [N, K], mean over the batch → scalar;
    ``weight`` [N] weighs the images.

    >>> binary_cross_entropy(torch.zeros(1, 3), torch.tensor([[1.0, 0.0, 1.0]]))
    tensor(0.6931)
    """
    losses = F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction="none")
    return batch_mean(losses.mean(dim=1), weight)


@full_precision
def binary_kl(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """``1/K Σ_k KL(t_k ‖ q_k)``, each between two coins: the binary cross entropy less what it is at best, so that
    it is 0 where the target is met. Logits and targets [N, K] → scalar; ``weight`` [N] weighs the images.

    >>> binary_kl(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.7311]])).abs() < 1e-6
    tensor(True)
    """
    target = target.to(logits.dtype)
    at_best = -torch.xlogy(target, target) - torch.xlogy(1.0 - target, 1.0 - target)
    return binary_cross_entropy(logits, target, weight) - batch_mean(at_best.mean(dim=1), weight)
