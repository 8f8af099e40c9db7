"""SoftLabelClassifier: the linear probe as a scikit-learn estimator, for features that the user already has."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, check_X_y

from cclnet.errors import InputError
from cclnet.training.probe import Basis, fit_linear


class SoftLabelClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # sklearn has no types
    """Logistic regression on features X [N, F] with soft labels as targets.

    Args:
        soft_labels: [K, K], row k the soft label of class k in the sorted order of the classes, such as those that CCL
            learned on other images. Default: uniform smoothing.
        smoothing: weight of the uniform distribution over all classes in the label; 0 is hard labels.
        penalty: λ of ``mean cross entropy + λ/2 |W|²`` on standardised features.
        balanced: whether every class has the same weight in the mean.
    """

    def __init__(
        self, soft_labels: npt.ArrayLike | None = None, smoothing: float = 0.1, penalty: float = 0.1,
        balanced: bool = False,
    ) -> None:  # fmt: skip
        self.soft_labels, self.smoothing, self.penalty, self.balanced = soft_labels, smoothing, penalty, balanced

    def fit(self, X: npt.ArrayLike, y: npt.ArrayLike) -> SoftLabelClassifier:
        features, given = check_X_y(X, y)
        check_classification_targets(given)
        self.classes_, index = np.unique(given, return_inverse=True)
        self.n_features_in_, count = features.shape[1], len(self.classes_)
        table = (1 - self.smoothing) * np.eye(count) + self.smoothing / count
        table = table if self.soft_labels is None else np.asarray(self.soft_labels, np.float64)
        if table.shape != (count, count) or not np.allclose(table.sum(axis=1), 1) or not (table >= 0).all():
            raise InputError(f"soft_labels must be {count} rows of {count} shares that sum to 1; got {table.shape}.")
        weights = (len(index) / (count * np.bincount(index)))[index] if self.balanced else np.ones(len(index))
        basis = Basis.of(features.astype(np.float32))
        targets, reduced = table[index].astype(np.float32), basis(features.astype(np.float32))
        found = fit_linear(reduced, basis.variances, targets, weights.astype(np.float32), self.penalty)
        self.layer_ = basis.unfold(found)
        return self

    def decision_function(self, X: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The logits, [N, K]."""
        check_is_fitted(self)
        return self.layer_(check_array(X).astype(np.float32))

    def predict_proba(self, X: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return softmax(self.decision_function(X), axis=1)

    def predict(self, X: npt.ArrayLike) -> npt.NDArray[Any]:
        return self.classes_[self.decision_function(X).argmax(axis=1)]
