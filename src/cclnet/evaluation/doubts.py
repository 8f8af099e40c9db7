"""Which labels are doubtful: held-out predictions, and which classes are confused with each other.

A label is doubtful where the prediction of a model that was not fitted on the image prefers another class *and* images
of that class are known to get this label. With p the prediction, y the label and A the label model (A_ky: how often
an image of class k is labelled y), the doubt is ``Σ_{k≠y} p_k A_ky / Σ_k p_k A_ky``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from cclnet.errors import InputError
from cclnet.runs.checksums import is_there
from cclnet.runs.folder import OpenedRun, open_run
from cclnet.runs.predictions import Floats, Integers, Predictions

SOFTNESS, POWER = 0.7, 4.0  # of the label model, as in the method ccl-forward


@dataclass(frozen=True)
class Doubts:
    """The images with a held-out prediction, most doubtful first."""

    table: pd.DataFrame  # columns image, label, suggested, doubt, p_label, p_suggested; and group where known
    label_model: Floats  # [K, K], row k: how images of class k are labelled
    classes: tuple[str, ...]
    left_out: int  # images that were predicted only by models fitted on them


def find_doubts(runs: Sequence[str | Path]) -> Doubts:
    """Rank the labels of all images that some run predicts without having been fitted on them.

    ``runs`` are run folders, predictions.csv files or kept results on the same classes: one cross-validated run, or the
    runs of all folds. Images that several runs predict get the mean of the predictions.
    """
    opened = [open_run(run) for run in runs]
    predictions, left_out = held_out_predictions(opened)
    labels = np.asarray(predictions.labels, np.int64)
    p = predictions.probabilities
    model = label_model(p, labels)
    posterior = p * model.T[labels]
    posterior /= np.maximum(posterior.sum(axis=1, keepdims=True), np.finfo(float).tiny)
    rows = np.arange(len(labels))
    doubt = 1.0 - posterior[rows, labels]
    others = posterior.copy()
    others[rows, labels] = -1.0
    suggested = others.argmax(axis=1)
    names = np.array(predictions.classes)
    columns = {
        "image": predictions.images,
        "label": names[labels],
        "suggested": names[suggested],
        "doubt": doubt,
        "p_label": p[rows, labels],
        "p_suggested": p[rows, suggested],
    }
    if predictions.groups is not None:
        columns["group"] = predictions.groups
    table = pd.DataFrame(columns).sort_values("doubt", ascending=False, kind="stable", ignore_index=True)
    return Doubts(table, model, predictions.classes, left_out)


def mean_doubt(run: str | Path) -> float:
    """Mean doubt over the images that a run predicts without having been fitted on them."""
    return float(find_doubts([run]).table["doubt"].mean())


def held_out_predictions(runs: Sequence[OpenedRun]) -> tuple[Predictions, int]:
    """The mean prediction of each image over the runs that were not fitted on it, and how many images have none."""
    first = runs[0].predictions
    frames, fitted = [], set()
    for run in runs:
        own = run.predictions
        if own.multilabel:
            raise InputError(f"{run.path}: doubts need one label per image, and this run has several.")
        if own.classes != first.classes:
            raise InputError(
                f"{run.path} has the classes {', '.join(own.classes)}, but {runs[0].path} has "
                f"{', '.join(first.classes)}. Give runs on the same data."
            )
        held_out = np.full(len(own), True) if own.splits is None else own.splits != "train"
        fitted |= set(own.images[~held_out].tolist())
        if run.folder is not None and is_there(run.folder.split):
            split = run.folder.read_split()
            fitted |= set(split.images[split.splits == "train"].tolist())
        frame = pd.DataFrame(own.probabilities[held_out], columns=list(own.classes))
        frame["image"], frame["label"] = own.images[held_out], own.labels[held_out]
        frame["group"] = "" if own.groups is None else own.groups[held_out]
        frames.append(frame)
    together = pd.concat(frames, ignore_index=True)
    if together.empty:
        raise InputError("no image has a held-out prediction: all of them were trained on.")
    of_image = together.groupby("image", sort=False)
    if (of_image["label"].nunique() > 1).any():
        name = str(of_image["label"].nunique().idxmax())
        raise InputError(f"image {name} has different labels in these runs. Give runs on the same labels.")
    facts = of_image[["label", "group"]].first()
    p = of_image[list(first.classes)].mean()
    groups = facts["group"].to_numpy(dtype=np.str_)
    predictions = Predictions(
        p.index.to_numpy(dtype=np.str_),
        facts["label"].to_numpy(dtype=np.int64),
        p.to_numpy(),
        first.classes,
        groups if (groups != "").any() else None,
    )
    return predictions, len(fitted - set(predictions.images.tolist()))


def label_model(probabilities: Floats, labels: Integers, softness: float = SOFTNESS, power: float = POWER) -> Floats:
    """How images of each class are labelled, estimated from held-out predictions: [N, K], [N] → [K, K].

    An image counts for class i by ``b_i^power``, b the prediction with the class frequencies divided out. The diagonal
    is ``softness``; the rest of row i is shared out like the labels of the images that count for it.

    >>> p = np.array([[0.9, 0.1, 0.0], [0.8, 0.1, 0.1], [0.1, 0.9, 0.0], [0.0, 0.0, 1.0]])
    >>> label_model(p, np.array([0, 1, 1, 2])).round(2)
    array([[0.7, 0.3, 0. ],
           [0.3, 0.7, 0. ],
           [0. , 0.3, 0.7]])
    """
    size = probabilities.shape[1]
    one_hot = np.eye(size)[labels]
    balanced = probabilities / np.maximum(one_hot.mean(axis=0), 1e-6)
    balanced /= np.maximum(balanced.sum(axis=1, keepdims=True), np.finfo(float).tiny)
    sums = (balanced**power).T @ one_hot
    np.fill_diagonal(sums, 0.0)
    total = sums.sum(axis=1, keepdims=True)
    even = (1.0 - np.eye(size)) / (size - 1)
    shared = np.where(total > 0, sums / np.where(total > 0, total, 1.0), even)
    return softness * np.eye(size) + (1.0 - softness) * shared
