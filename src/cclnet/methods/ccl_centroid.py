"""CCL without a trained dictionary: soft labels from the distances between the mean features of the classes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cclnet import functional
from cclnet.errors import NotFinite, check_range
from cclnet.head import check_batch
from cclnet.methods.base import Classes, Loss, SoftLabelMethod, sum_over_processes, table_target
from cclnet.methods.class_geometry import (
    FREEZE_RATIO,
    ClassGeometry,
    batch_moments,
    corrected_distances,
    geometry_from_means,
    scale_to_unit_mean,
)

MIN_DISTANCE = 1e-3  # of two different classes, relative to the mean distance: equal means do not merge classes
BISECTIONS = 60  # of the interval of the temperature: float64 accuracy


class ClassDistances(NamedTuple):
    """Distances between the classes in one epoch."""

    distance: Tensor  # of each pair of classes, with mean one, [K, K]
    known: Tensor  # pairs whose distance is known, [K, K]
    structure: Tensor  # standard deviation of the distances of centres; 0 if all classes are equally far apart
    above_noise: Tensor  # whether the distances of centres exceed sampling noise


class CCLCentroid(SoftLabelMethod):
    """``L = CE(q, y) + w KL(p_y ‖ q)`` with ``p = softmax(−d / T)``: d are Mahalanobis distances between the mean
    features of the classes, and T is solved so that p has the requested softness.

    Every training step adds its features (signed square root, L2-normalised, without gradient) to the moments of the
    epoch; ``end_epoch()`` computes the soft labels of the next epoch. In the first epoch, and for a class without
    images, the label is uniformly smoothed with the same softness.
    """

    moments: Tensor
    distance_sum: Tensor
    distance_weight: Tensor
    max_structure: Tensor
    frozen_flag: Tensor
    table: Tensor

    def __init__(
        self,
        classes: Classes,
        softness: float = 0.8,
        ema_decay: float = 0.5,
        freeze_ratio: float = 0.3,
        whiten: bool = True,
        centre: bool = False,
        kl_weight: float = 1.0,
    ) -> None:
        super().__init__(classes, kl_weight)
        size = classes.num_classes
        hint = f"the mean probability of the own class, from 1/{size} (uniform) to 1 (hard labels), usually 0.6 to 0.9"
        self.softness = check_range("softness", softness, f"({1.0 / size}, 1)", hint)
        hint = "the factor on the weight of earlier epochs; 0 uses the last epoch alone, 1 the mean of all"
        self.ema_decay = check_range("ema_decay", ema_decay, "[0, 1]", hint)
        self.freeze_ratio = check_range("freeze_ratio", freeze_ratio, "[0, 1)", FREEZE_RATIO)
        self.whiten, self.centre = whiten, centre
        width = size + classes.in_features + 1
        self.register_epoch_sum("moments", width, width)
        for name in ("distance_sum", "distance_weight"):
            self.register_buffer(name, torch.zeros(size, size, dtype=torch.float64))
        self.register_buffer("max_structure", torch.tensor(0.0, dtype=torch.float64))
        self.register_buffer("frozen_flag", torch.tensor(False))
        self.register_buffer("table", labels_at_softness(self.distance_sum, self.distance_weight, softness))

    def forward(self, features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Loss:
        check_batch(features, labels, self.classes.in_features, self.classes.num_classes)
        if self.training:
            self.accumulate(features.detach(), labels)
        return self.loss(logits, labels, table_target(self.table, logits, labels), weight)

    @torch.no_grad()
    def accumulate(self, features: Tensor, labels: Tensor) -> None:
        """Add a batch to the moments of the epoch; weights of the images are ignored."""
        self.moments.add_(batch_moments(features, labels, self.classes.num_classes))

    def geometry(self) -> ClassGeometry:
        return geometry_from_means(self.moments, self.classes.num_classes, self.classes.counts)

    def distances(self, geometry: ClassGeometry) -> ClassDistances:
        corrected, noise = corrected_distances(geometry, self.whiten, self.centre)
        distance, known = scale_to_unit_mean(corrected, geometry.known), geometry.known
        mean = distance.sum() / known.sum().clamp(min=1)
        structure = (((distance - mean).square() * known).sum() / known.sum().clamp(min=1)).sqrt()
        return ClassDistances(distance, known, structure, corrected.sum() > noise.sum())

    def soft_labels(self) -> Tensor:
        return self.table.clone()

    @torch.no_grad()
    def end_epoch(self) -> dict[str, float]:
        """Add the distances of the epoch to the running mean, compute the soft labels, reset the moments."""
        for name in self.epoch_sums:
            sum_over_processes(getattr(self, name))
        if not bool(self.moments.isfinite().all()):  # a compiled step cannot check its features
            raise NotFinite(
                "features of this epoch are NaN or infinite. The backbone has diverged or its input is broken: lower "
                "the learning rate, clip gradients, check the images."
            )
        distance, known, structure, above_noise = self.distances(self.geometry())
        self.moments.zero_()
        # Noise makes distances unequal without any structure that could be lost, so it does not set the maximum.
        self.max_structure.copy_(torch.maximum(structure * above_noise, self.max_structure))
        # Collapsed features put all classes at equal distances: keep the soft labels of the epochs before.
        self.frozen_flag.logical_or_(known.any() & (structure < self.freeze_ratio * self.max_structure))
        update = known & ~self.frozen_flag
        for running, new in ((self.distance_sum, distance), (self.distance_weight, torch.ones_like(distance))):
            running.copy_(torch.where(update, self.ema_decay * running + new, running))
        self.table.copy_(labels_at_softness(self.distance_sum, self.distance_weight, self.softness))
        logged = {"softness": functional.softness(self.table), "structure": structure, "frozen": self.frozen_flag}
        return {name: float(value) for name, value in logged.items()}


def labels_at_softness(distance_sum: Tensor, distance_weight: Tensor, softness: float) -> Tensor:
    """``softmax(−d / T)`` of the mean distances d, with the T that gives a mean diagonal of ``softness``: [K, K].

    A distance with weight 0 is unknown and set to 1, the mean. The row of a class without known distances is uniform
    label smoothing with the same softness. Softness decreases with T, so T is found by bisection.

    >>> labels_at_softness(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.ones(2, 2), 0.75)
    tensor([[0.7500, 0.2500],
            [0.2500, 0.7500]])
    """
    size = len(distance_sum)
    diagonal = torch.eye(size, dtype=torch.bool, device=distance_sum.device)
    known = (distance_weight > 0) & ~diagonal
    distance = torch.where(known, distance_sum / distance_weight.masked_fill(~known, 1.0), 1.0)
    distance = distance.clamp(min=MIN_DISTANCE).masked_fill(diagonal, 0.0)
    smoothed = torch.full_like(distance, (1.0 - softness) / (size - 1)).masked_fill(diagonal, softness)
    is_known = known.any(dim=1, keepdim=True)

    def labels(log_temperature: Tensor) -> Tensor:
        return torch.where(is_known, torch.softmax(-distance / log_temperature.exp(), dim=1), smoothed)

    low, high = distance.new_tensor(-20.0), distance.new_tensor(20.0)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        too_hard = functional.softness(labels(middle)) > softness
        low, high = torch.where(too_hard, middle, low), torch.where(too_hard, high, middle)
    return labels((low + high) / 2.0)
