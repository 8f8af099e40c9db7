"""Soft labels for several labels at once: the same as for one where there is one, effects and not means where there
are more, the state, the same on several processes, and the compiler."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch.nn.parallel import DistributedDataParallel

from cclnet import CCLNet, InputError, build_method, functional
from cclnet.functional import binary_cross_entropy, noisy_or_targets
from cclnet.methods import METHODS, Classes, check_method_fits, methods_for
from cclnet.methods.ccl_centroid import CCLCentroid
from cclnet.methods.ccl_multilabel import CCLMultilabel, geometry_from_effects
from cclnet.methods.class_geometry import SHRINKAGE, batch_moments, class_distances, geometry_from_means

K, WIDTH = 4, 6
OFF = ~torch.eye(K, dtype=torch.bool)
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def fresh(**chosen: object) -> CCLMultilabel:
    method = build_method("ccl-multilabel", Classes(K, WIDTH), chosen)
    assert isinstance(method, CCLMultilabel)
    return method


def batch(count: int = 120, seed: int = 0, classes: int = K) -> Batch:
    """Features that several classes act on at once; class 1 mostly comes with class 0."""
    generator = torch.Generator().manual_seed(seed)
    targets = (torch.rand(count, K, generator=generator) < 0.35).float()
    together = torch.rand(count, generator=generator) < 0.7
    targets[:, 1] = torch.where(together, targets[:, 0], targets[:, 1])
    targets[:, classes:] = 0.0
    effects = torch.randn(K, WIDTH, generator=torch.Generator().manual_seed(99))
    noise = torch.randn(count, WIDTH, generator=generator)
    return 2.0 + targets @ effects + 0.5 * noise, torch.randn(count, K, generator=generator), targets


def moments_of(targets: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """The moments of features as they are, of any length."""
    rows = torch.cat([targets, features, torch.ones(len(targets), 1)], dim=1).double()
    return rows.T @ rows


def kept_features(features: torch.Tensor) -> torch.Tensor:
    """What is kept of each image, read off the moments of a batch of it alone."""
    alone = [batch_moments(row[None], torch.tensor([0]), K)[-1, K:-1] for row in features]
    return torch.stack(alone)


class TestOneLabel:
    @pytest.mark.parametrize("chosen", [{}, {"whiten": False}, {"centre": True}, {"softness": 0.55, "ema_decay": 0.5}])
    @pytest.mark.parametrize("classes", [K, 3])
    def test_table_and_targets_are_those_of_ccl_centroid(self, chosen: dict, classes: int) -> None:
        """Over epochs; also where a class is not seen, and where images are few and uneven."""
        several, one = fresh(**chosen), build_method("ccl-centroid", Classes(K, WIDTH), chosen)
        for epoch in range(3):
            features, logits, _ = batch(37, seed=epoch)
            labels = (torch.rand(37) ** 2 * classes).long()
            several(features, logits, F.one_hot(labels, K))
            one(features, logits, labels)
            logged = several.end_epoch(), one.end_epoch()
            assert logged[0] == pytest.approx(logged[1], rel=1e-9)
            torch.testing.assert_close(several.soft_labels(), one.soft_labels(), atol=1e-12, rtol=1e-9)
        assert float(one.soft_labels()[:classes, :classes].std()) > 1e-3
        soft = noisy_or_targets(several.soft_labels(), F.one_hot(labels, K))
        torch.testing.assert_close(soft, one.soft_labels()[labels], atol=1e-12, rtol=1e-9)

    def test_the_same_table_gives_the_same_targets_to_the_last_bit(self) -> None:
        several, one = fresh(), build_method("ccl-centroid", Classes(K, WIDTH))
        features, logits, _ = batch()
        labels = torch.arange(120) % K
        one(features, logits, labels)
        one.end_epoch()
        several.load_state_dict(one.state_dict())  # the state is the same, too
        soft = noisy_or_targets(several.soft_labels(), F.one_hot(labels, K)).float()
        assert torch.equal(soft, functional.rows_of(one.soft_labels().float(), labels))

    def test_effects_differ_as_means_do(self) -> None:
        features, _, _ = batch()
        labels = torch.tensor([0] * 60 + [1] * 30 + [2] * 20 + [3] * 10)
        moments = moments_of(F.one_hot(labels, K), features)
        effects, means = geometry_from_effects(moments, K), geometry_from_means(moments, K)
        for a, b in zip((effects, effects.centres), (means, means.centres), strict=True):
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(a[:, None] - a[None], b[:, None] - b[None])
            else:
                torch.testing.assert_close(a.within, b.within)
                torch.testing.assert_close(a.variance[OFF], b.variance[OFF])
                assert torch.equal(a.known, b.known)


class TestEffects:
    def test_they_are_least_squares(self) -> None:
        features, _, targets = batch()
        design = np.column_stack([targets.numpy(), np.ones(120)]).astype(np.float64)
        solution, _, rank, _ = np.linalg.lstsq(design, features.double().numpy(), rcond=None)
        left = features.double().numpy() - design @ solution
        inverse = np.linalg.inv(design.T @ design)
        geometry = geometry_from_effects(moments_of(targets, features), K)
        np.testing.assert_allclose(geometry.centres, solution[:K], atol=1e-9)
        np.testing.assert_allclose(geometry.within, left.T @ left / (120 - rank), atol=1e-9)
        for i in range(K):
            for j in range(K):
                difference = np.eye(K + 1)[i] - np.eye(K + 1)[j]
                assert float(geometry.variance[i, j]) == pytest.approx(difference @ inverse @ difference, abs=1e-9)
        assert torch.equal(geometry.known, OFF)

    def test_distances_of_an_epoch_by_hand(self) -> None:
        features, logits, targets = batch()
        method = fresh()
        for part in (slice(0, 7), slice(7, 33), slice(33, 120)):  # however the epoch is cut into batches
            method(features[part], logits[part], targets[part])
        method.end_epoch()
        kept = kept_features(features).numpy()
        design = np.column_stack([targets.numpy(), np.ones(120)]).astype(np.float64)
        effects = (np.linalg.pinv(design) @ kept)[:K]
        left = kept - design @ np.linalg.pinv(design) @ kept
        within = left.T @ left / (120 - K - 1)
        measure = np.linalg.inv(within + SHRINKAGE * within.diagonal().mean() * np.eye(WIDTH))
        directions, inverse = np.trace(measure @ within), np.linalg.inv(design.T @ design)
        spread = directions / (1 - directions / (120 - K - 1))
        expected = np.zeros((K, K))
        for i in range(K):
            for j in range(K):
                gap, pick = effects[i] - effects[j], np.eye(K + 1)[i] - np.eye(K + 1)[j]
                expected[i, j] = max(gap @ measure @ gap - spread * (pick @ inverse @ pick), 0.0)
        expected /= expected[OFF.numpy()].mean()
        np.testing.assert_allclose(method.distance_sum[OFF], expected[OFF.numpy()], rtol=1e-7)
        assert expected[OFF.numpy()].min() > 0.01

    def test_co_occurrence_is_not_taken_for_similarity(self) -> None:
        """Twelve classes with unrelated effects, which come together in pairs that are not alike: effects are found
        as they are, means draw those together that come together."""
        size, count, width = 12, 4000, 30
        generator = torch.Generator().manual_seed(1)
        centres = torch.randn(size, width, generator=generator)
        targets = (torch.rand(count, size, generator=generator) < 0.1).float()
        co_occurs = torch.rand(count, size, generator=generator) < 0.6
        targets = torch.maximum(targets, (co_occurs * targets).roll(1, dims=1))  # each class brings the next one
        features = 1.0 + targets @ centres + 0.1 * torch.randn(count, width, generator=generator)
        moments = moments_of(targets, features)
        truth = (centres[:, None] - centres[None]).square().sum(dim=2)
        pairs, partners = torch.triu_indices(size, size, 1).unbind(), (torch.arange(size), torch.arange(size).roll(-1))

        def follows_truth(distance: torch.Tensor) -> float:
            return float(spearmanr(distance[pairs], truth[pairs]).statistic)

        def relative_distance_of_partners(distance: torch.Tensor) -> float:
            return float(distance[partners].mean() / distance[pairs].mean())

        found = class_distances(geometry_from_effects(moments, size), whiten=False)
        confused = class_distances(geometry_from_means(moments, size), whiten=False)
        assert follows_truth(found) > 0.99 and follows_truth(confused) < 0.8
        assert relative_distance_of_partners(found) == pytest.approx(relative_distance_of_partners(truth), rel=0.02)
        assert relative_distance_of_partners(confused) < 0.6 * relative_distance_of_partners(truth)

    @pytest.mark.parametrize("whiten", [False, True])
    def test_rare_classes_are_not_set_apart_by_chance(self, whiten: bool) -> None:
        """Classes of about 1000, 1000, 10 and 10 images at equal true distances: on average the measured ones are."""
        total = torch.zeros(K, K, dtype=torch.float64)
        for _ in range(40):
            targets = (torch.rand(2000, K) < torch.tensor([0.5, 0.5, 0.005, 0.005])).float()
            features = 3.0 * F.pad(targets, (0, 16)) + torch.randn(2000, 20)
            total += class_distances(geometry_from_effects(moments_of(targets, features), K), whiten)
        assert float(total[2, 3]) == pytest.approx(float(total[0, 1]), rel=0.15)


class TestWhatCannotBeKnown:
    def known(self, targets: torch.Tensor) -> torch.Tensor:
        return geometry_from_effects(moments_of(targets, torch.randn(len(targets), WIDTH)), K).known

    def test_two_classes_always_together_are_not_called_alike(self) -> None:
        targets = (torch.rand(100, K) < 0.4).float()
        targets[:, 1] = targets[:, 0]
        assert torch.equal(self.known(targets)[0], torch.tensor([False, False, False, False]))
        assert bool(self.known(targets)[2, 3])
        method = fresh(softness=0.7)
        method(torch.randn(100, WIDTH), torch.zeros(100, K), targets)
        method.end_epoch()
        torch.testing.assert_close(method.soft_labels()[:2, :2], torch.tensor([[0.7, 0.1], [0.1, 0.7]]).double())

    def test_almost_always_together_is_not_enough_either(self) -> None:
        targets = (torch.rand(2000, K) < 0.3).float()
        targets[:, 1] = targets[:, 0]
        targets[0, 0] = 1.0 - targets[0, 0]  # one image of two thousand has one without the other
        assert not bool(self.known(targets)[0, 1])
        targets[:100, 1] = (torch.rand(100) < 0.3).float()  # one in twenty tells
        assert bool(self.known(targets)[0, 1])

    def test_a_class_in_every_image_or_in_none(self) -> None:
        targets = (torch.rand(100, K) < 0.4).float()
        targets[:, 0], targets[:, 1] = 1.0, 0.0
        known = self.known(targets)
        assert not known[:2].any() and not known[:, :2].any() and bool(known[2, 3])

    def test_an_epoch_without_images_changes_nothing(self) -> None:
        method = fresh(softness=0.7)
        smoothed = torch.full((K, K), 0.1, dtype=torch.float64).masked_fill(~OFF, 0.7)
        method.end_epoch()
        torch.testing.assert_close(method.soft_labels(), smoothed)
        method(*batch())
        method.end_epoch()
        table = method.soft_labels()
        assert not torch.allclose(table, smoothed, atol=1e-3)
        method.end_epoch()
        torch.testing.assert_close(method.soft_labels(), table)

    def test_images_without_labels_are_the_ground_the_effects_stand_on(self) -> None:
        features, _, targets = batch()
        empty = torch.zeros(20, K)
        some = geometry_from_effects(moments_of(targets, features), K)
        more = geometry_from_effects(
            moments_of(torch.cat([targets, empty]), torch.cat([features, torch.full((20, WIDTH), 2.0)])), K
        )
        assert torch.equal(some.known, more.known)
        assert float(more.variance[OFF].max()) <= float(some.variance[OFF].max()) + 1e-9
        assert not noisy_or_targets(fresh().soft_labels(), empty).any()


class TestLoss:
    def test_terms_and_gradients(self) -> None:
        method = fresh(kl_weight=0.5)
        method(*batch())
        method.end_epoch()
        features, logits, targets = batch(seed=1)
        features.requires_grad_(), logits.requires_grad_()
        loss = method(features, logits, targets)
        q, table = torch.sigmoid(logits), method.soft_labels().float()
        target = 1.0 - torch.prod(1.0 - targets[:, :, None] * table, dim=1)
        entropy = -(targets * q.log() + (1 - targets) * (1 - q).log()).mean()
        divergence = (torch.xlogy(target, target / q) + torch.xlogy(1 - target, (1 - target) / (1 - q))).mean()
        torch.testing.assert_close(loss.terms["binary_cross_entropy"], entropy)
        torch.testing.assert_close(loss.terms["kl"], 0.5 * divergence)
        torch.testing.assert_close(loss.total, entropy + 0.5 * divergence)
        loss.total.backward()
        assert features.grad is None and float(logits.grad.abs().sum()) > 0
        assert not list(method.parameters()) and not method.soft_labels().requires_grad

    def test_gradcheck_in_float64(self) -> None:
        method = fresh().eval()
        features, logits, targets = (tensor.double() for tensor in batch(5))
        logits.requires_grad_()
        assert torch.autograd.gradcheck(lambda z: method(features, z, targets).total, (logits,))

    def test_without_divergence_it_is_binary_cross_entropy(self) -> None:
        features, logits, targets = batch()
        bce = build_method("bce", Classes(K, WIDTH))
        expected = F.binary_cross_entropy_with_logits(logits, targets)
        torch.testing.assert_close(bce(features, logits, targets).total, expected)
        torch.testing.assert_close(fresh(kl_weight=0.0)(features, logits, targets).total, expected)

    def test_hard_tables_count_it_twice(self) -> None:
        features, logits, targets = batch()
        total = fresh(softness=1.0 - 1e-9, kl_weight=1.0)(features, logits, targets).total
        torch.testing.assert_close(total, 2.0 * binary_cross_entropy(logits, targets), atol=1e-5, rtol=1e-5)

    def test_at_its_best_a_label_that_is_there_is_above_all_that_are_not(self) -> None:
        """The loss is least at q = (m + w t) / (1 + w)."""
        method = fresh(softness=0.4)
        method(*batch())
        method.end_epoch()
        targets = batch(30, seed=3)[2].double()
        best = (targets + noisy_or_targets(method.soft_labels(), targets)) / 2.0
        logits = torch.logit(best.clamp(1e-9, 1.0 - 1e-9)).requires_grad_()
        method.eval()(torch.zeros(30, WIDTH), logits, targets).total.backward()
        assert float(logits.grad.abs().max()) < 1e-9
        assert bool((best[targets == 1] > 0.5).all()) and bool((best[targets == 0] < 0.5).all())

    def test_sample_weights_weigh_every_term_and_not_the_moments(self) -> None:
        features, logits, targets = batch()
        weight = torch.zeros(120)
        weight[3] = 120.0
        method, other = fresh(), fresh()
        alone = method.eval()(features[3:4], logits[3:4], targets[3:4]).terms
        for term, value in method(features, logits, targets, weight).terms.items():
            torch.testing.assert_close(value, alone[term])
        method.train()(features, logits, targets, weight)
        other(features, logits, targets)
        method.eval()(-features, logits, targets)  # nor is what is not trained on
        assert torch.equal(method.moments, other.moments)

    def test_mixed_images(self) -> None:
        features, logits, targets = batch()
        shares = 0.25 * targets + 0.75 * targets.roll(1, dims=0)
        method = fresh()
        method(features, logits, shares)
        torch.testing.assert_close(method.moments[:K, K:-1], shares.T.double() @ kept_features(features))


def test_labels_are_frozen_once_structure_is_lost() -> None:
    method = fresh(freeze_ratio=0.3)
    method(*batch())
    assert method.end_epoch()["frozen"] == 0.0
    before = method.soft_labels()
    targets = (torch.rand(800, K) < 0.4).float()
    method(10.0 + F.pad(targets, (0, WIDTH - K)) + 0.05 * torch.randn(800, WIDTH), torch.zeros(800, K), targets)
    assert method.end_epoch()["frozen"] == 1.0  # every class at the same distance from every other
    method(*batch(seed=5))
    assert method.end_epoch()["frozen"] == 1.0  # for good
    assert torch.equal(method.soft_labels(), before)


def test_a_run_resumed_in_mid_epoch_is_the_same_run(tmp_path: Path) -> None:
    straight, resumed = fresh(), fresh()
    for epoch in range(3):
        for half in range(2):
            straight(*batch(seed=2 * epoch + half))
            resumed(*batch(seed=2 * epoch + half))
            torch.save(resumed.state_dict(), tmp_path / "state.pt")
            resumed = fresh()
            resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert straight.end_epoch() == resumed.end_epoch()
    assert torch.equal(straight.soft_labels(), resumed.soft_labels())
    assert float(straight.soft_labels()[OFF].std()) > 1e-4


def test_compiles_as_one_graph() -> None:
    plain, compiled = fresh(), fresh()
    step = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for epoch in range(2):
        torch.testing.assert_close(step(*batch(seed=epoch)).total, plain(*batch(seed=epoch)).total)
        plain.end_epoch(), compiled.end_epoch()
    torch.testing.assert_close(compiled.soft_labels(), plain.soft_labels())


def test_half_precision_reaches_neither_moments_nor_loss() -> None:
    features, logits, targets = batch()
    method, other = fresh(), fresh()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = method(features, logits, targets)
    torch.testing.assert_close(loss.total, other(features, logits, targets).total)
    assert torch.equal(method.moments, other.moments)


def small_network() -> CCLNet:
    torch.manual_seed(3)
    return CCLNet(torch.nn.Linear(5, WIDTH), K, "ccl-multilabel", feature_width=WIDTH).double()


def images_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    targets = (torch.rand(8, K, generator=generator) < 0.4).double()
    return torch.randn(8, 5, dtype=torch.float64, generator=generator), targets


def one_of_two_processes(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    network = small_network()
    wrapped = DistributedDataParallel(network)  # with its default, which overwrites buffers at every step
    for step in range(4):
        images, targets = images_of(step)
        mine = slice(4 * rank, 4 * rank + 4)
        wrapped(images[mine], targets[mine]).total.backward()
    network.method.end_epoch()
    torch.save(
        {"table": network.soft_labels(), "grad": network.classifier.classifier.weight.grad}, f"{folder}/{rank}.pt"
    )
    dist.barrier()  # else torch may end one process while the other still closes its connections
    dist.destroy_process_group()


def test_two_processes_have_the_labels_and_gradients_of_one(tmp_path: Path) -> None:
    mp.spawn(one_of_two_processes, (str(tmp_path),), nprocs=2)
    network = small_network()
    for step in range(4):
        network(*images_of(step)).total.backward()
    network.method.end_epoch()
    assert float(network.soft_labels()[OFF].std()) > 1e-4
    for rank in range(2):
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(saved["table"], network.soft_labels())
        torch.testing.assert_close(saved["grad"], network.classifier.classifier.weight.grad)


def test_nothing_of_it_is_shipped() -> None:
    network, hard = small_network(), CCLNet(torch.nn.Linear(5, WIDTH), K, "bce", feature_width=WIDTH)
    assert set(network.export_state()) == set(hard.export_state())
    assert len(network.param_groups()) == 1


def test_what_does_not_fit_is_refused() -> None:
    logits = torch.zeros(3, K)
    with pytest.raises(InputError, match=r"shape \[N, 6\]"):
        fresh()(torch.zeros(3, 5), logits, torch.zeros(3, K))
    with pytest.raises(InputError, match=r"got torch.int64 \[3\]. .*'ccl-centroid', 'hard'"):
        fresh()(torch.zeros(3, WIDTH), logits, torch.tensor([0, 1, 2]))
    with pytest.raises(InputError, match="features of 1 of 3 images are NaN"):
        fresh()(torch.tensor([[0.0] * 6, [float("nan")] * 6, [1.0] * 6]), logits, torch.zeros(3, K))
    with pytest.raises(InputError, match="softness"):
        fresh(softness=1.0)


@pytest.mark.parametrize("name", METHODS)
def test_methods_say_which_labels_they_are_for(name: str) -> None:
    several = name in methods_for(multilabel=True)
    assert several != (name in methods_for(multilabel=False))
    check_method_fits(name, several)
    with pytest.raises(
        InputError, match="one label each. Use '(hard|ccl-centroid)'" if several else "'ccl-multilabel'"
    ):
        check_method_fits(name, not several)


def test_unknown_methods_and_rows_that_do_not_sum_to_one_name_the_way_out() -> None:
    with pytest.raises(InputError, match="unknown method 'ccl-multi'; did you mean 'ccl-multilabel'"):
        check_method_fits("ccl-multi", True)
    several = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    for name in ("hard", "lsr", "ccl-centroid"):
        with pytest.raises(InputError, match="'ccl-multilabel'"):
            build_method(name, Classes(K, WIDTH))(torch.zeros(1, WIDTH), torch.zeros(1, K), several)


def test_it_is_ccl_centroid_but_for_geometry_targets_and_loss() -> None:
    assert issubclass(CCLMultilabel, CCLCentroid)
    assert set(vars(CCLMultilabel)) & {"end_epoch", "accumulate", "soft_labels"} == set()
