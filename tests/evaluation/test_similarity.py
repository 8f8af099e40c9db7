from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cclnet.errors import InputError
from cclnet.evaluation import similarity
from cclnet.functional import smoothed_labels
from cclnet.runs.model import read_soft_labels, write_soft_labels

MATRIX = np.array([[0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.1, 0.4, 0.5]])


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    names = ("class", "NA", 'a, "b"')
    write_soft_labels(tmp_path / "c.csv", names, MATRIX)
    classes, matrix = read_soft_labels(tmp_path / "c.csv")
    assert classes == names
    np.testing.assert_array_equal(matrix, MATRIX)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class,a,b\na,0.5,0.5\n", "rows and columns must name the same classes"),
        ("class,a,b\nb,0.5,0.5\na,0.5,0.5\n", "rows and columns must name the same classes"),
        ("class,a\na,1\n", "at least two"),
        ("class,a,b\na,0.5,x\nb,0.5,0.5\n", "row a, column b holds 'x'"),
        ("class,a,b\na,0.5,1.5\nb,0.5,0.5\n", "row a, column b holds '1.5'"),
        ("", "cannot be read as comma-separated text"),
        ("class,a,b\na,0.5,0.5,0.5\n", "cannot be read as comma-separated text"),
    ],
)
def test_what_is_no_matrix_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.csv").write_text(text)
    with pytest.raises(InputError) as caught:
        read_soft_labels(tmp_path / "c.csv")
    assert message in str(caught.value)


def test_a_missing_file_and_a_wrong_size_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="hard labels have none"):
        read_soft_labels(tmp_path / "c.csv")
    with pytest.raises(InputError, match=r"2 classes need a matrix of that size, got \[3, 3\]"):
        write_soft_labels(tmp_path / "c.csv", ("a", "b"), MATRIX)
    with pytest.raises(InputError, match="3 and 2 classes"):
        similarity.agreement(MATRIX, np.eye(2))


def test_agreement_is_spearmans_over_ordered_pairs() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random((2, 6, 6))
    pairs = [(i, j) for i, j in itertools.product(range(6), range(6)) if i != j]
    expected = stats.spearmanr([a[i, j] for i, j in pairs], [b[i, j] for i, j in pairs]).statistic
    assert similarity.agreement(a, b) == pytest.approx(expected)
    symmetric = [(m + m.T) / 2 for m in (a, b)]
    upper = np.triu_indices(6, 1)
    assert similarity.agreement(*symmetric) == pytest.approx(stats.spearmanr(*(m[upper] for m in symmetric)).statistic)


@given(st.permutations(range(5)), st.sampled_from([np.sqrt, np.exp, lambda x: 3 * x + 1]))
def test_agreement_sees_order_alone(order: list[int], rising: object) -> None:
    matrix = np.random.default_rng(1).random((5, 5))
    assert similarity.agreement(matrix, rising(matrix)) == pytest.approx(1.0)  # type: ignore[operator]
    again = matrix[np.ix_(order, order)]
    assert similarity.agreement(again, -again) == pytest.approx(-1.0)


def test_uniform_smoothing_agrees_with_nothing_and_is_at_no_distance_from_itself() -> None:
    smoothed = smoothed_labels(7, 0.3).numpy()
    assert math.isnan(similarity.agreement(smoothed, np.random.default_rng(0).random((7, 7))))
    epsilon, distance = similarity.smoothing_distance(smoothed)
    assert epsilon == pytest.approx(0.3)
    np.testing.assert_allclose(distance, 0, atol=1e-15)


def test_rarity_orders_pairs_by_the_product_of_their_counts() -> None:
    counts = [100, 10, 1]
    pairs = [(0, 1), (0, 2), (1, 2)]
    made = np.zeros((3, 3))
    for i, j in pairs:
        made[i, j] = made[j, i] = 1 / (counts[i] * counts[j])
    assert similarity.inverse_frequency_agreement(made, counts) == pytest.approx(1.0)
    assert (
        similarity.inverse_frequency([4, 0])[1, 1] > similarity.inverse_frequency([4, 1])[1, 1]
    )  # none is rarer than one
    assert similarity.inverse_frequency([4, 25])[0, 1] == pytest.approx(-math.log(100))


def test_confusions_are_shares_of_the_images_of_a_class() -> None:
    matrix = np.array([[0.5, 0.3, 0.2], [0.1, 0.5, 0.4], [0.2, 0.3, 0.5]])
    counts = np.array([[1, 30, 20], [1, 2, 4], [0, 0, 0]])  # nothing of the third class: its row says nothing
    shares = [30 / 51, 20 / 51, 1 / 7, 4 / 7]
    expected = stats.spearmanr([0.3, 0.2, 0.1, 0.4], shares).statistic
    assert similarity.confusion_agreement(matrix, counts) == pytest.approx(expected)


def test_the_summary_by_hand() -> None:
    found = similarity.summarise(("a", "b", "c"), MATRIX, counts=[5, 5, 5], confusion=[[4, 1, 0], [1, 4, 0], [0, 2, 3]])
    assert found.softness == pytest.approx(0.6)
    assert found.collapse_softness is None
    epsilon = 0.4 * 3 / 2
    assert found.uniform_smoothing.epsilon == pytest.approx(epsilon)
    rows = [(abs(0.3 - 0.2) + abs(0.1 - 0.2)) / 2, (0.1 + 0.0 + 0.1) / 2, (0.1 + 0.2 + 0.1) / 2]
    assert found.uniform_smoothing.distance_mean == pytest.approx(sum(rows) / 3)
    assert found.uniform_smoothing.distance_max == pytest.approx(max(rows))
    assert [row.most_similar for row in found.per_class] == ["b", "a", "b"]
    assert [row.weight for row in found.per_class] == [0.3, 0.2, 0.4]
    weights = [(pair.a, pair.b, pytest.approx(pair.weight)) for pair in found.most_similar_pairs]
    assert weights == [("a", "b", 0.25), ("b", "c", 0.25), ("a", "c", 0.1)]
    assert found.inverse_frequency_agreement is None  # equal counts: nothing to follow
    assert -1 <= found.confusion_agreement <= 1
    assert similarity.summarise(("a", "b", "c"), MATRIX, collapse_softness=0.4).collapse_softness == 0.4


@given(st.integers(0, 10_000))
def test_agreement_beside_a_third_is_that_of_what_the_third_does_not_explain(seed: int) -> None:
    shared, own = np.random.default_rng(seed).normal(size=(2, 6, 6))
    a, b, third = shared + own, shared - own.T, shared
    ranks = [stats.rankdata(similarity.off_diagonal(m)) for m in (a, b, third)]
    left = [r - np.poly1d(np.polyfit(ranks[2], r, 1))(ranks[2]) for r in ranks[:2]]
    assert similarity.partial_agreement(a, b, third) == pytest.approx(np.corrcoef(*left)[0, 1])
    assert math.isnan(similarity.partial_agreement(a, third, third))
    assert math.isnan(similarity.partial_agreement(np.ones((6, 6)), b, third))


def test_p_of_an_agreement_is_the_share_of_relabellings() -> None:
    """Against a loop over all permutations with scipy's correlation; a monotone change of a matrix changes nothing."""
    rng = np.random.default_rng(3)
    a, b = rng.random((5, 5)), rng.random((5, 5))
    b = (b + b.T) / 2 + 0.5 * a
    strengths = [abs(similarity.agreement(a, b[np.ix_(order, order)])) for order in itertools.permutations(range(5))]
    expected = np.mean([s >= strengths[0] - 1e-9 for s in strengths])
    assert similarity.agreement_p(a, b) == pytest.approx(expected)
    assert similarity.agreement_p(np.exp(a), b) == pytest.approx(expected)
    assert math.isnan(similarity.agreement_p(a, np.ones((5, 5))))


def test_p_of_many_classes_is_sampled() -> None:
    line = -np.abs(np.subtract.outer(np.arange(9.0), np.arange(9.0)))
    assert similarity.agreement_p(line, line) < 0.005
    noise = np.random.default_rng(0).random((9, 9))
    assert similarity.agreement_p(line, noise) > 0.05


def test_the_p_of_a_partial_correlation_is_the_share_of_relabellings_that_are_as_strong() -> None:
    rng = np.random.default_rng(3)
    a, b, control = (own + own.T for own in rng.normal(size=(3, 4, 4)))
    observed = abs(similarity.partial_agreement(a, b, control))
    strengths = [
        abs(similarity.partial_agreement(a[np.ix_(order, order)], b, control))
        for order in itertools.permutations(range(4))
    ]
    assert similarity.partial_agreement_p(a, b, control) == pytest.approx(
        np.mean(np.array(strengths) >= observed - 1e-9)
    )
    assert math.isnan(similarity.partial_agreement_p(np.ones((4, 4)), b, control))
