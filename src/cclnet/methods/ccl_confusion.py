"""CCL without a dictionary to train: classes resemble each other as far as their images are mistaken for each other."""

from __future__ import annotations

import torch
from torch import Tensor

from cclnet import functional
from cclnet.errors import InputError
from cclnet.methods.base import Classes
from cclnet.methods.ccl_centroid import CCLCentroid, Distances, summed
from cclnet.methods.class_geometry import Places, at_mean_one, rooted, spread_within

FLATTENING = 3.0  # of the judge's probabilities, so that far classes are told from farther ones


class CCLConfusion(CCLCentroid):
    """``ccl-centroid`` with distances that are, by the share ``confusions``, ``−½ log(c_ij c_ji / c_ii c_jj)``: c_ij is
    the probability with which images of class i are given for class j by a judge to whom every class matters equally.

    The judge is Fisher's discriminant of the epoch before: it says how near an image lies to the mean of each class,
    measured against the spread within the classes. So not only where the means lie counts, but how the images of each
    class lie around them. A class that it does not know yet is where its mean is. An epoch that could not tell the
    classes apart makes no judge.
    """

    judge: Tensor
    judged: Tensor
    mistaken: Tensor

    def __init__(
        self,
        classes: Classes,
        softness: float = 0.8,
        confusions: float = 0.5,
        memory: float = 0.5,
        hold: float = 0.3,
        kl_weight: float = 1.0,
    ) -> None:
        super().__init__(classes, softness=softness, memory=memory, hold=hold, kl_weight=kl_weight)
        if not 0.0 <= confusions <= 1.0:
            raise InputError(
                f"confusions, their share in the distances, must lie in [0, 1], got {confusions}. 0 is ccl-centroid; "
                "usual is 0.5."
            )
        self.confusions = confusions
        size = classes.num_classes
        self.register_buffer("judge", torch.zeros(size, classes.in_features + 2, dtype=torch.float64))
        self.register_buffer("judged", torch.zeros(size, dtype=torch.bool))
        self.register_buffer("mistaken", torch.zeros(size, size, dtype=torch.float64))

    @torch.no_grad()
    def remember(self, features: Tensor, labels: Tensor) -> None:
        super().remember(features, labels)
        self.mistaken.add_(summed(batch_mistaken(features, labels, self.judge)))

    def distances(self, places: Places) -> Distances:
        """Also makes the judge of the next epoch. Whether features have collapsed, the means tell: a judge of features
        that were not is no witness."""
        of_means = super().distances(places)
        seen = places.known.any(dim=1)
        # Where a share is too small for a number, far classes are not told from farther ones: as far as their means.
        told = self.mistaken > 0
        compared = seen & self.judged & told.diagonal()
        known = (compared[:, None] & compared[None] & told & told.mT).fill_diagonal_(False)
        of_mistakes = at_mean_one(mistaken_distances(self.mistaken).where(known, 0.0), known)
        mean = (of_means.distance * known).sum() / known.sum().clamp(min=1)  # of the same pairs: one, if these are all
        mixed = torch.lerp(of_means.distance, mean * of_mistakes, self.confusions)
        self.mistaken.zero_()
        self.judge.copy_(judge_of(places))
        self.judged.copy_(seen & of_means.told_apart)
        return of_means._replace(distance=torch.where(known, mixed, of_means.distance))


def judge_of(places: Places) -> Tensor:
    """Fisher's discriminant as one matrix, [K, F + 2]: weights of the features, what is added, and what is added for
    images of other classes.

    ``−½ |x − m_k|²`` against the spread within is linear in x but for a part that all classes share. The mean of n
    images misses the true one, by which it looks v/n farther away than it is. Images of the class itself do not see it
    so: they were among the n, and it is nearer to them by just that if half of what tells an image from others of its
    class lasts from epoch to epoch. A class that was not seen is given no image.
    """
    factor, spread = spread_within(places)
    weights = torch.cholesky_solve(places.centres.mT, factor).mT
    added = -(weights * places.centres).sum(dim=1) / 2.0
    added = added.masked_fill(~places.known.any(dim=1), -torch.inf)
    missed = spread * places.variance.diagonal() / 2.0
    return torch.cat([weights, added[:, None], missed[:, None] / 2.0], dim=1)


@functional.full_precision
def batch_mistaken(features: Tensor, labels: Tensor, judge: Tensor) -> Tensor:
    """The judge's probabilities, summed over the images of each class: [N, F] → [K, K] float64."""
    own = functional.rows_of(torch.eye(len(judge), dtype=torch.float64, device=features.device), labels)
    weights, added, for_others = judge[:, :-2], judge[:, -2], judge[:, -1]
    score = rooted(features) @ weights.mT + added + for_others * (1.0 - own)
    return own.mT @ torch.softmax(score / FLATTENING, dim=1)


def mistaken_distances(mistaken: Tensor) -> Tensor:
    """``−½ log(c_ij c_ji / c_ii c_jj)`` of sums in which row i is shared out among the classes, [K, K]; not below 0,
    and infinite or not a number where a share is 0.

    >>> mistaken_distances(torch.tensor([[8.0, 2.0], [1.0, 1.0]])).exp()
    tensor([[1., 2.],
            [2., 1.]])
    """
    log_share = (mistaken / mistaken.sum(dim=1, keepdim=True)).log()
    distance = log_share.diagonal()[:, None] - log_share
    return ((distance + distance.mT) / 2.0).clamp(min=0.0)
