"""The synthetic set: exact counts and bytes, and a known similarity that is visible in the pixels."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage
from scipy.stats import spearmanr
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.model_selection import cross_val_score
from threadpoolctl import threadpool_limits

from cclnet.data import sources
from cclnet.data.synthetic import (
    ISIC2018_COUNTS,
    SOURCE,
    SyntheticSettings,
    class_names,
    class_positions,
    known_similarity,
    synthetic,
)
from cclnet.data.synthetic.rendering import AXES
from cclnet.data.table import ImageTable
from cclnet.errors import InputError

SEVEN = np.triu_indices(7, 1)


def digest(table: ImageTable) -> str:
    return hashlib.sha256(table.images.tobytes()).hexdigest()


def statistics(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Colour, outline and texture of each picture, read from its pixels alone: [N, S, S, 3] → [N, F]."""
    size = images.shape[1]
    line = (2 * np.arange(size) + 1) / size - 1
    away = np.hypot(line[:, None], line)
    light = np.log(images + np.float32(1))
    fade = np.median(light[:, away > 1], axis=1)[:, None, None] - light  # against the skin around the lesion
    dark = fade[..., 1] + fade[..., 2]

    def blurred(pixels):
        sigma = pixels * size / 64
        return ndimage.gaussian_filter(dark, (0, sigma, sigma))

    outline = blurred(1.6)
    fine, coarse = dark - outline, blurred(1) - blurred(4)
    rows = []
    for i in range(len(images)):
        lesion = (outline[i] > 0.45 * np.median(outline[i][away < 0.35])) & (away < 1.1)
        lesion = ndimage.binary_opening(lesion, iterations=1)
        inner = ndimage.binary_erosion(lesion, iterations=2)
        y, x = np.nonzero(lesion)
        short, long = np.linalg.eigvalsh(np.cov(x, y))
        edge = (ndimage.binary_dilation(lesion) ^ lesion).sum()
        red, green, blue = fade[i][inner].T
        texture = [
            statistic
            for values in (fine[i][inner], coarse[i][inner])
            for statistic in (values.std(), *np.percentile(values, [5, 95]), np.mean(values**3) / values.std() ** 3)
        ]
        rows.append([
            red.mean(), green.mean(), blue.mean(), np.std(green - blue),
            *np.percentile(blue - red, [10, 50, 90]), *np.percentile(green, [10, 50, 90]),
            np.log(long / short), np.log(edge**2 / lesion.sum()), np.log(lesion.sum()),
            np.sqrt(short * long) / lesion.sum(), *texture,
        ])  # fmt: skip
    return np.array(rows)


def centroid_similarity(features: npt.NDArray[np.float64], labels: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Minus the distance of the class means, in units of how much each direction varies within classes."""
    means = np.stack([features[labels == k].mean(axis=0) for k in range(labels.max() + 1)])
    within = np.cov((features - means[labels]).T)
    whitened = means @ np.linalg.cholesky(np.linalg.inv(within))
    return -np.linalg.norm(whitened[:, None] - whitened[None, :], axis=2)


@pytest.fixture(scope="module")
def sets():
    """The same classes with little and with much overlap, one photograph a lesion, and their statistics."""
    tables = [synthetic(SyntheticSettings(images=840, overlap=o, images_per_group=1)) for o in ("little", "much")]
    return [(table, statistics(table.images)) for table in tables]


class TestImages:
    def test_the_default_set(self) -> None:
        table = synthetic()
        assert table.images.shape == (2400, 64, 64, 3) and table.images.dtype == np.uint8
        assert table.classes == tuple("ABCDEFG") and table.source == SOURCE
        assert table.class_counts().tolist() == [343, 343, 343, 343, 343, 343, 342]
        assert list(table.extra) == list(AXES) and len(table.extra) == 2400
        assert table.extra.to_numpy().min() >= 0 and table.extra.to_numpy().max() <= 1
        # Pictures, neither black nor washed out, and no two alike.
        assert (table.images.std(axis=(1, 2, 3)) > 8).all()
        brightness = table.images.mean(axis=(1, 2, 3))
        assert brightness.min() > 60 and brightness.max() < 235
        assert len({image.tobytes() for image in table.images}) == 2400

    def test_same_settings_same_bytes_whatever_the_threads(self) -> None:
        wanted = SyntheticSettings(images=60, seed=3)
        with threadpool_limits(1):
            first = synthetic(wanted, workers=1)
        again = synthetic(wanted, workers=4)
        assert digest(first) == digest(again)
        assert first.names == again.names and (first.groups == again.groups).all()

    def test_another_seed_gives_other_lesions_around_the_same_positions(self) -> None:
        one, other = (synthetic(SyntheticSettings(images=350, size=16, seed=seed)) for seed in (0, 1))
        assert not (one.images == other.images).all(axis=(1, 2, 3)).any()
        for table in (one, other):
            means = table.extra.groupby(table.labels).mean().to_numpy()
            np.testing.assert_allclose(means, class_positions(7), atol=0.05)

    def test_an_image_does_not_depend_on_how_many_others_are_drawn(self) -> None:
        def by_name(**changes):
            table = synthetic(SyntheticSettings(**changes))
            return dict(zip(table.names, table.images, strict=True))

        many = by_name(images=105)
        for changes in ({"images": 38}, {"images": 105, "imbalance": (1, 2, 3, 4, 3, 2, 1)},
                        {"images": 60, "classes": 4}):  # fmt: skip
            few = by_name(**changes)
            shared = few.keys() & many.keys()
            assert len(shared) >= 38
            assert all((few[name] == many[name]).all() for name in shared)

    @pytest.mark.parametrize("size", [16, 50, 65, 200, 512])
    def test_any_size_shows_the_same_lesions(self, size: int) -> None:
        wanted = SyntheticSettings(images=7, images_per_group=1)
        reference = synthetic(wanted)
        table = synthetic(dataclasses.replace(wanted, size=size))
        assert table.images.shape == (7, size, size, 3)
        assert table.names == reference.names

        def thumbnails(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
            return np.array([Image.fromarray(i).resize((8, 8), Image.Resampling.BOX) for i in images], np.int64)

        assert np.abs(thumbnails(table.images) - thumbnails(reference.images)).max() < 12

    @pytest.mark.parametrize("classes", [2, 3, 26, 50, 100])
    def test_any_number_of_classes(self, classes: int) -> None:
        table = synthetic(SyntheticSettings(images=2 * classes, classes=classes, size=16))
        assert table.class_counts().tolist() == [2] * classes
        assert len(set(table.classes)) == classes


class TestCounts:
    def test_the_full_size_of_isic2018_has_its_very_counts(self) -> None:
        wanted = SyntheticSettings(images=sum(ISIC2018_COUNTS), imbalance="isic2018")
        assert tuple(wanted.class_counts()) == ISIC2018_COUNTS
        assert tuple(dataclasses.replace(wanted, imbalance=True).class_counts()) == ISIC2018_COUNTS

    def test_given_counts_are_exact(self) -> None:
        counts = [5, 1, 9]
        table = synthetic(SyntheticSettings(images=15, classes=3, size=16, imbalance=counts))
        assert table.class_counts().tolist() == counts

    @given(st.lists(st.integers(1, 50), min_size=2, max_size=20), st.integers(2000, 5000))
    @settings(max_examples=50, deadline=None)
    def test_shares_add_up_and_are_kept_within_one_image(self, shares, images) -> None:
        counts = SyntheticSettings(images=images, classes=len(shares), imbalance=shares).class_counts()
        assert counts.sum() == images
        assert np.abs(counts - images * np.array(shares) / sum(shares)).max() < 1


class TestGroups:
    def test_some_lesions_are_photographed_again(self) -> None:
        table = synthetic(SyntheticSettings(images=700, size=16))
        groups, sizes = np.unique(table.groups, return_counts=True)
        assert set(sizes) == {1, 2, 3}
        assert 1.2 < sizes.mean() < 1.6  # the real set has 1.34 photographs a lesion
        # One lesion: one class and one look, but another picture each time.
        for column in (table.labels, *table.extra.to_numpy().T):
            spread = [np.ptp(column[table.groups == group]) for group in groups]
            assert max(spread) == 0
        assert len({image.tobytes() for image in table.images}) == 700

    def test_photographs_of_a_lesion_are_more_alike_than_lesions_of_a_class(self) -> None:
        table = synthetic(SyntheticSettings(images=210))
        features = statistics(table.images)
        features = (features - features.mean(axis=0)) / features.std(axis=0)
        apart = np.linalg.norm(features[:, None] - features[None, :], axis=2)
        lesion = table.groups[:, None] == table.groups[None, :]
        kind = table.labels[:, None] == table.labels[None, :]
        np.fill_diagonal(kind, False)
        assert apart[lesion & kind].mean() < 0.7 * apart[kind & ~lesion].mean()

    def test_one_photograph_a_lesion_when_asked(self) -> None:
        table = synthetic(SyntheticSettings(images=70, size=16, images_per_group=1))
        assert len(set(table.groups)) == 70


class TestKnownSimilarity:
    @pytest.mark.parametrize("classes", [2, 7, 50, 100])
    def test_is_symmetric_with_the_class_itself_the_most_similar(self, classes: int) -> None:
        similarity = known_similarity(classes)
        assert similarity.shape == (classes, classes) and similarity.dtype == np.float64
        np.testing.assert_array_equal(similarity, similarity.T)
        np.testing.assert_array_equal(similarity.diagonal(), 1)
        off_diagonal = similarity[~np.eye(classes, dtype=bool)]
        assert off_diagonal.min() > 0 and off_diagonal.max() < 0.99

    def test_falls_with_the_distance_of_the_positions(self) -> None:
        positions = class_positions(20)
        pairs = np.triu_indices(20, 1)
        distance = np.linalg.norm(positions[pairs[0]] - positions[pairs[1]], axis=1)
        assert spearmanr(known_similarity(20)[pairs], distance).statistic == pytest.approx(-1)

    @pytest.mark.parametrize("classes", [2, 3, 7, 20])
    def test_other_geometries_are_drawn_and_stay_the_same(self, classes: int) -> None:
        first, again, second, fixed = (known_similarity(classes, geometry) for geometry in (1, 1, 2, 0))
        np.testing.assert_array_equal(first, again)
        assert not np.allclose(first, second) and not np.allclose(first, fixed)
        assert class_positions(classes, 1).min() >= 0.1 and class_positions(classes, 1).max() <= 0.9

    def test_drawn_geometries_are_uncorrelated_with_class_frequency_and_with_each_other(self) -> None:
        log, matrices = np.log(ISIC2018_COUNTS), [known_similarity(7, geometry)[SEVEN] for geometry in range(1, 9)]
        rarity = np.add.outer(log, log)[SEVEN]
        assert max(abs(spearmanr(own, rarity).statistic) for own in matrices) < 0.15
        between = [spearmanr(a, b).statistic for i, a in enumerate(matrices) for b in matrices[:i]]
        assert abs(np.mean(between)) < 0.15 and max(between) < 0.9
        assert all(len(set(own.round(4))) == 21 for own in matrices)  # no ties

    def test_the_images_of_another_geometry_lie_around_its_positions(self) -> None:
        table = synthetic(SyntheticSettings(images=700, size=16, geometry=5))
        means = table.extra.groupby(table.labels).mean().to_numpy()
        np.testing.assert_allclose(means, class_positions(7, 5), atol=0.05)

    def test_does_not_change_when_classes_are_added(self) -> None:
        np.testing.assert_array_equal(known_similarity(30)[:7, :7], known_similarity(7))

    def test_has_close_and_far_pairs(self) -> None:
        pairs = known_similarity(7)[SEVEN]
        assert np.sum(pairs > 0.6) >= 3 and np.sum(pairs < 0.1) >= 4 and np.sum((pairs > 0.15) & (pairs < 0.5)) >= 6
        assert len(set(pairs.round(4))) == 21  # no ties, every rank is defined

    def test_is_uncorrelated_with_class_frequency_and_class_order(self) -> None:
        """Rarity of a pair: −(log n_i + log n_j); also the rarer and the commoner of the two, and how unequal."""
        log = np.log(ISIC2018_COUNTS)
        order = np.arange(7)
        others = {
            "rarity": -np.add.outer(log, log),
            "rarer": -np.minimum.outer(log, log),
            "commoner": -np.maximum.outer(log, log),
            "unequal": np.abs(np.subtract.outer(log, log)),
            "apart in order": np.abs(np.subtract.outer(order, order)),
            "late in order": np.add.outer(order, order),
        }
        known = known_similarity(7)[SEVEN]
        found = {name: spearmanr(known, other[SEVEN]).statistic for name, other in others.items()}
        assert max(map(abs, found.values())) < 0.15, found
        assert abs(found["rarity"]) < 0.05

    def test_is_in_the_pixels(self, sets) -> None:
        for table, features in sets:
            seen = centroid_similarity(features, table.labels)[SEVEN]
            assert spearmanr(seen, known_similarity(7)[SEVEN]).statistic >= 0.9

    def test_every_axis_is_in_the_pixels(self, sets) -> None:
        table, features = sets[1]
        design = np.column_stack([features, np.ones(len(features))])
        half = len(table) // 2
        rows = np.random.default_rng(0).permutation(len(table))
        fit, check = rows[:half], rows[half:]
        appearance = table.extra.to_numpy()
        weights = np.linalg.lstsq(design[fit], appearance[fit], rcond=None)[0]
        guessed = design[check] @ weights
        seen = {axis: np.corrcoef(guessed[:, i], appearance[check, i])[0, 1] for i, axis in enumerate(AXES)}
        assert min(seen.values()) > 0.75, seen


class TestOverlap:
    def test_more_overlap_is_harder_to_tell_apart(self, sets) -> None:
        scores = [cross_val_score(LinearDiscriminantAnalysis(), x, t.labels, cv=4).mean() for t, x in sets]
        assert 0.85 < scores[0] < 0.97
        assert 0.55 < scores[1] < 0.80

    def test_spread_is_the_standard_deviation_around_the_position(self) -> None:
        spreads = []
        for overlap in (0, 0.03, "little", "much", 0.4):
            wanted = SyntheticSettings(images=210, size=16, overlap=overlap, images_per_group=1)
            table = synthetic(wanted)
            off = table.extra.to_numpy() - class_positions(7)[table.labels]
            spreads.append(np.sqrt(np.mean(off**2)))
            # The ends of the axes, 0 and 1, cut the widest off.
            assert spreads[-1] == pytest.approx(wanted.spread, rel=0.06 if wanted.spread < 0.1 else 0.4, abs=1e-6)
        assert spreads == sorted(spreads)


def test_names_beyond_the_alphabet_stay_unique() -> None:
    assert class_names(3) == ("A", "B", "C")
    assert len(set(class_names(100))) == 100


class TestErrors:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"classes": 1}, "classes must be an integer from 2 to 100, got 1"),
            ({"classes": 101}, "from 2 to 100, got 101"),
            ({"images": 0}, "images must be an integer of 1 or more, got 0"),
            ({"images": 10.5}, "got 10.5"),
            ({"images": True}, "got True"),
            ({"size": 8}, "size must be an integer from 16 to 512, got 8"),
            ({"size": 1024}, "from 16 to 512, got 1024"),
            ({"images_per_group": 0}, "images_per_group must be an integer from 1 to 100, got 0"),
            ({"seed": -1}, "seed must be an integer from 0 to 4294967295, got -1"),
            ({"overlap": "litle"}, "unknown overlap 'litle'; did you mean 'little'"),
            ({"overlap": -0.1}, "overlap must be little, much or a number from 0 to 1, got -0.1"),
            ({"overlap": float("nan")}, "got nan"),
            ({"overlap": None}, "or a number from 0 to 1, got None"),
            ({"overlap": True}, "or a number from 0 to 1, got True"),
            ({"imbalance": 3}, "each of the 7 classes a share above 0, got 3"),
            ({"imbalance": ["a"] * 7}, "each of the 7 classes a share above 0, got .'a', 'a'"),
            ({"imbalance": "isic2019"}, "unknown imbalance 'isic2019'; did you mean 'isic2018'"),
            ({"imbalance": "isic2018", "classes": 5}, "each of the 5 classes a share above 0"),
            ({"imbalance": (1, 2, 3)}, "each of the 7 classes a share above 0"),
            ({"imbalance": (1, 1, 1, 1, 1, 1, 0)}, "a share above 0"),
            ({"imbalance": (1, 1, 1, 1, 1, 1, float("inf"))}, "a share above 0"),
            ({"images": 6}, "6 images leave class G without any"),
            ({"images": 30, "imbalance": "isic2018"}, "30 images leave class F without any"),
        ],
    )
    def test_invalid_settings(self, changes, message) -> None:
        with pytest.raises(InputError, match=message):
            SyntheticSettings(**changes)

    def test_all_broken_settings_are_named_at_once(self) -> None:
        with pytest.raises(InputError, match=r"classes.*size.*seed"):
            SyntheticSettings(classes=0, size=0, seed=-5)

    @pytest.mark.parametrize("classes", [1, 101, 2.5])
    def test_similarity_of_too_few_or_too_many_classes(self, classes: int) -> None:
        with pytest.raises(InputError, match="num_classes must be an integer from 2 to 100"):
            known_similarity(classes)


@pytest.mark.parametrize("kind", ["synthetic", "synthetic-multilabel"])
def test_sets_that_do_not_fit_into_memory_are_refused_at_once(kind: str) -> None:
    with pytest.raises(InputError, match="999,999,999,999 images of 64 x 64 pixels"):
        sources.open_data(f"{kind}:images=999999999999")
