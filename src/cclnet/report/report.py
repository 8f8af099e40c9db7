"""The report of one run: report.html, and the same as report.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cclnet.files import make_folder, write_whole
from cclnet.report.confusions import Confusions, frequent_confusions
from cclnet.report.figures import Figure, kept_at, reliability, risk_coverage, training_curves
from cclnet.report.heat import confusion_table, soft_label_table
from cclnet.report.page import render
from cclnet.report.run_files import RunFiles, flat_settings, read_run
from cclnet.report.summary import in_short, judged_on, what_it_is
from cclnet.report.thumbnails import thumbnails
from cclnet.report.words import duration_text, signed_text

Judged = Mapping[str, Any]

CALIBRATION_SCORES = ("nll", "brier", "ece", "adaptive_ece", "classwise_ece", "aurc")
CLASS_SCORES = ("recall", "precision", "f1", "auroc", "average_precision")
TILES = ("accuracy", "balanced_accuracy", "macro_f1", "kappa", "macro_auroc", "mean_average_precision", "micro_f1",
         "subset_accuracy")  # fmt: skip
REFERRED = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)


def write_report(run: str | Path, judged: Judged, out: str | Path | None = None, data: str | None = None) -> Path:
    """Write report.html and report.md of a judged run; returns the path of the page.

    The page is one file: figures and pictures are inside, nothing is fetched, nothing runs.

    Args:
        run: the run folder, or its predictions.csv.
        judged: what ``cclnet.evaluation.judge.judge(run)`` returned.
        out: the folder to write into; by default that of the run.
        data: where the images are, if they are not where the run's settings say.
    """
    found = read_run(run)
    folder = make_folder(found.folder if out is None else out)
    content = report_content(found, judged, data)
    write_whole(folder / "report.md", render("report.md", **content))
    write_whole(folder / "report.html", render("report.html", **content))
    return folder / "report.html"


def report_content(run: RunFiles, judged: Judged, data: str | None = None) -> dict[str, Any]:
    """Everything the two templates show."""
    classes, correlation = judged["classes"], judged["correlation"]
    confusions = _confusions(judged)
    pictures, pictures_note = thumbnails([m["image"] for m in judged["mistakes"]], run.settings, data)
    curves = training_curves(run.records, correlation and correlation["collapse_softness"])
    return {
        "judged": judged,
        "what": what_it_is(judged),
        "judged_on": judged_on(judged),
        "in_short": in_short(judged),
        "contents": _contents(judged, bool(curves)),
        "tiles": _tiles(judged),
        "class_scores": [name for name in CLASS_SCORES if name in judged["per_class"][0]],
        "confusion": confusion_table(judged["confusion"], classes) if judged["confusion"] else None,
        "confusions": confusions,
        "pictures": pictures,
        "pictures_note": pictures_note,
        "calibration_scores": [name for name in CALIBRATION_SCORES if name in judged["calibration"]["before"]],
        "calibration_sides": _sides(judged),
        "unit": _unit(judged),
        "calibration_figures": _calibration_figures(judged),
        "referral": _referral(judged),
        "soft_labels": soft_label_table(correlation["matrix"], classes) if correlation else None,
        "correlation_words": _correlation_words(judged) if correlation else [],
        "training_figures": curves,
        "training_words": _training_words(run),
        "made": _made(judged),
        "settings": list(flat_settings(run.settings)),
        "versions": _versions(judged),
        "absent": _absent(run, judged),
    }


def _contents(judged: Judged, trained: bool) -> list[tuple[str, str]]:
    entries = [
        ("scores", "Scores", True), ("classes", "Classes", True), ("confusion", "Confusions", judged["confusion"]),
        ("mistakes", "Worst mistakes", judged["mistakes"]), ("calibration", "Calibration", True),
        ("correlation", "Soft labels", judged["correlation"]), ("training", "Training", trained),
        ("split", "Split and leaks", True), ("settings", "Settings", True),
    ]  # fmt: skip
    return [(id, title) for id, title, there in entries if there]


def _tiles(judged: Judged) -> list[tuple[str, Mapping[str, Any]]]:
    first = [(name, judged["scores"][name]) for name in TILES if name in judged["scores"]][:5]
    return [*first, ("ece", judged["calibration"]["before"]["ece"])]


def _confusions(judged: Judged) -> Confusions:
    if not judged["confusion"]:
        return Confusions((), "")
    matrix = judged["correlation"] and judged["correlation"]["matrix"]
    return frequent_confusions(judged["confusion"], judged["classes"], matrix)


def _sides(judged: Judged) -> list[tuple[str, Mapping[str, Any]]]:
    calibration = judged["calibration"]
    after = [("after temperature", calibration["after"])] if calibration["after"] else []
    return [("as trained", calibration["before"]), *after]


def _calibration_figures(judged: Judged) -> list[Figure]:
    calibration = judged["calibration"]
    figures = [reliability(side, f"Reliability {title}", _unit(judged)) for title, side in _sides(judged)]
    return [*figures, risk_coverage(calibration["before"], calibration["after"], _unit(judged))]


def _unit(judged: Judged) -> str:
    """What is judged: with several labels every class of every image is a decision of its own."""
    return "images" if judged["task"] == "single-label" else "decisions"


def _referral(judged: Judged) -> list[tuple[float, float]]:
    side = judged["calibration"]["after"] or judged["calibration"]["before"]
    return [kept_at(side, 1 - referred) for referred in REFERRED] if judged["task"] == "single-label" else []


def _correlation_words(judged: Judged) -> list[str]:
    """What the learned matrix is like, and how far it is to be believed."""
    c = judged["correlation"]
    uniform = c["uniform_smoothing"]
    lines = [
        f"Softness {c['softness']:.3f}: the mean weight a soft label leaves on its own class."
        + (
            f" A dictionary that has learned nothing ends at the collapse point, {c['collapse_softness']:.3f}."
            if c["collapse_softness"] is not None
            else ""
        ),
        f"Uniform label smoothing of the same softness (epsilon {uniform['epsilon']:.3f}) differs from these labels in "
        f"{uniform['distance_mean']:.1%} of the weight on average, {uniform['distance_max']:.1%} at most: the less, "
        "the less the matrix knows about the classes.",
    ]
    if c["rarity_agreement"] is not None:
        lines.append(
            f"Rank correlation with the rarity of the classes {signed_text(c['rarity_agreement'])}: near 1, the matrix "
            "says which classes are rare rather than which look alike."
        )
    if c["confusion_agreement"] is not None:
        lines.append(
            f"Rank correlation with what the model confuses {signed_text(c['confusion_agreement'])}: near 1, the "
            "matrix holds alike what the model mixes up."
        )
    return lines


def _training_words(run: RunFiles) -> str:
    if not run.records:
        return ""
    seconds = [r["seconds"] for r in run.records if isinstance(r.get("seconds"), (int, float))]
    speeds = sorted(r["images_per_second"] for r in run.records if isinstance(r.get("images_per_second"), (int, float)))
    text = f"{len(run.records)} epochs"
    if seconds and math.isfinite(sum(seconds)):
        text += f" in {duration_text(sum(seconds))}"
    if speeds:
        text += f", {speeds[len(speeds) // 2]:,.0f} images a second at the median epoch"
    return text + "."


def _made(judged: Judged) -> list[tuple[str, str]]:
    model = judged["model"] or {}
    trained = model.get("trained") or {}
    lines: list[tuple[str, Any]] = [
        ("Method", model.get("method")),
        ("Network", model.get("backbone")),
        ("Data", trained.get("data")),
        ("Training images", trained.get("images")),
        ("Seed", trained.get("seed")),
        ("Device", trained.get("device")),
        ("Training time", duration_text(trained["seconds"]) if trained.get("seconds") is not None else None),
        ("Soft labels", "taken out of the probabilities again" if model.get("target") else None),
        ("Temperature", judged["calibration"]["temperature"]["value"]),
    ]
    known = [(name, value) for name, value in lines if value is not None]
    return [(name, f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in known]


def _versions(judged: Judged) -> list[tuple[str, str]]:
    trained = ((judged["model"] or {}).get("trained") or {}).get("versions") or {}
    lines = [(f"{name} (training)", str(value)) for name, value in trained.items()]
    return lines + [(f"{name} (judging)", str(value)) for name, value in judged["versions"].items()]


def _absent(run: RunFiles, judged: Judged) -> list[str]:
    """What another run would show, and why this one does not."""
    lines = []
    if not run.records:
        lines.append("training curves (no metrics.jsonl)")
    if not run.settings:
        lines.append("settings (no settings.toml)")
    if judged["model"] is None:
        lines.append("how the model was made (no model.json)")
    if judged["correlation"] is None:
        lines.append("soft labels (no correlation.csv: the method learns none)")
    if judged["confusion"] is None:
        lines.append("confusion matrix and worst mistakes (an image may carry several labels)")
    return lines
