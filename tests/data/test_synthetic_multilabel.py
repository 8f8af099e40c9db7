"""The synthetic multi-label set: labels, known similarity and known co-occurrence."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.linear_model import LinearRegression

from cclnet.data.sources import open_data
from cclnet.data.synthetic import (
    MULTILABEL_SOURCE,
    MultilabelSettings,
    _picture,
    co_occurrence,
    co_occurrence_weights,
    known_similarity,
    synthetic_multilabel,
)
from cclnet.data.synthetic.rendering import AXES, LESION, SPOT, VIEW, random_row, render_several
from cclnet.errors import InputError

PAIRS = np.triu_indices(7, 1)


def small(**changes):
    return MultilabelSettings(**({"images": 60, "size": 16} | changes))


def labels_of(settings):
    """Return the labels without rendering."""
    labels = np.zeros((settings.images, settings.classes), np.uint8)
    for number, row in enumerate(labels):
        row[_picture(settings, number)[0]] = 1
    return labels


class TestLabels:
    def test_the_table(self) -> None:
        table = synthetic_multilabel(small())
        assert table.images.shape == (60, 16, 16, 3) and table.images.dtype == np.uint8
        assert (
            table.labels.shape == (60, 7) and table.labels.dtype == np.uint8 and set(np.unique(table.labels)) == {0, 1}
        )
        assert (table.labels == labels_of(small())).all()
        assert table.classes == tuple("ABCDEFG") and table.source == MULTILABEL_SOURCE and table.multilabel
        assert len({image.tobytes() for image in table.images}) == 60

    def test_as_many_images_with_each_number_of_labels_and_the_empty_ones_besides(self) -> None:
        numbers = labels_of(small(images=1500)).sum(axis=1)
        shares = np.bincount(numbers, minlength=4) / 1500
        np.testing.assert_allclose(shares, [0.1, 0.3, 0.3, 0.3], atol=0.04)
        assert set(synthetic_multilabel(small(most=1, empty=0.0)).labels.sum(axis=1)) == {1}

    def test_classes_are_equally_frequent_and_co_occur_by_their_weights(self) -> None:
        labels = labels_of(small(images=2500))
        counts = labels.sum(axis=0)
        assert counts.min() > 0.85 * counts.max()
        met = co_occurrence(labels)
        assert (
            spearmanr(met[PAIRS], co_occurrence_weights(7)[PAIRS]).statistic > 0.9
        )  # the weights have ties, the observed shares have none
        assert met[PAIRS].max() > 0.4 and met[PAIRS].min() < 0.05

    @pytest.mark.parametrize("classes", [5, 6, 7, 8, 12, 20])
    def test_co_occurrence_is_uncorrelated_with_similarity(self, classes: int) -> None:
        pairs = np.triu_indices(classes, 1)
        correlation = spearmanr(co_occurrence_weights(classes)[pairs], known_similarity(classes)[pairs]).statistic
        assert abs(correlation) < 0.05
        np.testing.assert_allclose(co_occurrence_weights(classes).sum(axis=1), 1.0)
        np.testing.assert_allclose(co_occurrence_weights(classes), co_occurrence_weights(classes).T)

    @pytest.mark.parametrize("classes", [2, 3])
    def test_few_classes_have_only_each_other(self, classes: int) -> None:
        expected = (1 - np.eye(classes)) / (classes - 1)
        np.testing.assert_allclose(co_occurrence_weights(classes), expected)


class TestImages:
    def test_same_settings_same_bytes_whatever_the_threads_and_the_number(self) -> None:
        one, other = (synthetic_multilabel(small(seed=3), workers=n) for n in (1, 3))
        assert hashlib.sha256(one.images.tobytes()).digest() == hashlib.sha256(other.images.tobytes()).digest()
        fewer = synthetic_multilabel(small(seed=3, images=25))
        assert (fewer.images == one.images[:25]).all() and (fewer.labels == one.labels[:25]).all()
        assert not (synthetic_multilabel(small(seed=4)).images == one.images).all(axis=(1, 2, 3)).any()

    def test_only_shown_lesions_are_rendered(self) -> None:
        generator = np.random.default_rng(0)
        latents = np.full((4, 3, len(AXES)), 0.8, np.float32)
        lesions, spots = (np.stack([[random_row(s, generator) for _ in range(3)]] * 4) for s in (LESION, SPOT))
        views = np.stack([random_row(VIEW, generator)] * 4)
        shown = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]], bool)
        skin, *rest = render_several(latents, lesions, spots, shown, views, 64).astype(int)
        changed = [(np.abs(picture - skin) > 8).any(axis=2) for picture in rest]
        assert 0.03 < changed[0].mean() < changed[1].mean() < changed[2].mean() < 0.6  # side by side, each adds its own
        assert np.abs(rest[0] - skin)[changed[2] & ~changed[1]].mean() < 0.5  # and nothing elsewhere

    def test_similarity_is_visible_in_the_pixels(self) -> None:
        """Least squares of plain colour statistics on the labels: similar classes have similar effects."""
        table = synthetic_multilabel(MultilabelSettings(images=700, size=32, overlap="little"))
        light = np.log(table.images.reshape(700, -1, 3) + 1.0)
        read = np.concatenate(
            [light.mean(axis=1), light.std(axis=1), *np.percentile(light, [2, 10, 25], axis=1)], axis=1
        )
        read = (read - read.mean(axis=0)) / read.std(axis=0)
        effects = LinearRegression().fit(table.labels, read).coef_.T
        distance = np.linalg.norm(effects[:, None] - effects[None], axis=2)
        assert spearmanr(-distance[PAIRS], known_similarity(7)[PAIRS]).statistic > 0.5


def test_it_is_opened_by_name() -> None:
    table = open_data("synthetic-multilabel:images=20,size=16,classes=4,most=2,seed=5,overlap=0.1")
    expected = synthetic_multilabel(MultilabelSettings(20, 4, 16, 0.1, most=2, seed=5))
    assert (table.images == expected.images).all() and (table.labels == expected.labels).all()
    with pytest.raises(InputError, match="unknown setting of the synthetic set 'imbalance'"):
        open_data("synthetic-multilabel:imbalance=true")
    with pytest.raises(InputError, match="synthetic-multilabel:most=two: most must be an integer, such as most=3"):
        open_data("synthetic-multilabel:most=two")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": 0}, "images must be an integer of 1 or more, got 0"),
        ({"classes": 1}, "classes must be an integer from 2 to 100, got 1"),
        ({"size": 8}, "size must be an integer from 16 to 512"),
        ({"overlap": "some"}, "unknown overlap 'some'"),
        ({"overlap": 2.0}, "overlap must be little, much or a number from 0 to 1"),
        ({"most": 5}, "most must .* from 1 to 4, got 5"),
        ({"most": 3, "classes": 2}, "most must .* from 1 to 2, got 3"),
        ({"empty": 1.0}, r"empty, .* \[0, 1\), got 1.0"),
        ({"seed": -1}, "seed must be an integer from 0"),
    ],
)
def test_invalid_settings(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        MultilabelSettings(**changes)
