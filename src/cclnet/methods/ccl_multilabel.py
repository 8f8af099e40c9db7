"""CCL for several labels at once: classes resemble each other as what they do to the features does."""

from __future__ import annotations

import torch
from torch import Tensor

from cclnet.functional import any_of, binary_cross_entropy, binary_kl, marks_of
from cclnet.head import check_features
from cclnet.methods.base import Loss
from cclnet.methods.ccl_centroid import CCLCentroid
from cclnet.methods.class_geometry import Places

TELLING = 5  # a difference is known where it is as well as between two classes of so many images each,
INFLATION = 2.0  # or where classes coming together has cost it no more than this
RANK = 1e-9  # share of the largest eigenvalue below which a direction was not seen
OUTSIDE = 1e-6  # of a difference's square, outside of what was seen: rounding


class CCLMultilabel(CCLCentroid):
    """``L = BCE(q, m) + w KL(t ‖ q)`` of marks m, ``t_k = 1 − Π_j (1 − m_j p_jk)``; p as in ``ccl-centroid``, with the
    effects of the classes for their means.

    The effect of a class is what its presence adds to the unit feature, all other classes held the same: least squares
    of the features on the marks. Where each image has one label, effects differ exactly as class means do, and targets
    are those of ``ccl-centroid``.
    """

    multilabel = True

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        check_features(features, self.classes.in_features)
        marks = marks_of(labels, len(features), self.classes.num_classes)
        if self.training:
            self.remember(features.detach(), marks)
        target = any_of(self.table, marks)
        return Loss.of(
            binary_cross_entropy=binary_cross_entropy(logits, marks, weight),
            kl=self.kl_weight * binary_kl(logits, target, weight),
        )

    def target(self) -> None:
        """Each mark has a chance of its own: there is no one distribution for a class."""
        return None

    def places(self) -> Places:
        return class_effects(self.moments, self.classes.num_classes)


def class_effects(moments: Tensor, num_classes: int) -> Places:
    """Least squares of the unit features on the marks and a constant, from the moments of an epoch: the effects [K, F],
    the features' covariance that they leave, and how well each difference of two is known.

    With X the marks and a column of ones, ``effects = (XᵀX)⁺ XᵀF``. For c = e_i − e_j the variance of
    ``effect_i − effect_j`` is ``cᵀ(XᵀX)⁺c`` of the spread, which is 1/n_i + 1/n_j where no two classes come together.
    A difference is not known where it lies outside of the rows of X (two classes always seen together, one never
    seen), or where too few images show one class without the other: no likeness must be read into that.
    """
    own = [*range(num_classes), -1]
    gram, against = moments[own][:, own], moments[own, num_classes:-1]
    values, vectors = torch.linalg.eigh(gram)
    seen = values > RANK * values[-1]
    vectors = vectors * seen
    inverse = (vectors / values.where(seen, 1.0)) @ vectors.mT
    effects = inverse @ against
    within = moments[num_classes:-1, num_classes:-1] - against.mT @ effects
    freedom = (moments[-1, -1] - seen.sum()).clamp(min=1.0)
    within = within / freedom

    outside = torch.eye(len(gram), dtype=gram.dtype, device=gram.device) - vectors @ vectors.mT
    variance, missed = _of_differences(inverse)[:-1, :-1], _of_differences(outside)[:-1, :-1]
    counts = gram.diagonal()[:-1].clamp(min=1.0)
    enough = (INFLATION * (1.0 / counts[:, None] + 1.0 / counts[None])).clamp(min=2.0 / TELLING)
    known = ((missed < OUTSIDE) & (variance < enough)).fill_diagonal_(False)
    return Places(effects[:-1], (within + within.mT) / 2.0, variance, known, freedom)


def _of_differences(matrix: Tensor) -> Tensor:
    """``(e_i − e_j)ᵀ M (e_i − e_j)`` for all pairs."""
    own = matrix.diagonal()
    return own[:, None] + own[None] - matrix - matrix.mT
