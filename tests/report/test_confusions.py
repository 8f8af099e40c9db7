from __future__ import annotations

import numpy as np

from cclnet.report.figures import frequent_confusions

CLASSES = ["A", "B", "C", "D"]
# A and D are taken for each other by half of D and a tenth of A; B for C by a fifth of B.
CONFUSION = [[90, 0, 0, 10], [0, 8, 2, 0], [0, 0, 10, 0], [2, 0, 0, 2]]


def matrix(alike: tuple[int, int]) -> list[list[float]]:
    weights = np.full((4, 4), 0.1)
    np.fill_diagonal(weights, 0.7)
    weights[alike] = weights[alike[::-1]] = 0.2
    return weights.tolist()


def test_pairs_are_ordered_by_the_share_of_their_images() -> None:
    first, second = frequent_confusions(CONFUSION, CLASSES, None).pairs
    assert (first.a, first.b, first.a_as_b, first.b_as_a, first.share) == ("A", "D", 10, 2, (0.1 + 0.5) / 2)
    assert (second.a, second.b, second.share) == ("B", "C", 0.1)
    assert first.rank is None and not first.predicted


def test_the_matrix_is_credited_with_what_it_had_among_its_most_alike() -> None:
    found = frequent_confusions(CONFUSION, CLASSES, matrix((0, 3)), most=1)
    assert found.pairs[0].rank == 1 and found.pairs[0].predicted
    assert "1 is among the 1 most alike pair of the soft labels, out of 6 pairs" in found.in_words
    assert "Chance alone would give 0.2" in found.in_words  # 1 · 1 / 6
    missed = frequent_confusions(CONFUSION, CLASSES, matrix((1, 2)), most=1)
    assert missed.pairs[0].rank == 6 and not missed.pairs[0].predicted  # equal with four others
    assert ", 0 are among" in missed.in_words


def test_uniform_label_smoothing_predicts_nothing() -> None:
    found = frequent_confusions(CONFUSION, CLASSES, np.full((4, 4), 0.25).tolist())
    assert [pair.predicted for pair in found.pairs] == [False, False]


def test_at_most_a_third_of_the_pairs_is_shown() -> None:
    everything = np.ones((7, 7), int).tolist()
    found = frequent_confusions(everything, list("ABCDEFG"), np.full((7, 7), 1 / 7).tolist())
    assert len(found.pairs) == 7 and "Chance alone would give 2.3" in found.in_words  # 7 · 7 / 21


def test_a_class_without_images_leaves_the_other_direction() -> None:
    pair = frequent_confusions([[0, 0], [1, 3]], ["A", "B"], None).pairs[0]
    assert (pair.a_as_b, pair.b_as_a, pair.share) == (0, 1, 0.25)


def test_a_perfect_model_confuses_nothing() -> None:
    found = frequent_confusions(np.diag([5, 5, 5]).tolist(), ["A", "B", "C"], None)
    assert found.pairs == () and found.in_words == "No two classes were confused."
