"""CCL without a trained dictionary: soft labels from how often a linear classifier confuses the classes."""

from __future__ import annotations

import torch
from torch import Tensor

from cclnet import functional
from cclnet.errors import check_range
from cclnet.methods.base import Classes, sum_by_class
from cclnet.methods.ccl_centroid import CCLCentroid, ClassDistances
from cclnet.methods.class_geometry import ClassGeometry, scale_to_unit_mean, signed_sqrt_normalized, within_class_spread

LEVELS = 24  # of the summed probabilities: a mean probability below 2^-384 counts as 0
LDA_TEMPERATURE = 3.0  # of the LDA probabilities, so that small confusion probabilities remain distinguishable


class CCLConfusion(CCLCentroid):
    """``ccl-centroid`` with a weighted mean of two distances: that of class means, and with weight
    ``confusion_weight`` the confusion distance ``−½ log(c_ij c_ji / c_ii c_jj)``.

    c_ij is the mean probability of class j for images of class i under an LDA classifier (Fisher's linear
    discriminant) with equal class priors, fitted on the features of the previous epoch. It depends on how the images
    of a class are spread around the mean, not only on the means. Classes that the LDA classifier does not know have
    distances of means alone. An epoch whose distances do not exceed sampling noise gives no LDA classifier.
    """

    lda: Tensor
    lda_knows: Tensor
    confusion: Tensor

    def __init__(
        self,
        classes: Classes,
        softness: float = 0.8,
        confusion_weight: float = 0.5,
        ema_decay: float = 0.5,
        freeze_ratio: float = 0.3,
        kl_weight: float = 1.0,
    ) -> None:
        super().__init__(classes, softness, ema_decay, freeze_ratio, kl_weight=kl_weight)
        hint = "the weight of the confusion distance; 0 is ccl-centroid, usual is 0.5"
        self.confusion_weight = check_range("confusion_weight", confusion_weight, "[0, 1]", hint)
        size = classes.num_classes
        self.register_buffer("lda", torch.zeros(size, classes.in_features + 2, dtype=torch.float64))
        self.register_buffer("lda_knows", torch.zeros(size, dtype=torch.bool))
        self.register_epoch_sum("confusion", LEVELS, size, size)

    @torch.no_grad()
    def accumulate(self, features: Tensor, labels: Tensor) -> None:
        super().accumulate(features, labels)
        self.confusion.add_(soft_confusion(features, labels, self.lda))

    def distances(self, geometry: ClassGeometry) -> ClassDistances:
        """Distances between the classes in this epoch; also fits the LDA classifier for the next epoch.

        Collapse is detected from the class means, because the LDA classifier was fitted on the previous epoch.
        """
        of_means = super().distances(geometry)
        seen = geometry.known.any(dim=1)
        # Probabilities that underflow to zero carry no order: such pairs keep the distance of their means.
        confusion = self.confusion.sum(dim=0)
        positive = confusion > 0
        usable = seen & self.lda_knows & positive.diagonal()
        known = (usable[:, None] & usable[None] & positive & positive.mT).fill_diagonal_(False)
        of_confusion = scale_to_unit_mean(confusion_distances(confusion).where(known, 0.0), known)
        mean = (of_means.distance * known).sum() / known.sum().clamp(min=1)  # over the same pairs; one if these are all
        mixed = torch.lerp(of_means.distance, mean * of_confusion, self.confusion_weight)
        self.confusion.zero_()
        self.lda.copy_(fit_lda(geometry))
        self.lda_knows.copy_(seen & of_means.above_noise)
        return of_means._replace(distance=torch.where(known, mixed, of_means.distance))


def fit_lda(geometry: ClassGeometry) -> Tensor:
    """LDA classifier with equal class priors as one matrix [K, F + 2]: weights, bias, and bias for images of other
    classes.

    ``−½ |x − m_k|²`` in whitened space is linear in x up to a term that all classes share. The mean of n images has
    sampling noise that adds v/n to its distance from images of other classes; the second bias removes it. The images of
    the class itself contributed to the mean, which cancels the noise if half of the within-class variation of an image
    persists from epoch to epoch. A class without images gets probability 0.
    """
    factor, spread = within_class_spread(geometry)
    weights = torch.cholesky_solve(geometry.centres.mT, factor).mT
    bias = -(weights * geometry.centres).sum(dim=1) / 2.0
    bias = bias.masked_fill(~geometry.known.any(dim=1), -torch.inf)
    noise = spread * geometry.variance.diagonal() / 2.0
    return torch.cat([weights, bias[:, None], noise[:, None] / 2.0], dim=1)


@functional.full_precision
def soft_confusion(features: Tensor, labels: Tensor, lda: Tensor) -> Tensor:
    """LDA probabilities summed over the images of each class: [N, F], [N], [K, F + 2] → [levels, K, K] float64."""
    one_hot = functional.rows_of(torch.eye(len(lda), dtype=torch.float64, device=features.device), labels)
    weights, bias, bias_others = lda[:, :-2], lda[:, -2], lda[:, -1]
    score = signed_sqrt_normalized(features) @ weights.mT + bias + bias_others * (1.0 - one_hot)
    return sum_by_class(torch.softmax(score / LDA_TEMPERATURE, dim=1), one_hot, LEVELS)


def confusion_distances(confusion: Tensor) -> Tensor:
    """``−½ log(c_ij c_ji / c_ii c_jj)``, at least 0, with c the row-normalised confusion matrix: [K, K] → [K, K].

    Infinite or NaN where c_ij is 0.

    >>> confusion_distances(torch.tensor([[8.0, 2.0], [1.0, 1.0]])).exp()
    tensor([[1., 2.],
            [2., 1.]])
    """
    log_c = (confusion / confusion.sum(dim=1, keepdim=True)).log()
    distance = log_c.diagonal()[:, None] - log_c
    return ((distance + distance.mT) / 2.0).clamp(min=0.0)
