"""The out-of-distribution score: scikit-learn's Mahalanobis distance, thresholds, and files that lie."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from sklearn import metrics
from sklearn.covariance import EmpiricalCovariance

from cclnet import InputError
from cclnet.runs.out_of_distribution import auroc, fit_statistics, read_statistics, write_statistics


def two_classes(images: int = 400, width: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, images)
    mixing = np.random.default_rng(9).normal(size=(width, width))  # the same for every seed
    return rng.normal(size=(images, width)) @ mixing + 8.0 * labels[:, None], labels


def test_with_all_directions_it_is_the_mahalanobis_distance_of_scikit_learn() -> None:
    features, labels = two_classes()
    found = fit_statistics(features, labels, rank=5)
    assert found is not None
    features = features / np.linalg.norm(features, axis=1, keepdims=True)
    means = np.stack([features[labels == k].mean(axis=0) for k in (0, 1)])
    covariance = EmpiricalCovariance(assume_centered=True).fit(features - means[labels])
    points = np.random.default_rng(1).normal(size=(50, 6))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    expected = np.sqrt(np.min([covariance.mahalanobis(points - mean) for mean in means], axis=0))
    np.testing.assert_allclose(found.score(points), expected, rtol=1e-3)
    np.testing.assert_allclose(found.score(7 * points), expected, rtol=1e-3)  # the norm does not matter


def test_few_directions_keep_the_total_variance() -> None:
    """The mean squared distance of the fitted images is the number of features, whatever the rank."""
    features, _ = two_classes()
    for rank in (1, 2, 5):
        found = fit_statistics(features, None, rank)
        assert found is not None
        assert (found.score(features) ** 2).mean() == pytest.approx(6, rel=1e-4)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2])
def test_the_threshold_refuses_the_asked_share_of_new_images(share: float) -> None:
    refused = []
    for seed in range(40):
        train, held_out, new = (two_classes(seed=3 * seed + k) for k in range(3))
        found = fit_statistics(*train)
        assert found is not None
        found = replace(found, held_out=np.sort(found.score(held_out[0])))
        refused.append((found.score(new[0]) > found.threshold(share)).mean())
    assert np.mean(refused) == pytest.approx(share, abs=0.25 * share + 0.002)


def test_other_images_are_far() -> None:
    features, labels = two_classes()
    found = fit_statistics(features, labels)
    assert found is not None
    assert auroc(found.score(two_classes(seed=5)[0]), found.score(features[::-1] * [1, 1, 1, -1, -1, -1])) > 0.9


def test_auroc_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    inside, outside = rng.integers(0, 9, 50).astype(float), rng.integers(3, 12, 70).astype(float)
    truth = np.repeat([0, 1], [50, 70])
    assert auroc(inside, outside) == pytest.approx(metrics.roc_auc_score(truth, np.concatenate([inside, outside])))


def test_too_few_images_have_no_statistics_or_refuse_nothing() -> None:
    features, labels = two_classes(40)
    assert fit_statistics(features[:5], labels[:5]) is None and fit_statistics(np.ones((30, 4)), None) is None
    found = fit_statistics(features, labels)
    assert found is not None and found.threshold() == math.inf
    with pytest.raises(InputError, match=r"1\.5"):
        found.threshold(1.5)


def test_constant_features_give_finite_scores() -> None:
    features = np.concatenate([two_classes()[0], np.ones((400, 3))], axis=1)
    found = fit_statistics(features, None)
    assert found is not None
    near, far = found.score(np.stack([features[0], features[0] + np.eye(9)[8]]))
    assert math.isfinite(far) and far > 10 * near


def test_a_file_restores_the_statistics(tmp_path: Path) -> None:
    features, labels = two_classes()
    found = fit_statistics(features, labels)
    assert found is not None
    found = replace(found, held_out=np.sort(found.score(features)), noise_auroc=0.75)
    write_statistics(tmp_path / "features.safetensors", found)
    again = read_statistics(tmp_path / "features.safetensors")
    np.testing.assert_allclose(again.score(features), found.score(features), rtol=1e-5)
    assert again.noise_auroc == 0.75 and again.threshold() == pytest.approx(found.threshold())


@pytest.mark.parametrize(
    "changed",
    [{"means": np.zeros((2, 5))}, {"basis": np.zeros(6)}, {"variances": np.zeros(3)}, {"variances": np.ones(2)},
     {"rest": np.zeros(1)}, {"held_out": np.array([2.0, 1.0])}, {"held_out": np.array([np.nan])},
     {"means": np.full((2, 6), np.inf)}, {"rest": np.ones(2)}],
)  # fmt: skip
def test_numbers_that_do_not_fit_are_refused(tmp_path: Path, changed: dict[str, np.ndarray]) -> None:
    path = tmp_path / "features.safetensors"
    whole = {"means": np.zeros((2, 6)), "basis": np.eye(6)[:, :3], "variances": np.ones(3), "rest": np.ones(1),
             "held_out": np.arange(4.0), "noise_auroc": np.ones(1)}  # fmt: skip
    save_file({name: np.ascontiguousarray(array, np.float32) for name, array in whole.items()}, path)
    read_statistics(path)
    save_file({name: np.ascontiguousarray(array, np.float32) for name, array in (whole | changed).items()}, path)
    with pytest.raises(InputError, match="refused"):
        read_statistics(path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "features.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(InputError, match="refused"):
        read_statistics(tmp_path / "features.safetensors")
