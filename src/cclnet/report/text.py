"""Numbers and names as a reader meets them: one place for the title, the meaning and the format of every score."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

NONE = "–"  # what is undefined


@dataclass(frozen=True)
class Score:
    """How a score is shown: its title, what it says in a line, whether as percent, whether more is better."""

    title: str
    meaning: str
    percent: bool = False
    higher_is_better: bool = True
    bounded: bool = True  # lies in 0 … 1 (kappa: -1 … 1), so that differences read as points of 0.01


SCORES = {
    "accuracy": Score("Accuracy", "Share of images whose most probable class is the right one.", percent=True),
    "balanced_accuracy": Score(
        "Balanced accuracy", "Mean of the recalls of the classes: a rare class counts as much as a common one.", True
    ),
    "macro_f1": Score("Macro F1", "Mean over classes of F1, which is high only where precision and recall both are."),
    "micro_f1": Score("Micro F1", "F1 of all labels of all images taken together: common labels count most."),
    "kappa": Score("Cohen's kappa", "Agreement with the labels beyond chance: 0 is chance, 1 is perfect."),
    "macro_jaccard": Score(
        "Macro Jaccard", "Mean over classes of hits divided by all images that are, or are said to be, of the class."
    ),
    "macro_auroc": Score(
        "Macro AUROC",
        "Chance that an image of a class is ranked above one of another class, averaged over classes; 0.5 is a coin.",
    ),
    "mean_average_precision": Score(
        "Mean average precision", "Mean over classes of the precision along the ranking by the class's probability."
    ),
    "subset_accuracy": Score("Exact matches", "Share of images whose labels are all right.", percent=True),
    "hamming_loss": Score("Wrong labels", "Share of all label decisions that are wrong.", True, False),
    "nll": Score(
        "Log loss (NLL)", "Mean of -log of the probability given to the truth; a sure error costs most.",
        higher_is_better=False, bounded=False,
    ),
    "brier": Score(
        "Brier score", "Squared distance of the probabilities from the truth.", higher_is_better=False, bounded=False
    ),
    "ece": Score(
        "Calibration error", "Mean gap between confidence and accuracy, over 15 bins of equal width (ECE).", True, False
    ),
    "adaptive_ece": Score(
        "Adaptive calibration error", "The same with bins that hold equally many images.", True, False
    ),
    "classwise_ece": Score(
        "Class-wise calibration error", "The same for the probability of each class, averaged.", True, False
    ),
    "aurc": Score(
        "Area under risk-coverage", "Mean error rate when the least sure images are left out one by one.",
        higher_is_better=False,
    ),
    "precision": Score("Precision", "Of the images said to be of the class, the share that is.", True),
    "recall": Score("Recall", "Of the images of the class, the share that is found (sensitivity).", True),
    "f1": Score("F1", "Harmonic mean of precision and recall."),
    "jaccard": Score("Jaccard", "Hits divided by all images that are, or are said to be, of the class."),
    "auroc": Score("AUROC", "Chance that an image of the class is ranked above one that is not."),
    "average_precision": Score("Average precision", "Precision along the ranking by the probability of the class."),
}  # fmt: skip


def score(name: str) -> Score:
    """The description of a score; one that is not known here is shown under its own name.

    >>> score("top_3_accuracy").title, score("ece_calibrated").title
    ('Top-3 accuracy', 'Calibration error after temperature')
    """
    if name in SCORES:
        return SCORES[name]
    if name.endswith("_calibrated"):
        plain = score(name.removesuffix("_calibrated"))
        return replace(plain, title=f"{plain.title} after temperature")
    if top := re.fullmatch(r"top_(\d+)_accuracy", name):
        k = top[1]
        return Score(f"Top-{k} accuracy", f"Share of images whose right class is among the {k} most probable.", True)
    return Score(name.replace("_", " ").capitalize(), "")


def value_text(value: float | None, name: str) -> str:
    """One value of a score.

    >>> value_text(0.8617, "accuracy"), value_text(0.8617, "kappa"), value_text(None, "kappa")
    ('86.2%', '0.862', '–')
    """
    if value is None:
        return NONE
    return f"{100 * value:.1f}%" if score(name).percent else f"{value:.3f}"


def interval_text(number: Mapping[str, Any], name: str) -> str:
    """The interval of a number alone, in the unit of its score; empty where there is none.

    >>> interval_text({"value": 0.5, "low": 0.4, "high": 0.6}, "accuracy")
    '[40.0, 60.0]'
    """
    low, high = number["low"], number["high"]
    if low is None or high is None:
        return ""
    return f"[{100 * low:.1f}, {100 * high:.1f}]" if score(name).percent else f"[{low:.3f}, {high:.3f}]"


def with_interval(number: Mapping[str, Any], name: str) -> str:
    """Value and interval.

    >>> with_interval({"value": 0.5, "low": None, "high": None}, "accuracy")
    '50.0%'
    """
    return " ".join(text for text in (value_text(number["value"], name), interval_text(number, name)) if text)


def difference_text(value: float | None, name: str) -> str:
    """A difference of two values of a score, with its sign; points are hundredths.

    >>> difference_text(0.021, "accuracy"), difference_text(-0.2, "nll")
    ('+2.1 points', '−0.200')
    """
    if value is None:
        return NONE
    text = f"{100 * value:+.1f} points" if score(name).bounded else f"{value:+.3f}"
    return text.replace("-", "−")


def difference_interval_text(test: Mapping[str, Any], name: str) -> str:
    """The interval of a difference, in the unit of ``difference_text``."""
    low, high = test["low"], test["high"]
    if low is None or high is None:
        return ""
    text = f"[{100 * low:+.1f}, {100 * high:+.1f}]" if score(name).bounded else f"[{low:+.3f}, {high:+.3f}]"
    return text.replace("-", "−")


def p_text(p: float | None) -> str:
    """A p-value as journals print it.

    >>> p_text(0.0004), p_text(0.0625), p_text(0.27)
    ('< 0.001', '0.0625', '0.27')
    """
    if p is None:
        return NONE
    return "< 0.001" if p < 0.001 else f"{p:.3g}"


def signed_text(value: float | None, digits: int = 2) -> str:
    """A number around zero.

    >>> signed_text(-0.314), signed_text(2.0), signed_text(-0.001), signed_text(-0.001, 3)
    ('−0.31', '+2.00', '0.00', '−0.001')
    """
    if value is None:
        return NONE
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if float(text) else text[1:]  # nothing has no sign


def count_text(number: int, what: str, many: str = "") -> str:
    """A count with its noun.

    >>> count_text(1, "image"), count_text(2003, "image"), count_text(2, "class", "classes")
    ('1 image', '2,003 images', '2 classes')
    """
    return f"{number:,} {what if number == 1 else many or what + 's'}"


def duration_text(seconds: float) -> str:
    """How long something took.

    >>> duration_text(42.3), duration_text(600), duration_text(8000)
    ('42 seconds', '10 minutes', '2.2 hours')
    """
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
