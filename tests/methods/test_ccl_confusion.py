"""Soft labels from confusions: the LDA classifier, its soft confusion matrix, and what class means do not show."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cclnet import InputError, build_method, functional
from cclnet.methods import Classes
from cclnet.methods.base import to_exact_step
from cclnet.methods.ccl_centroid import CCLCentroid
from cclnet.methods.ccl_confusion import LDA_TEMPERATURE, CCLConfusion, confusion_distances, fit_lda, soft_confusion
from cclnet.methods.class_geometry import SHRINKAGE, batch_moments, geometry_from_means, signed_sqrt_normalized

K, WIDTH = 4, 6
OFF = ~torch.eye(K, dtype=torch.bool)


def fresh(classes: int = K, width: int = WIDTH, **chosen: object) -> CCLConfusion:
    method = build_method("ccl-confusion", Classes(classes, width), chosen)
    assert isinstance(method, CCLConfusion)
    return method


def epoch(seed: int, counts: tuple[int, ...] = (40, 20, 10, 6)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    centres = torch.randn(len(counts), WIDTH, generator=torch.Generator().manual_seed(99))
    features = 2.0 * centres[labels] + torch.randn(len(labels), WIDTH, generator=generator)
    return features, torch.zeros(len(labels), len(counts)), labels


def shares_by_hand(before: torch.Tensor, labels_before: torch.Tensor, now: torch.Tensor, labels: torch.Tensor):
    """Squared distances of every image to every mean of the epoch before, and what follows."""
    unit = to_exact_step(signed_sqrt_normalized(before))
    of_class = [unit[labels_before == k] for k in range(K)]
    means = [rows.mean(dim=0) for rows in of_class]
    within = sum((len(rows) - 1) * torch.cov(rows.T) for rows in of_class) / (len(unit) - K)
    inverse = torch.linalg.inv(within + SHRINKAGE * within.diagonal().mean() * torch.eye(WIDTH, dtype=torch.float64))
    directions = float((inverse @ within).trace())
    spread = directions / (1 - directions / (len(unit) - K))
    share = torch.zeros(K, K, dtype=torch.float64)
    for x, own in zip(signed_sqrt_normalized(now), labels.tolist(), strict=True):
        squared = [float((x - mean) @ inverse @ (x - mean)) for mean in means]
        corrected = [d if k == own else d - spread / len(of_class[k]) for k, d in enumerate(squared)]
        share[own] += torch.softmax(-torch.tensor(corrected, dtype=torch.float64) / 2 / LDA_TEMPERATURE, dim=0)
    return share / torch.bincount(labels)[:, None]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_an_epoch_is_classified_by_the_lda_of_the_one_before(share: float) -> None:
    method = fresh(confusion_weight=share, ema_decay=0.0)
    of_means = build_method("ccl-centroid", Classes(K, WIDTH), {"ema_decay": 0.0})
    before, now = epoch(0), epoch(1)
    for one in (method, of_means):
        one(*before)
        one.end_epoch()
    assert torch.equal(method.soft_labels(), of_means.soft_labels())  # the first epoch adds only an LDA classifier
    for one in (method, of_means):
        for part in (slice(0, 30), slice(30, 76)):  # however the epoch is cut into batches
            one(*(each[part] for each in now))
        one.end_epoch()
    log_share = shares_by_hand(before[0], before[2], now[0], now[2]).log()
    distance = log_share.diagonal()[:, None] - log_share
    distance = (distance + distance.T) / 2
    assert float(distance[OFF].min()) > 0.01
    expected = share * distance / distance[OFF].mean() + (1 - share) * of_means.distance_sum
    torch.testing.assert_close(method.distance_sum[OFF], expected[OFF])
    assert float(functional.softness(method.soft_labels())) == pytest.approx(0.8, abs=1e-9)


def test_it_sees_how_images_lie_around_the_means() -> None:
    """Four classes at the corners of a square, with as much spread in all both ways; but two neighbours reach out to
    each other and the two others do not. Distances of means have one spread for all and cannot tell."""
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    reach = torch.tensor([[0.2, 1.0], [0.2, 1.0], [1.0, 0.2], [1.0, 0.2]])
    labels = torch.arange(4).repeat_interleave(3000)
    generator = torch.Generator().manual_seed(0)
    method = fresh(width=3, confusion_weight=1.0, ema_decay=0.0)
    of_means = build_method("ccl-centroid", Classes(4, 3), {"ema_decay": 0.0})
    for _ in range(2):
        plane = corners[labels] + reach[labels] * torch.randn(len(labels), 2, generator=generator)
        features = torch.cat([300.0 + plane, torch.full((len(labels), 1), 300.0)], dim=1)  # roots are straight there
        for one in (method, of_means):
            one(features, torch.zeros(len(labels), 4), labels)
            one.end_epoch()
    reaching, not_reaching = (0, 1), (2, 3)
    assert of_means.distance_sum[reaching] == pytest.approx(float(of_means.distance_sum[not_reaching]), rel=0.1)
    assert method.distance_sum[reaching] < 0.8 * method.distance_sum[not_reaching]


@pytest.mark.parametrize(("corrected", "width"), [(True, 40), (False, 40), (True, 200)])
def test_rare_classes_are_not_set_apart_by_chance(corrected: bool, width: int) -> None:
    """Classes of 800, 800, 10 and 10 images at equal true distances. Half of what tells an image from others of its
    class stays from epoch to epoch, half is new each time. What is added for others makes up for means that miss."""
    labels = torch.tensor([0] * 800 + [1] * 800 + [2] * 10 + [3] * 10)
    total = torch.zeros(K, K, dtype=torch.float64)
    for _ in range(60):
        lasting = 3.0 * F.one_hot(labels, width) + 0.5**0.5 * torch.randn(len(labels), width)
        before, now = (20.0 + lasting + 0.5**0.5 * torch.randn(len(labels), width) for _ in range(2))  # straight roots
        lda = fit_lda(geometry_from_means(batch_moments(before, labels, K), K))
        lda[:, -1] *= corrected
        total += confusion_distances(soft_confusion(now, labels, lda).sum(dim=0)) / 60
    if not corrected:
        assert total[2, 3] > 1.15 * total[0, 1]
    elif width == 40:
        torch.testing.assert_close(total[OFF], total[OFF].mean().expand(int(OFF.sum())), rtol=0.1, atol=0.0)
    else:  # too much is made up for: the card says so
        assert 0.6 < total[2, 3] / total[0, 1] < 0.75


def test_a_class_not_yet_seen_is_given_no_image_and_has_a_smoothed_row() -> None:
    method = fresh(softness=0.7, ema_decay=0.0)
    smoothed = torch.full((K, K), 0.1, dtype=torch.float64).masked_fill(~OFF, 0.7)
    for seed in range(2):
        features, _, labels = epoch(seed, counts=(40, 20, 10))
        method(features, torch.zeros(len(labels), K), labels)
        method.end_epoch()
    table = method.soft_labels()
    torch.testing.assert_close(table[3], smoothed[3])
    assert float((table[0, 1:3] - smoothed[0, 1:3]).abs().max()) > 1e-3 and bool((table[:3, 3] > 0).all())
    method(*epoch(2))
    assert float(method.confusion[:, :, 3].sum()) == 0.0  # the LDA classifier does not know it yet
    of_means = build_method("ccl-centroid", Classes(K, WIDTH), {})
    of_means(*epoch(2))
    of_means.end_epoch(), method.end_epoch()
    assert torch.equal(method.distance_sum[3], of_means.distance_sum[3])  # it is where its mean is
    assert not torch.equal(method.distance_sum[0, 1], of_means.distance_sum[0, 1])
    table = method.soft_labels()
    method.end_epoch()  # an epoch without images changes nothing
    assert torch.equal(method.soft_labels(), table)
    method(*epoch(3))
    method.end_epoch()
    assert bool(method.soft_labels().isfinite().all()) and float(method.soft_labels()[3, :3].std()) > 1e-3


def test_mixed_images_count_for_each_class_by_its_share() -> None:
    features, _, labels = epoch(0)
    lda = fit_lda(geometry_from_means(batch_moments(features, labels, K), K))
    whole = soft_confusion(features, F.one_hot(labels, K).double(), lda)
    torch.testing.assert_close(whole, soft_confusion(features, labels, lda))
    shares = (0.25 * F.one_hot(labels, K) + 0.75 * F.one_hot(labels.flip(0), K)).double()
    by_hand = torch.zeros(K, K, dtype=torch.float64)
    for u, own in zip(signed_sqrt_normalized(features), shares, strict=True):
        score = lda[:, :-2] @ u + lda[:, -2] + lda[:, -1] * (1.0 - own)
        by_hand += own[:, None] * torch.softmax(score / LDA_TEMPERATURE, dim=0)
    torch.testing.assert_close(soft_confusion(features, shares, lda).sum(dim=0), by_hand)


def trained(features: list[torch.Tensor], labels: torch.Tensor, **chosen: object) -> tuple[CCLConfusion, CCLCentroid]:
    """After an epoch of each of these features, and ``ccl-centroid`` after the same."""
    classes = Classes(int(labels.max()) + 1, features[0].shape[1])
    method, of_means = build_method("ccl-confusion", classes, chosen), build_method("ccl-centroid", classes, chosen)
    for of_epoch in features:
        for one in (method, of_means):
            one(of_epoch, torch.zeros(len(labels), classes.num_classes), labels)
            one.end_epoch()
    assert isinstance(method, CCLConfusion) and isinstance(of_means, CCLCentroid)
    return method, of_means


def test_classes_too_far_for_the_lda_have_the_distance_of_their_means() -> None:
    labels = torch.arange(4).repeat_interleave(100)
    centres = 20.0 * torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    centres[1] = centres[0] + 0.2 * torch.randn(
        64, generator=torch.Generator().manual_seed(2)
    )  # but these two are near
    method, of_means = trained([centres[labels] + torch.randn(400, 64) for _ in range(2)], labels, ema_decay=0.0)
    assert not bool(method.frozen_flag) and bool(method.lda_knows.all())
    far, near = of_means.distance_sum.clone(), (0, 1)
    torch.testing.assert_close(
        method.distance_sum, far
    )  # the only confused pair is scaled to its own distance of means
    assert float(far[near]) < 0.1 < float(far[2, 3])


def test_with_fewer_images_than_features_there_is_no_lda() -> None:
    labels = torch.tensor([0] * 40 + [1] * 20 + [2] * 5 + [3] * 3)
    centres = 0.3 * torch.randn(4, 200, generator=torch.Generator().manual_seed(1))
    method, of_means = trained([20.0 + centres[labels] + torch.randn(68, 200) for _ in range(4)], labels)
    assert not bool(method.lda_knows.any())
    assert torch.equal(method.soft_labels(), of_means.soft_labels())


def test_autocast_does_not_reach_the_lda() -> None:
    features, _, labels = epoch(0)
    lda = fit_lda(geometry_from_means(batch_moments(features, labels, K), K))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = soft_confusion(features, labels, lda)
    assert torch.equal(half, soft_confusion(features, labels, lda))


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(InputError, match=r"confusion_weight .* in \[0, 1\], got 1.5"):
        fresh(confusion_weight=1.5)
    with pytest.raises(InputError, match="unknown setting of method 'ccl-confusion'"):
        fresh(whiten=False)
