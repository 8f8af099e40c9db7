"""The figures of a run: calibration, risk against coverage, and how training went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from cclnet.report.svg import Axis, Chart, Point
from cclnet.report.words import value_text

Records = Sequence[Mapping[str, Any]]

# What an epoch's record holds beside the terms of its loss.
NOT_A_TERM = {"epoch", "loss", "softness", "frozen", "structure", "lr", "lr_method", "seconds", "images_per_second",
              "classes_never_right"}  # fmt: skip
STYLES = tuple(f"s{i}" for i in range(1, 7))  # colours and dashes of page.css


@dataclass(frozen=True)
class Figure:
    """A chart with its words. ``legend`` pairs a style with the name of what is drawn in it."""

    title: str
    svg: Markup
    caption: str
    legend: tuple[tuple[str, str], ...] = ()


def reliability(side: Mapping[str, Any], title: str, unit: str = "images") -> Figure:
    """Accuracy against confidence, one dot a bin, its area the share of the images (or other units, where an
    image is judged more than once). The stalk to the diagonal is the bin's part in the calibration error."""
    bins = side["reliability"]
    total = sum(b["images"] for b in bins) or 1
    ece = value_text(side["ece"]["value"], "ece")
    listed = "; ".join(f"{b['confidence']:.0%} sure, {b['accuracy']:.0%} right, {b['images']} {unit}" for b in bins)
    chart = Chart(
        Axis(0, 1, "Confidence", percent=True), Axis(0, 1, "Accuracy", percent=True),
        f"{title}: accuracy against confidence in {len(bins)} bins, calibration error {ece}. {listed}.", height=300,
    )  # fmt: skip
    chart.segment((0, 0), (1, 1), "mark")
    for b in bins:
        over = b["confidence"] > b["accuracy"]
        chart.segment((b["confidence"], b["confidence"]), (b["confidence"], b["accuracy"]), f"stalk {_side(over)}")
        words = f"{b['images']:,} {unit}, {b['confidence']:.1%} sure on average, {b['accuracy']:.1%} right"
        radius = 2.5 + 14 * math.sqrt(b["images"] / total)
        chart.dot(b["confidence"], b["accuracy"], f"bubble {_side(over)}", radius, words)
    legend = (("s2 patch", "surer than right"), ("s1 patch", "less sure than right"))
    return Figure(title, chart.markup(), f"Calibration error (ECE) {ece}.", legend)


def _side(over: bool) -> str:
    return "s2" if over else "s1"


def risk_coverage(before: Mapping[str, Any], after: Mapping[str, Any] | None, unit: str = "images") -> Figure:
    """Error rate of what is kept, when the least sure images (or other units) go to a person."""
    curves = [("as trained", before)] + ([("after temperature", after)] if after else [])
    lines = [[(p["coverage"], p["risk"]) for p in side["risk_coverage"]] for _, side in curves]
    highest = max((risk for line in lines for _, risk in line), default=0.0)
    at = "; ".join(f"keeping {c:.0%}: {r:.1%} wrong" for c, r in (kept_at(before, share) for share in (0.5, 0.8, 1.0)))
    chart = Chart(
        Axis(0, 1, f"Share of {unit} kept, surest first", percent=True),
        Axis(0, max(1.08 * highest, 0.01), "Wrong among those kept", percent=True),
        f"Error rate against the share of {unit} kept. {at}.",
        height=300,
    )
    for line, style in zip(lines, STYLES, strict=False):
        chart.line(line, style)
    names = [f"{name}, area {value_text(side['aurc']['value'], 'aurc')}" for name, side in curves]
    caption = f"The lower the better. Far left, few {unit} are kept and the curve is rough."
    return Figure("Risk against coverage", chart.markup(), caption, tuple(zip(STYLES, names, strict=False)))


def kept_at(side: Mapping[str, Any], share: float) -> Point:
    """The point of the risk-coverage curve at a share of images kept (the first that reaches it)."""
    curve = side["risk_coverage"]
    found = next((p for p in curve if p["coverage"] >= share - 1e-9), curve[-1])
    return found["coverage"], found["risk"]


def training_curves(records: Records, collapse: float | None) -> list[Figure]:
    """Losses, terms, validation scores, learning rates and softness over the epochs: those that were recorded."""
    found = [
        _curves(records, ["loss", "val_loss"], "Loss",
                "Total loss in training, and cross entropy on the validation part."),
        _curves(records, loss_terms(records), "Terms of the training loss", "What the training loss is the sum of."),
        _curves(records, validation_scores(records), "Validation", "Scores on the validation part.", percent=True),
        _curves(records, ["lr", "lr_method"], "Learning rate", "Of the network, and of the method's own parameters.",
                log=True),
        softness(records, collapse),
    ]  # fmt: skip
    return [figure for figure in found if figure is not None]


def loss_terms(records: Records) -> list[str]:
    """Names of the terms, in the order of the file."""
    names = dict.fromkeys(name for record in records for name in record)
    terms = [name for name in names if name not in NOT_A_TERM and not name.startswith("val_")]
    return terms[: len(STYLES)] if len(terms) > 1 else []  # a single term is the loss itself


def validation_scores(records: Records) -> list[str]:
    names = dict.fromkeys(name for record in records for name in record)
    return [name for name in names if name.startswith("val_") and name != "val_loss"][: len(STYLES)]


def series(records: Records, name: str) -> list[Point]:
    """The epochs that recorded a finite value under a name."""
    numbers = [(float(r["epoch"]), r[name]) for r in records if isinstance(r.get(name), (int, float))]
    return [(epoch, float(value)) for epoch, value in numbers if math.isfinite(value)]


def _curves(
    records: Records, names: Sequence[str], title: str, caption: str, percent: bool = False, log: bool = False
) -> Figure | None:
    lines = {_plain(name): points for name in names if (points := series(records, name))}
    if not lines:
        return None
    ends = "; ".join(f"{name}: {points[0][1]:.4g} at epoch {points[0][0]:.0f}, {points[-1][1]:.4g} at epoch "
                     f"{points[-1][0]:.0f}" for name, points in lines.items())  # fmt: skip
    values = [value for points in lines.values() for _, value in points]
    y = Axis.around(values, "", percent=percent, log=log, zero=not (log or percent))
    chart = Chart(_epochs(records), y, f"{title} over {len(records)} epochs. {ends}.")
    for points, style in zip(lines.values(), STYLES, strict=False):
        chart.line(points, style)
    return Figure(title, chart.markup(), caption, tuple(zip(STYLES, lines, strict=False)))


def softness(records: Records, collapse: float | None) -> Figure | None:
    """Mean of the soft labels' diagonal over epochs; for a learned dictionary also where it collapses to, and when
    it was frozen."""
    points = series(records, "softness")
    if not points:
        return None
    learned = any("frozen" in record for record in records)
    frozen = next((epoch for epoch, flag in series(records, "frozen") if flag), None)
    level = [collapse] if learned and collapse is not None else []
    words = [f"Softness over {len(records)} epochs, from {points[0][1]:.3f} to {points[-1][1]:.3f}."]
    words += [f"The collapse point is {level[0]:.3f}."] if level else []
    words += [f"The soft labels were frozen at epoch {frozen:.0f}."] if frozen is not None else []
    words += ["The soft labels were never frozen."] if learned and frozen is None else []
    values = [value for _, value in points] + level
    span = [max(values) - 0.1]  # a change in the fourth decimal is no slope
    chart = Chart(_epochs(records), Axis.around(values + span, ""), " ".join(words))
    chart.line(points, "s1")
    if level:
        chart.level(level[0], "collapse point")
    if frozen is not None:
        chart.moment(frozen, f"frozen at {frozen:.0f}")
    caption = "Mean weight that a soft label leaves on its own class: lower is softer."
    if level:
        caption += " At the collapse point all classes are equally far apart and nothing is known about their likeness."
    return Figure("Softness", chart.markup(), " ".join([caption, *words[2:]]))


def _epochs(records: Records) -> Axis:
    last = max(float(record["epoch"]) for record in records)
    return Axis(0, max(last, 1.0), "Epoch", whole=True)


def _plain(name: str) -> str:
    return {"lr": "network", "lr_method": "method", "loss": "training", "val_loss": "validation"}.get(
        name, name.removeprefix("val_").replace("_", " ")
    )
