"""A linear probe: logistic regression on the frozen features of a pretrained backbone.

The regression becomes the classifier of the backbone, so that the finished run is like any other. Every image is
predicted by a model that was not fitted on its fold. Penalty and class weights are chosen for each fold inside the
other folds (nested cross-validation).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits
from torch import Tensor

from cclnet.data.screening import screen
from cclnet.data.sources import open_data
from cclnet.data.split import assign_folds, fold_settings, split_table
from cclnet.data.table import ImageTable
from cclnet.errors import InputError
from cclnet.methods import Classes, build_method, check_method_fits
from cclnet.methods.base import FixedTableMethod
from cclnet.network import CCLNet, TimmClassifier
from cclnet.runs.decision_rule import DecisionRule, make_rule
from cclnet.runs.folder import RunFolder
from cclnet.runs.model import TrainedInfo
from cclnet.runs.out_of_distribution import FeatureStatistics
from cclnet.settings import TTA, Settings
from cclnet.training.feature_statistics import noise_features, statistics_of
from cclnet.training.features import Floats32, frozen_features
from cclnet.training.setup import PreparedData, check_class_names, check_columns, make_fabric, make_network, print_notes
from cclnet.training.validate import describe, write_artifacts

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

PENALTIES = (0.3, 0.1, 0.03, 0.01)  # λ, from the strongest, so that each fit starts from the one before
LEAST_VARIANCE = 1e-3  # of a principal component that is kept, relative to the mean variance of the features
MAX_ITERATIONS = 100


@dataclass(frozen=True)
class Choice:
    """What is chosen inside the training folds."""

    balanced: bool  # whether every class has the same weight in the fit
    penalty: float  # λ of the regression


@dataclass(frozen=True)
class LinearLayer:
    """``logits = features @ weight + bias``, weight [F, K], bias [K]."""

    weight: Floats
    bias: Floats

    def __call__(self, features: Floats32) -> Floats:
        return features.astype(np.float64) @ self.weight + self.bias


def probe(settings: Settings, out: str | Path, *, accelerator: str = "auto", progress: bool = True) -> Path:
    """Fit a probe with ``settings.folds`` folds, write its run folder and return the folder.

    Without a method and a decision rule of the settings, several labels are fitted with "bce", and one label is
    decided by the balanced rule.
    """
    began, cpu_began = time.monotonic(), time.process_time()
    if not settings.folds:
        raise InputError("a probe needs folds: at least 3, because it chooses inside those that it is fitted on.")
    fabric = make_fabric(settings, accelerator=accelerator)
    table = open_data(settings.data, settings)
    settings = _for_table(settings, table)
    fold = assign_folds(table, settings.split, settings.folds)
    run = RunFolder(out)
    run.create(settings)
    try:
        splits = np.where(fold >= 0, "val", "test")  # nothing is predicted by a model that was fitted on it
        screened = screen(table, splits, settings, progress, fold)
        assert screened.fold is not None
        table, splits, images, fold = screened.table, screened.splits, screened.images, screened.fold
        run.write_data_summary(screened.summary)
        print_notes(screened.summary, progress)
        run.write_split(split_table(table, splits, fold))
        data = PreparedData(table, splits, images)
        network = make_network(settings, data)
        problem = Problem.of(network, settings, table, fold)
        assert isinstance(network.classifier, TimmClassifier)
        features = frozen_features(
            network.classifier, settings, table, images, TTA[settings.test_views], fabric.device, progress
        )
        found = fit_probe(problem, _average(features, settings.test_views))
    except BaseException:
        run.discard()
        raise
    _set_classifier(network, found.layer)
    seconds = {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - cpu_began}
    seconds = {name: round(value, 3) for name, value in seconds.items()}
    fitted = np.flatnonzero(fold >= 0)
    trained = describe(settings, data, fabric, TrainedInfo(), network.method)
    description = replace(
        trained,
        class_counts=tuple(table.class_counts(fitted).tolist()),
        trained=replace(
            trained.trained,
            of_epochs=None,
            split=fold_settings(table, settings.split, settings.folds)[0].by,
            folds=settings.folds,
            images=len(fitted),
            seconds=seconds["seconds"],
        ),
        extra={"probe": found.summary() | seconds},
    )
    statistics = _feature_statistics(network.classifier, settings, table, fold, _average(features, "none"))
    rows, logits = np.arange(len(table)), torch.from_numpy(found.logits)
    write_artifacts(run, description, network.classifier, network.soft_labels(), statistics, data, rows, logits)
    return run.path


def _for_table(settings: Settings, table: ImageTable) -> Settings:
    """The settings with a method and a decision rule that fit the labels of the data."""
    if table.multilabel and settings.method == "hard":
        settings = replace(settings, method="bce")
    if not table.multilabel and not settings.decision and not settings.cost:
        settings = replace(settings, decision="balanced")
    check_method_fits(settings.method, table.multilabel)
    known = DecisionRule(weights=(1.0,) * table.num_classes)
    make_rule(table.classes, table.multilabel, known, settings.decision, settings.cost)
    check_columns(settings.by, table)
    check_class_names(table)
    return settings


def _feature_statistics(
    classifier: TimmClassifier, settings: Settings, table: ImageTable, fold: npt.NDArray[np.integer[Any]],
    plain: Floats32,
) -> FeatureStatistics | None:  # fmt: skip
    """The statistics by which unlike images are recognised: of all folds but the first, which is held out."""

    def of_noise() -> Floats:
        device = next(classifier.parameters()).device
        mean, std = (torch.tensor(own, device=device) for own in (settings.input_mean, settings.input_std))
        return noise_features(classifier, settings.augment.crop, mean, std)

    rows = np.flatnonzero(fold > 0), np.flatnonzero(fold == 0)
    return statistics_of(*rows, table.labels, lambda own: plain[own], of_noise, settings.seed)


def _average(features: Mapping[str, Floats32], tta: str) -> Floats32:
    """The mean of the features over views. Logits are linear in it: this is their mean, too."""
    return np.mean([features[view] for view in TTA[tta]], axis=0, dtype=np.float32)


@dataclass(frozen=True)
class Problem:
    """What is fitted: N images with their folds."""

    labels: npt.NDArray[Any]  # class indices [N], or zeros and ones [N, K]
    targets: Floats32  # distributions over the classes, or zeros and ones, [N, K]
    fold: npt.NDArray[np.intp]  # [N], -1 for images of the test split, which are never fitted
    multilabel: bool

    @classmethod
    def of(cls, network: CCLNet, settings: Settings, table: ImageTable, fold: npt.NDArray[np.intp]) -> Problem:
        """The problem for the soft labels of the method, which must be fixed."""
        method = build_method(
            settings.method,
            Classes(table.num_classes, network.classifier.feature_width, tuple(table.class_counts().tolist())),
            settings.method_settings,
        )
        if not (method.baseline or isinstance(method, FixedTableMethod)):
            raise InputError(
                f"method '{settings.method}' learns while the features change, and those of a probe do not. Use hard "
                "labels (hard; bce for several labels) or fixed soft labels (lsr, ordinal)."
            )
        if table.multilabel:
            return cls(table.labels, table.labels.astype(np.float32), fold, True)
        table_of_method = method.target()
        assert table_of_method is not None
        targets = table_of_method.double().cpu().numpy().astype(np.float32)[table.labels]
        return cls(table.labels, targets, fold, False)

    @property
    def folds(self) -> int:
        return int(self.fold.max()) + 1

    def score(self, logits: Floats, rows: Bools) -> float:
        """Balanced accuracy of logits without class frequencies; with several labels minus the binary cross entropy."""
        if self.multilabel:
            return -float(np.logaddexp(0, np.where(self.targets[rows] > 0.5, -logits[rows], logits[rows])).mean())
        right = logits[rows].argmax(axis=1) == self.labels[rows]
        counts = np.bincount(self.labels[rows], minlength=logits.shape[1])
        hits = np.bincount(self.labels[rows], right, minlength=logits.shape[1])
        return float((hits[counts > 0] / counts[counts > 0]).mean())

    def log_prior(self, rows: Bools) -> Floats | float:
        """The logarithm of the class frequencies, at least one image each, [K]; 0 with several labels."""
        if self.multilabel:
            return 0.0
        counts = np.maximum(np.bincount(self.labels[rows], minlength=self.targets.shape[1]), 1)
        return np.log(counts / counts.sum())

    def weights(self, rows: Bools, balanced: bool) -> Floats32:
        """The weight of each image in the fit; with ``balanced`` each class has the same sum."""
        if self.multilabel or not balanced:
            return np.ones(int(rows.sum()), np.float32)
        counts = np.maximum(np.bincount(self.labels[rows], minlength=self.targets.shape[1]), 1)
        return (rows.sum() / (np.count_nonzero(counts) * counts))[self.labels[rows]].astype(np.float32)


@dataclass(frozen=True)
class Probe:
    """A fitted probe."""

    layer: LinearLayer  # fitted on all folds
    choice: Choice
    logits: (
        Floats  # [N, K], of each image by the model that was not fitted on its fold; on all folds for the test split
    )
    fold_choices: tuple[Choice, ...]

    def summary(self) -> dict[str, Any]:
        """The content of "probe" in model.json."""
        own = [vars(choice) for choice in (self.choice, *self.fold_choices)]
        return own[0] | {"folds": own[1:]}


def fit_probe(problem: Problem, features: Floats32) -> Probe:
    """Choose and fit by nested cross-validation; ``features`` [N, F].

    For fold f the choice is made on the other folds g: each is predicted by a model fitted without f and g. That model
    serves f and g alike, so F (F − 1) / 2 fits per candidate suffice.
    """
    count, shape = problem.folds, problem.targets.shape
    balanced = (False,) if problem.multilabel else (False, True)
    inner: dict[Choice, list[Floats]] = {}  # by candidate, for each fold the logits of the other folds
    for f, g in combinations(range(count), 2):
        rows = (problem.fold >= 0) & (problem.fold != f) & (problem.fold != g)
        for choice, layer in _path(problem, features, rows, balanced, PENALTIES):
            own = inner.setdefault(choice, [np.zeros(shape) for _ in range(count)])
            for fold, other in ((f, g), (g, f)):
                predicted = problem.fold == other
                own[fold][predicted] = layer(features[predicted])
    outer = [(problem.fold >= 0) & (problem.fold != f) for f in range(count)]
    scores = {
        choice: [problem.score(own[f], outer[f]) for f in range(count)] for choice, own in inner.items()
    }  # fmt: skip
    candidates, table = list(scores), np.array(list(scores.values()))  # [candidates, folds]
    fold_choices = tuple(candidates[best] for best in table.argmax(axis=0))
    choice = candidates[int(table.mean(axis=1).argmax())]
    logits = np.zeros(shape)
    for f, own_choice in enumerate(fold_choices):
        predicted = problem.fold == f
        logits[predicted] = _fit(problem, features, outer[f], own_choice)(features[predicted])
    layer = _fit(problem, features, problem.fold >= 0, choice)
    test = problem.fold < 0
    logits[test] = layer(features[test])
    return Probe(layer, choice, logits, fold_choices)


def _fit(problem: Problem, features: Floats32, rows: Bools, choice: Choice) -> LinearLayer:
    """Fit one candidate; its logits contain the class frequencies of the fitted images."""
    fits = _path(problem, features, rows, (choice.balanced,), (choice.penalty,))
    layer = next(fits)[1]
    return replace(layer, bias=layer.bias + problem.log_prior(rows))


def _path(
    problem: Problem, features: Floats32, rows: Bools, balanced: Sequence[bool], penalties: Sequence[float]
) -> Iterator[tuple[Choice, LinearLayer]]:
    """The fits for falling penalties. Their logits do not contain the class frequencies: a fit without class weights
    learns them, so they are subtracted."""
    basis = Basis.of(features[rows])
    reduced = basis(features[rows])
    for equal in balanced:
        weights, start = problem.weights(rows, equal), None
        learned = 0.0 if equal else problem.log_prior(rows)
        for penalty in penalties:
            start = fit_linear(
                reduced, basis.variances, problem.targets[rows], weights, penalty, problem.multilabel, start
            )
            layer = basis.unfold(start)
            yield Choice(equal, penalty), replace(layer, bias=layer.bias - learned)


@dataclass(frozen=True)
class Basis:
    """The principal components of standardised features: ``(features − mean) @ axes``, axes [F, d]."""

    mean: Floats32
    axes: Floats32
    variances: Floats  # [d], falling

    @classmethod
    def of(cls, features: Floats32) -> Basis:
        mean, std = features.mean(axis=0, dtype=np.float64), features.std(axis=0, dtype=np.float64)
        std = np.where(std > 1e-6, std, np.inf)  # a constant feature is left out
        standard = torch.from_numpy(((features - mean) / std).astype(np.float32))
        variances, axes = torch.linalg.eigh((standard.T @ standard / len(standard)).double())
        variances, axes = variances.flip(0).numpy(), axes.flip(1).numpy()
        kept = variances > LEAST_VARIANCE * variances.mean()
        scaled = axes[:, kept] / std[:, None]
        return cls(mean.astype(np.float32), scaled.astype(np.float32), variances[kept])

    def __call__(self, features: Floats32) -> Floats32:
        return (torch.from_numpy(features - self.mean) @ torch.from_numpy(self.axes)).numpy()

    def unfold(self, layer: LinearLayer) -> LinearLayer:
        """The layer on the features themselves that has the logits of ``layer`` on their components."""
        weight = self.axes.astype(np.float64) @ layer.weight
        return LinearLayer(weight, layer.bias - self.mean.astype(np.float64) @ weight)


def fit_linear(
    features: Floats32, variances: Floats, targets: Floats32, weights: Floats32, penalty: float,
    multilabel: bool = False, start: LinearLayer | None = None,
) -> LinearLayer:  # fmt: skip
    """Logistic regression of soft targets: the minimum of ``Σ w_i CE_i / Σ w_i + λ/2 |W|²`` by L-BFGS.

    ``features`` [n, d] are uncorrelated with mean 0 and ``variances`` [d]; the steps are scaled by them, so that some
    twenty suffice. scikit-learn's LogisticRegression with C = 1 / (λ n) has the same minimum, but takes class indices
    only, and needs ten times as long.
    """
    x, y = torch.from_numpy(features), torch.from_numpy(np.ascontiguousarray(targets))
    share = torch.from_numpy(weights / weights.sum(dtype=np.float64)).float()[:, None]
    width, count = x.shape[1], y.shape[1]
    scale = torch.from_numpy(1.0 / np.sqrt(0.1 * variances + penalty)).float()[:, None]

    def loss(values: Floats) -> tuple[float, Floats]:
        given = torch.from_numpy(values).float().view(width + 1, count)
        weight = given[:-1] * scale
        logits = torch.addmm(given[-1], x, weight)
        errors, residual = _cross_entropy(logits, y, multilabel)
        residual *= share
        gradient = torch.cat([(x.T @ residual + penalty * weight) * scale, residual.sum(0, keepdim=True)])
        total = (errors.double() * share[:, 0]).sum() + 0.5 * penalty * weight.double().square().sum()
        return float(total), gradient.double().numpy().ravel()

    initial = np.zeros((width + 1, count))
    if start is not None:
        initial[:-1], initial[-1] = start.weight / scale.double().numpy(), start.bias
    options = {"maxiter": MAX_ITERATIONS, "maxcor": 10, "gtol": 1e-5, "ftol": 1e-6}
    # L-BFGS is short products of vectors: two threads that wait for each other take up to a hundred times as long.
    with threadpool_limits(1, user_api="blas"):
        found = minimize(loss, initial.ravel(), jac=True, method="L-BFGS-B", options=options)
    values = found.x.reshape(width + 1, count)
    return LinearLayer(values[:-1] * scale.double().numpy(), values[-1])


def _cross_entropy(logits: Tensor, targets: Tensor, multilabel: bool) -> tuple[Tensor, Tensor]:
    """The loss of each image [n], and its derivative by the logits, [n, K]."""
    if multilabel:
        each = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return each.sum(dim=1), torch.sigmoid(logits) - targets
    log_probabilities = torch.log_softmax(logits, dim=1)
    return -(targets * log_probabilities).sum(dim=1), log_probabilities.exp() - targets


@torch.no_grad()
def _set_classifier(network: CCLNet, layer: LinearLayer) -> None:
    model: Any = network.classifier.shipped
    classifier = model.get_classifier()
    classifier.weight.copy_(torch.from_numpy(layer.weight.T).float().reshape(classifier.weight.shape))
    classifier.bias.copy_(torch.from_numpy(layer.bias).float())
