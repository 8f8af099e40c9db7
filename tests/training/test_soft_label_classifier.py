from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cclnet import InputError, SoftLabelClassifier

X, NUMBERS = make_classification(300, 12, n_informative=6, n_redundant=0, n_classes=3, random_state=0)
Y = np.array(["ant", "bee", "cat"])[NUMBERS]


def test_hard_labels_are_scikit_learns_logistic_regression() -> None:
    own = SoftLabelClassifier(smoothing=0, penalty=0.05).fit(X, Y)
    reference = make_pipeline(StandardScaler(), LogisticRegression(C=1 / (0.05 * len(X)))).fit(X, Y)
    np.testing.assert_allclose(own.predict_proba(X), reference.predict_proba(X), atol=5e-3)
    assert list(own.classes_) == ["ant", "bee", "cat"] and own.score(X, Y) == pytest.approx(
        reference.score(X, Y), abs=0.01
    )


def test_probabilities_approach_the_soft_labels() -> None:
    """Without a penalty the mean probability over a class's images is the mean of its targets (the bias' gradient)."""
    table = [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.0, 0.3, 0.7]]
    own = SoftLabelClassifier(soft_labels=table, penalty=1e-3).fit(X, Y)
    np.testing.assert_allclose(own.predict_proba(X).mean(axis=0), np.array(table)[NUMBERS].mean(axis=0), atol=2e-3)


def test_it_is_searched_like_any_estimator() -> None:
    search = GridSearchCV(make_pipeline(StandardScaler(), SoftLabelClassifier()), cv=3,
                          param_grid={"softlabelclassifier__smoothing": [0.0, 0.2]})  # fmt: skip
    assert search.fit(X, Y).best_score_ > 0.6


def test_balanced_weights_raise_the_rare_class() -> None:
    kept = (NUMBERS != 0) | (np.arange(len(X)) % 10 == 0)
    plain, balanced = (
        SoftLabelClassifier(balanced=b).fit(X[kept], Y[kept]).predict_proba(X)[:, 0] for b in (False, True)
    )
    assert balanced.mean() > 1.5 * plain.mean()


@pytest.mark.parametrize("table", [np.eye(2), np.ones((3, 3)), [[1.5, -0.5, 0], [0, 1, 0], [0, 0, 1]]])
def test_a_wrong_table_is_refused(table: np.ndarray) -> None:
    with pytest.raises(InputError, match="3 rows of 3"):
        SoftLabelClassifier(soft_labels=table).fit(X, Y)
