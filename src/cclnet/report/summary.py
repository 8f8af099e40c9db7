"""A run in a few sentences, for a reader who reads no further."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cclnet.report.figures import kept_at
from cclnet.report.words import count_text, interval_text, value_text, with_interval

Judged = Mapping[str, Any]


def in_short(judged: Judged) -> list[str]:
    """The findings, most important first, each a whole sentence."""
    sentences = [_how_often_right(judged), _weakest_class(judged), _confidence(judged), _keeping(judged)]
    return [sentence for sentence in sentences if sentence]


def what_it_is(judged: Judged) -> str:
    """Method, network and training data in one line; empty without a model.json."""
    model = judged["model"]
    if not model:
        return ""
    trained = model.get("trained") or {}
    pieces = [f"method {model['method']}", f"network {model['backbone']}"] if "method" in model else []
    pieces += [f"trained on {count_text(trained['images'], 'image')}"] if trained.get("images") else []
    pieces += [f"seed {trained['seed']}"] if trained.get("seed") is not None else []
    return ", ".join(pieces)


def judged_on(judged: Judged) -> str:
    """The part that is reported, with its size."""
    part = judged["part"]
    name = "all images of the file" if part["name"] == "all" else f"the {part['name']} part"
    groups = f" of {count_text(part['groups'], 'group')} (lesions or patients)" if part["groups"] else ""
    classes = count_text(len(judged["classes"]), "class", "classes")
    return f"{name}: {count_text(part['images'], 'image')}{groups}, {classes}"


def _how_often_right(judged: Judged) -> str:
    scores = judged["scores"]
    if judged["task"] == "multi-label":
        ranked, exact = scores["mean_average_precision"], scores["subset_accuracy"]
        return (
            f"The mean average precision is {with_interval(ranked, 'mean_average_precision')}; "
            f"all labels are right for {with_interval(exact, 'subset_accuracy')} of the images."
        )
    return (
        f"The model names the right class for {_with(scores['accuracy'], 'accuracy')} of the images. With every class "
        f"counted equally, rare or common, it is {_with(scores['balanced_accuracy'], 'balanced_accuracy')}."
    )


def _with(number: Mapping[str, Any], name: str) -> str:
    interval = interval_text(number, name)
    ends = interval[1:-1].replace(", ", " to ")
    return value_text(number["value"], name) + (f" (95% interval {ends})" if interval else "")


def _weakest_class(judged: Judged) -> str:
    known = [row for row in judged["per_class"] if row["recall"]["value"] is not None]
    if not known:
        return ""
    worst = min(known, key=lambda row: (row["recall"]["value"], -row["support"]))
    best = max(known, key=lambda row: (row["recall"]["value"], row["support"]))
    if best["recall"]["value"] == worst["recall"]["value"]:
        return ""
    return (
        f"It finds {best['class']} best ({value_text(best['recall']['value'], 'recall')} of "
        f"{count_text(best['support'], 'image')}) and {worst['class']} worst "
        f"({value_text(worst['recall']['value'], 'recall')} of {count_text(worst['support'], 'image')})."
    )


def _confidence(judged: Judged) -> str:
    if judged["task"] == "multi-label":
        return ""
    calibration, accuracy = judged["calibration"], judged["scores"]["accuracy"]["value"]
    before, after = calibration["before"], calibration["after"]
    gap = before["mean_confidence"] - accuracy
    way = "surer than it is right" if gap > 0 else "less sure than it is right"
    error = value_text(before["ece"]["value"], "ece")
    first = f"On average it is {abs(100 * gap):.1f} points {way} (calibration error {error})"
    if after is None:
        return first + "; no temperature could be fitted."
    return first + f"; after one temperature the calibration error is {value_text(after['ece']['value'], 'ece')}."


def _keeping(judged: Judged) -> str:
    if judged["task"] == "multi-label":
        return ""
    side = judged["calibration"]["after"] or judged["calibration"]["before"]
    coverage, risk = kept_at(side, 0.8)
    everything = kept_at(side, 1.0)[1]
    if round(1 - coverage, 2) == 0 or everything == 0:  # all are equally sure, or there is nothing to gain
        return ""
    return (
        f"If the least sure {1 - coverage:.0%} of the images went to a person, {risk:.1%} of the rest would be wrong, "
        f"instead of {everything:.1%}."
    )
