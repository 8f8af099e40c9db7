"""Where classes lie among the features, and how far apart: all from the moments of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cclnet import functional

SHRINKAGE = 0.01  # of the spread within classes towards a round one: directions that never vary must not decide


def rooted(features: Tensor) -> Tensor:
    """``sign(f) √|f|`` at unit length, [N, F] float64. Pooled features have long tails; after the root a mean and a
    covariance say what a class looks like, and not where its few strongest images lie.

    >>> rooted(torch.tensor([[9.0, -16.0]]))
    tensor([[ 0.6000, -0.8000]], dtype=torch.float64)
    """
    features = features.double()
    return F.normalize(features.sign() * features.abs().sqrt(), dim=1)


@functional.full_precision
def batch_moments(features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """All that is kept of a batch, as one matrix: ``Σ_i a_i a_iᵀ`` with a_i = (label, rooted feature, 1) of image i.
    [N, F] → [K + F + 1, K + F + 1] float64 (in which no GPU rounds a product to fewer digits). It holds how many
    images each class has, the sums of their features, and the features' second moments.

    >>> batch_moments(torch.tensor([[9.0, -16.0]]), torch.tensor([1]), num_classes=2)[1, 2:]
    tensor([ 0.6000, -0.8000,  1.0000], dtype=torch.float64)
    """
    own = torch.eye(num_classes, dtype=torch.float64, device=features.device)
    unit = rooted(features)
    rows = torch.cat([functional.rows_of(own, labels), unit, torch.ones_like(unit[:, :1])], dim=1)
    return rows.mT @ rows


class Places(NamedTuple):
    """Where the classes lie among the features.

    Attributes:
        centres: a row a class, [K, F]; only their differences count.
        within: covariance of the features within the classes, [F, F].
        variance: of the difference of two centres by chance, [K, K], as a share of ``within``.
        known: which differences are known, [K, K].
        freedom: degrees of freedom behind ``within``.
    """

    centres: Tensor
    within: Tensor
    variance: Tensor
    known: Tensor
    freedom: Tensor


def class_means(moments: Tensor, num_classes: int, images: Sequence[int] | None = None) -> Places:
    """The classes lie at their mean features. Known are those that were seen. The mean of n images misses the true one
    by 1/n of the spread within the class; drawing the same images again (``images`` are how many each class has) does
    not bring it nearer, and tells no more of the spread. Where classes are drawn unequally often, the freedom is that
    of Satterthwaite."""
    counts = moments[:num_classes, -1]
    seen = counts > 0
    drawn = counts.masked_fill(~seen, 1.0)
    means = moments[:num_classes, num_classes:-1] / drawn[:, None]
    second = moments[num_classes:-1, num_classes:-1]
    distinct = drawn if images is None else torch.minimum(drawn, drawn.new_tensor(images))
    distinct = distinct.clamp(min=1.0)  # mixed images can hold less than one of a class, but no mean of none
    free, repeats = (distinct - 1.0) * seen, drawn / distinct
    total = (repeats * free).sum().clamp(min=1.0)
    freedom = total.square() / (repeats.square() * free).sum().clamp(min=1.0)
    within = (second - (means * counts[:, None]).mT @ means) / total
    known = (seen[:, None] & seen[None]).fill_diagonal_(False)
    shares = 1.0 / distinct
    return Places(means, within, shares[:, None] + shares[None], known, freedom)


def class_distances(places: Places, whiten: bool = True, centre: bool = False) -> Tensor:
    """``raw_distances`` divided by their mean, [K, K] float64."""
    return at_mean_one(raw_distances(places, whiten, centre)[0], places.known)


def raw_distances(places: Places, whiten: bool = True, centre: bool = False) -> tuple[Tensor, Tensor]:
    """Squared distances between the centres of the classes, and what chance put between them, two of [K, K] float64; 0
    where not known.

    ``whiten`` measures them against the spread within the classes, as Mahalanobis did: what varies much inside a class
    separates two classes less. ``centre`` compares directions from the mean of the classes instead of places.

    Chance alone puts ``variance · v`` between two centres, with v the spread, and most between rare classes, which it
    would set apart. Places are corrected for it.
    """
    centres, within, variance, known, _ = places
    spread = within.trace()
    if whiten:
        factor, spread = spread_within(places)
        centres = torch.linalg.solve_triangular(factor, centres.mT, upper=False).mT
    if centre:
        placed = known.any(dim=1)
        centres = centres - (centres * placed[:, None]).sum(dim=0) / placed.sum().clamp(min=1)
        centres = F.normalize(centres, dim=1)
    distance = torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist").square()
    chance = torch.zeros_like(distance) if centre else spread * variance
    return (distance - chance).clamp(min=0.0) * known, chance * known


def spread_within(places: Places) -> tuple[Tensor, Tensor]:
    """The Cholesky factor of the spread within classes, a little rounder than it was seen, and how large the spread is
    against itself.

    That is ``u = trace(A S)``, the directions that the inverse A leaves; but A was made of the same images as S and
    fits it too well, so that ``v = u / (1 − u / freedom)``, as in generalised cross-validation. With ten times as many
    images as features that is a tenth more, with as many it is tens of times u.
    """
    within = places.within
    round_part = (SHRINKAGE * within.diagonal().mean()).clamp(min=1e-9)
    factor = torch.linalg.cholesky(within + torch.diag(round_part.expand(len(within))))
    directions = torch.cholesky_solve(within, factor).trace()
    return factor, directions / (1.0 - directions / places.freedom).clamp(min=1e-6)


def at_mean_one(distance: Tensor, known: Tensor) -> Tensor:
    mean = distance.sum() / known.sum().clamp(min=1)
    return distance / torch.where(mean > 0, mean, 1.0)
