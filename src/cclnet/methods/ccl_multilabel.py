"""CCL for several labels per image: soft labels from the effect that the presence of a class has on the features."""

from __future__ import annotations

import torch
from torch import Tensor

from cclnet import functional
from cclnet.head import check_features
from cclnet.methods.base import Loss
from cclnet.methods.ccl_centroid import CCLCentroid
from cclnet.methods.class_geometry import ClassGeometry

MIN_IMAGES = 5  # a difference is known if it is as precise as between two classes with this many images each,
MAX_INFLATION = 2.0  # or if co-occurrence increases its variance by at most this factor
RANK_TOLERANCE = 1e-9  # relative to the largest eigenvalue: below, a direction has no data
SPAN_TOLERANCE = 1e-6  # squared part of a contrast outside of the row space that counts as rounding


class CCLMultilabel(CCLCentroid):
    """``L = BCE(q, m) + w KL(t ‖ q)`` for multi-hot targets m, with ``t_k = 1 − Π_j (1 − m_j p_jk)``; p as in
    ``ccl-centroid``, with class effects in place of class means.

    The effect of a class is what its presence adds to the normalised feature with all other classes fixed. If every
    image has one label, effects differ exactly as class means do, and the targets are those of ``ccl-centroid``.
    """

    multilabel = True
    single_label_counterpart = "ccl-centroid"

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        check_features(features, self.classes.in_features)
        targets = functional.multi_hot_targets(labels, len(features), self.classes.num_classes)
        if self.training:
            self.accumulate(features.detach(), targets)
        soft_targets = functional.noisy_or_targets(self.table, targets)
        return Loss.of(
            binary_cross_entropy=functional.binary_cross_entropy(logits, targets, weight),
            kl=self.kl_weight * functional.binary_kl(logits, soft_targets, weight),
        )

    def target(self) -> None:
        return None  # each class has its own probability: there is no distribution over the classes

    def geometry(self) -> ClassGeometry:
        return geometry_from_effects(self.moments, self.classes.num_classes)


def geometry_from_effects(moments: Tensor, num_classes: int) -> ClassGeometry:
    """Class geometry with class effects as centres: least squares of the features on the multi-hot targets.

    With X the targets and a column of ones, ``effects = (XᵀX)⁺ XᵀF``. For the contrast c = e_i − e_j, the variance of
    ``effect_i − effect_j`` is ``cᵀ(XᵀX)⁺c`` times the within-class covariance, which is 1/n_i + 1/n_j without
    co-occurrence. A difference is unknown if c lies outside of the row space of X (two classes that always co-occur, or
    a class without images) or if too few images show one class without the other: co-occurrence is not similarity.
    """
    design = [*range(num_classes), -1]
    gram, cross = moments[design][:, design], moments[design, num_classes:-1]
    values, vectors = torch.linalg.eigh(gram)
    spanned = values > RANK_TOLERANCE * values[-1]
    vectors = vectors * spanned
    inverse = (vectors / values.where(spanned, 1.0)) @ vectors.mT
    effects = inverse @ cross
    degrees_of_freedom = (moments[-1, -1] - spanned.sum()).clamp(min=1.0)
    within = (moments[num_classes:-1, num_classes:-1] - cross.mT @ effects) / degrees_of_freedom

    outside = torch.eye(len(gram), dtype=gram.dtype, device=gram.device) - vectors @ vectors.mT
    variance, unspanned = _of_contrasts(inverse)[:-1, :-1], _of_contrasts(outside)[:-1, :-1]
    counts = gram.diagonal()[:-1].clamp(min=1.0)
    limit = (MAX_INFLATION * (1.0 / counts[:, None] + 1.0 / counts[None])).clamp(min=2.0 / MIN_IMAGES)
    known = ((unspanned < SPAN_TOLERANCE) & (variance < limit)).fill_diagonal_(False)
    return ClassGeometry(effects[:-1], (within + within.mT) / 2.0, variance, known, degrees_of_freedom)


def _of_contrasts(matrix: Tensor) -> Tensor:
    """``(e_i − e_j)ᵀ M (e_i − e_j)`` for all pairs."""
    diagonal = matrix.diagonal()
    return diagonal[:, None] + diagonal[None] - matrix - matrix.mT
