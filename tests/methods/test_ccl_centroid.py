"""Soft labels from class means: the closed forms, the state, the same on several processes, and the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from cclnet import CCLNet, InputError, build_method, functional
from cclnet.errors import NotFinite
from cclnet.evaluation.similarity import agreement
from cclnet.methods import Classes
from cclnet.methods.base import sum_over_processes, to_exact_step
from cclnet.methods.ccl_centroid import CCLCentroid, labels_at_softness
from cclnet.methods.class_geometry import (
    SHRINKAGE,
    batch_moments,
    class_distances,
    corrected_distances,
    geometry_from_means,
)

K, WIDTH = 4, 6
OFF = ~torch.eye(K, dtype=torch.bool)


BOTH = pytest.mark.parametrize("name", ["ccl-centroid", "ccl-confusion"])  # what the second inherits, and adds to


def fresh(name: str = "ccl-centroid", **chosen: object) -> CCLCentroid:
    method = build_method(name, Classes(K, WIDTH), chosen)
    assert isinstance(method, CCLCentroid)
    return method


def batch(count: int = 40, classes: int = K, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    centres = torch.randn(K, WIDTH, generator=torch.Generator().manual_seed(99))
    features = 2.0 * centres[labels] + torch.randn(count, WIDTH, generator=generator)
    return features, torch.randn(count, K, generator=generator), labels


def signed_sqrt_normalized(features: torch.Tensor) -> torch.Tensor:
    """Signed roots at unit length: divided by the root of the sum of absolute values."""
    features = features.double()
    return features.sign() * (features.abs() / features.abs().sum(dim=1, keepdim=True)).sqrt()


def distances_by_hand(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mahalanobis distances of plain class means, less what chance alone puts between two means."""
    unit = to_exact_step(signed_sqrt_normalized(features))
    of_class = [unit[labels == k] for k in range(K)]
    scatter = sum((len(rows) - 1) * torch.cov(rows.T) for rows in of_class)
    within = scatter / (len(labels) - K)
    inverse = torch.linalg.inv(within + SHRINKAGE * within.diagonal().mean() * torch.eye(WIDTH, dtype=torch.float64))
    directions = (inverse @ within).trace()
    spread = directions / (1 - directions / (len(labels) - K))
    distance = torch.zeros(K, K, dtype=torch.float64)
    for i in range(K):
        for j in range(K):
            gap = of_class[i].mean(dim=0) - of_class[j].mean(dim=0)
            chance = spread * (1 / len(of_class[i]) + 1 / len(of_class[j]))
            distance[i, j] = max(float(gap @ inverse @ gap - chance), 0.0)
    return distance / distance[OFF].mean()


def test_distances_are_those_of_plain_class_means() -> None:
    features, logits, _ = batch(60)
    labels = torch.tensor([0] * 30 + [1] * 15 + [2] * 10 + [3] * 5)
    features = features + 4.0 * torch.randn(K, WIDTH)[labels]
    method = fresh()
    for part in (slice(0, 7), slice(7, 33), slice(33, 60)):  # however the epoch is cut into batches
        method(features[part], logits[part], labels[part])
    method.end_epoch()
    expected = distances_by_hand(features, labels)
    assert float(expected[OFF].min()) > 0.01
    torch.testing.assert_close(method.distance_sum[OFF], expected[OFF])
    # One temperature for all pairs: log(own / other) is proportional to the distance.
    table = method.soft_labels()
    slopes = ((table.diagonal()[:, None] / table).log() / expected.masked_fill(~OFF, 1.0))[OFF]
    torch.testing.assert_close(slopes, slopes[:1].expand(len(slopes)))


@pytest.mark.parametrize("whiten", [False, True])
def test_rare_classes_are_not_set_apart_by_chance(whiten: bool) -> None:
    """Classes of 1000, 1000, 5 and 5 images at equal true distances: on average the measured ones are equal too."""
    labels = torch.tensor([0] * 1000 + [1] * 1000 + [2] * 5 + [3] * 5)
    total = torch.zeros(K, K, dtype=torch.float64)
    for _ in range(60):
        features = 20.0 + 3.0 * F.one_hot(labels, 40) + torch.randn(len(labels), 40)  # the root is straight there
        total += class_distances(geometry_from_means(batch_moments(features, labels, K), K), whiten)
    frequent, rare = float(total[0, 1]) / 60, float(total[2, 3]) / 60
    assert rare == pytest.approx(frequent, rel=0.15)


@pytest.mark.parametrize(("images", "width"), [(400, 40), (200, 150), (100, 400)])
def test_chance_is_seen_whole_however_many_features_there_are(images: int, width: int) -> None:
    """No class differs from another: what lies between their means is chance, and the correction takes it all."""
    labels = torch.tensor([0] * (images // 2) + [1] * (images // 4) + [2] * (images // 5) + [3] * (images // 20))
    left, taken = 0.0, 0.0
    for _ in range(30):
        features = 20.0 + torch.randn(len(labels), width)
        geometry = geometry_from_means(batch_moments(features, labels, K), K)
        distance, noise = corrected_distances(geometry)
        left, taken = left + float(distance.sum()), taken + float(noise.sum())
    assert left < 0.2 * taken  # not zero: what chance makes less than expected is not below zero
    assert len(labels) == images


def test_images_drawn_again_do_not_make_a_mean_surer() -> None:
    features, _, labels = batch()
    once = geometry_from_means(batch_moments(features, labels, K), K, class_counts=[10] * K)
    moments = sum(batch_moments(features, labels, K) for _ in range(5))
    often = geometry_from_means(moments, K, class_counts=[10] * K)
    torch.testing.assert_close(often.variance, once.variance)
    torch.testing.assert_close(often.centres, once.centres)


@BOTH
def test_a_method_knows_how_many_images_there_are(name: str) -> None:
    method = build_method(name, Classes(K, WIDTH, (10,) * K), {})
    assert isinstance(method, CCLCentroid)
    for _ in range(5):
        method(*batch())
    assert method.geometry().variance[0, 1] == pytest.approx(0.2)


@BOTH
def test_features_that_are_not_finite_are_named_where_no_step_could_look(name: str) -> None:
    method = fresh(name)
    features, _, labels = batch()
    method.accumulate(features.masked_fill(features > 2.0, torch.nan), labels)
    with pytest.raises(NotFinite, match="features of this epoch are NaN or infinite"):
        method.end_epoch()


def test_a_class_that_is_less_than_one_image_is_as_sure_as_one() -> None:
    features, _, labels = batch()
    shares = F.one_hot(labels, K).double()
    shares[:, 3] *= 1e-4
    geometry = geometry_from_means(batch_moments(features, shares, K), K)
    torch.testing.assert_close(geometry.variance[:3, 3], torch.full((3,), 0.1 + 1.0, dtype=torch.float64))


@BOTH
def test_an_epoch_of_noise_is_no_structure_to_be_lost(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    method = build_method(name, Classes(7, 64), {})
    labels = torch.arange(7).repeat_interleave(300)
    centres = torch.randn(7, 64, generator=generator)
    for epoch in range(4):
        features = torch.randn(len(labels), 64, generator=generator) + (epoch > 0) * centres[labels]
        method(features, torch.zeros(len(labels), 7), labels)
        assert method.end_epoch()["frozen"] == 0.0
    assert agreement(method.soft_labels(), -(torch.cdist(centres, centres) ** 2)) > 0.6


def test_plain_and_centred_distances() -> None:
    features, _, labels = batch()
    unit = to_exact_step(signed_sqrt_normalized(features))
    means = torch.stack([unit[labels == k].mean(dim=0) for k in range(K)])
    geometry = geometry_from_means(batch_moments(features, labels, K), K)
    plain = class_distances(geometry, whiten=False)
    chance = (unit - means[labels]).square().sum() / (len(labels) - K) * 2 / 10  # ten images a class
    expected = ((means[:, None] - means[None]).square().sum(dim=2) - chance).clamp(min=0.0)
    torch.testing.assert_close(plain, expected / expected[OFF].mean())
    assert torch.equal(geometry.known, OFF)
    centred = class_distances(geometry, whiten=False, centre=True)
    expected = functional.dictionary_distance(means - means.mean(dim=0))
    torch.testing.assert_close(centred, expected / expected[OFF].mean())


@BOTH
@pytest.mark.parametrize("softness", [0.3, 0.55, 0.8, 0.99])
def test_softness_is_what_was_asked_for(softness: float, name: str) -> None:
    method = fresh(name, softness=softness)
    for epoch in range(3):
        table = method.soft_labels()
        assert float(functional.softness(table)) == pytest.approx(softness, abs=1e-9)
        torch.testing.assert_close(table.sum(dim=1), torch.ones(K, dtype=torch.float64))
        assert torch.equal(table.argmax(dim=1), torch.arange(K))
        method(*batch(seed=epoch))
        assert method.end_epoch()["softness"] == pytest.approx(softness, abs=1e-9)
    assert float(table[OFF].std()) > 1e-4  # and it is not uniform smoothing any more


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 9), st.floats(0.01, 0.98), st.floats(1e-3, 1e3), st.integers(0, 10**6), st.floats(0.0, 1.0))
def test_labels_at_softness(size: int, above: float, scale: float, seed: int, equal: float) -> None:
    """Any symmetric distances, equal classes included, once their mean is one; and their scale does not matter."""
    softness = 1 / size + above * (1 - 1 / size)
    distance = torch.rand(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.01
    distance = torch.where(distance < equal, 0.0, distance + distance.T)
    distance = distance / distance.mean().clamp(min=1e-6)
    table = labels_at_softness(distance, torch.ones_like(distance), softness)
    assert float(functional.softness(table)) == pytest.approx(softness, abs=1e-6)
    torch.testing.assert_close(table.sum(dim=1), torch.ones(size, dtype=torch.float64))
    assert bool((table.diagonal()[:, None] >= table).all())
    # a mean of several epochs is the same mean
    again = labels_at_softness(scale * distance, torch.full_like(distance, scale), softness)
    torch.testing.assert_close(again, table, atol=1e-6, rtol=1e-5)


def test_the_length_of_features_does_not_matter() -> None:
    features, logits, labels = batch()
    one, other = fresh(), fresh()
    one(features, logits, labels)
    other(features * torch.logspace(-3, 3, len(features))[:, None], logits, labels)
    one.end_epoch(), other.end_epoch()
    torch.testing.assert_close(one.soft_labels(), other.soft_labels(), atol=1e-5, rtol=1e-5)


def test_a_class_not_yet_seen_has_a_smoothed_row() -> None:
    method = fresh(softness=0.7)
    smoothed = torch.full((K, K), 0.1, dtype=torch.float64).masked_fill(~OFF, 0.7)
    torch.testing.assert_close(method.soft_labels(), smoothed)  # before anything was seen
    method(*batch(classes=3))
    method.end_epoch()
    table = method.soft_labels()
    torch.testing.assert_close(table[3], smoothed[3])
    assert float(functional.softness(table)) == pytest.approx(0.7, abs=1e-9)
    assert float((table[0, 1:3] - smoothed[0, 1:3]).abs().max()) > 1e-3 and bool((table[:3, 3] > 0).all())
    method.end_epoch()  # an epoch without images changes nothing
    torch.testing.assert_close(method.soft_labels(), table)
    method(*batch())
    method.end_epoch()
    assert float(method.soft_labels()[3, :3].std()) > 1e-3


@BOTH
@pytest.mark.parametrize("features", [torch.zeros(8, WIDTH), torch.ones(8, WIDTH)])
def test_features_that_know_nothing_give_smoothed_labels(features: torch.Tensor, name: str) -> None:
    method = fresh(name, softness=0.7)
    for _ in range(3):
        method(features, torch.zeros(8, K), torch.arange(8) % K)
        method.end_epoch()
    expected = torch.full((K, K), 0.1, dtype=torch.float64).masked_fill(~OFF, 0.7)
    torch.testing.assert_close(method.soft_labels(), expected)


@pytest.mark.parametrize(("name", "alone"), [("ccl-centroid", {}), ("ccl-confusion", {"confusion_weight": 0.0})])
@pytest.mark.parametrize("ema_decay", [0.0, 0.5, 1.0])
def test_ema_decay_averages_the_distances_of_epochs(ema_decay: float, name: str, alone: dict) -> None:
    method = fresh(name, ema_decay=ema_decay, **alone)
    total, weight = torch.zeros(K, K, dtype=torch.float64), 0.0
    for epoch in range(3):
        features, logits, labels = batch(seed=epoch)
        method(features, logits, labels)
        method.end_epoch()
        total = ema_decay * total + distances_by_hand(features, labels)
        weight = ema_decay * weight + 1.0
    torch.testing.assert_close((method.distance_sum / method.distance_weight)[OFF], (total / weight)[OFF])


def simplex(noise: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features that have collapsed: all classes at right angles, and hardly any spread."""
    labels = torch.arange(400) % K
    return F.one_hot(labels, WIDTH) + noise * torch.randn(400, WIDTH), torch.zeros(400, K), labels


@BOTH
def test_labels_are_frozen_once_structure_is_lost(name: str) -> None:
    method, never = fresh(name, freeze_ratio=0.3), fresh(name, freeze_ratio=0.0)
    for one in (method, never):
        one(*batch())
        assert one.end_epoch()["frozen"] == 0.0
    before = method.soft_labels()
    for one in (method, never):
        one(*simplex(0.1))
    assert method.end_epoch()["frozen"] == 1.0 and never.end_epoch()["frozen"] == 0.0
    assert torch.equal(method.soft_labels(), before) and not torch.allclose(never.soft_labels(), before, atol=1e-4)
    method(*batch(seed=5))
    assert method.end_epoch()["frozen"] == 1.0  # for good
    assert torch.equal(method.soft_labels(), before)


@BOTH
def test_loss_and_gradients(name: str) -> None:
    method = fresh(name, kl_weight=0.5)
    method(*batch())
    method.end_epoch()
    features, logits, labels = batch(seed=1)
    features.requires_grad_(), logits.requires_grad_()
    loss = method(features, logits, labels)
    target = method.soft_labels().float()[labels]
    torch.testing.assert_close(loss.terms["cross_entropy"], F.cross_entropy(logits, labels))
    torch.testing.assert_close(loss.terms["kl"], 0.5 * functional.kl_to_target(logits, target))
    loss.total.backward()
    assert features.grad is None and float(logits.grad.abs().sum()) > 0
    assert not list(method.parameters()) and not method.soft_labels().requires_grad


def test_mixed_images_count_for_each_class_by_its_share() -> None:
    features, _, labels = batch(8)
    shares = 0.25 * F.one_hot(labels, K) + 0.75 * F.one_hot(labels.roll(1), K)
    moments = batch_moments(features, shares.double(), K)
    unit = to_exact_step(signed_sqrt_normalized(features))
    torch.testing.assert_close(moments[:K, K:-1], shares.double().T @ unit)
    torch.testing.assert_close(moments[:K, -1], shares.double().sum(dim=0))


@BOTH
def test_only_training_counts_and_sample_weights_do_not(name: str) -> None:
    method, weighed = fresh(name), fresh(name)
    features, logits, labels = batch()
    for _ in range(2):
        method.train()(features, logits, labels)
        weighed(features, logits, labels, torch.rand(40))
        method.eval()(-features, logits, labels)
        assert torch.equal(method.moments, weighed.moments)
        method.end_epoch(), weighed.end_epoch()
    assert float(method.soft_labels()[OFF].std()) > 1e-4
    assert torch.equal(method.soft_labels(), weighed.soft_labels())


@BOTH
def test_a_run_resumed_in_mid_epoch_is_the_same_run(tmp_path: Path, name: str) -> None:
    straight, resumed = fresh(name), fresh(name)
    for epoch in range(3):
        for half in range(2):
            straight(*batch(seed=2 * epoch + half))
            resumed(*batch(seed=2 * epoch + half))
            torch.save(resumed.state_dict(), tmp_path / "state.pt")
            resumed = fresh(name)
            resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
            assert torch.equal(straight.soft_labels(), resumed.soft_labels())
        assert straight.end_epoch() == resumed.end_epoch()
    assert torch.equal(straight.soft_labels(), resumed.soft_labels())


@BOTH
def test_compiles_as_one_graph(name: str) -> None:
    plain, compiled = fresh(name), fresh(name)
    step = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for epoch in range(2):
        for seed in (2 * epoch, 2 * epoch + 1):
            torch.testing.assert_close(step(*batch(seed=seed)).total, plain(*batch(seed=seed)).total)
        plain.end_epoch(), compiled.end_epoch()
    torch.testing.assert_close(compiled.soft_labels(), plain.soft_labels())
    assert float(compiled.soft_labels()[OFF].std()) > 1e-4


def test_autocast_does_not_reach_the_moments() -> None:
    features, _, labels = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = batch_moments(features, labels, K)
    assert torch.equal(half, batch_moments(features, labels, K))


def small_network(name: str) -> CCLNet:
    torch.manual_seed(3)
    network = CCLNet(torch.nn.Linear(5, WIDTH), K, name, feature_width=WIDTH)
    return network.double()


def images_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.arange(8) % K
    return torch.randn(8, 5, dtype=torch.float64, generator=generator) + 3.0 * torch.eye(K, 5)[labels], labels


def one_of_two_processes(rank: int, folder: str, name: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    network = small_network(name)
    wrapped = DistributedDataParallel(network)  # with its default, which overwrites buffers at every step
    for step in range(8):
        images, labels = images_of(step)
        mine = slice(4 * rank, 4 * rank + 4)
        wrapped(images[mine], labels[mine]).total.backward()
        if step % 4 == 3:
            share = network.method.moments
            assert int(share[-1, -1]) == 16  # the images of this process: nothing was sent, nothing overwritten
            moments = sum_over_processes(share.clone())
            network.method.end_epoch()
    torch.save({"moments": moments, "table": network.soft_labels()}, f"{folder}/{rank}.pt")
    dist.barrier()  # else torch may end one process while the other still closes its connections
    dist.destroy_process_group()


@BOTH
def test_two_processes_have_the_labels_of_one(tmp_path: Path, name: str) -> None:
    mp.spawn(one_of_two_processes, (str(tmp_path), name), nprocs=2)
    network = small_network(name)
    for step in range(8):
        network(*images_of(step))
        if step % 4 == 3:
            alone = network.method.moments.clone()
            network.method.end_epoch()
    assert float(network.soft_labels()[OFF].std()) > 1e-4
    for rank in range(2):
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert torch.equal(saved["moments"], alone)  # the same bits
        # LAPACK rounds by the alignment of its arrays, which differs between processes.
        torch.testing.assert_close(saved["table"], network.soft_labels(), rtol=1e-12, atol=0.0)


@BOTH
def test_nothing_of_it_is_shipped(name: str) -> None:
    network, hard = small_network(name), CCLNet(torch.nn.Linear(5, WIDTH), K, "hard", feature_width=WIDTH)
    assert set(network.export_state()) == set(hard.export_state())
    assert len(network.param_groups()) == 1


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"softness": 1.0}, r"softness must lie in \(0.25, 1\), got 1.0: .*1/4"),
        ({"softness": 0.25}, r"softness .* got 0.25"),
        ({"ema_decay": 1.1}, r"ema_decay .* \[0, 1\], got 1.1"),
        ({"freeze_ratio": 1.0}, r"freeze_ratio .* \[0, 1\), got 1.0"),
        ({"kl_weight": -1.0}, "kl_weight.*got -1.0"),
    ],
)
def test_settings_that_make_no_sense(chosen: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        fresh(**chosen)


def test_batches_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"shape \[N, 6\]"):
        fresh()(torch.zeros(3, 5), torch.zeros(3, K), torch.tensor([0, 1, 2]))
    with pytest.raises(InputError, match="0 … 3 for 4 classes"):
        fresh()(torch.zeros(3, WIDTH), torch.zeros(3, K), torch.tensor([0, 1, 4]))


@pytest.mark.parametrize("balanced", [False, True])
def test_drawing_rare_classes_often_does_not_hide_chance(balanced: bool) -> None:
    """No class differs from another. With equal draws of each class the rarest images are seen thirty times, which
    tells no more than once."""
    counts, width = [600, 300, 60, 30], 64
    left, taken = 0.0, 0.0
    for _ in range(20):
        own = [20.0 + torch.randn(count, width) for count in counts]
        drawn = [f[torch.randint(len(f), (1000,))] if balanced else f for f in own]
        labels = torch.arange(K).repeat_interleave(torch.tensor([len(f) for f in drawn]))
        geometry = geometry_from_means(batch_moments(torch.cat(drawn), labels, K), K, class_counts=counts)
        distance, noise = corrected_distances(geometry)
        left, taken = left + float(distance.sum()), taken + float(noise.sum())
    assert left < 0.25 * taken


@BOTH
def test_digits_are_kept_where_the_network_is_cast_down(name: str) -> None:
    plain, cast = fresh(name), fresh(name)
    cast.to(torch.bfloat16)
    for method in (plain, cast):
        for _ in range(2):
            method(*batch())
            method.end_epoch()
    assert cast.moments.dtype == cast.table.dtype == torch.float64
    torch.testing.assert_close(cast.soft_labels(), plain.soft_labels())
