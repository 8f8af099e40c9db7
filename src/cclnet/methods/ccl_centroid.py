"""CCL without a dictionary to train: classes resemble each other as the means of their features do."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cclnet import functional
from cclnet.errors import InputError, NotFinite
from cclnet.head import check_batch
from cclnet.methods.base import Classes, Loss, Method, check_kl_weight
from cclnet.methods.class_geometry import Places, at_mean_one, batch_moments, class_means, raw_distances

NEAREST = 1e-3  # two classes with the same mean stay two classes, at this share of the mean distance
HALVINGS = 60  # of the interval in which the temperature lies: all digits of float64


class CCLCentroid(Method):
    """``L = CE(q, y) + w KL(p_y ‖ q)``, ``p = softmax(−d / T)``: d are the distances between the mean features of the
    classes, measured against the spread within them, and T is solved so that p has the softness asked for.

    Every training step adds its features, rooted and at unit length, to the moments of the epoch, without gradient;
    ``end_epoch()`` makes the soft labels of the next epoch of them. In the first epoch, and for a class that was never
    seen, the label is uniformly smoothed at the same softness.

    All state is in buffers, so a run that is resumed in mid-epoch goes on as if it had not stopped. It is the same
    on every process: each batch's share is summed at once, because distributed data parallel overwrites buffers with
    those of process 0 at every step.
    """

    moments: Tensor
    distance_sum: Tensor
    distance_weight: Tensor
    most_structure: Tensor
    frozen_flag: Tensor
    table: Tensor

    def __init__(
        self,
        classes: Classes,
        softness: float = 0.8,
        memory: float = 0.5,
        hold: float = 0.3,
        whiten: bool = True,
        centre: bool = False,
        kl_weight: float = 1.0,
    ) -> None:
        super().__init__(classes)
        size = classes.num_classes
        _check_settings(size, softness, memory, hold)
        self.softness, self.memory, self.hold, self.kl_weight = softness, memory, hold, check_kl_weight(kl_weight)
        self.whiten, self.centre = whiten, centre
        width = size + classes.in_features + 1
        self.register_buffer("moments", torch.zeros(width, width, dtype=torch.float64))
        self.register_buffer("distance_sum", torch.zeros(size, size, dtype=torch.float64))
        self.register_buffer("distance_weight", torch.zeros(size, size, dtype=torch.float64))
        self.register_buffer("most_structure", torch.tensor(0.0, dtype=torch.float64))
        self.register_buffer("frozen_flag", torch.tensor(False))
        self.register_buffer("table", labels_at_softness(self.distance_sum, self.distance_weight, softness))

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        check_batch(features, labels, self.classes.in_features, self.classes.num_classes)
        if self.training:
            self.remember(features.detach(), labels)
        table = self.table.to(torch.promote_types(logits.dtype, torch.float32))
        target = functional.rows_of(table, labels)
        return Loss.of(
            cross_entropy=functional.cross_entropy(logits, labels, weight),
            kl=self.kl_weight * functional.kl_to_target(logits, target, weight),
        )

    @torch.no_grad()
    def remember(self, features: Tensor, labels: Tensor) -> None:
        """Add a batch to the moments of the epoch. Sample weights do not count here."""
        self.moments.add_(summed(batch_moments(features, labels, self.classes.num_classes)))

    def places(self) -> Places:
        """Where the classes lie among the features of the epoch."""
        return class_means(self.moments, self.classes.num_classes, self.classes.counts)

    def distances(self, places: Places) -> Distances:
        """How far apart the epoch has the classes, which lie at ``places``."""
        raw, chance = raw_distances(places, self.whiten, self.centre)
        distance = at_mean_one(raw, places.known)
        return Distances(distance, places.known, _structure(distance, places.known), raw.sum() > chance.sum())

    @property
    def hard_share(self) -> float:
        return 1.0 / (1.0 + self.kl_weight)

    def soft_labels(self) -> Tensor:
        """The label distributions in use, [K, K] float64."""
        return self.table.clone()

    @torch.no_grad()
    def end_epoch(self) -> dict[str, float]:
        """Take the epoch's distances into the running mean, solve the soft labels of it, begin again."""
        if not bool(self.moments.isfinite().all()):  # a compiled step cannot look at its features
            raise NotFinite(
                "features of this epoch are NaN or infinite. The backbone has diverged or its input is broken: lower "
                "the learning rate, clip gradients, check the images."
            )
        distance, known, structure, told_apart = self.distances(self.places())
        self.moments.zero_()
        # Distances that are mostly chance are very unequal, and that is no structure that could be lost.
        self.most_structure.copy_(torch.maximum(structure * told_apart, self.most_structure))
        # Features that have collapsed hold all classes equally far apart: what was known before is then held.
        self.frozen_flag.logical_or_(known.any() & (structure < self.hold * self.most_structure))
        news = known & ~self.frozen_flag
        for running, new in ((self.distance_sum, distance), (self.distance_weight, torch.ones_like(distance))):
            running.copy_(torch.where(news, self.memory * running + new, running))
        self.table.copy_(labels_at_softness(self.distance_sum, self.distance_weight, self.softness))
        return {
            "softness": float(functional.softness(self.table)),
            "structure": float(structure),
            "frozen": float(self.frozen_flag),
        }


def _check_settings(size: int, softness: float, memory: float, hold: float) -> None:
    if not 1.0 / size < softness < 1.0:
        raise InputError(
            f"softness, the mean probability of the own class, must lie between 1/{size} (an even guess) and 1 (hard "
            f"labels), got {softness}. Usual is 0.6 to 0.9."
        )
    if not 0.0 <= memory <= 1.0:
        raise InputError(
            f"memory, what an epoch's distances keep of their weight with each later epoch, must lie in [0, 1], got "
            f"{memory}. 0 is the last epoch alone, 1 the mean of all; usual is 0.5."
        )
    if not 0.0 <= hold < 1.0:
        raise InputError(
            f"hold, the share of its most at which structure counts as lost, must lie in [0, 1), got {hold}. "
            "0 never holds; usual is 0.3."
        )


def summed(share: Tensor) -> Tensor:
    """A batch's share of something, over all processes."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(share)
    return share


class Distances(NamedTuple):
    """What an epoch says about how far apart the classes are.

    Attributes:
        distance: of each pair, with a mean of one, [K, K].
        known: which of them are known, [K, K].
        structure: how unequal the distances of the means are.
        told_apart: whether these are more than chance.
    """

    distance: Tensor
    known: Tensor
    structure: Tensor
    told_apart: Tensor


def _structure(distance: Tensor, known: Tensor) -> Tensor:
    """Standard deviation of the known distances, whose mean is one: 0 where all classes are equally far apart, or none
    could be told from another."""
    mean = distance.sum() / known.sum().clamp(min=1)
    return (((distance - mean).square() * known).sum() / known.sum().clamp(min=1)).sqrt()


def labels_at_softness(distance_sum: Tensor, distance_weight: Tensor, softness: float) -> Tensor:
    """``softmax(−d / T)`` of mean distances d with the T that gives a mean diagonal of ``softness``: [K, K].

    A distance of weight 0 is not known and counts as 1, the mean. The row of a class without any known one is label
    smoothing: ``softness`` for itself, the rest evenly. Softness falls as T grows, so T is found by halving.

    >>> labels_at_softness(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.ones(2, 2), 0.75)
    tensor([[0.7500, 0.2500],
            [0.2500, 0.7500]])
    """
    size = len(distance_sum)
    own = torch.eye(size, dtype=torch.bool, device=distance_sum.device)
    known = (distance_weight > 0) & ~own
    distance = torch.where(known, distance_sum / distance_weight.masked_fill(~known, 1.0), 1.0)
    distance = distance.clamp(min=NEAREST).masked_fill(own, 0.0)
    smoothed = torch.full_like(distance, (1.0 - softness) / (size - 1)).masked_fill(own, softness)
    has_place = known.any(dim=1, keepdim=True)

    def at(log_temperature: Tensor) -> Tensor:
        return torch.where(has_place, torch.softmax(-distance / log_temperature.exp(), dim=1), smoothed)

    low, high = distance.new_tensor(-20.0), distance.new_tensor(20.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        too_hard = functional.softness(at(middle)) > softness
        low, high = torch.where(too_hard, middle, low), torch.where(too_hard, high, middle)
    return at((low + high) / 2.0)
