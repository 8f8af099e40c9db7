"""Positions of the classes in feature space and the distances between them, from the moments of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cclnet import functional
from cclnet.methods.base import to_exact_step

FREEZE_RATIO = "the fraction of its maximum below which structure counts as lost; 0 never freezes"
SHRINKAGE = 0.01  # of the within-class covariance towards a multiple of the identity, for directions without variance


def signed_sqrt_normalized(features: Tensor) -> Tensor:
    """Signed square root of the features, L2-normalised: ``sign(f) √|f|`` / norm, [N, F] → [N, F] float64.

    Pooled features are heavy-tailed: without the root, a few images with large activations would dominate the moments.

    >>> signed_sqrt_normalized(torch.tensor([[9.0, -16.0]]))
    tensor([[ 0.6000, -0.8000]], dtype=torch.float64)
    """
    features = features.double()
    return F.normalize(features.sign() * features.abs().sqrt(), dim=1)


@functional.full_precision
def batch_moments(features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Counts, sums and second moments of a batch in one matrix: [N, F] → [K + F + 1, K + F + 1] float64.

    ``Σ_i a_i a_iᵀ`` with a_i = (label, signed_sqrt_normalized feature, 1) of image i, rounded to 2^-16: that adds
    2e-11 to the variance of a direction, which within a class is about 1e-4. In float64 no GPU rounds the product to
    fewer digits, and the sum is exact: it does not depend on the order of the images, nor on how they are divided into
    batches and processes.

    >>> batch_moments(torch.tensor([[9.0, -16.0]]), torch.tensor([1]), num_classes=2)[1, 2:]
    tensor([ 0.6000, -0.8000,  1.0000], dtype=torch.float64)
    """
    one_hot = torch.eye(num_classes, dtype=torch.float64, device=features.device)
    unit = signed_sqrt_normalized(features)
    rows = torch.cat([functional.rows_of(one_hot, labels), unit, torch.ones_like(unit[:, :1])], dim=1)
    rows = to_exact_step(rows)
    return rows.mT @ rows


class ClassGeometry(NamedTuple):
    """Positions of the classes in feature space."""

    centres: Tensor  # one position per class, [K, F]; only differences matter
    within: Tensor  # within-class covariance of the features, [F, F]
    variance: Tensor  # sampling variance of the difference of two centres, [K, K], in units of ``within``
    known: Tensor  # pairs of classes whose difference can be estimated, [K, K]
    degrees_of_freedom: Tensor  # of the estimate ``within``


def geometry_from_means(moments: Tensor, num_classes: int, class_counts: Sequence[int] | None = None) -> ClassGeometry:
    """Class geometry with the mean feature of each class as its centre; classes with images are known.

    The mean of n images has 1/n of the within-class covariance as sampling variance. Repeated draws of the same image
    reduce neither this variance nor that of the covariance, so n is limited to ``class_counts``, the number of distinct
    images per class. If classes are drawn unequally often, the degrees of freedom are Satterthwaite's.
    """
    counts = moments[:num_classes, -1]
    seen = counts > 0
    drawn = counts.masked_fill(~seen, 1.0)
    means = moments[:num_classes, num_classes:-1] / drawn[:, None]
    second = moments[num_classes:-1, num_classes:-1]
    distinct = drawn if class_counts is None else torch.minimum(drawn, drawn.new_tensor(class_counts))
    distinct = distinct.clamp(min=1.0)  # mixed images can sum to less than one image of a class
    free, repeats = (distinct - 1.0) * seen, drawn / distinct
    total = (repeats * free).sum().clamp(min=1.0)
    degrees_of_freedom = total.square() / (repeats.square() * free).sum().clamp(min=1.0)
    within = (second - (means * counts[:, None]).mT @ means) / total
    known = (seen[:, None] & seen[None]).fill_diagonal_(False)
    shares = 1.0 / distinct
    return ClassGeometry(means, within, shares[:, None] + shares[None], known, degrees_of_freedom)


def class_distances(geometry: ClassGeometry, whiten: bool = True, centre: bool = False) -> Tensor:
    """``corrected_distances`` divided by their mean, [K, K] float64."""
    return scale_to_unit_mean(corrected_distances(geometry, whiten, centre)[0], geometry.known)


def corrected_distances(geometry: ClassGeometry, whiten: bool = True, centre: bool = False) -> tuple[Tensor, Tensor]:
    """Squared distances between class centres less the expected sampling noise, and that noise: two [K, K] float64.

    ``whiten`` gives squared Mahalanobis distances: directions that vary much within a class count less. ``centre``
    compares directions from the mean of all classes instead of positions, without a correction. Unknown pairs are 0.

    Sampling noise alone puts an expected ``variance · v`` between two centres, with v the within-class spread: most
    between rare classes, which would look dissimilar.
    """
    centres, within, variance, known, _ = geometry
    spread = within.trace()
    if whiten:
        factor, spread = within_class_spread(geometry)
        centres = torch.linalg.solve_triangular(factor, centres.mT, upper=False).mT
    if centre:
        located = known.any(dim=1)
        centres = centres - (centres * located[:, None]).sum(dim=0) / located.sum().clamp(min=1)
        centres = F.normalize(centres, dim=1)
    distance = torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist").square()
    noise = torch.zeros_like(distance) if centre else spread * variance
    return (distance - noise).clamp(min=0.0) * known, noise * known


def within_class_spread(geometry: ClassGeometry) -> tuple[Tensor, Tensor]:
    """Cholesky factor of the shrunk within-class covariance [F, F], and the spread v in whitened space (scalar).

    With S the covariance and A the inverse of the shrunk one, ``u = trace(A S)`` is the effective number of
    directions. A is estimated from the same images as S, so u is too small. The correction ``v = u / (1 − u / df)`` is
    that of generalised cross-validation.
    """
    within = geometry.within
    ridge = (SHRINKAGE * within.diagonal().mean()).clamp(min=1e-9)
    factor = torch.linalg.cholesky(within + torch.diag(ridge.expand(len(within))))
    directions = torch.cholesky_solve(within, factor).trace()
    return factor, directions / (1.0 - directions / geometry.degrees_of_freedom).clamp(min=1e-6)


def scale_to_unit_mean(distance: Tensor, known: Tensor) -> Tensor:
    """Distances [K, K], zero where not ``known``, divided by the mean of the known ones."""
    mean = distance.sum() / known.sum().clamp(min=1)
    return distance / torch.where(mean > 0, mean, 1.0)
